"""A compiled model notices a change in whatever its Python reads, however it is reached."""

from __future__ import annotations

import array
import collections
import contextvars
import copy
import enum
import functools
import inspect
import itertools
import os
import pickle
import random
import sys
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lazyinline
from lazyinline import CaptureError, lazy_inline
from lazyinline.backend.launches.torch_native import native_library
from lazyinline.backend.run.runtime import ClosureRuntime


class Number(float):
    """A number of a class of its own."""


class Text(str):
    """A text of a class of its own."""


class Value:
    kind = 1.0

    def __init__(self, value: float = 1.0) -> None:
        self.value = value

    def get(self) -> float:
        return self.value

    @classmethod
    def of_class(cls) -> float:
        return cls.kind


class Slotted:
    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 1.0

    def get(self) -> float:
        return self.value


class Queue(collections.deque[float]):
    __slots__ = ("value",)

    def __init__(self) -> None:
        super().__init__([1.0])
        self.value = 1.0


class Private:
    __slots__ = ("__value",)

    def __init__(self, value: float = 1.0) -> None:
        self.__value = value

    def get(self) -> float:
        return self.__value

    def put(self, value: float) -> None:
        self.__value = value


class Table(dict[str, float]):
    extra = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.own = 1.0


class Key:
    value = 1.0


KEY = Key()


def a_function() -> Callable[[], None]:
    def function(a: int = 1) -> None:
        pass

    function.value = 1.0  # type: ignore[attr-defined]
    return function


def dispatching() -> Callable[[Any], float]:
    @functools.singledispatch
    def factor(of: Any) -> float:
        return 1.0

    return factor


def operand() -> Any:
    class Operand:
        def __mul__(self, other: float) -> float:
            return other

        def __len__(self) -> int:
            return 1

    return Operand()


class Meta(type):
    value = 1.0


class WithMeta(metaclass=Meta):
    pass


class Mode(enum.Enum):
    ON = 1


class Child(Value):
    pass


SETTINGS = types.ModuleType("lazyinline_test_settings")
SETTINGS.value = 1.0  # type: ignore[attr-defined]
GLOBAL = 1.0
CONTEXT: contextvars.ContextVar[float] = contextvars.ContextVar("CONTEXT")


OBJECT = Value()


def with_default(values: list[float] = [1.0]) -> float:  # noqa: B006
    return values[0]


def with_keyword(*, values: dict[str, float] = {"a": 1.0}) -> float:  # noqa: B006
    return values["a"]


def helper() -> float:
    return 1.0


