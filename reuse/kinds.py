"""The one table of kinds of objects: how the contents of an object are read, reached and put back.

Freezing, which tells whether another instance holds the same (:mod:`.freeze`), and a snapshot,
which tells whether the same objects still hold it (:class:`.freeze.Snapshot`), both read this
table: a kind that only one of them knew would be a silent wrong result.

The rows are the kinds that forwards of transformers, diffusers and timm use. Tensors and modules
have no row, since the structure of a model compares their parts, nor have classes and Python
modules, which are read by name. An object of any class shows its attributes and slots. An object
written in C without a row is *opaque*: a forward that reads one runs eagerly.
"""

from __future__ import annotations

import collections
import contextvars
import datetime
import decimal
import enum
import functools
import gc
import io
import logging
import operator
import random
import re
import struct
import sys
import threading
import types
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from .torch_names import OPERATOR_TYPES

# The value of a name, a slot or a captured variable that has none.
ABSENT: Any = object()

# Classes in C that hold nothing but items and attributes.
TRANSPARENT = (
    *(object, list, tuple, dict, set, frozenset, deque, defaultdict),
    *(types.FunctionType, types.MethodType, types.SimpleNamespace, threading.local),
)
_POINTER_BYTES = struct.calcsize("P")
# Objects of these modules show their state by a row of the table, or not at all.
_READ_BY_ROWS = frozenset({"builtins", "functools", "weakref", "logging"})
_LIBRARIES = sys.stdlib_module_names | {"torch", "lazyinline"}


OWN_PATCH = "_lazyinline_patch"
"""Marks a function or class that replaces one of PyTorch's or a user's during a capture."""


def is_own_patch(value: Any) -> bool:
    """Whether a value is a function or class that we patched in for a capture."""
    kind: Any = type(value)
    return (kind is types.FunctionType or issubclass(kind, type)) and OWN_PATCH in vars(value)


def is_library(module_name: Any) -> bool:
    """Whether a module is Python's own, PyTorch's or ours: models do not depend on its globals."""
    return isinstance(module_name, str) and module_name.partition(".")[0] in _LIBRARIES


def is_of_library(owner: Any) -> bool:
    """Whether a scope, class, module or object is Python's own, PyTorch's, ours or numpy's."""
    # Models neither write to a library nor use the state that it keeps for itself.
    if type(owner) is dict:
        name = owner.get("__name__")
    elif isinstance(owner, types.ModuleType):
        name = owner.__name__
    else:
        name = getattr(owner if isinstance(owner, type) else type(owner), "__module__", "")
    return is_library(name) or str(name).partition(".")[0] == "numpy"


def is_library_scope(value: Any) -> bool:
    """Whether a value is the namespace of a library's module, or ``sys.modules``."""
    if type(value) is not dict:
        return False
    return value is sys.modules or ("__spec__" in value and is_of_library(value))


def has_plain_class(value: Any) -> bool:
    """Whether no metaclass redefines ``==`` or the hash of a value's class."""
    meta: Any = type(type(value))
    return meta is type or (meta.__eq__ is type.__eq__ and meta.__hash__ is type.__hash__)


def is_looked_into(kind: type) -> bool:
    """Whether attributes and slots of a class's objects are looked into."""
    if kind is logging.LoggerAdapter:  # has no row, unlike the logger that it holds
        return True
    name = kind.__module__
    return not (isinstance(name, str) and name.partition(".")[0] in _READ_BY_ROWS)


def is_python_defined(kind: type) -> bool:
    """Whether attributes and items are all the state an object of this class can have."""
    return all(base in TRANSPARENT or is_class_statement(base) for base in kind.__mro__)


def is_class_statement(kind: type) -> bool:
    """Whether instances hold nothing besides ``__dict__`` and slots: no state in C."""
    # State in C takes bytes that neither slots nor tables account for.
    heap_type = 1 << 9  # Py_TPFLAGS_HEAPTYPE
    visible = len(_own_slots(kind))
    visible += sum(name in kind.__dict__ for name in ("__dict__", "__weakref__"))
    own = kind.__basicsize__ - (kind.__base__ or object).__basicsize__
    return bool(kind.__flags__ & heap_type) and own <= visible * _POINTER_BYTES


