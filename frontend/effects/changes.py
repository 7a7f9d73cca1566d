"""What a run of the forward changes, outside the model and in its modules, and how it is undone.

Outside are lists that hooks fill, counters, caches. What its Python can reach is noted before it
can be changed: what hooks hold, what the globals and captured variables of each function hold as it
begins, and what classes and modules hold. After the run, all of it is put back; the next run of the
model itself makes the change as eager does.

An attribute may be set past ``nn.Module``, in the module's ``__dict__`` itself, so the tables of
all modules are kept before the run and compared after it. What was set in that way before it was
read, each run sets anew: such a change is left.
"""

from __future__ import annotations

import functools
import gc
import operator
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from ...reuse.evidence.module_state import HOOK_TABLES, class_attribute, module_state, walk_modules
from ...reuse.evidence.reads import Reads, outside_name
from ...reuse.evidence.snapshot import Snapshot, is_constant, same_value
from ...reuse.freeze import Freezer
from ...reuse.kinds import is_iterator
from ...reuse.objects import ABSENT, cell_contents, is_library, is_own_patch
from ...reuse.torch_names import global_hook_tables
from ..tracing.torch_tracing import is_traced, user_line

_CACHED = type(functools.lru_cache(len))
_MAX_SEARCHED = 10_000
_WAYS_OUT = (type, types.ModuleType, types.FrameType, types.CodeType, nn.Module)
_SCOPE = "__builtins__"  # what a dictionary of globals has
_FORWARD_TABLES = ("_forward_hooks", "_forward_pre_hooks")


class OutsideChanges:
    """What the Python of one run found outside the model, as it was then.

    Attributes:
        contents: what the objects among it held.
        hooked: names the module whose forward hooks run, if one has any.
    """

    def __init__(self, model: nn.Module) -> None:
        self.contents = Snapshot(on_holder=self.meets)
        self.hooked = ""
        self._tables: dict[int, tuple[Any, Mapping[str, Any], dict[str, Any]]] = {}
        self._cells: dict[int, tuple[types.CellType, str, Any]] = {}
        self._captured: dict[types.CodeType, dict[str, Any]] = {}
        self._nested: set[types.CodeType] = set()  # code of functions that the run itself makes
        self._ran: set[types.CodeType] = set()
        self._caches: dict[int, tuple[Any, Any]] = {}
        for path, module in walk_modules(model):
            for table in _FORWARD_TABLES:
                for hook in module_state(module).get(table, {}).values():
                    self.hooked = self.hooked or f"{path or 'the model'} ({type(module).__name__})"
                    self._hold(hook)
        for hooks in global_hook_tables("forward"):
            for hook in hooks.values():
                self._hold(hook)

    def _hold(self, hook: Any) -> None:
        """Notes what a hook that was there before the run holds."""
        self.contents.look_into(hook)
        for function in _functions_of(hook):
            for name, cell in zip(
                function.__code__.co_freevars, function.__closure__ or (), strict=True
            ):
                self._cells[id(cell)] = (cell, name, cell_contents(cell))
                self.contents.look_into(cell_contents(cell))

    def is_given(self, argument: Any) -> None:
        """Notes what an argument holds, to any depth: the forward may write there."""
        self.contents.look_into(argument)

    def found(self, owner: Any, name: str, value: Any) -> None:
        """Notes what a name outside the model stands for, the first time it is looked up."""
        is_plain = type(value) in (list, dict, set)
        if is_plain or not _is_known(owner):
            self._look_into(value)
        if type(owner) is dict or isinstance(owner, (type, types.ModuleType)):
            self.meets(owner)

    def meets(self, owner: Any) -> None:
        """Notes what a scope, class or Python module holds before code can write there."""
        if id(owner) not in self._tables and not _is_known(owner):
            table: Any = owner if type(owner) is dict else vars(owner)
            known = {key: held for key, held in table.items() if not is_own_patch(held)}
            self._tables[id(owner)] = (owner, table, known)

    def began(self, frame: types.FrameType) -> None:
        """Notes what the variables that a function captured hold as it begins."""
        code = frame.f_code
        if code not in self._ran:
            self._ran.add(code)
            self._nested.update(c for c in code.co_consts if isinstance(c, types.CodeType))
        if not code.co_freevars or code in self._nested:
            return
        variables = frame.f_locals
        held = {name: variables[name] for name in code.co_freevars if name in variables}
        self._captured.setdefault(code, held)
        for value in held.values():
            self._look_into(value)

    def _look_into(self, value: Any) -> None:
        if is_cache(value):
            self._caches.setdefault(id(value), (value, value.cache_info()))
        self.contents.look_into(value)

    def ended(self, reads: Reads) -> None:
        """Looks at the functions that ran, once their frames have ended."""
        if not self._captured:
            return
        reads.closures.let_go()
        functions: dict[types.CodeType, list[types.FunctionType]] = {}
        for function in reads.closures.functions():
            functions.setdefault(function.__code__, []).append(function)
        for code, before in self._captured.items():
            for function in functions.get(code, [])[:2]:
                if len(functions[code]) > 1:
                    break  # whose variables they were is not known
                cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
                for name, cell in cells:
                    if name in before:
                        self._cells.setdefault(id(cell), (cell, name, before[name]))

    def put_back(self, names: set[str]) -> tuple[str, Callable[[], None], list[Any]]:
        """Undoes every change.

        Args:
            names: those that the code which ran speaks of; other names are others' business.

        Returns:
            What was changed, or an empty text; what makes the changes again; and the new values.
        """
        changes = list(self._changes(names))
        new = [*self.contents.changed_values(), *(now for *_, now in changes)]
        contents_again = self.contents.put_forward()
        what = self.contents.put_back()
        for _, put, before, _ in changes:
            put(before)
        what = f"{what} that it is given or finds outside the model" if what else ""
        what = changes[0][0] if changes else what

        def again() -> None:
            contents_again()
            for _, put, _, now in changes:
                put(now)

        return what, again, new

    def caches_used(self) -> list[Any]:
        """Returns the function caches that were asked."""
        return [cache for cache, before in self._caches.values() if cache.cache_info() != before]

    def empty_caches(self) -> torch.Tensor | None:
        """Empties function caches that hold a tensor of a trace; returns one of those."""
        found = None
        for cache, _ in self._caches.values():
            held = find_fake(gc.get_referents(cache))
            if held is not None:
                found = held
                cache.cache_clear()
        return found

    def _changes(self, names: set[str]) -> Iterator[tuple[str, Callable[[Any], None], Any, Any]]:
        """Yields what was bound anew: its name, how it is put, and its values before and now."""
        for cell, name, before in self._cells.values():
            now = cell_contents(cell)
            if not same_value(now, before):
                yield f"the captured variable {name}", _putting_cell(cell), before, now
        for owner, table, known in self._tables.values():
            if len(table) == len(known) and all(map(_is_same, table.values(), known.values())):
                continue
            for name in names:
                now, before = table.get(name, ABSENT), known.get(name, ABSENT)
                if not same_value(now, before):
                    yield outside_name(owner, name), _putting(owner, name), before, now


