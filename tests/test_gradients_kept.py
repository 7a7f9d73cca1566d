"""No gradient gets lost without a word: it is eager's, or the call is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lazyinline
from lazyinline import CaptureError, PlanError


class Scaled(nn.Module):
    """A layer whose weight another parameter is multiplied into, outside of the forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.randn(4, 4))

    def loss(self, weight: Tensor, x: Tensor) -> Tensor:
        return (self.linear(x) @ weight).square().mean()


class Rebound(Scaled):
    """The layer's own weight is no parameter any more."""

    def __init__(self) -> None:
        super().__init__()
        weight = self.linear.weight.detach()
        del self.linear.weight
        self.linear.weight = self.scale * weight  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).square().mean()


class InAnAttribute(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.weight = self.scale * 2

    def forward(self, x: Tensor) -> Tensor:
        return self.loss(self.weight, x)


class InABuffer(InAnAttribute):
    def __init__(self) -> None:
        super().__init__()
        weight = self.weight
        del self.weight
        self.register_buffer("weight", weight)


class InAList(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.weights = [self.scale * 2]

    def forward(self, x: Tensor) -> Tensor:
        return self.loss(self.weights[0], x)


class InAClosure(Scaled):
    def __init__(self) -> None:
        super().__init__()
        weight = self.scale * 2
        self.of = lambda x: self.loss(weight, x)

    def forward(self, x: Tensor) -> Tensor:
        return self.of(x)


class InAHook(nn.Module):
    """As weight norm once was: a hook before the forward sets the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.utils.spectral_norm(nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).square().mean()


class OfAnother(Scaled):
    """A hypernetwork that is none of the model's modules."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Linear(2, 16)(torch.ones(2)).view(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.loss(self.weight, x)


COMPUTED = [Rebound, InAnAttribute, InABuffer, InAList, InAClosure, OfAnother]


@pytest.mark.parametrize("make", [*COMPUTED, InAHook])
def test_a_step_refuses_a_weight_that_is_computed_outside(make: type[nn.Module]) -> None:
    step = lazyinline.compile_step(make(), backend="eager")
    with pytest.raises((PlanError, CaptureError), match=r"weight|outside"):
        step(torch.randn(3, 4))


@pytest.mark.parametrize("make", [*COMPUTED, InAHook])
@pytest.mark.sweep(keep=["Rebound", "InABuffer", "InAClosure", "OfAnother", "InAHook"])
def test_compile_gives_its_gradient_to_what_a_weight_is_computed_from(
    make: type[nn.Module],
) -> None:
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = make()
        run = lazyinline.compile(model, backend="eager") if compiled else model
        torch.manual_seed(1)
        run(torch.randn(3, 4)).backward()
        found.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(*found)


def test_a_step_refuses_a_weight_that_is_computed_from_some_step_on() -> None:
    model = InAnAttribute()
    model.weight = model.weight.detach().requires_grad_()
    step = lazyinline.compile_step(model, backend="eager")
    step(torch.randn(3, 4))
    assert model.weight.grad is not None
    model.weight = model.scale * 2
    with pytest.raises(PlanError, match="computed outside"):
        step(torch.randn(3, 4))


class Parametrized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        self.hyper = nn.Linear(2, 16)
        self.register_buffer("code", torch.randn(2))

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) @ self.hyper(self.code).view(4, 4)).square().mean()


def test_a_step_trains_what_the_forward_computes_weights_from() -> None:
    model = Parametrized()
    expected = copy.deepcopy(model)
    step = lazyinline.compile_step(model, backend="eager")
    x = torch.randn(3, 4)
    step(x)
    expected(x).backward()
    for found, wanted in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(found.grad, wanted.grad)


def test_a_step_refuses_a_complex_loss_and_micro_batches_without_rows() -> None:
    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, dtype=torch.complex64))

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.weight).sum()

    with pytest.raises(RuntimeError, match="complex64"):
        Complex()(torch.randn(4)).backward()
    with pytest.raises(CaptureError, match=r"real, not torch\.complex64"):
        lazyinline.compile_step(Complex(), backend="eager")(torch.randn(4))
    step = lazyinline.compile_step(Parametrized(), micro_batches=2, backend="eager")
    with pytest.raises(PlanError, match="cannot be split"):
        step(torch.randn(0, 4))


def in_part(self: Any, x: Tensor) -> Any:
    with torch.enable_grad():
        inner = self.linear(x)
    return inner.detach() * 2, inner


def at_the_end(self: Any, x: Tensor) -> Any:
    with torch.set_grad_enabled(True):
        return self.linear(x).sum()


def of_the_input(self: Any, x: Tensor) -> Any:
    with torch.enable_grad():
        moved = x.detach().requires_grad_()
        energy = self.linear(moved).sum()
        (force,) = torch.autograd.grad(energy, moved)
    return force, x, self.linear.weight


@pytest.mark.parametrize("forward", [in_part, at_the_end, of_the_input])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_grad_mode_switched_inside_gives_results_the_history_that_eager_gives(
    forward: Callable[..., Any], mode: Callable[[], Any]
) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.linear = nn.Linear(4, 4)

    Model.forward = forward  # type: ignore[method-assign,assignment]
    if mode is torch.inference_mode and forward is of_the_input:
        return  # eager refuses it
    model = Model()
    expected = copy.deepcopy(model)
    compiled = lazyinline.compile(model, backend="eager")
    for _ in range(2):
        x = torch.randn(3, 4)
        with mode():
            found, wanted = compiled(x), expected(x)
        found, wanted = (r if isinstance(r, tuple) else (r,) for r in (found, wanted))
        torch.testing.assert_close(found, wanted)
        assert [r.requires_grad for r in found] == [r.requires_grad for r in wanted]
        for one, results in ((model, found), (expected, wanted)):
            one.zero_grad()
            for result in results:
                if result.requires_grad and not result.is_leaf:
                    result.sum().backward()
        torch.testing.assert_close(
            [p.grad for p in model.parameters()], [p.grad for p in expected.parameters()]
        )


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def test_cotangents_in_a_batch_give_a_batch_of_gradients() -> None:
    model = network()
    compiled = lazyinline.compile(copy.deepcopy(model), backend="eager")
    x = torch.randn(3, 4)
    found = []
    for run in (compiled, model):
        given = x.clone().requires_grad_()
        sources = (given, *run.parameters())
        cotangents = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
        found.append(torch.autograd.grad(run(given), sources, cotangents, is_grads_batched=True))
    torch.testing.assert_close(*found)


def test_derivatives_by_vectorized_rows_are_eagers() -> None:
    model = network()
    compiled = lazyinline.compile(copy.deepcopy(model), backend="eager")
    x = torch.randn(3, 4)
    jacobians = [
        torch.autograd.functional.jacobian(run, x, vectorize=True) for run in (compiled, model)
    ]
    torch.testing.assert_close(*jacobians)
    hessians = [
        torch.autograd.functional.hessian(lambda x, run=run: run(x).sum(), x, vectorize=True)
        for run in (compiled, model)
    ]
    torch.testing.assert_close(*hessians)


def test_a_batch_of_gradients_that_is_to_be_differentiated_is_refused_in_words() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    result = lazyinline.compile(network(), backend="eager")(x)
    rows = torch.randn(2, 3, 4)
    with pytest.raises(PlanError, match="one by one"):
        torch.autograd.grad(result, x, rows, is_grads_batched=True, create_graph=True)