def own_table(value: Any) -> dict[str, Any] | None:
    """Returns an object's ``__dict__``, if it has one, without running code of its class."""
    try:
        # That of this thread: each has its own.
        if isinstance(value, threading.local):
            return value.__dict__
        table = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return table if isinstance(table, dict) else None


def slots_of(kind: type) -> tuple[types.MemberDescriptorType, ...]:
    """Returns the slots that a class and its bases declare, private and hidden ones too."""
    return tuple(slot for base in kind.__mro__ for slot in _own_slots(base))


def _own_slots(kind: type) -> list[types.MemberDescriptorType]:
    """Returns the slots of a class; not by name, since private names are mangled."""
    members = vars(kind).values() if "__slots__" in vars(kind) else ()
    return [member for member in members if isinstance(member, types.MemberDescriptorType)]


def slot_contents(slot: types.MemberDescriptorType, value: Any) -> Any:
    """Returns what an object holds in a slot, or ABSENT."""
    try:
        return slot.__get__(value)
    except AttributeError:
        return ABSENT


def cell_contents(cell: types.CellType) -> Any:
    """Returns what a captured variable holds, or ABSENT."""
    try:
        return cell.cell_contents
    except ValueError:
        return ABSENT


Way = tuple[str, Any]  # how to reach the same item or attribute in another object of this kind
NO_WAY: Way = ("", None)  # to a member of a set, the key of a dictionary, what a function captured

# Attributes that torch.compile adds to a function when it first runs, and the one by which a
# functools.singledispatch function reaches its cache.
_NO_STATE = ("_torchdynamo", "__dynamo", "_dynamo", "_clear_cache")
# Compared by the structure of a model, or read by name: no row looks into them.
_CLOSED = (torch.Tensor, nn.Module, type, types.ModuleType, types.CodeType, *OPERATOR_TYPES)
# These lead to all of Python, so :func:`reachable` stops at them.
_WAYS_OUT = (type, types.ModuleType, types.FrameType, types.CodeType, nn.Module)
BUILTINS = "__builtins__"  # a key of each dictionary of globals
_ATOMS = frozenset((bool, int, float, complex, str, bytes, type(None)))
_LRU_CACHE = type(functools.lru_cache(len))
_METHODS = (types.BuiltinFunctionType, types.MethodWrapperType)
# Each is equal to itself alone, but written in C and immutable.
_NEVER_CHANGED = (
    *(enum.Enum, np.dtype, np.ufunc, types.GenericAlias, types.UnionType, re.Match, re.Pattern),
    *(decimal.Decimal, datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo),
    *(types.GetSetDescriptorType, types.MemberDescriptorType, types.WrapperDescriptorType),
    *(types.MethodDescriptorType, types.ClassMethodDescriptorType),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.finfo, torch.iinfo),
    *(torch.qscheme, type(...), type(NotImplemented), type(np.mean)),
)
# PyTorch's C classes with state that a forward may read.
_WITH_STATE = (torch.Generator, torch.ScriptObject)
# Modules of C classes whose objects have no state, or show it by calls only (a lock).
_PURE_MODULES = frozenset(
    ("thread", "collections", "functools", "operator", "struct", "types", "typing")
)


@dataclass(frozen=True)
class Kind:
    """How objects of some classes are read and put back."""

    classes: tuple[type, ...]  # the classes; their subclasses are of this kind, too
    # Returns an object's items now; they are compared by identity, or by value if plain.
    read: Callable[[Any], Sequence[Any]]
    # Returns the way to each item, for :func:`follow`; None if no item has one.
    ways: Callable[[Any], Sequence[Any]] | None = None
    # Puts items back into an object, as far as possible.
    put: Callable[[Any, Sequence[Any]], None] | None = None
    is_fixed: bool = False  # whether an object's items never change
    is_whole: bool = False  # whether objects of exactly these classes have no further state


def kinds_of(value: Any) -> Sequence[Kind]:
    """Returns the rows of the table for an object: none, mostly one, or several."""
    kind = type(value)
    found = _EXACT.get(kind) if has_plain_class(value) else None
    if found is not None:
        return found
    # Most objects have no row. ``isinstance`` for each row would read ``__class__``, which may run
    # the object's own ``__getattribute__`` (a configuration); a proxy may say that it is a list.
    is_frank = object.__getattribute__(value, "__class__") is kind
    if is_frank and not issubclass(kind, _CLASSES):
        return ()
    if isinstance(value, (*_CLOSED, types.FunctionType)):
        return ()
    return [row for row in KINDS if isinstance(value, row.classes)]


