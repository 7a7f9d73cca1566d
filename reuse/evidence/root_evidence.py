"""Compares what the whole model's Python read with what the same objects hold at a call.

These reads also decide which blocks share. A fact is a place (a dictionary and a name, a slot, a
variable captured by a function) and the object found there; a snapshot records what the object
held. A model of a hundred modules has a thousand facts, so they are compared together
(`IdentityChecks`): by the native library, in some ten nanoseconds each, or else by loops in C over
columns of facts. Every call compares them all. To be notified of changes instead (``PyDict_Watch``)
needs Python 3.12, works for dictionaries and eight users per process only, and saves little.
"""

from __future__ import annotations

import inspect
import operator
import os
import types
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, repeat
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import nn

from ..freeze import is_constant, same_value
from ..kinds import ABSENT, cell_contents, is_library, is_of_library, own_table
from ..torch_names import MARKED_BY_DYNAMO
from .module_state import module_state
from .reads import AttributeRead, Reads, cell_reads, look_up, may_hold_state, operators_of

Check = Callable[[], bool]
CompareFacts = Callable[..., bool]
"""The native library's comparison, which takes one flat tuple of facts for each :data:`Kind`."""
Kind = Literal["entry", "absent", "values", "attribute", "own attribute", "class"]


class IdentityChecks:
    """Collects checks, and makes one function of them.

    Example:
        >>> checks = IdentityChecks()
        >>> checks.entry(vars(module), "training", True)
        >>> unchanged = checks.function()
        >>> unchanged()
        True
    """

    def __init__(self) -> None:
        # For each kind a flat list: owner, name and expected object of the first fact, of the
        # second, and so on, as the native library takes them.
        self._facts: dict[Kind, list[Any]] = {kind: [] for kind in get_args(Kind)}
        self._others: list[Check] = []

    def entry(self, table: Mapping[Any, Any], name: str, value: Any) -> None:
        """Checks that a table holds this object under a name."""
        self._facts["entry"] += (table, name, value)

    def absent(self, table: Mapping[Any, Any], name: str) -> None:
        """Checks that a table has no such name."""
        self._facts["absent"] += (table, name, None)

    def attribute(self, owner: Any, name: str, value: Any) -> None:
        """Checks that an attribute, looked up as usual, is this object."""
        self._facts["attribute"] += (owner, name, value)

    def kind(self, owner: Any, kind: type) -> None:
        """Checks that an object is of exactly this class."""
        self._facts["class"] += (owner, None, kind)

    def bases(self, owner: type) -> None:
        """Checks that a class looks names up in the same classes, in the same order."""
        self.attribute(owner, "__mro__", owner.__mro__)

    def held_in(self, owner: Any, kind: type, table: dict[str, Any]) -> None:
        """Checks that an object is of exactly this class, with this dictionary of attributes."""
        self.kind(owner, kind)
        self._facts["own attribute"] += (owner, "__dict__", table)

    def values(self, table: dict[Any, Any]) -> None:
        """Checks that a dictionary holds what it holds now, in this order."""
        fact = (table, None, tuple(_values_of(table)))
        if isinstance(table, OrderedDict) and table:
            # It keeps an order of its own, which Python's C API does not show.
            self._others.append(partial(_holds_values, table, fact[2]))
        else:
            self._facts["values"] += fact

    def holds(self, check: Check) -> None:
        """Adds another check."""
        self._others.append(check)

    def function(self, native: CompareFacts | None = None) -> Check:
        """Returns a function that says whether all checks hold; one that raises does not hold."""
        compare = _in_python(self._facts)
        if native is not None:
            compare = partial(native, *map(tuple, self._facts.values()))
        return partial(_all_hold, (compare, *self._others))

    def copy(self) -> IdentityChecks:
        """Returns the same checks, to which others can be added."""
        made = IdentityChecks()
        made._facts = {kind: list(facts) for kind, facts in self._facts.items()}
        made._others = list(self._others)
        return made


