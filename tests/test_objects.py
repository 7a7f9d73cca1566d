"""Whatever object a forward reads, and however it reaches it, it says what eager says.

An object that shows nothing of its state is equal to itself alone; values of the standard library
that say all of it (numbers, dates, patterns, paths) are compared by that.
"""

from __future__ import annotations

import array
import collections
import contextvars
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import hashlib
import io
import ipaddress
import itertools
import logging
import mmap
import operator
import pathlib
import queue
import random
import re
import string
import struct
import threading
import types
import uuid
import weakref
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lazyinline


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


class Level(enum.IntFlag):
    LOW = 1
    HIGH = 2


class Named(collections.namedtuple("Named", "value")):
    __slots__ = ()


@dataclasses.dataclass(frozen=True)
class Frozen:
    value: float = 1.0


@dataclasses.dataclass(eq=False)
class Open:
    value: float = 1.0


@dataclasses.dataclass
class Equal:
    value: float = 1.0


class Day(datetime.date):
    """A date of a class of its own, which may hold more."""

    scale = 1.0


class Money(decimal.Decimal):
    scale = 1.0


class Always:
    """Is equal to everything."""

    def __init__(self, value: float = 1.0) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = object.__hash__


class Target:
    value = 1.0


def holder(value: float) -> types.SimpleNamespace:
    return types.SimpleNamespace(value=value)


TARGETS = [Target(), Target()]
TARGETS[1].value = 3.0  # type: ignore[misc]


def variable(value: float) -> contextvars.ContextVar[float]:
    made = contextvars.ContextVar[float]("made")
    made.set(value)
    return made


def logger(level: int) -> logging.Logger:
    made = logging.Logger("made")
    made.setLevel(level)
    return made


def locked(kind: Callable[[], Any], is_locked: bool) -> Any:
    made = kind()
    if is_locked:
        made.acquire()
    return made


def event(is_set: bool) -> threading.Event:
    made = threading.Event()
    if is_set:
        made.set()
    return made


def with_items(made: Any, count: int) -> Any:
    for item in range(count):
        made.put(item)
    return made


def mapped(text: bytes) -> mmap.mmap:
    made = mmap.mmap(-1, 8)
    made[: len(text)] = text
    return made


def at(made: Any, place: int) -> Any:
    made.seek(place)
    return made


def set_first(value: Any) -> None:
    value[0] = type(value[0])(5)


@dataclass(frozen=True)
class Kind:
    """How objects of a kind are made with one value and another, read, and changed in place."""

    first: Callable[[], Any]
    other: Callable[[], Any]
    read: Callable[[Any], float]
    change: Callable[[Any], Any] | None = None


def set_value(value: Any) -> None:
    value.value = 5.0


def by_name(name: str) -> Callable[[Any], float]:
    return operator.attrgetter(name)


