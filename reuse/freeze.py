"""Turns what Python code read into a value that can be compared later.

Sharing is decided by comparing frozen values, so two frozen values may be equal only if code that
reads the originals would behave the same. ``1``, ``True`` and ``1.0`` are different; arrays are
compared by content; an object of a Python-defined class by class and attributes; an iterator or a
random number generator is equal to nothing; anything else by identity. Never by ``str()`` or
``repr()``.
"""

from __future__ import annotations

import enum
import types
from collections import deque
from collections.abc import Callable, Mapping
from itertools import repeat
from typing import Any

import torch
from torch import nn

from .kinds import (
    ABSENT,
    NO_WAY,
    Way,
    attribute_parts,
    function_parts,
    has_plain_class,
    is_unrepeatable,
    is_whole,
    kinds_of,
)
from .torch_names import OPERATOR_TYPES

_MAX_DEPTH = 8
_MAX_ITEMS = 4096
_SCALARS = (bool, int, str, bytes, type(None), type(...), torch.dtype, torch.device, torch.Size)
IMMUTABLE = (*_SCALARS, float, complex)
BY_IDENTITY = (
    type,
    types.ModuleType,
    types.CodeType,
    *OPERATOR_TYPES,
    torch.memory_format,
    torch.layout,
)


class Identity:
    """Compares equal only to the same object, which it keeps alive so that no address repeats."""

    __slots__ = ("target",)

    def __init__(self, target: object) -> None:
        self.target = target

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and other.target is self.target

    def __hash__(self) -> int:
        return id(self.target)

    def __repr__(self) -> str:
        return f"<{type(self.target).__qualname__} object>"


class Unrepeatable:
    """Represents an object that gives something else at each use; equal to nothing, not itself."""

    __slots__ = ("target",)
    __hash__ = object.__hash__

    def __init__(self, target: object) -> None:
        self.target = target

    def __eq__(self, other: object) -> bool:
        return False

    def __repr__(self) -> str:
        return f"<{type(self.target).__qualname__} object>"


class Freezer:
    """Freezes values as seen from one module tree.

    Args:
        module_paths: ``id(module) -> path`` of the tree; its modules freeze to their path, so
            that the same reference inside another tree compares equal.
        on_tensor: called with each tensor met and the keys that lead to it; returns what stands
            for the tensor (its metadata is the caller's to compare). Default: identity.
        by_identity: further classes whose objects count as they are, whatever they hold.
        max_items: objects looked into; the others count as they are.
    """

    def __init__(
        self,
        module_paths: Mapping[int, str] | None = None,
        on_tensor: Callable[[torch.Tensor, tuple[Any, ...]], Any] | None = None,
        by_identity: tuple[type, ...] = (),
        max_items: int = _MAX_ITEMS,
    ) -> None:
        self._max_items = max_items
        self._by_identity = (enum.Enum, *BY_IDENTITY, *by_identity)
        self._module_paths = module_paths or {}
        self._on_tensor = on_tensor
        self._items = 0

    def freeze(self, value: Any, keys: tuple[Any, ...] = ()) -> Any:
        """Returns the frozen form of one value. ``keys`` says how the value was reached."""
        self._items = 0
        return self._freeze(value, keys, (), 0)

    def _freeze(self, value: Any, keys: tuple[Any, ...], above: tuple[int, ...], depth: int) -> Any:
        kind = type(value)
        # A metaclass may call different classes equal: then only the object itself compares.
        if not has_plain_class(value):
            return Identity(value)
        if kind in _SCALARS:
            return (kind, value)
        # ``hex`` tells 0.0 from -0.0, which ``==`` does not, and finds nan equal to nan.
        if kind is float:
            return (kind, value.hex())
        if kind is complex:
            return (kind, value.real.hex(), value.imag.hex())
        if kind in (torch.SymInt, torch.SymFloat, torch.SymBool):
            return (kind, str(value.node.expr))
        if isinstance(value, torch.Tensor):
            return self._on_tensor(value, keys) if self._on_tensor else Identity(value)
        if isinstance(value, nn.Module):
            path = self._module_paths.get(id(value))
            return Identity(value) if path is None else ("module", path)
        if isinstance(value, self._by_identity) or is_plain_builtin(value):
            return Identity(value)
        if kind is types.FunctionType and not _function_state(value):
            return (kind, Identity(value.__code__), Identity(value.__globals__), *_texts_of(value))
        self._items += 1
        # Past the limits by identity, which is never wrong: it only shares less.
        if depth >= _MAX_DEPTH or self._items > self._max_items:
            return Identity(value)
        if id(value) in above:
            # By distance, so that the same cycle in another instance is equal.
            return ("cycle", len(above) - above.index(id(value)))
        return self._freeze_object(value, keys, (*above, id(value)), depth + 1)

    def _freeze_object(
        self, value: Any, keys: tuple[Any, ...], above: tuple[int, ...], depth: int
    ) -> Any:
        def item(inner: Any, way: Way = NO_WAY) -> Any:
            return self._freeze(inner, (*keys, way), above, depth)

        kind = type(value)
        if kind is types.FunctionType:
            return (kind, self._freeze_function(value, item), ())
        kinds, whole = kinds_of(value), is_whole(kind)
        if kind is object or not (kinds or whole):  # object(): only its identity matters
            return Unrepeatable(value) if is_unrepeatable(value) else Identity(value)
        # An object with state in C equals only itself, and only while its rows show the same.
        parts = [] if whole else [Identity(value)]
        for row in kinds:
            held = row.read(value)
            ways = row.ways(value) if row.ways else repeat(NO_WAY)
            parts += [item(part, way) for part, way in zip(held, ways, strict=False)]
        attributes = [(name, item(held, way)) for name, way, held in attribute_parts(value)]
        return (kind, tuple(parts), tuple(attributes))

    def _freeze_function(self, function: types.FunctionType, item: Callable[..., Any]) -> Any:
        return (
            Identity(function.__code__),
            Identity(function.__globals__),
            *_texts_of(function),
            tuple(map(item, function_parts(function))),
            item(annotations_of(function)),
        )


