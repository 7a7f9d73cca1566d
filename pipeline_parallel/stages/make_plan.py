"""Makes the plan of derived stages."""

from __future__ import annotations

from collections.abc import Sequence

from ...reuse.ir.costs import Cost, Rates
from ...reuse.ir.program import Composite, Program
from ...reuse.ir.transfer import Wire
from ...reuse.ir.types import TensorType
from ..schedule.actions import FORWARD, Action, ActionTable
from ..schedule.plan import PipelinePlan, StagePlan, predicted_durations
from ..schedule.simulation import simulate
from ..split.call_costs import CallCosts
from .stage_derivative import StageDerivative


def make_plan(
    derived: Sequence[StageDerivative], table: ActionTable, costs: CallCosts, rates: Rates
) -> PipelinePlan:
    """Returns the plan of a pipeline's stages.

    Args:
        derived: every stage with its backward.
        table: what each rank does.
        costs: predicts durations.
        rates: of the device, for transfers.
    """
    in_flight = table.in_flight()
    stages = tuple(_stage(d, table, costs, in_flight) for d in derived)
    sent = {(FORWARD, d.stage.index): _wire_bytes(d.stage.sent_types) for d in derived}
    back = {d.stage.index: _wire_bytes(d.gradient_types) for d in derived}

    def transfer_s(action: Action) -> float:
        key = (action.kind, action.stage)
        num_bytes = sent[key] if key in sent else back[action.stage]
        return rates.transfer_latency_s + num_bytes / rates.transfer_bytes_per_s

    timeline = simulate(table, predicted_durations(stages), transfer_s)
    return PipelinePlan(table, stages, timeline)


def _stage(
    derived: StageDerivative, table: ActionTable, costs: CallCosts, in_flight: Sequence[int]
) -> StagePlan:
    stage = derived.stage
    forward = costs.program(derived.forward)
    backward = sum((costs.program(p) for p in derived.backward if p is not None), Cost())
    paths = stage.paths or ("",)
    owned = {id(s.tensor): s.tensor for s in stage.model_tensors}
    return StagePlan(
        stage.index,
        table.rank_of[stage.index],
        num_blocks(stage.program),
        paths[0],
        paths[-1],
        forward.seconds,
        backward.seconds,
        forward.flops + backward.flops,
        sum(t.numel() * t.element_size() for t in owned.values()),
        sum(t.num_bytes for _, t in derived.trained_types),
        derived.saved_bytes,
        sum(t.num_bytes for t in stage.received_types),
        in_flight[stage.index],
    )


def num_blocks(program: Program) -> int:
    """Returns the number of block calls: calls with a module path; parts count what is in them."""
    total = 0
    for call in program.calls:
        if call.path:
            total += 1
        elif isinstance(call.closure, Composite):
            total += num_blocks(call.closure.program)
    return total


def _wire_bytes(types: Sequence[TensorType]) -> int:
    return sum(Wire(t).num_bytes for t in types)
