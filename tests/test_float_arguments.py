"""Python floats among the arguments: a program per value, so many, and a 0-d tensor for all."""

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import lazyinline
from lazyinline import lazy_inline
from lazyinline.frontend.dispatch import dispatcher

VALUES = (0.5, 0.0, -0.0, math.nan)


@lazy_inline
class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, scale: Any) -> torch.Tensor:
        return self.linear(x) * scale + (1.0 - scale) * x


class Net(nn.Module):
    """Blocks that are given a number, which decides something where it may."""

    def __init__(self, *, decides: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Scaled() for _ in range(2))
        self.decides = decides

    def forward(self, x: torch.Tensor, scale: Any, more: Any = None) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, scale * 0.5)
        if more:
            x = x * more["weights"][1]
        return x + 1 if self.decides and scale > 0.4 else x / 4.0 - scale


def same(found: Any, expected: Any) -> bool:
    """Whether two tensors have the same bits, but for which not-a-number they hold."""
    nan = expected.isnan()
    signs = torch.equal(found.signbit() & ~nan, expected.signbit() & ~nan)
    is_alike = (found.dtype, found.shape) == (expected.dtype, expected.shape)
    numbers = torch.equal(found[~nan], expected[~nan]) and found[nan].isnan().all()
    return bool(is_alike and signs and numbers)


def assert_like_eager(run: Any, net: Net, *args: Any) -> None:
    ref = copy.deepcopy(net)
    net.zero_grad()
    result, expected = run(*args), ref(*args)
    expected.sum().backward()
    if isinstance(run, lazyinline.TrainingStep):
        expected = expected.sum()
    else:
        result.sum().backward()
    pairs = [(p.grad, q.grad) for p, q in zip(net.parameters(), ref.parameters(), strict=True)]
    for a, b in [(result.detach(), expected.detach()), *pairs]:
        assert same(a, b), (args, a, b)


def as_it_runs(net: nn.Module, way: str, **options: Any) -> Any:
    if way == "step":
        return lazyinline.compile_step(net, loss_fn=torch.sum, backend="eager", **options)
    return lazyinline.compile(net, backend="eager", **options)


def num_programs(run: Any) -> int:
    is_step = isinstance(run, lazyinline.TrainingStep)
    return len(run._entries if is_step else vars(run)["_lazyinline_calls"].entries)


@pytest.mark.parametrize("decides", [False, True])
@pytest.mark.parametrize("way", ["compile", "step"])
@pytest.mark.filterwarnings("ignore::lazyinline.frontend.guards.guard.CompiledRepeatedlyWarning")
@pytest.mark.sweep(keep=["compile-True", "step-False"])
def test_each_value_of_a_float_gets_a_program_with_eagers_bits(way: str, decides: bool) -> None:
    torch.manual_seed(0)
    net, x = Net(decides=decides), torch.randn(4, 3)
    run = as_it_runs(net, way)
    for value in (*VALUES, *VALUES):
        assert_like_eager(run, net, x, value, {"weights": [1.0, 2 * value]})
    assert num_programs(run) == len(VALUES)


@pytest.mark.parametrize("way", ["compile", "step"])
def test_a_0d_tensor_is_one_program_for_all_values(way: str) -> None:
    torch.manual_seed(0)
    net, x = Net(), torch.randn(4, 3)
    run = as_it_runs(net, way)
    for value in VALUES:
        assert_like_eager(run, net, x, torch.tensor(value))
    assert num_programs(run) == 1


def test_a_module_runs_eagerly_with_further_values_and_says_what_to_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dispatcher, "MAX_FLOATS", 3)
    torch.manual_seed(0)
    net, x = Net(), torch.randn(4, 3)
    run = as_it_runs(net, "compile")
    for value in (0.1, 0.2, 0.3, 0.4, 0.5):
        assert_like_eager(run, net, x, value)
        assert bool(run.last_report.ran_eagerly) == (value > 0.3)
    assert "0-d tensor" in run.last_report.ran_eagerly
    assert num_programs(run) == 3
    assert_like_eager(run, net, x, 0.2)
    assert not run.last_report.ran_eagerly
    assert_like_eager(run, net, x, torch.tensor(0.7))  # another kind of call
    assert not run.last_report.ran_eagerly


@pytest.mark.sweep
def test_a_number_of_two_values_keeps_sizes_that_vary_symbolic() -> None:
    torch.manual_seed(0)
    net = Net()
    run = as_it_runs(net, "compile")
    for value in (0.5, 0.1):
        for size in (4, 5, 7, 9, 11):
            assert_like_eager(run, net, torch.randn(size, 3), value)
    assert run.last_report.num_compiles == 4  # for each, one for its size and one for all
    assert run.last_report.num_links == 6


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore::lazyinline.frontend.guards.guard.CompiledRepeatedlyWarning")
def test_numbers_of_other_kinds_are_told_from_floats() -> None:
    class Derived(float):
        pass

    torch.manual_seed(0)
    net, x = Net(), torch.randn(4, 3)
    run = as_it_runs(net, "compile")
    for value in (2.0, 0.5, 0.0):
        for kind in (float, int, Derived, np.float64, np.float32):
            assert_like_eager(run, net, x, kind(value))