def parts_of(value: Any) -> Sequence[Kind]:
    """Returns all rows for an object, with those for its attributes and slots."""
    found = _EXACT.get(type(value)) if has_plain_class(value) else None
    if found is not None:
        return found
    if isinstance(value, _CLOSED):
        return ()
    parts = list(kinds_of(value))
    if is_looked_into(type(value)):
        if own_table(value) is not None:
            parts.append(OBJECT)
        if slots_of(type(value)):
            parts.append(SLOTS)
    return parts


# ---- classes -----------------------------------------------------------------------------------


def is_whole(kind: type) -> bool:
    """Whether rows, attributes and slots show all state of an object of this class."""
    is_number = kind.__module__ == "numpy" and issubclass(kind, np.generic)
    return is_number or all(
        base in _WHOLE or (is_class_statement(base) and is_looked_into(base))
        for base in kind.__mro__
    )


def is_opaque(value: Any) -> bool:
    """Whether an object has state that no row shows, and that may change unnoticed."""
    kind = type(value)
    if isinstance(value, (*_CLOSED, *_NEVER_CHANGED, types.FunctionType)) or kinds_of(value):
        return False
    if is_unrepeatable(value):
        return not (is_python_defined(kind) or slots_of(kind))
    home = kind.__module__.partition(".")[0].lstrip("_")
    if home == "torch":
        return isinstance(value, _WITH_STATE)
    is_enumeration = hasattr(kind, "__members__")  # one of pybind11
    return not (is_whole(kind) or is_enumeration or home in _PURE_MODULES)


def is_unrepeatable(value: Any) -> bool:
    """Whether reading an object changes what the next read gives (iterators, random numbers)."""
    kind = type(value)
    if kind.__module__.startswith("numpy.random") or isinstance(value, random.Random):
        return True
    return isinstance(value, Iterator) and not isinstance(value, io.IOBase)


# ---- attributes and slots ----------------------------------------------------------------------


def _put_slots(value: Any, items: Sequence[Any]) -> None:
    for slot, content in zip(slots_of(type(value)), items, strict=True):
        if content is not ABSENT:
            # Through the descriptor: the class may have a ``__setattr__`` of its own.
            slot.__set__(value, content)
        elif slot_contents(slot, value) is not ABSENT:
            slot.__delete__(value)


def _read_object(value: Any) -> Sequence[Any]:
    return [type(value), own_table(value)]


def _put_object(value: Any, items: Sequence[Any]) -> None:
    for name, now, before in zip(
        ("__class__", "__dict__"), _read_object(value), items, strict=True
    ):
        if now is not before:
            object.__setattr__(value, name, before)


OBJECT = Kind((), _read_object, put=_put_object)
SLOTS = Kind((), lambda v: [slot_contents(s, v) for s in slots_of(type(v))], put=_put_slots)


# ---- functions ---------------------------------------------------------------------------------


def _put_cell(cell: types.CellType, items: Sequence[Any]) -> None:
    if items[0] is not ABSENT:
        cell.cell_contents = items[0]
    elif cell_contents(cell) is not ABSENT:
        del cell.cell_contents


def _attribute_names(function: Any) -> list[str]:
    """Returns the names of a function's attributes, but for those that libraries add."""
    return [name for name in vars(function) if not name.startswith(_NO_STATE)]


def _read_function(function: Any) -> Sequence[Any]:
    held, names = vars(function), _attribute_names(function)
    return [*names, *map(held.__getitem__, names)]


def _put_function(function: Any, items: Sequence[Any]) -> None:
    for name in _attribute_names(function):
        del vars(function)[name]
    half = len(items) // 2
    vars(function).update(zip(items[:half], items[half:], strict=True))


def _read_whole_function(function: Any) -> Sequence[Any]:
    defaults = (function.__defaults__, function.__kwdefaults__)
    return [function.__code__, *defaults, function.__dict__, *(function.__closure__ or ())]


# The attributes of a function; a new ``__code__`` or default is noticed where the function runs.
FUNCTION = Kind((types.FunctionType,), _read_function, put=_put_function)
# Every mutable part of a function that freezing it reads.
WHOLE_FUNCTION = Kind((types.FunctionType,), _read_whole_function)


