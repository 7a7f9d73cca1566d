"""What mutable objects hold: lists, dictionaries, sets and plain Python objects, all the way down.

A model's Python reads more than attributes: ``self.config.scale``, ``self.tables[0]``. The objects
in between are looked into when they are first read, and compared by identity, item by item.
"""

from __future__ import annotations

import operator
import types
from collections.abc import Callable
from itertools import islice
from typing import Any

import torch
from torch import nn

MISSING = object()

_SCALARS = (bool, int, float, complex, str, bytes, torch.device, torch.Size)
_MAX_DEPTH = 6
_MAX_CONTAINERS = 256
_MAX_ITEMS = 1024
_CLOSED = (
    torch.Tensor,
    nn.Module,
    type,
    types.ModuleType,
    types.FunctionType,
    types.MethodType,
    types.BuiltinFunctionType,
)
_FOREIGN = frozenset({"builtins", "torch", "numpy", "functools", "threading", "weakref", "logging"})


class Contents:
    """What the objects looked into held then."""

    def __init__(self) -> None:
        self._seen: dict[int, Any] = {}
        self._lists: list[tuple[list[Any], list[Any]]] = []
        self._sets: list[tuple[set[Any], frozenset[Any]]] = []
        self._dicts: list[tuple[dict[Any, Any], list[Any], list[Any]]] = []

    def look_into(self, value: Any, depth: int = 0) -> None:
        """Notes what a value holds, unless that was done before."""
        if id(value) in self._seen or depth > _MAX_DEPTH or len(self._seen) > _MAX_CONTAINERS:
            return
        if isinstance(value, (list, tuple)):
            inner = list(islice(value, _MAX_ITEMS))
            if isinstance(value, list):
                self._lists.append((value, inner))
        elif isinstance(value, dict):
            inner = self._note_dict(value)
        elif isinstance(value, set):
            self._sets.append((value, frozenset(value)))
            inner = []
        elif _is_plain_object(value):
            inner = self._note_dict(vars(value))
        else:
            return
        self._seen[id(value)] = value
        for item in inner:
            self.look_into(item, depth + 1)

    def _note_dict(self, table: dict[Any, Any]) -> list[Any]:
        keys, values = list(islice(table, _MAX_ITEMS)), list(islice(table.values(), _MAX_ITEMS))
        self._dicts.append((table, keys, values))
        return values

    def same(self) -> bool:
        """Whether all of them hold the same objects still (or equal numbers and texts)."""
        return (
            all(_same(now, before) for now, before in self._lists)
            and all(
                _same(table.values(), values) and _same(table, keys)
                for table, keys, values in self._dicts
            )
            and all(now == before for now, before in self._sets)
        )

    def changed_values(self) -> list[Any]:
        """Returns every value that is new in an object looked into."""
        new: list[Any] = []
        for now, before in self._lists:
            new += [] if _same(now, before) else _not_in(now, before)
        for table, keys, values in self._dicts:
            if not (_same(table.values(), values) and _same(table, keys)):
                new += _not_in([*table, *table.values()], [*keys, *values])
        for group, members in self._sets:
            new += list(group - members)
        return new

    def put_forward(self) -> Callable[[], None]:
        """Returns what brings the present contents back after :meth:`put_back`."""
        lists = [(now, list(now)) for now, _ in self._lists]
        dicts = [(table, dict(table)) for table, _, _ in self._dicts]
        sets = [(group, set(group)) for group, _ in self._sets]

        def redo() -> None:
            for now, items in lists:
                now[:] = items
            for table, entries in dicts:
                table.clear()
                table.update(entries)
            for group, members in sets:
                group.clear()
                group.update(members)

        return redo

    def put_back(self) -> str:
        """Undoes changes; returns what was changed, or an empty text."""
        changed = ""
        for now, before in self._lists:
            if len(before) < _MAX_ITEMS and not _same(now, before):
                changed, now[:] = "a list", before
        for table, keys, values in self._dicts:
            whole = len(keys) < _MAX_ITEMS
            if whole and not (_same(table.values(), values) and _same(table, keys)):
                changed = "a dictionary or object"
                table.clear()
                table.update(zip(keys, values, strict=True))
        for group, members in self._sets:
            if group != members:
                changed = "a set"
                group.clear()
                group.update(members)
        return changed


def _not_in(now: Any, before: list[Any]) -> list[Any]:
    known = set(map(id, before))
    return [value for value in now if id(value) not in known]


def _is_plain_object(value: Any) -> bool:
    kind = type(value)
    return (
        not isinstance(value, _CLOSED)
        and (kind is types.SimpleNamespace or kind.__module__.partition(".")[0] not in _FOREIGN)
        and type(getattr(value, "__dict__", None)) is dict
    )


def _same(now: Any, before: list[Any]) -> bool:
    size = len(now)
    if size != len(before) and (size < _MAX_ITEMS or len(before) < _MAX_ITEMS):
        return False
    if all(map(operator.is_, now, before)):
        return True
    return all(map(same_value, now, before))


def same_value(now: Any, before: Any) -> bool:
    """Whether two values are one object, or equal and of a plain type."""
    if now is before:
        return True
    kind = type(now)
    if kind is not type(before):
        return False
    if kind is tuple:
        return len(now) == len(before) and all(map(same_value, now, before))
    return kind in _SCALARS and repr(now) == repr(before)  # 0.0 is not -0.0, but nan is nan
