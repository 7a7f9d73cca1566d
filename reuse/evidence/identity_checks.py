"""Many checks by identity as one generated function: does everything hold what it held?

A model of a hundred modules needs a thousand of them at each call, so what one costs counts. The
owners that are checked alike (every ``Linear``'s table of parameters, say) are the rows of one loop
over local variables; the function is as long as there are different kinds of owners.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import CellType, MappingProxyType
from typing import Any

from ..objects import ABSENT
from .python_words import attributes_of, bases_of, class_of, lookup_of, version_of_table
from .snapshot import is_constant, same_value
from .watch import Check, SameWords, Watch, Where, Words

# Read by their own methods; a class derived from them may have others, and is read by dict's.
_PLAIN_TABLES = (dict, OrderedDict, MappingProxyType)


@dataclass
class _Row:
    """What is checked of one owner: its statements and tests, and the objects they expect.

    Attributes:
        words: addresses of what holds other words once any of this changed, where there are such.
        where: says where these are, if they move.
    """

    owner: Any
    statements: list[str] = field(default_factory=list)
    tests: list[str] = field(default_factory=list)
    expected: list[Any] = field(default_factory=list)
    words: tuple[int, ...] | None = ()
    where: Where | None = None

    def expect(self, value: Any, words: tuple[int, ...] | None) -> str:
        self.expected.append(value)
        self.depend(words)
        return f"e{len(self.expected) - 1}"

    def depend(self, words: tuple[int, ...] | None) -> None:
        self.words = None if words is None or self.words is None else (*self.words, *words)


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
        row.tests.append(f"{found} is not {row.expect(value, _words_in(table))}")

    def absent(self, table: Any, name: str) -> None:
        """A table has no such name."""
        row = self._row(table)
        row.depend(_words_in(table))
        row.tests.append(f"{name!r} in o" if _is_plain(table) else f"has(o, {name!r})")

    def attribute(self, owner: Any, name: str, value: Any) -> None:
        """An attribute, looked up as usual, is this very object."""
        row = self._row(owner)
        row.tests.append(f"o.{name} is not {row.expect(value, lookup_of(owner, name))}")
        if isinstance(owner, type):
            row.expected.append(owner.__mro__)  # kept, so that no other is where it is

    def captured(self, cell: CellType, value: Any) -> None:
        """A captured variable holds this very object."""
        self.attribute(cell, "cell_contents", value)

    def kind(self, owner: Any, kind: type) -> None:
        """An object is of this very class."""
        row, address = self._row(owner), class_of(owner, kind)
        words = None if address is None else (address,)
        row.tests.append(f"type(o) is not {row.expect(kind, words)}")

    def bases(self, owner: type) -> None:
        """A class has the same classes to look names up in, in the same order."""
        row, address, order = self._row(owner), bases_of(owner), owner.__mro__
        words = None if address is None else (address,)
        row.tests.append(f"o.__mro__ is not {row.expect(order, words)}")

    def held_in(self, owner: Any, kind: type, table: dict[str, Any]) -> None:
        """An object is of this very class, and has its attributes in this very dictionary."""
        row = self._row(table)
        places = class_of(owner, kind), attributes_of(owner, table)
        words = [None if address is None else (address,) for address in places]
        it, its_class = row.expect(owner, words[0]), row.expect(kind, words[1])
        usual: Any = object.__getattribute__
        plain = type(owner).__getattribute__ is usual
        found = f"{it}.__dict__" if plain else f"got({it}, '__dict__')"
        row.tests += [f"type({it}) is not {its_class}", f"{found} is not o"]

    def values(self, table: Mapping[Any, Any]) -> None:
        """A table holds what it holds now, in this order."""
        values, row = _values_of(table), self._row(table)
        if not values:
            row.depend(_words_in(table))
            row.tests.append("o" if _is_plain(table) else "length(o)")
            return
        words = None if type(table) is OrderedDict else _words_in(table)  # its order is elsewhere
        found = [f"v{i}" for i in range(len(values))]
        read = "o.values()" if _is_plain(table) else "values(o)"
        row.statements.append(f"{', '.join(found)}, = {read}")
        row.tests += [
            f"{name} is not {row.expect(value, words)}"
            for name, value in zip(found, values, strict=True)
        ]

    def names(self, table: Mapping[Any, Any]) -> None:
        """A table has the names that it has now, in this order."""
        row = self._row(table)
        words = None if type(table) is OrderedDict else _words_in(table)
        row.tests.append(f"[*o] != {row.expect([*table], words)}")

    def holds(self, check: Check, where: Where) -> None:
        """Another check holds; ``where`` says what words stand for it."""
        row = self._row(check)
        row.tests.append("not o()")
        row.where = where

    def still_like(self, value: Any, before: Any) -> None:
        """A value that took another's place is as good still, whatever was done to it since."""
        if value is not before and not is_constant(value):
            self.holds(partial(same_value, value, before), lambda: None)

    def function(self, same_words: SameWords | None = None, touched: Iterable[int] = ()) -> Check:
        """Returns what tells whether all checks hold.

        Args:
            same_words: compares words of memory; with it, what changed nowhere is not looked at.
            touched: addresses to fetch on the way.
        """
        if same_words is None:
            return _generated(list(self._rows.values()))
        return self.watch(same_words, touched).holds

    def watch(self, same_words: SameWords, touched: Iterable[int] = ()) -> Watch:
        """Returns what tells the same by looking at what changed only."""
        rows = list(self._rows.values())
        words = [row.where or (None if row.words is None else Words(row.words)) for row in rows]
        return Watch(words, _maker(rows), same_words, touched)

    def _row(self, owner: Any) -> _Row:
        return self._rows.setdefault(id(owner), _Row(owner))


def _maker(rows: Sequence[_Row]) -> Callable[[Sequence[int]], Check]:
    return lambda chosen: _generated([rows[i] for i in chosen])


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


def _words_in(table: Any) -> tuple[int, ...] | None:
    address = version_of_table(table)
    return None if address is None else (address,)


def _is_plain(table: Any) -> bool:
    return type(table) in _PLAIN_TABLES


def _values_of(table: Any) -> list[Any]:
    return list(table.values() if _is_plain(table) else dict.values(table))
