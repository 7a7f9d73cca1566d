"""Blocks in blocks, to any depth: each level is shared on its own merit."""

from collections import Counter
from typing import Any

import pytest
import torch
from comparing import assert_equals_eager
from models import Stack, example, linear
from torch import Tensor, nn

from lazyinline import lazy_inline
from lazyinline.frontend.capture.capture import Subject, capture_model
from lazyinline.reuse.ir.program import count_calls


@lazy_inline
class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).relu()


@lazy_inline
class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = linear()

    def forward(self, x: Tensor) -> Tensor:
        return (x @ x.transpose(-1, -2)).softmax(-1) @ self.project(x)


@lazy_inline
class Layer(nn.Module):
    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.attention = Attention()
        self.gate = nn.Linear(4, num_experts, dtype=torch.float64)
        self.experts = nn.ModuleList(Expert() for _ in range(num_experts))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        weights = self.gate(x).softmax(-1)
        for index, expert in enumerate(self.experts):
            x = x + expert(x) * weights[..., index : index + 1]
        return x


@lazy_inline
class Encoder(Stack):
    def __init__(self, num_layers: int, num_experts: int) -> None:
        super().__init__(*(Layer(num_experts) for _ in range(num_layers)))


class Towers(Stack):
    """Two encoders of one class, and a loss."""

    def __init__(self, num_layers: int, num_experts: int) -> None:
        super().__init__(*(Encoder(num_layers, num_experts) for _ in range(2)))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square().mean()


@lazy_inline
class Scaled(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.expert, self.scale = Expert(), scale

    def forward(self, x: Tensor) -> Tensor:
        return x + self.expert(x) * self.scale


def captured(model: nn.Module) -> tuple[Any, Counter[str], Counter[str]]:
    """Returns what was captured, and the closures and their call sites by class of block."""
    found = capture_model(Subject(model, (example(),)), train=True)
    calls: Counter[str] = Counter()
    for closure, number in count_calls(found.program).items():
        calls[closure.name] += number
    return found, Counter(c.name for c in found.program.closures), calls


@pytest.mark.parametrize(("num_layers", "num_experts"), [(2, 4), (32, 64)])
@pytest.mark.sweep(keep="[2-4]")
def test_each_level_is_traced_once_and_called_where_it_stands(
    num_layers: int, num_experts: int
) -> None:
    found, closures, calls = captured(Towers(num_layers, num_experts))
    assert (
        sum(not d.shared for d in found.decisions) == 4
    )  # one encoder, one layer in it, attention and an expert in that
    expected = {"Encoder": 2, "Layer": num_layers, "Attention": 1, "Expert": num_experts}
    assert {name: calls[name] for name in expected} == expected
    assert all(closures[name] == 1 for name in expected)
    assert found.program.num_nodes_if_inlined() > 2 * num_layers * num_experts * 3


def test_nested_blocks_and_micro_batches_equal_eager() -> None:
    torch.manual_seed(0)
    x, kernels = example(4, 4, grad=False), []
    options: dict[str, Any] = {"door": "step", "micro_batches": 2, "tolerance": 1e-12}
    for num_experts in (3, 6):
        outcome = assert_equals_eager(Towers(2, num_experts), (x,), calls=1, **options)
        kernels.append(outcome.told.num_kernels)
    assert kernels[0] <= kernels[1] <= kernels[0] + 8  # the slices of the gate's weights differ


def test_constants_of_nested_blocks_do_not_multiply_closures() -> None:
    found, closures, _ = captured(Stack(*(Scaled(0.1 * (i + 1)) for i in range(6))))
    assert closures["Scaled"] == closures["Expert"] == 1
    traced = [d.class_name for d in found.decisions if not d.shared]
    assert Counter(traced) == {"Scaled": 6, "Expert": 1}  # each value is seen once, to be sure