def is_cache(value: Any) -> bool:
    """Whether a value is a function behind a cache."""
    return type(value) is _CACHED


def find_fake(values: Iterable[Any]) -> torch.Tensor | None:
    """Returns a tensor of a trace that some values hold, however they hold it, if there is one.

    What all of Python can be reached through is not looked into, nor is a module.
    """
    todo, seen = list(values), set[int]()
    while todo and len(seen) < _MAX_SEARCHED:
        value = todo.pop()
        if is_constant(value) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            if is_traced(value):
                return value
            todo += vars(value).values()
        elif isinstance(value, types.FunctionType):
            todo += [value.__closure__, value.__defaults__, value.__kwdefaults__, vars(value)]
        elif not isinstance(value, _WAYS_OUT) and not (type(value) is dict and _SCOPE in value):
            todo += gc.get_referents(value)
    return None


def _is_same(now: Any, before: Any) -> bool:
    return now is before


def _functions_of(hook: Any) -> Iterator[types.FunctionType]:
    todo = [hook]
    while todo:
        value = todo.pop()
        if isinstance(value, types.FunctionType):
            yield value
            todo.append(getattr(value, "__wrapped__", None))
        elif isinstance(value, types.MethodType):
            todo.append(value.__func__)
        elif hasattr(value, "func"):
            todo.append(value.func)


def _is_known(owner: Any) -> bool:
    """Whether an owner is a library's, where no model writes."""
    name = _module_name(owner)
    return is_library(name) or str(name).partition(".")[0] == "numpy"


def _module_name(owner: Any) -> Any:
    if type(owner) is dict:
        return owner.get("__name__")
    if isinstance(owner, types.ModuleType):
        return owner.__name__
    return getattr(owner if isinstance(owner, type) else type(owner), "__module__", "")


def _putting(owner: Any, name: str) -> Callable[[Any], None]:
    def put(value: Any) -> None:
        if type(owner) is dict:
            owner.pop(name, None) if value is ABSENT else owner.__setitem__(name, value)
        elif value is not ABSENT:
            setattr(owner, name, value)
        elif name in vars(owner):
            delattr(owner, name)

    return put


def _putting_cell(cell: types.CellType) -> Callable[[Any], None]:
    def put(value: Any) -> None:
        if value is ABSENT:
            del cell.cell_contents
        else:
            cell.cell_contents = value

    return put


