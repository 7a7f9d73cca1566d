"""Reads what an object is and holds without running any code of its class."""

from __future__ import annotations

import logging
import struct
import sys
import threading
import types
from collections import defaultdict, deque
from typing import Any

# What a name, a slot or a captured variable holds that has no value.
ABSENT: Any = object()

# Written in C, and items and attributes are all that they hold.
TRANSPARENT = (
    *(object, list, tuple, dict, set, frozenset, deque, defaultdict),
    *(types.FunctionType, types.MethodType, types.SimpleNamespace, threading.local),
)
_POINTER_BYTES = struct.calcsize("P")
# How objects of these hold their state, a row of the table of kinds says, or nobody sees.
_READ_BY_ROWS = frozenset({"builtins", "functools", "weakref", "logging"})
_LIBRARIES = sys.stdlib_module_names | {"torch", "lazyinline"}


OWN_PATCH = "_lazyinline_patch"
"""Attribute of the functions that patch somebody else's class while a model is captured."""


def is_own_patch(value: Any) -> bool:
    """Whether a value is a function of ours that is there while a model is captured."""
    return type(value) is types.FunctionType and OWN_PATCH in value.__dict__


def is_library(module_name: Any) -> bool:
    """Whether a module is Python's own, PyTorch's or ours, whose globals steer no model."""
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


def has_plain_class(value: Any) -> bool:
    """Whether the class of a value is equal to itself only, and has a hash: a metaclass may say."""
    meta: Any = type(type(value))
    return meta is type or (meta.__eq__ is type.__eq__ and meta.__hash__ is type.__hash__)


def is_looked_into(kind: type) -> bool:
    """Whether attributes and slots of objects of a class are looked into, whosever class it is."""
    if kind is logging.LoggerAdapter:  # an object like a user's, around one with a row
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
    """Returns an object's dictionary of attributes, past any code of its class, if it has one."""
    try:
        # The present thread's: each has another.
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
    """Returns the slots of a class, not by name: a private name is held under another."""
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
