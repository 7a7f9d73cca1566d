"""Rewrites a program of global shapes to this rank's local shapes, each different closure once.

Placements are propagated through the calls, from the inputs on. A leaf is sharded once for each
plan and each combination of its inputs' placements, so blocks that are called alike still share a
closure. Gathers at the start of a leaf begin one call earlier, and reductions at its end are waited
for later.

Stages of a pipeline are sharded, too. An activation is sent with the placements in which its stage
makes it, and its gradient comes back with the same. Every rank shards all stages, because the
placements of a stage's inputs are known only after the stage before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.fx
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial

from ...autodiff.flows import in_closure, inlined
from ...autodiff.traces.torch_make_fx import Decompositions
from ...reuse.errors import PlanError
from ...reuse.ir import program as ir
from ...reuse.ir.leaf import flat_types
from ...reuse.ir.printer import closure_to_compare
from ...reuse.ir.rewrite import grouped
from ...reuse.ir.types import TensorType, Type
from ...reuse.torch_names import RESHAPES, module_of
from ..actions import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD
from ..cut import Stage
from ..stage_derivative import Halves, StageDerivative
from .plan import LeafPlan, NodeLayouts, Placements
from .split import Part, Schedule, opened, split_at_collectives, with_structs
from .torch_collectives import with_own_collectives
from .torch_sharding import CASTS, local_graph, local_type, replicated

_ATEN = torch.ops.aten
_ADD, _EMBEDDING = _ATEN.add.Tensor, _ATEN.embedding.default
_TRANSPOSES = (_ATEN.t.default, _ATEN.permute.default, _ATEN.transpose.int)
_PRODUCTS = (_ATEN.mm.default, _ATEN.addmm.default)


BUCKET_BYTES = 25 * 2**20
"""The size at which a bucket of gradients is reduced, as ``bucket_cap_mb`` of PyTorch's DDP."""


@dataclass(frozen=True)
class TensorPlan:
    """The placements of one tensor, at rest and where it is used."""

    held: Placements  # the placements in which it is stored
    # What it is redistributed to before a leaf computes with it; None for no change.
    used: Placements | None = None
    # For a weight, the placements that its module's result must have.
    result: Placements | None = None
    given: bool = False  # whether it exists before the step begins, as parameters do


TensorPlans = tuple[TensorPlan, ...]


@dataclass(frozen=True)
class Flow:
    """This rank's part of a value between two programs: its type, and the layout of each tensor."""

    type: Type
    layouts: TensorPlans


@dataclass(frozen=True)
class Sharded:
    """A closure of local shapes, the part that each of its calls is, and its results' layouts."""

    closure: ir.Closure
    parts: tuple[Part, ...]
    layouts: TensorPlans


@dataclass
class Ends:
    """Finds leaves that all ranks share: those that are equal on the first and the last rank.

    A trace depends on the rank where it takes a chunk, needs the offset of its rows, or has an
    uneven remainder. Each of these differs between the first rank and the last.
    """

    sharders: list[Sharder] = field(default_factory=list)
    _alike: dict[Any, Sharded | None] = field(default_factory=dict)

    def alike(self, key: Any) -> Sharded | None:
        """Returns a leaf that both ranks have made alike; None if they have not."""
        if key not in self._alike:
            found = [made for one in self.sharders if (made := one.made.get(key)) is not None]
            if len(found) < 2:
                return None
            said = [(closure_to_compare(x.closure), x.parts, x.layouts) for x in found]
            self._alike[key] = found[0] if said[0] == said[1] else None
        return self._alike[key]


