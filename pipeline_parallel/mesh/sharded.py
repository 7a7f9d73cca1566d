"""A program of global shapes becomes this rank's program of local shapes, once per closure.

Layouts flow through the calls from the inputs on. A leaf that is called with other layouts, or with
another plan, is another sharded leaf; blocks that are called alike stay calls of one. What a leaf
gathers first is started one call earlier, and what it hands out reduced is waited for later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.fx
from torch.distributed.device_mesh import DeviceMesh

from ...autodiff.traces.torch_make_fx import Decompositions
from ...reuse.errors import PlanError
from ...reuse.ir.leaf import flat_types
from ...reuse.ir.program import (
    Call,
    Closure,
    Composite,
    Leaf,
    Pack,
    Program,
    Unpack,
    Value,
    tensor_type,
)
from ...reuse.ir.rewrite import grouped
from ...reuse.ir.types import StructType, TensorType, Type
from ...reuse.torch_names import RESHAPES, module_of
from .plan import LeafPlan, NodeLayouts, Placements
from .split import Part, Schedule, in_closure, inlined, opened, split_at_collectives
from .torch_collectives import with_own_collectives
from .torch_sharding import local_graph, local_type, replicated

_ATEN = torch.ops.aten
_ADD, _EMBEDDING = _ATEN.add.Tensor, _ATEN.embedding.default
_TRANSPOSES = (_ATEN.t.default, _ATEN.permute.default, _ATEN.transpose.int)
_PRODUCTS = (_ATEN.mm.default, _ATEN.addmm.default)


BUCKET_BYTES = 25 * 2**20
"""Gradients that are reduced together, at least: ``bucket_cap_mb`` of PyTorch's data parallel."""


@dataclass(frozen=True)
class Layout:
    """How one tensor lies.

    Attributes:
        held: as it is stored.
        used: what it is brought to before a leaf computes with it; None takes it as it is.
        result: of a weight, how the result of its module is to lie.
        given: whether it is there before the step begins, as parameters are.
    """

    held: Placements
    used: Placements | None = None
    result: Placements | None = None
    given: bool = False


Layouts = tuple[Layout, ...]
"""Of the tensors in one value."""


@dataclass(frozen=True)
class Flow:
    """This rank's part of a value, between two programs: its type, and how its tensors lie."""

    type: Type
    layouts: Layouts


@dataclass(frozen=True)
class Sharded:
    """A closure of local shapes, which parts its calls are, and how its results lie, flat."""

    closure: Closure
    parts: tuple[Part, ...]
    layouts: Layouts


