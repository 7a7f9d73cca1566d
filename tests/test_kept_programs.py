"""How often a model is compiled, for each value of a float too, and how many programs are kept."""

import copy
import math
import re
import warnings
from typing import Any

import pytest
import torch
from models import block
from torch import nn

import lazyinline
from lazyinline.frontend import guard
from lazyinline.frontend.dispatch import limits
from lazyinline.frontend.sizes import shapes as dynamic
from lazyinline.frontend.tracing.torch_state import TensorLayouts


class Varying(nn.Module):
    """Its shapes follow what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.size = 1

    def forward(self, x: torch.Tensor, size: int, *, flag: bool = False) -> torch.Tensor:
        return self.linear(x).repeat(1, size * self.size + flag)


@pytest.mark.parametrize("what", ["argument", "attribute", "length"])
@pytest.mark.parametrize("way", ["compile", "step"])
@pytest.mark.sweep(keep="step-length")
def test_programs_are_bounded_and_one_warning_names_what_keeps_changing(
    way: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "MAX_PROGRAMS", 3)
    monkeypatch.setattr(guard, "MAX_WITH_ARENAS", 2)
    monkeypatch.setattr(dynamic, "MAX_PROGRAMS", 3)
    monkeypatch.setattr(guard, "MANY_COMPILES", 4)
    model = Varying()
    compiled: Any = lazyinline.compile(model, backend="eager", dynamic=False)
    step = lazyinline.compile_step(model, loss_fn=torch.sum, backend="eager", dynamic=False)
    entries = step.entries if way == "step" else vars(compiled)["_lazyinline_calls"].entries
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for size in (*range(1, 8), *range(5, 8)):
            model.size = size if what == "attribute" else 1
            x = torch.randn(size if what == "length" else 1, 2)
            args = (x, size if what == "argument" else 1)
            if way == "step":
                torch.testing.assert_close(step(*args), model(*args).sum().detach())
            else:
                assert torch.equal(compiled(*args), model(*args))
    (warning,) = [w for w in caught if w.category is guard.CompiledRepeatedlyWarning]
    named = {
        "argument": "Varying was compiled 4 times.*the argument size .1, 2, 3, 4.",
        "attribute": "Varying was compiled 4 times.*the attribute (model.)?size .1, 2, 3, 4.",
        "length": r"the argument x .float32.1, 2., float32.2, 2.",
    }
    assert re.search(named[what], str(warning.message)), warning.message
    assert "0-d tensor" in str(warning.message), "what to pass in place of a number"
    assert warning.filename == __file__
    assert len(entries) == 3
    assert entries._num_compiles == 7  # the last three calls found theirs
    if way == "step":
        assert sum(entry._lease is not None for entry in entries) == 2
        assert sum(bool(entry._batch) for entry in entries) == 2  # our copies of batches


def test_arguments_that_differ_in_strides_alone_are_told_apart() -> None:
    told = guard.shown([torch.ones(2, 3), torch.ones(3, 2).T])
    assert told == "(float32[2, 3], float32[2, 3] of strides (1, 2))"


def test_layouts_are_compared_exactly_whatever_the_callers_modes() -> None:
    tensors = [torch.ones(3, 3, requires_grad=True), torch.ones(2)]
    layouts = TensorLayouts(tensors)
    assert layouts.same(tensors)
    for mode in (torch.no_grad(), torch.inference_mode(), torch.autocast("cpu")):
        with mode:
            for one in (layouts, TensorLayouts(tensors)):
                assert one.same(tensors)
                assert not one.same([tensors[0].detach(), tensors[1]])
    tensors[0].requires_grad_(False)
    assert not layouts.same(tensors)
    with torch.no_grad():
        assert not layouts.same(tensors)


VALUES = (0.5, 0.0, -0.0, math.nan)
Scaled = block(lambda self, x, scale: self.linear(x) * scale + (1.0 - scale) * x)


class Net(nn.Module):
    """Blocks that are given a number, which decides something where it may."""

    def __init__(self, *, decides: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Scaled() for _ in range(2)).float()
        self.decides = decides

    def forward(self, x: torch.Tensor, scale: Any, more: Any = None) -> torch.Tensor:
        for layer in self.blocks:
            x = layer(x, scale * 0.5)
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
    return len(run.entries if is_step else vars(run)["_lazyinline_calls"].entries)


@pytest.mark.parametrize("decides", [False, True])
@pytest.mark.parametrize("way", ["compile", "step"])
@pytest.mark.filterwarnings("ignore::lazyinline.frontend.guard.CompiledRepeatedlyWarning")
@pytest.mark.sweep(keep="compile-True")
def test_each_value_of_a_float_gets_a_program_with_eagers_bits(way: str, decides: bool) -> None:
    torch.manual_seed(0)
    net, x = Net(decides=decides), torch.randn(4, 4)
    run = as_it_runs(net, way)
    for value in (*VALUES, *VALUES):
        assert_like_eager(run, net, x, value, {"weights": [1.0, 2 * value]})
    assert num_programs(run) == len(VALUES)


@pytest.mark.parametrize("way", ["compile", "step"])
def test_a_0d_tensor_is_one_program_for_all_values(way: str) -> None:
    torch.manual_seed(0)
    net, x = Net(), torch.randn(4, 4)
    run = as_it_runs(net, way)
    for value in VALUES:
        assert_like_eager(run, net, x, torch.tensor(value))
    assert num_programs(run) == 1


@pytest.mark.parametrize("what", ["attribute", "argument"])
def test_a_number_that_a_schedule_sets_costs_a_bounded_number_of_compiles(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_VALUES", 3)
    model = Varying()
    compiled = lazyinline.compile(model, backend="eager")
    for number in (1, 2, 3, 4, 5, 2):
        model.size = number if what == "attribute" else 1
        args = torch.randn(2, 2), number if what == "argument" else 1
        assert torch.equal(compiled(*args), model(*args))
        reason = compiled.last_report.ran_eagerly
        assert bool(reason) == (number > 3)  # the last of them has a program
        assert not reason or "besides tensors (numbers, attributes)" in reason


class Asking(nn.Module):
    """Runs in equal parts: a layer asks for a number of what the layer before returns."""

    def __init__(self) -> None:
        super().__init__()
        layers = (nn.TransformerEncoderLayer(8, 2, 8, dropout=0) for _ in range(4))
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x) * (1 + (x.max().item() > 0))
        return x


def test_equal_parts_are_compiled_however_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_VALUES", 3)
    model, x = Asking(), torch.randn(2, 2, 8)
    compiled = lazyinline.compile(model, backend="eager")
    for _ in range(2):
        assert torch.equal(compiled(x), model(x))
    assert [part.num_programs for part in compiled.last_report.parts] == [1] * 4


def test_a_module_runs_eagerly_with_further_values_and_says_what_to_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "MAX_VALUES", 3)
    torch.manual_seed(0)
    net, x = Net(), torch.randn(4, 4)
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
