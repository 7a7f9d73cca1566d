"""The plan of a pipeline: balanced stages, memory limits, the simulator, the picture."""

import itertools
import math
from dataclasses import replace
from functools import cache

import pytest
from decoders import DecoderBlock, llama
from test_rank_plan import table_of

import lazyinline
from lazyinline import PipelineError, lazy_inline
from lazyinline.autodiff.derivative import Differentiator
from lazyinline.frontend.compiler import Compiler
from lazyinline.frontend.options import Options
from lazyinline.frontend.page.page import ShownPlan, plan_page
from lazyinline.frontend.page.sections import plan_rows
from lazyinline.pipeline_parallel.actions import SCHEDULES, Action
from lazyinline.pipeline_parallel.coloring import CallCosts, color_balanced
from lazyinline.pipeline_parallel.cut import cut_program
from lazyinline.pipeline_parallel.plan import PipelinePlan, StagePlan, make_plan, simulate
from lazyinline.pipeline_parallel.stage_derivative import differentiate_stages
from lazyinline.reuse.ir.costs import CPU, OperatorCosts, ProgramCosts
from lazyinline.reuse.ir.program import Program

lazy_inline(DecoderBlock)


@cache
def captured() -> tuple[Program, Differentiator]:
    model, args = llama(6, hidden=16, num_heads=2, vocab=400, seq=8)
    differentiator = Compiler(Options(backend="eager")).context.differentiator
    return lazyinline.capture(model, args, train=True), differentiator


def plan(
    schedule: str, num_ranks: int = 2, micro_batches: int = 8, memory_bytes: int | None = None
) -> PipelinePlan:
    """The plan of a decoder of six layers with a large head."""
    program, differentiator = captured()
    table = table_of(schedule, num_ranks, micro_batches)
    costs = CallCosts(differentiator, ProgramCosts(OperatorCosts(fused=False)))
    colors, _ = color_balanced(program, costs, table, memory_bytes)
    stages = cut_program(program, colors, table.num_stages)
    derived = differentiate_stages(stages, differentiator, halves=table.splits_backward)
    return make_plan(derived, table, costs.program, CPU)


def test_the_slowest_stage_is_no_slower_than_with_any_other_split() -> None:
    found = plan("1F1B")
    times = [s.forward_s + s.backward_s for s in found.stages]
    layers = [s.num_blocks for s in found.stages]
    assert sum(layers) == 6
    assert layers[0] > layers[1], "the head is heavy"
    layer_s = times[0] / layers[0]
    assert max(times) - min(times) <= 1.5 * layer_s


def test_a_memory_limit_moves_layers_to_where_fewer_micro_batches_wait() -> None:
    free = plan("1F1B")
    fullest = max(s.flight_bytes * s.in_flight for s in free.stages)
    first = free.stages[0]
    limit = first.parameter_bytes + first.gradient_bytes + fullest * 3 // 4
    bound = plan("1F1B", memory_bytes=limit)
    assert bound.stages[0].num_blocks < first.num_blocks
    assert bound.step_s >= free.step_s


def test_a_limit_that_nothing_fits_is_refused_with_the_numbers() -> None:
    with pytest.raises(PipelineError, match=r"memory_bytes_per_rank=1000: .* needs \d+ bytes"):
        plan("1F1B", memory_bytes=1000)


def test_fewer_pieces_than_stages_are_refused() -> None:
    with pytest.raises(PipelineError, match="num_stages=64"):
        plan("1F1B", num_ranks=64, micro_batches=64)


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
@pytest.mark.parametrize(("num_ranks", "micro_batches"), [(2, 4), (4, 8), (4, 32)])
def test_the_bubble_of_equal_stages_is_the_known_one(
    schedule: str, num_ranks: int, micro_batches: int
) -> None:
    table = table_of(schedule, num_ranks, micro_batches)
    timeline = simulate(table, lambda a: 1.0 if a.kind == "F" else 2.0, lambda a: 0.0)
    known = (num_ranks - 1) / (micro_batches + num_ranks - 1)
    assert timeline.bubble == pytest.approx(known)