def _in_python(facts: Mapping[Kind, Sequence[Any]]) -> Check:
    """Returns a function that compares facts as the native library does."""
    # Loops in C over columns of facts: a function in Python for each would take three to five times
    # as long, and with the eager backend, which builds no library, every call comes here.
    checks: list[Check] = []

    def add(
        rows: Iterable[tuple[Any, Any, Any]], look: Callable[..., Any], *more: Iterable[Any]
    ) -> None:
        columns = list(zip(*rows, strict=True))
        if columns:
            owners, names, expected = columns
            checks.append(lambda: all(map(operator.is_, map(look, owners, names, *more), expected)))

    absent = ((table, name, ABSENT) for table, name, _ in _rows(facts["absent"]))
    entries = [*_rows(facts["entry"]), *absent]
    # By dict's own method: a user's subclass may override it.
    add((row for row in entries if isinstance(row[0], dict)), dict.get, repeat(ABSENT))
    add((row for row in entries if not isinstance(row[0], dict)), _entry_of)
    add(_rows(facts["attribute"]), getattr)
    add(_rows(facts["own attribute"]), object.__getattribute__)
    owners, classes = facts["class"][::3], facts["class"][2::3]
    checks.append(lambda: all(map(operator.is_, map(type, owners), classes)))
    tables, held = facts["values"][::3], facts["values"][2::3]
    lengths, values = [*map(len, held)], [*chain.from_iterable(held)]
    checks.append(lambda: all(map(operator.eq, map(dict.__len__, tables), lengths)))
    checks.append(
        lambda: all(map(operator.is_, chain.from_iterable(map(dict.values, tables)), values))
    )
    return partial(_all_hold, checks)


def _entry_of(table: Mapping[Any, Any], name: Any) -> Any:
    # By dict's own method: a user's subclass may override it.
    return dict.get(table, name, ABSENT) if isinstance(table, dict) else table.get(name, ABSENT)


def _rows(flat: Sequence[Any]) -> list[tuple[Any, Any, Any]]:
    return list(zip(flat[::3], flat[1::3], flat[2::3], strict=True))


def _all_hold(checks: Sequence[Check]) -> bool:
    try:
        return all(check() for check in checks)
    # A place that can no longer be read has changed.
    except Exception:
        return False


def _holds_values(table: Any, values: Sequence[Any]) -> bool:
    found = _values_of(table)
    return len(found) == len(values) and all(map(operator.is_, found, values))


def _values_of(table: Any) -> list[Any]:
    is_ordered = type(table) is OrderedDict  # dict's own methods do not know its order
    return list(table.values() if is_ordered else dict.values(table))


# Parts of a function or class that can be replaced in place, and are in no dictionary of it.
_RUNNING_PARTS = ("__code__", "__defaults__", "__kwdefaults__")
_FUNCTION_PARTS = (*_RUNNING_PARTS, "__doc__", "__module__", "__name__", "__qualname__")
_CLASS_PARTS = ("__name__", "__qualname__")
_WITH_METHODS = (torch.Tensor, nn.Module)

# Names that pickling, a read of annotations or the first torch.compile adds to a class.
_ADDED_NAMES = ("__slotnames__", "__annotations__", "__annotations_cache__", MARKED_BY_DYNAMO)


class _Fact(NamedTuple):
    """Holds what ``look`` found under a name of an owner; ABSENT where there was nothing."""

    look: Callable[[Any, Any], Any]
    owner: Any
    name: Any
    value: Any

    def now(self) -> Any:
        """Returns what is there now."""
        return self.look(self.owner, self.name)

    def holds(self) -> bool:
        """Whether the place holds the same as before, or something equal."""
        return same_value(self.now(), self.value)


