"""Many checks by identity as one function: does everything hold what it held?

A model of a hundred modules needs a thousand of them at each call, so what one costs counts. The
native library compares them through CPython's C interface. Without it the checks become the source
of one Python function: the owners that are checked alike (every ``Linear``'s table of parameters,
say) are the rows of one loop, so that it is as long as there are different kinds of owners.

Everything is looked at each time, instead of being told of changes (``PyDict_Watch``): that exists
from Python 3.12 on only, for eight users per process and for dictionaries alone, and saves little.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import CellType, MappingProxyType
from typing import Any, Literal, get_args

from ..objects import ABSENT
from .snapshot import is_constant, same_value

Check = Callable[[], bool]
Hold = Callable[..., bool]
"""``hold(*facts)``: as the native library has it; one flat tuple for each :data:`Kind`."""
Kind = Literal["entry", "absent", "values", "attribute", "own attribute", "class"]

# Read by their own methods; a class derived from them may have others, and is read by dict's.
_PLAIN_TABLES = (dict, OrderedDict, MappingProxyType)


@dataclass
class _Row:
    """What is checked of one owner: its statements and tests, and the objects they expect.

    Attributes:
        facts: the same for the native library: kind, owner, name and expected object of each.
        is_native: whether these say all of it.
    """

    owner: Any
    statements: list[str] = field(default_factory=list)
    tests: list[str] = field(default_factory=list)
    expected: list[Any] = field(default_factory=list)
    facts: list[tuple[Kind, Any, Any, Any]] = field(default_factory=list)
    is_native: bool = True

    def copy(self) -> _Row:
        lists = (list(self.statements), list(self.tests), list(self.expected), list(self.facts))
        return _Row(self.owner, *lists, self.is_native)

    def expect(self, value: Any) -> str:
        self.expected.append(value)
        return f"e{len(self.expected) - 1}"


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
        self._rows: dict[int, _Row] = {}

    def entry(self, table: Any, name: str, value: Any) -> None:
        """A table holds this very object under a name."""
        row = self._row(table)
        found = f"o[{name!r}]" if _is_plain(table) else f"get(o, {name!r}, missing)"
        row.tests.append(f"{found} is not {row.expect(value)}")
        row.facts.append(("entry", table, name, value))

    def absent(self, table: Any, name: str) -> None:
        """A table has no such name."""
        row = self._row(table)
        row.tests.append(f"{name!r} in o" if _is_plain(table) else f"has(o, {name!r})")
        row.facts.append(("absent", table, name, None))

    def attribute(self, owner: Any, name: str, value: Any) -> None:
        """An attribute, looked up as usual, is this very object."""
        row = self._row(owner)
        row.tests.append(f"o.{name} is not {row.expect(value)}")
        row.facts.append(("attribute", owner, name, value))

    def captured(self, cell: CellType, value: Any) -> None:
        """A captured variable holds this very object."""
        self.attribute(cell, "cell_contents", value)

    def kind(self, owner: Any, kind: type) -> None:
        """An object is of this very class."""
        row = self._row(owner)
        row.tests.append(f"type(o) is not {row.expect(kind)}")
        row.facts.append(("class", owner, None, kind))

    def bases(self, owner: type) -> None:
        """A class has the same classes to look names up in, in the same order."""
        self.attribute(owner, "__mro__", owner.__mro__)

    def held_in(self, owner: Any, kind: type, table: dict[str, Any]) -> None:
        """An object is of this very class, and has its attributes in this very dictionary."""
        row = self._row(table)
        it, its_class = row.expect(owner), row.expect(kind)
        usual: Any = object.__getattribute__
        plain = type(owner).__getattribute__ is usual
        found = f"{it}.__dict__" if plain else f"got({it}, '__dict__')"
        row.tests += [f"type({it}) is not {its_class}", f"{found} is not o"]
        row.facts.append(("class", owner, None, kind))
        row.facts.append(("own attribute", owner, "__dict__", table))

    def values(self, table: Mapping[Any, Any]) -> None:
        """A table holds what it holds now, in this order."""
        values, row = _values_of(table), self._row(table)
        # The order of an ordered dictionary is its own, and no function of Python.h tells it.
        has_own_order = isinstance(table, OrderedDict) and bool(values)
        row.is_native &= isinstance(table, dict) and not has_own_order
        row.facts.append(("values", table, None, tuple(values)))
        if not values:
            row.tests.append("o" if _is_plain(table) else "length(o)")
            return
        found = [f"v{i}" for i in range(len(values))]
        read = "o.values()" if _is_plain(table) else "values(o)"
        row.statements.append(f"{', '.join(found)}, = {read}")
        row.tests += [
            f"{name} is not {row.expect(value)}" for name, value in zip(found, values, strict=True)
        ]

    def names(self, table: Mapping[Any, Any]) -> None:
        """A table has the names that it has now, in this order."""
        row = self._row(table)
        row.tests.append(f"[*o] != {row.expect([*table])}")
        row.is_native = False

    def holds(self, check: Check) -> None:
        """Another check holds."""
        row = self._row(check)
        row.tests.append("not o()")
        row.is_native = False

    def still_like(self, value: Any, before: Any) -> None:
        """A value that took another's place is as good still, whatever was done to it since."""
        if value is not before and not is_constant(value):
            self.holds(partial(same_value, value, before))

    def function(self, hold: Hold | None = None) -> Check:
        """Returns what tells whether all checks hold.

        Args:
            hold: the native comparison, if it is at hand.
        """
        rows = list(self._rows.values())
        if hold is None:
            return _generated(rows)
        compare = partial(hold, *_columns([row for row in rows if row.is_native]))
        others = [row for row in rows if not row.is_native]
        if not others:
            return compare
        rest = _generated(others)
        return lambda: compare() and rest()

    def copy(self) -> IdentityChecks:
        """Returns the same checks, to which others can be added."""
        made = IdentityChecks()
        made._rows = {key: row.copy() for key, row in self._rows.items()}
        return made

    def _row(self, owner: Any) -> _Row:
        return self._rows.setdefault(id(owner), _Row(owner))