KINDS: dict[str, Kind] = {
    "Decimal": Kind(lambda: decimal.Decimal("1.5"), lambda: decimal.Decimal("2.5"), float),
    "Decimal digits": Kind(
        lambda: decimal.Decimal("1.0"), lambda: decimal.Decimal("1.00"), lambda d: len(str(d))
    ),
    "Decimal subclass": Kind(
        lambda: Money("1.5"),
        lambda: Money("1.5"),
        lambda d: float(d) * d.scale,
        lambda d: setattr(d, "scale", 5.0),
    ),
    "Context": Kind(
        lambda: decimal.Context(prec=3),
        lambda: decimal.Context(prec=5),
        lambda c: c.prec,
        lambda c: setattr(c, "prec", 9),
    ),
    "date": Kind(
        lambda: datetime.date(2020, 1, 1),
        lambda: datetime.date(2021, 1, 1),
        lambda d: d.year - 2018,
    ),
    "date subclass": Kind(
        lambda: Day(2020, 1, 1),
        lambda: Day(2020, 1, 1),
        lambda d: (d.year - 2018) * d.scale,
        lambda d: setattr(d, "scale", 5.0),
    ),
    "datetime": Kind(
        lambda: datetime.datetime(2020, 1, 1, 2),
        lambda: datetime.datetime(2020, 1, 1, 2, fold=1),
        lambda d: d.hour + d.fold,
    ),
    "aware datetime": Kind(
        lambda: datetime.datetime(2020, 1, 1, 2, tzinfo=datetime.timezone.utc),
        lambda: datetime.datetime(
            2020, 1, 1, 3, tzinfo=datetime.timezone(datetime.timedelta(hours=1))
        ),
        lambda d: d.hour,
    ),
    "time": Kind(lambda: datetime.time(1), lambda: datetime.time(2), lambda t: t.hour),
    "timedelta": Kind(
        lambda: datetime.timedelta(seconds=1),
        lambda: datetime.timedelta(seconds=2),
        lambda t: t.total_seconds(),
    ),
    "timezone": Kind(
        lambda: datetime.timezone(datetime.timedelta(hours=1)),
        lambda: datetime.timezone(datetime.timedelta(hours=1), "name"),
        lambda t: len(t.tzname(None)),
    ),
    "Pattern": Kind(
        lambda: re.compile("a+"), lambda: re.compile("b+"), lambda p: ord(p.pattern[0])
    ),
    "Pattern flags": Kind(
        lambda: re.compile("a"),
        lambda: re.compile("a", re.IGNORECASE),
        lambda p: 2.0 if p.match("A") else 1.0,
    ),
    "Match": Kind(lambda: re.match("a+", "aab"), lambda: re.match("a+", "aaab"), lambda m: m.end()),
    "Fraction": Kind(lambda: fractions.Fraction(1, 2), lambda: fractions.Fraction(3, 2), float),
    "IPv4Address": Kind(
        lambda: ipaddress.ip_address("0.0.0.1"), lambda: ipaddress.ip_address("0.0.0.2"), int
    ),
    "IPv4Network": Kind(
        lambda: ipaddress.ip_network("10.0.0.0/30"),
        lambda: ipaddress.ip_network("10.0.0.0/29"),
        lambda n: n.num_addresses,
    ),
    "UUID": Kind(lambda: uuid.UUID(int=1), lambda: uuid.UUID(int=2), lambda u: u.int),
    "array": Kind(
        lambda: array.array("d", [1.0]), lambda: array.array("d", [2.0]), lambda a: a[0], set_first
    ),
    "bytearray": Kind(lambda: bytearray([1]), lambda: bytearray([2]), lambda b: b[0], set_first),
    "memoryview": Kind(
        lambda: memoryview(bytearray([1])),
        lambda: memoryview(bytearray([2])),
        lambda b: b[0],
        set_first,
    ),
    "mmap": Kind(
        lambda: mapped(b"\1"),
        lambda: mapped(b"\2"),
        lambda m: m[0],
        lambda m: m.__setitem__(slice(0, 1), b"\3"),
    ),
    "Event": Kind(
        lambda: event(False),
        lambda: event(True),
        lambda e: 2.0 if e.is_set() else 1.0,
        lambda e: e.clear() if e.is_set() else e.set(),
    ),
    "Lock": Kind(
        lambda: locked(threading.Lock, False),
        lambda: locked(threading.Lock, True),
        lambda v: 2.0 if v.locked() else 1.0,
        lambda v: v.release() if v.locked() else v.acquire(),
    ),
    "RLock": Kind(
        lambda: locked(threading.RLock, False),
        lambda: locked(threading.RLock, True),
        lambda v: 2.0 if "count=0" in repr(v) else 1.0,
    ),
    "RLock that is asked": Kind(
        lambda: locked(threading.RLock, False),
        lambda: locked(threading.RLock, True),
        lambda v: 2.0 if v._is_owned() else 1.0,
        lambda v: v.release() if v._is_owned() else v.acquire(),
    ),
    "Semaphore": Kind(
        lambda: threading.Semaphore(1),
        lambda: threading.Semaphore(2),
        lambda s: s._value,
        lambda s: s.release(),
    ),
    "Condition": Kind(
        lambda: threading.Condition(threading.Lock()),
        lambda: threading.Condition(locked(threading.Lock, True)),
        lambda c: 2.0 if c._lock.locked() else 1.0,
    ),
    "Barrier": Kind(
        lambda: threading.Barrier(1),
        lambda: threading.Barrier(2),
        lambda b: b.parties,
        lambda b: setattr(b, "_parties", 5),
    ),
    "Thread": Kind(
        lambda: threading.Thread(name="a"),
        lambda: threading.Thread(name="ab"),
        lambda t: len(t.name),
        lambda t: setattr(t, "name", "abc"),
    ),
    "SimpleQueue": Kind(
        lambda: with_items(queue.SimpleQueue(), 1),
        lambda: with_items(queue.SimpleQueue(), 2),
        lambda q: q.qsize(),
        lambda q: q.put(3),
    ),
    "Queue": Kind(
        lambda: with_items(queue.Queue(), 1),
        lambda: with_items(queue.Queue(), 2),
        lambda q: q.qsize(),
        lambda q: q.put(3),
    ),
    "PriorityQueue": Kind(
        lambda: with_items(queue.PriorityQueue(), 1),
        lambda: with_items(queue.PriorityQueue(), 2),
        lambda q: q.qsize(),
        lambda q: q.put(3),
    ),
    "ContextVar": Kind(
        lambda: variable(1.0), lambda: variable(2.0), lambda v: v.get(), lambda v: v.set(5.0)
    ),
    "ref": Kind(
        lambda: weakref.ref(TARGETS[0]), lambda: weakref.ref(TARGETS[1]), lambda r: r().value
    ),
    "proxy": Kind(
        lambda: weakref.proxy(TARGETS[0]), lambda: weakref.proxy(TARGETS[1]), lambda r: r.value
    ),
    "WeakKeyDictionary": Kind(
        lambda: weakref.WeakKeyDictionary({TARGETS[0]: 1.0}),
        lambda: weakref.WeakKeyDictionary({TARGETS[0]: 2.0}),
        lambda d: d[TARGETS[0]],
        lambda d: d.__setitem__(TARGETS[0], 5.0),
    ),
    "hash": Kind(
        lambda: hashlib.sha256(b"a"),
        lambda: hashlib.sha256(b"b"),
        lambda h: h.digest()[0],
        lambda h: h.update(b"c"),
    ),
    "compressor": Kind(
        lambda: zlib.compressobj(1),
        lambda: zlib.compressobj(9),
        lambda c: len(c.copy().flush()),
        lambda c: c.compress(bytes(range(256))),
    ),
    "Struct": Kind(lambda: struct.Struct("i"), lambda: struct.Struct("q"), lambda s: s.size),
    "BytesIO": Kind(
        lambda: io.BytesIO(b"a"),
        lambda: io.BytesIO(b"ab"),
        lambda b: len(b.getvalue()),
        lambda b: at(b, 1).write(b"cdef"),
    ),
    "StringIO": Kind(
        lambda: io.StringIO("a"),
        lambda: io.StringIO("ab"),
        lambda b: len(b.getvalue()),
        lambda b: at(b, 1).write("cdef"),
    ),
    "Path": Kind(lambda: pathlib.Path("a"), lambda: pathlib.Path("ab"), lambda p: len(p.name)),
    "PurePath": Kind(
        lambda: pathlib.PurePosixPath("a/b"),
        lambda: pathlib.PurePosixPath("ab"),
        lambda p: len(p.parts),
    ),
    "Enum": Kind(lambda: Colour.RED, lambda: Colour.BLUE, lambda c: c.value),
    "IntFlag": Kind(lambda: Level.LOW, lambda: Level.LOW | Level.HIGH, lambda c: c.value),
    "frozen dataclass": Kind(Frozen, lambda: Frozen(2.0), by_name("value")),
    "dataclass": Kind(Equal, lambda: Equal(2.0), by_name("value"), set_value),
    "dataclass without ==": Kind(Open, lambda: Open(2.0), by_name("value"), set_value),
    "equal to everything": Kind(Always, lambda: Always(2.0), by_name("value"), set_value),
    "SimpleNamespace": Kind(lambda: holder(1.0), lambda: holder(2.0), by_name("value"), set_value),
    "namedtuple": Kind(lambda: Named(1.0), lambda: Named(2.0), by_name("value")),
    "deque": Kind(
        lambda: collections.deque([1.0]),
        lambda: collections.deque([2.0]),
        lambda d: d[0],
        set_first,
    ),
    "Counter": Kind(
        lambda: collections.Counter(a=1),
        lambda: collections.Counter(a=2),
        lambda c: c["a"],
        lambda c: c.update(a=1),
    ),
    "OrderedDict": Kind(
        lambda: collections.OrderedDict(a=1, b=2),
        lambda: collections.OrderedDict(b=2, a=1),
        lambda d: next(iter(d.values())),
        lambda d: d.__setitem__("a", 7),
    ),
    "defaultdict": Kind(
        lambda: collections.defaultdict(float, a=1.0),
        lambda: collections.defaultdict(float, a=2.0),
        lambda d: d["a"],
        lambda d: d.__setitem__("a", 7),
    ),
    "ChainMap": Kind(
        lambda: collections.ChainMap({"a": 1.0}),
        lambda: collections.ChainMap({"a": 2.0}),
        lambda d: d["a"],
        lambda d: d.__setitem__("a", 7),
    ),
    "UserDict": Kind(
        lambda: collections.UserDict(a=1.0),
        lambda: collections.UserDict(a=2.0),
        lambda d: d["a"],
        lambda d: d.__setitem__("a", 7),
    ),
    "MappingProxyType": Kind(
        lambda: types.MappingProxyType({"a": 1.0}),
        lambda: types.MappingProxyType({"a": 2.0}),
        lambda d: d["a"],
    ),
    "frozenset": Kind(lambda: frozenset([1]), lambda: frozenset([1, 2]), len),
    "set": Kind(lambda: {1}, lambda: {1, 2}, len, lambda s: s.add(3)),
    "range": Kind(lambda: range(2), lambda: range(3), len),
    "slice": Kind(lambda: slice(1), lambda: slice(2), lambda s: s.stop),
    "Random": Kind(
        lambda: random.Random(1),
        lambda: random.Random(2),
        lambda r: r.getstate()[1][0] % 1000,
        lambda r: r.seed(7),
    ),
    "partial": Kind(
        lambda: functools.partial(float, 1.0),
        lambda: functools.partial(float, 2.0),
        lambda p: p(),
        lambda p: p.__setstate__((float, (5.0,), {}, {})),
    ),
    "itemgetter": Kind(
        lambda: operator.itemgetter(0), lambda: operator.itemgetter(1), lambda g: g((1.0, 2.0))
    ),
    "attrgetter": Kind(
        lambda: operator.attrgetter("real"),
        lambda: operator.attrgetter("imag"),
        lambda g: g(1 + 2j),
    ),
    "methodcaller": Kind(
        lambda: operator.methodcaller("count", 1),
        lambda: operator.methodcaller("count", 2),
        lambda g: g([1, 2, 2]),
    ),
    "Logger": Kind(
        lambda: logger(10),
        lambda: logger(30),
        lambda v: 2.0 if v.isEnabledFor(20) else 1.0,
        lambda v: v.setLevel(40 if v.level < 20 else 10),
    ),
    "LoggerAdapter": Kind(
        lambda: logging.LoggerAdapter(logger(10), {}),
        lambda: logging.LoggerAdapter(logger(30), {}),
        lambda v: 2.0 if v.isEnabledFor(20) else 1.0,
        lambda v: v.setLevel(40 if v.logger.level < 20 else 10),
    ),
    "Template": Kind(
        lambda: string.Template("a"),
        lambda: string.Template("ab"),
        lambda t: len(t.template),
        lambda t: setattr(t, "template", "abcdef"),
    ),
    "numpy scalar": Kind(lambda: np.float64(1.5), lambda: np.float64(2.5), float),
    "numpy array": Kind(
        lambda: np.array([1.0]), lambda: np.array([2.0]), lambda a: float(a[0]), set_first
    ),
    "numpy records": Kind(
        lambda: np.ones(1).view(np.recarray),
        lambda: np.zeros(1).view(np.recarray),
        lambda a: float(a[0]),
        lambda a: a.fill(5.0),
    ),
    "datetime64": Kind(
        lambda: np.datetime64("2020-01-01"),
        lambda: np.datetime64("2020-01-02"),
        lambda d: d.astype(int) - 18000,
    ),
    "structured dtype": Kind(
        lambda: np.dtype([("a", "f4")]), lambda: np.dtype([("a", "f8")]), lambda d: d.itemsize
    ),
    "poly1d": Kind(
        lambda: np.poly1d([1.0, 2.0]),
        lambda: np.poly1d([3.0, 2.0]),
        lambda p: float(p(1.0)),
        lambda p: p.__setitem__(0, 7.0),
    ),
    "finfo": Kind(lambda: np.finfo(np.float32), lambda: np.finfo(np.float64), lambda f: f.bits),
    "torch finfo": Kind(
        lambda: torch.finfo(torch.float16), lambda: torch.finfo(torch.float32), lambda f: f.bits
    ),
    "torch dtype": Kind(lambda: torch.float16, lambda: torch.float32, lambda d: d.itemsize),
    "torch device": Kind(
        lambda: torch.device("cpu"), lambda: torch.device("cpu", 0), lambda d: len(str(d))
    ),
    "torch Size": Kind(lambda: torch.Size([1]), lambda: torch.Size([2]), lambda s: s[0]),
    "distribution": Kind(
        lambda: torch.distributions.Bernoulli(0.5),
        lambda: torch.distributions.Bernoulli(0.25),
        lambda d: d.probs.reshape(1),
    ),
    "scheduler": Kind(
        lambda: torch.optim.SGD([torch.zeros(1)], lr=1.0),
        lambda: torch.optim.SGD([torch.zeros(1)], lr=2.0),
        lambda o: o.param_groups[0]["lr"],
        lambda o: o.param_groups[0].__setitem__("lr", 5.0),
    ),
    "property of a class": Kind(
        lambda: property(lambda s: 1.0), lambda: property(lambda s: 2.0), lambda p: p.fget(None)
    ),
    "exception": Kind(
        lambda: ValueError(1.0),
        lambda: ValueError(2.0),
        lambda e: e.args[0],
        lambda e: setattr(e, "args", (5.0,)),
    ),
    "bound method of C": Kind(
        lambda: [1.0].__getitem__,
        lambda: [2.0].__getitem__,
        lambda g: g(0),
        lambda g: g.__self__.__setitem__(0, 5.0),
    ),
}


