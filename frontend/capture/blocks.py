"""Chooses the module calls that capture may share: marked ones, none, or those that repeat.

``reuse="auto"`` does not touch the user's classes. Two modules are *alike* if their trees agree in
classes, names and parameter layouts. A module is a candidate if a module alike occurs elsewhere.
Whether it is large enough to be a block is measured when its first instance is traced; if not, its
nodes join the region around it. Candidates, like marked modules, are shared only if the evidence
agrees.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from typing import Any, Literal, TypeAlias

from torch import nn

from ...reuse.evidence.module_state import module_state
from ..marks import is_block
from .regions import Region, regions_inside

Reuse: TypeAlias = Literal["auto", "marked", "off"]
"""The modules that may share closures: marked and repeated ones, marked ones only, or none."""

# A module without sub-modules (a norm, an activation) is usually fused with its neighbours, which
# a closure of its own prevents.
_MIN_NODES = 4
_MIN_NODES_ALONE = 12
_MIN_NODES_SAVED = 16


class Blocks:
    """Decides which module calls are recorded as blocks: the instances of marked classes."""

    def wants(self, module: nn.Module, around: Region) -> bool:
        """Whether a call of this module, inside a region, may become a call on a closure."""
        return is_block(module)

    def pays(self, region: Region) -> bool:
        """Whether a block that has just been traced is worth a closure."""
        return True  # the user decided with the mark

    def keeps(self, region: Region) -> bool:
        """Whether a block that is called only once stays a closure."""
        return True

    def ran(self, module: nn.Module, num_nodes: int) -> None:
        """Called after a module that is not a block has run."""

    def differs(self, module: nn.Module) -> None:
        """Called when a module could not share the closure of a module alike."""


class NoBlocks(Blocks):
    """Makes no module a block."""

    def wants(self, module: nn.Module, around: Region) -> bool:
        """Returns False: no module is a block."""
        return False


class RepeatedBlocks(Blocks):
    """Makes blocks of marked modules and of modules that repeat, outermost first.

    A module inside a block is a block too if that saves enough even with the outer block shared.
    ``called_again`` has ids of modules that the forward calls repeatedly, though the tree has one.
    """

    def __init__(self, model: nn.Module, called_again: Collection[int] = ()) -> None:
        self._alike = AlikeModules(model)
        self._model = model
        self._called_again = called_again
        self._too_small: set[int] = set()
        self._different: set[int] = set()
        self._runs: dict[int, tuple[nn.Module, int, int]] = {}

    def wants(self, module: nn.Module, around: Region) -> bool:
        """Whether the module is marked, or repeats and was not found too small."""
        if is_block(module):
            return True
        if id(module) in self._called_again:
            return True
        kind = self._alike.kind(module)
        return kind is not None and kind not in self._too_small and self._repeats(kind, around) > 1

    def _repeats(self, kind: int, around: Region) -> int:
        """Returns how often modules of this kind would be traced if all outer blocks are shared."""
        inside, trusted = False, True
        region: Region | None = around
        while region is not None and region.parent is not None:
            outer = self._alike.kind(region.module)
            if region.module is not self._model:  # else it is only a part marked for recompute
                inside, trusted = True, trusted and outer not in self._different
            region = region.parent
        return self._alike.once[kind] if inside and trusted else self._alike.count[kind]

    def pays(self, region: Region) -> bool:
        """Whether a traced block saves enough; if not, modules alike are no blocks from now on."""
        module = region.module
        kind = self._alike.kind(module)
        if is_block(module) or region.recompute or id(module) in self._called_again or kind is None:
            return True
        assert region.parent is not None
        repeats = self._repeats(kind, region.parent)
        if _pays(module, region.num_operators(), repeats):
            return True
        self._too_small.add(kind)
        return False

    def ran(self, module: nn.Module, num_nodes: int) -> None:
        """Counts the runs of a module, to find one that is called repeatedly (shared layers)."""
        if module_state(module)["_modules"]:
            _, runs, _ = self._runs.get(id(module), (module, 0, 0))
            self._runs[id(module)] = (module, runs + 1, num_nodes)

    def differs(self, module: nn.Module) -> None:
        """From now on counts repeats inside such modules as if they were not shared."""
        kind = self._alike.kind(module)
        if kind is not None:
            self._different.add(kind)

    def run_again(self) -> frozenset[int]:
        """Returns ids of the outermost modules that ran repeatedly and would pay as blocks."""
        found = {
            key: module
            for key, (module, runs, nodes) in self._runs.items()
            if runs > 1 and _pays(module, nodes, runs)
        }
        inner = {id(m) for outer in found.values() for m in outer.modules() if m is not outer}
        return frozenset(found.keys() - inner)

    def keeps(self, region: Region) -> bool:
        """Whether a block that is called only once stays a closure: if the user marked it."""
        return bool(region.recompute) or is_block(region.module)


def _pays(module: nn.Module, num_nodes: int, num_calls: int) -> bool:
    is_alone = not module_state(module)["_modules"]
    return pays(num_nodes, num_calls, _MIN_NODES_ALONE if is_alone else _MIN_NODES)


def pays(num_nodes: int, num_calls: int, least: int = _MIN_NODES) -> bool:
    """Whether a graph of this size, called this often, is worth a closure."""
    return num_nodes >= least and num_nodes * (num_calls - 1) >= _MIN_NODES_SAVED


class AlikeModules:
    """The kinds of modules in a tree (modules alike are one kind), and how often each occurs."""

    def __init__(self, model: nn.Module) -> None:
        self._kinds: dict[Any, int] = {}
        self._kind_of: dict[int, int] = {}
        modules: list[nn.Module] = []
        self._index(model, modules)
        # Instances of each kind in the whole tree.
        self.count = Counter(self._kind_of[id(m)] for m in modules if may_be_block(m))
        # The same, but what is inside a repeated kind is counted in its first instance only.
        self.once: Counter[int] = Counter()
        self._walk(model, set())

    def kind(self, module: nn.Module) -> int | None:
        """Returns the number of a module's kind, or None if it cannot be a block."""
        kind = self._kind_of.get(id(module))
        return kind if kind in self.count else None

    def _index(self, module: nn.Module, modules: list[nn.Module]) -> int:
        if id(module) in self._kind_of:
            return self._kind_of[id(module)]
        state = module_state(module)
        children = tuple(
            (name, self._index(child, modules))
            for name, child in state["_modules"].items()
            if child is not None
        )
        tensors = tuple(
            (name, None if t is None else (t.shape, t.dtype))
            for table in ("_parameters", "_buffers")
            for name, t in state[table].items()
        )
        key = (type(module), children, tensors)
        self._kind_of[id(module)] = self._kinds.setdefault(key, len(self._kinds))
        modules.append(module)
        return self._kind_of[id(module)]

    def _walk(self, module: nn.Module, seen: set[int]) -> None:
        for child in module_state(module)["_modules"].values():
            if child is None or id(child) in seen:
                continue
            seen.add(id(child))
            kind = self.kind(child)
            if kind is not None:
                self.once[kind] += 1
                if self.once[kind] > 1:
                    continue
            self._walk(child, seen)


