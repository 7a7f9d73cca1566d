"""`create_graph=True` through a compiled module: gradients of gradients, to any order."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from comparing import assert_equals_eager, sgd
from models import WIDTH, Attention, Made, block
from test_forward_mode import changes_in_place, stops_a_region, stops_a_value
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import lazyinline
from lazyinline import PlanError
from lazyinline.autodiff.flows import Draws
from lazyinline.autodiff.training_program import GradientPrograms
from lazyinline.frontend.compiler import Compiler
from lazyinline.frontend.passes import programs
from lazyinline.reuse.errors import NotDifferentiatedError
from lazyinline.reuse.ir.operators import is_draw

Residual = block(lambda self, x: x + self.linear(x).tanh())


def net(num_layers: int = 2, kind: Callable[[], nn.Module] = Residual) -> nn.Module:
    layers = [kind() for _ in range(num_layers)]
    return nn.Sequential(nn.Linear(2, WIDTH), *layers, nn.Linear(WIDTH, 1))


def points(num: int = 5, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num, 2, dtype=torch.float64, generator=generator)


def gradient(y: Tensor, x: Tensor) -> Tensor:
    (found,) = torch.autograd.grad(y, x, create_graph=True)
    return found


def penalty(model: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    x = x.requires_grad_()
    y = model(x)
    slope = gradient(y.sum(), x)
    return y.square().mean() + (slope.norm(dim=1) - 1).square().mean()


def third_order(model: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    x = x.requires_grad_()
    first = gradient(model(x).sin().sum(), x)
    second = gradient(first.pow(2).sum(), x)
    return gradient(second.pow(3).sum(), x).sum()


def assert_same(model: nn.Module, loss: Callable[..., Tensor], *args: Any, **options: Any) -> Any:
    """Compares a loss, and gradients, with those of eager; returns what became of the model."""
    return assert_equals_eager(model.double(), args, use=loss, **{"calls": 1, **options})


def of_a_function(model: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Its first backward is given a cotangent that is a function of the output."""
    x = x.requires_grad_()
    return gradient(model(x).exp().prod(), x).square().sum()


def of_some_parameters(model: nn.Module, x: Tensor) -> Tensor:
    """With frozen parameters, and an input without a gradient."""
    model.get_submodule("0").requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    slopes = torch.autograd.grad(model(x).square().sum(), trained, create_graph=True)
    return torch.stack([s.square().sum() for s in slopes]).sum()


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("loss", [penalty, third_order, of_a_function, of_some_parameters])
@pytest.mark.sweep(keep=["penalty-inductor", "function-eager", "some_parameters-eager"])
def test_gradients_of_gradients_equal_eager(loss: Any, backend: str) -> None:
    assert_same(net(1), loss, points(), backend=backend)


def test_a_penalty_trains_as_in_eager_over_several_steps_of_any_size() -> None:
    batches = [(points(num, step),) for step, num in enumerate((5, 5, 7))]
    assert_same(net(), penalty, batches=batches, optimizer=torch.optim.AdamW)


def test_a_hessian_vector_product_of_attention_equals_eager() -> None:
    def products(run: nn.Module, x: Tensor) -> list[Tensor]:
        parameters = list(run.parameters())
        with sdpa_kernel(SDPBackend.MATH):  # the only one with a second derivative in eager
            loss = run(x).square().sum()
            gradients = torch.autograd.grad(loss, parameters, create_graph=True)
            along = sum(g.sum() for g in gradients)
            return [*(g.detach() for g in gradients), *torch.autograd.grad(along, parameters)]

    assert_same(Attention(), products, torch.randn(2, 5, 8, dtype=torch.float64))


STOPPING: dict[str, Callable[[Tensor], Tensor]] = {
    "a value": stops_a_value,
    "a region": stops_a_region,
    "a change in place": changes_in_place,
    "one of two results": lambda x: x.sort(-1)[0].sigmoid() * x,
}


@pytest.mark.parametrize("name", STOPPING)
@pytest.mark.parametrize("loss", [penalty, third_order])
@pytest.mark.sweep(keep=["penalty-a region", "penalty-a change", "penalty-one of two"])
def test_what_stops_a_gradient_stops_it_at_every_order(name: str, loss: Any) -> None:
    kind = block(lambda self, x: STOPPING[name](self.linear(x)) + x)
    assert_same(net(kind=kind), loss, points())


