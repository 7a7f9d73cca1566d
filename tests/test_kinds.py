"""One table of kinds: a change of what an object holds is seen by everybody who asks, and undone.

Freezing must tell it (another instance may differ like that), a snapshot must (the same object may
be changed), and a snapshot that vouches for an object must notice all that freezing would.
"""

import array
import contextvars
import datetime
import decimal
import enum
import functools
import hashlib
import io
import logging
import mmap
import operator
import pickle
import queue
import random
import re
import struct
import threading
import types
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lazyinline.reuse.evidence.snapshot import Snapshot, same_value
from lazyinline.reuse.freeze import Freezer
from lazyinline.reuse.kinds import (
    FUNCTION,
    KINDS,
    OBJECT,
    SLOTS,
    WHOLE_FUNCTION,
    Kind,
    kinds_of,
)
from lazyinline.reuse.objects import ABSENT, cell_contents


class Config:
    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)

    def get(self) -> Any:
        return self.__dict__


class Slotted:
    __slots__ = ("value",)


class Both(Slotted):
    pass


class Number(float):
    pass


class Count(int):
    pass


class Complex(complex):
    pass


class Text(str):
    pass


class Bytes(bytes):
    pass


class Texts(list[str]):
    pass


class Queue(deque[int]):
    __slots__ = ("scale",)


class Array(np.ndarray):
    __slots__ = ("scale",)


class Mode(enum.Enum):
    ON = 1


KEY = Config()


def make_function(captured: Any) -> Any:
    def function(x: Any, scale: Any = (1, [2])) -> Any:
        return x, captured, scale

    return function


def with_attribute(value: Any, name: str = "scale") -> Any:
    setattr(value, name, 1)
    return value


def change_cell(function: Any) -> None:
    function.__closure__[0].cell_contents = "other"


def change_code(function: Any) -> None:
    function.__code__ = make_function(0).__code__.replace(co_name="other")


def weak_table() -> Any:
    return weakref.WeakKeyDictionary({KEY: 1})


def a_variable() -> Any:
    variable: contextvars.ContextVar[int] = contextvars.ContextVar("a_variable")
    variable.set(1)
    return variable


def setting(name: str, value: Any = 3) -> Callable[[Any], Any]:
    return lambda holder: setattr(holder, name, value)


def setting_item(key: Any, value: Any = 3) -> Callable[[Any], Any]:
    return lambda holder: holder.__setitem__(key, value)