@dataclass
class Sharder:
    """Makes the local closures of a program, each different one once.

    ``axes`` are the dimensions of the mesh, by the names of their process groups; ``ends`` has
    leaves that ranks share, if ranks are compiled for one after another.
    """

    mesh: DeviceMesh
    axes: Mapping[str, str]
    decompositions: Callable[[ir.Leaf], Decompositions]
    plans: Mapping[ir.Closure, LeafPlan] = field(default_factory=dict)
    ends: Ends = field(default_factory=Ends)
    # The operators that every rank runs on whole tensors, because no rule splits them.
    whole: dict[str, None] = field(default_factory=dict)
    made: dict[Any, Sharded] = field(default_factory=dict)  # the closures, by what they depend on

    def step(
        self, program: ir.Program, inputs: Sequence[TensorPlan], outputs: Sequence[Placements]
    ) -> ir.Program:
        """Returns the local program of a step, whose results get the placements ``outputs``."""
        types = [
            local_type(ir.tensor_type(v), self.mesh, layout.held)
            for v, layout in zip(program.inputs, inputs, strict=True)
        ]
        everything = frozenset(range(len(program.outputs)))
        local, layouts = self._program(program, types, inputs, everything)
        last, opened_calls, values = opened(local)
        calls, results = self._brought(program, opened_calls, values, layouts, outputs)
        backward = in_closure(last.closure.name, calls, set(results), last.path)
        before = local.calls[: local.calls.index(last)]
        return replace(local, calls=(*before, backward), outputs=tuple(results))

    def flow(self, type_: Type, layout: TensorPlan) -> Flow:
        """Returns this rank's part of a tensor with a layout."""
        assert isinstance(type_, TensorType)
        return Flow(local_type(type_, self.mesh, layout.held), (layout,))

    def part(
        self, program: ir.Program, inputs: Sequence[Flow], outputs: Sequence[Placements | None]
    ) -> tuple[ir.Program, list[Flow]]:
        """Returns the local program of a part of a step, and this rank's parts of its results.

        Results get the placements ``outputs``; where there are none, any that are not partial.
        """
        types = flat_types([flow.type for flow in inputs])
        layouts_in = [layout for flow in inputs for layout in flow.layouts]
        pairs = zip(program.outputs, outputs, strict=True)
        targets = [target for value, target in pairs for _ in flat_types([value.type])]
        partial = frozenset(i for i, target in enumerate(targets) if target is not None)
        local, layouts = self._program(program, types, layouts_in, partial)
        calls, results = self._brought(program, local.calls, local.outputs, layouts, targets)
        local = replace(local, calls=calls, outputs=tuple(results))
        made = [v.type for v in program.outputs]
        local = with_structs(local, [flow.type for flow in inputs], made)
        ends = [
            layout if target is None else TensorPlan(target)
            for layout, target in zip(layouts, targets, strict=True)
        ]
        flows = zip(local.outputs, grouped(ends, made), strict=True)
        return local, [Flow(value.type, tuple(held)) for value, held in flows]

    def _brought(
        self,
        program: ir.Program,
        calls: Sequence[ir.Call],
        values: Sequence[ir.Value],
        layouts: TensorPlans,
        targets: Sequence[Placements | None],
    ) -> tuple[tuple[ir.Call, ...], list[ir.Value]]:
        """Returns the calls with redistributions added, and the redistributed values."""
        types = flat_types([value.type for value in program.outputs])
        ways = {
            i: (layout.held, target)
            for i, (layout, target) in enumerate(zip(layouts, targets, strict=True))
            if target is not None and layout.held != target
        }
        scattered = {
            i
            for i, way in ways.items()
            if any(held.is_partial() and to.is_shard() for held, to in zip(*way, strict=True))
        }
        buckets = _buckets(calls, {i: values[i] for i in ways}, scattered)
        assert calls or not ways
        results, schedule = list(values), Schedule(())
        for place, call in enumerate(calls):
            schedule.add(call)
            if bucket := buckets.get(place):
                local = [ir.tensor_type(values[i]) for i in bucket]
                made = self._moved([types[i] for i in bucket], local, [ways[i] for i in bucket])
                brought = _scheduled(schedule, made, [values[i] for i in bucket], "")
                for index, value in zip(bucket, brought, strict=True):
                    results[index] = value
        return schedule.finished(), results

    def _moved(
        self,
        whole: Sequence[TensorType],
        local: Sequence[TensorType],
        ways: Sequence[tuple[Placements, Placements]],
    ) -> Sharded:
        """Returns a closure that redistributes several tensors together."""
        key = ("moved", *whole, *local, *ways)
        if key not in self.made:
            graph = torch.fx.Graph()
            names = tuple(f"x{i}" for i in range(len(whole)))
            graph.output(tuple(map(graph.placeholder, names)))
            leaf = ir.Leaf("gradients", module_of(graph), (*whole,), (*whole,), names, "aten")
            plan = LeafPlan(outputs=tuple(target for _, target in ways))
            layouts = tuple(TensorPlan(held) for held, _ in ways)
            made = self.ends.alike(key)
            self.made[key] = made or self._leaf(leaf, plan, tuple(local), layouts, frozenset())
        return self.made[key]

    def _program(
        self,
        program: ir.Program,
        types: Sequence[TensorType],
        layouts: Sequence[TensorPlan],
        partial: frozenset[int],
    ) -> tuple[ir.Program, TensorPlans]:
        """Returns the local program, with structs taken apart, and the layouts of its results.

        Types and layouts are of this rank's parts of the flat inputs. Flat results in ``partial``
        may stay partial: the caller reduces them.
        """
        local_inputs = tuple(map(ir.Value, types))
        given = grouped(zip(local_inputs, layouts, strict=True), [v.type for v in program.inputs])
        env = dict(zip(program.inputs, given, strict=True))
        open_values = _values_that_may_be_partial(program, partial)
        schedule = Schedule(local_inputs)
        for call in program.calls:
            made = [one for value in call.args for one in env[value]]
            if not isinstance(call.closure, (ir.Pack, ir.Unpack)):
                flags = [v in open_values for v in call.results for _ in flat_types([v.type])]
                may = frozenset(i for i, is_open in enumerate(flags) if is_open)
                sharded = self._call(call, made, may)
                results = _scheduled(schedule, sharded, [v for v, _ in made], call.path)
                made = list(zip(results, sharded.layouts, strict=True))
            given = grouped(made, [v.type for v in call.results])
            env.update(zip(call.results, given, strict=True))
        outputs = [one for value in program.outputs for one in env[value]]
        local = replace(
            program,
            inputs=local_inputs,
            calls=schedule.finished(),
            outputs=tuple(value for value, _ in outputs),
            sources=(),
        )
        return local, tuple(layout for _, layout in outputs)

    def _call(
        self, call: ir.Call, args: Sequence[tuple[ir.Value, TensorPlan]], partial: frozenset[int]
    ) -> Sharded:
        closure = call.closure
        # The types are part of the key, because layouts do not say the strides of local tensors.
        types = tuple(ir.tensor_type(value) for value, _ in args)
        layouts = tuple(layout for _, layout in args)
        plan = self.plans.get(closure, LeafPlan())
        nodes = frozenset(plan.nodes.items())
        key = (closure, types, layouts, partial, plan.inputs, plan.outputs, nodes)
        if key not in self.made:
            if isinstance(closure, ir.Composite):
                body, results = self._program(closure.program, types, layouts, partial)
                self.made[key] = Sharded(ir.Composite(closure.name, body), (), results)
            else:
                assert isinstance(closure, ir.Leaf)
                alike = self.ends.alike(key)
                self.made[key] = alike or self._leaf(closure, plan, types, layouts, partial)
        return self.made[key]

    def _leaf(
        self,
        leaf: ir.Leaf,
        plan: LeafPlan,
        types: tuple[TensorType, ...],
        layouts: TensorPlans,
        partial: frozenset[int],
    ) -> Sharded:
        if leaf.bodies:
            if any(layout.held != replicated(self.mesh) for layout in layouts):
                raise PlanError(
                    f"@{leaf.name} is control flow over tensors, which cannot be split over a "
                    "mesh. Leave what it takes whole on each rank."
                )
            whole = TensorPlan(replicated(self.mesh))
            return Sharded(leaf, (), (whole,) * len(flat_types(leaf.output_types)))
        wanted = plan.inputs or (None,) * len(layouts)
        used = tuple(w or layout.used for w, layout in zip(wanted, layouts, strict=True))
        made = local_graph(
            leaf,
            self.mesh,
            types,
            [layout.held for layout in layouts],
            replace(plan, inputs=used, nodes={**_pinned_results(leaf, layouts), **plan.nodes}),
            partial,
            self.decompositions(leaf),
        )
        self.whole.update(dict.fromkeys(made.whole))
        with_own_collectives(made.module, self.axes)
        results = tuple(map(TensorPlan, made.output_layouts))
        parameters = [i for i, layout in enumerate(layouts) if layout.given]
        return Sharded(*split_at_collectives(leaf, made, parameters), results)


