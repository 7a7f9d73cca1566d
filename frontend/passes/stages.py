"""Passes of one rank of a pipeline: its stages are cut out, differentiated and planned together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ...pipeline_parallel.schedule.rank_order import rank_order
from ...pipeline_parallel.split.cut import cut_program
from ...pipeline_parallel.stages.make_plan import make_plan
from ...pipeline_parallel.stages.stage_derivative import StageDerivative
from ...pipeline_parallel.stages.stage_derivative import differentiate_stages as derivatives_of
from ...reuse.ir.program import Program
from .memory import linked
from .parts import PARTS
from .rank import RankCompilation
from .rank_compile import boundaries_of, part_name, parts_of, plan_rank
from .stage_recompute import StageRecompute
from .stage_split import colors_of
from .state import Unplanned, compile_pass


@compile_pass("split")
def split(state: RankCompilation) -> RankCompilation:
    """Calls are coloured by stage, and shared closures cut where the colours change."""
    program, table = state.programs[PARTS[0]], state.table
    assert state.subject is not None
    colors = colors_of(state.subject.model, program, state.splitting, table, state.costs)
    stages = tuple(cut_program(program, colors, table.num_stages))
    programs = {f"stage {stage.index}": stage.program for stage in stages}
    return replace(state, stages=stages, programs=programs)


@compile_pass("autodiff")
def differentiate_stages(state: RankCompilation) -> RankCompilation:
    """Each stage becomes a forward and a backward, from the loss to the first."""
    plain = tuple(derivatives_of(state.stages, state.context.differentiator, halves=False))
    return replace(state, plain=plain, derived=plain, programs=_programs(plain))


@compile_pass("recompute")
def choose_stage_recompute(state: RankCompilation) -> RankCompilation:
    """What each stage saves is chosen; backwards are halved if the schedule wants it."""
    derived = derivatives_of(
        state.stages,
        state.context.differentiator,
        halves=state.table.splits_backward,
        chosen=StageRecompute(state).chosen,
    )
    state = replace(state, derived=tuple(derived))
    requests = [one.request for one in state.own if one.derivative is not None]
    state.context.recompute.note(requests, state.report)
    return replace(state, programs=_programs(state.own))


@compile_pass("link", "flat")
def link_rank(state: RankCompilation) -> RankCompilation:
    """All that the rank runs is laid out in the schedule's order: the deferred inline."""
    order = rank_order(state.table, state.rank, boundaries_of(state.derived))
    state = linked(replace(state, ordered=order))
    planned, report = plan_rank(state), state.report
    if isinstance(planned, Unplanned):
        report.unplanned = planned.reason
        return replace(state, unplanned=planned)
    report.num_launches = planned.num_launches
    report.peak_bytes = report.arena_bytes = planned.plan.arena.peak_bytes
    report.lower_bound_bytes = planned.plan.lower_bound_bytes
    report.held_bytes = planned.plan.held_bytes
    return replace(state, runs=planned)


@compile_pass("predict", "flat")
def predict(state: RankCompilation) -> RankCompilation:
    """The schedule is simulated: what a step of all ranks takes, and the bubble in it."""
    plan = make_plan(state.derived, state.table, state.costs, state.rates)
    return replace(state, predicted=plan)


def _programs(derived: Iterable[StageDerivative]) -> dict[str, Program]:
    return {
        part_name(one, kind): program for one in derived for kind, program in parts_of(one).items()
    }
