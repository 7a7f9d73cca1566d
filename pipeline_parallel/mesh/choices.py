"""Lists what a plan can choose: options of groups of operators, with their layouts and seconds.

An item is an operator, or a slot between calls. Items between which it never pays to redistribute a
tensor form one group, for which one option is chosen: elementwise operators on equal shapes, and
views with the operators before or after them. So a matrix product between two views is planned like
one of three dimensions.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.fx

from ...reuse.errors import PlanError
from ...reuse.ir.costs import Rates, flops, is_free, tensors_of
from ...reuse.ir.operators import is_elementwise
from ...reuse.ir.program import outputs_of
from .folding import Folded, Port, Slot
from .layouts import SUM, WHOLE, Axis, Layout, Layouts
from .torch_sharding_rules import Rules, Way


@dataclass(eq=False)
class Item:
    """An operator of a leaf, or a slot."""

    leaf: int  # position of the leaf in :class:`Folded`; -1 for a slot
    node: torch.fx.Node | None  # the operator; None for a slot
    slot: Slot | None  # the slot; None for an operator
    inputs: list[torch.Tensor | None]  # the operands; None for one that is not a tensor
    outputs: list[torch.Tensor]  # the results that are tensors
    ways: list[list[Way]]  # for each axis, the ways to compute it
    group: Group = field(init=False)  # the group that it belongs to

    @property
    def is_view(self) -> bool:
        """Whether it is an operator that only returns a view."""
        return self.node is not None and is_free(self.node)


@dataclass(frozen=True, eq=False)
class Edge:
    """A tensor from an output of one item to an operand of another, and how often a step has it."""

    source: Item
    output: int
    target: Item
    operand: int
    count: int

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor."""
        return self.source.outputs[self.output]

    @cached_property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.tensor.numel() * self.tensor.element_size()

    @cached_property
    def prefetches(self) -> bool:
        """Whether its collective can overlap with other work: that of a parameter or a gradient."""
        slots = (self.source.slot, self.target.slot)
        return any(slot is not None and slot.kind == "parameter" for slot in slots)


class Group:
    """Items for which one option is chosen. An option has a way for each item, on each axis."""

    def __init__(self, item: Item) -> None:
        self.items = [item]
        self.options: list[list[tuple[Way, ...]]] = [[(way,) for way in w] for w in item.ways]

    def __len__(self) -> int:
        return len(self.seconds)

    def finish(self, axes: Sequence[Axis], rates: Rates, counts: Sequence[int]) -> None:
        """Combines the options of all axes; leaves out those that no tensor could be sharded by."""
        # Rules are for a single axis. Axes interact only where two of them split one dimension.
        chosen = []
        for pick in itertools.product(*map(range, map(len, self.options))):
            combined = [self.options[axis][i] for axis, i in enumerate(pick)]
            if all(self._fits(combined, place, axes) for place in range(len(self.items))):
                chosen.append(pick)
        self._picks = np.array(chosen)
        seconds = np.zeros(len(chosen))
        for place, (item, count) in enumerate(zip(self.items, counts, strict=True)):
            if item.node is not None and not item.is_view:
                seconds += count * self._seconds(place, item, axes, rates)
        self.seconds = seconds

    def ways(self, option: int) -> list[tuple[Way, ...]]:
        """Returns, for each item, its way on each axis."""
        rows = [self.options[axis][i] for axis, i in enumerate(self._picks[option])]
        return list(zip(*rows, strict=True))

    def layouts(self, item: Item, number: int, *, is_output: bool) -> list[Layouts]:
        """Returns the layouts of a tensor of an item in each option."""
        place = self.items.index(item)
        columns = []
        for axis, options in enumerate(self.options):
            ways = [option[place] for option in options]
            row = [(w.outputs if is_output else w.inputs)[number] for w in ways]
            columns.append([row[i] for i in self._picks[:, axis]])
        return list(zip(*columns, strict=True))  # type: ignore[arg-type]

    def _fits(self, combined: Sequence[tuple[Way, ...]], place: int, axes: Sequence[Axis]) -> bool:
        if len(axes) == 1:
            return True
        item, ways = self.items[place], [options[place] for options in combined]
        at_rest = item.slot is not None and item.slot.kind == "parameter"
        tensors = [*item.inputs, *item.outputs]
        for tensor, *layouts in zip(tensors, *((*w.inputs, *w.outputs) for w in ways), strict=True):
            if tensor is not None and not _fits(tensor, layouts, axes, at_rest=at_rest):
                return False
        return True

    def _seconds(self, place: int, item: Item, axes: Sequence[Axis], rates: Rates) -> Any:
        assert item.node is not None
        tensors = [t for t in (*item.inputs, *item.outputs) if t is not None]
        sizes = np.array([float(t.numel() * t.element_size()) for t in tensors])
        work = np.ones(len(self._picks))
        shares = np.ones((len(self._picks), len(tensors)))
        for axis, options in enumerate(self.options):
            rows = []
            for option in options:
                layouts = [one for one in (*option[place].inputs, *option[place].outputs) if one]
                rows.append([1 / axes[axis].size if one.is_split else 1.0 for one in layouts])
            table = np.array(rows).reshape(len(options), len(tensors))
            picked = table[self._picks[:, axis]]
            shares *= picked
            # The operand or result that is split most says how much work a rank has.
            work *= picked.min(axis=1, initial=1.0)
        moved = shares @ sizes
        if is_elementwise(item.node):  # fused into a neighbour, most often
            moved = moved / 4
        dtype = item.outputs[0].dtype if item.outputs else torch.float32
        done = flops(item.node)
        flop_s = rates.seconds(done, 0, dtype)
        return np.maximum(work * flop_s, moved / rates.bytes_per_s)


