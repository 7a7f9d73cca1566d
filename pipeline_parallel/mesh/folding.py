"""Folds a step program: each different closure once, and its tensors grouped into slots.

All calls of a closure have the same plan, so tensors at one input or output of a closure have the
same layout: they are one *slot*, together with the tensors at each place that they flow to. A
parameter, the tensors that forward and backward get of it, and its gradient are one slot, too. The
size of the planning problem does not depend on the number of layers.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
import torch.fx
from networkx.utils import UnionFind

from ...autodiff.training_program import StepProgram
from ...reuse.ir.leaf import flat_types
from ...reuse.ir.program import Call, Closure, Composite, Leaf, Pack, Program, Unpack, Value
from ...reuse.ir.rewrite import grouped
from ...reuse.ir.types import StructType, TensorType

Kind = Literal["parameter", "batch", "buffer", "result", "saved", "passed"]
"""Kinds of slots: parameters and their gradients; the batch; further inputs, and results without
gradients, both replicated; values that a forward saves for a backward; values that one call passes
to another."""


class Port(NamedTuple):
    """A flat input or output of a role's closure."""

    role: int
    is_output: bool
    place: int


@dataclass(frozen=True, eq=False)
class Role:
    """The calls of one closure, which have one plan.

    Attributes:
        leaf: the closure.
        count: how often it runs in a step.
        name: for the printed plan.
    """

    leaf: Leaf
    count: int
    name: str


@dataclass(frozen=True, eq=False)
class Slot:
    """Tensors that have the same layout.

    Attributes:
        type: of each.
        kind: what they are.
        ports: the inputs and outputs of closures where they occur.
        held: how many of them are live at once.
        names: of the parameters.
        inputs: positions among the program's inputs.
    """

    type: TensorType
    kind: Kind
    ports: tuple[Port, ...]
    held: int
    names: tuple[str, ...]
    inputs: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Folded:
    """A step, folded.

    Attributes:
        roles: the different closures, in the order of their first call.
        slots: what flows between them.
        slot_of: the slot of each port.
    """

    roles: tuple[Role, ...]
    slots: tuple[Slot, ...]
    slot_of: Mapping[Port, int]


@dataclass
class _Flat:
    """The calls of a program's leaves, in order, with the tensors that they take and return."""

    calls: list[tuple[Call, tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)
    types: list[TensorType] = field(default_factory=list)
    saved: set[int] = field(default_factory=set)

    def new(self, value: Value) -> tuple[int, ...]:
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
                self.calls.append((call, flat, tuple(t for r in results for t in r)))
            env.update(zip(call.results, results, strict=True))
        return [env[o] for o in program.outputs]


def folded_step(step: StepProgram) -> Folded:
    """Returns a step folded: each different closure once."""
    num_batch = sum(map(len, step.batch))
    num_losses = len(step.batch)
    names = {
        num_batch + i: source.name
        for i, source in enumerate(step.model)
        if source.tensor.requires_grad
    }
    gradients = {num_losses + i: num_batch + at for i, at in enumerate(step.gradients)}
    return fold(step.program, names, gradients, range(num_batch))


def fold(
    program: Program,
    parameters: Mapping[int, str],
    gradients: Mapping[int, int],
    batch: Collection[int],
) -> Folded:
    """Folds a step.

    Args:
        program: after ``decompose``.
        parameters: names of the inputs that are parameters.
        gradients: for outputs that are gradients, the input that each belongs to.
        batch: the inputs that are the user's.
    """
    flat = _Flat()
    inputs = [flat.new(value) for value in program.inputs]
    # Structs among the inputs were not saved by this program.
    flat.saved.clear()
    outputs = flat.run(program, inputs)
    input_ids = {t: i for i, ids in enumerate(inputs) for t in ids}
    roles = _roles(flat)
    number: dict[Closure, int] = {leaf: i for i, leaf in enumerate(roles)}
    sets = UnionFind(range(len(flat.types)))
    by_port: dict[Port, list[int]] = defaultdict(list)
    for call, taken, given in flat.calls:
        # The result of a closure without a role (a sum of gradients) has its operands' layout.
        if call.closure not in number:
            sets.union(*taken, *given)
            continue
        for is_output, tensors in ((False, taken), (True, given)):
            for place, one in enumerate(tensors):
                by_port[Port(number[call.closure], is_output, place)].append(one)
    for alike in by_port.values():
        sets.union(*alike)
    for output, target in gradients.items():
        sets.union(*outputs[output], *inputs[target])
    members: dict[int, list[int]] = defaultdict(list)
    for one in range(len(flat.types)):
        members[sets[one]].append(one)
    ports: dict[int, list[Port]] = defaultdict(list)
    for port, alike in by_port.items():
        ports[sets[alike[0]]].append(port)
    held = _held(flat, set(input_ids))
    results = {t for i, ids in enumerate(outputs) if i not in gradients for t in ids}
    slots, slot_of = list[Slot](), dict[Port, int]()
    for root, own in members.items():
        given_as = tuple(input_ids[t] for t in own if t in input_ids)
        names = tuple(parameters[i] for i in given_as if i in parameters)
        kind, count = _kind(own, given_as, results, flat, batch), held(own)
        if names:
            kind, count = "parameter", len(names)
        slot_of.update(dict.fromkeys(ports[root], len(slots)))
        slots.append(Slot(flat.types[root], kind, tuple(ports[root]), count, names, given_as))
    return Folded(tuple(roles.values()), tuple(slots), slot_of)


def _kind(
    ids: Collection[int],
    given_as: Collection[int],
    results: set[int],
    flat: _Flat,
    batch: Collection[int],
) -> Kind:
    if given_as:
        return "batch" if all(i in batch for i in given_as) else "buffer"
    if not results.isdisjoint(ids):
        return "result"
    return "saved" if not flat.saved.isdisjoint(ids) else "passed"


def _roles(flat: _Flat) -> dict[Leaf, Role]:
    counts: Counter[Leaf] = Counter()
    for call, _, _ in flat.calls:
        assert isinstance(call.closure, Leaf)
        # Closures that sum gradients of micro-batches are called for many parameters of one shape,
        # which need not have one layout: each sum has the layout of its operands.
        if [node.target for node in call.closure.nodes] != [torch.ops.aten.add.Tensor]:
            counts[call.closure] += 1
    return {leaf: Role(leaf, count, leaf.name) for leaf, count in counts.items()}


def _held(flat: _Flat, given: set[int]) -> Callable[[Sequence[int]], int]:
    """Returns a function that counts how many of some tensors are live at once."""
    made: dict[int, int] = {}
    last: dict[int, int] = {}
    for number, (_, taken, results) in enumerate(flat.calls):
        made.update(dict.fromkeys(results, number))
        last.update(dict.fromkeys(taken, number))

    def count(ids: Sequence[int]) -> int:
        changes: Counter[int] = Counter()
        for one in ids:
            if one in flat.saved and one not in given and one in last:
                changes[made[one]] += 1
                changes[last[one] + 1] -= 1
        most = present = 0
        for number in sorted(changes):
            present += changes[number]
            most = max(most, present)
        return most

    return count
