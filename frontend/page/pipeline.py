"""The section on a pipeline: the schedule in time, memory per rank; what is predicted of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ...pipeline_parallel.schedule.actions import (
    ACTION_TEXT,
    BACKWARD,
    BACKWARD_WEIGHT,
    COMPUTE,
    FORWARD,
)
from ...pipeline_parallel.schedule.plan import PipelinePlan, StagePlan
from ...pipeline_parallel.schedule.simulation import Timeline
from .predicted import Row

Measured = Mapping[tuple[int, str], float]
"""Seconds of (stage, kind of action), as ``pipe.measured_s()`` returns them."""


def pipeline_section(plan: PipelinePlan) -> dict[str, Any]:
    """Returns the predicted step, action by action, and what each rank holds meanwhile."""
    table = plan.table
    return {
        "schedule": table.schedule,
        "micro_batches": table.num_micro_batches,
        "step_s": plan.step_s,
        "bubble": plan.bubble,
        "kinds": [[kind, ACTION_TEXT[kind]] for kind in COMPUTE],
        "slots": [
            [s.rank, s.start_s, s.end_s, s.action.kind, s.action.stage, s.action.micro_batch]
            for s in plan.timeline.slots
        ],
        "ranks": [_rank(plan, rank) for rank in range(len(table.ranks))],
        "stages": [_stage(stage) for stage in plan.stages],
    }


def plan_rows(plan: PipelinePlan, measured_s: Measured | None) -> Iterator[Row]:
    """Yields predicted beside measured seconds of actions, and of the step that they make."""
    for (stage, kind), seconds in sorted((measured_s or {}).items()):
        what = f"stage {stage}, {ACTION_TEXT[kind]}"
        yield what, "s", _predicted(plan.stages[stage], kind), seconds
    found = plan.simulated(dict(measured_s)) if measured_s else None
    yield "step", "s", plan.step_s, None if found is None else found.step_s
    yield "bubble", "share", plan.bubble, None if found is None else found.bubble


def _predicted(stage: StagePlan, kind: str) -> float:
    if kind == FORWARD:
        return stage.forward_s
    return stage.backward_s if kind == BACKWARD else stage.backward_s / 2


def _rank(plan: PipelinePlan, rank: int) -> dict[str, Any]:
    own = [s for s in plan.stages if s.rank == rank]
    fixed = sum(s.parameter_bytes + s.gradient_bytes for s in own)
    return {
        "stages": [s.index for s in own],
        "parameter_bytes": sum(s.parameter_bytes for s in own),
        "gradient_bytes": sum(s.gradient_bytes for s in own),
        "peak_bytes": plan.peak_bytes(rank),
        "bubble": _waits(plan.timeline, rank),
        "held": [[t, fixed + held] for t, held in _flights(plan, rank)],
    }


def _waits(timeline: Timeline, rank: int) -> float:
    busy = sum(s.end_s - s.start_s for s in timeline.slots if s.rank == rank)
    return 1.0 - busy / timeline.step_s if timeline.step_s else 0.0


def _flights(plan: PipelinePlan, rank: int) -> list[tuple[float, int]]:
    """Bytes that micro-batches in flight hold on a rank: from a forward to its last backward."""
    held, points = 0, {0.0: 0}
    sizes = {s.index: s.flight_bytes for s in plan.stages}
    for slot in sorted((s for s in plan.timeline.slots if s.rank == rank), key=lambda s: s.start_s):
        if slot.action.kind == FORWARD:
            held += sizes[slot.action.stage]
            points[slot.start_s] = held
        elif slot.action.kind in (BACKWARD, BACKWARD_WEIGHT):
            held -= sizes[slot.action.stage]
            points[slot.end_s] = held
    return [*points.items(), (plan.step_s, held)]


def _stage(stage: StagePlan) -> dict[str, Any]:
    return {
        "stage": stage.index,
        "rank": stage.rank,
        "calls": stage.num_blocks,
        "first": stage.first,
        "last": stage.last,
        "flops": stage.flops,
        "forward_s": stage.forward_s,
        "backward_s": stage.backward_s,
        "parameter_bytes": stage.parameter_bytes,
        "saved_bytes": stage.saved_bytes,
        "in_flight": stage.in_flight,
    }
