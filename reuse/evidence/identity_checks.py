"""Many checks by identity as one function: does everything hold what it held?

A model of a hundred modules needs a thousand of them at each call, so what one costs counts. The
native library compares them through CPython's C interface, in some ten nanoseconds each; a plain
loop, ten times slower, does where it is not at hand.

Everything is looked at each time, instead of being told of changes (``PyDict_Watch``): that exists
from Python 3.12 on only, for eight users per process and for dictionaries alone, and saves little.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import CellType
from typing import Any, Literal, get_args

from ..objects import ABSENT
from .snapshot import is_constant, same_value

Check = Callable[[], bool]
Hold = Callable[..., bool]
"""``hold(*facts)``: as the native library has it; one flat tuple for each :data:`Kind`."""
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
        """A table holds this very object under a name."""
        self._facts["entry"] += (table, name, value)

    def absent(self, table: Mapping[Any, Any], name: str) -> None:
        """A table has no such name."""
        self._facts["absent"] += (table, name, None)

    def attribute(self, owner: Any, name: str, value: Any) -> None:
        """An attribute, looked up as usual, is this very object."""
        self._facts["attribute"] += (owner, name, value)

    def captured(self, cell: CellType, value: Any) -> None:
        """A captured variable holds this very object."""
        self.attribute(cell, "cell_contents", value)

    def kind(self, owner: Any, kind: type) -> None:
        """An object is of this very class."""
        self._facts["class"] += (owner, None, kind)

    def bases(self, owner: type) -> None:
        """A class has the same classes to look names up in, in the same order."""
        self.attribute(owner, "__mro__", owner.__mro__)

    def held_in(self, owner: Any, kind: type, table: dict[str, Any]) -> None:
        """An object is of this very class, and has its attributes in this very dictionary."""
        self.kind(owner, kind)
        self._facts["own attribute"] += (owner, "__dict__", table)

    def values(self, table: dict[Any, Any]) -> None:
        """A dictionary holds what it holds now, in this order."""
        fact = (table, None, tuple(_values_of(table)))
        if isinstance(table, OrderedDict) and table:
            # Its order is its own, and no function of Python.h tells it.
            self._others.append(partial(_holds_values, *fact))
        else:
            self._facts["values"] += fact

    def names(self, table: Mapping[Any, Any]) -> None:
        """A table has the names that it has now, in this order."""
        names = [*table]
        self._others.append(lambda: [*table] == names)

    def holds(self, check: Check) -> None:
        """Another check holds."""
        self._others.append(check)

    def still_like(self, value: Any, before: Any) -> None:
        """A value that took another's place is as good still, whatever was done to it since."""
        if value is not before and not is_constant(value):
            self.holds(partial(same_value, value, before))

    def function(self, hold: Hold | None = None) -> Check:
        """Returns what tells whether all checks hold; what raises an error does not.

        Args:
            hold: the native comparison, if it is at hand.
        """
        compare = partial(hold or hold_in_python, *map(tuple, self._facts.values()))
        others = tuple(self._others)
        return partial(_all_hold, compare, others) if others else compare

    def copy(self) -> IdentityChecks:
        """Returns the same checks, to which others can be added."""
        made = IdentityChecks()
        made._facts = {kind: list(facts) for kind, facts in self._facts.items()}
        made._others = list(self._others)
        return made


def hold_in_python(*facts: Sequence[Any]) -> bool:
    """Compares as the native library does."""
    try:
        return all(
            all(map(fact, flat[::3], flat[1::3], flat[2::3]))
            for fact, flat in zip(_FACTS.values(), facts, strict=True)
        )
    except Exception:
        return False


def _all_hold(compare: Check, others: Sequence[Check]) -> bool:
    if not compare():
        return False
    try:
        return all(check() for check in others)
    except Exception:
        return False


def _holds_entry(table: Any, name: Any, value: Any) -> bool:
    # Past the methods of a class of the user's, which may say anything.
    found = dict.get(table, name, ABSENT) if isinstance(table, dict) else table.get(name, ABSENT)
    return found is value


def _lacks_entry(table: Any, name: Any, _: None) -> bool:
    return not (dict.__contains__(table, name) if isinstance(table, dict) else name in table)


def _holds_values(table: Any, _: None, values: Sequence[Any]) -> bool:
    found = _values_of(table)
    return len(found) == len(values) and all(map(_is_same, found, values))


def _has_attribute(owner: Any, name: str, value: Any) -> bool:
    return getattr(owner, name) is value


def _has_own_attribute(owner: Any, name: str, value: Any) -> bool:
    return object.__getattribute__(owner, name) is value


def _is_of_class(owner: Any, _: None, kind: type) -> bool:
    return type(owner) is kind


def _is_same(found: Any, expected: Any) -> bool:
    return found is expected


def _values_of(table: Any) -> list[Any]:
    is_ordered = type(table) is OrderedDict  # dict's own methods do not know its order
    return list(table.values() if is_ordered else dict.values(table))


_FACTS: dict[Kind, Callable[[Any, Any, Any], bool]] = {
    "entry": _holds_entry,
    "absent": _lacks_entry,
    "values": _holds_values,
    "attribute": _has_attribute,
    "own attribute": _has_own_attribute,
    "class": _is_of_class,
}
