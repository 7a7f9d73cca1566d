"""What mutable objects hold, kind by kind, in a form that can be compared and put back.

Lists, dictionaries and sets are :mod:`.contents`' own business; here is everything else that can
change in place while its identity stays.
"""

from __future__ import annotations

import array
import collections
import contextvars
import functools
import random
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from ..freeze import is_python_defined, is_unrepeatable, slots_of
from .reads import is_library

_UNSET = object()
# What torch.compile notes on a function the first time that it runs.
_COMPILER_MARKS = ("_torchdynamo", "__dynamo", "_dynamo")
_DISPATCHER: Any = functools.singledispatch(len)
_CACHED = type(functools.lru_cache(len))
_CLOSED = (torch.Tensor, nn.Module, type, types.ModuleType, types.CodeType)
_FOREIGN = frozenset({"builtins", "torch", "numpy", "functools", "threading", "weakref", "logging"})
# Plain Python classes of libraries that a model's own arithmetic reads.
_READ_BY_MODELS = ("torch.distributions",)


@dataclass(frozen=True)
class Kind:
    """How objects of some kind are read and written.

    Attributes:
        take: what an object holds now, as items that are compared by identity or plain value.
        put: makes an object hold what it held.
        is_state: the items are an inner state, such as a random number generator's.
    """

    take: Callable[[Any], Sequence[Any]]
    put: Callable[[Any, Sequence[Any]], None]
    is_state: bool = False


def kind_of(value: Any) -> Kind | None:
    """Returns how to read an object, or None if it is immutable or opaque."""
    if isinstance(value, _CLOSED):
        return None
    if isinstance(value, types.FunctionType):
        return _FUNCTION if _take_function(value) else None
    for classes, kind in _KINDS:
        if isinstance(value, classes):
            return kind
    return _SLOTS if slots_of(type(value)) and is_plain_class(type(value)) else None


def is_plain_class(kind: type) -> bool:
    """Whether objects of a class are looked into: a user's class, written in Python."""
    name = kind.__module__
    foreign = name.partition(".")[0] in _FOREIGN and not name.startswith(_READ_BY_MODELS)
    return kind is types.SimpleNamespace or not foreign


def attributes_of(value: Any) -> dict[str, Any] | None:
    """Returns the ``__dict__`` of an object that is looked into, or None."""
    if isinstance(value, _CLOSED) or not is_plain_class(type(value)):
        return None
    found = getattr(value, "__dict__", None)
    return found if type(found) is dict else None


def parts_of(value: Any) -> Sequence[Any]:
    """Returns what an object that is itself immutable leads to."""
    if isinstance(value, (tuple, frozenset)):
        return list(value)
    if isinstance(value, types.MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, types.FunctionType):
        return [value.__defaults__, value.__kwdefaults__]
    if isinstance(value, property):
        return [value.fget]
    if isinstance(value, (staticmethod, classmethod)):
        return [value.__func__]
    if isinstance(value, functools.cached_property):
        return [value.func]
    return [getattr(value, "__wrapped__", None)] if type(value) is _CACHED else ()


def is_iterator(value: Any) -> bool:
    """Whether each use of an object moves it on, in a way that cannot be seen from outside."""
    is_seen = kind_of(value) is not None or is_python_defined(type(value))
    return is_unrepeatable(value) and not is_seen


def _nothing(value: Any, before: Sequence[Any]) -> None:
    """The `put` of kinds that cannot be made to hold what they held."""


def _put_deque(value: Any, before: Sequence[Any]) -> None:
    value.clear()
    value.extend(before)


def _put_bytearray(value: bytearray, before: Sequence[Any]) -> None:
    value[:] = before[0]


def _put_array(value: array.array[Any], before: Sequence[Any]) -> None:
    del value[:]
    value.frombytes(before[0])


def _take_ndarray(value: np.ndarray) -> Sequence[Any]:
    if value.dtype.hasobject:
        return [value.shape, *value.ravel().tolist()]
    return [value.shape, str(value.dtype), value.tobytes()]


def _put_ndarray(value: np.ndarray, before: Sequence[Any]) -> None:
    if value.shape != before[0]:
        return
    if value.dtype.hasobject:
        np.copyto(value, np.array([*before[1:], None], dtype=object)[:-1].reshape(before[0]))
    else:
        value[...] = np.frombuffer(before[2], value.dtype).reshape(before[0])


def _take_slots(value: Any) -> Sequence[Any]:
    return [_slot(member, value) for member in slots_of(type(value))]