class Model(nn.Module):
    """Multiplies by a number that it reads from what it holds."""

    def __init__(self, held: Any, read: Callable[[Any], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.held = held
        self._read = read

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self._read(self.held)


def setting(name: str, value: Any = 3.0) -> Callable[[Any], None]:
    return lambda held: setattr(held, name, value)


def with_value(held: Any) -> Any:
    held.value = 1.0
    return held


def setting_item(key: Any, value: Any = 3.0) -> Callable[[Any], None]:
    return lambda held: held.__setitem__(key, value)


def nested(depth: int) -> list[Any]:
    return [nested(depth - 1)] if depth else [1.0]


def innermost(held: Any) -> Any:
    while isinstance(held, list):
        last, held = held, held[0]
    return last


HELD: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "weak set": (
        lambda: weakref.WeakSet([KEY]),
        lambda h: float(KEY in h),
        lambda h: h.discard(KEY),
    ),
    "attribute of a function": (a_function, lambda h: h.value, setting("value")),
    "implementation by type": (
        dispatching,
        lambda h: h(1.0),
        lambda h: h.register(float, lambda of: 3.0),
    ),
    "operator of a class": (
        operand,
        lambda h: h * 1.0,
        lambda h: setattr(type(h), "__mul__", lambda self, other: 3.0),
    ),
    "length of a class": (
        operand,
        lambda h: float(len(h)),
        lambda h: setattr(type(h), "__len__", lambda self: 3),
    ),
    "array": (lambda: np.ones(2), lambda h: float(h[0]), setting_item(0)),
    "array of objects": (
        lambda: np.array([1.0, "a"], dtype=object),
        lambda h: h[0],
        setting_item(0),
    ),
    "array in a list": (
        lambda: [np.ones(2)],
        lambda h: float(h[0][0]),
        lambda h: h[0].fill(3),
    ),
    "deque": (lambda: collections.deque([1.0]), lambda h: h[0], setting_item(0)),
    "slots of a deque": (Queue, lambda h: h.value, setting("value")),
    "attribute of a partial": (
        lambda: with_value(functools.partial(max, 1)),
        lambda h: h.value,
        setting("value"),
    ),
    "attribute of a cached function": (
        lambda: with_value(functools.lru_cache(helper)),
        lambda h: h.value,
        setting("value"),
    ),
    "factory of a dictionary": (
        lambda: collections.defaultdict(int),
        lambda h: 1.0 + (h.default_factory is int),
        setting("default_factory", float),
    ),
    "method in C": (
        lambda: {"a": 1.0}.get,
        lambda h: h("a"),
        lambda h: h.__self__.update(a=3.0),
    ),
    "what an exception was made with": (
        lambda: ValueError(1.0),
        lambda h: h.args[0],
        setting("args", (3.0,)),
    ),
    "mask of an array": (
        lambda: np.ma.array([1.0, 2.0], mask=[True, False]),
        lambda h: float(h.mask[0]),
        setting("mask", False),
    ),
    "captured variable by itself": (
        lambda: types.CellType(1.0),
        lambda h: h.cell_contents,
        setting("cell_contents"),
    ),
    "variable of a thread": (
        lambda: with_value(threading.local()),
        lambda h: h.value,
        setting("value"),
    ),
    "slots": (Slotted, lambda h: h.value, setting("value")),
    "method": (lambda: Value().get, lambda h: h(), lambda h: setting("value")(h.__self__)),
    "private slots": (Private, lambda h: h.get(), lambda h: h.put(2.0)),
    "kind of a set's item": (
        lambda: {1},
        lambda h: 2.0 if next(iter(h)) is True else 3.0,
        lambda h: (h.clear(), h.add(True)),
    ),
    "order of a set": (
        lambda: set((8, 0)),
        lambda h: float(next(iter(h))),
        lambda h: (h.clear(), h.add(0), h.add(8)),
    ),
    "method of slots": (
        lambda: Slotted().get,
        lambda h: h(),
        lambda h: setting("value")(h.__self__),
    ),
    "partial": (
        lambda: functools.partial(dict.get, {"a": 1.0}, "a"),
        lambda h: h(),
        lambda h: h.args[0].update(a=3.0),
    ),
    "partial keywords": (
        lambda: functools.partial(torch.mul, other=2.0),
        lambda h: h(torch.ones(())),
        lambda h: h.keywords.update(other=3.0),
    ),
    "weak reference": (
        lambda: (lambda v: (v, weakref.ref(v)))(Value()),
        lambda h: h[1]().value,
        lambda h: setting("value")(h[0]),
    ),
    "member of a set": (
        lambda: {Value()},
        lambda h: next(iter(h)).value,
        lambda h: setting("value")(next(iter(h))),
    ),
    "key of a dict": (
        lambda: {Value(): 1},
        lambda h: next(iter(h)).value,
        lambda h: setting("value")(next(iter(h))),
    ),
    "attribute of a dict": (Table, lambda h: h.own, setting("own")),
    "class of an object": (
        lambda: type("Local", (Value,), {})(),
        lambda h: h.kind,
        lambda h: setting("kind")(type(h)),
    ),
    "class": (lambda: type("Local", (Value,), {}), lambda h: h.kind, setting("kind")),
    "class method": (
        lambda: type("Local", (Value,), {"kind": 1.0})(),
        lambda h: h.of_class(),
        lambda h: setting("kind")(type(h)),
    ),
    "base class": (lambda: Child, lambda h: h.kind, lambda h: setting("kind")(Value)),
    "class by text": (
        lambda: type("Local", (Value,), {}),
        lambda h: getattr(h, "ki" + "nd"),
        setting("kind"),
    ),
    "metaclass": (lambda: WithMeta, lambda h: h.value, lambda h: setting("value")(Meta)),
    "method replaced": (
        lambda: type("Local", (Value,), {"get": lambda self: 1.0})(),
        lambda h: h.get(),
        lambda h: setattr(type(h), "get", lambda self: 3.0),
    ),
    "module": (lambda: SETTINGS, lambda h: h.value, setting("value")),
    "imported module": (
        lambda: None,
        lambda h: __import__("lazyinline_test_settings").value,
        lambda h: setting("value")(SETTINGS),
    ),
    "globals()": (
        lambda: None,
        lambda h: globals()["GLOBAL"],
        lambda h: globals().update(GLOBAL=3.0),
    ),
    "default": (lambda: with_default, lambda h: h(), lambda h: h.__defaults__[0].insert(0, 3.0)),
    "defaults": (
        lambda: types.FunctionType(with_default.__code__, globals(), "f", ([1.0],)),
        lambda h: h(),
        lambda h: setattr(h, "__defaults__", ([3.0],)),
    ),
    "keyword default": (
        lambda: with_keyword,
        lambda h: h(),
        lambda h: h.__kwdefaults__["values"].update(a=3.0),
    ),
    "code of a function": (
        lambda: types.FunctionType(helper.__code__, globals(), "f"),
        lambda h: h(),
        lambda h: setattr(h, "__code__", (lambda: 3.0).__code__),
    ),
    "attributes replaced": (
        Value,
        lambda h: h.value,
        lambda h: setattr(h, "__dict__", {"value": 3.0}),
    ),
    "another class": (
        lambda: type("Local", (Value,), {"kind": 1.0})(),
        lambda h: h.kind,
        lambda h: setattr(h, "__class__", type("Other", (Value,), {"kind": 3.0})),
    ),
    "attributes of a global object replaced": (
        lambda: None,
        lambda h: OBJECT.get(),
        lambda h: setattr(OBJECT, "__dict__", {"value": 3.0}),
    ),
    "another class of a global object": (
        lambda: None,
        lambda h: OBJECT.kind,
        lambda h: setattr(OBJECT, "__class__", type("Other", (Value,), {"kind": 3.0})),
    ),
    "environment": (
        lambda: None,
        lambda h: float(os.environ.get("LAZYINLINE_TEST", "1")),
        lambda h: os.environ.update(LAZYINLINE_TEST="3"),
    ),
    "context variable": (lambda: CONTEXT, lambda h: h.get(), lambda h: h.set(3.0)),
    "long list": (lambda: [1.0] * 3000, lambda h: h[2500], setting_item(2500)),
    "many lists": (
        lambda: [[1.0] for _ in range(600)],
        lambda h: h[555][0],
        lambda h: h[555].insert(0, 3.0),
    ),
    "deep list": (
        lambda: nested(12),
        lambda h: innermost(h)[0],
        lambda h: innermost(h).insert(0, 3.0),
    ),
    "number of a derived class": (
        lambda: [Number(1.0)],
        lambda h: float(h[0]),
        lambda h: h.insert(0, Number(3.0)),
    ),
    "text of a derived class": (
        lambda: [Text("1")],
        lambda h: float(str(h[0])),
        lambda h: h.insert(0, Text("3")),
    ),
    "enumeration": (
        lambda: {Mode.ON: [1.0]},
        lambda h: h[Mode.ON][0],
        lambda h: h[Mode.ON].insert(0, 3.0),
    ),
}


@pytest.fixture(autouse=True)
def natively(monkeypatch: pytest.MonkeyPatch) -> None:
    """The eager kernels need no native library; guards have it all the same, as with others."""
    monkeypatch.setattr(ClosureRuntime, "hold", native_library().hold)


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lazyinline_test_settings", SETTINGS)
    monkeypatch.setenv("LAZYINLINE_TEST", "1")
    for owner, name in ((SETTINGS, "value"), (Meta, "value"), (Value, "kind")):
        monkeypatch.setattr(owner, name, 1.0)
    monkeypatch.setitem(globals(), "GLOBAL", 1.0)
    monkeypatch.setitem(globals(), "OBJECT", Value())
    CONTEXT.set(1.0)


@pytest.mark.parametrize("name", HELD)
def test_a_change_of_what_a_model_holds_is_noticed(name: str) -> None:
    make, read, change = HELD[name]
    model, x = Model(make(), read), torch.randn(2, 4)
    compiled = lazyinline.compile(model, backend="eager")
    assert torch.equal(compiled(x), model(x))
    first = compiled.last_report
    compiled(x)
    assert compiled.last_report is first
    change(model.held)
    expected = model(x)
    assert torch.equal(compiled(x), expected)
    assert compiled.last_report is not first


TABLES: dict[str, Callable[[nn.Module], Any]] = {
    "attributes": lambda m: setattr(m, "__dict__", {**vars(m), "scale": 3.0}),
    "attributes of a child": lambda m: setattr(
        m.linear, "__dict__", {**vars(m.linear), "_parameters": nn.Linear(4, 4)._parameters}
    ),
    "parameters": lambda m: setattr(m.linear, "_parameters", nn.Linear(4, 4)._parameters),
    "buffers": lambda m: setattr(m, "_buffers", {"shift": torch.ones(4)}),
    "modules": lambda m: setattr(m, "_modules", {"linear": nn.Linear(4, 4)}),
    "hooks": lambda m: setattr(m.linear, "_forward_hooks", {0: lambda *args: args[2] * 2}),
    "an entry past the module": lambda m: vars(m).update(scale=3.0),
    "how the class is called": lambda m: setattr(
        type(m), "__call__", lambda self, x: self.forward(x) * 3
    ),
    "the bases of the class": lambda m: setattr(
        type(m), "__bases__", (type("Other", (Plain,), {"scaled": lambda self, x: x * 3}),)
    ),
    "a bias that is no more": lambda m: setattr(m.linear, "bias", None),
}


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("shift", torch.zeros(4))
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.scaled(self.linear(x)) + self.shift

    def scaled(self, x: Tensor) -> Tensor:
        return x * self.scale


@pytest.mark.parametrize("is_native", [True, False], ids=["native", "generated"])
@pytest.mark.parametrize("name", TABLES)
@pytest.mark.sweep(keep="native")
def test_another_table_in_a_module_is_noticed(
    name: str, is_native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_native:
        monkeypatch.setattr(ClosureRuntime, "hold", None)
    kind = type("Local", (type("LocalBase", (Plain,), {}),), {})
    model, x = kind(), torch.randn(2, 4)
    compiled = lazyinline.compile(model, backend="eager")
    before = compiled(x)
    compiled(x)
    TABLES[name](model)
    expected = model(x)
    assert not torch.equal(before, expected)
    for _ in range(2):
        assert torch.equal(compiled(x), expected)


LIBRARY: dict[str, tuple[Any, str, Callable[[Tensor], Tensor]]] = {
    "functional": (F, "gelu", lambda x: F.gelu(x)),
    "module below": (torch.special, "expit", lambda x: torch.special.expit(x)),
    "method of a layer": (nn.Linear, "forward", lambda x: x),
}


@pytest.mark.parametrize("what", LIBRARY)
def test_a_function_of_pytorch_that_was_replaced_is_noticed(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name, call = LIBRARY[what]
    model = Model(call, lambda h: h(torch.ones(2, 4)))
    x = torch.randn(2, 4)
    compiled = lazyinline.compile(model, backend="eager")
    assert torch.equal(compiled(x), model(x))
    monkeypatch.setattr(owner, name, lambda *args: 3 * args[-1])
    assert torch.equal(compiled(x), model(x))


@pytest.mark.parametrize(
    ("read", "change", "undo"),
    [
        (
            torch.are_deterministic_algorithms_enabled,
            lambda: torch.use_deterministic_algorithms(True),
            lambda: torch.use_deterministic_algorithms(False),
        ),
        (
            lambda: torch.get_float32_matmul_precision() == "high",
            lambda: torch.set_float32_matmul_precision("high"),
            lambda: torch.set_float32_matmul_precision("highest"),
        ),
    ],
)
def test_another_setting_of_pytorch_is_noticed(
    read: Callable[[], bool], change: Callable[[], None], undo: Callable[[], None]
) -> None:
    model, x = Model(None, lambda h: 2.0 if read() else 1.0), torch.randn(2, 4)
    compiled = lazyinline.compile(model, backend="eager")
    assert torch.equal(compiled(x), model(x))
    change()
    try:
        assert torch.equal(compiled(x), model(x))
    finally:
        undo()


def test_an_attribute_of_a_weight_that_changes_is_noticed() -> None:
    model = Model(None, lambda h: 1.0)
    model._read = lambda h: model.linear.weight.factor
    model.linear.weight.factor = 1.0  # type: ignore[attr-defined]
    compiled, x = lazyinline.compile(model, backend="eager"), torch.randn(2, 4)
    assert torch.equal(compiled(x), model(x))
    model.linear.weight.factor = 3.0  # type: ignore[attr-defined]
    assert torch.equal(compiled(x), model(x))


ADVANCING: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "count": (itertools.count, next),
    "cycle": (lambda: itertools.cycle([1.0, 2.0]), next),
    "generator": (lambda: (float(i) for i in range(9)), next),
    "iterator in a list": (lambda: [iter([1.0, 2.0])], lambda h: next(h[0])),
    "Random": (lambda: random.Random(0), lambda h: h.random()),
    "numpy Generator": (lambda: np.random.default_rng(0), lambda h: float(h.random())),
    "numpy RandomState": (lambda: np.random.RandomState(0), lambda h: float(h.rand())),
    "deque": (
        lambda: collections.deque([1.0, 2.0, 3.0]),
        lambda h: (h.rotate(1), h[0])[1],
    ),
    "array": (lambda: np.ones(2), lambda h: (h.__iadd__(1.0), float(h[0]))[1]),
    "slots": (
        Slotted,
        lambda h: (setattr(h, "value", h.value + 1), h.value)[1],
    ),
    "iterator in an object": (
        lambda: types.SimpleNamespace(steps=[iter([1.0, 2.0])]),
        lambda h: next(h.steps[0]),
    ),
    "array of numbers": (lambda: array.array("d", [1.0]), lambda h: grown(h)[0]),
    "bytes": (lambda: bytearray([1]), lambda h: grown(h)[0]),
    "memory": (lambda: memoryview(bytearray([1])), lambda h: grown(h)[0]),
    "weak table": (lambda: weakref.WeakKeyDictionary({KEY: 1.0}), lambda h: h[KEY]),
    "values of a dictionary": (lambda: {"a": 1.0}.values(), lambda h: next(iter(h))),
}


def grown(held: Any) -> Any:
    held[0] += 1
    return held


CHANGED = ("deque", "array", "slots")


@pytest.mark.parametrize("name", [name for name in ADVANCING if name not in CHANGED])
def test_what_moves_on_at_each_call_is_refused_before_it_does(name: str) -> None:
    make, read = ADVANCING[name]
    model, expected, x = Model(make(), read), Model(make(), read), torch.randn(2, 4)
    expected.load_state_dict(model.state_dict())
    compiled = lazyinline.compile(model, backend="eager", fallback="error")
    with pytest.raises(CaptureError, match=r"reads a \w+ at .*would use the same at every call"):
        compiled(x)
    compiled = lazyinline.compile(model, backend="eager")
    for _ in range(2):
        assert torch.equal(compiled(x), expected(x))


@pytest.mark.parametrize("name", CHANGED)
def test_a_forward_that_changes_what_it_holds_runs_itself(name: str) -> None:
    make, read = ADVANCING[name]
    model = Model(make(), read)
    expected, x = copy.deepcopy(model), torch.randn(2, 4)
    compiled = lazyinline.compile(model, backend="eager")
    for _ in range(3):
        assert torch.equal(compiled(x), expected(x))
        assert pickle.dumps(model.held) == pickle.dumps(expected.held)
    assert "forward changes" in compiled.last_report.ran_eagerly


@pytest.mark.parametrize("name", CHANGED)
def test_a_refused_forward_leaves_what_it_changed_as_it_was(name: str) -> None:
    make, read = ADVANCING[name]
    model = Model(make(), read)
    before = pickle.dumps(model.held)
    step = lazyinline.compile_step(model, loss_fn=torch.sum, backend="eager")
    with pytest.raises(CaptureError, match="could not keep"):
        step(torch.randn(2, 4))
    assert pickle.dumps(model.held) == before


def test_a_forward_that_sets_the_default_dtype_has_eagers_types_at_every_call() -> None:
    def wide(held: float) -> Tensor:
        torch.set_default_dtype(torch.float64)
        ramp = torch.arange(4.0)  # traced without a dtype
        torch.set_default_dtype(torch.float32)
        return ramp * held

    model = Model(2.0, wide)
    compiled, x = lazyinline.compile(model, backend="eager"), torch.randn(2, 4)
    for _ in range(3):
        expected = model(x)
        assert expected.dtype is torch.float64
        assert torch.equal(compiled(x), expected)
    with pytest.raises(CaptureError, match="default dtype"):
        lazyinline.compile_step(model, loss_fn=torch.sum, backend="eager")(x)


SEEDING: dict[str, Callable[[], Any]] = {
    "manual_seed": lambda: torch.manual_seed(3),
    "fork_rng": lambda: forked(),
    "initial_seed": torch.initial_seed,
    "set_rng_state": lambda: torch.set_rng_state(torch.Generator().manual_seed(3).get_state()),
}


def forked() -> Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return torch.rand(4)


@pytest.mark.parametrize("seed", SEEDING.values(), ids=SEEDING)
def test_a_forward_that_seeds_the_generator_draws_as_eager_at_every_call(seed: Any) -> None:
    model = Model(0.0, lambda h: (seed(), torch.rand(4))[1])
    compiled, x = lazyinline.compile(model, backend="eager"), torch.randn(2, 4)
    torch.manual_seed(0)
    expected = [model(x) for _ in range(3)]
    torch.manual_seed(0)
    assert all(torch.equal(compiled(x), e) for e in expected)
    with pytest.raises(CaptureError, match="Generator"):
        lazyinline.compile_step(model, loss_fn=torch.sum, backend="eager")(x)


class Block(Model):
    pass


lazy_inline(Block)

WRAPPED: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "list": (lambda t: [t], lambda h: h[0]),
    "dict": (lambda t: {"a": t}, lambda h: h["a"]),
    "object": (lambda t: types.SimpleNamespace(t=t), lambda h: h.t),
    "distribution": (lambda t: torch.distributions.Normal(t, 1.0), lambda h: h.loc),
}
READS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda t: t.item(),
    "float": float,
    "tolist": lambda t: t.tolist(),
    "numpy": lambda t: float(t.numpy()),
    "array": lambda t: float(np.asarray(t)),
    "index": lambda t: [5.0, 6.0, 7.0][int(t)],
    "equal": lambda t: 1.0 + torch.equal(t, t),
    "item of a product": lambda t: (t * 2).item(),
    "item of a product with a literal": lambda t: (torch.tensor(2.0) * t).item(),
    "literal changed in place": lambda t: torch.tensor(2.0).mul_(t).item(),
    "alpha": lambda t: torch.add(torch.ones(4), torch.ones(4), alpha=t + 0),
}


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("wrapped", WRAPPED)
@pytest.mark.sweep(keep=["list-", "object-item", "distribution-alpha"])
def test_the_number_in_a_tensor_that_is_no_attribute_is_not_taken_for_a_constant(
    wrapped: str, read: str
) -> None:
    wrap, unwrap = WRAPPED[wrapped]
    blocks = [
        Block(wrap(torch.tensor(v)), lambda h: READS[read](unwrap(h))) for v in (1.0, 2.0, 1.0)
    ]
    compiled = lazyinline.compile(nn.Sequential(*blocks), backend="eager", fallback="error")
    with pytest.raises(CaptureError, match="cannot be captured"):
        compiled(torch.randn(2, 4))