def test_a_determinant_has_a_second_derivative_where_singular_values_are_equal() -> None:
    def loss(model: Any, x: Tensor) -> Tensor:
        return gradient(model(x), x).square().sum()

    matrices = torch.eye(3).double().repeat(2, 1, 1)
    matrices[1] += torch.arange(9.0).reshape(3, 3) / 9
    model = Made(lambda self, x: torch.det(x @ x.mT + torch.eye(3, dtype=x.dtype)).sum())
    assert_same(model, loss, matrices.requires_grad_(), fallback="error")


def test_gradients_that_are_constants_are_there_at_every_call() -> None:
    def slopes(model: Any, x: Tensor, y: Tensor, place: int) -> list[Tensor]:
        first, _ = torch.autograd.grad(
            model(x, y)[place].sum(), (x, y), create_graph=True, allow_unused=True
        )
        rest = torch.autograd.grad(first.square().sum(), (x, y)) if place else ()
        return [first.detach(), *rest]

    x, y = points().requires_grad_(), points(seed=2).requires_grad_()
    model = Made(lambda self, x, y: (x + 1, (x * y).sin()))
    assert_same(model, slopes, batches=[(x, y, place) for place in (1, 0, 1, 0)])


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_an_input_of_inference_mode_that_no_derivative_needs_is_taken_as_in_eager(
    backend: str,
) -> None:
    with torch.inference_mode():
        shift = points(seed=1)
    model, x = Made(lambda self, x, y: (x + y).sin() * x), points().requires_grad_()
    # Inductor computes the sum again in the backward, from a copy.
    assert_same(model, lambda run, x: run(x, shift), x, calls=2, backend=backend)


def test_each_different_closure_is_differentiated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = []
    original = Compiler.compile_gradients

    def counted(self: Compiler, *args: Any) -> Any:
        linker, state = original(self, *args)
        assert state.gradients is not None
        nodes.append(len(state.gradients.program.closures))
        return linker, state

    monkeypatch.setattr(Compiler, "compile_gradients", counted)
    for num_layers in (2, 4):
        report = assert_same(net(num_layers), penalty, points()).told
        assert report.num_gradients == 1 and "to be differentiated: 1" in str(report)
    assert nodes[0] == nodes[1]


def test_a_module_whose_gradient_nobody_differentiates_makes_no_program_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(GradientPrograms, "of", None)
    slope = lambda run, x: gradient(run(x).sum(), x).detach()  # noqa: E731
    assert assert_same(net(), slope, points().requires_grad_()).told.num_gradients == 0


def normed(forward: Callable[[Any, Tensor], Tensor]) -> Callable[[], nn.Module]:
    kind = block(forward)
    return lambda: kind(norm=nn.BatchNorm1d(WIDTH))