Change = Callable[[Any], Any]
CHANGES: dict[str, tuple[Callable[[], Any], Change]] = {
    "list": (lambda: [1, 2], lambda v: v.append(3)),
    "list item": (lambda: [1, 2.5], lambda v: v.__setitem__(1, 2)),
    "inner list": (lambda: {"a": ([1],)}, lambda v: v["a"][0].append(2)),
    "dict order": (lambda: {"a": 1, "b": 2}, lambda v: v.update(a=v.pop("a"))),
    "dict key": (lambda: {"a": 1}, lambda v: (v.pop("a"), v.update(b=1))),
    "counter": (lambda: Counter("aab"), lambda v: v.update("a")),
    "set": (lambda: {1, 2}, lambda v: v.add(3)),
    "in a frozenset": (lambda: frozenset([Config(a=1)]), lambda v: setting("a")(next(iter(v)))),
    "object": (lambda: Config(scale=1.0), lambda v: setattr(v, "scale", 2.0)),
    "new attribute": (lambda: Config(), lambda v: setattr(v, "scale", 2.0)),
    "object in object": (lambda: Config(a=Config(b=1)), lambda v: setattr(v.a, "b", 2)),
    "class of an object": (lambda: Config(), lambda v: setattr(v, "__class__", type("C", (), {}))),
    "attributes replaced": (lambda: Config(a=1), lambda v: setattr(v, "__dict__", {"a": 2})),
    "namespace": (lambda: types.SimpleNamespace(a=1), lambda v: setattr(v, "a", 2)),
    "of a thread": (lambda: with_attribute(threading.local()), setting("scale")),
    "captured": (lambda: make_function([1]), change_cell),
    "in captured": (lambda: make_function([1]), lambda v: v.__closure__[0].cell_contents.append(2)),
    "in default": (lambda: make_function(1), lambda v: v.__defaults__[0][1].append(3)),
    "defaults": (lambda: make_function(1), lambda v: setattr(v, "__defaults__", ((1, [3]),))),
    "code": (lambda: make_function(1), change_code),
    "function attribute": (lambda: with_attribute(make_function(1)), setting("scale")),
    "slot": (Slotted, lambda v: setattr(v, "value", 1)),
    "inherited slot": (Both, lambda v: setattr(v, "value", 1)),
    "slot of a deque": (lambda: with_attribute(Queue([1])), setting("scale")),
    "slot of an array": (lambda: with_attribute(np.ones(2).view(Array)), setting("scale")),
    "list subclass": (lambda: Texts("ab"), lambda v: v.append("c")),
    "attribute of a list": (lambda: with_attribute(Texts("ab")), setting("scale")),
    "deque": (lambda: deque([1]), lambda v: v.append(2)),
    "default dict": (lambda: defaultdict(list, a=1), lambda v: v.update(a=2)),
    "default factory": (lambda: defaultdict(list), setting("default_factory", dict)),
    "ordered dict": (lambda: OrderedDict(a=1), lambda v: v.update(a=2)),
    "attribute of a dict": (lambda: with_attribute(OrderedDict(a=1)), setting("scale")),
    "view of a dict": (lambda: new_dict().values(), lambda v: DICTS[-1].update(a=2)),
    "proxy of a dict": (lambda: types.MappingProxyType(new_dict()), lambda v: DICTS[-1].clear()),
    "bytes": (lambda: bytearray(b"ab"), lambda v: v.append(1)),
    "memory": (lambda: memoryview(bytearray(b"ab")), setting_item(0)),
    "numbers": (lambda: array.array("d", [1.0]), setting_item(0)),
    "array": (lambda: np.ones(3), lambda v: v.fill(2)),
    "array of objects": (lambda: np.array([1, "a"], dtype=object), setting_item(0)),
    "mask": (lambda: np.ma.array([1.0, 2.0], mask=[True, False]), setting("mask", False)),
    "partial": (lambda: functools.partial(max, []), lambda v: v.args[0].append(1)),
    "attribute of a partial": (lambda: with_attribute(functools.partial(max)), setting("scale")),
    "cached": (lambda: with_attribute(functools.lru_cache(make_function)), setting("scale")),
    "method": (lambda: Config(a=1).get, lambda v: v.__self__.__dict__.update(a=2)),
    "method in C": (lambda: {"a": 1}.get, lambda v: v.__self__.update(a=2)),
    "property": (
        lambda: property(with_attribute(make_function(1))),
        lambda v: setting("scale")(v.fget),
    ),
    "static method": (
        lambda: staticmethod(with_attribute(make_function(1))),
        lambda v: setting("scale")(v.__func__),
    ),
    "cached property": (
        lambda: functools.cached_property(with_attribute(make_function(1))),
        lambda v: setting("scale")(v.func),
    ),
    "range": (lambda: [range(3)], setting_item(0, range(4))),
    "cell": (lambda: types.CellType(1), setting("cell_contents")),
    "exception": (lambda: ValueError(1), setting("args", (3,))),
    "context": (a_variable, lambda v: v.set(3)),
    "weak dictionary": (weak_table, setting_item(KEY)),
    "weak set": (lambda: weakref.WeakSet([KEY]), lambda v: v.discard(KEY)),
    "weak reference": (
        lambda: (lambda c: (c, weakref.ref(c)))(Config(a=1)),
        lambda v: setting("a")(v[1]()),
    ),
    "weak proxy": (
        lambda: (lambda c: (c, weakref.proxy(c)))(Config(a=1)),
        lambda v: setting("a")(v[1]),
    ),
    "logger": (lambda: logging.Logger("a", 10), lambda v: v.setLevel(20)),
    "disabled logger": (lambda: logging.Logger("a", 10), setting("disabled", True)),
    "random": (lambda: random.Random(0), lambda v: v.random()),
    "generator": (lambda: np.random.default_rng(0), lambda v: v.random()),
    "bits": (lambda: np.random.PCG64(0), lambda v: v.random_raw()),
    "old generator": (lambda: np.random.RandomState(0), lambda v: v.rand()),
}
VALUES: dict[str, tuple[Any, Any]] = {
    "float": (Number(1), Number(2)),
    "zero": (Number(0.0), Number(-0.0)),
    "whole number": (Count(1), Count(2)),
    "complex": (Complex(1), Complex(1j)),
    "text": (Text("a"), Text("b")),
    "bytes": (Bytes(b"a"), Bytes(b"b")),
    "Decimal": (decimal.Decimal("1.0"), decimal.Decimal("1.00")),
    "date": (datetime.date(1, 1, 1), datetime.date(1, 1, 2)),
    "datetime": (datetime.datetime(1, 1, 1), datetime.datetime(1, 1, 1, fold=1)),
    "time": (datetime.time(1), datetime.time(1, tzinfo=datetime.timezone.utc)),
    "timedelta": (datetime.timedelta(1), datetime.timedelta(2)),
    "timezone": (datetime.timezone.utc, datetime.timezone(datetime.timedelta(0), "name")),
    "pattern": (re.compile("a"), re.compile("a", re.IGNORECASE)),
}
CHANGES |= {
    f"another {name}": (lambda first=first: [first], setting_item(0, other))  # type: ignore[misc]
    for name, (first, other) in VALUES.items()
}
DICTS: list[dict[str, int]] = []


def new_dict() -> dict[str, int]:
    DICTS.append({"a": 1})
    return DICTS[-1]


@pytest.mark.parametrize("name", CHANGES)
def test_change_is_noticed_or_the_value_is_not_trusted(name: str) -> None:
    make, change = CHANGES[name]
    value = make()
    held, before = Snapshot(WHOLE_FUNCTION), Freezer().freeze(value)
    trusted = held.vouches_for(value)
    assert held.same()
    change(value)
    assert Freezer().freeze(value) != before
    assert not (trusted and held.same())