# ---- items -------------------------------------------------------------------------------------


def _itself(value: Any) -> Any:
    return value


def _in_order(value: Any) -> Sequence[Any]:
    return [("item", i) for i in range(len(value))]


def _put_items(value: Any, items: Sequence[Any]) -> None:
    value.clear()
    (value.update if isinstance(value, set) else value.extend)(items)


def _entries(value: Any) -> Sequence[Any]:
    return [*value, *value.values()]


def _entry_ways(value: Any) -> Sequence[Any]:
    return [NO_WAY] * len(value) + [("item", key) for key in value]


def _put_entries(value: Any, items: Sequence[Any]) -> None:
    half = len(items) // 2
    put_entries(value, dict(zip(items[:half], items[half:], strict=True)))


def put_entries(value: Any, entries: Mapping[Any, Any]) -> None:
    """Puts entries into a dictionary, which is emptied on the way only if the order differs."""
    for key in [key for key in value if key not in entries]:
        del value[key]
    if not all(map(operator.is_, value, entries)):
        value.clear()
    for key, held in entries.items():
        if value.get(key, ABSENT) is not held:
            value[key] = held  # a Counter's update would count


def _put_factory(value: Any, items: Sequence[Any]) -> None:
    value.default_factory = items[0]


def _attributes(*names: str) -> Callable[[Any], Sequence[Any]]:
    """Returns a function that reads an object's items from attributes that it always has."""
    return lambda value: [getattr(value, name) for name in names]


_OF_PARTIAL = ("func", "args", "keywords", "__dict__")
_PARTIAL_WAYS: Sequence[Way] = [("part", name) for name in _OF_PARTIAL]


# ---- arrays, context variables, loggers --------------------------------------------------------


def _read_ndarray(value: Any) -> Sequence[Any]:
    plain = np.asarray(value)  # of a masked array, the data under the mask
    layout = [value.shape, value.strides, str(value.dtype)]
    # Bytes, since ``==`` finds 0.0 equal to -0.0 and nan unequal to itself.
    return [*layout, *(plain.ravel().tolist() if plain.dtype.hasobject else [plain.tobytes()])]


def _put_ndarray(value: Any, items: Sequence[Any]) -> None:
    shape, _, _, *held = items
    if value.shape != shape or isinstance(value, np.generic):
        return
    plain = np.asarray(value)
    if plain.dtype.hasobject:
        # One more element, or numpy would turn items that are lists into a dimension.
        np.copyto(plain, np.array([*held, None], dtype=object)[:-1].reshape(shape))
    else:
        plain[...] = np.frombuffer(held[0], plain.dtype).reshape(shape)


def _put_variable(value: contextvars.ContextVar[Any], items: Sequence[Any]) -> None:
    if items[0] is not ABSENT:  # to unset a variable takes the token of the call that set it
        value.set(items[0])


def _read_logger(value: logging.Logger) -> Sequence[Any]:
    return [value.level, value.disabled, value.getEffectiveLevel(), value.manager.disable]


def _put_logger(value: logging.Logger, items: Sequence[Any]) -> None:
    value.setLevel(items[0])
    value.disabled = items[1]


# ---- the table ---------------------------------------------------------------------------------

_TABLES = (dict, collections.OrderedDict, collections.defaultdict, collections.Counter)

# These items are the whole value; an object of a subclass may have attributes, too.
_VALUES = tuple(
    Kind((cls,), read, is_fixed=True, is_whole=True)
    for cls, read in (
        (float, lambda v: [float.__pos__(v)]),
        (int, lambda v: [int.__pos__(v)]),
        (complex, lambda v: [complex.__pos__(v)]),
        (str, lambda v: [str.__str__(v)]),
        (bytes, lambda v: [bytes.__getitem__(v, slice(None))]),
    )
)