def _fits(
    tensor: torch.Tensor, layouts: Sequence[Layout | None], axes: Sequence[Axis], *, at_rest: bool
) -> bool:
    """Whether several axes can split a tensor at once."""
    by_dim: dict[int, list[tuple[int, Layout]]] = defaultdict(list)
    for axis, one in zip(axes, layouts, strict=True):
        if one is not None and one.is_split:
            by_dim[one.dim].append((axis.size, one))
    for dim, splits in by_dim.items():
        if len(splits) < 2:
            continue
        factors = {one.factor for _, one in splits if one.factor > 1}
        if (at_rest and factors) or len(factors) > 1:
            # DTensor stores a dimension in parts on one axis alone, and parts of one number only.
            return False
        parts = math.prod(size for size, _ in splits) * max(factors, default=1)
        if tensor.shape[dim] % parts:
            return False
        # DTensor applies plain splits first, so they must divide the number of parts.
        plain = math.prod(size for size, one in splits if one.factor == 1)
        if any(factor % plain for factor in factors):
            return False
    return True


class Choices:
    """The groups of a folded step, the edges between them, and the operators without a rule.

    Parameters that the user fixed are ``pinned`` by name, to a layout along an axis.
    """

    def __init__(
        self,
        folded: Folded,
        axes: Sequence[Axis],
        rates: Rates,
        pinned: Mapping[str, tuple[int, Layout | None]] | None = None,
    ) -> None:
        self.folded = folded
        self._pinned = pinned or {}
        factors = tuple(_factors(folded))
        by_size = {axis.size: Rules(axis.size, factors) for axis in axes}
        self._rules = [by_size[axis.size] for axis in axes]
        self.slots = [self._slot_item(slot) for slot in folded.slots]
        self._by_node: dict[tuple[int, torch.fx.Node], Item] = {}
        edges = [edge for leaf in range(len(folded.leaves)) for edge in self._edges(leaf)]
        items = [*self.slots, *self._by_node.values()]
        self.unknown = sorted(set[str]().union(*(rules.unknown for rules in self._rules)))
        _prune(edges)
        for item in items:
            item.group = Group(item)
        _merge(edges)
        self.groups = list(dict.fromkeys(item.group for item in items))
        # A constant is whole on each rank, so its shards need no communication.
        self.edges = [
            edge
            for edge in edges
            if edge.source.group is not edge.target.group and not _is_constant(edge.source)
        ]
        for group in self.groups:
            group.finish(axes, rates, [self._count(item) for item in group.items])

    def items_of(self, leaf: int) -> dict[torch.fx.Node, Item]:
        """Returns the operators of a leaf."""
        return {node: item for (own, node), item in self._by_node.items() if own == leaf}

    def _count(self, item: Item) -> int:
        return 1 if item.leaf < 0 else self.folded.leaves[item.leaf][1]

    def _slot_item(self, slot: Slot) -> Item:
        tensor = slot.type.empty("meta")
        ways = []
        pins = {self._pinned.get(name) for name in slot.names} or {None}
        if len(pins) > 1:
            raise PlanError(
                f"Equal layers have one plan, and some of {', '.join(slot.names)} are pinned, or "
                "in another way. Pin them alike: lazyinline.shard takes the class, too."
            )
        (pin,) = pins
        for axis, rules in enumerate(self._rules):
            layouts = rules.layouts(tensor)
            if pin is not None and pin[0] == axis:
                layouts = [one for one in layouts if one == pin[1]]
            # Buffers stay plain tensors, and the user receives whole results.
            if slot.kind in ("buffer", "result"):
                layouts = layouts[:1]
            ways.append([Way((one,), (one,)) for one in layouts])
        return Item(-1, None, slot, [tensor], [tensor], ways)

    def _edges(self, number: int) -> Iterator[Edge]:
        """Makes the items of a leaf; yields its edges."""
        leaf, count = self.folded.leaves[number]
        made: dict[torch.fx.Node, tuple[Item, int]] = {}
        for index, entry in enumerate(leaf.entries):
            made[entry] = self.slots[self.folded.slot_of[Port(number, False, index)]], 0
        for node in leaf.nodes:
            if node.target is operator.getitem:
                # A getitem stands for an output of the operator before it.
                base, _ = made[node.args[0]]  # type: ignore[index]
                made[node] = base, _place(node)
                continue
            operands = node.all_input_nodes
            tensors = [t[0] if (t := tensors_of(n)) else None for n in operands]
            ways = [list(rules.ways(node)) for rules in self._rules]
            item = Item(number, node, None, tensors, tensors_of(node), ways)
            item.ways = [[way for way in w if _is_sensible(item, way)] for w in ways]
            self._by_node[number, node] = item
            made[node] = item, 0
            for operand, source in enumerate(operands):
                if tensors[operand] is not None:
                    yield Edge(*made[source], item, operand, count)
        for index, output in enumerate(outputs_of(leaf.module)):
            port = Port(number, True, index)
            if isinstance(output, torch.fx.Node) and port in self.folded.slot_of:
                slot = self.slots[self.folded.slot_of[port]]
                if made[output][0] is not slot:
                    yield Edge(*made[output], slot, 0, count)