def _slot(member: Any, value: Any) -> Any:
    try:
        return member.__get__(value)
    except AttributeError:
        return _UNSET


def _put_slots(value: Any, before: Sequence[Any]) -> None:
    for member, content in zip(slots_of(type(value)), before, strict=True):
        if content is not _UNSET:
            member.__set__(value, content)
        elif _slot(member, value) is not _UNSET:
            member.__delete__(value)


def _take_function(value: Any) -> Sequence[Any]:
    if is_library(value.__module__):
        return []
    if value.__code__ is _DISPATCHER.__code__:  # beside the registry it has a cache
        return [item for pair in value.registry.items() for item in pair]
    held = {name: x for name, x in vars(value).items() if not name.startswith(_COMPILER_MARKS)}
    return [item for pair in held.items() for item in pair]


def _put_function(value: Any, before: Sequence[Any]) -> None:
    if value.__code__ is _DISPATCHER.__code__:  # a registry only grows
        return
    table = vars(value)
    for name in [name for name in table if not name.startswith(_COMPILER_MARKS)]:
        del table[name]
    table.update(zip(before[::2], before[1::2], strict=True))


def _put_memoryview(value: memoryview, before: Sequence[Any]) -> None:
    if value.c_contiguous and not value.readonly:
        value.cast("B")[:] = before[0]


def _put_variable(value: contextvars.ContextVar[Any], before: Sequence[Any]) -> None:
    if before[0] is not _UNSET:  # only the token of whoever set it could unset it
        value.set(before[0])


def _take_weak(value: Any) -> Sequence[Any]:
    if isinstance(value, weakref.WeakSet):
        return list(value)
    return [item for pair in value.items() for item in pair]


def _put_weak(value: Any, before: Sequence[Any]) -> None:
    value.clear()
    if isinstance(value, weakref.WeakSet):
        value.update(before)
    else:
        value.update(zip(before[::2], before[1::2], strict=True))


def _put_state(value: random.Random, before: Sequence[Any]) -> None:
    value.setstate(before[0])


def _bits_of(value: Any) -> Any:
    return value if isinstance(value, np.random.BitGenerator) else value.bit_generator


def _take_bits(value: Any) -> Sequence[Any]:
    return _flat(_bits_of(value).state)


def _put_bits(value: Any, before: Sequence[Any]) -> None:
    bits = _bits_of(value)
    bits.state = _nested(bits.state, iter(before))


def _take_old_state(value: np.random.RandomState) -> Sequence[Any]:
    return _flat(value.get_state(legacy=False))


def _put_old_state(value: np.random.RandomState, before: Sequence[Any]) -> None:
    value.set_state(_nested(value.get_state(legacy=False), iter(before)))


def _flat(state: Any) -> list[Any]:
    """What a generator's state, a dictionary of numbers and one array of them, consists of."""
    if isinstance(state, dict):
        return [item for part in state.values() for item in _flat(part)]
    return [state.tobytes()] if isinstance(state, np.ndarray) else [state]


def _nested(like: Any, items: Iterator[Any]) -> Any:
    """The state that consists of these items, made like another of the same generator."""
    if isinstance(like, dict):
        return {key: _nested(part, items) for key, part in like.items()}
    found = next(items)
    return np.frombuffer(found, like.dtype) if isinstance(like, np.ndarray) else found


_FUNCTION = Kind(_take_function, _put_function)
_SLOTS = Kind(_take_slots, _put_slots)
_KINDS: tuple[tuple[Any, Kind], ...] = (
    (collections.deque, Kind(list, _put_deque)),
    (bytearray, Kind(lambda b: [bytes(b)], _put_bytearray)),
    (array.array, Kind(lambda a: [a.tobytes()], _put_array)),
    (np.ndarray, Kind(_take_ndarray, _put_ndarray)),
    (memoryview, Kind(lambda m: [m.tobytes()], _put_memoryview)),
    (types.MappingProxyType, Kind(lambda m: [*m, *m.values()], _nothing)),
    (contextvars.ContextVar, Kind(lambda c: [c.get(_UNSET)], _put_variable)),
    (
        (weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet),
        Kind(_take_weak, _put_weak),
    ),
    (weakref.ReferenceType, Kind(lambda r: [r()], _nothing)),
    (random.Random, Kind(lambda r: [r.getstate()], _put_state, is_state=True)),
    (
        (np.random.Generator, np.random.BitGenerator),
        Kind(_take_bits, _put_bits, is_state=True),
    ),
    (np.random.RandomState, Kind(_take_old_state, _put_old_state, is_state=True)),
)