def _scheduled(
    schedule: Schedule, made: Sharded, args: Sequence[ir.Value], path: str
) -> Sequence[ir.Value]:
    """Adds the calls of a sharded closure; returns their results."""
    if made.parts:
        assert isinstance(made.closure, ir.Composite)
        calls, results = inlined(made.closure.program, args, path)
        for one, part in zip(calls, made.parts, strict=True):
            schedule.add(one, part)
        return results
    values = tuple(map(ir.Value, made.closure.output_types))
    schedule.add(ir.Call(made.closure, tuple(args), values, path))
    return values


def _buckets(
    calls: Sequence[ir.Call], moves: Mapping[int, ir.Value], scattered: set[int]
) -> dict[int, list[int]]:
    """Returns the results that are redistributed together, by the call after which that happens."""
    made_at: dict[ir.Value, int] = {}
    end = last = len(calls) - 1
    for place in range(last, -1, -1):
        # Gradients are complete only after the sums over micro-batches that follow their block.
        end = end if place < last and _only_adds(calls[place + 1].closure) else place
        made_at.update(dict.fromkeys(calls[place].results, end))
    buckets: dict[int, list[int]] = {}
    bucket: list[int] = []
    num_bytes = 0
    places = {index: made_at.get(value, 0) for index, value in moves.items()}
    for place in sorted(set(places.values())):
        bucket += [index for index in moves if places[index] == place]
        num_bytes += sum(ir.tensor_type(moves[i]).num_bytes for i in bucket if places[i] == place)
        # A reduce-scatter frees memory, so it does not wait for other blocks.
        if num_bytes >= BUCKET_BYTES or not scattered.isdisjoint(bucket):
            buckets[place], bucket, num_bytes = bucket, [], 0
    if bucket:
        buckets[max(places.values())] = bucket
    return buckets