@dataclass
class Sharder:
    """Makes the local closures of a program; each different one once.

    Args:
        mesh: where it runs.
        axes: the dimensions of the mesh, by the names of their process groups.
        decompositions: of a leaf's operators, where its kernels are compiled.
        plans: what is planned for calls of leaves.

    Attributes:
        whole: operators that every rank runs on whole tensors, since no rule splits them.
    """

    mesh: DeviceMesh
    axes: Mapping[str, str]
    decompositions: Callable[[Leaf], Decompositions]
    plans: Mapping[Call, LeafPlan] = field(default_factory=dict)
    whole: dict[str, None] = field(default_factory=dict)
    _made: dict[Any, Sharded] = field(default_factory=dict)

    def step(
        self, program: Program, inputs: Sequence[Layout], outputs: Sequence[Placements]
    ) -> Program:
        """Returns a step's local program.

        Args:
            program: whose values are tensors.
            inputs: how they lie.
            outputs: how the results are to lie.
        """
        everything = frozenset(range(len(program.outputs)))
        flows = [self.flow(v.type, one) for v, one in zip(program.inputs, inputs, strict=True)]
        local, layouts = self._program(program, flows, everything)
        last, calls, values = opened(local)
        moves = {
            index: value
            for index, (value, (layout,), target) in enumerate(
                zip(values, layouts, outputs, strict=True)
            )
            if layout.held != target
        }
        buckets = _buckets(calls, moves)
        results, schedule = list(values), Schedule(())
        for place, call in enumerate(calls):
            schedule.add(call)
            if bucket := buckets.get(place):
                whole = [program.outputs[i].type for i in bucket]
                ways = [(layouts[i][0].held, outputs[i]) for i in bucket]
                made = self._moved(whole, [moves[i].type for i in bucket], ways)
                brought = _scheduled(schedule, made, [moves[i] for i in bucket], "")
                for index, value in zip(bucket, brought, strict=True):
                    results[index] = value
        backward = in_closure(last.closure.name, schedule.finished(), set(results), last.path)
        before = local.calls[: local.calls.index(last)]
        return replace(local, calls=(*before, backward), outputs=tuple(results))

    def flow(self, type_: Type, layout: Layout) -> Flow:
        """Returns this rank's part of a tensor that lies so."""
        assert isinstance(type_, TensorType)
        return Flow(local_type(type_, self.mesh, layout.held), (layout,))

    def part(
        self, program: Program, inputs: Sequence[Flow], outputs: Sequence[Placements | None]
    ) -> tuple[Program, list[Flow]]:
        """Returns the local program of a part of a step, and what it hands on.

        Args:
            program: of global shapes.
            inputs: this rank's parts of what it takes.
            outputs: how the results are to lie; None takes one as it is made, and a sum is taken.
        """
        partial = frozenset(i for i, target in enumerate(outputs) if target is not None)
        local, layouts = self._program(program, inputs, partial)
        schedule, results = Schedule(local.inputs), list(local.outputs)
        for call in local.calls:
            schedule.add(call)
        for index, target in enumerate(outputs):
            if target is None or layouts[index][0].held == target:
                continue
            value, ways = results[index], [(layouts[index][0].held, target)]
            made = self._moved([program.outputs[index].type], [value.type], ways)
            (results[index],) = _scheduled(schedule, made, [value], "")
            layouts[index] = made.layouts
        local = replace(local, calls=schedule.finished(), outputs=tuple(results))
        flows = [Flow(value.type, lies) for value, lies in zip(results, layouts, strict=True)]
        return local, flows

    def _moved(
        self,
        whole: Sequence[Type],
        local: Sequence[Type],
        ways: Sequence[tuple[Placements, Placements]],
    ) -> Sharded:
        """Returns what brings tensors from one layout to another, together."""
        key = ("moved", *whole, *local, *ways)
        if key not in self._made:
            graph = torch.fx.Graph()
            names = tuple(f"x{i}" for i in range(len(whole)))
            graph.output(tuple(map(graph.placeholder, names)))
            leaf = Leaf("gradients", module_of(graph), (*whole,), (*whole,), names, "aten")
            plan = LeafPlan(outputs=tuple(target for _, target in ways))
            layouts = tuple(Layout(held) for held, _ in ways)
            self._made[key] = self._leaf(leaf, plan, tuple(local), layouts, frozenset())
        return self._made[key]

    def _program(
        self,
        program: Program,
        inputs: Sequence[Flow],
        partial: frozenset[int],
    ) -> tuple[Program, list[Layouts]]:
        """Returns the local program, and how its results lie.

        ``partial`` are results whose sums over ranks the caller takes.
        """
        env: dict[Value, tuple[Value, Layouts]] = {}
        for value, flow in zip(program.inputs, inputs, strict=True):
            env[value] = (Value(flow.type, value.hint), flow.layouts)
        local_inputs = tuple(env[v][0] for v in program.inputs)
        open_values = _values_that_may_be_partial(program, partial)
        schedule = Schedule(local_inputs)
        for call in program.calls:
            args = [env[v] for v in call.args]
            may = frozenset(i for i, v in enumerate(call.results) if v in open_values)
            made = self._call(call, args, may)
            results = _scheduled(schedule, made, [v for v, _ in args], call.path, call)
            flat = iter(made.layouts)
            for value, result in zip(call.results, results, strict=True):
                layouts = tuple(next(flat) for _ in flat_types([result.type]))
                env[value] = (result, layouts)
        outputs = tuple(env[v][0] for v in program.outputs)
        local = replace(
            program, inputs=local_inputs, calls=schedule.finished(), outputs=outputs, sources=()
        )
        return local, [env[v][1] for v in program.outputs]

    def _call(
        self, call: Call, args: Sequence[tuple[Value, Layouts]], partial: frozenset[int]
    ) -> Sharded:
        closure = call.closure
        types = tuple(v.type for v, _ in args)
        layouts = tuple(layout for _, flat in args for layout in flat)
        if isinstance(closure, Pack):
            return Sharded(Pack(StructType(types)), (), layouts)
        if isinstance(closure, Unpack):
            (struct,) = types
            assert isinstance(struct, StructType)
            return Sharded(Unpack(struct), (), layouts)
        plan = self.plans.get(call, LeafPlan())
        nodes = frozenset(plan.nodes.items())
        key = (closure, types, layouts, partial, plan.inputs, plan.outputs, nodes)
        if key not in self._made:
            if isinstance(closure, Leaf):
                flat_partial = _flat_positions(closure.output_types, partial)
                self._made[key] = self._leaf(closure, plan, types, layouts, flat_partial)
            else:
                self._made[key] = self._composite(closure, args, partial)
        return self._made[key]

    def _composite(
        self,
        closure: Composite,
        args: Sequence[tuple[Value, Layouts]],
        partial: frozenset[int],
    ) -> Sharded:
        # The strides of an operand come from whoever made it, not from its layout alone.
        flows = [Flow(value.type, layouts) for value, layouts in args]
        body, results = self._program(closure.program, flows, partial)
        return Sharded(
            Composite(closure.name, body, closure.input_names),
            (),
            tuple(layout for flat in results for layout in flat),
        )

    def _leaf(
        self,
        leaf: Leaf,
        plan: LeafPlan,
        types: tuple[Type, ...],
        layouts: Layouts,
        partial: frozenset[int],
    ) -> Sharded:
        if leaf.bodies:
            if any(layout.held != replicated(self.mesh) for layout in layouts):
                raise PlanError(
                    f"@{leaf.name} is control flow over tensors, which cannot be split over a "
                    "mesh. Leave what it takes whole on each rank."
                )
            whole = Layout(replicated(self.mesh))
            return Sharded(leaf, (), (whole,) * len(flat_types(leaf.output_types)))
        wanted = plan.inputs or (None,) * len(layouts)
        used = tuple(w or layout.used for w, layout in zip(wanted, layouts, strict=True))
        made = local_graph(
            leaf,
            self.mesh,
            flat_types(types),
            [layout.held for layout in layouts],
            replace(plan, inputs=used, nodes={**_pinned_results(leaf, layouts), **plan.nodes}),
            partial,
            self.decompositions(leaf),
        )
        self.whole.update(dict.fromkeys(made.whole))
        with_own_collectives(made.module, self.axes)
        results = tuple(map(Layout, made.output_layouts))
        # What is in a struct was saved: it is not there before the step begins.
        flags = zip(grouped(layouts, types), types, strict=True)
        known = [one.given and isinstance(t, TensorType) for g, t in flags for one in g]
        parameters = [i for i, is_known in enumerate(known) if is_known]
        return Sharded(*split_at_collectives(leaf, made, types, parameters), results)