def is_plain_builtin(value: Any) -> bool:
    """Whether a value is a function written in C, and no method of an object."""
    if not isinstance(value, types.BuiltinFunctionType):
        return False
    owner: Any = value.__self__
    return owner is None or isinstance(owner, (type, types.ModuleType))


def _function_state(function: types.FunctionType) -> Any:
    """Returns what a function holds besides its code and globals, if anything."""
    defaults = function.__defaults__ or function.__kwdefaults__
    return function.__closure__ or defaults or function.__dict__ or annotations_of(function)


def _texts_of(function: types.FunctionType) -> tuple[Any, ...]:
    return function.__module__, function.__name__, function.__qualname__, function.__doc__


def annotations_of(function: types.FunctionType) -> Any:
    """Returns a function's annotations, or what is equal to nothing if reading them fails."""
    try:
        return function.__annotations__
    except Exception:  # since Python 3.14 they are computed now, from names that may be missing
        return Unrepeatable(function)


def describe(frozen: Any) -> str:
    """Returns a short text of a frozen value, for reports."""
    if isinstance(frozen, tuple) and len(frozen) == 2 and frozen[0] in _SCALARS:
        return repr(frozen[1])
    if isinstance(frozen, tuple) and len(frozen) == 2 and frozen[0] is float:
        return repr(float.fromhex(frozen[1]))
    if isinstance(frozen, Identity):
        return "<missing>" if frozen.target is ABSENT else repr(frozen)
    if isinstance(frozen, tuple) and frozen and isinstance(frozen[0], type):
        return f"<{frozen[0].__qualname__}>"
    return "<missing>" if frozen is None else str(frozen)[:60]


def narrow(found: Any, expected: Any) -> tuple[str, Any, Any]:
    """Finds the part in which two frozen values differ.

    Returns:
        The way to that part, such as ``.window`` or ``[2].size``, and both values there.
    """
    for name, a, b in _pairs(found, expected):
        if a != b:
            where, a, b = narrow(a, b)
            return name + where, a, b
    return "", found, expected


def _pairs(found: Any, expected: Any) -> list[tuple[str, Any, Any]]:
    """Pairs up the parts of two frozen objects of one class that have the same parts."""
    both = (found, expected)
    if any(type(x) is not tuple or len(x) != 3 or not isinstance(x[0], type) for x in both):
        return []
    kind, parts, attributes = found
    if kind is not expected[0] or any(type(x[1]) is not tuple for x in both):
        return []
    names = [tuple(name for name, _ in x[2]) for x in both if type(x[2]) is tuple]
    if len(names) < 2 or names[0] != names[1] or len(parts) != len(expected[1]):
        return []
    pairs, half = [], len(parts) // 2
    if issubclass(kind, (list, tuple, deque)):  # of a deque, its length is the last
        labels = [f"[{i}]" for i in range(len(parts))]
        labels[-1:] = [".maxlen"] if issubclass(kind, deque) else labels[-1:]
        pairs = list(zip(labels, parts, expected[1], strict=True))
    elif kind is dict and parts[:half] == expected[1][:half]:
        entries = zip(parts[:half], parts[half:], expected[1][half:], strict=True)
        pairs = [(f"[{describe(key)}]", a, b) for key, a, b in entries]
    elif parts != expected[1]:
        return []
    rows = zip(attributes, expected[2], strict=True)
    return pairs + [(f".{name}", a, b) for (name, a), (_, b) in rows]