def test_a_tensor_made_from_a_number_gives_the_number_back() -> None:
    model = Model(2.0, lambda h: torch.tensor(h).item())
    compiled, x = lazyinline.compile(model, backend="eager"), torch.randn(2, 4)
    assert torch.equal(compiled(x), model(x))


def test_printing_a_tensor_that_is_no_attribute_is_no_reading_of_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = Model([torch.tensor([1.5])], lambda h: print(h[0]) or 2.0)  # type: ignore[func-returns-value]
    compiled, x = lazyinline.compile(model, backend="eager"), torch.randn(2, 4)
    assert torch.equal(compiled(x), model(x))
    assert capsys.readouterr().out.splitlines() == ["tensor([1.5000])"] * 2


class Named(nn.Module):
    """Attributes with names that ``nn.Module`` has methods of."""

    def __init__(self) -> None:
        super().__init__()
        self.half: Any = 2.0
        self.type: Any = "sum"

    def forward(self, x: Tensor) -> Tensor:
        return x + self.half if self.type == "sum" else x * self.half


HELPER: Any = nn.Linear(4, 4)


class WithHelper(nn.Module):
    """Reads a module that is not in its tree."""

    def __init__(self) -> None:
        super().__init__()
        self.helpers: Any = {"a": nn.Linear(4, 4)}
        object.__setattr__(self, "hidden", nn.Linear(4, 4))
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        size = self.hidden.in_features * self.weight.shape[0]  # type: ignore[operator]
        return F.dropout(HELPER(x), 0.5, HELPER.training) * size + self.helpers["a"](x)


