"""Evidence: what a traced block's Python depended on, and whether another instance agrees.

A block instance may be replaced by a call on the closure of an earlier instance only if running
its Python would have produced the same graph. That is decided by comparing everything the traced
instance's Python read:

* the structure of its module tree: classes, children, parameters and buffers (layout, dtype,
  requires_grad, and which of them are one tensor), train/eval modes, hooks;
* every attribute read on a module of the tree, and on modules outside it;
* globals and closure cells of every function that ran, and of an object or class found there, the
  attributes that the function names;
* for a block called inside, that block's own evidence, at the same place.
"""

from __future__ import annotations

import argparse
import contextvars
import dis
import functools
import gc
import operator
import sys
import threading
import types
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn

from .freeze import (
    Freezer,
    Identity,
    Unrepeatable,
    describe,
    is_python_defined,
    is_unrepeatable,
    narrow,
)
from .held import Held
from .torch_names import global_hook_tables
from .types import TensorType

# State of nn.Module itself; the structure snapshot compares what matters of it.
_MODULE_INTERNALS = frozenset(nn.Module().__dict__) - {"training"}
_HOOK_TABLES = tuple(
    sorted(n for n in nn.Module().__dict__ if n.endswith(("_hooks", "_hooks_with_kwargs")))
)
_ABSENT = object()
_OWN_PREFIX = "_lazy_inline"  # of what the mark keeps on an instance
_LIBRARIES = sys.stdlib_module_names | {"torch", "lazyinline"}
_MAX_OUTSIDE_DEPTH = 8
_MAX_OUTSIDE_ITEMS = 256

Places = list[tuple[str, nn.Module]]
TensorPath = tuple[Any, ...]  # (module path, attribute name, *keys inside the attribute)


@dataclass
class Reads:
    """What one traced instance's Python read, filled in while it runs."""

    attributes: dict[tuple[int, str], tuple[nn.Module, Any]] = field(default_factory=dict)
    functions: dict[tuple[types.CodeType, int], dict[str, Any]] = field(default_factory=dict)
    globals: dict[tuple[int, str], tuple[Any, Any]] = field(default_factory=dict)
    nested: list[tuple[nn.Module, Evidence]] = field(default_factory=list)
    _owners: set[int] = field(default_factory=set)

    def attribute(self, module: nn.Module, name: str) -> None:
        """Notes that an attribute of a module was read; its state is kept as of the first read."""
        key = (id(module), name)
        if key not in self.attributes and name not in _MODULE_INTERNALS:
            self.attributes[key] = (module, _snapshot(raw_attribute(module, name)))

    def all_attributes(self, module: nn.Module) -> None:
        """Notes that the module's ``__dict__`` was read as a whole."""
        for name in list(module_state(module)):
            if not name.startswith(_OWN_PREFIX):
                self.attribute(module, name)

    def function(self, frame: types.FrameType) -> None:
        """Notes that a Python function ran, and what its globals and captured variables hold."""
        code, scope = frame.f_code, frame.f_globals
        variables = frame.f_locals
        if code.co_argcount and not _is_library(scope.get("__name__")):
            self._method(variables.get(code.co_varnames[0]), code.co_names)
        if (code, id(scope)) in self.functions:
            return
        captured = {name: variables[name] for name in code.co_freevars if name in variables}
        self.functions[code, id(scope)] = {k: _shallow_snapshot(v) for k, v in captured.items()}
        names, imports = _global_names(code)
        for name in names:
            if name in scope:
                self._outside(scope, name, code.co_names, 0)
        for name in imports:
            self._named_attributes(sys.modules.get(name), code.co_names, 0)
        for value in captured.values():
            self._named_attributes(value, code.co_names, 0)

    def places(self) -> list[tuple[Any, str]]:
        """Returns every (owner, name) outside the model that was looked up."""
        return [(owner, name) for (_, name), (owner, _) in self.globals.items()]

    def cells(self) -> list[types.CellType]:
        """Returns the closure cells of the functions that ran."""
        return list({id(cell): cell for cell, _, _ in _cell_reads(self)}.values())

    def _method(self, owner: Any, names: tuple[str, ...]) -> None:
        """Notes what a method's object holds: a module's class, or an object seen outside."""
        if isinstance(owner, nn.Module):
            self._named_attributes(type(owner), names, _MAX_OUTSIDE_DEPTH - 1)
        elif id(owner) in self._owners:
            self._named_attributes(owner, names, 0)

    def _outside(self, owner: Any, name: str, names: tuple[str, ...], depth: int) -> None:
        value = look_up(owner, name)
        if (id(owner), name) not in self.globals:
            self.globals[id(owner), name] = (owner, _shallow_snapshot(value))
            self._owners.add(id(owner))
        self._named_attributes(value, names, depth + 1)

    def _named_attributes(self, owner: Any, names: tuple[str, ...], depth: int) -> None:
        if depth < _MAX_OUTSIDE_DEPTH and _may_hold_state(owner):
            for name in names:
                if look_up(owner, name) is not _ABSENT:
                    self._outside(owner, name, names, depth)


