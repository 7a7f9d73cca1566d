"""Many checks by identity as one function: does everything hold what it held?

A model of a hundred modules needs a thousand of them at each call, so what one costs counts. The
native library compares them through CPython's C interface, in some ten nanoseconds each; loops over
columns of them do where it is not at hand.

Everything is looked at each time, and no changes are watched (``PyDict_Watch``): that exists
from Python 3.12 on only, for eight users per process and for dictionaries alone, and saves little.
"""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain, repeat
from types import CellType
from typing import Any, Literal, TypeAlias, get_args

from ..kinds import ABSENT
from .snapshot import is_constant, same_value

Check = Callable[[], bool]
CompareFacts = Callable[..., bool]
"""``compare(*facts)``: as the native library has it; one flat tuple for each :data:`Kind`."""
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
        # Of each kind the owner, name and expected object of every fact, one after another: the
        # native library is handed these as they are.
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

    def captured(self, cell: CellType, value: Any) -> None:
        """Checks that a captured variable holds this object."""
        self.attribute(cell, "cell_contents", value)

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
            # Its order is its own, and no function of Python.h tells it.
            self._others.append(partial(_holds_values, table, fact[2]))
        else:
            self._facts["values"] += fact

    def names(self, table: Mapping[Any, Any]) -> None:
        """Checks that a table has the names that it has now, in this order."""
        names = [*table]
        self._others.append(lambda: [*table] == names)

    def holds(self, check: Check) -> None:
        """Adds another check."""
        self._others.append(check)

    def still_like(self, value: Any, before: Any) -> None:
        """Checks that a value which took another's place still equals it."""
        if value is not before and not is_constant(value):
            self.holds(partial(same_value, value, before))

    def function(self, native: CompareFacts | None = None) -> Check:
        """Returns what tells whether all checks hold; what raises an error does not.

        Args:
            native: the comparison of the native library, if it is at hand.
        """
        compare = _in_python(self._facts)
        if native is not None:
            compare = partial(native, *map(tuple, self._facts.values()))
        others = tuple(self._others)
        return partial(_all_hold, (compare, *others)) if others else compare

    def copy(self) -> IdentityChecks:
        """Returns the same checks, to which others can be added."""
        made = IdentityChecks()
        made._facts = {kind: list(facts) for kind, facts in self._facts.items()}
        made._others = list(self._others)
        return made


def _in_python(facts: Mapping[Kind, Sequence[Any]]) -> Check:
    """Returns what compares facts as the native library does."""
    # Loops in C over columns of facts: a function in Python for each would take five times as long.
    checks: list[Check] = []

    def add(rows: Iterable[_Row], look: Callable[..., Any], *more: Iterable[Any]) -> None:
        columns = list(zip(*rows, strict=True))
        if columns:
            owners, names, expected = columns
            checks.append(lambda: all(map(operator.is_, map(look, owners, names, *more), expected)))

    absent = ((table, name, ABSENT) for table, name, _ in _rows(facts["absent"]))
    entries = [*_rows(facts["entry"]), *absent]
    # Past the methods of a class of the user's, which may say anything.
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


_Row: TypeAlias = tuple[Any, Any, Any]


def _rows(flat: Sequence[Any]) -> list[_Row]:
    return list(zip(flat[::3], flat[1::3], flat[2::3], strict=True))


def _entry_of(table: Any, name: Any) -> Any:
    return table.get(name, ABSENT)


def _all_hold(checks: Sequence[Check]) -> bool:
    try:
        return all(check() for check in checks)
    # What cannot be looked at any more is no longer what it was.
    except Exception:
        return False


def _holds_values(table: Any, values: Sequence[Any]) -> bool:
    found = _values_of(table)
    return len(found) == len(values) and all(map(operator.is_, found, values))


def _values_of(table: Any) -> list[Any]:
    is_ordered = type(table) is OrderedDict  # dict's own methods do not know its order
    return list(table.values() if is_ordered else dict.values(table))