def _is_constant(item: Item) -> bool:
    if item.slot is not None:
        return item.slot.kind == "buffer"
    return not any(tensor is not None for tensor in item.inputs)


def _is_sensible(item: Item, way: Way) -> bool:
    """Whether a way may pay: not if it only passes on a sum that could be reduced before."""
    partial = [
        tensor
        for tensor, one in zip(item.inputs, way.inputs, strict=True)
        if tensor is not None and one is not None and one.is_partial
    ]
    # A view passes sums on for free, and a bias (one dimension) may be added in fractions.
    return len(partial) != 1 or item.is_view or partial[0].dim() == 1


def _place(node: torch.fx.Node) -> int:
    """Returns the position, among the tensors of a result, of the one that a getitem takes."""
    base, index = node.args
    assert isinstance(base, torch.fx.Node) and isinstance(index, int)
    values = base.meta["val"]
    return sum(isinstance(value, torch.Tensor) for value in values[:index])


def _factors(folded: Folded) -> Iterator[tuple[int, int]]:
    """Yields sizes of dimensions that a view joins or splits, with the number of their parts."""
    found: dict[tuple[int, int], None] = {}
    for leaf, _ in folded.leaves:
        for node in leaf.nodes:
            if node.target in _VIEWS:
                ends = (node.all_input_nodes[0], node)
                before, after = (tuple(tensors_of(n)[0].shape) for n in ends)
                for long, short in ((before, after), (after, before)):
                    found.update(dict.fromkeys(_joined(long, short)))
    yield from found


_VIEWS = tuple(
    getattr(torch.ops.aten, name).default for name in ("view", "_unsafe_view", "reshape")
)


