"""Turns what Python code read into a value that can be compared later.

Sharing is decided by comparing frozen values, so two frozen values may be equal only if code that
reads the originals would behave the same. ``1``, ``True`` and ``1.0`` are different; arrays are
compared by content; an object of a Python-defined class by class and attributes; an iterator or a
random number generator is equal to nothing; anything else by identity. Never by ``str()`` or
``repr()``.
"""

from __future__ import annotations

import array
import contextlib
import enum
import functools
import io
import random
import struct
import threading
import types
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from .torch_names import OPERATOR_TYPES

_POINTER_BYTES = struct.calcsize("P")
_MAX_DEPTH = 8
_MAX_ITEMS = 4096
_SCALARS = (bool, int, str, bytes, type(None), type(...), torch.dtype, torch.device, torch.Size)
IMMUTABLE = (*_SCALARS, float, complex)
BY_IDENTITY = (
    type,
    types.ModuleType,
    types.BuiltinFunctionType,
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
    """Stands for an object that gives something else at each use; equal to nothing, not itself."""

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
        if not has_plain_class(value):
            return Identity(value)
        if kind in _SCALARS:
            return (kind, value)
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
        if isinstance(value, self._by_identity):
            return Identity(value)
        if kind is types.FunctionType and not _function_state(value):
            return (kind, Identity(value.__code__), Identity(value.__globals__), *_texts_of(value))
        self._items += 1
        if depth >= _MAX_DEPTH or self._items > self._max_items:
            return Identity(value)
        if id(value) in above:
            return ("cycle", len(above) - above.index(id(value)))
        return self._freeze_object(value, keys, (*above, id(value)), depth + 1)

    def _freeze_object(
        self, value: Any, keys: tuple[Any, ...], above: tuple[int, ...], depth: int
    ) -> Any:
        def item(inner: Any, key: Any) -> Any:
            return self._freeze(inner, (*keys, key), above, depth)

        kind = type(value)
        if isinstance(value, (list, tuple, deque)):
            parts: Any = tuple(item(x, ("item", i)) for i, x in enumerate(value))
        elif isinstance(value, (bytearray, array.array)):
            parts = (getattr(value, "typecode", ""), bytes(value))
        elif isinstance(value, (dict, types.MappingProxyType)):
            parts = tuple((item(k, ("key", None)), item(v, ("item", k))) for k, v in value.items())
        elif isinstance(value, (set, frozenset)):
            parts = tuple(item(x, ("key", None)) for x in value)  # in the order code sees
        elif isinstance(value, (range, slice)):
            parts = tuple(item(x, ("key", None)) for x in (value.start, value.stop, value.step))
        elif isinstance(value, weakref.ReferenceType):
            parts = (item(value(), "referent"),)
        elif isinstance(value, types.MethodType):
            parts = (item(value.__func__, "func"), item(value.__self__, "self"))
        elif isinstance(value, types.FunctionType):
            parts = self._freeze_function(value, item)
        elif isinstance(value, functools.partial):
            names = ("func", "args", "keywords")
            parts = tuple(item(getattr(value, name), ("part", name)) for name in names)
        elif kind.__module__ == "numpy":
            return self._freeze_array(value)
        elif kind is object or not is_python_defined(kind):  # object(): made to be told apart
            return Unrepeatable(value) if is_unrepeatable(value) else Identity(value)
        else:
            parts = ()
        attributes = sorted(_attributes(value), key=lambda attribute: str(attribute[0]))
        return (kind, parts, tuple((name, item(v, key)) for name, key, v in attributes))

    def _freeze_function(self, function: types.FunctionType, item: Callable[..., Any]) -> Any:
        cells = tuple(_cell_contents(cell) for cell in function.__closure__ or ())
        return (
            Identity(function.__code__),
            Identity(function.__globals__),
            *_texts_of(function),
            tuple(item(cell, ("cell", i)) for i, cell in enumerate(cells)),
            item(function.__defaults__, "defaults"),
            item(function.__kwdefaults__, "kwdefaults"),
            item(function.__dict__, "dict"),
            item(annotations_of(function), "annotations"),
        )

    def _freeze_array(self, value: Any) -> Any:
        if not hasattr(value, "tobytes") or getattr(value.dtype, "hasobject", True):
            return Identity(value)
        layout = (value.shape, getattr(value, "strides", ()))
        return (type(value), str(value.dtype), layout, value.tobytes())


def has_plain_class(value: Any) -> bool:
    """Whether the class of a value is equal to itself only, and has a hash: a metaclass may say."""
    meta: Any = type(type(value))
    return meta is type or (meta.__eq__ is type.__eq__ and meta.__hash__ is type.__hash__)


class _Unset:
    """What an empty closure cell holds."""


def _function_state(function: types.FunctionType) -> Any:
    """Returns what a function holds besides its code and globals, if anything."""
    defaults = function.__defaults__ or function.__kwdefaults__
    return function.__closure__ or defaults or function.__dict__ or annotations_of(function)


def _texts_of(function: types.FunctionType) -> tuple[Any, ...]:
    return function.__module__, function.__name__, function.__qualname__, function.__doc__


def annotations_of(function: types.FunctionType) -> Any:
    """Returns a function's annotations, or what is equal to nothing if they cannot be had."""
    try:
        return function.__annotations__
    except Exception:  # since Python 3.14 they are computed now, from names that may be missing
        return Unrepeatable(function)


def _cell_contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _Unset


TRANSPARENT = (
    *(object, list, tuple, dict, set, frozenset, deque, defaultdict, bytearray, array.array),
    *(types.FunctionType, types.MethodType, types.SimpleNamespace, threading.local),
)


def is_python_defined(kind: type) -> bool:
    """Whether attributes and contents are all the state an object of this class can have."""
    return all(base in TRANSPARENT or _is_class_statement(base) for base in kind.__mro__)


def _is_class_statement(kind: type) -> bool:
    """Whether instances hold nothing beside ``__dict__`` and slots: no state in C."""
    heap_type = 1 << 9  # Py_TPFLAGS_HEAPTYPE
    visible = len(_own_slots(kind))
    visible += sum(name in kind.__dict__ for name in ("__dict__", "__weakref__"))
    own = kind.__basicsize__ - (kind.__base__ or object).__basicsize__
    return bool(kind.__flags__ & heap_type) and own <= visible * _POINTER_BYTES


def is_unrepeatable(value: Any) -> bool:
    """Whether reading an object changes what the next read gives (iterators, random numbers)."""
    kind = type(value)
    if kind.__module__.startswith("numpy.random") or isinstance(value, random.Random):
        return True
    return isinstance(value, Iterator) and not isinstance(value, io.IOBase)


def _attributes(value: Any) -> Iterator[tuple[str, tuple[str, Any], Any]]:
    """Yields the name of each attribute that an object itself holds, its key, and its value."""
    if isinstance(value, (types.FunctionType, types.MethodType, functools.partial)):
        return
    for name, found in getattr(value, "__dict__", {}).items():
        yield name, ("attr", name), found
    for kind, name in ((deque, "maxlen"), (defaultdict, "default_factory")):
        if isinstance(value, kind):
            yield name, ("part", name), getattr(value, name)
    for number, slot in enumerate(slots_of(type(value))):
        with contextlib.suppress(AttributeError):  # never set
            yield slot.__name__, ("slot", number), slot.__get__(value)


def slots_of(kind: type) -> tuple[types.MemberDescriptorType, ...]:
    """Returns the slots that a class and its bases declare, private and hidden ones too."""
    return tuple(slot for base in kind.__mro__ for slot in _own_slots(base))


def _own_slots(kind: type) -> list[types.MemberDescriptorType]:
    """The slots of a class statement, not by name: a private name is held under another one."""
    members = vars(kind).values() if "__slots__" in vars(kind) else ()
    return [member for member in members if isinstance(member, types.MemberDescriptorType)]


def describe(frozen: Any) -> str:
    """Returns a short text of a frozen value, for reports."""
    if isinstance(frozen, tuple) and len(frozen) == 2 and frozen[0] in _SCALARS:
        return repr(frozen[1])
    if isinstance(frozen, tuple) and len(frozen) == 2 and frozen[0] is float:
        return repr(float.fromhex(frozen[1]))
    if isinstance(frozen, Identity):
        return repr(frozen)
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
    pairs = []
    if issubclass(kind, (list, tuple, deque)):
        pairs = [(f"[{i}]", a, b) for i, (a, b) in enumerate(zip(parts, expected[1], strict=True))]
    elif kind is dict and [k for k, _ in parts] == [k for k, _ in expected[1]]:
        rows = zip(parts, expected[1], strict=True)
        pairs = [(f"[{describe(k)}]", a, b) for (k, a), (_, b) in rows]
    elif parts != expected[1]:
        return []
    rows = zip(attributes, expected[2], strict=True)
    return pairs + [(f".{name}", a, b) for (name, a), (_, b) in rows]
