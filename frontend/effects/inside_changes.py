"""What a run of the forward changes in the model's modules, by whatever way, and how it is undone.

An attribute may be set past ``nn.Module``, in the module's ``__dict__`` itself, so the tables of
all modules are kept before the run and compared after it. What was set in that way before it was
read, each run sets anew: such a change is left.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import nn

from ...reuse.evidence.module_state import HOOK_TABLES, class_attribute, module_state, walk_modules
from ...reuse.evidence.reads import Reads
from ...reuse.evidence.snapshot import Snapshot
from ...reuse.freeze import Freezer
from ...reuse.kinds import is_iterator
from ...reuse.objects import ABSENT
from ..tracing.torch_tracing import user_line
from .outside_changes import find_fake

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