_TABLES = ("_parameters", "_buffers", "_modules", *HOOK_TABLES)
_NEW_STATE = nn.Module().__dict__
_PLAIN_TYPES = (bool, int, float, str, type(None))


class Change(NamedTuple):
    """An attribute that a run changed: what a table held under its name, and holds since."""

    module: nn.Module
    table: dict[Any, Any]
    name: Any
    before: Any
    now: Any

    def undo(self) -> None:
        """Puts back what was held before."""
        _put(self.table, self.name, self.before)

    def redo(self) -> None:
        """Makes the change again."""
        _put(self.table, self.name, self.now)

    def may_settle(self) -> bool:
        """Whether this may be noted once and for all: plain data, or what a property caches."""
        cached = isinstance(
            class_attribute(type(self.module), self.name), functools.cached_property
        )
        return is_plain(self.now) or (cached and find_fake([self.now]) is None)


class InsideChanges:
    """What the modules that one run meets held before it.

    Args:
        model: the model.
        on_class: told of each class met, of a module or an attribute: code may write there.

    Attributes:
        contents: what the objects among the attributes that were read held then.
        met: the modules outside the model's tree whose attributes were read, by ``id``.
    """

    def __init__(self, model: nn.Module, on_class: Callable[[Any], None]) -> None:
        self.contents = Snapshot(on_holder=on_class)
        self._on_class = on_class
        self.met: dict[int, nn.Module] = {}
        self._made: dict[int, nn.Module] = {}
        self._written: dict[tuple[int, Any], str] = {}
        self._before: dict[int, tuple[nn.Module, list[tuple[dict[Any, Any], dict[Any, Any]]]]] = {}
        for _, module in walk_modules(model):
            self._note(module)

    def meets(self, module: nn.Module) -> None:
        """Notes a module before it is read or changed, unless the run itself made it."""
        if id(module) in self._before or id(module) in self._made:
            return
        if _is_empty(module):
            self._made[id(module)] = module
        else:
            self.met[id(module)] = module
            self._note(module)

    def writes(self, module: nn.Module, name: str) -> None:
        """Notes that an attribute is set; a module that has none yet is the run's own."""
        self._written.setdefault((id(module), name), user_line())
        self.meets(module)

    def line_of(self, change: Change) -> str:
        """Returns where an attribute was set; "" where that was done past ``nn.Module``."""
        return self._written.get((id(change.module), change.name), "")

    def _note(self, module: nn.Module) -> None:
        self._on_class(type(module))
        state = module_state(module)
        tables = [state, *(state[name] for name in _TABLES if name in state)]
        self._before[id(module)] = (module, [(table, dict(table)) for table in tables])

    def put_back(self, reads: Reads) -> list[Change]:
        """Undoes every change that another run would make anew, and returns them.

        Args:
            reads: what the run read.
        """
        changes = [change for change in self._changes() if self._counts(change, reads)]
        self._before.clear()
        for change in changes:
            change.undo()
        return changes

    def _changes(self) -> Iterator[Change]:
        for module, tables in self._before.values():
            for table, before in tables:
                for name in () if _same_entries(table, before) else {**before, **table}:
                    held, now = before.get(name, ABSENT), table.get(name, ABSENT)
                    if now is not held and Freezer().freeze(now) != Freezer().freeze(held):
                        yield Change(module, table, name, held, now)

    def _counts(self, change: Change, reads: Reads) -> bool:
        key = (id(change.module), change.name)
        read = reads.attributes.get(key)
        was_other = read is not None and read.value is not change.now
        # An iterator that each run makes anew is no state (refuse_iterators sees to the others).
        if was_other and is_iterator(change.before) and is_iterator(change.now):
            was_other = False
        state = module_state(change.module)
        is_hook = any(state.get(name) is change.table for name in HOOK_TABLES)
        is_set = key in self._written or is_hook
        return is_set or was_other or find_fake([change.now]) is not None


def _is_empty(module: nn.Module) -> bool:
    """Whether a module has no attributes yet but those that every module has, or not even these.

    It is met first where ``nn.Module.__init__`` reads of it.
    """
    state = module_state(module)
    return state.keys() <= _NEW_STATE.keys() and not any(map(state.get, _TABLES))


def _put(table: dict[Any, Any], name: Any, value: Any) -> None:
    if value is ABSENT:
        table.pop(name, None)
    else:
        table[name] = value


def _same_entries(table: dict[Any, Any], before: dict[Any, Any]) -> bool:
    """Whether a dictionary has the very entries that it had, in their order."""
    if len(table) != len(before) or [*table] != [*before]:
        return False
    return all(map(operator.is_, table.values(), before.values()))


def is_plain(value: Any) -> bool:
    """Whether a value is a number, a text or None."""
    return type(value) in _PLAIN_TYPES
