"""What a value holds, checked by identity: it must notice whatever freezing would notice."""

import enum
import functools
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from lazyinline.reuse.evidence.held import Held
from lazyinline.reuse.freeze import Freezer


class Config:
    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


class Slotted:
    __slots__ = ("value",)


class Both(Slotted):
    pass


class Texts(list[str]):
    pass


class Mode(enum.Enum):
    ON = 1


def make_function(captured: Any) -> Any:
    def function(x: Any, scale: Any = (1, [2])) -> Any:
        return x, captured, scale

    return function


def change_cell(function: Any) -> None:
    function.__closure__[0].cell_contents = "other"


def change_code(function: Any) -> None:
    function.__code__ = make_function(0).__code__.replace(co_name="other")


Change = Callable[[Any], Any]
CHANGES: dict[str, tuple[Callable[[], Any], Change]] = {
    "list": (lambda: [1, 2], lambda v: v.append(3)),
    "list item": (lambda: [1, 2.5], lambda v: v.__setitem__(1, 2)),
    "inner list": (lambda: {"a": ([1],)}, lambda v: v["a"][0].append(2)),
    "dict order": (lambda: {"a": 1, "b": 2}, lambda v: v.update(a=v.pop("a"))),
    "dict key": (lambda: {"a": 1}, lambda v: (v.pop("a"), v.update(b=1))),
    "set": (lambda: {1, 2}, lambda v: v.add(3)),
    "object": (lambda: Config(scale=1.0), lambda v: setattr(v, "scale", 2.0)),
    "new attribute": (lambda: Config(), lambda v: setattr(v, "scale", 2.0)),
    "object in object": (lambda: Config(a=Config(b=1)), lambda v: setattr(v.a, "b", 2)),
    "class of an object": (lambda: Config(), lambda v: setattr(v, "__class__", type("C", (), {}))),
    "namespace": (lambda: types.SimpleNamespace(a=1), lambda v: setattr(v, "a", 2)),
    "captured": (lambda: make_function([1]), change_cell),
    "in captured": (lambda: make_function([1]), lambda v: v.__closure__[0].cell_contents.append(2)),
    "in default": (lambda: make_function(1), lambda v: v.__defaults__[0][1].append(3)),
    "defaults": (lambda: make_function(1), lambda v: setattr(v, "__defaults__", ((1, [2]),))),
    "code": (lambda: make_function(1), change_code),
    "function attribute": (lambda: make_function(1), lambda v: setattr(v, "note", 1)),
    "slot": (Slotted, lambda v: setattr(v, "value", 1)),
    "inherited slot": (Both, lambda v: setattr(v, "value", 1)),
    "list subclass": (lambda: Texts("ab"), lambda v: v.append("c")),
    "deque": (lambda: deque([1]), lambda v: v.append(2)),
    "default dict": (lambda: defaultdict(list, a=1), lambda v: v.update(a=2)),
    "ordered dict": (lambda: OrderedDict(a=1), lambda v: v.update(a=2)),
    "bytes": (lambda: bytearray(b"ab"), lambda v: v.append(1)),
    "array": (lambda: numpy.ones(3), lambda v: v.fill(2)),
    "partial": (lambda: functools.partial(max, []), lambda v: v.args[0].append(1)),
    "method": (lambda: Config(f=Config(a=1).__init__), lambda v: v.f.__self__.__dict__.update(a=2)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_change_is_noticed_or_the_value_is_not_trusted(name: str) -> None:
    make, change = CHANGES[name]
    value = make()
    held, before = Held(), Freezer().freeze(value)
    trusted = held.look_into(value)
    assert held.same()
    change(value)
    assert Freezer().freeze(value) != before or name in ("defaults", "slot", "inherited slot")
    assert not (trusted and held.same())


@pytest.mark.parametrize(
    "value",
    [1, 2.5, "a", None, torch.float32, Mode.ON, max, [1, (2, {"a": 3})], Config(a=[1]), {1, 2}],
    ids=lambda value: type(value).__name__,
)
def test_unchanged_values_are_trusted(value: Any) -> None:
    held = Held()
    assert held.look_into(value)
    assert held.same()


@pytest.mark.parametrize(
    "value",
    [torch.ones(2), nn.Linear(1, 1), [torch.ones(2)], Config(m=nn.ReLU()), iter([1])],
    ids=lambda value: type(value).__name__,
)
def test_tensors_modules_and_iterators_are_never_trusted(value: Any) -> None:
    assert not Held().look_into(value)


def test_cycles_end() -> None:
    value: list[Any] = [1]
    value.append(value)
    held = Held()
    assert held.look_into(value)
    value[0] = 2
    assert not held.same()
