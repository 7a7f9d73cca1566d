"""A forward that does more than compute: hooks that collect, counters, caches, prints, logs."""

import array
import builtins
import collections
import contextvars
import functools
import io
import logging
import os
import queue
import random
import threading
import time
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lazyinline
from lazyinline import CaptureError

COUNT = 0
KEPT: list[Tensor] = []


@torch.fx.wrap
def doubled(x: Tensor) -> Tensor:
    """Marked as timm marks its helpers: PyTorch's tracers exchange the global while they run."""
    return x * 2


def trebled(x: Tensor) -> Tensor:
    return x * 3


class Net(nn.Module):
    def __init__(self, effect: Callable[[nn.Module, Tensor], Any] | None = None) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.effect = effect

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).relu()
        if self.effect is not None:
            self.effect(self, hidden)
        return self.second(hidden)


class Collector:
    """Keeps what a hook sees, and counts."""

    def __init__(self) -> None:
        self.kept: list[Tensor] = []
        self.count = 0

    def hook(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.kept.append(output.detach())
        self.count += 1


Made = tuple[Net, Callable[[], Any]]


def _hooked(hook: Callable[..., Any], held: Any) -> Made:
    net = Net()
    net.first.register_forward_hook(hook)
    return net, lambda: held


def hook_fills_a_list() -> Made:
    kept: list[Tensor] = []
    return _hooked(lambda module, args, output: kept.append(output), kept)


def hook_of_an_object() -> Made:
    collector = Collector()
    return _hooked(collector.hook, [collector.kept])[0], lambda: [collector.kept, collector.count]


def partial_hook_fills_a_deque() -> Made:
    def keep(kept: Any, module: nn.Module, args: Any, output: Tensor) -> None:
        kept.append(output.data)

    kept: Any = collections.deque(maxlen=2)
    return _hooked(functools.partial(keep, kept), kept)


def hook_keeps_parameters_and_inputs() -> Made:
    kept: dict[str, Any] = {}

    def keep(module: nn.Module, args: Any, output: Tensor, kept: Any = kept) -> None:
        kept["bias"], kept["previous"] = module.bias, kept.get("input")
        kept["input"] = args[0]

    return _hooked(keep, kept)


def hook_sends_to_a_generator() -> Made:
    kept: list[Tensor] = []

    def keeping() -> Any:
        while True:
            kept.append((yield))

    generator = keeping()
    next(generator)
    return _hooked(lambda module, args, output: generator.send(output), kept)


def forward_fills_a_queue() -> Made:
    kept: queue.Queue[Tensor] = queue.Queue()
    return Net(lambda net, hidden: kept.put(hidden)), lambda: list(kept.queue)


def forward_fills_a_global() -> Made:
    KEPT.clear()
    return Net(lambda net, hidden: KEPT.append(hidden)), lambda: KEPT


def forward_keeps_an_attribute() -> Made:
    def keep(net: nn.Module, hidden: Tensor) -> None:
        net.last = hidden

    net = Net(keep)
    return net, lambda: net.last


def hook_counts() -> Made:
    count = 0

    def hook(*_: Any) -> None:
        nonlocal count
        count += 1

    return _hooked(hook, None)[0], lambda: count


def forward_counts_in_a_global() -> Made:
    def effect(net: nn.Module, hidden: Tensor) -> None:
        global COUNT
        COUNT += 1

    globals()["COUNT"] = 0
    return Net(effect), lambda: COUNT


def forward_writes_out_a_tensor() -> Made:
    texts: list[str] = []
    return Net(lambda net, hidden: texts.append(f"{hidden.mean()}")), lambda: texts


def forward_logs() -> Made:
    seen: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append(record.getMessage())

    logger = logging.getLogger("lazyinline_tests_effects")
    logger.handlers, logger.propagate = [Handler()], False
    return Net(lambda net, hidden: logger.warning("%s rows", len(hidden))), lambda: seen


def forward_writes_a_file() -> Made:
    file = io.StringIO()
    return Net(lambda net, hidden: file.write("rows\n")), file.getvalue


def hook_saves_a_tensor() -> Made:
    file = io.BytesIO()
    net, _ = _hooked(lambda module, args, output: torch.save(output.detach(), file), None)
    return net, file.tell


def hook_puts_into_a_queue_of_c() -> Made:
    kept: Any = queue.SimpleQueue()
    net, _ = _hooked(lambda module, args, output: kept.put(output.detach()), None)
    return net, lambda: [kept.get() for _ in range(kept.qsize())]


def forward_sets_the_environment() -> Made:
    name = "LAZYINLINE_TEST_EFFECTS"
    os.environ.pop(name, None)

    def count(net: nn.Module, hidden: Tensor) -> None:
        os.environ[name] = os.environ.get(name, "") + "x"

    return Net(count), lambda: os.environ.get(name)


EFFECTS = [
    forward_writes_a_file,
    hook_saves_a_tensor,
    hook_puts_into_a_queue_of_c,
    forward_sets_the_environment,
    hook_fills_a_list,
    hook_of_an_object,
    partial_hook_fills_a_deque,
    hook_keeps_parameters_and_inputs,
    hook_sends_to_a_generator,
    forward_fills_a_queue,
    forward_fills_a_global,
    forward_keeps_an_attribute,
    hook_counts,
    forward_counts_in_a_global,
    forward_writes_out_a_tensor,
    forward_logs,
]


def _after(make: Callable[[], Made], wrap: Callable[[Net], Any]) -> tuple[list[Any], Any, Any]:
    torch.manual_seed(0)
    net, held = make()
    run = wrap(net)
    outputs = [run(torch.full((2, 4), float(i))) for i in range(3)]
    return outputs, _plain(held()), run


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        assert type(value) in (Tensor, nn.Parameter)
        return value.tolist()
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(v) for v in value] if isinstance(value, (list, collections.deque)) else value