class Box:
    kept: Any = None


KEPT: Any = None


class Reader(nn.Module):
    """Multiplies by what an object says."""

    def __init__(self, read: Callable[[Any], float]) -> None:
        super().__init__()
        self.read = read

    def put(self, value: Any) -> None:
        """Makes an object the one that is read."""

    def args(self, value: Any) -> tuple[Any, ...]:
        self.put(value)
        return ()


class Argument(Reader):
    def args(self, value: Any) -> tuple[Any, ...]:
        return (value,)

    def forward(self, x: Tensor, value: Any) -> Tensor:
        return x * self.read(value)


class Attribute(Reader):
    def put(self, value: Any) -> None:
        self.value = value

    def forward(self, x: Tensor) -> Tensor:
        return x * self.read(self.value)


class Item(Reader):
    def __init__(self, read: Callable[[Any], float]) -> None:
        super().__init__(read)
        self.values = [None]

    def put(self, value: Any) -> None:
        self.values[0] = value

    def forward(self, x: Tensor) -> Tensor:
        return x * self.read(self.values[0])


class Nested(Reader):
    def __init__(self, read: Callable[[Any], float]) -> None:
        super().__init__(read)
        self.held = holder(0.0)

    def put(self, value: Any) -> None:
        self.held.value = {"key": (value,)}

    def forward(self, x: Tensor) -> Tensor:
        return x * self.read(self.held.value["key"][0])