def raw_attribute(module: nn.Module, name: str) -> Any:
    """Returns what a module itself holds under a name, without running any of its code."""
    state = module_state(module)
    if name in state:
        return state[name]
    for table in ("_parameters", "_buffers", "_modules"):
        if name in state.get(table, ()):
            return state[table][name]
    return _class_attribute(type(module), name)


def _class_attribute(kind: type, name: str) -> Any:
    for base in kind.__mro__:
        if name in base.__dict__:
            return base.__dict__[name]
    return _ABSENT


def _snapshot(value: Any) -> Any:
    """Freezes a value without regard to where it sits, to notice that it changed meanwhile."""
    return Freezer(on_tensor=lambda t, keys: Identity(t)).freeze(value)


def module_state(module: nn.Module) -> dict[str, Any]:
    """Returns a module's ``__dict__`` past any ``__getattribute__``."""
    state: dict[str, Any] = object.__getattribute__(module, "__dict__")
    return state


def walk_modules(root: nn.Module) -> list[tuple[str, nn.Module]]:
    """Returns every (path, module) of a tree, a shared module once per place it has.

    The order is that of ``named_modules``, so that a shared tensor gets the name that
    ``named_parameters`` gives it.
    """
    found, todo = [], [("", root)]
    while todo:
        path, module = todo.pop()
        found.append((path, module))
        prefix = f"{path}." if path else ""
        children = module_state(module)["_modules"].items()
        todo += [(prefix + name, child) for name, child in reversed(children) if child is not None]
    return found


def has_hooks(module: nn.Module, kind: str) -> bool:
    """Whether hooks run in a module's ``"forward"``, or ``"backward"``: its own, or everybody's."""
    return has_own_hooks(module, kind) or any(global_hook_tables(kind))


def has_own_hooks(module: nn.Module, kind: str) -> bool:
    """Whether hooks were put on this very module."""
    state = module_state(module)
    return any(kind in table and state.get(table) for table in _HOOK_TABLES)


