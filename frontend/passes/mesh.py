"""The pass that makes a step of global shapes one rank's step over a device mesh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ...autodiff.traces.torch_make_fx import Decompositions
from ...backend.run.planned import PlannedProgram
from ...pipeline_parallel.mesh.plan import Placements
from ...reuse.ir.program import Leaf, Value, tensor_type
from .programs import tensor_name
from .state import Compilation, State, compile_pass

if TYPE_CHECKING:
    from ...pipeline_parallel.mesh.traffic import ShardedStep


@compile_pass(
    "shard",
    "aten",
    goals=("step",),
    wanted=lambda state: state.goal.on_mesh is not None,
    verified="always",
)
def shard(state: State) -> State:
    """Rewrites each different leaf to local shapes and collectives, as the plan of a mesh says."""
    # Imported late: DTensor takes as long to import as all of lazyinline.
    from ...pipeline_parallel.mesh.sharded import Layout, Sharder
    from ...pipeline_parallel.mesh.torch_collectives import axes_of
    from ...pipeline_parallel.mesh.torch_sharding import replicated

    on_mesh = state.goal.on_mesh
    assert on_mesh is not None
    step = replace(state.step, program=state.programs["step"])
    plan = on_mesh.planner(step)
    whole = replicated(on_mesh.mesh)
    names = [tensor_name(source.name) for source in step.model]
    held = [plan.parameters.get(name, whole) for name in names]
    batch = [plan.batch[user] for users in step.batch for user in users]
    inputs = list(map(Layout, batch))
    for name, lies in zip(names, held, strict=True):
        path, _, own = name.rpartition(".")
        result = plan.results.get(path) if own == "weight" else None
        inputs.append(Layout(lies, plan.used(lies), result, given=True))
    inputs.append(Layout(whole))
    outputs: list[Placements] = [whole] * len(step.batch)
    outputs += [held[i] for i in (*step.gradients, *step.writes)]

    def decompositions(leaf: Leaf) -> Decompositions:
        # What PyTorch's own kernels run stays as it is.
        return {} if leaf.kernels == "eager" else state.context.backend.recipe(leaf).decompositions

    sharder = Sharder(on_mesh.mesh, axes_of(on_mesh.mesh), decompositions, plan.calls)
    program = sharder.step(step.program, inputs, outputs)
    composed = replace(step, program=program)
    return replace(
        state,
        composed=composed,
        programs={"step": program},
        mesh_plan=replace(plan, whole=tuple(sharder.whole)),
    )


def sharded_step(state: Compilation) -> ShardedStep:
    """Returns the plan of a linked step over a mesh, what it moves, and what a rank holds."""
    from ...pipeline_parallel.mesh.traffic import RankMemory, ShardedStep, collectives_of

    step, runs = state.step, state.runs
    assert state.mesh_plan is not None
    assert isinstance(runs, PlannedProgram)
    (part,) = runs.layout.parts
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
    return ShardedStep(state.mesh_plan, collectives_of(step.program, part.launches), memory)


def _num_bytes(values: Sequence[Value]) -> int:
    return sum(tensor_type(value).num_bytes for value in values)
