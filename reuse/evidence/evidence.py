"""Evidence: what a traced block's Python depended on, and whether another instance agrees.

A block instance may be replaced by a call on the closure of an earlier instance only if running
its Python would have produced the same graph. That is decided by comparing everything the traced
instance's Python read:

* the structure of its module tree: classes, children, parameters and buffers (layout, dtype,
  requires_grad, and which of them are one tensor), train/eval modes, hooks;
* which paths lead to one and the same tensor: a list may hold a parameter of the block;
* every attribute read on a module of the tree, and on modules outside it;
* globals and closure cells of every function that ran, and of an object or class found there, the
  attributes that the function names;
* the evidence of each block called inside, at the same path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from ..freeze import Freezer, Identity, Snapshot, describe, narrow, same_value
from ..kinds import NO_WAY, WHOLE_FUNCTION, cell_contents
from .module_state import (
    Places,
    TensorPath,
    Where,
    find_attribute,
    follow_tensor_path,
    module_paths,
    module_state,
    raw_attribute,
    structure_mismatch,
    structure_of,
    tensor_facts,
    walk_modules,
)
from .reads import Reads, cell_reads, look_up, outside_name, same_shallow, snapshot
from .slots import answers_alike, tests_of

_NUMBERS = (int, float, bool, str)
Held = Literal["same", "changed"]


class _Own(NamedTuple):
    """An attribute that was read in the instance's tree.

    ``is_covered``: while the snapshot is unchanged, its value freezes to the same.
    ``compared``: it is not part of the structure, so it is compared here. ``tests``: of an index,
    the comparisons that were made with it.
    """

    path: str
    name: str
    frozen: Any
    where: Where
    value: Any
    is_covered: bool
    compared: bool
    tests: tuple[tuple[str, int, bool], ...] | None = None


class _Outside(NamedTuple):
    """A global, an attribute of an object outside the tree, or a captured variable."""

    what: str
    now: Callable[[], Any]
    frozen: Any
    value: Any
    is_covered: bool


class Evidence:
    """Holds what an instance must agree with to share the closure of ``root``, which was traced."""

    def __init__(self, root: nn.Module, reads: Reads) -> None:
        self.type = type(root)
        places = walk_modules(root)
        self._paths = module_paths(places)
        self._structure = structure_of(places)
        # How the traced instance reached its own tensors, by their ``id``.
        self.tensor_paths: dict[int, TensorPath] = {}
        self._aliases: list[tuple[TensorPath, TensorPath]] = []  # two paths to one tensor
        # Kept alive, or another tensor could get the ``id`` of one in the table.
        self._keep: list[torch.Tensor] = []
        self._attributes: list[_Own] = []
        self._held = Snapshot(WHOLE_FUNCTION)
        self._external: list[tuple[nn.Module, str, Any]] = []
        self._globals = [(scope, key[1], seen) for key, (scope, seen) in reads.globals.items()]
        self._cells = cell_reads(reads)
        self._outside = [
            self._known(outside_name(scope, name), partial(look_up, scope, name), frozen)
            for scope, name, frozen in self._globals
        ] + [
            self._known(
                f"a variable captured by {function.__qualname__}",
                partial(cell_contents, cell),
                frozen,
            )
            for cell, frozen, function in self._cells
        ]
        self._nested: list[tuple[str, Any]] = []
        self.side_effect = self._find_side_effect(reads)
        self._index_attributes(root, reads)
        for module, evidence in reads.nested:
            path = self._paths.get(id(module))
            if path is None:
                self.side_effect = (
                    self.side_effect or "it calls a shared block outside its own tree"
                )
            else:
                self._nested.append((path, evidence))
                for inner in evidence.tensor_paths.values():
                    way = (".".join(p for p in (path, inner[0]) if p), *inner[1:])
                    self._note_way(follow_tensor_path(root, way), way)
        # A block may find itself outside, in a global list of layers: another instance would not.
        self._seen_outside = self._modules_seen_outside(reads.walked.values())
        self.side_effect = self.side_effect or self._seen_itself(walk_modules(root))

    def _known(self, what: str, now: Callable[[], Any], frozen: Any) -> _Outside:
        value = now()
        return _Outside(what, now, frozen, value, self._is_covered(value, frozen))

    def _is_covered(self, value: Any, frozen: Any) -> bool:
        return isinstance(frozen, Identity) or self._held.covers(value)

    def _modules_seen_outside(self, walked: Iterable[nn.Module]) -> dict[int, str]:
        """Finds every module that code reached from outside: a block may look for itself there."""
        found: dict[int, str] = {}
        places = [(outside_name(scope, name), value) for scope, name, value in self._globals]
        places += [(f"{type(m).__name__}.{name}", value) for m, name, value in self._external]
        outside = [m for m in walked if id(m) not in self._paths]
        places += [(f"a {type(m).__name__} that it looks through", Identity(m)) for m in outside]
        for where, value in places:
            for module in _modules_in(value):
                for _, inner in walk_modules(module):
                    found.setdefault(id(inner), where)
        return found

    def _seen_itself(self, places: list[tuple[str, nn.Module]]) -> str:
        for _, module in places:
            if id(module) in self._seen_outside:
                return f"{self._seen_outside[id(module)]} leads to this very block"
        return ""

    def _index_attributes(self, root: nn.Module, reads: Reads) -> None:
        freeze = Freezer(self._paths, self._note_tensor).freeze
        for (_, name), read in reads.attributes.items():
            module = read.module
            path = self._paths.get(id(module))
            where, value = find_attribute(module, name)
            if path is None:
                self._external.append((module, name, snapshot(value)))
                continue
            frozen, is_module = freeze(value, (path, name)), isinstance(value, nn.Module)
            is_covered = not is_module and self._is_covered(value, frozen)
            in_tree = where in ("_parameters", "_buffers") or (is_module and where != "")
            index = reads.indexes.get((id(module), name))
            tests = None if index is None else tests_of(index)
            row = _Own(path, name, frozen, where, value, is_covered, not in_tree, tests)
            self._attributes.append(row)
        # All tensors of the tree, read or not: a list that is read may hold one of them.
        for path, module in walk_modules(root):
            state = module_state(module)
            for name, tensor in (*state["_parameters"].items(), *state["_buffers"].items()):
                if tensor is not None:
                    self._note_tensor(tensor, (path, name))

    def _note_tensor(self, tensor: torch.Tensor, keys: TensorPath) -> Any:
        if NO_WAY not in keys:
            self._note_way(tensor, keys)
        self._keep.append(tensor)
        return _frozen_tensor(tensor, keys)

    def _note_way(self, tensor: torch.Tensor, keys: TensorPath) -> None:
        first = self.tensor_paths.setdefault(id(tensor), keys)
        if first != keys:
            self._aliases.append((first, keys))

    def is_fixed(self, tensor: torch.Tensor) -> bool:
        """Whether another instance must find this very tensor: a global, say."""
        pin = Identity(tensor)
        names = [f for _, _, f in self._external] + [f for _, _, f in self._globals]
        return pin in names or any(pin == expected for _, expected, _ in self._cells)

    def _find_side_effect(self, reads: Reads) -> str:
        for (_, name), read in reads.attributes.items():
            if snapshot(raw_attribute(read.module, name)) != read.frozen:
                return f"its forward changes {type(read.module).__name__}.{name}"
        for scope, name, before in self._globals:
            if not same_shallow(look_up(scope, name), before):
                return f"its forward changes {outside_name(scope, name)}"
        return ""

    def mismatch(self, places: Places) -> str:
        """Returns why an instance of the class cannot share, by its module tree; "" if it can."""
        modules = dict(places)
        # While the snapshot is unchanged, most rows agree by identity.
        held: Held = "same" if self._held.same() else "changed"
        return (
            structure_mismatch(self._structure, structure_of(places))
            or self._attribute_mismatch(places, modules, held)
            or self._alias_mismatch(places)
            or self._seen_itself(places)
            or self._outside_mismatch(held)
            or self._nested_mismatch(modules)
        )

    def _attribute_mismatch(
        self, places: Places, modules: Mapping[str, nn.Module], held: Held
    ) -> str:
        rows = self._attributes
        if held == "same":
            rows = [row for row in rows if not _surely_agrees(row, modules[row.path])]
        if not rows:
            return ""
        freeze = Freezer(module_paths(places), _frozen_tensor).freeze
        for path, name, expected, *_, tests in rows:
            if tests is not None and answers_alike(raw_attribute(modules[path], name), tests):
                continue
            found = freeze(raw_attribute(modules[path], name), (path, name))
            if found != expected:
                inside, found, expected = narrow(found, expected)
                where = f"{path}.{name}{inside}" if path else name + inside
                return f"attribute {where} is {describe(found)}, not {describe(expected)}"
        return ""

    def _alias_mismatch(self, places: Places) -> str:
        """Names two paths that led to one tensor in the traced instance, and do not in this one."""
        root = places[0][1]
        for first, second in self._aliases:
            if follow_tensor_path(root, first) is not follow_tensor_path(root, second):
                ways = " and ".join(
                    ".".join(str(k) for k in way if k != "") for way in (first, second)
                )
                return f"{ways} are two tensors here"
        return ""

    def _outside_mismatch(self, held: Held) -> str:
        for module, name, expected in self._external:
            if snapshot(raw_attribute(module, name)) != expected:
                return f"attribute {name} of {type(module).__name__} changed between the calls"
        for row in self._outside:
            now = row.now()
            known = held == "same" and row.is_covered and now is row.value
            if not (known or same_shallow(now, row.frozen)):
                return f"{row.what} changed between the calls"
        return ""

    @cached_property
    def plain_reads(self) -> tuple[tuple[str, str, Where], ...]:
        """The attributes read in the tree, by nested blocks too: path, name, and where it was."""
        found: dict[tuple[str, str], Where] = {
            (row.path, row.name): row.where for row in self._attributes
        }
        for place, evidence in self._nested:
            for path, name, where in evidence.plain_reads:
                found[".".join(p for p in (place, path) if p), name] = where
        return tuple((path, name, where) for (path, name), where in found.items())

    def _nested_mismatch(self, modules: Mapping[str, nn.Module]) -> str:
        for path, evidence in self._nested:
            kind, expected = type(modules[path]), evidence.type
            if kind is not expected:
                return f"{path}: class {kind.__qualname__} is not {expected.__qualname__}"
            if reason := evidence.mismatch(walk_modules(modules[path])):
                return f"{path}: {reason}"
        return ""


def _frozen_tensor(tensor: torch.Tensor, keys: TensorPath) -> Any:
    """Returns the facts that another tensor must match; the tensor if no path leads to it."""
    return Identity(tensor) if NO_WAY in keys else tensor_facts(tensor)


def _surely_agrees(row: _Own, module: nn.Module) -> bool:
    """Whether an attribute agrees without freezing it, while the snapshot is unchanged."""
    where, value = find_attribute(module, row.name)
    if where != row.where:
        return False
    if value is row.value and row.is_covered:
        return True
    # The structure has compared it, unless it is a class attribute.
    is_in_structure = not row.compared and (where != "class" or value is row.value)
    return is_in_structure or (type(value) in _NUMBERS and same_value(value, row.value))


def _modules_in(frozen: Any) -> Iterator[nn.Module]:
    """Yields the modules in a frozen value."""
    if isinstance(frozen, Identity) and isinstance(frozen.target, nn.Module):
        yield frozen.target
    elif isinstance(frozen, tuple):
        for part in frozen:
            yield from _modules_in(part)
