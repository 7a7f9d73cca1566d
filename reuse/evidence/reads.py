"""Notes what the Python of a traced instance reads: attributes, globals, captured variables."""

from __future__ import annotations

import argparse
import contextvars
import copyreg
import functools
import inspect
import os
import sys
import threading
import types
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from ..freeze import Freezer, Identity, Snapshot
from ..kinds import ABSENT, cell_contents, is_library, is_own_patch, is_python_defined
from ..torch_pytree import is_container
from .functions import (
    Closures,
    globals_used,
    identity_leak_of,
    identity_leak_through,
    leaks_by_call,
    modules_imported,
    texts_of,
)
from .module_state import Where, find_attribute, module_state
from .slots import OpenIndex, SlotReads

# State of nn.Module itself, which the structure of a tree and the guard compare where it matters,
# and the methods that run at each call.
NOT_NOTED = frozenset(nn.Module().__dict__) - {"training"} | {
    "_call_impl",
    "_compiled_call_impl",
    "_slow_forward",
}
_CHILDREN = ("_modules", "_parameters", "_buffers")
# The functions that a read of os.environ runs. They capture the encoding, which never changes.
_CODERS = ("encodekey", "encodevalue", "decodekey", "decodevalue")
_ENVIRONMENT_CODES = frozenset(getattr(os.environ, name).__code__ for name in _CODERS)
# The functions that a read of os.environb runs, whose names are bytes.
_BYTES_CODES = frozenset([os.environb.encodekey.__code__])  # type: ignore[attr-defined]
_IMPORTERS = frozenset({"__import__", "import_module"})
_MAX_OUTSIDE_DEPTH = 8
_DATA = (bool, int, float, str, tuple, list, dict, set, frozenset, deque)
_PLAIN = (*_DATA, type(None))
_MAX_LIBRARY_DEPTH = 3  # torch.nn.functional
_KNOWN_BY_STRUCTURE = (torch.Tensor, nn.Module)
_GETTERS_IN_C = (types.MemberDescriptorType, types.GetSetDescriptorType)
# Data outside may be a library's whole registry: more objects than this compare by identity.
_OUTSIDE = Freezer(by_identity=(types.FunctionType,), max_items=256)


_Seen = dict[int, tuple[int, Any]]  # the least depth at which a walk met an object, and the object


class AttributeRead(NamedTuple):
    """An attribute of a module when it was first read."""

    module: nn.Module  # the module
    table: dict[str, Any]  # the module's dictionary that holds it, or would
    value: Any  # what the dictionary held, or ABSENT
    frozen: Any  # the frozen value, of the module or its class, to compare another instance with