class Global(Reader):
    def put(self, value: Any) -> None:
        global KEPT
        KEPT = value

    def forward(self, x: Tensor) -> Tensor:
        return x * self.read(KEPT)


class OfClass(Reader):
    def put(self, value: Any) -> None:
        Box.kept = value

    def forward(self, x: Tensor) -> Tensor:
        return x * self.read(Box.__dict__["kept"])


class Captured(Reader):
    def __init__(self, read: Callable[[Any], float]) -> None:
        super().__init__(read)
        held: Any = None

        def put(value: Any) -> None:
            nonlocal held
            held = value

        self.put = put  # type: ignore[method-assign]
        self.get = lambda: held

    def forward(self, x: Tensor) -> Tensor:
        return x * self.read(self.get())


class Default(Reader):
    def __init__(self, read: Callable[[Any], float]) -> None:
        super().__init__(read)
        self.get = lambda value=None: value

    def put(self, value: Any) -> None:
        self.get.__defaults__ = (value,)  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return x * self.read(self.get())


USUAL = [Attribute]
WAYS = [
    *USUAL,
    *(
        pytest.param(way, marks=pytest.mark.sweep)
        for way in (Argument, Item, Nested, Global, OfClass, Captured, Default)
    ),
]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_what_an_object_says_is_noticed(kind: str, way: type[Reader]) -> None:
    row, x = KINDS[kind], torch.ones(2)
    model = way(row.read)
    run = lazyinline.compile(model, backend="eager")
    first, other = row.first(), row.other()

    def check(value: Any) -> None:
        args = model.args(value)
        expected = model(x, *args)
        torch.testing.assert_close(run(x, *args), expected, rtol=0, atol=0)

    for value in (first, other, first):
        check(value)
    if row.change is not None:
        row.change(first)
        check(first)
        check(other)
        row.change(other)
        check(other)