UNSEEN: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], Any]]] = {
    "an attribute named like a method": (Named, lambda m: setattr(m, "type", "product")),
    "a number named like a method": (Named, lambda m: setattr(m, "half", 3.0)),
    "mode of a global module": (WithHelper, lambda m: HELPER.eval()),
    "parameter of a global module": (
        WithHelper,
        lambda m: setattr(HELPER, "weight", nn.Parameter(torch.ones(4, 4))),
    ),
    "forward of a global module": (WithHelper, lambda m: setattr(HELPER, "forward", torch.neg)),
    "hook on a global module": (
        WithHelper,
        lambda m: HELPER.register_forward_hook(lambda module, args, result: result * 2),
    ),
    "forward of a module in a dictionary": (
        WithHelper,
        lambda m: setattr(m.helpers["a"], "forward", torch.neg),
    ),
    "attribute of a hidden module": (WithHelper, lambda m: setattr(m.hidden, "in_features", 5)),
    "hidden module": (
        WithHelper,
        lambda m: object.__setattr__(m, "hidden", nn.Linear(6, 6)),
    ),
    "size of a parameter": (
        WithHelper,
        lambda m: setattr(m, "weight", nn.Parameter(torch.ones(5))),
    ),
}


@pytest.mark.parametrize("name", UNSEEN)
def test_a_change_of_any_module_that_is_read_is_noticed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "HELPER", nn.Linear(4, 4))
    make, change = UNSEEN[name]
    model, x = make(), torch.randn(2, 4)
    compiled = lazyinline.compile(model, backend="eager")
    for _ in range(2):
        torch.manual_seed(0)
        have = compiled(x)
        torch.manual_seed(0)
        assert torch.equal(have, model(x))
        change(model)
        torch.manual_seed(0)
        have = compiled(x)
        torch.manual_seed(0)
        assert torch.equal(have, model(x))


