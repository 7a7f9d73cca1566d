"""Tensors whose memory is not their numbers, or that are more than numbers, at each door."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from comparing import relative_error, twin
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import lazyinline
from lazyinline import CaptureError, CompiledModule, PipelineError, PlanError
from lazyinline.frontend.pipeline import Batch


@pytest.fixture(params=["eager", "inductor"])
def backend(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


LAZY: dict[str, Callable[[Tensor], Tensor]] = {
    "negated": torch._neg_view,
    "imaginary part of a conjugate": lambda x: torch.complex(x, -x).conj().imag,
    "transposed and negated": lambda x: torch._neg_view(x.t().contiguous().t()),
    "efficient zeros": lambda x: torch._efficientzerotensor(x.shape),
}


class Named(Tensor):
    """Results are of this class, too."""


class Doubling(Tensor):
    """Holds a tensor, not its numbers; each operator doubles."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = tree_map(lambda x: x.inner if isinstance(x, cls) else x, (args, kwargs or {}))
        result = func(*plain[0], **plain[1])
        return tree_map(lambda x: cls(x * 2) if isinstance(x, Tensor) else x, result)


WATCHING: dict[str, Callable[[Tensor], Tensor]] = {
    "a function of its own": lambda x: x.as_subclass(Named),
    "operators of its own": Doubling,
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) * x


def make(backend: str) -> tuple[CompiledModule, nn.Module]:
    torch.manual_seed(0)
    model = Net()
    return lazyinline.compile(model, backend=backend), twin(model)


def numbers(tensor: Tensor) -> Tensor:
    return tensor.inner if isinstance(tensor, Doubling) else tensor.detach().as_subclass(Tensor)


def assert_same_runs(compiled: nn.Module, expected: nn.Module, x: Tensor, **kwargs: Any) -> None:
    """Output and every gradient, that of the input too, in training and in inference."""
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), expected(x))
    found = []
    for run in (compiled, expected):
        run.zero_grad()
        start = torch.ones_like(x, requires_grad=True)
        out = run(start * x if kwargs.get("through", True) else x)
        out.backward(kwargs.get("cotangent", torch.ones_like(out)))
        found.append([out, *(p.grad for p in run.parameters()), start.grad])
    for have, want in zip(*found, strict=True):
        assert (have is None) == (want is None)
        assert have is None or relative_error(have, want) <= 1e-5


@pytest.mark.parametrize("kind", LAZY)
@pytest.mark.sweep(keep=["eager", "inductor-imaginary"])
def test_inputs_whose_memory_holds_other_numbers(kind: str, backend: str) -> None:
    compiled, expected = make(backend)
    plain = torch.randn(3, 4)
    for x in (plain, LAZY[kind](plain), plain):
        assert_same_runs(compiled, expected, x, through=False)
        assert bool(compiled.last_report.ran_eagerly) == x._is_zerotensor()


def test_results_of_lazy_zeros_are_laid_out_as_in_eager() -> None:
    class Doubled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + x.t().contiguous().t().mul_(2)

    model, zeros = Doubled(), torch._efficientzerotensor((3, 4))
    compiled = lazyinline.compile(model, backend="eager")
    assert compiled(zeros).stride() == model(zeros).stride() == (1, 3)
    assert "lazy zero" in compiled.last_report.ran_eagerly


@pytest.mark.parametrize("kind", LAZY)
@pytest.mark.sweep(keep="eager")
def test_cotangents_whose_memory_holds_other_numbers(kind: str, backend: str) -> None:
    compiled, expected = make(backend)
    cotangent = LAZY[kind](torch.randn(3, 4))
    assert_same_runs(compiled, expected, torch.randn(3, 4), cotangent=cotangent)
    found = []
    for run in (compiled, expected):  # the same from a hook
        run.zero_grad()
        out = run(torch.ones(3, 4))
        out.register_hook(lambda gradient: LAZY[kind](gradient))
        out.sum().backward()
        found.append([p.grad for p in run.parameters()])
    for have, want in zip(*found, strict=True):
        assert relative_error(have, want) <= 1e-5


def test_a_cotangent_with_a_function_of_its_own_is_as_in_eager(backend: str) -> None:
    compiled, expected = make(backend)
    cotangent = torch.randn(3, 4).as_subclass(Named)
    assert_same_runs(compiled, expected, torch.randn(3, 4), cotangent=cotangent)
    with pytest.raises(PlanError, match="Doubling as a cotangent"):
        compiled(torch.ones(3, 4)).backward(Doubling(torch.ones(3, 4)))
    assert_same_runs(compiled, expected, torch.randn(3, 4))