def _scheduled(
    schedule: Schedule, made: Sharded, args: Sequence[Value], path: str, call: Call | None = None
) -> Sequence[Value]:
    """Adds the calls of a sharded closure; returns what they give."""
    if made.parts:
        assert isinstance(made.closure, Composite)
        calls, results = inlined(made.closure.program, args, path)
        for one, part in zip(calls, made.parts, strict=True):
            schedule.add(one, part)
        return results
    hints = [v.hint for v in call.results] if call is not None else [""] * len(made.layouts)
    values = tuple(map(Value, made.closure.output_types, hints))
    schedule.add(Call(made.closure, tuple(args), values, path))
    return values


def _buckets(calls: Sequence[Call], moves: Mapping[int, Value]) -> dict[int, list[int]]:
    """Returns which results are brought to another layout together, and after which call."""
    made_at: dict[Value, int] = {}
    end = last = len(calls) - 1
    for place in range(last, -1, -1):
        # Sums over micro-batches follow the block whose gradients they are of.
        end = end if place < last and _only_adds(calls[place + 1].closure) else place
        made_at.update(dict.fromkeys(calls[place].results, end))
    buckets: dict[int, list[int]] = {}
    bucket: list[int] = []
    num_bytes = 0
    places = {index: made_at.get(value, 0) for index, value in moves.items()}
    for place in sorted(set(places.values())):
        bucket += [index for index in moves if places[index] == place]
        num_bytes += sum(tensor_type(moves[i]).num_bytes for i in bucket if places[i] == place)
        if num_bytes >= BUCKET_BYTES:
            buckets[place], bucket, num_bytes = bucket, [], 0
    if bucket:
        buckets[max(places.values())] = bucket
    return buckets


def _pinned_results(leaf: Leaf, layouts: Layouts) -> dict[torch.fx.Node, NodeLayouts]:
    """Returns the nodes of a leaf that are the results of modules whose result is pinned."""
    pinned = {}
    for entry, layout in zip(leaf.entries, layouts, strict=True):
        node = None if layout.result is None else _result_of_weight(entry)
        if node is not None:
            pinned[node] = NodeLayouts(outputs=(layout.result,))
    return pinned


def _result_of_weight(entry: torch.fx.Node) -> torch.fx.Node | None:
    """Returns what a Linear or an Embedding gives, by its weight; None where it is not computed.

    A backward multiplies by the weight as it lies, and a forward by its transpose.
    """
    for user in entry.users:
        if user.target is _EMBEDDING and user.args[0] is entry:
            return user
        if user.target not in _TRANSPOSES:
            continue
        for product in user.users:
            if product.target in _PRODUCTS and product.args[-1] is user:
                shaped = (n for n in product.users if n.target in RESHAPES)
                return next(shaped, product)
    return None


def _flat_positions(types: Sequence[Type], positions: Iterable[int]) -> frozenset[int]:
    """Returns the positions of values among the tensors inside all of them."""
    found: set[int] = set()
    start = 0
    for index, type_ in enumerate(types):
        number = len(flat_types([type_]))
        if index in positions:
            found.update(range(start, start + number))
        start += number
    return frozenset(found)


def _values_that_may_be_partial(program: Program, outputs: frozenset[int]) -> set[Value]:
    """Returns the values that lead, through sums alone, to results that may be parts of a sum."""
    open_values = {program.outputs[i] for i in outputs}
    closed = {v for i, v in enumerate(program.outputs) if i not in outputs}
    for call in reversed(program.calls):
        adds = _only_adds(call.closure)
        if adds and open_values.issuperset(call.results):
            open_values.update(call.args)
        else:
            closed.update(call.args)
    return open_values - closed


def _only_adds(closure: Closure) -> bool:
    if isinstance(closure, Composite):
        return all(_only_adds(call.closure) for call in closure.program.calls)
    return isinstance(closure, Leaf) and [n.target for n in closure.nodes] == [_ADD]