class Evidence:
    """What an instance must agree with to share the closure of ``root``.

    Args:
        root: the instance that was traced.
        reads: what its Python read.
    """

    def __init__(self, root: nn.Module, reads: Reads) -> None:
        self.type = type(root)
        places = walk_modules(root)
        self._paths = _module_paths(places)
        self._structure = _structure(places)
        self._tensor_paths: dict[int, TensorPath] = {}
        self._keep: list[torch.Tensor] = []
        self._attributes: list[tuple[str, str, Any]] = []
        self._held = Held()
        self._external: list[tuple[nn.Module, str, Any]] = []
        self._globals = [(scope, key[1], seen) for key, (scope, seen) in reads.globals.items()]
        self._cells = _cell_reads(reads)
        self._outside = _OutsideValues(self._globals, self._cells, self._held)
        self._nested: list[tuple[str, Evidence]] = []
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
        self._seen_outside = self._modules_seen_outside()
        self._own = _OwnValues(dict(places), self._attributes, self._held)
        self.side_effect = self.side_effect or self._seen_itself(walk_modules(root))

    def _modules_seen_outside(self) -> dict[int, str]:
        """Finds every module that code reached from outside: a block may look for itself there."""
        found: dict[int, str] = {}
        places = [(_outside_name(scope, name), value) for scope, name, value in self._globals]
        places += [(f"{type(m).__name__}.{name}", value) for m, name, value in self._external]
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
        freeze = self._freezer(self._paths, self._note_tensor)
        for module, name in [(m, key[1]) for key, (m, _) in reads.attributes.items()]:
            path = self._paths.get(id(module))
            value = raw_attribute(module, name)
            if path is None:
                self._external.append((module, name, _snapshot(value)))
            else:
                self._attributes.append((path, name, freeze(value, (path, name))))
        for path, module in walk_modules(root):
            state = module_state(module)
            for name, tensor in (*state["_parameters"].items(), *state["_buffers"].items()):
                if tensor is not None:
                    self._note_tensor(tensor, (path, name))

    def _note_tensor(self, tensor: torch.Tensor, keys: TensorPath) -> Any:
        # No way leads to a member of a set, or to a dictionary's key.
        if ("key", None) not in keys:
            self._tensor_paths.setdefault(id(tensor), keys)
        self._keep.append(tensor)
        return _tensor_facts(tensor)

    def tensor_path(self, tensor: torch.Tensor) -> TensorPath | None:
        """Returns how the traced instance reached one of its own tensors, if it did."""
        return self._tensor_paths.get(id(tensor))

    def module_path(self, module: nn.Module) -> str | None:
        """Returns the path of a module in the traced instance's tree."""
        return self._paths.get(id(module))

    def is_fixed(self, tensor: torch.Tensor) -> bool:
        """Whether the evidence pins this very tensor (a global, or another module's attribute)."""
        pin = Identity(tensor)
        names = [f for _, _, f in self._external] + [f for _, _, f in self._globals]
        return pin in names or any(pin == expected for _, expected, _ in self._cells)

    @staticmethod
    def _freezer(
        paths: Mapping[int, str], on_tensor: Callable[[torch.Tensor, tuple[Any, ...]], Any]
    ) -> Callable[[Any, TensorPath], Any]:
        return Freezer(paths, on_tensor).freeze

    def _find_side_effect(self, reads: Reads) -> str:
        for (_, name), (module, before) in reads.attributes.items():
            if _snapshot(raw_attribute(module, name)) != before:
                return f"its forward changes {type(module).__name__}.{name}"
        for scope, name, before in self._globals:
            if not _same_shallow(look_up(scope, name), before):
                return f"its forward changes {_outside_name(scope, name)}"
        runs = Counter(id(function.__code__) for _, _, function in self._cells)
        for cell, now, function in self._cells:
            code = function.__code__
            before = reads.functions.get((code, id(function.__globals__)), {})
            name = code.co_freevars[(function.__closure__ or ()).index(cell)]
            if runs[id(code)] == len(code.co_freevars) and before.get(name, now) != now:
                return f"its forward changes the captured variable {name}"
        return ""

    def mismatch(self, instance: nn.Module) -> str:
        """Returns why an instance cannot share, or an empty text if it can."""
        if type(instance) is not self.type:
            return f"class {type(instance).__qualname__} is not {self.type.__qualname__}"
        return self.mismatch_at(walk_modules(instance))

    def mismatch_at(self, places: Places) -> str:
        """The same for the module tree of an instance of the right class."""
        held = "same" if self._held.same() else "changed"
        return (
            _structure_mismatch(self._structure, _structure(places))
            or self._attribute_mismatch(places, held)
            or self._seen_itself(places)
            or self._outside_mismatch(held)
            or self._nested_mismatch(dict(places))
        )

    def _attribute_mismatch(self, places: Places, held: str) -> str:
        modules = dict(places)
        rows = self._own.suspects(modules, held)
        if not rows:
            return ""
        freeze = self._freezer(_module_paths(places), lambda tensor, keys: _tensor_facts(tensor))
        for path, name, expected in rows:
            found = freeze(raw_attribute(modules[path], name), (path, name))
            if found != expected:
                inside, found, expected = narrow(found, expected)
                where = f"{path}.{name}{inside}" if path else name + inside
                return f"attribute {where} is {_describe(found)}, not {_describe(expected)}"
        return ""

    def _outside_mismatch(self, held: str) -> str:
        for module, name, expected in self._external:
            if _snapshot(raw_attribute(module, name)) != expected:
                return f"attribute {name} of {type(module).__name__} changed between the calls"
        if held == "same" and self._outside.same():
            return ""
        for scope, name, expected in self._globals:
            if not _same_shallow(look_up(scope, name), expected):
                return f"{_outside_name(scope, name)} changed between the calls"
        for cell, expected, function in self._cells:
            if not _same_shallow(_cell_contents(cell), expected):
                return f"a variable captured by {function.__qualname__} changed between the calls"
        return ""

    @cached_property
    def plain_reads(self) -> tuple[tuple[str, str, str], ...]:
        """The attributes read in the tree, by nested blocks too, that are no tensors or modules.

        Path, name, and where it was: ``""`` for the module's own ``__dict__``, the name of a table
        of it such as ``"_parameters"``, or ``"class"``.
        """
        found = {(path, name): where for path, name, where in self._own.plain_reads}
        for place, evidence in self._nested:
            for path, name, where in evidence.plain_reads:
                found[".".join(p for p in (place, path) if p), name] = where
        return tuple((path, name, where) for (path, name), where in found.items())

    def _nested_mismatch(self, modules: Mapping[str, nn.Module]) -> str:
        for path, evidence in self._nested:
            reason = evidence.mismatch(modules[path])
            if reason:
                return f"{path}: {reason}"
        return ""


