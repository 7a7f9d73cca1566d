"""How often a model is compiled, for each value of a float too, and how many programs are kept."""

import copy
import functools
import logging
import math
import re
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from comparing import assert_close, assert_same_gradients
from models import Around, block
from torch import Tensor, nn

import lazyinline
from lazyinline.frontend.checks.torch_state import TensorLayouts
from lazyinline.frontend.dispatch import dispatcher
from lazyinline.frontend.guards import guard
from lazyinline.frontend.sizes import shapes as dynamic

logger = logging.getLogger(__name__)


@functools.cache
def warn_once(text: str) -> None:
    logger.warning(text)


def talking(layers: Any, x: torch.Tensor) -> torch.Tensor:
    """Says once what it does, as models of libraries do."""
    warn_once("the loss type is unknown")
    logger.info("the loss type is unknown")
    return layers[0](x)  # type: ignore[no-any-return]


def test_what_the_process_does_beside_a_model_that_logs_compiles_nothing_anew() -> None:
    logger.addHandler(logging.NullHandler())
    compiled, x = (
        lazyinline.compile(Around(talking, nn.Linear(3, 3)), backend="eager"),
        torch.ones(2, 3),
    )
    going = threading.Event()
    thread = threading.Thread(target=going.wait)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled(x)
        thread.start()
        logging.getLogger(f"{__name__}.another").addHandler(logging.StreamHandler())
        compiled(x)
        going.set()
        thread.join()
        compiled(x)
    assert num_programs(compiled) == 1


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


def test_layouts_are_compared_exactly_whatever_the_callers_modes() -> None:
    tensors = [torch.ones(3, 3, requires_grad=True), torch.ones(2)]
    layouts = TensorLayouts(tensors)
    assert layouts.same(tensors)
    for mode in (torch.no_grad(), torch.inference_mode(), torch.autocast("cpu")):
        with mode:
            assert layouts.same(tensors)
            assert TensorLayouts(tensors).same(tensors)
            assert not layouts.same([tensors[0].detach(), tensors[1]])
    tensors[0].requires_grad_(False)
    assert not layouts.same(tensors)
    with torch.no_grad():
        assert not layouts.same(tensors)


class Lora(nn.Module):
    """A frozen layer, and products of low rank that are added to what it gives."""

    def __init__(self, base: nn.Linear, names: tuple[str, ...] = ("a", "b")) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        size, rank = base.in_features, 2
        self.down = nn.ModuleDict({n: nn.Linear(size, rank, bias=False) for n in names})
        self.up = nn.ModuleDict({n: nn.Linear(rank, size, bias=False) for n in names})
        self.scaling = dict.fromkeys(names, 2.0)
        self.active = ["a"]
        self.merged: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.base(x)
        for name in self.active if not self.merged else ():
            result = result + self.up[name](self.down[name](x)) * self.scaling[name]
        return result

    def switch(self, name: str) -> None:
        """Makes one adapter active, with a new list and dict, as ``set_adapter`` does."""
        self.active, self.scaling = [name], dict(self.scaling)
        for table in (self.down, self.up):
            for key, layer in table.items():
                layer.requires_grad_(key == name)

    def merge(self, sign: int = 1) -> None:
        for name in self.active:
            change = self.up[name].weight @ self.down[name].weight * self.scaling[name]
            self.base.weight.data += sign * change.detach()
        self.merged = list(self.active) if sign > 0 else []


Residual = block(lambda self, x: x + torch.tanh(self.linear(x)))


def inject(model: Any) -> list[Lora]:
    for layer in model:
        layer.linear = Lora(layer.linear)
    return [layer.linear for layer in model]


def net() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(Residual(), Residual()).float()


def compiles_of(model: Any) -> int:
    report = lazyinline.last_report(model)
    assert report is not None and not report.ran_eagerly
    return report.num_compiles


def trains_alike(model: Any, expected: Any, steps: int = 2) -> None:
    for run in (model, expected):
        optimizer = torch.optim.AdamW([p for p in run.parameters() if p.requires_grad], lr=0.05)
        for step in range(steps):
            optimizer.zero_grad()
            loss = run(torch.full((3, 4), 0.1 + step)).square().mean()
            if loss.requires_grad:  # with adapters merged, only what is frozen is used
                loss.backward()
            optimizer.step()
    assert_same_gradients(model, expected)
    x = torch.ones(2, 4)
    assert_close(model(x), expected(x))


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.sweep(keep="after")
def test_adapters_train_switch_and_merge_as_in_eager(when: str) -> None:
    model = net()
    if when == "before":
        layers = inject(model)
    lazyinline.compile(model, backend="eager", in_place=True)
    if when == "after":
        model(torch.ones(3, 4))
        layers = inject(model)
    for layer in layers:
        layer.switch("a")
    expected = copy.deepcopy(model)  # a copy of it is plain
    for act in _ACTS:
        for run in (model, expected):
            for layer in run:
                act(layer.linear)
        trains_alike(model, expected)
    assert_close(dict(model.state_dict()), dict(expected.state_dict()))


_ACTS: tuple[Callable[[Lora], None], ...] = (
    lambda layer: layer.switch("a"),
    lambda layer: layer.switch("b"),
    lambda layer: layer.switch("a"),
    lambda layer: layer.merge(),
    lambda layer: layer.merge(sign=-1),
)


def test_switching_back_costs_nothing_and_equal_lists_and_dicts_are_equal() -> None:
    model = net()
    layers = inject(model)
    lazyinline.compile(model, backend="eager", in_place=True)
    for name in "aaabababbb":
        for layer in layers:
            layer.switch(name)
        model(torch.ones(3, 4)).sum().backward()
    assert compiles_of(model) == 2


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
@pytest.mark.filterwarnings("ignore::lazyinline.frontend.guards.guard.CompiledRepeatedlyWarning")
@pytest.mark.sweep(keep=["compile-True", "step-False"])
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


def test_a_module_runs_eagerly_with_further_values_and_says_what_to_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dispatcher, "MAX_FLOATS", 3)
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