def parts() -> Callable[[Tensor, float], Tensor]:
    factor = 2.0

    def scaled(x: Tensor, by: float = 1.0) -> Tensor:
        """Docs."""
        return x * by * factor

    return scaled


def put_in_cell(function: Any) -> None:
    function.__closure__[0].cell_contents = 5.0


PARTS: dict[str, tuple[Callable[[Any], float], Callable[[Any], None]]] = {
    "name": (lambda f: len(f.__name__), setting("__name__", "a_longer_name")),
    "docs": (lambda f: len(f.__doc__), setting("__doc__", "More docs.")),
    "defaults": (lambda f: f.__defaults__[0], setting("__defaults__", (3.0,))),
    "signature": (
        lambda f: inspect.signature(f).parameters["by"].default,
        setting("__defaults__", (3.0,)),
    ),
    "captured": (lambda f: f.__closure__[0].cell_contents, put_in_cell),
}


@pytest.mark.parametrize("name", PARTS)
def test_a_change_of_a_function_that_is_read_and_does_not_run_is_noticed(name: str) -> None:
    read, change = PARTS[name]
    model, x = Model(parts(), read), torch.randn(2, 4)
    compiled = lazyinline.compile(model, backend="eager")
    assert torch.equal(compiled(x), model(x))
    change(model.held)
    assert torch.equal(compiled(x), model(x))