def _describe(frozen: Any) -> str:
    is_absent = isinstance(frozen, Identity) and frozen.target is _ABSENT
    return "<missing>" if is_absent else describe(frozen)


def follow_tensor_path(root: nn.Module, path: TensorPath) -> torch.Tensor:
    """Returns the tensor that another instance reaches in the same way."""
    module = root
    for name in path[0].split(".") if path[0] else ():
        module = module_state(module)["_modules"][name]
    value = raw_attribute(module, path[1])
    for key in path[2:]:
        value = _follow_key(value, key)
    assert isinstance(value, torch.Tensor)
    return value


def _follow_key(value: Any, key: Any) -> Any:
    kind, name = key if isinstance(key, tuple) else (key, None)
    if kind == "item":
        return value[name]
    if kind == "attr":
        return getattr(value, name)
    if kind == "cell":
        return value.__closure__[name].cell_contents
    attribute = {
        "func": "__func__",
        "self": "__self__",
        "defaults": "__defaults__",
        "kwdefaults": "__kwdefaults__",
        "dict": "__dict__",
    }
    return getattr(value, attribute[kind])


def _tensor_facts(tensor: torch.Tensor) -> Any:
    return (type(tensor), TensorType.of(tensor), tensor.requires_grad)


def _module_paths(places: list[tuple[str, nn.Module]]) -> dict[int, str]:
    paths: dict[int, str] = {}
    for path, module in places:
        paths.setdefault(id(module), path)
    return paths


