"""What the model's Python read outside the model: globals, class attributes, captured variables.

They are looked at again at each call of a compiled program.
"""

from __future__ import annotations

import operator
import types
from collections.abc import Iterator, Mapping
from itertools import repeat
from typing import Any

from ..reuse.reads import Reads, look_up
from .contents import MISSING, Contents, same_value
from .identity_checks import IdentityChecks

_contents_of = operator.attrgetter("cell_contents")


class OutsideValues:
    """The values that the functions which ran found outside the model, as of now.

    All of them are dictionary entries (of modules, classes and objects), slots, or variables
    captured by functions.

    Args:
        reads: what ran, and where it looked.
    """

    def __init__(self, reads: Reads) -> None:
        self._contents = Contents()
        self._entries: dict[type, tuple[list[Any], list[str], list[Any]]] = {
            dict: ([], [], []),
            types.MappingProxyType: ([], [], []),
        }
        self._absent: tuple[list[Any], list[str]] = ([], [])
        self._slots: list[tuple[Any, str, Any]] = []
        for owner, name in reads.places():
            self._add(owner, name)
        self._cells = [cell for cell in reads.cells() if _is_filled(cell)]
        self._captured = list(map(_contents_of, self._cells))
        for value in self._captured:
            self._contents.look_into(value)

    def _add(self, owner: Any, name: str) -> None:
        for table in _tables(owner):
            if name in table:
                break
            self._absent[0].append(table)
            self._absent[1].append(name)
        else:
            return
        value = table[name]
        if isinstance(value, types.MemberDescriptorType) and not isinstance(owner, type):
            value = look_up(owner, name)
            self._slots.append((owner, name, value))
        else:
            kind = dict if isinstance(table, dict) else types.MappingProxyType
            for column, part in zip(self._entries[kind], (table, name, value), strict=True):
                column.append(part)
        self._contents.look_into(value)

    def add_identity_checks(self, checks: IdentityChecks) -> None:
        """Adds that each of them is the very object that it is now."""
        for tables, names, _ in self._entries.values():
            for table, name in zip(tables, names, strict=True):
                checks.entry(table, name, table[name])
        for table, name in zip(*self._absent, strict=True):
            checks.absent(table, name)
        for owner, name, _ in self._slots:
            checks.attribute(owner, name, look_up(owner, name))
        for cell in self._cells:
            checks.captured(cell, cell.cell_contents)

    def same_values(self) -> bool:
        """Whether all of them are what they were, or equal to it."""
        return (
            all(self._same_entries(kind) for kind in self._entries)
            and not any(map(operator.contains, *self._absent))
            and self._same_captured()
            and all(same_value(look_up(o, name), value) for o, name, value in self._slots)
        )

    def same_contents(self) -> bool:
        """Whether the objects among them hold what they held."""
        return self._contents.same()

    def _same_entries(self, kind: Any) -> bool:
        tables, names, before = self._entries[kind]
        return _same(list(map(kind.get, tables, names, repeat(MISSING))), before)

    def _same_captured(self) -> bool:
        try:
            return _same(list(map(_contents_of, self._cells)), self._captured)
        except ValueError:  # one was emptied
            return False


def _same(now: list[Any], before: list[Any]) -> bool:
    return all(map(operator.is_, now, before)) or all(map(same_value, now, before))


def _tables(owner: Any) -> Iterator[Mapping[str, Any]]:
    """The dictionaries that a name of an owner is looked up in, in order."""
    if type(owner) is dict:
        yield owner
        return
    if not isinstance(owner, type) and isinstance(getattr(owner, "__dict__", None), dict):
        yield vars(owner)
    for base in owner.__mro__ if isinstance(owner, type) else type(owner).__mro__:
        yield base.__dict__


def _is_filled(cell: types.CellType) -> bool:
    try:
        _contents_of(cell)
    except ValueError:
        return False
    return True