@dataclass
class Reads:
    """Holds what the Python of an instance, or of the whole model, reads while it runs."""

    # A snapshot of what the modules' attributes held, in the whole run.
    contents: Snapshot = field(default_factory=Snapshot)
    # Called once with each value that is read outside the model.
    seen: Callable[[Any, str, Any], None] | None = None
    # ``id`` of each object outside whose attribute was read, in the whole run.
    owners: set[int] = field(default_factory=set)
    # Whether these are the whole model's, which no other instance is compared with.
    is_root: bool = False
    # What was read and written of objects among the arguments, if there are any.
    slots: SlotReads | None = None
    # Attributes of modules that were read as an :class:`OpenIndex`.
    indexes: dict[tuple[int, str], OpenIndex] = field(default_factory=dict)
    attributes: dict[tuple[int, str], AttributeRead] = field(default_factory=dict)
    # The code and scope of the functions that ran.
    functions: set[tuple[types.CodeType, int]] = field(default_factory=set)
    globals: dict[tuple[int, str], tuple[Any, Any]] = field(default_factory=dict)
    # The blocks that were called inside, each with its :class:`.evidence.Evidence`.
    nested: list[tuple[nn.Module, Any]] = field(default_factory=list)
    # The modules whose children or tensors were looked through.
    walked: dict[int, nn.Module] = field(default_factory=dict)
    closures: Closures = field(default_factory=Closures)
    _held: Snapshot = field(default_factory=Snapshot)  # what a block's attributes hold

    def of_block(self) -> Reads:
        """Returns an empty record, for a block that is called inside."""
        return Reads(self.contents, self.seen, self.owners)

    def absorb(self, inner: Reads) -> None:
        """Adds the reads of a block that ran inside."""
        # Where both read one place, the earlier read, of ``self``, counts and stays first.
        self.attributes = {**self.attributes, **inner.attributes, **self.attributes}
        self.functions |= inner.functions
        self.globals = {**self.globals, **inner.globals, **self.globals}
        self.walked |= inner.walked
        self.indexes |= inner.indexes
        self.closures.absorb(inner.closures)

    def knows(self, module: nn.Module, name: str) -> bool:
        """Whether a read of a module's attribute needs no note: known, or never noted."""
        if name in NOT_NOTED:
            if name in _CHILDREN:
                self.walked[id(module)] = module
            return True
        return (id(module), name) in self.attributes

    def attribute(self, module: nn.Module, name: str) -> None:
        """Notes that an attribute of a module was read; its state is kept as of the first read."""
        if self.knows(module, name):
            return
        where, value = find_attribute(module, name)
        self._attribute(module, name, where, value)
        self._found(value)

    def like(
        self, reads: Iterable[tuple[str, str, Where]], modules: Mapping[str, nn.Module]
    ) -> None:
        """Notes what an instance that shares a closure would have read: its Python does not run."""
        for path, name, where in reads:
            module = modules[path]
            if (id(module), name) not in self.attributes:
                state = module_state(module)
                held = {} if where == "class" else state[where] if where else state
                self._attribute(module, name, where, held.get(name, ABSENT))

    def _attribute(self, module: nn.Module, name: str, where: Where, value: Any) -> None:
        state = module_state(module)
        own = ABSENT if where == "class" else value
        if not isinstance(own, _KNOWN_BY_STRUCTURE):
            self.contents.look_into(own)
        frozen = ABSENT if self.is_root else snapshot(value)
        if not (self.is_root or isinstance(value, _KNOWN_BY_STRUCTURE)):
            # Attributes of the classes and modules that it leads to.
            known = len(self._held.holders)
            self._held.look_into(value)
            for holder in [*self._held.holders.values()][known:]:
                self._holder(holder, self.names())
        table = state if where in ("", "class") else state[where]
        self.attributes[id(module), name] = AttributeRead(module, table, own, frozen)

    def _holder(self, holder: Any, names: Iterable[str]) -> None:
        """Notes attributes of a class or module by name; of an object's class, plain data alone."""
        if id(holder) in self._held.classes:
            names = [name for name in names if type(look_up(holder, name)) in _PLAIN]
        self._named_attributes(holder, tuple(names), _MAX_OUTSIDE_DEPTH - 1)

    def _found(self, value: Any) -> None:
        """Refuses a value by which code may tell equal objects apart, such as ``id``."""
        self.contents.refuse_use(identity_leak_through(value))

    def function(self, frame: types.FrameType) -> None:
        """Notes that a Python function ran, and what its globals and captured variables hold."""
        code, scope = frame.f_code, frame.f_globals
        variables = frame.f_locals
        owner = _first_of(code, variables)
        if owner is not None and not is_library(scope.get("__name__")):
            self._method(owner, (*code.co_names, code.co_name))
        if code in _BYTES_CODES:
            self.contents.unreadable.append("reads os.environb")
        if code.co_freevars and code not in _ENVIRONMENT_CODES:
            self.closures.ran(frame)
        # Code that ran before reads the same names; its new object and variables are noted above.
        if (code, id(scope)) in self.functions:
            return
        self.contents.refuse_use(identity_leak_of(frame, owner))
        captured = [variables[name] for name in code.co_freevars if name in variables]
        if not leaks_by_call(frame):
            self.functions.add((code, id(scope)))
        # This code may name attributes of classes that earlier reads led to.
        for holder in self._held.holders.values():
            self._holder(holder, code.co_names)
        names, imports = globals_used(code), modules_imported(code)
        if "globals" in names:
            names = (*names, *texts_of(code))
        finds = "modules" in code.co_names and ("sys" in imports or sys in map(scope.get, names))
        if finds or not _IMPORTERS.isdisjoint(code.co_names):
            imports = (*imports, *self._modules_named(code, scope, owner))
        seen: _Seen = {}
        for name in names:
            if name in scope:
                self._outside(scope, name, code.co_names, 0, seen)
        for name in imports:
            self._found(sys.modules.get(name))
            self._named_attributes(sys.modules.get(name), code.co_names, 0, seen)
        for value in captured:
            # A cache that was not found outside is an argument, or made in the run; a generator in
            # one of its own methods captures it: ``any(x.is_full for x in self.layers)``.
            is_known = id(value) in self.owners or self.contents.has_met(value)
            if is_container(value) and not is_known:
                continue
            self._found(value)
            self._named_attributes(value, code.co_names, 0, seen)

    def _modules_named(self, code: types.CodeType, scope: Any, owner: Any) -> list[str]:
        """Returns modules that a function may import by name; refuses names that it computes."""
        own = [scope.get("__name__")] * ("__name__" in code.co_names)
        if "__module__" in code.co_names:
            own += [kind.__module__ for kind in type(owner).__mro__]
        found = [text for text in (*own, *texts_of(code)) if text in sys.modules]
        if not found:
            self.contents.refuse_use("sys.modules or an import, by a name that it computes")
        return found

    def places(self) -> list[tuple[Any, str]]:
        """Returns every (owner, name) outside the model that was looked up."""
        return [(owner, name) for (_, name), (owner, _) in self.globals.items()]

    def names(self) -> set[str]:
        """Returns every name that the functions which ran may look up, as code or as a string."""
        found: set[str] = set()
        for code, _ in self.functions:
            found.update(code.co_names, filter(str.isidentifier, texts_of(code)))
        return found

    def environment(self) -> list[str]:
        """Returns the strings that may name environment variables, if any variable was read."""
        if all(code not in _ENVIRONMENT_CODES for code, _ in self.functions):
            return []
        return sorted({text for code, _ in self.functions for text in texts_of(code)})

    def _method(self, owner: Any, names: tuple[str, ...]) -> None:
        """Notes what a method's object holds: a module's class, or an object seen outside."""
        # The method may be one of the object's operators, whatever name its code has.
        operators = tuple(operators_of(type(owner)))
        self._named_attributes(type(owner), operators, _MAX_OUTSIDE_DEPTH - 1)
        if isinstance(owner, nn.Module):
            self._named_attributes(type(owner), names, _MAX_OUTSIDE_DEPTH - 1)
        elif id(owner) in self.owners:
            self._named_attributes(owner, names, 0)

    def _outside(
        self, owner: Any, name: str, names: tuple[str, ...], depth: int, seen: _Seen
    ) -> None:
        value = look_up(owner, name)
        # Modules of PyTorch add classes to ``dispatch_table`` when they are imported, a compile
        # imports some, and ``copy.copy`` looks up only the class that it copies.
        if is_own_patch(value) or value is copyreg.dispatch_table:
            return
        if (id(owner), name) not in self.globals:
            self.globals[id(owner), name] = (owner, shallow_snapshot(value))
            self.owners.add(id(owner))
            if self.seen is not None:
                self.seen(owner, name, value)
            self._found(value)
        self._named_attributes(value, names, depth + 1, seen)

    def _library(
        self, module: types.ModuleType, names: tuple[str, ...], depth: int, seen: _Seen
    ) -> None:
        """Notes functions of a library, which get replaced, and plain data (``sys.argv``)."""
        for name in names:
            value = vars(module).get(name)
            if isinstance(value, types.ModuleType):
                if depth <= _MAX_LIBRARY_DEPTH:
                    self._named_attributes(value, names, depth + 1, seen)
            elif callable(value) or (type(value) in _DATA and value is not sys.modules):
                self._outside(module, name, (), _MAX_OUTSIDE_DEPTH, {})

    def _named_attributes(
        self, owner: Any, names: tuple[str, ...], depth: int, seen: _Seen | None = None
    ) -> None:
        # Enum members lead to their class and back, so a walk could go in circles.
        seen = {} if seen is None else seen
        if seen.get(id(owner), (_MAX_OUTSIDE_DEPTH + 1, owner))[0] <= depth:
            return
        seen[id(owner)] = (depth, owner)
        if isinstance(owner, types.ModuleType) and is_library(owner.__name__):
            self._library(owner, names, depth, seen)
        if depth < _MAX_OUTSIDE_DEPTH and may_hold_state(owner):
            for name in names:
                if look_up(owner, name) is not ABSENT:
                    self._outside(owner, name, names, depth, seen)


