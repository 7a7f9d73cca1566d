"""Many checks by identity as one generated function: does everything hold what it held?

A model of a hundred modules needs a thousand of them at each call, so what one costs counts. The
owners that are checked alike (every ``Linear``'s table of parameters, say) are the rows of one loop
over local variables; the function is as long as there are different kinds of owners.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import CellType, MappingProxyType
from typing import Any

Check = Callable[[], bool]

# Read by their own methods; a class derived from them may have others, and is read by dict's.
_PLAIN_TABLES = (dict, OrderedDict, MappingProxyType)
_MISSING = object()


@dataclass
class _Row:
    """What is checked of one owner: its statements and tests, and the objects they expect."""

    owner: Any
    statements: list[str] = field(default_factory=list)
    tests: list[str] = field(default_factory=list)
    expected: list[Any] = field(default_factory=list)

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
        self._empty: list[Any] = []

    def entry(self, table: Any, name: str, value: Any) -> None:
        """A table holds this very object under a name."""
        row = self._row(table)
        found = f"o[{name!r}]" if _is_plain(table) else f"get(o, {name!r}, missing)"
        row.tests.append(f"{found} is not {row.expect(value)}")

    def absent(self, table: Any, name: str) -> None:
        """A table has no such name."""
        found = f"{name!r} in o" if _is_plain(table) else f"has(o, {name!r})"
        self._row(table).tests.append(found)

    def attribute(self, owner: Any, name: str, value: Any) -> None:
        """An attribute, looked up as usual, is this very object."""
        row = self._row(owner)
        row.tests.append(f"o.{name} is not {row.expect(value)}")

    def captured(self, cell: CellType, value: Any) -> None:
        """A captured variable holds this very object."""
        self.attribute(cell, "cell_contents", value)

    def kind(self, owner: Any, kind: type) -> None:
        """An object is of this very class."""
        row = self._row(owner)
        row.tests.append(f"type(o) is not {row.expect(kind)}")

    def values(self, table: Mapping[Any, Any]) -> None:
        """A table holds what it holds now, in this order."""
        values = _values_of(table)
        if not values:
            self._empty.append(table)
            return
        row, found = self._row(table), [f"v{i}" for i in range(len(values))]
        read = "o.values()" if _is_plain(table) else "values(o)"
        row.statements.append(f"{', '.join(found)}, = {read}")
        row.tests += [
            f"{name} is not {row.expect(value)}" for name, value in zip(found, values, strict=True)
        ]

    def names(self, table: Mapping[Any, Any]) -> None:
        """A table has the names that it has now, in this order."""
        row = self._row(table)
        row.tests.append(f"[*o] != {row.expect([*table])}")

    def function(self) -> Check:
        """Returns what tells whether all checks hold."""
        kinds: dict[tuple[str, ...], list[tuple[Any, ...]]] = {}
        for row in self._rows.values():
            body = (*row.statements, f"if {' or '.join(row.tests)}: return False")
            kinds.setdefault(body, []).append((row.owner, *row.expected))
        lines = ["def unchanged():", " try:", "  if any(empty): return False"]
        for number, (body, rows) in enumerate(kinds.items()):
            names = ["o", *(f"e{i}" for i in range(len(rows[0]) - 1)), ""]
            lines.append(f"  for {', '.join(names)} in rows{number}:")
            lines += [f"   {line}" for line in body]
        lines += [" except Exception: return False", " return True"]
        scope: dict[str, Any] = {f"rows{i}": rows for i, rows in enumerate(kinds.values())}
        scope.update(empty=self._empty, missing=_MISSING)
        scope.update(get=dict.get, has=dict.__contains__, values=dict.values)
        exec(compile("\n".join(lines), "<lazyinline guard>", "exec"), scope)
        check: Check = scope["unchanged"]
        return check

    def _row(self, owner: Any) -> _Row:
        return self._rows.setdefault(id(owner), _Row(owner))


def _is_plain(table: Any) -> bool:
    return type(table) in _PLAIN_TABLES


def _values_of(table: Any) -> list[Any]:
    return list(table.values() if _is_plain(table) else dict.values(table))
