"""Kernels whose results lie otherwise than PyTorch's rule for fake tensors says."""

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from comparing import TOLERANCE, assert_same_gradients, relative_error, twin
from torch import Tensor, nn

import lazyinline
from lazyinline.frontend.tracing import torch_tracing

CHANNELS = 8
ONES, WEIGHT = torch.ones(CHANNELS), torch.randn(CHANNELS, CHANNELS, 3, 3)

LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "channels last": lambda: torch.randn(2, 8, 6, 6).to(memory_format=torch.channels_last),
    "contiguous": lambda: torch.randn(2, 8, 6, 6),
    "swapped": lambda: torch.randn(2, 6, 8, 6).transpose(1, 2),
    "backwards": lambda: torch.randn(6, 6, 8, 2).permute(3, 2, 1, 0),
}
OPERATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "group_norm, silu, conv2d": lambda x: F.conv2d(
        F.silu(F.group_norm(x, 4, ONES, ONES)), WEIGHT, padding=1
    ),
    "group_norm": lambda x: F.group_norm(x, 4, ONES, ONES),
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "roll": lambda x: x.roll(1, 1),
    "channel_shuffle": lambda x: F.channel_shuffle(x, 2),
    "glu": lambda x: F.glu(torch.cat([x, x], 1), 1),
    "softplus": F.softplus,
    "hardswish": F.hardswish,
    "mse_loss": lambda x: F.mse_loss(x, x.flip(1).contiguous(), reduction="none"),
    "pad": lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"),
    "conv2d": lambda x: F.conv2d(x, WEIGHT, padding=1),
}
CASES = list(itertools.product(OPERATORS, LAYOUTS))


class Net(nn.Module):
    """Reads what an operator made in two ways, one of them a view's."""

    def __init__(self, operator: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.operator = operator
        self.scale = nn.Parameter(torch.tensor(1.3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.operator(x * 1.5) * self.scale
        y = torch.sin(h) + self.scale.cos() * h
        return y.flip(0) * self.scale + y


def check(operator: str, layout: str) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    model = Net(OPERATORS[operator])
    expected, x = twin(model), LAYOUTS[layout]()
    with torch.no_grad():
        inferred = lazyinline.compile(model)(x)
    one, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    found, wanted = lazyinline.compile(model)(one), expected(other)
    for result in (found, wanted):
        result.square().mean().backward()
    assert one.grad is not None and other.grad is not None
    for made, right in ((found, wanted), (inferred, wanted), (one.grad, other.grad)):
        assert relative_error(made.detach(), right.detach()) < TOLERANCE
    assert_same_gradients(model, expected)
    return found, wanted


@pytest.mark.sweep(keep="group_norm, silu, conv2d-channels last")
@pytest.mark.parametrize("operator, layout", CASES, ids=map("-".join, CASES))
def test_results_are_eagers_and_lie_as_eagers_do(operator: str, layout: str) -> None:
    found, expected = check(operator, layout)
    assert found.stride() == expected.stride()


@pytest.mark.sweep(keep="group_norm")
@pytest.mark.parametrize("operator", ["group_norm", "roll", "batch_norm"])
def test_a_layout_that_no_rule_knows_is_copied_into_the_promised_one(
    operator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_tracing, "LAID_OUT_AS_SUGGESTED", frozenset())
    check(operator, "swapped" if operator == "batch_norm" else "channels last")