def _pinned_results(leaf: ir.Leaf, layouts: TensorPlans) -> dict[torch.fx.Node, NodeLayouts]:
    """Returns the nodes of a leaf that are the result of a module whose result the user pinned."""
    pinned = {}
    for entry, layout in zip(leaf.entries, layouts, strict=True):
        node = None if layout.result is None else result_of_weight(entry)
        if node is not None:
            pinned[node] = NodeLayouts(outputs=(layout.result,))
    return pinned


def result_of_weight(entry: torch.fx.Node) -> torch.fx.Node | None:
    """Returns the result of a Linear or an Embedding, given its weight; None if there is none.

    Only a forward multiplies by the transposed weight; a backward takes the weight itself.
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


def _values_that_may_be_partial(program: ir.Program, partial: frozenset[int]) -> set[ir.Value]:
    """Returns the values that reach, through additions alone, only results that may be partial."""
    flat = [v for v in program.outputs for _ in flat_types([v.type])]
    open_values = {v for i, v in enumerate(flat) if i in partial}
    closed = {v for i, v in enumerate(flat) if i not in partial}
    for call in reversed(program.calls):
        adds = _only_adds(call.closure)
        if adds and open_values.issuperset(call.results):
            open_values.update(call.args)
        else:
            closed.update(call.args)
    return open_values - closed


def _only_adds(closure: ir.Closure) -> bool:
    if isinstance(closure, ir.Composite):
        return all(_only_adds(call.closure) for call in closure.program.calls)
    return isinstance(closure, ir.Leaf) and {n.target for n in closure.nodes} <= {_ADD, *CASTS}


# ---- Stages of a pipeline ------------------------------------------------------------------------


Parts = Mapping[str, ir.Program]
"""The programs of a stage by action (forward, backward), decomposed."""


@dataclass(frozen=True)
class StageSharder:
    """Makes the local stages of a pipeline, with gradients that are partial over ``replicas``.

    The layouts are of the model's tensors, by the names of their sources.
    """

    sharder: Sharder
    layouts: Mapping[str, TensorPlan]
    batch: Sequence[Placements]
    replicas: frozenset[int]

    def sharded(
        self, derived: Sequence[StageDerivative], parts: Sequence[Parts]
    ) -> list[StageDerivative]:
        """Returns all stages with local programs, in order."""
        found, arriving = [], list[Flow]()
        for one, programs in zip(derived, parts, strict=True):
            made, arriving = self._stage(one, programs, arriving)
            found.append(made)
        return found

    def _stage(
        self, one: StageDerivative, programs: Parts, received: Sequence[Flow]
    ) -> tuple[StageDerivative, list[Flow]]:
        """Returns a local stage, and what it sends."""
        stage = one.stage
        written = [(output, stage.num_received + source) for output, source in stage.writes]
        inputs = [*received, *self._own(stage)]
        wanted: list[Flow | None] = [None] * len(programs[FORWARD].outputs)
        for result in range(stage.num_sent, len(stage.program.outputs) - len(written)):
            whole = TensorPlan(replicated(self.sharder.mesh))
            wanted[result] = self.sharder.flow(stage.program.outputs[result].type, whole)
        for output, position in written:
            wanted[output] = inputs[position]
        forward, outputs = self._part(programs[FORWARD], inputs, wanted)
        sent = outputs[: stage.num_sent]
        body = replace(forward, outputs=forward.outputs[: len(stage.program.outputs)])
        made = replace(one, stage=replace(stage, program=body))
        if one.derivative is None:
            return made, sent
        derivative = replace(one.derivative, forward=_named(forward, one.derivative.forward))
        operands = [outputs[-1], *(inputs[i] for i in derivative.kept_inputs)]
        operands += [outputs[i] for i in derivative.kept_outputs]
        operands += [_cotangent(outputs[i]) for i in derivative.cotangent_outputs]
        gradients = [
            self._gradient(inputs[i], travels=i < stage.num_received)
            for i in derivative.gradient_inputs
        ]
        if one.halves is not None:
            halves = self._halves(one.halves, programs, operands, gradients)
            return replace(made, derivative=derivative, halves=halves), sent
        backward, _ = self._part(programs[BACKWARD], operands, gradients)
        derivative = replace(derivative, backward=_named(backward, derivative.backward))
        return replace(made, derivative=derivative), sent

    def _own(self, stage: Stage) -> list[Flow]:
        """Returns this rank's parts of the inputs that a stage does not receive from others."""
        values = stage.program.inputs[stage.num_received :]
        plans = (
            self.layouts[s.name]
            if isinstance(s, ir.ModelTensor)
            else TensorPlan(self.batch[s.index])
            for s in stage.sources
        )
        pairs = zip(values, plans, strict=True)
        return [self.sharder.flow(value.type, plan) for value, plan in pairs]

    def _gradient(self, flow: Flow, *, travels: bool) -> Flow:
        """Returns a tensor's gradient: placed as the tensor; if not sent, partial over replicas."""
        gradient = _cotangent(flow)
        if travels:
            return gradient
        held = enumerate(gradient.layouts[0].held)
        summed = tuple(Partial() if i in self.replicas else p for i, p in held)
        return replace(gradient, layouts=(TensorPlan(summed),))

    def _halves(
        self,
        halves: Halves,
        programs: Parts,
        operands: Sequence[Flow],
        gradients: Sequence[Flow],
    ) -> Halves:
        early, late, carried = halves.early, halves.late, list[Flow]()
        if early is not None:
            own = [operands[i] for i in halves.early_inputs]
            wanted = [*(gradients[i] for i in halves.early_outputs), None]
            program, outputs = self._part(programs[BACKWARD_INPUT], own, wanted)
            carried, early = outputs[-1:], _named(program, early)
        if late is not None:
            own = [*carried, *(operands[i] for i in halves.late_inputs)]
            wanted = [gradients[i] for i in halves.late_outputs]
            program, _ = self._part(programs[BACKWARD_WEIGHT], own, wanted)
            late = _named(program, late)
        return replace(halves, early=early, late=late)

    def _part(
        self, program: ir.Program, inputs: Sequence[Flow], wanted: Sequence[Flow | None]
    ) -> tuple[ir.Program, list[Flow]]:
        targets = [None if flow is None else flow.layouts[0].held for flow in wanted]
        local, made = self.sharder.part(program, inputs, targets)
        for flow, target in zip(made, wanted, strict=True):
            if target is not None and flow.type != target.type:
                raise PlanError(
                    f"A stage makes a gradient of {flow.type} in another order of dimensions than "
                    f"what it belongs to ({target.type}), which is not sent or summed so."
                )
        return local, made


def _named(program: ir.Program, closure: object) -> ir.Composite:
    assert isinstance(closure, ir.Composite)
    return ir.Composite(closure.name, program, closure.input_names)


def _cotangent(flow: Flow) -> Flow:
    assert isinstance(flow.type, TensorType)
    return Flow(flow.type.cotangent(), (TensorPlan(flow.layouts[0].held),))