def _structure(places: list[tuple[str, nn.Module]]) -> list[tuple[Any, ...]]:
    """Describes a module tree: one row per module, in a fixed order."""
    rows: list[tuple[Any, ...]] = []
    first_place: dict[int, int] = {}  # of a tensor; equal numbers mean that it is tied
    module_place: dict[int, int] = {}
    paths: dict[int, str] | None = None
    for path, module in places:
        state = module_state(module)
        hooks: Any = ()
        if any(map(state.get, _HOOK_TABLES)):
            paths = paths or _module_paths(places)
            freezer = Freezer(paths)
            hooks = tuple(
                freezer.freeze(list(state[t].values())) for t in _HOOK_TABLES if t in state
            )
        tensors = tuple(
            (
                name,
                None
                if t is None
                else (*_tensor_facts(t), first_place.setdefault(id(t), len(first_place))),
            )
            for table in (state["_parameters"], state["_buffers"])
            for name, t in table.items()
        )
        alias = module_place.setdefault(id(module), len(module_place))
        rows.append((path, type(module), state["training"], alias, tensors, hooks))
    return rows


def _structure_mismatch(expected: list[tuple[Any, ...]], found: list[tuple[Any, ...]]) -> str:
    if expected == found:
        return ""
    labels = (
        "sub-module name",
        "class",
        "train/eval mode",
        "sub-module sharing",
        "parameters",
        "hooks",
    )
    for row, other in zip(expected, found, strict=False):
        for label, a, b in zip(labels, row, other, strict=True):
            if a != b:
                return f"{label} of {other[0] or 'the block'} differs{_name_tensor(label, a, b)}"
    return f"it has {len(found)} sub-modules, not {len(expected)}"


def _name_tensor(label: str, expected: Any, found: Any) -> str:
    if label == "train/eval mode":
        return f" (training is {found}, not {expected})"
    if label != "parameters":
        return ""
    for a, b in zip(expected, found, strict=False):
        if a != b and a[0] == b[0] and a[1] and b[1]:
            facts = ("class", "layout", "requires_grad", "tying")
            changed = [f for f, x, y in zip(facts, a[1], b[1], strict=True) if x != y]
            return f" ({b[0]}: {', '.join(changed)})"
    return ""


_PLAIN = (bool, int, float, str, tuple, list, dict, set, frozenset, deque, type(None))


def _shallow_snapshot(value: Any) -> Any:
    """Freezes data by content, as far as it is small; functions and the like by identity."""
    if isinstance(value, contextvars.ContextVar):
        return ("context variable", _shallow_snapshot(value.get(_ABSENT)))
    if type(value) in _PLAIN or _is_data(value):
        return _OUTSIDE.freeze(value)
    return Unrepeatable(value) if is_unrepeatable(value) else Identity(value)


_OUTSIDE = Freezer(by_identity=(types.FunctionType,), max_items=_MAX_OUTSIDE_ITEMS)


def _is_data(value: Any) -> bool:
    """Whether a value is an object of a user's class, or of the library's for plain data."""
    kind = type(value)
    if kind in (types.SimpleNamespace, argparse.Namespace, threading.local, functools.partial):
        return True
    code = (nn.Module, torch.Tensor, type, types.ModuleType, types.FunctionType, types.MethodType)
    return not (isinstance(value, code) or _is_library(kind.__module__)) and is_python_defined(kind)


def _modules_in(frozen: Any) -> Iterator[nn.Module]:
    """Yields the modules in a frozen value."""
    if isinstance(frozen, Identity) and isinstance(frozen.target, nn.Module):
        yield frozen.target
    elif isinstance(frozen, tuple):
        for part in frozen:
            yield from _modules_in(part)


@functools.lru_cache(maxsize=4096)
def _global_names(code: types.CodeType) -> tuple[list[str], list[str]]:
    """Returns the names that a function uses of its globals, and the modules it imports."""
    names: dict[str, None] = {}
    imports: dict[str, None] = {}
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL"):
            names[instruction.argval] = None
        elif instruction.opname == "IMPORT_NAME":
            imports[instruction.argval] = None
    return list(names), list(imports)


