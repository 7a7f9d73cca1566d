"""What the model's Python read and wrote of the model's attributes while it ran."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from ...reuse.evidence.module_state import WHOLE, module_state, own_names, raw_attribute
from ...reuse.evidence.snapshot import Snapshot
from ...reuse.freeze import Freezer
from ...reuse.objects import ABSENT
from .regions import Template

_PLAIN_TYPES = (bool, int, float, str, type(None))
_MODULE_NAMES = frozenset((*dir(nn.Module), *vars(nn.Module())))
_EMPTY_MODULE = nn.Module().__dict__


class AttributeLog:
    """Attribute reads, to notice a later change at the call; writes, to undo them.

    Args:
        known: ``id`` of every module of the model.

    Attributes:
        reads: the table that holds each attribute that was read, its name, and its value then.
        whole_reads: modules' own tables that were read as a whole.
        contents: what the objects among the values held then.
    """

    def __init__(self, known: Collection[int]) -> None:
        self.reads: dict[tuple[int, str], tuple[dict[str, Any], str, Any]] = {}
        self.whole_reads: dict[int, dict[str, Any]] = {}
        self.contents = Snapshot()
        self._known = known
        self._writes: dict[tuple[int, str], tuple[nn.Module, str, Any]] = {}
        self._fresh: dict[int, nn.Module] = {}

    def read(self, module: nn.Module, name: str) -> None:
        """Remembers what an attribute holds."""
        key = (id(module), name)
        if name in _MODULE_NAMES or key in self.reads or id(module) not in self._known:
            return
        state = module_state(module)
        tables = (state, *(state[table] for table in ("_parameters", "_buffers", "_modules")))
        table = next((t for t in tables if name in t), state)
        value = table.get(name, ABSENT)
        if not isinstance(value, (torch.Tensor, nn.Module)):
            self.reads[key] = (table, name, value)
            self.contents.look_into(value)

    def read_all(self, module: nn.Module) -> None:
        """Remembers what all attributes of a module hold, and which there are."""
        if id(module) in self._known:
            self.whole_reads[id(module)] = module_state(module)
            for name in own_names(module_state(module)):
                self.read(module, name)

    def read_like(self, template: Template, modules: Mapping[str, nn.Module]) -> None:
        """Remembers what the attributes hold that an instance's Python would have read."""
        known = {path: id(module) in self._known for path, module in modules.items()}
        states = {path: module_state(module) for path, module in modules.items()}
        noted = self.reads
        for path, name, where in template.evidence.plain_reads:
            if name == WHOLE and known[path]:
                self.whole_reads[id(modules[path])] = states[path]
                continue
            key = (id(modules[path]), name)
            if name in _MODULE_NAMES or key in noted or not known[path]:
                continue
            table = states[path] if where in ("", "class") else states[path][where]
            value = ABSENT if where == "class" else table.get(name, ABSENT)
            noted[key] = (table, name, value)
            if type(value) not in _PLAIN_TYPES:
                self.contents.look_into(value)

    def is_noted(self, module: nn.Module, name: str) -> bool:
        """Whether a write needs no note: it is not the first, or the forward made the module."""
        return id(module) in self._fresh or (id(module), name) in self._writes

    def write(self, module: nn.Module, name: str) -> None:
        """Remembers an attribute's value before the first write."""
        if id(module) not in self._known and module_state(module).keys() == _EMPTY_MODULE.keys():
            self._fresh[id(module)] = module  # made by the forward itself
        else:
            self._writes[id(module), name] = (module, name, raw_attribute(module, name))

    def put_back(self) -> None:
        """Undoes all that the forward changed."""
        self.contents.put_back()
        self.undo_writes()

    def undo_writes(self) -> list[tuple[nn.Module, str, Any]]:
        """Puts written attributes back; returns the changed ones with what they held."""
        changed = []
        for module, name, before in self._writes.values():
            after = raw_attribute(module, name)
            if Freezer().freeze(after) == Freezer().freeze(before):
                continue
            changed.append((module, name, after))
            if inspect.getattr_static(type(module), name, None) is before or not _had_value(before):
                delattr(module, name)
            else:
                setattr(module, name, before)
        return changed


def is_plain(value: Any) -> bool:
    """Whether a value is a number, a text or None."""
    return type(value) in _PLAIN_TYPES


def _had_value(before: Any) -> bool:
    return type(before) is not object