def by_dictionary(module: nn.Module, value: float) -> None:
    module.__dict__["steps"] = value


def by_update(module: nn.Module, value: float) -> None:
    vars(module).update(steps=value)


def past_the_module(module: nn.Module, value: float) -> None:
    object.__setattr__(module, "steps", value)


@pytest.mark.parametrize("put", [by_dictionary, by_update, past_the_module])
def test_a_forward_that_counts_past_the_module_counts_as_eager(
    put: Callable[[nn.Module, float], None],
) -> None:
    class Counting(nn.Module):
        steps = 1.0

        def __init__(self) -> None:
            super().__init__()
            self.steps = 1.0

        def forward(self, x: Tensor) -> Tensor:
            y = x * self.steps
            put(self, self.steps + 1.0)
            return y

    ours, theirs, x = Counting(), Counting(), torch.randn(2, 4)
    compiled = lazyinline.compile(ours, backend="eager")
    for _ in range(4):
        assert torch.equal(compiled(x), theirs(x))
        assert ours.steps == theirs.steps


def test_what_a_cached_property_keeps_is_kept_as_in_eager() -> None:
    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = 2.0

        @functools.cached_property
        def factors(self) -> list[float]:
            return [self.scale, 1.0]

        def forward(self, x: Tensor) -> Tensor:
            return x * self.factors[0]

    ours, theirs, x = Cached(), Cached(), torch.randn(2, 4)
    compiled = lazyinline.compile(ours, backend="eager")
    for _ in range(3):
        assert torch.equal(compiled(x), theirs(x))
        assert vars(ours).get("factors") == vars(theirs).get("factors")
        ours.scale = theirs.scale = ours.scale + 1.0