@pytest.mark.parametrize("make", EFFECTS, ids=lambda make: make.__name__)
@pytest.mark.sweep(
    keep=["writes_a_file", "hook_counts", "forward_fills_a_global", "hook_keeps", "queue_of_c"]
)
def test_what_a_forward_does_outside_happens_at_each_call(make: Callable[[], Made]) -> None:
    expected, wanted, _ = _after(make, lambda net: net)
    outputs, found, run = _after(make, lambda net: lazyinline.compile(net, backend="eager"))
    torch.testing.assert_close(outputs, expected)
    assert found == wanted
    assert run.last_report.ran_eagerly.startswith("The model's forward ")
    net, held = make()
    before = _plain(held()) if make is not forward_keeps_an_attribute else None
    with pytest.raises(CaptureError, match="The model's forward"):
        lazyinline.compile_step(net, loss_fn=torch.sum, backend="eager")(torch.ones(2, 4))
    if before is not None:
        assert _plain(held()) == before
    lazyinline.capture(Net(), (torch.ones(2, 4),))  # nothing of the refused run stays behind


class Slotted:
    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


class Key:
    """Something that can be referred to weakly."""


def noted(*_: Any) -> None:
    """A function that others hang numbers on."""


Counter = tuple[Callable[[], Any], Callable[[Any], Any]]  # what counts one more, and its count
VARIABLE: contextvars.ContextVar[int] = contextvars.ContextVar("VARIABLE")
KEY = Key()


def _counter(held: Any, add: Callable[[Any], Any], read: Callable[[Any], Any]) -> Counter:
    return lambda: add(held), lambda _: read(held)


def _function() -> Counter:
    vars(noted).clear()
    noted.count = 0  # type: ignore[attr-defined]
    return _counter(noted, lambda f: setattr(f, "count", f.count + 1), lambda f: f.count)


def _variable() -> Counter:
    VARIABLE.set(0)
    return _counter(VARIABLE, lambda v: v.set(v.get() + 1), lambda v: v.get())


def _at(held: Any, key: Any) -> Counter:
    def add(held: Any) -> None:
        held[key] = held[key] + 1

    return _counter(held, add, lambda held: held[key])


def _generator(made: Any, draw: Callable[[Any], Any], state: Callable[[Any], Any]) -> Counter:
    return _counter(made, draw, lambda made: repr(state(made)))


