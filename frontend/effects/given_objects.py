"""Objects that blocks are given, such as a cache: who reads and writes which of their parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any

import torch
from torch import nn

from ...reuse import torch_pytree
from ...reuse.evidence.module_state import Places, module_state
from ...reuse.evidence.reads import Reads
from ...reuse.evidence.slots import Index, SlotReads, Step
from ...reuse.open_index import OpenIndex, is_index, told, untold
from ..tracing.torch_tracing import is_fake
from ..tracing.watched_objects import SeenDict, SeenList, is_watched, original_of

_LOOK_ALIKES: dict[type, Any] = {list: SeenList, dict: SeenDict}


class GivenObjects:
    """Tells the blocks that are being traced what happens to the objects that they were given.

    Args:
        places: the modules of the model.
        readers: returns the blocks that are being traced, inner before outer; none while what runs
            is not the model's doing.
        quietly: what runs inside is not.

    Attributes:
        is_open: whether blocks get indexes and look-alikes; without, no block is given an object.
        was_used: whether one did: what then fails may do without.
    """

    def __init__(
        self,
        places: Places,
        readers: Callable[[], Iterable[SlotReads]],
        quietly: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._places = places
        self._readers = readers
        self._quietly = quietly
        self._indexes: dict[tuple[int, str], OpenIndex] = {}
        self._owners: dict[int, Index] = {}
        self.is_open = True
        self.was_used = False

    def flatten(self, arguments: Any) -> tuple[list[Any], torch_pytree.TreeSpec]:
        """Flattens a block's arguments down to the objects whose parts are watched."""
        leaves, outer = torch_pytree.flatten_outer(arguments)
        objects = [leaf for leaf in leaves if torch_pytree.is_container(leaf)]
        if not objects or (self.is_open and all(is_watched(type(x)) for x in objects)):
            return leaves, outer
        return torch_pytree.flatten(arguments)

    def reads_of(self, leaves: Sequence[Any]) -> SlotReads | None:
        """Returns what takes up what a block does to the objects among its arguments, if any."""
        given = {i: leaf for i, leaf in enumerate(leaves) if torch_pytree.is_container(leaf)}
        if not given or not self.is_open:
            return None
        self.was_used = True
        return SlotReads(given, torch_pytree.containers(list(given.values())))

    # ---- numbers that are only indexes ---------------------------------------------------

    @cached_property
    def _varying(self) -> set[tuple[type, str]]:
        """Which attributes are whole numbers that tell the instances of a class apart."""
        found: dict[tuple[type, str], set[int]] = {}
        for _, module in self._places:
            for name, value in module_state(module).items():
                if type(value) is int:
                    found.setdefault((type(module), name), set()).add(value)
        most = len(self._places)
        return {
            k for k, seen in found.items() if len(seen) > 1 and 0 <= min(seen) <= max(seen) < most
        }

    def number(self, module: nn.Module, name: str, value: int, reads: Reads) -> Any:
        """Returns what code gets that reads a whole number of a module."""
        known = self._indexes.get((id(module), name))
        if reads.slots is None or (type(module), name) not in self._varying:
            told(known)
            return value
        if known is None:
            known = self._indexes[id(module), name] = OpenIndex(value)
            self._owners[id(known)] = Index(module, name)
        if untold(known) != value or module_state(module).get(name) is not value:
            return told(known)
        reads.indexes[id(module), name] = known
        return known

    # ---- what is told of watched objects; see ObjectWatcher ------------------------------

    def watches(self) -> bool:
        """Whether a block that was given objects is being traced."""
        return any(True for _ in self._readers())

    def found(self, holder: Any, step: Step, value: Any) -> Any:
        """Notes what was read; lists and dictionaries are read through a look-alike."""
        knowing = [reader for reader in self._readers() if reader.knows(holder)]
        if not knowing:
            return value
        is_container, is_table = torch_pytree.is_container(value), type(value) in _LOOK_ALIKES
        with self._quietly():
            for reader in knowing:
                if is_container and not is_watched(type(value)):
                    reader.refuse(f"it is given a {type(value).__qualname__} with code of its own")
                if isinstance(value, torch.Tensor) and not is_fake(value):
                    reader.refuse("it is given an object that holds a tensor from outside")
                reader.read(holder, step, value, is_container or is_table)
        return _LOOK_ALIKES[type(value)](value, self) if is_table else value

    def writes(self, holder: Any, step: Step, value: Any) -> Any:
        """Notes that something is written."""
        value = original_of(told(value))
        is_object = torch_pytree.is_container(value) or type(value) in _LOOK_ALIKES
        for reader in self._readers():
            if is_object and reader.knows(holder):
                reader.refuse(f"it puts a {type(value).__qualname__} into an argument")
            reader.write(holder, step)
        return value

    def key(self, key: Any) -> Step | None:
        """Returns the step that the key of an item is, if it is one place."""
        if is_index(key) and id(key) in self._owners:
            return "index", self._owners[id(key)]
        return ("item", key) if type(key) in (int, str) else None

    def whole(self, holder: Any) -> None:
        """Notes that what happens to an object is not told step by step."""
        for reader in self._readers():
            if reader.knows(holder):
                reader.refuse(f"it uses a {type(holder).__qualname__} of an argument as a whole")