class Rounded(torch.autograd.Function):
    """A step that lets its gradient through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        return cotangent


def batched(model: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    y = model(x.requires_grad_())
    options: dict[str, Any] = {"is_grads_batched": True, "retain_graph": True}
    (rows,) = torch.autograd.grad(y, x, torch.eye(len(y), dtype=y.dtype)[..., None], **options)
    return y.sum() + rows.square().sum()


@pytest.mark.sweep(keep=["last-penalty", "first-batched"])
@pytest.mark.parametrize("loss", [penalty, third_order, batched])
@pytest.mark.parametrize("first", [True, False], ids=["changed first", "changed last"])
def test_what_runs_again_finds_a_buffer_as_the_forward_found_it(
    loss: Callable[..., Tensor], first: bool
) -> None:
    def counting(self: Any, x: Tensor) -> Tensor:
        if first:
            self.norm.running_mean.lerp_(x.detach().mean(0), 0.1)
        y = (x - self.norm.running_mean).tanh()
        if not first:
            self.norm.running_mean.lerp_(x.detach().mean(0), 0.1)
        return y

    assert_same(net(kind=normed(counting)), loss, batches=[(points(num),) for num in (5, 5, 7)])


def test_a_function_with_its_own_derivative_is_differentiated_twice_by_autograd() -> None:
    kind = block(lambda self, x: x * Rounded.apply(self.linear(x)).tanh())
    with pytest.warns(UserWarning, match="operator by operator.*Rounded"):
        told = assert_same(net(1, kind), penalty, points()).told
    assert any("Rounded" in one for one in told.eager_kernels)
    with pytest.warns(UserWarning, match="operator by operator.*Rounded"):  # symbols for sizes, too
        batches = [(points(num),) for num in (5, 7)]
        assert_same(net(1, kind), third_order, batches=batches, dynamic=True)
    strict = lazyinline.compile(net(1, kind).double(), backend="eager", fallback="error")
    with pytest.raises(PlanError, match="Rounded"):
        penalty(strict, points()).backward()


@pytest.mark.smoke
def test_batch_norm_trains_by_its_gradients_gradient_as_in_eager() -> None:
    """Running statistics move on between a forward and what is differentiated: nobody uses them."""

    def loss(model: Any, x: Tensor) -> Tensor:
        trained = list(model.parameters())
        slopes = torch.autograd.grad(model(x).sin().sum(), trained, create_graph=True)
        found = penalty(model, x) + sum(slope.square().sum() for slope in slopes) / 1000
        model(x.detach() + 1)
        return found

    kind = normed(lambda self, x: x + self.norm(self.linear(x)).tanh())
    batches = [(points(seed=seed),) for seed in range(2)]
    assert_same(net(1, kind), loss, batches=batches, optimizer=sgd)


def dropping(self: Any, x: Tensor) -> Tensor:
    """Draws three masks, of which one is never read, and slopes."""
    nn.functional.dropout(x, 0.3, self.training)
    x = nn.functional.dropout(x, 0.4, self.training)
    x = x * nn.functional.rrelu(x, training=self.training)
    x = nn.functional.rrelu(x * 1, training=self.training, inplace=True)
    return x + nn.functional.dropout(self.linear(x).tanh(), 0.2, self.training)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("loss", [penalty, third_order])
@pytest.mark.sweep(keep="penalty-eager")
def test_masks_are_those_of_the_forward_at_every_order(loss: Any, backend: str) -> None:
    def drawing_between(model: Any, x: Tensor) -> Tensor:
        found: Tensor = loss(lambda x: (model(x), torch.rand(3))[0], x)
        return found

    batches = [(points(seed=seed),) for seed in range(2)]
    assert_same(net(kind=block(dropping)), drawing_between, batches=batches, backend=backend)


def test_dropout_of_nothing_or_everything_draws_nothing() -> None:
    """Neither in eager's kernels, nor as it is counted where a gradient has to draw the same."""
    names = ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
    for name, p in itertools.product((*names, *(f"{n}_" for n in names)), (0.0, 1.0)):
        before = torch.get_rng_state()
        graph = torch.fx.Graph()
        node = graph.call_function(getattr(torch.ops.aten, name).default, (None, p, True))
        node.target(torch.ones(2, 3), p, True)
        assert torch.equal(before, torch.get_rng_state()) and not is_draw(node), name
    drop = nn.functional.dropout
    kind = block(lambda self, x: drop(x + self.linear(x).tanh(), 0.0) + drop(x.sin(), 1.0))
    assert_same(net(1, kind), penalty, points())


def test_what_a_gradient_would_draw_otherwise_is_drawn_operator_by_operator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a GPU, say; and the numbers are those of the forward all the same."""
    refuse = mock.Mock(side_effect=NotDifferentiatedError("on cuda"))
    monkeypatch.setattr(programs, "_require_same_draws", refuse)
    with pytest.warns(UserWarning, match="operator by operator. on cuda"):
        assert_same(net(1, block(dropping)), third_order, points())


def test_what_a_gradient_would_draw_otherwise_is_found() -> None:
    program: Any = SimpleNamespace(calls=[])
    counted = [Counter(cpu=2), Counter(cpu=1), Counter(cuda=1), Counter(cuda=1)]
    with mock.patch.object(Draws, "of", side_effect=counted):
        for counts in ("2 on cpu and 1 on cpu", "1 on cuda and 1 on cuda"):
            with pytest.raises(NotDifferentiatedError, match=f"random numbers.* draw {counts}"):
                programs._require_same_draws(program, program)
