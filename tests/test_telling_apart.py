"""Blocks whose Python tells instances apart by other ways than their attributes."""

import copy
import functools
import operator
import pickle
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from printed import unfolded
from torch import Tensor, nn

import lazyinline
from lazyinline import CaptureError, lazy_inline

Read = Callable[[nn.Module], Any]
Mark = Callable[[nn.Module, float], Any]


class Weakly:
    """A descriptor that keeps its values beside the objects."""

    def __init__(self) -> None:
        self.values: Any = weakref.WeakKeyDictionary()

    def __get__(self, owner: Any, kind: type) -> Any:
        return self if owner is None else self.values[owner]

    def __set__(self, owner: Any, value: Any) -> None:
        self.values[owner] = value


class ByAddress(Weakly):
    def __init__(self) -> None:
        self.values = {}

    def __get__(self, owner: Any, kind: type) -> Any:
        return self if owner is None else self.values[id(owner)]

    def __set__(self, owner: Any, value: Any) -> None:
        self.values[id(owner)] = value


class Block(nn.Module):
    weakly = Weakly()
    by_address = ByAddress()

    def __init__(self, value: float, mark: Mark, read: Read) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.value = value
        mark(self, value)
        self.read = read

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.read(self)


lazy_inline(Block)

BY_MODULE: dict[Any, float] = {}
BY_CHILD: dict[Any, float] = {}
BY_ADDRESS: dict[int, float] = {}
BY_HASH: dict[int, float] = {}
BY_REFERENCE: dict[Any, float] = {}
WEAKLY: Any = weakref.WeakKeyDictionary()
WEAK_SET: Any = weakref.WeakSet()
LARGE: set[nn.Module] = set()


@functools.cache
def remembered(block: nn.Module) -> float:
    return float(block.value)


@functools.cache
def remembered_by_address(address: int) -> float:
    return BY_ADDRESS[address]


class Named:
    def __init__(self, value: float) -> None:
        self.value = value

    def __str__(self) -> str:
        return "x" * int(self.value)


class Alike(type):
    """The metaclass of classes that say they are one and the same."""

    def __eq__(cls, other: object) -> bool:
        return isinstance(other, Alike)

    def __hash__(cls) -> int:
        return 1


class One(metaclass=Alike):
    def value(self) -> float:
        return 1.0


class Two(metaclass=Alike):
    def value(self) -> float:
        return 2.0


def function(name: str, value: float) -> types.FunctionType:
    def inner() -> None:
        pass

    setattr(inner, name, {"a": value} if name == "__annotations__" else "x" * int(value))
    return inner


def nothing(block: nn.Module, value: float) -> None:
    pass


def keep(name: str, make: Callable[[float], Any]) -> Mark:
    return lambda block, value: setattr(block, name, make(value))


