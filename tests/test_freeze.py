"""Frozen values are equal only where code that reads the originals would do the same."""

import array
import collections
import dataclasses
import enum
import functools
import itertools
import operator
import random
import re
import struct
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from comparing import num_calls
from torch import nn

from lazyinline.reuse.freeze import Freezer, describe


def freeze(value: Any) -> Any:
    return Freezer().freeze(value)


class Config:
    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


class Slotted:
    __slots__ = ("a", "b")

    def __init__(self, a: int, b: int | None = None) -> None:
        self.a = a
        if b is not None:
            self.b = b


class SlottedChild(Slotted):
    __slots__ = ("c",)


class Private:
    __slots__ = ("__value",)

    def __init__(self, value: int) -> None:
        self.__value = value


class Hidden(Private):
    """Has a slot of the same private name, as one class name may occur twice in a hierarchy."""

    __slots__ = ("_Private__value",)

    def __init__(self, below: int, value: int) -> None:
        Private.__dict__["_Private__value"].__set__(self, below)
        Hidden.__dict__["_Private__value"].__set__(self, value)


class FromIterator:
    __slots__ = iter(("a",))

    def __init__(self, a: int) -> None:
        self.a = a


@dataclasses.dataclass(slots=True)
class Data:
    a: int = 1


class Ints(list):  # type: ignore[type-arg]
    pass


class Act:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, x: Any) -> Any:
        return x * self.factor

    def method(self, x: Any) -> Any:
        return x * self.factor


class Color(enum.Enum):
    RED = 1
    BLUE = 2


class Number(enum.IntEnum):
    ONE = 1


def times(factor: Any) -> Callable[[Any], Any]:
    return lambda x: x * factor


def with_default(factor: Any) -> Callable[..., Any]:
    return lambda x, k=factor: x * k


def with_keyword_default(factor: Any) -> Callable[..., Any]:
    return lambda x, *, k=factor: x * k


def with_attribute(factor: Any) -> Callable[[Any], Any]:
    def act(x: Any) -> Any:
        return x * act.factor  # type: ignore[attr-defined]

    act.factor = factor  # type: ignore[attr-defined]
    return act


def large(change: bool = False) -> np.ndarray:
    """An array whose str() leaves out the middle."""
    values = np.zeros(5000)
    values[2500] = change
    return values


def nested(levels: int, value: Any) -> Any:
    for _ in range(levels):
        value = [value]
    return value


