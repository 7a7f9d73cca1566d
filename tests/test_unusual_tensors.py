"""Tensors whose memory is not their numbers, or that are more than numbers, at each door."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from comparing import assert_close, assert_equals_eager, twin
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import lazyinline
from lazyinline import CaptureError, CompiledModule, PipelineError, PlanError
from lazyinline.frontend.pipeline import Batch

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


class Of(nn.Module):
    """A function as a model, with what a test lets it hold."""

    def __init__(self, run: Callable[..., Any], **held: Any) -> None:
        super().__init__()
        self.run, self.linear = run, nn.Linear(4, 4)
        for name, value in held.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x)


def make(backend: str) -> tuple[CompiledModule, nn.Module]:
    torch.manual_seed(0)
    model = Net()
    return lazyinline.compile(model, backend=backend), twin(model)


def assert_same_kind(found: Tensor, wanted: Tensor) -> None:
    """Compares classes, and the numbers behind them."""
    assert type(found) is type(wanted)
    inner = [x.inner if isinstance(x, Doubling) else x.as_subclass(Tensor) for x in (found, wanted)]
    torch.testing.assert_close(inner[0].detach(), inner[1].detach())


def assert_same_runs(
    compiled: nn.Module,
    expected: nn.Module,
    x: Tensor,
    cotangent: Tensor | None = None,
    hook: Callable[[Tensor], Tensor] | None = None,
) -> None:
    """Output and every gradient, that of the input too, in training and in inference."""
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), expected(x))
    seen = []
    for run in (compiled, expected):
        run.zero_grad()
        start = torch.ones_like(x, requires_grad=True)
        out = run(x if cotangent is None else start * x)
        if hook is not None:
            out.register_hook(hook)
        out.backward(torch.ones_like(out) if cotangent is None else cotangent)
        grads = [start.grad, *(p.grad for p in run.parameters())]
        seen.append([out.detach(), *(g for g in grads if g is not None)])
    assert_close(*([*map(torch.clone, one)] for one in seen))


@pytest.mark.parametrize("kind", LAZY)
@pytest.mark.sweep(keep=["eager", "inductor-imaginary"])
def test_inputs_whose_memory_holds_other_numbers(kind: str, backend: str) -> None:
    compiled, expected = make(backend)
    plain = torch.randn(3, 4)
    for x in (plain, LAZY[kind](plain), plain):
        assert_same_runs(compiled, expected, x)
        assert bool(compiled.last_report.ran_eagerly) == (x is not plain)


def test_results_of_lazy_zeros_are_laid_out_as_in_eager() -> None:
    model = Of(lambda self, x: x + x.t().contiguous().t().mul_(2))
    compiled, zeros = lazyinline.compile(model, backend="eager"), torch._efficientzerotensor((3, 4))
    assert compiled(zeros).stride() == model(zeros).stride() == (1, 3)
    assert "lazily zero" in compiled.last_report.ran_eagerly


@pytest.mark.parametrize("kind", LAZY)
@pytest.mark.sweep(keep="eager")
def test_cotangents_whose_memory_holds_other_numbers(kind: str, backend: str) -> None:
    compiled, expected = make(backend)
    x, cotangent = torch.randn(3, 4), LAZY[kind](torch.randn(3, 4))
    assert_same_runs(compiled, expected, x, cotangent)
    assert_same_runs(compiled, expected, x, hook=LAZY[kind])  # the same from a hook


def test_a_cotangent_with_a_function_of_its_own_is_as_in_eager(backend: str) -> None:
    compiled, expected = make(backend)
    assert_same_runs(compiled, expected, torch.randn(3, 4), torch.randn(3, 4).as_subclass(Named))
    with pytest.raises(PlanError, match="Doubling as a cotangent"):
        compiled(torch.ones(3, 4)).backward(Doubling(torch.ones(3, 4)))
    assert_same_runs(compiled, expected, torch.randn(3, 4), torch.randn(3, 4))


@pytest.mark.parametrize("kind", WATCHING)
def test_inputs_whose_class_sees_operators_run_the_model_itself(kind: str) -> None:
    compiled, expected = make("eager")
    plain = torch.randn(3, 4)
    for x in (plain, WATCHING[kind](plain)):
        for grad in (False, True):
            with torch.set_grad_enabled(grad):
                found = compiled(x)
                assert_same_kind(found, expected(x))
    assert type(found).__name__ in compiled.last_report.ran_eagerly
    torch.testing.assert_close(compiled(plain), expected(plain))


@pytest.mark.parametrize("kind", WATCHING)
@pytest.mark.parametrize("is_parameter", [True, False], ids=["parameter", "buffer"])
def test_state_whose_class_sees_operators_runs_the_model_itself_whenever_it_comes(
    kind: str, is_parameter: bool
) -> None:
    model, x = Of(lambda self, x: x * self.scale), torch.randn(3, 4)
    model.register_buffer("scale", torch.ones(4))
    compiled = lazyinline.compile(model, backend="eager")
    step = lazyinline.compile_step(nn.Sequential(nn.Linear(4, 4), model), loss_fn=torch.sum)
    torch.testing.assert_close(compiled(x), model(x))
    scale = WATCHING[kind](torch.full((4,), 3.0))
    if is_parameter:
        del model.scale
        scale = nn.Parameter(scale)
    model.scale = scale
    assert_same_kind(compiled(x), model(x))
    assert "scale is a " in compiled.last_report.ran_eagerly
    with pytest.raises(PlanError, match=r"scale is a .*intercepts operators"):
        step(x)


@pytest.mark.sweep(keep="eager")
def test_an_input_that_is_changed_or_returned_stays_the_callers(backend: str) -> None:
    model = Of(lambda self, x: x.add_(1) * 2)
    compiled = lazyinline.compile(model, backend=backend)
    returned = lazyinline.compile(Of(lambda self, x: (x, x * 2)), backend=backend)
    memory = torch.randn(3, 4)
    for make_input in (lambda m: m, torch._neg_view, lambda m: torch.complex(m, m).conj().imag):
        ours, theirs = make_input(memory.clone()), make_input(memory.clone())
        assert torch.equal(compiled(ours), model(theirs))
        assert torch.equal(ours, theirs)
        assert returned(ours)[0] is ours


def test_what_an_attribute_or_a_global_holds_is_refused_if_its_memory_holds_other_numbers() -> None:
    for make_table in (*LAZY.values(), *WATCHING.values()):
        table = [make_table(torch.randn(3, 4))]
        model = Of(lambda self, x: (self.linear(x) * self.table[0]).sum(), table=table)
        for run in (lazyinline.compile(model, fallback="error"), lazyinline.compile_step(model)):
            with pytest.raises((PlanError, CaptureError), match=r"memory|Named"):
                run(torch.ones(3, 4))


@pytest.mark.parametrize("kind", LAZY)
@pytest.mark.sweep(keep="efficient")
def test_batches_of_steps_lie_in_memory_and_those_of_pipelines_in_any(kind: str) -> None:
    plain = torch.randn(4, 4)
    lazy = LAZY[kind](plain)
    step = lazyinline.compile_step(Net(), backend="eager", loss_fn=torch.sum)
    step(plain)
    with pytest.raises(PlanError, match=r"lazily .*: hand in what (resolve_neg|clone)\(\) returns"):
        step(lazy)
    parts = [part for (part,) in Batch(((plain,), {}), 2).split((lazy,), {})]
    assert torch.equal(torch.cat(parts), lazy) and not any(p.is_neg() for p in parts)


@pytest.mark.parametrize("kind", WATCHING)
def test_batches_whose_class_sees_operators_are_refused_by_steps_and_pipelines(kind: str) -> None:
    plain = torch.randn(4, 4)
    step = lazyinline.compile_step(Net(), backend="eager", loss_fn=torch.sum)
    step(plain)
    with pytest.raises(PlanError, match="class intercepts operators"):
        step(WATCHING[kind](plain))
    with pytest.raises(PipelineError, match="class intercepts operators"):
        Batch(((plain,), {}), 2).split((WATCHING[kind](plain),), {})


class Imaginary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).square().sum().conj().imag


@pytest.mark.sweep(keep="eager")
def test_a_loss_that_is_negated_only_in_name(backend: str) -> None:
    model, x = Imaginary(), torch.randn(4)
    want = model(x)
    assert want.is_neg()
    loss = lazyinline.compile_step(twin(model), backend=backend)(x)
    assert torch.allclose(loss, want.detach())
    for door in ("step", "compile"):
        assert_equals_eager(twin(model), (x,), calls=1, backend=backend, door=door)  # type: ignore[arg-type]
