"""What the whole model's Python read, asked of the same objects later: is it still so?

The reads are those that tell blocks apart. Here each is a place (a dictionary and a name, a slot, a
variable captured by a function) and the very object found there; what that held, a snapshot knows.
"""

from __future__ import annotations

import inspect
import operator
import os
import types
from collections.abc import Collection, Iterator, Mapping
from itertools import repeat
from typing import Any

import torch
from torch import nn

from ..errors import CaptureError
from ..kinds import getters_of, holds_unseen_items, is_opaque
from ..objects import ABSENT, cell_contents, is_library, own_table
from .identity_checks import IdentityChecks
from .module_state import WHOLE, module_state
from .reads import AttributeRead, Reads, look_up, may_hold_state
from .snapshot import Snapshot, same_value

# What can be replaced in a function or class while it stays who it is, and shows in no table of it.
_OF_RUNNING = ("__code__", "__defaults__", "__kwdefaults__")
_OF_FUNCTIONS = (*_OF_RUNNING, "__doc__", "__module__", "__name__", "__qualname__")
_OF_CLASSES = ("__name__", "__qualname__")
_WITH_METHODS = (torch.Tensor, nn.Module)

# Pickling an object, or asking for its annotations, leaves these in its class.
_NOTED_BY_PYTHON = ("__slotnames__", "__annotations__", "__annotations_cache__")


