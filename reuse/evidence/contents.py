"""What mutable objects hold, all the way down.

A model's Python reads more than attributes: ``self.config.scale``, ``self.tables[0]``. The objects
in between are looked into when they are first read, and compared by identity, item by item.
"""

from __future__ import annotations

import array
import collections
import operator
import types
import weakref
from collections.abc import Callable, Iterable
from itertools import repeat
from typing import Any

import numpy as np
import torch

from ..errors import CaptureError
from ..freeze import has_plain_class, slots_of
from .holders import Kind, attributes_of, is_iterator, kind_of, parts_of

MISSING = object()

_SCALARS = (bool, int, float, complex, str, bytes, range, torch.device, torch.Size)
_ATOMS = frozenset({*_SCALARS, type(None), torch.dtype})
_GROUPS = (list, tuple, set, frozenset, collections.deque)
_TABLES = (dict, collections.OrderedDict, collections.defaultdict, collections.Counter)
_BUFFERS = (bytearray, array.array, np.ndarray)
_SHOWN = (list, tuple, dict)  # code that reads one of these directly reads what is in it
_MAX_OBJECTS = 2**20


class Contents:
    """What the objects looked into held then.

    Attributes:
        holders: the classes and modules met, and the classes of the objects met: what they hold
            is read by name.
        classes: the classes of the objects met, whose operators may be used.
        functions: the functions met.
        iterators: those that the code itself was handed; each use moves them on.
        lasting: what was changed and could not be put back, or an empty text.
    """

    def __init__(self) -> None:
        self.holders: dict[int, Any] = {}
        self.classes: dict[int, type] = {}
        self.functions: dict[int, types.FunctionType] = {}
        self.iterators: list[Any] = []
        self.lasting = ""
        self._seen: dict[int, Any] = {}
        self._lists: list[tuple[list[Any], list[Any]]] = []
        self._sets: list[tuple[set[Any], list[Any]]] = []
        self._dicts: list[tuple[dict[Any, Any], list[Any], list[Any]]] = []
        self._others: list[tuple[Any, Kind, list[Any]]] = []
        self._objects: list[tuple[Any, type, dict[str, Any]]] = []
        self._noted = (self._lists, self._sets, self._dicts, self._others, self._objects)

    def look_into(self, value: Any) -> None:
        """Notes what a value holds, unless that was done before.

        Raises:
            CaptureError: if that is a million objects.
        """
        todo = [(value, True)]
        while todo:
            value, is_direct = todo.pop()
            if id(value) in self._seen or (has_plain_class(value) and type(value) in _ATOMS):
                continue
            self._seen[id(value)] = value
            if len(self._seen) > _MAX_OBJECTS:
                raise CaptureError(
                    f"An attribute or global that the model's forward reads holds more than "
                    f"{_MAX_OBJECTS} objects, and a change in any of them would have to be "
                    "noticed at every call. Keep what the forward needs in attributes of their "
                    "own, numbers in a tensor."
                )
            if is_direct and is_iterator(value):
                self.iterators.append(value)
            shown = is_direct and isinstance(value, _SHOWN)
            todo += [(item, shown) for item in self._note(value)]

    def _note(self, value: Any) -> list[Any]:
        """Keeps what a value holds itself; returns what it leads to."""
        found = list(parts_of(value))
        if isinstance(value, list):
            found = list(value)
            self._lists.append((value, found))
        elif isinstance(value, dict):
            found = self._note_dict(value)
        elif isinstance(value, set):
            found = list(value)
            self._sets.append((value, found))
        elif isinstance(value, (type, types.ModuleType)):
            self.holders[id(value)] = value
        elif isinstance(value, types.FunctionType):
            self.functions[id(value)] = value
        kind = kind_of(value)
        if kind is not None:
            held = list(kind.take(value))
            self._others.append((value, kind, held))
            found = found + ([] if kind.is_state else held)
        attributes = attributes_of(value)
        if attributes is not None:
            self._objects.append((value, type(value), attributes))
            found = found + self._note_dict(attributes)
        if attributes is not None or kind is not None:
            self.holders.setdefault(id(type(value)), type(value))
            self.classes[id(type(value))] = type(value)
        return found

    def _note_dict(self, table: dict[Any, Any]) -> list[Any]:
        keys, values = list(table), list(table.values())
        self._dicts.append((table, keys, values))
        return [*keys, *values]

    def same(self) -> bool:
        """Whether all of them hold the same objects still (or equal numbers and texts)."""
        return not any(self._noted) or (
            all(_same(now, before) for now, before in self._lists)
            and all(
                _same(table.values(), values) and _same(table, keys)
                for table, keys, values in self._dicts
            )
            and all(_same(now, before) for now, before in self._sets)
            and all(
                type(value) is kind and attributes_of(value) is attributes
                for value, kind, attributes in self._objects
            )
            and all(_same(kind.take(now), before) for now, kind, before in self._others)
        )

    def changed_values(self) -> list[Any]:
        """Returns every value that is new in an object looked into."""
        new: list[Any] = []
        for now, before in (*self._lists, *self._sets):
            new += [] if _same(now, before) else _not_in(now, before)
        for table, keys, values in self._dicts:
            if not (_same(table.values(), values) and _same(table, keys)):
                new += _not_in([*table, *table.values()], [*keys, *values])
        for value, kind, before in self._others:
            held = kind.take(value)
            if not _same(held, before):
                new += [value] if kind.is_state else _not_in(held, before)
        return new

    def put_forward(self) -> Callable[[], None]:
        """Returns what brings the present contents back after :meth:`put_back`."""
        lists = [(now, list(now)) for now, _ in self._lists]
        dicts = [(table, dict(table)) for table, _, _ in self._dicts]
        sets = [(group, set(group)) for group, _ in self._sets]
        others = [(value, kind, list(kind.take(value))) for value, kind, _ in self._others]

        def redo() -> None:
            for now, items in lists:
                now[:] = items
            for table, entries in dicts:
                table.clear()
                table.update(entries)
            for group, members in sets:
                group.clear()
                group.update(members)
            for value, kind, held in others:
                if not _same(kind.take(value), held):
                    kind.put(value, held)

        return redo

    def put_back(self) -> str:
        """Undoes changes; returns what was changed, or an empty text."""
        changed = self._put_back()
        if changed and not all(self._is_back(*other) for other in self._others):
            self.lasting = changed
        return changed

    def refuse_lasting(self) -> None:
        """Raises CaptureError if a run changed something that could not be put back.

        Another run, of a capture or of the model itself, would change it once more.
        """
        if self.lasting:
            raise CaptureError(
                f"The model's forward changes {self.lasting}, and what it held before cannot be "
                "restored after the run that captures the model: it would be changed twice. "
                "Keep what changes in a list, a dictionary, an attribute or a buffer."
            )

    @staticmethod
    def _is_back(value: Any, kind: Kind, before: list[Any]) -> bool:
        # What a weak reference led to is gone for others, too: that is no doing of the forward.
        return isinstance(value, weakref.ReferenceType) or _same(kind.take(value), before)

    def _put_back(self) -> str:
        changed = ""
        for now, before in self._lists:
            if not _same(now, before):
                changed, now[:] = "a list", before
        for table, keys, values in self._dicts:
            if not (_same(table.values(), values) and _same(table, keys)):
                changed = "a dictionary or object"
                table.clear()
                table.update(zip(keys, values, strict=True))
        for group, members in self._sets:
            if not _same(group, members):
                changed = "a set"
                group.clear()
                group.update(members)
        for value, kind, before in self._others:
            if not _same(kind.take(value), before):
                changed = _name_of(value)
                kind.put(value, before)
        return changed