def look_up(owner: Any, name: str) -> Any:
    """Returns what a scope, module, class or object itself holds under a name."""
    if type(owner) is dict:
        return owner.get(name, ABSENT)
    state = getattr(owner, "__dict__", {})
    if name in state:
        return state[name]
    for base in owner.__mro__ if isinstance(owner, type) else ():
        if name in base.__dict__:
            return base.__dict__[name]
    for kind in type(owner).__mro__:  # of a class, its metaclass
        if kind is not type and name in kind.__dict__:
            value = kind.__dict__[name]
            # A getter in C shows state of the object; any other entry of a class is itself state.
            is_state = isinstance(value, _GETTERS_IN_C) and not name.startswith("__")
            return getattr(owner, name, ABSENT) if is_state else value
    return ABSENT


def snapshot(value: Any) -> Any:
    """Freezes a value, wherever it is held, to notice a later change."""
    return Freezer(on_tensor=lambda t, keys: Identity(t)).freeze(value)


def shallow_snapshot(value: Any) -> Any:
    """Freezes small data by content; functions and all other objects by identity."""
    if isinstance(value, contextvars.ContextVar):
        return ("context variable", shallow_snapshot(value.get(ABSENT)))
    if type(value) in _PLAIN or _is_data(value):
        return _OUTSIDE.freeze(value)
    if isinstance(value, types.FunctionType) and not is_library(value.__module__ or ""):
        defaults = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
        return tuple(map(Identity, (value, value.__code__, *defaults)))
    return Identity(value)