def _columns(rows: Sequence[_Row]) -> list[tuple[Any, ...]]:
    """Returns the facts of each kind, one after another."""
    found: dict[Kind, list[Any]] = {kind: [] for kind in get_args(Kind)}
    for row in rows:
        for kind, *fact in row.facts:
            found[kind] += fact
    return [tuple(facts) for facts in found.values()]


def _generated(rows: Sequence[_Row]) -> Check:
    """Makes a function that looks at everything."""
    kinds: dict[tuple[str, ...], list[tuple[Any, ...]]] = {}
    for row in rows:
        body = (*row.statements, f"if {' or '.join(row.tests)}: return False")
        kinds.setdefault(body, []).append((row.owner, *row.expected))
    empty = [row[0] for row in kinds.pop(_EMPTY, ())]
    lines = ["def unchanged():", " try:", "  if any(empty): return False"]
    for number, (body, of_kind) in enumerate(kinds.items()):
        names = ["o", *(f"e{i}" for i in range(len(of_kind[0]) - 1)), ""]
        lines.append(f"  for {', '.join(names)} in rows{number}:")
        lines += [f"   {line}" for line in body]
    lines += [" except Exception: return False", " return True"]
    scope: dict[str, Any] = {f"rows{i}": of_kind for i, of_kind in enumerate(kinds.values())}
    scope.update(empty=empty, missing=ABSENT)
    scope.update(got=object.__getattribute__)
    scope.update(get=dict.get, has=dict.__contains__, values=dict.values, length=dict.__len__)
    exec(compile("\n".join(lines), "<lazyinline guard>", "exec"), scope)
    check: Check = scope.pop("unchanged")
    return check


_EMPTY = ("if o: return False",)


def _is_plain(table: Any) -> bool:
    return type(table) in _PLAIN_TABLES


def _values_of(table: Any) -> list[Any]:
    return list(table.values() if _is_plain(table) else dict.values(table))