class RootEvidence:
    """What a run of the model read, inside and outside, and whether all of that is still so.

    All of it are dictionary entries (of modules, classes and objects), slots, variables captured by
    functions, and what functions and classes are made of.

    Args:
        reads: of the whole run.
        modules: ``id`` of those at whose class, mode, children and hooks the guard looks itself.
        placed: ``id`` of each tensor whose place the guard looks up itself.

    Attributes:
        tensors: the others that code was handed: it may have asked for a shape, or may next time.
    """

    def __init__(self, reads: Reads, modules: Collection[int], placed: Collection[int]) -> None:
        self._contents = reads.contents
        self._entries: dict[type, tuple[list[Any], list[str], list[Any]]] = {
            dict: ([], [], []),
            types.MappingProxyType: ([], [], []),
        }
        self._absent: tuple[list[Any], list[str]] = ([], [])
        self._whole: list[tuple[dict[str, Any], list[str]]] = []
        self._bases: dict[int, tuple[type, tuple[type, ...]]] = {}
        self._objects: dict[int, tuple[Any, type, Any]] = {}
        self._parts: list[tuple[Any, str, Any]] = []
        self._sizes: list[tuple[Any, int]] = []
        for (number, name), read in reads.attributes.items():
            if number in modules and id(read.value) not in placed:
                self._add_attribute(name, read)
        for owner, name in reads.places():
            self._add(owner, name)
        for cell in reads.cells():
            self._add_cell(cell)
        names = reads.names()
        self._add_getters(names)
        met = len(self._contents.opaque)
        self._add_holders(names, reads.globals)
        self._add_methods(names)
        self._add_functions(reads, names)
        self._add_getters(names, first=met)  # of what classes, modules and functions led to
        self._add_environment(reads.environment())
        found = [r.value for r in reads.attributes.values() if isinstance(r.value, torch.Tensor)]
        found += self._contents.tensors()
        self.tensors = [*{id(t): t for t in found if id(t) not in placed}.values()]
        for tensor in self.tensors:
            if not names.isdisjoint(vars(tensor)):
                self._contents.look_into(vars(tensor))

    @property
    def iterators(self) -> list[Any]:
        """Those that the model's Python was handed; each use moves them on."""
        return self._contents.iterators

    def held_iterators(self) -> list[Any]:
        """Returns those that are still where they were read."""
        now = Snapshot()
        for kind, (tables, names, _) in self._entries.items():
            for value in map(kind.get, tables, names):  # type: ignore[attr-defined]
                now.look_into(value)
        for owner, name, _ in self._parts:
            now.look_into(_part_of(owner, name))
        return now.iterators

    def look_into(self, value: Any) -> None:
        """Notes what a further object holds."""
        self._contents.look_into(value)

    def holds(self, value: Any) -> bool:
        """Whether an object outside the modules' own tables leads to this one: a list, a global."""
        return self._contents.has_met(value)

    def _add_attribute(self, name: str, read: AttributeRead) -> None:
        in_own_table = read.table is module_state(read.module)
        if name == WHOLE:
            self._whole.append((read.table, list(read.table)))
        elif read.value is ABSENT:
            if name != "forward":  # nobody has one of its own: the guard sees to that
                self._add_absent(read.table, name)
        elif in_own_table or not isinstance(read.value, nn.Module):
            self._add_entry(read.table, name, read.value)

    def _add_entry(self, table: Mapping[Any, Any], name: Any, value: Any) -> None:
        kind = dict if isinstance(table, dict) else types.MappingProxyType
        for column, part in zip(self._entries[kind], (table, name, value), strict=True):
            column.append(part)

    def _add_absent(self, table: Mapping[Any, Any], name: Any) -> None:
        self._absent[0].append(table)
        self._absent[1].append(name)

    def _add_part(self, owner: Any, name: str) -> None:
        value = _part_of(owner, name)
        self._parts.append((owner, name, value))
        self._contents.look_into(value)

    def _add_cell(self, cell: types.CellType) -> None:
        if cell_contents(cell) is not ABSENT:
            self._add_part(cell, "cell_contents")

    def _add(self, owner: Any, name: str) -> None:
        kind = owner if isinstance(owner, type) else type(owner)
        self._bases[id(kind)] = (kind, kind.__mro__)
        if not isinstance(owner, (dict, type, types.ModuleType)):
            self._objects[id(owner)] = (owner, type(owner), own_table(owner))
        for table in _tables(owner):
            if name in table:
                break
            self._add_absent(table, name)
        else:
            return
        value = table[name]
        if isinstance(value, types.MemberDescriptorType) and not isinstance(owner, type):
            self._add_part(owner, name)
        else:
            self._add_entry(table, name, value)
            self._contents.look_into(value)

    def _add_holders(self, names: set[str], known: Collection[tuple[int, str]]) -> None:
        """Adds what classes and modules met on the way hold under the names that code speaks of."""
        done: set[int] = set()
        todo = list(self._contents.holders.values())
        while todo:
            holder = todo.pop()
            if id(holder) in done:
                continue
            done.add(id(holder))
            if not may_hold_state(holder):
                continue
            if isinstance(holder, type):
                todo.append(type(holder))
            used = id(holder) in self._contents.classes
            for name in _own_names(holder, names | _operators(holder) if used else names):
                if (id(holder), name) not in known:
                    self._add(holder, name)
            todo += [h for key, h in self._contents.holders.items() if key not in done]

    def _add_getters(self, names: Collection[str], first: int = 0) -> None:
        """Adds what objects written in C, from the first-th on, say under the names in code."""
        for value in list(self._contents.opaque.values())[first:]:
            for name in getters_of(type(value), names):
                self._add_part(value, name)

    def refuse_unseen(self) -> None:
        """Raises CaptureError for objects whose state operators read, and nothing compares."""
        for value in self._contents.opaque.values():
            if holds_unseen_items(value):
                raise CaptureError(
                    f"The model's forward reads a {type(value).__qualname__}, which shows nothing "
                    "of what it holds, so that no call could tell whether that changed. Keep it "
                    "in a list, a dictionary, an array or a buffer."
                )

    def _add_methods(self, names: Collection[str]) -> None:
        """Adds the methods of tensors and modules, which are found on them without any look-up.

        Those of tensors are in C: one in Python that hides it is one more in the class.
        """
        for kind in _WITH_METHODS:
            self._sizes.append((vars(kind), _num_own(vars(kind))))
            for name in vars(kind).keys() & names:
                if callable(vars(kind)[name]):
                    self._add_entry(vars(kind), name, vars(kind)[name])

    def _same_sizes(self) -> bool:
        return all(_num_own(table) == size for table, size in self._sizes)

    def _add_functions(self, reads: Reads, names: Collection[str]) -> None:
        """Adds what can be replaced in functions and classes, while they stay who they are.

        Of functions that ran it was used; of others, what code speaks of.
        """
        ran = {code for code, _ in reads.functions}
        names = {*names, *(("__closure__", *_OF_FUNCTIONS) if _uses_inspect(reads) else ())}
        spoken = [name for name in _OF_FUNCTIONS if name in names]
        done: set[int] = set()
        while todo := [f for i, f in self._contents.functions.items() if i not in done]:
            for function in todo:
                done.add(id(function))
                own = () if is_library(function.__module__) else spoken
                for name in {*own, *(_OF_RUNNING if function.__code__ in ran else ())}:
                    self._add_part(function, name)
                if "__closure__" in names and not is_library(function.__module__):
                    for cell in function.__closure__ or ():
                        self._add_cell(cell)
        for kind in list(self._contents.holders.values()):
            if isinstance(kind, type) and not is_library(kind.__module__):
                for name in _OF_CLASSES:
                    if name in names:
                        self._add_part(kind, name)

    def _add_environment(self, texts: Collection[str]) -> None:
        table = vars(os.environ).get("_data")
        if not isinstance(table, dict):
            return
        for text in texts:
            name = os.environ.encodekey(text)  # type: ignore[attr-defined]
            if name in table:
                self._add_entry(table, name, table[name])
            elif text.isupper():
                self._add_absent(table, name)

    def let_go(self) -> None:
        """Holds no tensor that is not where it was any more; what held it is another for good."""
        for kind, (tables, names, values) in self._entries.items():
            for i, value in enumerate(values):
                if isinstance(value, torch.Tensor):
                    now = kind.get(tables[i], names[i])  # type: ignore[attr-defined]
                    if now is not value:
                        self.tensors = [t for t in self.tensors if t is not value]
                        values[i] = object()

    # ---- is it still so? ---------------------------------------------------------------------

    def add_identity_checks(self, checks: IdentityChecks) -> None:
        """Adds that each of them is the very object that it is now, if that is as good."""
        for kind, columns in self._entries.items():
            for table, name, before in zip(*columns, strict=True):
                now = kind.get(table, name, ABSENT)  # type: ignore[attr-defined]
                if now is ABSENT:
                    checks.absent(table, name)
                else:
                    checks.entry(table, name, now)
                checks.still_like(now, before)
        for table, name in zip(*self._absent, strict=True):
            checks.absent(table, name)
        for table, _ in self._whole:
            checks.names(table)
        for kind, _ in self._bases.values():
            checks.bases(kind)
        for owner, kind, own in self._objects.values():
            if own is None:
                checks.kind(owner, kind)
            else:
                checks.held_in(owner, kind, own)
        checks.holds(self._same_sizes)
        for owner, name, before in self._parts:
            now = _part_of(owner, name)
            checks.attribute(owner, name, now)
            checks.still_like(now, before)

    def still_holds(self) -> bool:
        """Whether all of them are what they were, or equal to it."""
        return (
            self._same_sizes()
            and all(self._same_entries(kind) for kind in self._entries)
            and not any(map(operator.contains, *self._absent))
            and all([*table] == names for table, names in self._whole)
            and all(kind.__mro__ is order for kind, order in self._bases.values())
            and all(
                type(owner) is kind and own_table(owner) is table
                for owner, kind, table in self._objects.values()
            )
            and all(same_value(_part_of(o, name), value) for o, name, value in self._parts)
        )

    def same_contents(self) -> bool:
        """Whether the objects among them hold what they held."""
        return self._contents.same()

    def changed(self) -> Iterator[tuple[dict[str, Any], str, Any, Any]]:
        """Yields the dictionary, the name, and the values before and now of each that changed."""
        for table, name, before in zip(*self._entries[dict], strict=True):
            if not same_value(now := table.get(name, ABSENT), before):
                yield table, name, before, now

    def _same_entries(self, kind: Any) -> bool:
        tables, names, before = self._entries[kind]
        now = list(map(kind.get, tables, names, repeat(ABSENT)))
        return all(map(operator.is_, now, before)) or all(map(same_value, now, before))


