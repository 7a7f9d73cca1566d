"""Folds a step for planning: each different closure once, and its tensors in slots.

All calls of a closure get the same plan, so the tensors that arrive at one of its inputs, or leave
one of its outputs, have one layout. They form a *slot*, with the tensors at each input or output
that they flow to. A parameter, what forward and backward read of it, and its gradient form one slot
as well. So the size of the planning problem does not depend on the number of layers.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
import torch.fx
from networkx.utils import UnionFind

from ...autodiff.training_program import StepProgram
from ...reuse.ir.leaf import flat_types
from ...reuse.ir.program import Call, Composite, Leaf, Pack, Program, Unpack, Value
from ...reuse.ir.rewrite import grouped
from ...reuse.ir.types import StructType, TensorType

Kind = Literal["parameter", "batch", "buffer", "result", "saved", "passed"]
"""Kinds of slots: parameters with their gradients; the batch; other inputs, and results that are
no gradients, both replicated; values saved for a backward; values passed from call to call."""


class Port(NamedTuple):
    """A flat input or output of a leaf, which is given by its position in :class:`Folded`."""

    leaf: int
    is_output: bool
    place: int


@dataclass(frozen=True, eq=False)
class Slot:
    """Tensors that have the same layout."""

    type: TensorType  # the type of each tensor
    kind: Kind  # where they come from or go to
    held: int  # how many of them are live at once
    names: tuple[str, ...]  # the names of parameters among them
    inputs: tuple[int, ...]  # their positions among the step's inputs


@dataclass(frozen=True, eq=False)
class Folded:
    """A folded step.

    Its ``leaves`` are the different ones, in the order of first calls, with their numbers of calls;
    ``slot_of`` has the position of each port's slot.
    """

    leaves: tuple[tuple[Leaf, int], ...]
    slots: tuple[Slot, ...]
    slot_of: Mapping[Port, int]


@dataclass
class _Flat:
    """The calls of a program's leaves, in order, with the numbers of their operands and results.

    Tensors in ``saved`` are packed into structs, for a backward. The calls that make a tensor, and
    that read it last, are in ``made`` and ``last``.
    """

    calls: list[tuple[Call, tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)
    types: list[TensorType] = field(default_factory=list)
    saved: set[int] = field(default_factory=set)
    made: dict[int, int] = field(default_factory=dict)
    last: dict[int, int] = field(default_factory=dict)

    def new(self, value: Value) -> tuple[int, ...]:
        """Numbers the tensors of a value."""
        first = len(self.types)
        self.types += flat_types([value.type])
        made = tuple(range(first, len(self.types)))
        if isinstance(value.type, StructType):
            self.saved.update(made)
        return made

    def run(self, program: Program, operands: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """Adds the calls of a program on some tensors; returns its output tensors."""
        env = dict(zip(program.inputs, operands, strict=True))
        for call in program.calls:
            args = [env[a] for a in call.args]
            flat = tuple(t for a in args for t in a)
            closure = call.closure
            results: list[tuple[int, ...]]
            if isinstance(closure, Composite):
                results = self.run(closure.program, args)
            elif isinstance(closure, (Pack, Unpack)):
                self.saved.update(flat if isinstance(closure, Pack) else ())
                results = list(map(tuple, grouped(flat, [v.type for v in call.results])))
            else:
                results = [self.new(result) for result in call.results]
                made = tuple(t for r in results for t in r)
                self.made.update(dict.fromkeys(made, len(self.calls)))
                self.last.update(dict.fromkeys(flat, len(self.calls)))
                self.calls.append((call, flat, made))
            env.update(zip(call.results, results, strict=True))
        return [env[o] for o in program.outputs]

    def most_saved(self, tensors: Iterable[int]) -> int:
        """Returns how many of some tensors are saved at once, each until its last reader."""
        changes: Counter[int] = Counter()
        for one in self.saved.intersection(tensors):
            if one in self.made and one in self.last:
                changes[self.made[one]] += 1
                changes[self.last[one] + 1] -= 1
        return max(itertools.accumulate(changes[call] for call in sorted(changes)), default=0)


def folded_step(step: StepProgram) -> Folded:
    """Returns a decomposed step, folded."""
    num_batch, num_losses = sum(map(len, step.batch)), len(step.batch)
    parameters = {
        num_batch + i: source.name
        for i, source in enumerate(step.model)
        if source.tensor.requires_grad
    }
    gradients = {num_losses + i: num_batch + at for i, at in enumerate(step.gradients)}
    flat = _Flat()
    inputs = [flat.new(value) for value in step.program.inputs]
    # Structs among the inputs were not saved by this program.
    flat.saved.clear()
    outputs = flat.run(step.program, inputs)
    input_of = {t: i for i, tensors in enumerate(inputs) for t in tensors}
    leaves = _leaves(flat)
    sets, by_port = _sets(flat, {leaf: number for number, leaf in enumerate(leaves)})
    for output, target in gradients.items():
        sets.union(*outputs[output], *inputs[target])
    members: dict[int, list[int]] = defaultdict(list)
    for one in range(len(flat.types)):
        members[sets[one]].append(one)
    ports: dict[int, list[Port]] = defaultdict(list)
    for port, alike in by_port.items():
        ports[sets[alike[0]]].append(port)
    results = {t for i, ids in enumerate(outputs) if i not in gradients for t in ids}
    slots, slot_of = list[Slot](), dict[Port, int]()
    for root, own in members.items():
        given = tuple(input_of[t] for t in own if t in input_of)
        names = tuple(parameters[i] for i in given if i in parameters)
        kind = "parameter" if names else _kind(own, given, results, flat.saved, num_batch)
        held = len(names) or flat.most_saved(own)
        slot_of.update(dict.fromkeys(ports[root], len(slots)))
        slots.append(Slot(flat.types[root], kind, held, names, given))
    return Folded(tuple(leaves.items()), tuple(slots), slot_of)


def _sets(flat: _Flat, number: Mapping[Leaf, int]) -> tuple[UnionFind, dict[Port, list[int]]]:
    """Returns the sets of tensors that have one layout, and the tensors at each port."""
    sets, by_port = UnionFind(range(len(flat.types))), defaultdict[Port, list[int]](list)
    for call, taken, given in flat.calls:
        leaf = call.closure
        assert isinstance(leaf, Leaf)
        # A sum of gradients is planned with its operands.
        if leaf not in number:
            sets.union(*taken, *given)
            continue
        for is_output, tensors in ((False, taken), (True, given)):
            for place, one in enumerate(tensors):
                by_port[Port(number[leaf], is_output, place)].append(one)
    for alike in by_port.values():
        sets.union(*alike)
    return sets, by_port


def _kind(
    tensors: Collection[int],
    inputs: Collection[int],
    results: set[int],
    saved: set[int],
    num_batch: int,
) -> Kind:
    """Returns the kind of a slot without parameters."""
    if inputs:
        return "batch" if max(inputs) < num_batch else "buffer"
    if not results.isdisjoint(tensors):
        return "result"
    return "passed" if saved.isdisjoint(tensors) else "saved"


def _leaves(flat: _Flat) -> Counter[Leaf]:
    """Counts the calls of each leaf that is planned."""
    counts: Counter[Leaf] = Counter()
    for call, _, _ in flat.calls:
        assert isinstance(call.closure, Leaf)
        # Closures that sum gradients of micro-batches are called for many parameters of one shape,
        # which need not have one layout: each sum has the layout of its operands.
        if [node.target for node in call.closure.nodes] != [torch.ops.aten.add.Tensor]:
            counts[call.closure] += 1
    return counts