@pytest.mark.parametrize("seed", [0, 3])
def test_a_forward_that_seeds_the_generator_itself_draws_as_eager(seed: int) -> None:
    def forward(held: Any) -> Tensor:
        torch.default_generator.manual_seed(seed)
        return torch.rand(4)

    model, x = Model(None, forward), torch.randn(2, 4)
    compiled = lazyinline.compile(model, backend="eager")
    torch.manual_seed(0)
    have = [compiled(x) for _ in range(3)]
    assert all(torch.equal(h, model(x)) for h in have)


# ---- parameters that are held in two places ------------------------------------------------------


def parameter() -> nn.Parameter:
    return nn.Parameter(torch.rand(4, dtype=torch.float64))


@lazy_inline
class Holding(nn.Module):
    """Takes a parameter of its own from where ``find`` says; ``hold`` puts it there."""

    def __init__(self, hold: Callable[[Any], None], find: Callable[[Any], Any]) -> None:
        super().__init__()
        self.a, self.b = parameter(), parameter()
        self.hold, self.find = hold, find

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.find(self)) * self.b


def hold_in(make: Callable[[Any], Any]) -> Callable[[Any], None]:
    return lambda block: setattr(block, "held", make(block))


def hold_outside(block: Any) -> None:
    outside = nn.Module()
    outside.held = [block.a]  # type: ignore[assignment]
    block.held = [outside]


