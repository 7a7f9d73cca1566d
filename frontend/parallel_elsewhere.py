"""Compiles a step over a mesh, or its stages, for ranks on other machines, to be saved."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from torch import nn

from ..backend.run.planned import PlannedProgram
from ..pipeline_parallel.actions import ActionTable
from ..reuse import torch_pytree
from ..reuse.errors import FileError, PlanError
from ..reuse.ir.printer import text_to_compare
from ..reuse.ir.program import ModelTensor
from .compiler import PASSES
from .guard import Guard
from .mesh_placement import KeptOnMesh, WholeParameters, stage_dimension
from .options import LossModel
from .passes.mesh import sharder_of
from .passes.programs import tensor_name
from .passes.state import Compilation, State, between, run
from .pipeline import AskedPipeline, fitted
from .refusals import check_leaves


class ParallelElsewhere:
    """A step over a mesh that is compiled for ranks on other machines, for ``save`` to write.

    Made by :func:`.parallel.parallelize`. The model's parameters are not changed.
    """

    def __init__(self, kept: Sequence[KeptOnMesh]) -> None:
        self.kept_on_mesh, first = sorted(kept, key=lambda one: one.position), kept[0]
        self.model, self.plan, self.last_report = first.model, first.plan, first.lowered.report

    def step(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises PlanError, because its ranks are elsewhere."""
        raise PlanError(
            "This step was compiled for ranks that are not here: lazyinline.save it, and "
            "lazyinline.load the file on each of them."
        )


def step_elsewhere(state: Compilation) -> ParallelElsewhere:
    """Compiles the step of each rank of a mesh; programs that ranks share are compiled once."""
    subject, linked = state.subject, dict[str, Compilation]()
    assert subject is not None
    kept = []
    with state.context.cached(state.report):
        state = run(between(PASSES, last="decompose"), state)
        sources = [s for s in state.captured.program.sources if isinstance(s, ModelTensor)]
        own = [sources[i] for i in state.step.gradients]
        check_leaves([(tensor_name(s.name), s.tensor) for s in own])
        flat = torch_pytree.flatten((subject.args, subject.kwargs))
        guard = Guard(subject.model, state.captured, *flat)
        for coordinate, one in _of_each_rank(state):
            one = run(between(PASSES, "shard", "shard"), one)
            text = text_to_compare(one.programs["step"])
            if text not in linked:
                linked[text] = run(between(PASSES, "lower", "link"), one)
            runs = linked[text].runs
            assert isinstance(runs, PlannedProgram)
            lowered = replace(linked[text], subject=None, flats={}, runs=None, sharder=None)
            kept.append(_kept(subject.model, guard, lowered, runs.plans, coordinate))
    return ParallelElsewhere(kept)


def stages_elsewhere(asked: AskedPipeline) -> ParallelElsewhere:
    """Compiles the stages of each rank of a mesh with a pipeline dimension."""
    check_backwards(asked.table)  # before the compile, whose result can only be saved
    state = asked.begun()
    guard, kept = asked.guard(state), []
    state = run(between(PASSES, "plan", "autodiff"), state)
    with state.context.cached(state.report):
        for coordinate, one in _of_each_rank(state):
            for rank in range(asked.ranks.num_ranks):
                made = replace(fitted(replace(one, rank=rank)), sharder=None)
                kept.append(_kept(asked.model, guard, made, (), coordinate, asked))
    return ParallelElsewhere(kept)


def check_backwards(table: ActionTable) -> None:
    """Raises FileError if the programs of a schedule over a mesh cannot be saved."""
    if table.splits_backward:
        raise FileError(
            f"{table.schedule} splits backwards, and over a mesh only their halves exist, but a "
            "file has whole ones: save it with another schedule."
        )


def _of_each_rank(state: State) -> Iterator[tuple[tuple[int, ...], State]]:
    """Yields the state for each rank of the mesh, while this process acts as that rank."""
    # Imported late: DTensor takes as long to import as all of lazyinline.
    from ..pipeline_parallel.mesh.sharded import Ends
    from ..pipeline_parallel.mesh.torch_collectives import become, forget_meshes

    on_mesh, plan, ends = state.goal.on_mesh, state.mesh_plan, Ends()
    assert on_mesh is not None and plan is not None
    mesh = on_mesh.mesh
    coordinates = list(itertools.product(*map(range, mesh.shape)))
    # First and last rank first: closures that are equal on both are equal on all ranks.
    for coordinate in dict.fromkeys((coordinates[0], coordinates[-1], *coordinates)):
        become(mesh, coordinate)
        if not all(one.is_even for one in ends.sharders):
            forget_meshes()  # DTensor caches the sizes of parts, which differ between ranks
        sharder = state.sharder if coordinate == coordinates[0] else None
        sharder = sharder or sharder_of(state, plan, ends)
        yield coordinate, replace(state, sharder=sharder)
        if len(ends.sharders) < 2:
            ends.sharders.append(sharder)
    become(mesh, coordinates[0])


def _kept(
    whole: nn.Module,
    guard: Guard,
    lowered: Any,
    plans: Sequence[Any],
    coordinate: Sequence[int],
    asked: AskedPipeline | None = None,
) -> KeptOnMesh:
    """Returns what a file holds of the rank at a coordinate of the mesh without pipeline."""
    assert isinstance(whole, LossModel) and lowered.mesh_plan is not None
    on_mesh, place = lowered.goal.on_mesh, list(coordinate)
    mesh = on_mesh.mesh if asked is None else on_mesh.whole
    if asked is not None:
        place.insert(mesh.mesh_dim_names.index(stage_dimension(mesh)), lowered.rank)
    parameters = WholeParameters(whole.model, lowered.mesh_plan, coordinate)
    own = whole.model, guard, lowered, plans, parameters
    return KeptOnMesh(*own, mesh, int(mesh.mesh[tuple(place)]), asked)
