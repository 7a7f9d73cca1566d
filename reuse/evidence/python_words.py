"""Words of memory by which CPython's own objects tell that they changed.

A dictionary has a version: one word that every change of it sets anew, to a number that no
dictionary had before (PEP 509). An object has its class, and a class its order of base classes, in
one word each. Where this interpreter keeps no such words, there are none here, and whoever asks
compares contents.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import struct
import sys
from collections import OrderedDict
from collections.abc import Callable
from types import FunctionType, MappingProxyType
from typing import Any

# Seen to keep versions; 3.13 changes attributes of objects past their dictionaries.
_PYTHONS = ((3, 10), (3, 11), (3, 12))
_WORD_BYTES = 8
_CLASS_OFFSET = object.__basicsize__ - _WORD_BYTES
_VERSION_OFFSET = object.__basicsize__ + _WORD_BYTES  # after the number of entries
_MAX_CLASS_WORDS = 48
_HAS_MANAGED_DICT = 1 << 4  # Py_TPFLAGS_MANAGED_DICT: kept in one of the words before the object
_NUM_WORDS_BEFORE = 4


def read_word(address: int) -> int:
    """Returns a word of memory that is known to be there."""
    return ctypes.c_int64.from_address(address).value


def version_of_table(table: Any) -> int | None:
    """Returns where a table's version is, or None if it has none that tells every change.

    An ordered dictionary's does not tell that its entries were reordered.
    """
    if type(table) is MappingProxyType:
        (table,) = gc.get_referents(table)
    if type(table) not in (dict, OrderedDict) or not tells_versions():
        return None
    return id(table) + _VERSION_OFFSET


def class_of(owner: Any, kind: type) -> int | None:
    """Returns where an object's class is, if that is ``kind``."""
    address = id(owner) + _CLASS_OFFSET
    return address if tells_versions() and read_word(address) == id(kind) else None


def attributes_of(owner: Any, table: dict[str, Any]) -> int | None:
    """Returns where an object says which dictionary holds its attributes, if that is ``table``."""
    if not tells_versions():
        return None
    offset = type(owner).__dictoffset__
    if offset > 0:
        places = [offset]
    elif type(owner).__flags__ & _HAS_MANAGED_DICT:
        places = [-i * _WORD_BYTES for i in range(1, _NUM_WORDS_BEFORE + 1)]
    else:
        return None
    found = [id(owner) + at for at in places if read_word(id(owner) + at) == id(table)]
    return found[0] if len(found) == 1 else None


def bases_of(owner: type) -> int | None:
    """Returns where a class says in which classes names are looked up."""
    if not tells_versions():
        return None
    words = [id(owner) + i * _WORD_BYTES for i in range(_MAX_CLASS_WORDS)]
    found = [a for a in words if read_word(a) == id(owner.__mro__)]
    return found[0] if len(found) == 1 else None


def lookup_of(owner: Any, name: str) -> tuple[int, ...] | None:
    """Returns what changes when a function is found in a class no more, or another one is."""
    start = bases_of(owner) if type(owner) is type else None
    if start is None:
        return None
    found: list[int | None] = [start]
    for base in owner.__mro__:
        found.append(version_of_table(vars(base)))
        if name in vars(base):
            plain = type(vars(base)[name]) is FunctionType
            return tuple(a for a in found if a) if plain and None not in found else None
    return None


@functools.cache
def tells_versions() -> bool:
    """Whether every way to change a dictionary changes its version, tried out."""
    if sys.implementation.name != "cpython" or sys.version_info[:2] not in _PYTHONS:
        return False
    if struct.calcsize("P") != _WORD_BYTES or hasattr(sys, "getobjects"):
        return False
    holder = _Holder()
    return all(
        _all_told(table, way)
        for way in _WAYS
        for table in ({"a": 0, "b": 1}, OrderedDict(a=0, b=1), vars(holder))
    ) and all(_all_told(vars(holder), functools.partial(way, holder)) for way in _ATTRIBUTE_WAYS)


def _all_told(table: dict[str, Any], change: Callable[[Any], Any]) -> bool:
    """Whether a table's version is another one after each of many changes of one kind."""
    address, seen = id(table) + _VERSION_OFFSET, set()
    for _ in range(_NUM_CHANGES):
        seen.add(read_word(address))
        change(table)
        table.setdefault("b", 1)
        if read_word(address - _WORD_BYTES) != len(table) or read_word(address) in seen:
            return False
    return True


# So many that the interpreter has specialized its instructions for them.
_NUM_CHANGES = 40


class _Holder:
    def __init__(self) -> None:
        self.a: Any = 0
        self.b: Any = 1


def _store(table: dict[str, Any]) -> None:
    table["a"] = object()


def _delete(table: dict[str, Any]) -> None:
    table["a"] = 0
    del table["a"]


def _clear(table: dict[str, Any]) -> None:
    table.clear()


def _store_attribute(holder: _Holder, _: Any) -> None:
    holder.a = object()


def _delete_attribute(holder: _Holder, _: Any) -> None:
    holder.a = 0
    del holder.a


_WAYS: tuple[Callable[[dict[str, Any]], Any], ...] = (
    _store,
    _delete,
    _clear,
    lambda table: table.update(a=object()),
    lambda table: table.__ior__({"a": object()}),
    lambda table: table.pop("a", None) or table.setdefault("a", 1),
    lambda table: table.popitem(),
    lambda table: dict.__setitem__(table, "a", object()),
)
_ATTRIBUTE_WAYS: tuple[Callable[[_Holder, Any], Any], ...] = (
    _store_attribute,
    _delete_attribute,
    lambda holder, _: setattr(holder, "a", object()),
    lambda holder, _: object.__setattr__(holder, "a", object()),
)