# They let nobody write; what they show can be put back where it was met itself.
READ_ONLY = ("proxy of a dict", "view of a dict")
# Who runs is watched where it runs: its code, its defaults and what it captured.
OF_FUNCTIONS = ("captured", "in captured", "defaults", "code")


@pytest.mark.parametrize("name", [name for name in CHANGES if name not in OF_FUNCTIONS])
def test_change_is_noticed_and_can_be_undone_and_made_again(name: str) -> None:
    make, change = CHANGES[name]
    value = make()
    unchanged, snapshot = Freezer().freeze(value), Snapshot()
    snapshot.look_into(value)
    repeatable = Freezer().freeze(value) == unchanged
    assert snapshot.same()
    assert not snapshot.put_back()
    change(value)
    changed = Freezer().freeze(value)
    assert not snapshot.same()
    assert snapshot.changed_values() or name in ("dict order", "set", "weak set", "proxy of a dict")
    redo = snapshot.put_forward()
    assert snapshot.put_back()
    if name in READ_ONLY:
        with pytest.raises(Exception, match="cannot be restored"):
            snapshot.refuse_lasting()
        return
    snapshot.refuse_lasting()
    assert snapshot.same()
    assert not repeatable or Freezer().freeze(value) == unchanged
    redo()
    assert not snapshot.same()
    assert not repeatable or Freezer().freeze(value) == changed


@pytest.mark.parametrize("name", VALUES)
def test_a_value_is_equal_to_another_that_says_the_same(name: str) -> None:
    first, other = VALUES[name]
    again = pickle.loads(pickle.dumps(first))
    assert same_value(again, first)
    assert not same_value(other, first)
    assert Freezer().freeze(again) == Freezer().freeze(first) != Freezer().freeze(other)


OPAQUE: dict[str, Callable[[], Any]] = {
    "lock": threading.Lock,
    "queue": queue.SimpleQueue,
    "hash": hashlib.sha256,
    "file": io.BytesIO,
    "layout": lambda: struct.Struct("i"),
    "generator": torch.Generator,
    "context": decimal.Context,
    "getter": lambda: operator.itemgetter(0),
    "memory": lambda: mmap.mmap(-1, 8),
    "match": lambda: re.match("a", "a"),
    "types": lambda: np.dtype([("a", "f4")]),
}


@pytest.mark.parametrize("name", OPAQUE)
def test_what_shows_nothing_is_equal_to_itself_alone(name: str) -> None:
    first, other = OPAQUE[name](), OPAQUE[name]()
    for wrap in (lambda v: v, lambda v: [v], lambda v: Config(a=v)):
        value = wrap(first)
        assert same_value(value, value)
        assert not same_value(wrap(first), wrap(other))
        assert Freezer().freeze(wrap(first)) == Freezer().freeze(wrap(first))
        assert Freezer().freeze(wrap(first)) != Freezer().freeze(wrap(other))


def test_every_row_of_the_table_is_changed_above() -> None:
    changed: list[Kind] = [OBJECT, SLOTS, FUNCTION, WHOLE_FUNCTION]
    for make, _ in CHANGES.values():
        todo = [make()]
        while todo:
            value = todo.pop()
            found = kinds_of(value)
            changed += found
            todo += [x for kind in found if isinstance(value, (list, tuple)) for x in value]
    assert [kind.classes for kind in KINDS if kind not in changed] == []


def test_nothing_there_is_one_value() -> None:
    empty = types.CellType()
    assert cell_contents(empty) is ABSENT
    snapshot = Snapshot()
    snapshot.look_into([empty, slotted := Slotted()])
    empty.cell_contents = 1
    slotted.value = 1
    assert not snapshot.same()
    assert snapshot.put_back()
    assert cell_contents(empty) is ABSENT
    assert not hasattr(slotted, "value")


@pytest.mark.parametrize(
    "value",
    [1, 2.5, "a", None, torch.float32, Mode.ON, max, [1, (2, {"a": 3})], Config(a=[1]), {1, 2}],
    ids=lambda value: type(value).__name__,
)
def test_unchanged_values_are_trusted(value: Any) -> None:
    held = Snapshot(WHOLE_FUNCTION)
    assert held.vouches_for(value)
    assert held.same()


@pytest.mark.parametrize(
    "value",
    [torch.ones(2), nn.Linear(1, 1), [torch.ones(2)], Config(m=nn.ReLU()), iter([1])],
    ids=lambda value: type(value).__name__,
)
def test_tensors_modules_and_iterators_are_never_trusted(value: Any) -> None:
    assert not Snapshot(WHOLE_FUNCTION).vouches_for(value)


def test_cycles_end() -> None:
    value: list[Any] = [1]
    value.append(value)
    held = Snapshot(WHOLE_FUNCTION)
    assert held.vouches_for(value)
    value[0] = 2
    assert not held.same()


def test_deep_values_end() -> None:
    value: list[Any] = []
    for _ in range(3000):
        value = [value]
    assert Snapshot(WHOLE_FUNCTION).vouches_for(value)