NAN = float("nan")
DIFFERENT = {
    "one and True": (1, True),
    "one and 1.0": (1, 1.0),
    "zero and False": (0, False),
    "zero and minus zero": (0.0, -0.0),
    "complex minus zero": (complex(0, 0.0), complex(0, -0.0)),
    "numpy minus zero": (np.float32(0.0), np.float32(-0.0)),
    "numpy and Python float": (np.float64(1.0), 1.0),
    "text and bytes": ("a", b"a"),
    "None and False": (None, False),
    "list and tuple": ([1], (1,)),
    "list and its subclass": ([1], Ints([1])),
    "one and True inside": ([1], [True]),
    "one and True as keys": ({1: "a"}, {True: "a"}),
    "order of a dict": ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    "dict and OrderedDict": ({"a": 1}, collections.OrderedDict(a=1)),
    "default_factory": (collections.defaultdict(int), collections.defaultdict(float)),
    "sets": ({1, 2}, {1, 3}),
    "iteration order of a set": ({8, 0}, {0, 8}),  # the two collide: first come, first served
    "set and frozenset": ({1}, frozenset({1})),
    "deque": (collections.deque([1]), collections.deque([2])),
    "maxlen": (collections.deque([1], 2), collections.deque([1], 3)),
    "range": (range(3), range(4)),
    "slice": (slice(1), slice(2)),
    "bytearray": (bytearray(b"a"), bytearray(b"b")),
    "array": (array.array("i", [1]), array.array("i", [2])),
    "array typecode": (array.array("i", [0]), array.array("f", [0])),
    "middle of a large array": (large(), large(change=True)),
    "array dtype": (np.zeros(2, np.int32), np.zeros(2, np.float32)),
    "array shape": (np.zeros((2, 3)), np.zeros((3, 2))),
    "array strides": (np.ones((2, 3)), np.ones((3, 2)).T),
    "object arrays": (np.array([object()]), np.array([object()])),
    "attributes": (Config(a=1), Config(a=2)),
    "an attribute more": (Config(a=1), Config(a=1, b=None)),
    "attributes below": (Config(a=Config(b=[1])), Config(a=Config(b=[2]))),
    "SimpleNamespace": (types.SimpleNamespace(a=1), types.SimpleNamespace(a=2)),
    "slots": (Slotted(1), Slotted(2)),
    "private slots": (Private(1), Private(2)),
    "hidden slots": (Hidden(1, 0), Hidden(2, 0)),
    "slots from an iterator": (FromIterator(1), FromIterator(2)),
    "an unset slot": (Slotted(1), Slotted(1, 2)),
    "slots of a subclass": (SlottedChild(1), Slotted(1)),
    "dataclass": (Data(1), Data(2)),
    "enum members": (Color.RED, Color.BLUE),
    "IntEnum and int": (Number.ONE, 1),
    "objects without state": (object(), object()),
    "code": (lambda x: x + 1, lambda x: x + 2),
    "captured variable": (times(2), times(3)),
    "captured 1 and True": (times(1), times(True)),
    "default argument": (with_default(2), with_default(3)),
    "keyword default": (with_keyword_default(2), with_keyword_default(3)),
    "function attribute": (with_attribute(2), with_attribute(3)),
    "bound method": (Act(2).method, Act(3).method),
    "bound and plain": (Act(2).method, Act.method),
    "callable object": (Act(2), Act(3)),
    "partial": (functools.partial(times, 2), functools.partial(times, 3)),
    "partial keywords": (functools.partial(times, factor=2), functools.partial(times, factor=3)),
    "classes": (Config, Act),
    "itemgetter": (operator.itemgetter(0), operator.itemgetter(1)),
    "pattern": (re.compile("a"), re.compile("b")),
    "struct": (struct.Struct("i"), struct.Struct("f")),
    "dtype": (torch.float32, torch.float64),
    "device": (torch.device("cpu"), torch.device("meta")),
    "tensors of one content": (torch.zeros(2), torch.zeros(2)),
    "modules outside the tree": (nn.ReLU(), nn.ReLU()),
    "generators": (torch.Generator(), torch.Generator()),
    "deep below": (nested(50, 1), nested(50, 2)),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_different_values_freeze_differently(name: str) -> None:
    first, second = DIFFERENT[name]
    assert freeze(first) != freeze(second)
    assert freeze([first]) != freeze([second])


SHARED_TENSOR, SHARED_MODULE, SHARED_OBJECT = torch.zeros(2), nn.ReLU(), object()
EQUAL: dict[str, Callable[[], Any]] = {
    "int": lambda: 1000,
    "float": lambda: 0.5,
    "nan": lambda: NAN,
    "text": lambda: "ab",
    "containers": lambda: {"a": [1, (2, {3})], "b": frozenset({4})},
    "set built the same way": lambda: {8, 0, "a"},
    "array": large,
    "attributes": lambda: Config(a=1, b=[Config(c=2)]),
    "order of attributes": lambda: Config(a=1, b=2),
    "slots": lambda: SlottedChild(1, 2),
    "private slots": lambda: Hidden(1, 2),
    "dataclass": Data,
    "enum": lambda: Color.RED,
    "captured variable": lambda: times(2),
    "default argument": lambda: with_default([2]),
    "bound method": lambda: Act(2).method,
    "partial": lambda: functools.partial(times, factor=2),
    "class": lambda: Config,
    "builtin": lambda: len,
    "operator": lambda: torch.ops.aten.add.Tensor,
    "dtype": lambda: torch.float32,
    "device": lambda: torch.device("cpu"),
    "size": lambda: torch.Size([2, 3]),
    "same tensor": lambda: SHARED_TENSOR,
    "same module": lambda: [SHARED_MODULE],
    "same object": lambda: SHARED_OBJECT,
    "memory format": lambda: torch.channels_last,
}


@pytest.mark.parametrize("name", EQUAL)
def test_equal_values_freeze_equally(name: str) -> None:
    make = EQUAL[name]
    first, second = freeze(make()), freeze(make())
    assert first == second
    assert hash(first) == hash(second)


def test_order_in_which_attributes_were_set_does_not_count() -> None:
    assert freeze(Config(a=1, b=2)) == freeze(Config(b=2, a=1))


@pytest.mark.parametrize(
    "make",
    [
        lambda: itertools.count(),
        lambda: iter([1, 2]),
        lambda: (x for x in (1, 2)),
        lambda: random.Random(0),
        lambda: np.random.default_rng(0),
        lambda: np.random.RandomState(0),
    ],
)
def test_object_that_changes_when_read_equals_nothing(make: Callable[[], Any]) -> None:
    value = make()
    assert freeze(value) != freeze(value)
    assert freeze(Config(a=value)) != freeze(Config(a=value))


def test_mutation_is_seen() -> None:
    values: list[Any] = [{"a": [1]}, Config(a=Config(b=1)), large(), collections.deque([1])]
    before = freeze(values)
    assert freeze(values) == before
    values[0]["a"].append(2)
    changed = freeze(values)
    assert changed != before
    values[1].a.b = 2
    assert freeze(values) != changed


def test_captured_cell_is_read_when_frozen() -> None:
    factor = 2

    def act(x: Any) -> Any:
        return x * factor

    before = freeze(act)
    factor = 3
    assert freeze(act) != before


def test_unset_cell_differs_from_none() -> None:
    def make(*, fill: bool) -> Callable[[], Any]:
        def act() -> Any:
            return value

        if fill:
            value = None
        return act

    assert freeze(make(fill=True)) != freeze(make(fill=False))


def test_object_at_a_reused_address_is_another_object() -> None:
    """id() and default repr() repeat once an object is gone; a frozen one is kept alive."""
    frozen = [freeze(object()) for _ in range(100)]
    assert all(a != b for a, b in itertools.combinations(frozen, 2))


def test_cycles_end() -> None:
    first: list[Any] = [1]
    first.append(first)
    second: list[Any] = [1]
    second.append(second)
    assert freeze(first) == freeze(second)
    third: list[Any] = [1, [1]]
    third[1].append(third)
    assert freeze(first) != freeze(third)
    loop = Config()
    loop.me = loop  # type: ignore[attr-defined]
    assert freeze(loop) == freeze(loop)


@pytest.mark.sweep
def test_deep_and_huge_values_cost_little() -> None:
    """Cut off below a depth and a number of items, where only the same object is equal."""
    deep, wide = nested(100_000, 1), [[i] for i in range(20_000)]
    grid = [[[[0] * 10 for _ in range(20)] for _ in range(20)] for _ in range(10)]
    for value, most_calls in ((deep, 1_000), (wide, 500_000), (grid, 1_000_000)):
        frozen: list[Any] = []
        assert (
            num_calls(lambda v=value, f=frozen: f.extend((freeze(v), freeze(v)))) <= 2 * most_calls
        )
        assert num_calls(lambda f=frozen: f[0] == f[1]) <= most_calls
        assert frozen[0] == frozen[1]
    assert freeze(wide) != freeze([[i] for i in range(20_000)])
    while isinstance(deep, list):  # taken apart level by level: its own destructor recurses
        deep = deep[0]


def test_module_of_the_tree_freezes_to_its_path() -> None:
    def tree() -> tuple[nn.Module, dict[int, str]]:
        root = nn.Sequential(nn.ReLU(), nn.ReLU())
        return root, {id(m): path for path, m in root.named_modules()}

    (one, paths), (other, other_paths) = tree(), tree()
    assert Freezer(paths).freeze([one[0]]) == Freezer(other_paths).freeze([other[0]])
    assert Freezer(paths).freeze([one[0]]) != Freezer(other_paths).freeze([other[1]])


def test_tensor_is_reported_with_the_keys_that_lead_to_it() -> None:
    tensor = torch.zeros(1)
    seen: list[Any] = []

    def on_tensor(value: torch.Tensor, keys: Any) -> Any:
        seen.append((value is tensor, keys))
        return ("tensor", tuple(value.shape))

    value = {"a": [0, Config(b=tensor)]}
    frozen = Freezer(on_tensor=on_tensor).freeze(value, ("", "name"))
    assert seen == [(True, ("", "name", ("item", "a"), ("item", 1), ("attr", "b")))]
    tensor = torch.ones(1)
    other = Freezer(on_tensor=on_tensor).freeze({"a": [0, Config(b=tensor)]})
    assert frozen == other


def test_description_is_readable() -> None:
    assert describe(freeze(3)) == "3"
    assert describe(freeze("a")) == "'a'"
    assert describe(freeze(0.1)) == "0.1"
    assert describe(freeze([1])) == "<list>"
    assert describe(freeze(Config())) == "<Config>"
    assert describe(None) == "<missing>"
    assert "0x" not in describe(freeze(object()))