class Results(nn.Module):
    def __init__(self, make: Callable[[nn.Module, Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.make = make

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x)
        return y, self.make(self, y)


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


def made_function(value: Any) -> Callable[[], Any]:
    return lambda: value


def of_objects(value: Any) -> Any:
    made = np.empty(1, dtype=object)
    made[0] = value
    return made


def made_default(value: Any) -> Callable[[], Any]:
    return lambda found=value: found


# What a result is made of, and how its tensors are read, twice.
RESULTS: dict[str, tuple[Callable[[Any, Tensor], Any], Callable[[Any], list[Any]]]] = {
    "generator": (lambda m, y: (y * i for i in range(2)), list),
    "map": (lambda m, y: map(torch.relu, [y, y]), list),
    "zip": (lambda m, y: zip([y], [y], strict=True), lambda z: [t for pair in z for t in pair]),
    "enumerate": (lambda m, y: enumerate([y]), lambda e: [t for _, t in e]),
    "reversed": (lambda m, y: reversed([y, y + 1]), list),
    "iterator": (lambda m, y: iter([y]), list),
    "iterator of numbers": (lambda m, y: iter([1.0, 2.0]), list),
    "count": (lambda m, y: itertools.count(), lambda c: [next(c), next(c)]),
    "chain": (lambda m, y: itertools.chain([y]), list),
    "filter": (lambda m, y: filter(None.__class__.__instancecheck__, [y]) and iter([y]), list),
    "view of a dict": (lambda m, y: {"a": y}.values(), list),
    "proxy of a dict": (lambda m, y: types.MappingProxyType({"a": y}), lambda p: [p["a"]]),
    "set": (lambda m, y: {y}, list),
    "array of objects": (lambda m, y: of_objects(y), lambda a: [a[0]]),
    "function": (lambda m, y: made_function(y), lambda f: [f()]),
    "default": (lambda m, y: made_default(y), lambda f: [f()]),
    "partial": (lambda m, y: functools.partial(torch.relu, y), lambda f: [f()]),
    "method": (lambda m, y: y.sum, lambda f: [f()]),
    "method of a module": (lambda m, y: m.linear.forward, lambda f: [f(torch.ones(2))]),
    "object": (lambda m, y: holder(y), lambda h: [h.value]),
    "slots": (lambda m, y: Slotted([y]), lambda h: h.value),
    "cell": (lambda m, y: types.CellType(y), lambda c: [c.cell_contents]),
    "exception": (lambda m, y: ValueError(y), lambda e: [e.args[0]]),
    "module": (lambda m, y: m.linear, lambda m: [m.weight]),
    "parameter in an object": (lambda m, y: holder(m.linear.weight), lambda h: [h.value]),
}


@pytest.mark.parametrize("name", RESULTS)
def test_a_result_that_leads_to_tensors_is_made_by_the_model_itself(name: str) -> None:
    make, read = RESULTS[name]
    model = Results(make)
    run = lazyinline.compile(model, backend="eager")
    for _ in range(3):
        for x in (torch.ones(2), torch.zeros(2)):
            (first, given), (second, expected) = run(x), model(x)
            torch.testing.assert_close(first, second, rtol=0, atol=0)
            assert type(given) is type(expected)
            found = read(given)
            torch.testing.assert_close(found, read(expected), rtol=0, atol=0)
            assert all(type(t) in (Tensor, nn.Parameter, float, int) for t in found)


class Holding(nn.Module):
    """Puts an attribute on what it is given, or on what it reads, at each call."""

    def __init__(self, put: Callable[[Any], None], held: Any) -> None:
        super().__init__()
        self.put, self.held = put, [held]

    def forward(self, x: Tensor, given: Any = None) -> Tensor:
        self.put(self.held[0] if given is None else given)
        return x + 1


def put_attribute(value: Any) -> None:
    value.seen = getattr(value, "seen", 0) + 1


HOLDERS: dict[str, Callable[[], Any]] = {
    "function": lambda: made_function(1.0),
    "object": Open,
    "namespace": lambda: holder(1.0),
    "library object": threading.Event,
    "slots": lambda: type("Made", (Slotted,), {})(1.0),
}


@pytest.mark.parametrize("is_given", [True, False])
@pytest.mark.parametrize("name", HOLDERS)
def test_an_attribute_that_a_forward_puts_on_an_object_is_put_there(
    name: str, is_given: bool
) -> None:
    value = HOLDERS[name]()
    model, x = Holding(put_attribute, value), torch.ones(2)
    run = lazyinline.compile(model, backend="eager")
    for count in range(1, 6):
        run(x, value) if is_given else run(x)
        assert value.seen == count
