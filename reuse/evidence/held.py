"""What values hold, checked by identity: a quick way to know that freezing gives the same again.

Sharing is decided by comparing frozen values. Most values that a later instance reads are the very
objects that the first one read (a class's methods, one configuration for all layers), and freezing
them again takes longer than all the rest. If such an object, and everything it holds, is the same
objects as before, it freezes to the same.
"""

from __future__ import annotations

import contextvars
import enum
import operator
import types
from typing import Any

import torch

from ..freeze import (
    BY_IDENTITY,
    IMMUTABLE,
    TRANSPARENT,
    is_python_defined,
    is_unrepeatable,
    slots_of,
)

_MAX_OBJECTS = 4096
_EMPTY = object()
_HOLDERS = (
    *(list, tuple, dict, set, frozenset, bytearray, range, slice),
    *(types.MethodType, types.MappingProxyType, contextvars.ContextVar),
)


class Held:
    """The objects that some values hold, all the way down, as they were when looked into."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[Any, bool]] = {}
        self._tables: list[tuple[dict[Any, Any], list[Any], list[Any]]] = []
        self._groups: list[tuple[Any, list[Any]]] = []
        self._cells: list[tuple[types.CellType, Any]] = []
        self._functions: list[tuple[types.FunctionType, tuple[Any, ...]]] = []
        self._objects: list[tuple[Any, type]] = []

    def look_into(self, value: Any) -> bool:
        """Notes what a value holds.

        Returns:
            Whether :meth:`same` will notice all that freezing the same object would notice.
        """
        known = self._seen.get(id(value))
        if known is None:
            if len(self._seen) > _MAX_OBJECTS:
                return False
            self._seen[id(value)] = (value, True)  # a cycle leads back to what is being noted
            known = self._seen[id(value)] = (value, self._note(value))
        return known[1]

    def same(self) -> bool:
        """Whether everything looked into holds the very same objects still."""
        return (
            all(
                len(table) == len(keys)
                and all(map(operator.is_, table.values(), values))
                and all(map(operator.is_, table, keys))
                for table, keys, values in self._tables
            )
            and all(
                len(group) == len(items) and all(map(operator.is_, group, items))
                for group, items in self._groups
            )
            and all(_contents(cell) is content for cell, content in self._cells)
            and all(
                all(map(operator.is_, _parts(function), parts))
                for function, parts in self._functions
            )
            and all(type(value) is kind for value, kind in self._objects)
        )

    def _note(self, value: Any) -> bool:
        kind = type(value)
        if kind in IMMUTABLE:
            return True
        if isinstance(value, (torch.Tensor, torch.nn.Module)):
            return False  # what they freeze to depends on where they sit, or can change in place
        if isinstance(value, (enum.Enum, *BY_IDENTITY)):
            return True
        if kind is dict:
            return self._table(value)
        if kind in (list, set, frozenset, tuple):
            self._groups.append((value, list(value)))
            return all([self.look_into(item) for item in value])
        if kind is types.FunctionType:
            return self._function(value)
        if not is_python_defined(kind):
            return _freezes_to_itself(value)
        return self._object(value)

    def _table(self, table: dict[Any, Any]) -> bool:
        keys, values = list(table), list(table.values())
        self._tables.append((table, keys, values))
        return all([self.look_into(item) for item in (*keys, *values)])

    def _function(self, function: types.FunctionType) -> bool:
        self._functions.append((function, _parts(function)))
        contents = []
        for cell in function.__closure__ or ():
            contents.append(_contents(cell))
            self._cells.append((cell, contents[-1]))
        parts = (function.__defaults__, function.__kwdefaults__, function.__dict__, *contents)
        return all([self.look_into(part) for part in parts if part is not _EMPTY])

    def _object(self, value: Any) -> bool:
        if not _is_all_in_dict(type(value)):
            return False
        self._objects.append((value, type(value)))
        return self._table(object.__getattribute__(value, "__dict__"))


def _parts(function: types.FunctionType) -> tuple[Any, ...]:
    """What of a function can be replaced in place."""
    defaults = (function.__defaults__, function.__kwdefaults__)
    return (function.__code__, *defaults, function.__dict__)


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _EMPTY


def _freezes_to_itself(value: Any) -> bool:
    """Whether an object of a class written in C counts as it is, whatever it holds."""
    kind = type(value)
    if kind.__module__ in ("numpy", "collections", "array", "functools"):
        return False
    return not isinstance(value, _HOLDERS) and not is_unrepeatable(value)


def _is_all_in_dict(kind: type) -> bool:
    """Whether objects of a class written in Python keep all they hold in their ``__dict__``."""
    has_contents = any(base is not object and base in TRANSPARENT for base in kind.__mro__)
    return kind.__dictoffset__ != 0 and not has_contents and not slots_of(kind)