def first_repeated(model: nn.Module) -> tuple[str, int] | None:
    """Returns the class of the outermost repeated module with sub-modules, and its count."""
    alike = AlikeModules(model)
    for module in model.modules():
        kind = alike.kind(module)
        if kind is not None and alike.count[kind] > 1 and module_state(module)["_modules"]:
            return type(module).__name__, alike.count[kind]
    return None


def may_be_block(module: nn.Module) -> bool:
    """Whether a module has a forward, and is not a basic one of ``torch.nn``."""
    cls = type(module)
    if cls.forward is nn.Module.forward:
        return False  # a container
    is_basic = cls.__module__.startswith("torch.nn.") and not module_state(module)["_modules"]
    return not is_basic


def dissolve(root: Region, regions: Collection[Region]) -> None:
    """Moves the nodes of uncalled ``regions`` into the regions around them."""
    for region in [root, *regions_inside(root)]:
        region.items = list(_without(region.items, regions))
    for region in regions_inside(root):
        while region.parent in regions and region.parent is not None:
            region.parent = region.parent.parent


def _without(items: Iterable[Any], regions: Collection[Region]) -> Iterator[Any]:
    for item in items:
        if isinstance(item, Region) and item in regions:
            yield from _without(item.items, regions)
        else:
            yield item