def same_shallow(value: Any, expected: Any) -> bool:
    """Whether a value still equals its :func:`shallow_snapshot`."""
    if isinstance(expected, Identity):
        return expected.target is value
    return bool(shallow_snapshot(value) == expected)


def _is_data(value: Any) -> bool:
    """Whether a value is an object of a user's class, or of a standard class for plain data."""
    kind = type(value)
    if kind in (types.SimpleNamespace, argparse.Namespace, threading.local, functools.partial):
        return True
    code = (nn.Module, torch.Tensor, type, types.ModuleType, types.FunctionType, types.MethodType)
    return not (isinstance(value, code) or is_library(kind.__module__)) and is_python_defined(kind)


def may_hold_state(value: Any) -> bool:
    """Whether the attributes of a value are Python state that a user's code may change."""
    if isinstance(value, types.ModuleType):
        return not is_library(value.__name__)
    if isinstance(value, type):
        return not is_library(value.__module__)
    if isinstance(value, types.FunctionType):
        return bool(value.__dict__)
    kind = type(value)
    if isinstance(value, _KNOWN_BY_STRUCTURE) or kind in _PLAIN:
        return False
    return is_python_defined(kind) or not is_library(kind.__module__)


def outside_name(owner: Any, name: str) -> str:
    """Names a global, or an attribute of something outside the model."""
    if type(owner) is dict:
        return f"the global {name}"
    return f"{getattr(owner, '__name__', type(owner).__name__)}.{name}"


def cell_reads(reads: Reads) -> list[tuple[types.CellType, Any, types.FunctionType]]:
    """Finds the closure cells of the functions that ran (code objects know only their names)."""
    found: list[tuple[types.CellType, Any, types.FunctionType]] = []
    for function in reads.closures.functions():
        for cell in function.__closure__ or ():
            found.append((cell, shallow_snapshot(cell_contents(cell)), function))
    return found


def _first_of(code: types.CodeType, variables: Mapping[str, Any]) -> Any:
    """Returns a function's first argument, which may be the object of a method."""
    if code.co_argcount:
        return variables.get(code.co_varnames[0])
    if code.co_flags & inspect.CO_VARARGS:  # as a wrapper takes it
        return next(iter(variables.get(code.co_varnames[code.co_kwonlyargcount], ())), None)
    return None


def operators_of(kind: type) -> set[str]:
    """Returns the methods of a class that Python calls without naming them, as ``__len__``."""
    return {
        name
        for base in kind.__mro__
        if not is_library(base.__module__)
        for name, value in vars(base).items()
        if name[:2] == name[-2:] == "__" and isinstance(value, types.FunctionType)
    }