class RootEvidence:
    """Holds what a run of the model read, inside and outside, and says whether it is still so.

    The facts are dictionary entries (of modules, classes and objects), slots, variables captured by
    functions, and parts of functions and classes.

    Args:
        reads: of the whole run.
        modules: ``id`` of the modules whose class, mode, children and hooks the guard compares.
        placed: ``id`` of each tensor whose place the guard looks up itself.
    """

    def __init__(self, reads: Reads, modules: Collection[int], placed: Collection[int]) -> None:
        self.contents = reads.contents  # what the objects found there held
        self._facts: dict[Any, _Fact] = {}
        self._objects: dict[int, tuple[Any, type, Any]] = {}
        for (number, name), read in reads.attributes.items():
            if number in modules and read.table is not module_state(read.module):
                self._add_fact(_entry_of, module_state(read.module), name)  # an entry would hide it
            if number in modules and id(read.value) not in placed:
                self._add_attribute(name, read)
        for owner, name in reads.places():
            self._add(owner, name)
        for cell, *_ in cell_reads(reads):
            self._add_cell(cell)
        names = reads.names()
        self._add_holders(names, reads.globals)
        self._add_methods(names)
        self._add_functions(reads, names)
        self._add_environment(reads.environment())
        found = [r.value for r in reads.attributes.values() if isinstance(r.value, torch.Tensor)]
        found += self.contents.tensors()
        # The other tensors that code reached: it may ask for their shapes.
        self.tensors = [*{id(t): t for t in found if id(t) not in placed}.values()]
        for tensor in self.tensors:
            if not names.isdisjoint(vars(tensor)):
                self.contents.look_into(vars(tensor))

    def _add_attribute(self, name: str, read: AttributeRead) -> None:
        in_own_table = read.table is module_state(read.module)
        if read.value is ABSENT:
            if name != "forward":  # the guard checks that no module has a forward of its own
                self._add_fact(_entry_of, read.table, name)
        elif in_own_table or not isinstance(read.value, nn.Module):
            self._add_fact(_entry_of, read.table, name, read.value)

    def _add_fact(
        self, look: Callable[[Any, Any], Any], owner: Any, name: Any = None, value: Any = ABSENT
    ) -> None:
        """Adds a fact: the value that the run read there, or else the value there now."""
        value = look(owner, name) if value is ABSENT else value
        self._facts.setdefault((look, id(owner), name), _Fact(look, owner, name, value))

    def _add_part(self, owner: Any, name: str) -> None:
        self._add_fact(_part_of, owner, name)
        self.contents.look_into(_part_of(owner, name))

    def _add_cell(self, cell: types.CellType) -> None:
        if cell_contents(cell) is not ABSENT:
            self._add_part(cell, "cell_contents")

    def _add(self, owner: Any, name: str) -> None:
        kind = owner if isinstance(owner, type) else type(owner)
        # A further base could hide the name.
        self._add_fact(_bases_of, kind)
        if not isinstance(owner, (dict, type, types.ModuleType)):
            # A new class or ``__dict__`` of an object changes no entry of a dictionary.
            self._objects[id(owner)] = (owner, type(owner), own_table(owner))
        for table in _tables(owner):
            value = table.get(name, ABSENT)
            if isinstance(value, types.MemberDescriptorType) and not isinstance(owner, type):
                self._add_part(owner, name)
                return
            self._add_fact(_entry_of, table, name)
            if value is not ABSENT:
                of_library = is_of_library(owner)
                look = self.contents.look_into_library if of_library else self.contents.look_into
                look(value)
                return

    def _add_holders(self, names: set[str], known: Collection[tuple[int, str]]) -> None:
        """Adds attributes of the classes and modules that were met, by the names that code uses."""
        done: set[int] = set()
        todo = list(self.contents.holders.values())
        while todo:
            holder = todo.pop()
            if id(holder) in done:
                continue
            done.add(id(holder))
            if not may_hold_state(holder):
                continue
            if isinstance(holder, type):
                todo.append(type(holder))
            used = id(holder) in self.contents.classes
            for name in _own_names(holder, names | operators_of(holder) if used else names):
                if (id(holder), name) not in known:
                    self._add(holder, name)
            # What was looked into meanwhile may have led to more.
            todo += [h for key, h in self.contents.holders.items() if key not in done]

    def _add_methods(self, names: Collection[str]) -> None:
        """Adds the methods of tensors and modules, whose look-ups are not noted."""
        # Methods of tensors are in C: one in Python that hides one is a new name in the class.
        for kind in _WITH_METHODS:
            self._add_fact(_size_of, vars(kind))
            for name in vars(kind).keys() & names:
                if callable(vars(kind)[name]):
                    self._add_fact(_entry_of, vars(kind), name)

    def _add_functions(self, reads: Reads, names: Collection[str]) -> None:
        """Adds the parts of functions and classes that can be replaced in place."""
        # If code ran, every function with this code counts: of blocks that share, only one ran. Of
        # other functions, code can read only the parts that it names.
        ran = {code for code, _ in reads.functions}
        values = (look_up(owner, name) for owner, name in reads.places())
        if any(v is inspect or getattr(v, "__module__", "") == "inspect" for v in values):
            names = {*names, "__closure__", *_FUNCTION_PARTS}
        named = [name for name in _FUNCTION_PARTS if name in names]
        done: set[int] = set()
        while todo := [f for i, f in self.contents.functions.items() if i not in done]:
            for function in todo:
                done.add(id(function))
                own = () if is_library(function.__module__) else named
                has_run = function.__code__ in ran
                for name in {*own, *(_RUNNING_PARTS if has_run else ())}:
                    self._add_part(function, name)
                if has_run or ("__closure__" in names and not is_library(function.__module__)):
                    for cell in function.__closure__ or ():
                        self._add_cell(cell)
        for kind in list(self.contents.holders.values()):
            if isinstance(kind, type) and not is_library(kind.__module__):
                for name in _CLASS_PARTS:
                    if name in names:
                        self._add_part(kind, name)

    def _add_environment(self, texts: Collection[str]) -> None:
        table = vars(os.environ).get("_data")
        if not isinstance(table, dict):
            return
        for text in texts:
            name = os.environ.encodekey(text)  # type: ignore[attr-defined]
            # A string in capitals that names no variable yet may name one later.
            if name in table or text.isupper():
                self._add_fact(_entry_of, table, name)

    def release(self) -> None:
        """Drops tensors that were replaced where they were found: those facts never hold again."""
        for key, fact in list(self._facts.items()):
            if isinstance(fact.value, torch.Tensor) and fact.now() is not fact.value:
                self.tensors = [t for t in self.tensors if t is not fact.value]
                # An object that nothing else is equal to: this program never fits again.
                self._facts[key] = _Fact(*fact[:3], object())

    # ---- comparing ---------------------------------------------------------------------------

    def add_identity_checks(self, checks: IdentityChecks) -> None:
        """Adds checks that each place still holds the object that it holds now."""
        for fact in self._facts.values():
            look, owner, name, before = fact
            now = fact.now()
            if look is _bases_of:
                checks.bases(owner)
            elif look is _size_of:
                checks.holds(fact.holds)
            else:
                if look is _part_of:
                    checks.attribute(owner, name, now)
                elif now is ABSENT:
                    checks.absent(owner, name)
                else:
                    checks.entry(owner, name, now)
                if now is not before and not is_constant(now):  # it replaced an equal value
                    checks.holds(partial(same_value, now, before))
        for owner, kind, own in self._objects.values():
            if own is None:
                checks.kind(owner, kind)
            else:
                checks.held_in(owner, kind, own)

    def still_holds(self) -> bool:
        """Whether each place holds the same as in the run, or something equal."""
        return all(fact.holds() for fact in self._facts.values()) and all(
            type(owner) is kind and own_table(owner) is table
            for owner, kind, table in self._objects.values()
        )

    def changed(self) -> Iterator[tuple[dict[str, Any], str, Any, Any]]:
        """Yields the dictionary, the name, and the values before and now of each that changed."""
        for fact in self._facts.values():
            if fact.look is _entry_of and isinstance(fact.owner, dict) and not fact.holds():
                yield fact.owner, fact.name, fact.value, fact.now()


def _part_of(owner: Any, name: str) -> Any:
    """Returns what a function, class, cell or slot holds, without running code of the user's."""
    if isinstance(owner, types.CellType):
        return cell_contents(owner)
    if isinstance(owner, (types.FunctionType, type)):
        return getattr(owner, name, ABSENT)
    return look_up(owner, name)


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
    """Yields the dictionaries that a name of an owner is looked up in, in order."""
    if type(owner) is dict:
        yield owner
        return
    own = None if isinstance(owner, type) else own_table(owner)
    if own is not None:
        yield own
    for base in owner.__mro__ if isinstance(owner, type) else type(owner).__mro__:
        yield base.__dict__


def _bases_of(kind: type, _: None) -> tuple[type, ...]:
    return kind.__mro__


def _size_of(table: Mapping[str, Any], _: None) -> int:
    """Returns how many names a class has, without those that Python and Dynamo add."""
    return len(table) - sum(name in table for name in _ADDED_NAMES)