def _part_of(owner: Any, name: str) -> Any:
    """Returns what a function, class, cell or slot holds, past any code of the user's."""
    if isinstance(owner, types.CellType):
        return cell_contents(owner)
    if isinstance(owner, (types.FunctionType, type)) or is_opaque(owner):
        return getattr(owner, name, ABSENT)
    return look_up(owner, name)


def _uses_inspect(reads: Reads) -> bool:
    values = (look_up(owner, name) for owner, name in reads.places())
    return any(v is inspect or getattr(v, "__module__", "") == "inspect" for v in values)


def _operators(kind: type) -> set[str]:
    """The methods of a class that Python calls without any code naming them: ``__len__``."""
    return {
        name
        for base in kind.__mro__
        if not is_library(base.__module__)
        for name, value in vars(base).items()
        if name[:2] == name[-2:] == "__" and isinstance(value, types.FunctionType)
    }


def _own_names(holder: Any, names: set[str]) -> Iterator[str]:
    """Yields the names under which a module, or a class that is no library's, holds something."""
    if isinstance(holder, types.ModuleType):
        yield from names.intersection(vars(holder))
        return
    seen: set[str] = set()
    for base in holder.__mro__:
        found = names.intersection(vars(base)) - seen
        seen |= found
        if not is_library(base.__module__):
            yield from found


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


def _num_own(table: Mapping[str, Any]) -> int:
    """Returns how many names a class has, but for those that Python notes there by itself."""
    return len(table) - sum(name in table for name in _NOTED_BY_PYTHON)
