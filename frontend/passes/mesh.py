"""Passes that turn a step of global shapes into one rank's step over a device mesh."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ...autodiff.leaf_derivative import Request
from ...autodiff.traces.torch_make_fx import Decompositions
from ...autodiff.training_program import StepProgram
from ...backend.run.planned import PlannedProgram
from ...pipeline_parallel.actions import BACKWARD, FORWARD
from ...pipeline_parallel.coloring import CallCost, NoSplitError
from ...pipeline_parallel.cut import Stage
from ...pipeline_parallel.mesh.plan import MeshPlan, Placements
from ...pipeline_parallel.process_groups import users_of
from ...pipeline_parallel.stage_derivative import StageDerivative, check_draws, differentiate_stages
from ...recompute.planner import POLICIES
from ...reuse.errors import LazyInlineError, PlanError
from ...reuse.ir.program import Leaf, Program, RecomputeMark, UserInput, Value, tensor_type
from ...reuse.ir.types import TensorType, Wire
from ..options import Batching
from .context import ProgramPeaks
from .programs import PARTS, decompose, differentiate, repeat_micro_batches, tensor_name
from .rank import RankCompilation, Splitting, colors_of, named_parts, part_name
from .stages import choose_recompute
from .state import Compilation, State, apply, compile_pass, step_goal

if TYPE_CHECKING:  # importing DTensor takes as long as importing all of lazyinline
    from ...pipeline_parallel.mesh.sharded import Ends, Sharder, TensorPlan
    from ...pipeline_parallel.mesh.traffic import Collective, RankMemory, ShardedStep

REDUCTION = "gradients, after the step"
"""The name, in place of a part's, for reductions that a pipeline's rank runs once per step."""


def _is_on_mesh(state: Compilation) -> bool:
    return state.goal.on_mesh is not None


@compile_pass("plan", goals=("step",), wanted=_is_on_mesh)
def plan_mesh(state: State) -> State:
    """Chooses the placement of each tensor over a mesh, and recompute if memory requires it."""
    make_step = partial(_whole_step, state, state.goal.batching)
    plan = state.on_mesh.planner(make_step, lambda plan, policy, seconds: seconds)
    return _with_plan(state, plan)


def _with_plan(state: State, plan: MeshPlan) -> State:
    fitting = plan.recompute if plan.recompute in POLICIES else None
    return replace(state, mesh_plan=plan, fitting=fitting)


@compile_pass("plan", goals=("rank",), wanted=_is_on_mesh)
def plan_stages(state: RankCompilation) -> RankCompilation:
    """Chooses placements, recompute and the cuts between stages: the fastest step that fits."""
    from ...pipeline_parallel.mesh.problem import OverMemoryError

    table, limit = state.table, state.on_mesh.memory_bytes_per_rank
    cuts: dict[RecomputeMark, RankCompilation] = {}

    def judged(plan: MeshPlan, policy: RecomputeMark, seconds: float) -> float:
        try:
            cuts[policy], cut_s = _cut(_with_plan(state, replace(plan, recompute=policy)))
        except NoSplitError as error:
            raise OverMemoryError(limit or 0, error.least_bytes) from error
        return seconds if cut_s is None else cut_s

    # Planned as one step of all stages, with as many micro-batches as a rank holds at most.
    batching = Batching(table.num_flights, "forward_first")
    try:
        plan = state.on_mesh.planner(partial(_whole_step, state, batching), judged)
    except PlanError as error:
        raise PlanError(f"For the {len(table.ranks)} ranks of a pipeline: {error}") from error
    if plan.table:
        number = len(table.ranks)
        said = f"planned as one step of a pipeline: bytes are those of its {number} ranks together"
        plan = replace(plan, table=f"{said}\n{plan.table}")
    cut = cuts.get(plan.recompute) or _cut(_with_plan(state, plan))[0]
    return _with_plan(cut, plan)


def _cut(state: RankCompilation) -> tuple[RankCompilation, float | None]:
    """Cuts a model into stages by the local costs of its pieces; returns the seconds of a step."""
    assert state.subject is not None
    splitting = Splitting(state.splitting.split, state.on_mesh.memory_bytes_per_rank)
    program, sharder = state.programs[PARTS[0]], sharder_of(state)
    pieces = partial(_pieces, state, sharder)
    asked = partial(colors_of, state.subject.model, program, table=state.table, costs=state.costs)
    try:
        colors, seconds = asked(splitting, pieces=pieces)
    except NoSplitError:
        raise
    except LazyInlineError:  # a piece may not be possible as a stage: use the costs of whole calls
        colors, seconds = asked(state.splitting)
    return replace(state, colors=colors, sharder=sharder), seconds


def _pieces(
    state: RankCompilation, sharder: Sharder, stages: Sequence[Stage]
) -> tuple[list[CallCost], list[dict[int, int]]]:
    """Returns the costs and tensors of pieces of a model on one rank, each sharded as a stage."""
    from ...pipeline_parallel.mesh.planner import STATES_PER_PARAMETER

    context, policy = state.context, state.policy
    nothing = ProgramPeaks(lambda request: 0, lambda request: 0)

    def chosen(stage: Stage, request: Request) -> Request:
        return context.recompute.chosen(request, nothing, policy)

    make = context.differentiator
    derived = differentiate_stages(stages, make, halves=False, chosen=chosen)
    costs, tensors = list[CallCost](), list[dict[int, int]]()
    for one in _local_stages(state, sharder, derived):
        stage, derivative = one.stage, one.derivative
        kept = () if derivative is None else derivative.kept_inputs
        costs.append(
            CallCost(
                sum(state.costs.program(program).seconds for program in one.parts.values()),
                _total(stage.received_types[i] for i in kept if i < stage.num_received),
                ((one.saved_bytes, 0.0),),
            )
        )
        copies = {id(source): STATES_PER_PARAMETER for source in one.trained}
        pairs = zip(stage.model_tensors, stage.model_types, strict=True)
        tensors.append({id(s): copies.get(id(s), 1) * t.num_bytes for s, t in pairs})
    return costs, tensors


@compile_pass("shard", "aten", goals=("step",), wanted=_is_on_mesh, verified="always")
def shard(state: State) -> State:
    """Rewrites each different leaf to local shapes and collectives, by the plan of the mesh."""
    from ...pipeline_parallel.mesh.sharded import TensorPlan
    from ...pipeline_parallel.mesh.torch_sharding import replicated

    plan, sharder = state.layouts, state.sharder or sharder_of(state)
    step = replace(state.step, program=state.programs["step"])
    whole = replicated(sharder.mesh)
    model = [_layout(plan, source.name, whole) for source in step.model]
    batch = [TensorPlan(plan.batch[user]) for users in step.batch for user in users]
    outputs: list[Placements] = [whole] * len(step.batch)
    outputs += [model[i].held for i in (*step.gradients, *step.writes)]
    program = sharder.step(step.program, [*batch, *model, TensorPlan(whole)], outputs)
    composed = replace(step, program=program)
    plan = replace(plan, whole=tuple(sharder.whole))
    return replace(state, composed=composed, programs={"step": program}, mesh_plan=plan)


@compile_pass("shard", "aten", goals=("rank",), wanted=_is_on_mesh, verified="always")
def shard_stages(state: RankCompilation) -> RankCompilation:
    """Rewrites the stages of all ranks to local shapes, over the other dimensions of the mesh."""
    sharder = state.sharder
    made = _local_stages(state, sharder, state.derived)
    backwards = [program for one in made for program in one.backward]
    check_draws([one.forward for one in made], backwards, sharder.mesh.device_type)
    plan = replace(state.layouts, whole=tuple(sharder.whole))
    state = replace(state, derived=tuple(made), mesh_plan=plan)
    return replace(state, programs=named_parts(state.own))


def _local_stages(
    state: RankCompilation, sharder: Sharder, derived: Sequence[StageDerivative]
) -> list[StageDerivative]:
    """Returns stages rewritten to local shapes, by the plan of the mesh."""
    from ...pipeline_parallel.mesh.sharded import StageSharder
    from ...pipeline_parallel.mesh.torch_sharding import replicated

    plan, decomposed = state.layouts, state.context.decomposed
    parts = [{kind: decomposed(p) for kind, p in one.parts.items()} for one in derived]
    whole = replicated(sharder.mesh)
    names = {source.name for one in derived for source in one.stage.model_tensors}
    layouts = {name: _layout(plan, name, whole) for name in names}
    return StageSharder(sharder, layouts, plan.batch, plan.replicas).sharded(derived, parts)


def _whole_step(state: Compilation, batching: Batching, policy: RecomputeMark) -> StepProgram:
    """Returns the step of the whole model as one program, under a recompute policy."""
    whole = Compilation(
        context=state.context,
        report=state.report,
        goal=step_goal(batching),
        seen=state.captured,
        programs={PARTS[0]: state.captured.program},
        fitting=policy if policy in POLICIES else None,
    )
    passes = (differentiate, choose_recompute, repeat_micro_batches, decompose)
    whole = apply(passes, whole)
    return replace(whole.step, program=whole.programs["step"])


def traffic_of(state: RankCompilation) -> dict[int, tuple[Collective, ...]]:
    """Returns the collectives of each stage in a step, over the other dimensions of the mesh."""
    if state.mesh_plan is None:
        return {}
    from ...pipeline_parallel.mesh.traffic import collectives_in

    found: dict[int, tuple[Collective, ...]] = {}
    for one in state.derived:
        for kind, program in one.parts.items():
            for number in range(state.table.num_micro_batches):
                name = part_name(one, kind)
                moved = collectives_in(program, f"micro_batch_{number}", name)
                found[one.stage.index] = (*found.get(one.stage.index, ()), *moved)
    return found


def sharder_of(state: Compilation, ends: Ends | None = None) -> Sharder:
    """Returns the sharder, which rewrites programs to local shapes by the plan of the mesh."""
    from ...pipeline_parallel.mesh.sharded import Ends, Sharder
    from ...pipeline_parallel.mesh.torch_collectives import axes_of

    mesh, backend = state.on_mesh.mesh, state.context.backend

    def decompositions(leaf: Leaf) -> Decompositions:
        # A leaf that runs on PyTorch's own kernels is not decomposed.
        return {} if leaf.kernels == "eager" else backend.recipe(leaf).decompositions

    return Sharder(mesh, axes_of(mesh), decompositions, state.layouts.leaves, ends or Ends())


def _layout(plan: MeshPlan, source: str, whole: Placements) -> TensorPlan:
    """Returns the placements of a tensor of the model: at rest and where it is used."""
    from ...pipeline_parallel.mesh.sharded import TensorPlan

    name = tensor_name(source)
    path, _, own = name.rpartition(".")
    held = plan.parameters.get(name, whole)
    result = plan.results.get(path) if own == "weight" else None
    return TensorPlan(held, plan.used(held), result, given=True)


def sharded_step(state: Compilation) -> ShardedStep:
    """Returns the mesh plan of a linked step, its collectives, and the memory of a rank."""
    from ...pipeline_parallel.mesh.traffic import RankMemory, ShardedStep, collectives_of

    step, runs = state.step, state.runs
    assert isinstance(runs, PlannedProgram)
    num_batch, num_losses = sum(map(len, step.batch)), len(step.batch)
    inputs, outputs = step.program.inputs, step.program.outputs
    gradients = _num_bytes(outputs[num_losses : num_losses + len(step.gradients)])
    memory = RankMemory(
        _num_bytes(inputs[num_batch:-1]),
        gradients,
        _num_bytes((*inputs[:num_batch], inputs[-1])),
        runs.plan.peak_bytes - gradients,
        runs.outside_bytes,
    )
    moved = collectives_of(step.program, runs.layout.parts[0].launches)
    return ShardedStep(state.layouts, moved, memory)


def rank_memory(state: RankCompilation) -> RankMemory:
    """Returns the memory of a linked rank of a pipeline over a mesh."""
    from ...pipeline_parallel.mesh.torch_sharding import local_type
    from ...pipeline_parallel.mesh.traffic import RankMemory

    runs, program = state.planned, state.captured.program
    assert runs is not None
    pairs = [(one.stage.model_tensors, one.stage.model_types) for one in state.own]
    held = {id(s.tensor): t for pair in pairs for s, t in zip(*pair, strict=True)}
    rows = [
        local_type(tensor_type(value), state.on_mesh.mesh, state.layouts.batch[source.index])
        for value, source in zip(program.inputs, program.sources, strict=True)
        if isinstance(source, UserInput)
    ]
    target = state.context.tools.place.target
    return RankMemory(
        _total(held.values()),
        _total(_summed(state)[0].values()),
        state.table.num_micro_batches * _total(rows),
        runs.plan.arena.peak_bytes,
        runs.plan.foreign_peak_bytes + (target.workspace_bytes if target else 0),
    )


def _summed(state: RankCompilation) -> tuple[dict[str, TensorType], list[str]]:
    """Returns the gradients that a rank sums, by name, and those that other ranks sum as well."""
    users, types = users_of(state.derived, state.table)
    own = {name: type_ for name, type_ in types.items() if state.rank in users[name]}
    return own, [name for name in own if len(users[name]) > 1]


def rank_moves(state: RankCompilation, axis: str) -> tuple[Collective, ...]:
    """Returns all communication of a linked rank in a step; the pipeline runs along ``axis``."""
    from ...pipeline_parallel.mesh.traffic import Collective

    plan = state.layouts
    paths = [f"micro_batch_{i}" for i in range(state.table.num_micro_batches)]
    moved = [
        replace(one, path=f"{path}.{one.path}".rstrip("."))
        for part in rank_traffic(state).values()
        for path in paths
        for one in part
    ]
    rank_of = dict(enumerate(state.table.rank_of))
    for one in state.own:
        ways = (FORWARD, 1, one.stage.sent_types), (BACKWARD, -1, one.gradient_types)
        for kind, ahead, sent in ways:
            size, name = sum(Wire(t).num_bytes for t in sent), part_name(one, kind)
            if sent and rank_of.get(one.stage.index + ahead, state.rank) != state.rank:
                moved += [Collective(path, name, "send", axis, size) for path in paths]
    sums, shared = _summed(state)
    replicas = [plan.axes[i][0] for i in plan.replicas if plan.axes[i][1] > 1]
    summed = [(name, _total(sums.values())) for name in replicas]
    summed += [(axis, sums[name].num_bytes) for name in shared]
    moved += [Collective("", REDUCTION, "all_reduce", *one) for one in summed]
    return tuple(moved)


def rank_traffic(state: RankCompilation) -> dict[Program, tuple[Collective, ...]]:
    """Returns the collectives of each part of a linked rank's stages, for one micro-batch."""
    from ...pipeline_parallel.mesh.traffic import collectives_of

    assert state.planned is not None
    units = state.planned.plan.units
    return {
        program: collectives_of(program, part.launches, part_name(one, kind))
        for one in state.own
        for part, (kind, program) in zip(
            units[one.stage.index].layout.parts, one.parts.items(), strict=True
        )
    }


def rank_orders(state: RankCompilation) -> dict[str, str]:
    """Returns the collectives of each part of a rank's stages, in order: peers must agree on it."""
    from ...pipeline_parallel.mesh.traffic import collectives_in

    linked = rank_traffic(state) if state.planned is not None else {}
    return {
        name: str([(c.kind, c.axis, c.num_bytes) for c in linked.get(p) or collectives_in(p)])
        for name, p in named_parts(state.own).items()
    }


def _num_bytes(values: Sequence[Value]) -> int:
    return _total(map(tensor_type, values))


def _total(types: Iterable[TensorType]) -> int:
    return sum(t.num_bytes for t in types)