def look_up(owner: Any, name: str) -> Any:
    """Returns what a scope, module, class or object itself holds under a name."""
    if type(owner) is dict:
        return owner.get(name, _ABSENT)
    state = getattr(owner, "__dict__", {})
    if name in state:
        return state[name]
    for base in owner.__mro__ if isinstance(owner, type) else type(owner).__mro__:
        if name in base.__dict__:
            value = base.__dict__[name]
            is_slot = isinstance(value, types.MemberDescriptorType) and base is not owner
            return getattr(owner, name, _ABSENT) if is_slot else value
    return _ABSENT


def _may_hold_state(value: Any) -> bool:
    """Whether the attributes of a value are Python state that a user's code may change."""
    if isinstance(value, types.ModuleType):
        return not _is_library(value.__name__)
    if isinstance(value, type):
        return not _is_library(value.__module__)
    if isinstance(value, types.FunctionType):
        return bool(value.__dict__)
    return not isinstance(value, (nn.Module, *_PLAIN)) and is_python_defined(type(value))


def _is_library(module_name: Any) -> bool:
    return isinstance(module_name, str) and module_name.partition(".")[0] in _LIBRARIES


def _outside_name(owner: Any, name: str) -> str:
    if type(owner) is dict:
        return f"the global {name}"
    return f"{getattr(owner, '__name__', type(owner).__name__)}.{name}"


def _same_shallow(value: Any, expected: Any) -> bool:
    if isinstance(expected, Identity):
        return expected.target is value
    return bool(_shallow_snapshot(value) == expected)


class _OwnValues:
    """What a traced instance's attributes were, to see at a glance that another's are the same.

    Args:
        modules: the instance's module tree.
        rows: path, name and frozen value of each attribute that was read.
        held: looks into the values.
    """

    def __init__(
        self, modules: Mapping[str, nn.Module], rows: list[tuple[str, str, Any]], held: Held
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
                isinstance(expected, Identity) or held.look_into(value)
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
            or any(_class_attribute(c, n) is not seen for (c, n), seen in self._classes.items())
        ):
            return self._rows
        found = list(self._unsettled)
        for row, seen, settled in self._own:
            value = states[row[0]].get(row[1], _ABSENT)
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


class _OutsideValues:
    """What globals and captured variables held: a quick check that nothing has changed."""

    def __init__(
        self,
        names: list[tuple[Any, str, Any]],
        cells: list[tuple[types.CellType, Any, types.FunctionType]],
        held: Held,
    ) -> None:
        self._names = [(owner, name) for owner, name, _ in names]
        self._cells = [cell for cell, _, _ in cells]
        self._values = self._now()
        frozen = [f for _, _, f in names] + [f for _, f, _ in cells]
        self._unsettled = [
            (value, expected)
            for value, expected in zip(self._values, frozen, strict=True)
            if not (isinstance(expected, Identity) or held.look_into(value))
        ]

    def _now(self) -> list[Any]:
        values = [
            owner.get(name, _ABSENT) if type(owner) is dict else look_up(owner, name)
            for owner, name in self._names
        ]
        try:
            return values + [cell.cell_contents for cell in self._cells]
        except ValueError:  # one is empty
            return values + [_cell_contents(cell) for cell in self._cells]

    def same(self) -> bool:
        """Whether every name and variable holds the very object it held, and may be trusted."""
        return all(map(operator.is_, self._now(), self._values)) and all(
            _same_shallow(value, expected) for value, expected in self._unsettled
        )


def _cell_reads(reads: Reads) -> list[tuple[types.CellType, Any, types.FunctionType]]:
    """Finds the closure cells of the functions that ran (code objects know only their names)."""
    found: list[tuple[types.CellType, Any, types.FunctionType]] = []
    codes = [code for code, _ in reads.functions if code.co_freevars]
    if not codes:
        return found
    wanted = set(map(id, codes))
    for function in gc.get_referrers(*codes):
        if isinstance(function, types.FunctionType) and id(function.__code__) in wanted:
            for cell in function.__closure__ or ():
                found.append((cell, _shallow_snapshot(_cell_contents(cell)), function))
    return found


def _cell_contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _ABSENT
