"""Operators of somebody else that change their operands (``mutates_args``) run as in eager."""

import pytest
import torch
from comparing import assert_equals_eager
from torch import Tensor, nn

import lazyinline
from lazyinline import CaptureError


@torch.library.custom_op("lazyinline_tests::shift_", mutates_args=("x",))
def shift_(x: Tensor, by: Tensor) -> None:
    x.add_(by)


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
        return (hidden + self.count + x).relu()


@pytest.mark.parametrize("what", ["activation", "part of an activation", "buffer", "input"])
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.sweep(keep=["True-buffer", "True-activation", "False-input"])
def test_what_an_operator_changes_is_changed(what: str, train: bool) -> None:
    model, batches = Changing(what), [(torch.randn(3, 4),) for _ in range(2)]
    with torch.set_grad_enabled(train):
        outcome = assert_equals_eager(model, batches=batches, backend="eager")
    assert "lazyinline_tests.shift_" in outcome.compiled.last_report.ran_eagerly
    step = lazyinline.compile_step(Changing(what), loss_fn=torch.sum, backend="eager")
    with pytest.raises(CaptureError, match=r"shift_.* at test_mutating_operators\.py:\d+"):
        step(*batches[0])