def _joined(long: Sequence[int], short: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yields, for each dimension that is several in a longer shape, its size and their first."""
    position = 0
    for size in short:
        start, product = position, 1
        while product < size and position < len(long):
            product *= long[position]
            position += 1
        if product != size:
            return
        # Heads at the end need no factor: the numbers within a head are never split.
        if position - start > 1 and long[start] > 1 and start + 2 < len(long):
            yield size, long[start]


def _prune(edges: Sequence[Edge]) -> None:
    """Removes ways with an operand whose layout no redistribution can make."""
    by_target: dict[Item, list[Edge]] = defaultdict(list)
    by_source: dict[Item, set[Item]] = defaultdict(set)
    for edge in edges:
        by_target[edge.target].append(edge)
        by_source[edge.source].add(edge.target)
    waiting = dict.fromkeys(by_target)
    while waiting:
        item = next(iter(waiting))
        del waiting[item]
        if item.slot is not None:
            continue
        for axis, ways in enumerate(item.ways):
            kept = [way for way in ways if _reachable(way, by_target[item], axis)]
            if len(kept) < len(ways):
                item.ways[axis] = kept
                waiting.update(dict.fromkeys(by_source[item]))


def _reachable(way: Way, edges: Sequence[Edge], axis: int) -> bool:
    for edge in edges:
        wanted = way.inputs[edge.operand]
        if wanted is None or not (wanted.is_partial or wanted.factor > 1):
            continue
        # A bias is added once: each rank adds a fraction.
        if wanted == SUM and edge.source.slot is not None and edge.tensor.dim() == 1:
            continue
        if all(w.outputs[edge.output] != wanted for w in edge.source.ways[axis]):
            return False
    return True


def _merge(edges: Sequence[Edge]) -> None:
    """Merges groups between which it never pays to redistribute a tensor."""
    # A merge may allow further merges, so edges are tried until nothing changes.
    changed = True
    while changed:
        changed = False
        uses: dict[tuple[Item, int], int] = defaultdict(int)
        for edge in edges:
            uses[edge.source, edge.output] += 1
        for edge in edges:
            source, target = edge.source.group, edge.target.group
            if source is not target and _is_one(edge, uses[edge.source, edge.output]):
                _join(source, target, edges)
                changed = True


def _is_one(edge: Edge, uses: int) -> bool:
    source, target = edge.source, edge.target
    if source.node is None or target.node is None:
        return False
    # A merge would drop options that make a partial sum, such as a matrix product's.
    if not any(one.is_partial for out, into in _layouts_at(edge) for one in out - into):
        if is_elementwise(source.node) and is_elementwise(target.node):
            return source.outputs[0].shape == target.outputs[0].shape
        if _follows(source) and _follows(target) and _loses_little(edge):
            return True
    if uses != 1:
        return False
    given = [
        {option[source.group.items.index(source)].outputs[edge.output] for option in options}
        for options in source.group.options
    ]
    taken = [
        {option[target.group.items.index(target)].inputs[edge.operand] for option in options}
        for options in target.group.options
    ]
    pairs = list(zip(given, taken, strict=True))
    if target.is_view and all(out <= into for out, into in pairs):
        return True
    only_views = all(item.is_view for item in source.group.items)
    return only_views and all(into <= out for out, into in pairs)


def _follows(item: Item) -> bool:
    """Whether an operator's results always have the layout of its operands (split, cat, slice)."""
    for ways in item.ways:
        for way in ways:
            layouts = {one for one in (*way.inputs, *way.outputs) if one is not None}
            if len(layouts - {WHOLE}) > 1 or (layouts != {WHOLE} and WHOLE in way.outputs):
                return False
    return bool(item.inputs)


def _loses_little(edge: Edge) -> bool:
    """Whether both ends allow the same layouts, but for splits of the numbers within a head."""
    # Heads come after rows and positions, so numbers within a head are dimension 3 at the earliest.
    last = max(edge.tensor.dim() - 1, 3)
    lost = (one for out, into in _layouts_at(edge) for one in out ^ into if one is not None)
    return not any(one.is_split and one.dim < last for one in lost)


def _layouts_at(edge: Edge) -> Iterator[tuple[set[Layout], set[Layout | None]]]:
    """Yields, for each axis, the layouts that the source can make and that the target can take."""
    for given, taken in zip(edge.source.ways, edge.target.ways, strict=True):
        yield {w.outputs[edge.output] for w in given}, {w.inputs[edge.operand] for w in taken}


def _join(source: Group, target: Group, edges: Sequence[Edge]) -> None:
    """Merges two groups; drops pairs of options with different layouts of a tensor between them."""
    between = [e for e in edges if {e.source.group, e.target.group} == {source, target}]
    groups = (source, target)

    def ends(group: Group) -> list[tuple[int, bool, int]]:
        return [
            (group.items.index(e.source), True, e.output)
            if e.source.group is group
            else (group.items.index(e.target), False, e.operand)
            for e in between
        ]

    places = [ends(group) for group in groups]
    joined = []
    for axis in range(len(source.options)):
        by_key: dict[Any, list[tuple[Way, ...]]] = defaultdict(list)
        for option in target.options[axis]:
            by_key[_at(option, places[1])].append(option)
        joined.append([a + b for a in source.options[axis] for b in by_key[_at(a, places[0])]])
    source.items += target.items
    source.options = joined
    for item in target.items:
        item.group = source


def _at(option: tuple[Way, ...], places: Sequence[tuple[int, bool, int]]) -> tuple[Any, ...]:
    return tuple((option[i].outputs if out else option[i].inputs)[n] for i, out, n in places)