def hold_in_closure(block: Any) -> None:
    parameter = block.a
    block.held = lambda: parameter


def rebuilt(block: Any) -> Any:
    block.held = [block.a, block.b]
    return block.held[0]


def refilled(block: Any) -> Any:
    block.held.clear()
    block.held.append(block.a)
    return block.held[0]


def nothing(block: Any) -> None:
    """Holds it nowhere else."""


# Where a parameter is held besides its module's table, and how the forward finds it.
HOLDERS: dict[str, tuple[Callable[[Any], None], Callable[[Any], Any]]] = {
    "list": (hold_in(lambda block: [block.a]), lambda block: block.held[0]),
    "tuple": (hold_in(lambda block: (block.a,)), lambda block: block.held[0]),
    "dict": (hold_in(lambda block: {"a": [block.a]}), lambda block: block.held["a"][0]),
    "namespace": (
        hold_in(lambda block: types.SimpleNamespace(a=block.a)),
        lambda block: block.held.a,
    ),
    "closure": (hold_in_closure, lambda block: block.held()),
    "list of a module outside": (hold_outside, lambda block: block.held[0].held[0]),
    "list made anew": (nothing, rebuilt),
    "list filled anew": (hold_in(lambda block: []), refilled),
    "ParameterList": (
        hold_in(lambda block: nn.ParameterList([block.a])),
        lambda block: block.held[:1][0],
    ),
}


def _replace(block: Any) -> None:
    block.a = nn.Parameter(torch.full((4,), 3.0, dtype=torch.float64))


def _exchange(block: Any) -> None:
    block.a, block.b = block.b, block.a


def _freeze(block: Any) -> None:
    block.a.requires_grad_(False)


@pytest.mark.parametrize("change", [_replace, _exchange, _freeze])
@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.sweep(
    keep=["[list-", "closure-_freeze", "list made anew-_replace", "ParameterList-_exchange"]
)
def test_a_parameter_that_is_held_twice_is_read_where_eager_reads_it(
    holder: str, change: Callable[[Any], None]
) -> None:
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        model = nn.Sequential(*(Holding(*HOLDERS[holder]) for _ in range(3)))
        for block in model:
            block.hold(block)
        models.append(model)
    ours, theirs = models
    compiled = lazyinline.compile(ours, backend="eager")
    # Those that the model lost are trained on, for a list may hold them still.
    every = [list(model.parameters()) for model in models]
    for step in range(4):
        if step == 2:
            for model, known in zip(models, every, strict=True):
                change(model[1])
                known += [p for p in model.parameters() if all(p is not k for k in known)]
        x = torch.linspace(-1, 1, 8, dtype=torch.float64).view(2, 4) + step
        results = [run(x) for run in (compiled, theirs)]
        torch.testing.assert_close(*results)
        for result in results:
            result.sum().backward()
        for mine, other in zip(*every, strict=True):
            assert (mine.grad is None) == (other.grad is None)
            if mine.grad is not None:
                torch.testing.assert_close(mine.grad, other.grad)
        for known in every:
            torch.optim.SGD(known, lr=0.1).step()
            for p in known:
                p.grad = None


def test_a_global_that_is_a_parameter_stays_it_when_the_module_gets_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = parameter()

        def forward(self, x: Tensor) -> Any:
            return x * globals()["SHARED"] + self.a.sum()

    model = Reads()
    monkeypatch.setitem(globals(), "SHARED", model.a)
    compiled = lazyinline.compile(model, backend="eager")
    x = torch.ones(4, dtype=torch.float64)
    for _ in range(2):
        torch.testing.assert_close(compiled(x), model(x))
        model.a = parameter()