COUNTERS: dict[str, Callable[[], Counter]] = {
    "a list": lambda: _at([0], 0),
    "a dictionary": lambda: _at({"n": 0}, "n"),
    "a tensor": lambda: _counter([torch.zeros(3)], lambda t: t[0].add_(1), lambda t: t[0].tolist()),
    "a set": lambda: _counter(set(), lambda s: s.add(len(s)), len),
    "a deque": lambda: _counter(collections.deque(), lambda d: d.append(0), len),
    "a bytearray": lambda: _at(bytearray(1), 0),
    "an array": lambda: _at(array.array("i", [0]), 0),
    "a numpy array": lambda: _at(np.zeros(1), 0),
    "a memoryview": lambda: _at(memoryview(bytearray(1)), 0),
    "a memoryview of numbers": lambda: _at(memoryview(array.array("i", [0])), 0),
    "an attribute of an object": lambda: _counter(
        types.SimpleNamespace(n=0), lambda o: setattr(o, "n", o.n + 1), lambda o: o.n
    ),
    "a slot": lambda: _counter(
        Slotted(), lambda o: setattr(o, "count", o.count + 1), lambda o: o.count
    ),
    "an attribute of a function": _function,
    "a context variable": _variable,
    "a weak dictionary": lambda: _at(weakref.WeakKeyDictionary({KEY: 0}), KEY),
    "a generator of Python": lambda: _generator(
        random.Random(0), lambda r: r.random(), lambda r: r.getstate()
    ),
    "a generator of numpy": lambda: _generator(
        np.random.default_rng(0), lambda r: r.random(), lambda r: r.bit_generator.state
    ),
}


@pytest.mark.parametrize("name", COUNTERS)
@pytest.mark.sweep(keep=["a tensor", "a slot"])
def test_whatever_kind_of_object_counts_has_counted_each_call_once(name: str) -> None:
    def count(wrap: Callable[[Net], Any]) -> Any:
        add, read = COUNTERS[name]()
        run = wrap(Net(lambda net, hidden: add()))
        for _ in range(6):
            run(torch.ones(2, 4))
        return read(run)

    assert count(lambda net: lazyinline.compile(net, backend="eager")) == count(lambda net: net)


def test_the_time_is_asked_for_at_each_call() -> None:
    class Clock(Net):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x), time.perf_counter_ns()

    compiled = lazyinline.compile(Clock(), backend="eager")
    times = [compiled(torch.ones(2, 4))[1] for _ in range(3)]
    assert len(set(times)) == 3
    assert "time.perf_counter_ns" in compiled.last_report.ran_eagerly


def _unset_variable() -> Callable[[], Any]:
    unset: contextvars.ContextVar[int] = contextvars.ContextVar("unset")
    return lambda: unset.set(unset.get(0) + 1)


def test_a_change_that_cannot_be_taken_back_is_an_error_and_not_made_again() -> None:
    add, calls = _unset_variable(), []

    def effect(net: nn.Module, hidden: Tensor) -> None:
        add()
        calls.append(None)

    with pytest.raises(CaptureError, match="cannot be restored"):
        lazyinline.compile(Net(effect), backend="eager")(torch.ones(2, 4))
    assert calls == []


def test_arguments_that_the_forward_changes_are_changed() -> None:
    class Popping(Net):
        def forward(self, batch: dict[str, Tensor], kept: list[Tensor]) -> Tensor:
            kept.append(super().forward(batch.pop("x")))
            return kept[-1]

    compiled = lazyinline.compile(Popping(), backend="eager")
    for _ in range(2):
        batch, kept = {"x": torch.ones(2, 4), "y": torch.ones(1)}, []
        assert compiled(batch, kept) is kept[0]
        assert list(batch) == ["y"]


def test_prints_come_once_a_call_and_with_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    show = builtins.print
    compiled = lazyinline.compile(Net(lambda net, h: print("rows", len(h))), backend="eager")
    for calls in range(1, 4):
        compiled(torch.ones(2, 4))
        assert capsys.readouterr().out == "rows 2\n", calls
    assert builtins.print is show


