"""Operators of somebody else that change their operands (``mutates_args``) do so as in eager."""

from typing import Any

import pytest
import torch
from comparing import Door, assert_equals_eager
from torch import Tensor, nn

import lazyinline
from lazyinline import PlanError


@torch.library.custom_op("lazyinline_tests::shift_", mutates_args=("x",))
def shift_(x: Tensor, by: Tensor) -> None:
    x.add_(by)


@torch.library.custom_op("lazyinline_tests::shift_and_double_", mutates_args=("xs", "maybe"))
def shift_and_double_(
    xs: list[Tensor], by: Tensor, maybe: Tensor | None = None, *, times: float = 2.0
) -> Tensor:
    for x in xs:
        x.add_(by)
    return xs[0] * times


@shift_and_double_.register_fake
def _(xs: list[Tensor], by: Tensor, maybe: Any = None, *, times: float = 2.0) -> Tensor:
    return torch.empty_like(xs[0])


class Changing(nn.Module):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.linear = what, nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        if self.what == "input":
            shift_(x, torch.ones(4))
        hidden = self.linear(x) * 2
        if self.what == "activation":
            shift_(hidden, torch.ones(4))
        elif self.what == "part of an activation":
            shift_(hidden[1:], torch.ones(4))
        elif self.what == "buffer":
            shift_(self.count, hidden.detach().mean(0))
        elif self.what == "several":
            with torch.no_grad():
                extra = shift_and_double_([self.count, hidden], torch.ones(4), times=3.0)
            return (hidden * extra).relu()
        return (hidden + self.count + x).relu()


PLACES = ["activation", "part of an activation", "buffer", "input", "several"]


@pytest.mark.parametrize("what", PLACES)
@pytest.mark.parametrize("how", ["train", "no_grad", "step"])
@pytest.mark.sweep(
    keep=["step", "train-activation", "train-buffer", "no_grad-input", "no_grad-several"]
)
def test_what_an_operator_changes_is_changed(what: str, how: str) -> None:
    model, batches = Changing(what), [(torch.randn(3, 4),) for _ in range(2)]
    door: Door = "step" if how == "step" else "compile"
    backend = "inductor" if what == "buffer" else "eager"
    if how == "step" and what == "input":
        step = lazyinline.compile_step(model, loss_fn=torch.sum, backend=backend)
        with pytest.raises(PlanError, match=r"changes its argument .* in place"):
            step(*batches[0])
        return
    with torch.set_grad_enabled(how != "no_grad"):
        assert_equals_eager(model, batches=batches, door=door, backend=backend)
