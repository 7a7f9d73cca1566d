"""Hooks on saved tensors may give back other layouts; other types are an error."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from comparing import assert_close, assert_equals_eager, assert_same_gradients, twin
from torch import Tensor, nn

import lazyinline
from lazyinline.reuse.errors import PlanError

Pair = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


class Mixed(nn.Module):
    """Needs its input, a parameter and a result again."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.down(torch.sigmoid(self.up(x)) * 2).t())


def strided(tensor: Tensor) -> Tensor:
    """The same numbers, in another order in memory."""
    return tensor.clone().t().contiguous().t() if tensor.dim() == 2 else tensor.clone()


KEEPING: dict[str, Pair] = {
    "same": (lambda t: t, lambda t: t),
    "contiguous": (lambda t: t.contiguous(), lambda t: t),
    "turned": (lambda t: t, strided),
    "negated": (lambda t: torch.neg(t), lambda t: torch._neg_view(t)),
    "through half": (lambda t: t.double(), lambda t: t.float()),
    "through numpy": (lambda t: t.detach().numpy().copy(), torch.from_numpy),
    # As PyTorch's own hook, which pins memory, lays out anew.
    "to contiguous memory": (lambda t: torch.empty(t.size(), dtype=t.dtype).copy_(t), lambda t: t),
}
CHANGING: dict[str, tuple[Pair, str]] = {
    "half": ((lambda t: t.half(), lambda t: t), "f16"),
    "flat": ((lambda t: t, lambda t: t.flatten()), r"f32\[\d+\]"),
    "meta": ((lambda t: t, lambda t: t.to("meta")), "meta"),
}


@pytest.mark.sweep(keep="inductor")
def test_what_hooks_give_back_in_another_layout_is_read_right(backend: str) -> None:
    torch.manual_seed(0)
    model = Mixed()
    expected = twin(model)
    compiled = lazyinline.compile(model, backend=backend)
    # Longer steps let rounding grow: eager then is as far from float64 as from any other order.
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (model, expected)]
    for pack, unpack in KEEPING.values():
        inputs = [torch.randn(6, 5).t().requires_grad_() for _ in range(2)]
        inputs[1].data = inputs[0].data.clone(memory_format=torch.preserve_format)
        for run, x in zip((compiled, expected), inputs, strict=True):
            run.zero_grad()
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                loss = run(x).square().sum()
            loss.backward()
            with torch.autograd.graph.save_on_cpu():
                run(x).square().sum().backward()
        assert_same_gradients(model, expected)
        assert_close(inputs[0].grad, inputs[1].grad)
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.parametrize("kind", CHANGING)
def test_what_hooks_give_back_of_another_type_is_an_error_and_the_next_step_is_right(
    kind: str,
) -> None:
    model = Mixed()
    expected = twin(model)
    compiled = lazyinline.compile(model, backend="eager")
    x = torch.randn(5, 6)
    (pack, unpack), message = CHANGING[kind]
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        loss = compiled(x).sum()
    with pytest.raises(PlanError, match=message):
        loss.backward()
    compiled(x).sum().backward()
    expected(x).sum().backward()
    assert_same_gradients(model, expected)


class Unpacked(nn.Module):
    """Saves a part of its input for the backward, which is handed the whole of it."""

    def __init__(self, part: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.part = part
        self.weight = nn.Parameter(torch.linspace(0.1, 1, 3))

    def forward(self, x: Tensor) -> Tensor:
        taken = self.part(x)
        return (taken * self.weight).sin() @ taken.T


SAVED_PARTS: dict[str, Callable[[Tensor], Tensor]] = {
    "the first row": lambda x: x[:1],
    "the second row": lambda x: x[1:2],
    "of unpacked rows": lambda x: [*x][-1][None],
    "of a half": lambda x: x.chunk(2)[1],
    "columns": lambda x: x.view(3, 4)[:, 1:],
    "turned": lambda x: x.view(3, 4)[1:].T[1:, :1].T,
}


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("part", SAVED_PARTS)
@pytest.mark.sweep(keep=["eager", "unpacked rows"])
def test_a_part_of_an_input_that_is_saved_is_that_part(part: str, backend: str) -> None:
    def x() -> Tensor:
        return torch.linspace(-1, 2, 12).reshape(4, 3)

    kept = SAVED_PARTS[part]
    assert_equals_eager(Unpacked(kept), (x(),), backend=backend)
    assert_equals_eager(Unpacked(kept), (x().requires_grad_(),), backend=backend)
    assert_equals_eager(Unpacked(kept), (x(),), backend=backend, door="step")