@pytest.mark.parametrize("kind", WATCHING)
def test_inputs_whose_class_sees_operators_run_the_model_itself(kind: str) -> None:
    compiled, expected = make("eager")
    plain = torch.randn(3, 4)
    for x in (plain, WATCHING[kind](plain)):
        for grad in (False, True):
            with torch.set_grad_enabled(grad):
                found, want = compiled(x), expected(x)
            assert type(found) is type(want)
            torch.testing.assert_close(numbers(found), numbers(want))
    assert type(found).__name__ in compiled.last_report.ran_eagerly
    torch.testing.assert_close(compiled(plain), expected(plain))


@pytest.mark.parametrize("kind", WATCHING)
@pytest.mark.parametrize("register", ["parameter", "buffer"])
def test_parameters_whose_class_sees_operators_run_the_model_itself(
    kind: str, register: str
) -> None:
    """Also when they come after the compile."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale

    model, x = Scaled(), torch.randn(3, 4)
    compiled = lazyinline.compile(model, backend="eager")
    step = lazyinline.compile_step(nn.Sequential(nn.Linear(4, 4), model), loss_fn=torch.sum)
    torch.testing.assert_close(compiled(x), model(x))
    scale = WATCHING[kind](torch.full((4,), 3.0))
    if register == "parameter":
        del model.scale
        model.scale = nn.Parameter(scale)
    else:
        model.scale = scale
    found, want = compiled(x), model(x)
    assert type(found) is type(want)
    torch.testing.assert_close(numbers(found), numbers(want))
    assert "scale is a " in compiled.last_report.ran_eagerly
    with pytest.raises(PlanError, match=r"scale is a .*intercepts operators"):
        step(x)


@pytest.mark.sweep(keep="eager")
def test_an_input_that_is_changed_or_returned_stays_the_callers(backend: str) -> None:
    class Changing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x.add_(1)
            return x * 2

    class Returning(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x, x * 2

    model, returning = Changing(), Returning()
    compiled = lazyinline.compile(model, backend=backend)
    returned = lazyinline.compile(returning, backend=backend)
    memory = torch.randn(3, 4)
    for make_input in (lambda m: m, torch._neg_view, lambda m: torch.complex(m, m).conj().imag):
        ours, theirs = make_input(memory.clone()), make_input(memory.clone())
        assert torch.equal(compiled(ours), model(theirs))
        assert torch.equal(ours, theirs)
        assert returned(ours)[0] is ours


def test_what_an_attribute_or_a_global_holds_is_refused_if_its_memory_holds_other_numbers() -> None:
    class Held(nn.Module):
        def __init__(self, table: Tensor) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.table = [table]

        def forward(self, x: Tensor) -> Tensor:
            return (self.linear(x) * self.table[0]).sum()

    for make_table in (*LAZY.values(), *WATCHING.values()):
        model = Held(make_table(torch.randn(3, 4)))
        for run in (lazyinline.compile(model, fallback="error"), lazyinline.compile_step(model)):
            with pytest.raises((PlanError, CaptureError), match=r"memory|Named"):
                run(torch.ones(3, 4))


@pytest.mark.parametrize("kind", [*LAZY, *WATCHING])
@pytest.mark.sweep(keep=["eager-negated", "eager-imaginary", "eager-efficient", "eager-a function"])
def test_batches_of_steps_and_pipelines(kind: str, backend: str) -> None:
    torch.manual_seed(0)
    model = Net()
    expected = twin(model)
    step = lazyinline.compile_step(model, backend=backend, loss_fn=torch.sum)
    plain = torch.randn(4, 4)
    batch = Batch(((plain,), {}), 2)
    if kind in WATCHING:
        step(plain)
        with pytest.raises(PlanError, match="class intercepts operators"):
            step(WATCHING[kind](plain))
        with pytest.raises(PipelineError, match="class intercepts operators"):
            batch.split((WATCHING[kind](plain),), {})
        return
    for x in (plain, LAZY[kind](plain), plain):
        expected.zero_grad()
        want = expected(x).sum()
        want.backward()
        assert relative_error(step(x), want.detach()) <= 1e-5
        for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
            assert relative_error(ours.grad, theirs.grad) <= 1e-5  # type: ignore[arg-type]
        parts = [part for (part,) in batch.split((x,), {})]
        assert torch.equal(torch.cat(parts), x) and not any(p.is_neg() for p in parts)


@pytest.mark.sweep(keep="eager")
def test_a_loss_that_is_negated_only_in_name(backend: str) -> None:
    class Imaginary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, dtype=torch.complex64))

        def forward(self, x: Tensor) -> Tensor:
            return (self.weight * x).square().sum().conj().imag

    model = Imaginary()
    expected, x = twin(model), torch.randn(4)
    want = expected(x)
    want.backward()
    loss = lazyinline.compile_step(model, backend=backend)(x)
    assert want.is_neg() and torch.allclose(loss, want.detach())
    torch.testing.assert_close(model.weight.grad, expected.weight.grad)
    model.zero_grad()
    out = lazyinline.compile(model, backend=backend)(x)
    out.backward()
    assert torch.allclose(out, want)
    torch.testing.assert_close(model.weight.grad, expected.weight.grad)