def test_zero_bubble_waits_less_than_interleaved() -> None:
    bubbles = [
        simulate(table_of(s, 4, 16), lambda a: 2.0 if a.kind == "B" else 1.0, lambda a: 0.0).bubble
        for s in ("ZBVZeroBubble", "Interleaved1F1B", "LoopedBFS")
    ]
    assert bubbles[0] < bubbles[1] < bubbles[2] + 1e-9


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_nothing_starts_before_what_it_needs(schedule: str) -> None:
    found = plan(schedule)
    ends = {slot.action: slot.end_s for slot in found.timeline.slots}
    assert len(ends) == sum(map(len, found.table.ranks))
    for slot in found.timeline.slots:
        action = slot.action
        if action.kind == "F" and action.stage:
            assert ends[Action("F", action.stage - 1, action.micro_batch)] <= slot.start_s
        if action.kind == "W":
            assert ends[Action("I", action.stage, action.micro_batch)] <= slot.start_s
    for rank in range(2):
        own = sorted((s.start_s, s.end_s) for s in found.timeline.slots if s.rank == rank)
        assert all(b[0] >= a[1] - 1e-12 for a, b in itertools.pairwise(own))


def test_one_forward_one_backward_keeps_fewer_in_flight() -> None:
    assert [s.in_flight for s in plan("GPipe").stages] == [8, 8]
    assert [s.in_flight for s in plan("1F1B").stages] == [2, 1]


def test_the_plan_names_layers_and_fits_a_screen_with_long_names_and_large_numbers() -> None:
    found = plan("ZBVZeroBubble")
    large = {"flops": 10**16, "forward_s": 1.25, "backward_s": 3.1, "parameter_bytes": 2**36}
    assert all(text in str(found) for text in ("blocks.0", "blocks.5", "bubble"))
    far = ".".join(["language_model_of_the_whole"] * 4)
    names = [{"first": "model.h.0", "last": "model.h.11"}, {"first": far, "last": f"x.{far}"}]
    for name in names:
        stages = tuple(replace(s, **large, **name) for s in found.stages)
        text = str(replace(found, stages=stages))
        assert max(map(len, text.splitlines())) <= 100
        assert "10000000.00" in text and "3100.00 ms" in text
        assert ("model.h.0 .. 11" in text) == (name is names[0])


@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
def test_its_page_has_every_action_and_the_memory_of_each_rank(schedule: str) -> None:
    found = plan(schedule)
    section = plan_page(ShownPlan.of(found))["pipeline"]
    assert len(section["slots"]) == len(found.timeline.slots)
    for rank, drawn in enumerate(section["ranks"]):
        most = max(held for _, held in drawn["held"])
        assert most == found.peak_bytes(rank) == drawn["peak_bytes"]
    waits = [drawn["bubble"] for drawn in section["ranks"]]
    assert sum(waits) / len(waits) == pytest.approx(found.bubble)


def test_its_page_has_predicted_beside_measured() -> None:
    found = plan("1F1B")
    measured = {(s.index, kind): 0.25 for s in found.stages for kind in "FB"}
    *actions, step, bubble = plan_rows(found, measured)
    assert [row[3] for row in actions] == [0.25] * 4
    assert actions[0][2] == found.stages[0].backward_s  # sorted: B before F
    assert step[2:] == (found.step_s, found.simulated(measured).step_s)
    assert [row[3] for row in plan_rows(found, None)] == [None, None]
    assert plan_page(ShownPlan.of(found))["predicted"]["rows"][1] == (*bubble[:3], None)


def test_costs_count_the_products_of_a_layer() -> None:
    stage: StagePlan = plan("1F1B").stages[0]
    per_layer = 2 * (2 * 8) * (16 * 48 + 16 * 16 + 3 * 16 * 64)  # products with a weight
    per_layer += 2 * 2 * 2 * 8 * 8 * 16  # attention
    assert math.isclose(stage.flops, 3 * per_layer * stage.num_blocks, rel_tol=0.15)