def refuse_iterators(first: Iterable[Any], second: Iterable[Any]) -> None:
    """Raises CaptureError for an iterator that two runs of the model's code were both handed."""
    known = set(map(id, first))
    for found in second:
        if id(found) in known:
            raise CaptureError(
                f"The model's forward reads a {type(found).__name__} from an attribute or global, "
                "which gives something else at each use, and a compiled program would use the "
                "same at every call. Keep the items in a list and a number in a buffer, or pass "
                "the item in."
            )


def _name_of(value: Any) -> str:
    if isinstance(value, types.FunctionType):
        return f"an attribute of the function {value.__qualname__}"
    return f"a {type(value).__name__}"


def _not_in(now: Any, before: list[Any]) -> list[Any]:
    known = set(map(id, before))
    return [value for value in now if id(value) not in known]


def _same(now: Any, before: list[Any]) -> bool:
    if len(now) != len(before):
        return False
    if all(map(operator.is_, now, before)):
        return True
    return all(map(same_value, now, before))


def same_value(now: Any, before: Any) -> bool:
    """Whether two values are one object, or of one plain type and hold equal values.

    What is equal now may be changed later, unlike the one that was looked into: who goes by an
    answer about two objects asks again.
    """
    return now is before or _same_plain(now, before, set())


def is_constant(value: Any) -> bool:
    """Whether a value can never hold anything else."""
    return has_plain_class(value) and type(value) in _ATOMS


def _same_plain(now: Any, before: Any, compared: set[tuple[int, int]]) -> bool:
    kind = type(now)
    if now is before or kind is not type(before):
        return now is before
    if kind is float or kind is complex:
        return repr(now) == repr(before)  # 0.0 is not -0.0, but nan is nan
    if kind in _SCALARS:
        return bool(now == before)
    pair = (id(now), id(before))
    if pair in compared:
        return True
    compared.add(pair)
    items, others = _items_of(now), _items_of(before)
    return (
        items is not None
        and others is not None
        and len(items) == len(others)
        and all(map(_same_plain, items, others, repeat(compared)))
    )


def _items_of(value: Any) -> list[Any] | None:
    """Returns what a value that is compared by what it holds consists of, in order; else None."""
    kind = type(value)
    if kind in _GROUPS:
        return list(value)
    if kind in _TABLES:
        return [getattr(value, "default_factory", None), *value, *value.values()]
    if kind is slice:
        return [value.start, value.stop, value.step]
    if kind in _BUFFERS:
        found = kind_of(value)
        return list(found.take(value)) if found is not None else None
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        return list(value)
    usual: Any = object.__eq__  # equal to itself alone
    attributes = attributes_of(value) if kind.__eq__ is not usual else None
    if attributes is None or isinstance(value, (*_GROUPS, *_TABLES)) or slots_of(kind):
        return None
    return [*attributes, *attributes.values()]
