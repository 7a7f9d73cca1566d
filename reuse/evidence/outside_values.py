"""What the model's Python read outside the model: globals, class attributes, captured variables.

They are looked at again at each call of a compiled program.
"""

from __future__ import annotations

import operator
import os
import types
from collections.abc import Iterable, Iterator, Mapping
from itertools import repeat
from typing import Any

from ..objects import ABSENT, is_library, own_table
from .identity_checks import IdentityChecks
from .reads import Reads, look_up, may_hold_state
from .snapshot import Snapshot, same_value

_contents_of = operator.attrgetter("cell_contents")


class OutsideValues:
    """The values that the functions which ran found outside the model, as of now.

    All of them are dictionary entries (of modules, classes and objects), slots, or variables
    captured by functions.

    Args:
        reads: what ran, and where it looked.
        inside: what the model's own attributes hold; the classes and modules among it are outside.

    Attributes:
        iterators: those among them; each use moves them on.
    """

    def __init__(self, reads: Reads, inside: Snapshot) -> None:
        self._contents = Snapshot()
        self._entries: dict[type, tuple[list[Any], list[str], list[Any]]] = {
            dict: ([], [], []),
            types.MappingProxyType: ([], [], []),
        }
        self._absent: tuple[list[Any], list[str]] = ([], [])
        self._bases: dict[int, tuple[type, tuple[type, ...]]] = {}
        self._objects: dict[int, tuple[Any, type, Any]] = {}
        self._slots: list[tuple[Any, str, Any]] = []
        for owner, name in reads.places():
            self._add(owner, name)
        self._cells = [cell for cell in reads.cells() if _is_filled(cell)]
        self._captured = list(map(_contents_of, self._cells))
        for value in self._captured:
            self._contents.look_into(value)
        self._add_holders(reads.names(), inside)
        self._functions = _changeable(reads, {**inside.functions, **self._contents.functions})
        self._add_environment(reads.environment())
        self.iterators = self._contents.iterators

    def _add_holders(self, names: Iterable[str], inside: Snapshot) -> None:
        """Adds what classes and modules met on the way hold under the names that code speaks of."""
        done: set[int] = set()
        todo = [*inside.holders.values(), *self._contents.holders.values()]
        while todo:
            holder = todo.pop()
            if id(holder) in done:
                continue
            done.add(id(holder))
            if not may_hold_state(holder):
                continue
            if isinstance(holder, type):
                todo.append(type(holder))
            used = id(holder) in inside.classes or id(holder) in self._contents.classes
            for name in (*names, *(_operators(holder) if used else ())):
                if _is_own(holder, name):
                    self._add(holder, name)
            todo += [h for key, h in self._contents.holders.items() if key not in done]

    def _add_environment(self, texts: Iterable[str]) -> None:
        table = vars(os.environ).get("_data")
        if not isinstance(table, dict):
            return
        tables, names, values = self._entries[dict]
        for text in texts:
            name = os.environ.encodekey(text)  # type: ignore[attr-defined]
            if name in table:
                for column, part in zip(
                    (tables, names, values), (table, name, table[name]), strict=True
                ):
                    column.append(part)
            elif text.isupper():
                self._absent[0].append(table)
                self._absent[1].append(name)

    def _add(self, owner: Any, name: str) -> None:
        kind = owner if isinstance(owner, type) else type(owner)
        self._bases[id(kind)] = (kind, kind.__mro__)
        if not isinstance(owner, (dict, type, types.ModuleType)):
            self._objects[id(owner)] = (owner, type(owner), own_table(owner))
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
        for columns in self._entries.values():
            for table, name, before in zip(*columns, strict=True):
                checks.entry(table, name, table[name])
                checks.still_like(table[name], before)
        for table, name in zip(*self._absent, strict=True):
            checks.absent(table, name)
        for kind, _ in self._bases.values():
            checks.bases(kind)
        for owner, kind, table in self._objects.values():
            if table is None:
                checks.kind(owner, kind)
            else:
                checks.held_in(owner, kind, table)
        for owner, name, before in self._slots:
            checks.attribute(owner, name, look_up(owner, name))
            checks.still_like(look_up(owner, name), before)
        for cell, before in zip(self._cells, self._captured, strict=True):
            checks.captured(cell, cell.cell_contents)
            checks.still_like(cell.cell_contents, before)
        for function, name, value in self._functions:
            checks.attribute(function, name, value)

    def same_values(self) -> bool:
        """Whether all of them are what they were, or equal to it."""
        return (
            all(self._same_entries(kind) for kind in self._entries)
            and not any(map(operator.contains, *self._absent))
            and all(kind.__mro__ is order for kind, order in self._bases.values())
            and all(
                type(owner) is kind and own_table(owner) is table
                for owner, kind, table in self._objects.values()
            )
            and self._same_captured()
            and all(same_value(look_up(o, name), value) for o, name, value in self._slots)
            and all(getattr(f, name) is value for f, name, value in self._functions)
        )

    def same_contents(self) -> bool:
        """Whether the objects among them hold what they held."""
        return self._contents.same()

    def _same_entries(self, kind: Any) -> bool:
        tables, names, before = self._entries[kind]
        return _same(list(map(kind.get, tables, names, repeat(ABSENT))), before)

    def _same_captured(self) -> bool:
        try:
            return _same(list(map(_contents_of, self._cells)), self._captured)
        except ValueError:  # one was emptied
            return False


def _changeable(
    reads: Reads, functions: Mapping[int, types.FunctionType]
) -> list[tuple[types.FunctionType, str, Any]]:
    """Returns what can be replaced in the functions that ran, while they stay who they are."""
    ran = {code for code, _ in reads.functions}
    names = ("__code__", "__defaults__", "__kwdefaults__")
    return [
        (f, name, getattr(f, name))
        for f in functions.values()
        if f.__code__ in ran
        for name in names
    ]


def _operators(kind: type) -> set[str]:
    """The methods of a class that Python calls without any code naming them: ``__len__``."""
    return {
        name
        for base in kind.__mro__
        if not is_library(base.__module__)
        for name, value in vars(base).items()
        if name[:2] == name[-2:] == "__" and isinstance(value, types.FunctionType)
    }


def _is_own(holder: Any, name: str) -> bool:
    """Whether a module, or a class that is no library's, holds something under a name."""
    if isinstance(holder, types.ModuleType):
        return name in vars(holder)
    found = next((base for base in holder.__mro__ if name in vars(base)), None)
    return found is not None and not is_library(found.__module__)


def _same(now: list[Any], before: list[Any]) -> bool:
    return all(map(operator.is_, now, before)) or all(map(same_value, now, before))


def _tables(owner: Any) -> Iterator[Mapping[str, Any]]:
    """The dictionaries that a name of an owner is looked up in, in order."""
    if type(owner) is dict:
        yield owner
        return
    own = None if isinstance(owner, type) else own_table(owner)
    if own is not None:
        yield own
    for base in owner.__mro__ if isinstance(owner, type) else type(owner).__mro__:
        yield base.__dict__


def _is_filled(cell: types.CellType) -> bool:
    try:
        _contents_of(cell)
    except ValueError:
        return False
    return True
