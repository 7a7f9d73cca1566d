"""Values that evidence knows by identity: a quick check before anything is frozen."""

from __future__ import annotations

import operator
import types
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..freeze import Identity
from ..objects import ABSENT, cell_contents
from .module_state import class_attribute, module_state, raw_attribute
from .reads import look_up, same_shallow
from .snapshot import Snapshot


class OwnValues:
    """What a traced instance's attributes were, to see at a glance that another's are the same.

    Args:
        modules: the instance's module tree.
        rows: path, name and frozen value of each attribute that was read.
        held: looks into the values.
    """

    def __init__(
        self, modules: Mapping[str, nn.Module], rows: list[tuple[str, str, Any]], held: Snapshot
    ) -> None:
        self.plain_reads: list[tuple[str, str, str]] = []
        self._rows = rows
        self._own: list[tuple[tuple[str, str, Any], Any, bool]] = []
        self._absent: dict[str, set[str]] = {}
        self._classes: dict[tuple[type, str], Any] = {}
        self._unsettled: list[tuple[str, str, Any]] = []
        for row in rows:
            path, name, expected = row
            module = modules[path]
            value, where = raw_attribute(module, name), _table_of(module, name)
            if not isinstance(value, (torch.Tensor, nn.Module)):
                self.plain_reads.append((path, name, where))
            settled = not isinstance(value, nn.Module) and (
                isinstance(expected, Identity) or held.vouches_for(value)
            )
            if where == "":
                self._own.append((row, value, settled))
                continue
            self._absent.setdefault(path, set()).add(name)
            if where == "class":
                self._classes[type(module), name] = value
            in_structure = where in ("_parameters", "_buffers") or isinstance(value, nn.Module)
            if not (settled or in_structure):
                self._unsettled.append(row)

    def suspects(self, modules: Mapping[str, nn.Module], held: str) -> list[tuple[str, str, Any]]:
        """Returns the attributes of another instance that must be frozen to be compared.

        Args:
            modules: its module tree, of the same structure.
            held: ``"same"`` if all that was looked into is unchanged.
        """
        states = {path: module_state(module) for path, module in modules.items()}
        if (
            held != "same"
            or any(not states[p].keys().isdisjoint(names) for p, names in self._absent.items())
            or any(class_attribute(c, n) is not seen for (c, n), seen in self._classes.items())
        ):
            return self._rows
        found = list(self._unsettled)
        for row, seen, settled in self._own:
            value = states[row[0]].get(row[1], ABSENT)
            if not ((value is seen and settled) or _same_number(value, seen)):
                found.append(row)
        return found


def _same_number(value: Any, seen: Any) -> bool:
    if type(value) is not type(seen):
        return False
    if type(value) is float:
        return bool(value.hex() == seen.hex())
    return type(value) in (int, bool, str) and bool(value == seen)


def _table_of(module: nn.Module, name: str) -> str:
    """Returns where a module has an attribute: ``""`` for itself, a table's name, ``"class"``."""
    state = module_state(module)
    if name in state:
        return ""
    tables = ("_parameters", "_buffers", "_modules")
    return next((t for t in tables if name in state[t]), "class")


class KnownOutside:
    """What globals and captured variables held: a quick check that nothing has changed."""

    def __init__(
        self,
        names: list[tuple[Any, str, Any]],
        cells: list[tuple[types.CellType, Any, types.FunctionType]],
        held: Snapshot,
    ) -> None:
        self._names = [(owner, name) for owner, name, _ in names]
        self._cells = [cell for cell, _, _ in cells]
        self._values = self._now()
        frozen = [f for _, _, f in names] + [f for _, f, _ in cells]
        self._unsettled = [
            (value, expected)
            for value, expected in zip(self._values, frozen, strict=True)
            if not (isinstance(expected, Identity) or held.vouches_for(value))
        ]

    def _now(self) -> list[Any]:
        values = [
            owner.get(name, ABSENT) if type(owner) is dict else look_up(owner, name)
            for owner, name in self._names
        ]
        try:
            return values + [cell.cell_contents for cell in self._cells]
        except ValueError:  # one is empty
            return values + [cell_contents(cell) for cell in self._cells]

    def same(self) -> bool:
        """Whether every name and variable holds the very object it held, and may be trusted."""
        return all(map(operator.is_, self._now(), self._values)) and all(
            same_shallow(value, expected) for value, expected in self._unsettled
        )