WAYS: dict[str, tuple[Mark, Read]] = {
    "a dictionary by module": (BY_MODULE.__setitem__, lambda b: BY_MODULE[b]),
    "a dictionary by child": (
        lambda b, v: BY_CHILD.__setitem__(b.linear, v),
        lambda b: BY_CHILD[b.linear],
    ),
    "id": (lambda b, v: BY_ADDRESS.__setitem__(id(b), v), lambda b: BY_ADDRESS[id(b)]),
    "id by another name": (
        lambda b, v: BY_ADDRESS.__setitem__(id(b), v),
        lambda b: BY_ADDRESS[ADDRESS_OF(b)],
    ),
    "hash": (lambda b, v: BY_HASH.__setitem__(hash(b), v), lambda b: BY_HASH[hash(b)]),
    "__hash__": (lambda b, v: BY_HASH.__setitem__(hash(b), v), lambda b: BY_HASH[b.__hash__()]),
    "dir": (
        lambda b, v: setattr(b, "more", 1) if v > 1 else None,
        lambda b: 1.0 + ("more" in dir(b)),
    ),
    "classes that say they are equal": (
        lambda b, v: setattr(b, "kept", Two() if v > 1 else One()),
        lambda b: b.kept.value(),
    ),
    "a weak dictionary": (WEAKLY.__setitem__, lambda b: WEAKLY[b]),
    "a weak set": (
        lambda b, v: WEAK_SET.add(b) if v > 1 else None,
        lambda b: 1.0 + (b in WEAK_SET),
    ),
    "a weak reference": (
        lambda b, v: BY_REFERENCE.__setitem__(weakref.ref(b), v),
        lambda b: BY_REFERENCE[weakref.ref(b)],
    ),
    "a set": (lambda b, v: LARGE.add(b) if v > 1 else None, lambda b: 1.0 + (b in LARGE)),
    "a function that remembers": (nothing, remembered),
    "a function that remembers addresses": (
        lambda b, v: BY_ADDRESS.__setitem__(id(b), v),
        lambda b: remembered_by_address(id(b)),
    ),
    "a weak descriptor": (
        lambda b, v: setattr(b, "weakly", v),
        lambda b: b.weakly,
    ),
    "a descriptor by address": (
        lambda b, v: setattr(b, "by_address", v),
        lambda b: b.by_address,
    ),
    "object.__getattribute__": (nothing, lambda b: object.__getattribute__(b, "value")),
    "__getstate__": (nothing, lambda b: b.__reduce_ex__(2)[2]["value"]),
    "copy": (nothing, lambda b: copy.copy(b).value),
    "pickle": (nothing, lambda b: float(len(pickle.dumps(b.value)) + b.value)),
    "attrgetter": (nothing, operator.attrgetter("value")),
    "vars": (nothing, lambda b: vars(b)["value"]),
    "a frame": (nothing, lambda b: sys._getframe(0).f_locals["b"].value),
    "str": (keep("named", Named), lambda b: len(str(b.named))),
    "repr": (keep("extra_repr", lambda v: lambda: "x" * int(v)), lambda b: len(repr(b))),
    "a class of its own": (
        keep("own", lambda v: type("Own", (), {"value": v})()),
        lambda b: b.own.__class__.value,
    ),
    "a name": (keep("f", lambda v: function("__name__", v)), lambda b: len(b.f.__name__)),
    "a docstring": (keep("f", lambda v: function("__doc__", v)), lambda b: len(b.f.__doc__)),
    "an annotation": (
        keep("f", lambda v: function("__annotations__", v)),
        lambda b: b.f.__annotations__["a"],
    ),
    "a weight's attribute": (
        lambda b, v: setattr(b.linear.weight, "factor", v),
        lambda b: b.linear.weight.factor,
    ),
    "a weight's attribute, or nothing": (
        lambda b, v: setattr(b.linear.weight, "factor", v) if v > 1 else None,
        lambda b: getattr(b.linear.weight, "factor", 1.0),
    ),
}
ADDRESS_OF = id


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.sweep(
    keep=["[id]", "[a dictionary by module]", "[hash]", "[a weak set]", "[pickle]", "[a frame]"]
)
def test_instances_that_python_tells_apart_are_not_confused(way: str) -> None:
    mark, read = WAYS[way]
    model = nn.Sequential(*(Block(value, mark, read) for value in (1.0, 1.0, 2.0, 1.0, 2.0)))
    x = torch.randn(2, 4)
    expected = model(x)
    assert torch.equal(lazyinline.compile(model, backend="eager")(x), expected)


def test_a_block_that_is_not_shared_says_which_way_its_code_goes() -> None:
    model = nn.Sequential(*(Block(v, *WAYS["id"]) for v in (1.0, 1.0, 1.0)))
    compiled = lazyinline.compile(model, backend="eager")
    compiled(torch.randn(2, 4))
    assert "id(), which may tell instances apart" in unfolded(compiled.last_report)


def test_a_function_that_remembers_plain_results_keeps_no_block_apart() -> None:
    @functools.cache
    def factor(name: str) -> float:
        return float(len(name))

    factor("ab")
    model = nn.Sequential(*(Block(1.0, nothing, lambda b: factor("ab")) for _ in range(3)))
    model[1].read = model[2].read = model[0].read
    compiled = lazyinline.compile(model, backend="eager")
    compiled(torch.randn(2, 4))
    assert sum(d.shared for d in compiled.last_report.decisions) == 1


class Writes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        factor = getattr(x, "factor", 1.0)
        y = self.linear(x) * factor
        y.factor = factor + 1.0  # type: ignore[attr-defined]
        return y


lazy_inline(Writes)


def test_attributes_of_tensors_between_blocks_are_kept() -> None:
    model, x = nn.Sequential(*(Writes() for _ in range(4))), torch.randn(2, 4)
    assert torch.equal(lazyinline.compile(model, backend="eager")(x), model(x))


REFUSED: dict[str, Callable[[nn.Module], Any]] = {
    "gradient": lambda m: 1.0 if m.linear.weight.grad is None else 2.0,
    "version": lambda m: 1.0 + m.linear.weight._version,
    "address": lambda m: 1.0 + m.linear.weight.data_ptr() % 128,
    "storage": lambda m: 1.0 + m.linear.weight.untyped_storage().nbytes(),
    "written attribute": lambda m: setattr(m.linear.weight, "seen", True) or 1.0,
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_changes_with_each_run_is_refused(what: str) -> None:
    model = Block(1.0, nothing, REFUSED[what])
    with pytest.raises(CaptureError, match=r"compiled program (would not do so|could not keep)"):
        lazyinline.compile(model, backend="eager", fallback="error")(torch.randn(2, 4))


def test_an_attribute_of_an_input_that_code_speaks_of_is_refused() -> None:
    class Reads(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return x.sin() * getattr(x, "factor", 1.0)

    model, x = Reads(), torch.randn(2, 4)
    x.factor = 3.0  # type: ignore[attr-defined]
    with pytest.raises(CaptureError, match="input tensor has the attribute 'factor'"):
        lazyinline.compile(model, backend="eager", fallback="error")(x)