def test_what_is_done_once_only_does_not_keep_a_model_from_being_compiled(
    capsys: pytest.CaptureFixture[str],
) -> None:
    held: dict[str, Any] = {}

    @functools.lru_cache
    def scale(width: int) -> Tensor:
        return torch.full((width,), 2.0)

    def effect(net: nn.Module, hidden: Tensor) -> None:
        if "mask" not in held:
            held["mask"] = torch.ones(4)
        if "told" not in held:
            held["told"] = True
            print("first")
        hidden.mul_(scale(4) * held["mask"])

    net, expected = Net(effect), Net()
    expected.load_state_dict(net.state_dict())
    compiled = lazyinline.compile(net, backend="eager")
    x = torch.ones(2, 4)
    for _ in range(3):
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), expected.second(expected.first(x).relu() * 2))
    assert not compiled.last_report.ran_eagerly
    assert type(held["mask"]) is Tensor
    assert type(scale(4)) is Tensor
    assert capsys.readouterr().out == "first\n"


def test_a_global_that_fx_wraps_is_no_change_of_the_models() -> None:
    class Doubling(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.second(doubled(self.first(x)))

    marked = doubled
    x, net = torch.ones(2, 4), Doubling()
    compiled = lazyinline.compile(net, backend="eager")
    for train in (True, True, False, False):
        with torch.set_grad_enabled(train):
            torch.testing.assert_close(compiled(x), net(x))
        assert not compiled.last_report.ran_eagerly
    assert compiled.last_report.num_compiles == 2
    step = lazyinline.compile_step(net, loss_fn=lambda y: y.sum(), backend="eager")
    torch.testing.assert_close(step(x), net(x).sum())
    assert doubled is marked
    graph = torch.fx.symbolic_trace(lambda x: doubled(x) + 1).graph
    assert doubled in [node.target for node in graph.nodes]


def test_a_global_that_fx_wraps_is_rebound_by_the_forward_as_in_eager() -> None:
    class Rebinding(Net):
        def forward(self, x: Tensor) -> Tensor:
            global doubled
            hidden, doubled = doubled(self.first(x)), trebled
            return self.second(hidden)

    marked, x = doubled, torch.ones(2, 4)
    net = Rebinding()
    compiled = lazyinline.compile(net, backend="eager")
    try:
        found = [compiled(x) for _ in range(3)]
        globals()["doubled"] = marked
        torch.testing.assert_close(found, [net(x) for _ in range(3)])
        assert compiled.last_report.ran_eagerly == "" and doubled is trebled
    finally:
        globals()["doubled"] = marked


def test_a_hook_that_is_removed_lets_the_model_be_compiled() -> None:
    net, kept = Net(), []
    handle = net.first.register_forward_hook(lambda module, args, output: kept.append(output))
    compiled = lazyinline.compile(net, backend="eager")
    for _ in range(5):
        compiled(torch.ones(2, 4))
    assert len(kept) == 5
    handle.remove()
    compiled(torch.ones(2, 4))
    assert not compiled.last_report.ran_eagerly
    net.first.register_forward_hook(lambda module, args, output: output * 2)
    torch.testing.assert_close(compiled(torch.ones(2, 4)), net(torch.ones(2, 4)))
    assert not compiled.last_report.ran_eagerly


def test_lists_that_live_for_a_call_only_are_no_effect() -> None:
    class Listing(Net):
        def forward(self, x: Tensor) -> Tensor:
            seen: list[Tensor] = []
            count = 0

            def note(hidden: Tensor) -> Tensor:
                nonlocal count
                count += 1
                seen.append(hidden)
                return hidden

            return self.second(note(self.first(x))) + sum(seen) * count

    net = Listing()
    compiled = lazyinline.compile(net, backend="eager")
    for _ in range(2):
        torch.testing.assert_close(compiled(torch.ones(2, 4)), net(torch.ones(2, 4)))
    assert compiled.last_report.ran_eagerly == ""
    assert compiled.last_report.num_compiles == 1


@pytest.mark.parametrize("make", [threading.Lock, threading.RLock, threading.Condition])
def test_a_lock_that_a_forward_holds_is_let_go(make: Any) -> None:
    class Holds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lock, self.linear = make(), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            with self.lock:
                return self.linear(x)

    model, x = Holds(), torch.ones(1, 2)
    compiled = lazyinline.compile(model, backend="eager")
    for _ in range(3):
        torch.testing.assert_close(compiled(x), model.linear(x))
        assert model.lock.acquire(blocking=False)
        model.lock.release()
    assert not lazyinline.last_report(compiled).num_kernels  # type: ignore[union-attr]