KINDS: tuple[Kind, ...] = (
    Kind((list,), _itself, _in_order, _put_items, is_whole=True),
    Kind(_TABLES, _entries, _entry_ways, _put_entries, is_whole=True),
    # By its iterator, because a class derived from it may have no length (e3nn's Irrep).
    Kind((tuple,), lambda v: [*tuple.__iter__(v)], _in_order, is_fixed=True, is_whole=True),
    Kind((set,), list, None, _put_items, is_whole=True),
    Kind((frozenset,), list, is_fixed=True, is_whole=True),
    Kind((range, slice), _attributes("start", "stop", "step"), is_fixed=True, is_whole=True),
    Kind((types.MethodType,), _attributes("__func__", "__self__"), is_fixed=True, is_whole=True),
    Kind((functools.partial,), _attributes(*_OF_PARTIAL), lambda p: _PARTIAL_WAYS, is_whole=True),
    *_VALUES,
    Kind((collections.defaultdict,), _attributes("default_factory"), put=_put_factory),
    Kind((collections.deque,), _itself, _in_order, _put_items, is_whole=True),
    Kind((collections.deque,), _attributes("maxlen"), is_fixed=True),
    Kind((np.ndarray, np.generic), _read_ndarray, None, _put_ndarray, is_whole=True),
    Kind((types.MappingProxyType,), _entries, _entry_ways, is_whole=True),
    Kind((weakref.ReferenceType,), lambda r: [r()], is_whole=True),
    Kind(_METHODS, _attributes("__self__"), is_fixed=True),
    Kind((logging.Logger,), _read_logger, put=_put_logger),
    Kind((property,), _attributes("fget"), is_fixed=True),
    Kind((staticmethod, classmethod), _attributes("__func__"), is_fixed=True),
    Kind((functools.cached_property,), _attributes("func"), is_fixed=True),
    Kind((_LRU_CACHE,), _attributes("__dict__"), is_fixed=True),
    Kind((types.CellType,), lambda c: [cell_contents(c)], None, _put_cell),
    Kind((contextvars.ContextVar,), lambda c: [c.get(ABSENT)], None, _put_variable),
)

_CLASSES = tuple(dict.fromkeys(cls for kind in KINDS for cls in kind.classes))
# For classes whose objects have no ``__dict__``, the rows are looked up once.
_EXACT: dict[type, tuple[Kind, ...]] = {
    cls: tuple(kind for kind in KINDS if issubclass(cls, kind.classes))
    for cls in _CLASSES
    if cls.__dictoffset__ == 0
}
_WHOLE = (*TRANSPARENT, *(cls for kind in KINDS if kind.is_whole for cls in kind.classes))


# ---- ways --------------------------------------------------------------------------------------


def function_parts(function: types.FunctionType) -> list[Any]:
    """Returns the parts of a function besides code and names."""
    captured = [cell_contents(cell) for cell in function.__closure__ or ()]
    attributes = {name: vars(function)[name] for name in _attribute_names(function)}
    return [*captured, function.__defaults__, function.__kwdefaults__, attributes]


def attribute_parts(value: Any) -> list[tuple[str, Way, Any]]:
    """Returns the name, the way and the value of each attribute that an object itself holds."""
    # Attributes of functools' and logging's objects are the library's own: only rows read them.
    if not is_looked_into(type(value)):
        return []
    slots = ((slot.__name__, slot_contents(slot, value)) for slot in slots_of(type(value)))
    found: list[tuple[str, Way, Any]] = [
        *((name, ("attr", name), held) for name, held in (own_table(value) or {}).items()),
        *((name, NO_WAY, held) for name, held in slots if held is not ABSENT),
    ]
    return sorted(found, key=lambda attribute: str(attribute[0]))


def reachable(values: Iterable[Any]) -> Iterator[Any]:
    """Yields all that values lead to, whether held in Python, in C or by a weak reference."""
    todo, seen = list(values), set[int]()
    while todo:
        value = todo.pop()
        if id(value) in seen or type(value) in _ATOMS:
            continue
        seen.add(id(value))
        yield value
        if isinstance(value, torch.Tensor):
            todo += vars(value).values()
        elif isinstance(value, types.FunctionType):
            todo += function_parts(value)
        elif not isinstance(value, _WAYS_OUT) and not (type(value) is dict and BUILTINS in value):
            # What C code holds, too, which no row shows.
            todo += gc.get_referents(value)
            if isinstance(value, weakref.ReferenceType):
                todo.append(value())
            elif isinstance(value, np.ndarray) and value.dtype.hasobject:
                todo += value.ravel().tolist()


def follow(value: Any, way: Way) -> Any:
    """Returns what a way leads to in an object."""
    sort, name = way
    if sort == "part":
        return getattr(value, name)
    return value[name] if sort == "item" else (own_table(value) or {})[name]
