"""A rank's arena: what was sent is not written over before it has arrived, in any timing."""

import random

import numpy as np
import pytest
import torch
from arena_proof import check_no_overlap
from decoders import DecoderBlock, llama

from lazyinline import PipelineError, lazy_inline
from lazyinline.backend.run.rank_program import RankPlan, RankProgram
from lazyinline.frontend.compiler import PASSES
from lazyinline.frontend.loss import LossModel
from lazyinline.frontend.options import Options
from lazyinline.frontend.page.arena import arena_section
from lazyinline.frontend.passes.context import Context
from lazyinline.frontend.passes.programs import estimate, lower
from lazyinline.frontend.passes.rank import Splitting, started
from lazyinline.frontend.passes.state import Subject, run
from lazyinline.pipeline_parallel.actions import SCHEDULES, Action, ActionTable
from lazyinline.pipeline_parallel.plan import simulate
from lazyinline.pipeline_parallel.rank_order import Boundaries, RankOrder, rank_order
from lazyinline.pipeline_parallel.steps import Progress
from lazyinline.pipeline_parallel.torch_pipelining import action_table
from lazyinline.reuse.ir.costs import CPU


def table_of(schedule: str, num_ranks: int, micro_batches: int = 8) -> ActionTable:
    per_rank = 1 if schedule in ("GPipe", "1F1B") else 2
    return action_table(schedule, per_rank * num_ranks, num_ranks, micro_batches)


def everything(table: ActionTable) -> Boundaries:
    last = table.num_stages - 1
    return Boundaries(frozenset(range(last)), frozenset(range(1, last + 1)))


def begins(table: ActionTable, seed: int) -> dict[Action, float]:
    """When each action begins, with random durations and transfers; halves of one begin at once."""
    rng = random.Random(seed)
    timeline = simulate(table, lambda a: rng.random() ** 4, lambda a: rng.random() ** 4)
    found = {slot.action: slot.start_s for slot in timeline.slots}
    for action, start in list(found.items()):
        if action.kind == "B":
            for kind in "IW":
                found[Action(kind, action.stage, action.micro_batch)] = start
    return found


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("schedule", [s for s in SCHEDULES if s != "1F1B"])
def test_what_counts_as_delivered_has_arrived_whatever_the_timing(
    schedule: str, num_ranks: int
) -> None:
    table = table_of(schedule, num_ranks, 2 * num_ranks)
    orders = [rank_order(table, rank, everything(table)) for rank in range(num_ranks)]
    num_known = 0
    for seed in range(20):
        start = begins(table, seed)
        for order in orders:
            for action, number in order.delivered.items():
                if number < len(order.actions):
                    step = 1 if action.kind == "F" else -1
                    taker = Action(action.kind, action.stage + step, action.micro_batch)
                    assert start[taker] <= start[order.actions[number]], (action, number)
                    num_known += 1
    assert num_known


def test_nothing_is_known_over_a_boundary_that_nothing_crosses() -> None:
    table = table_of("Interleaved1F1B", 2)
    both = rank_order(table, 0, everything(table)).delivered
    forward_only = Boundaries(everything(table).forward, frozenset())
    less = rank_order(table, 0, forward_only).delivered
    assert set(less) == {a for a in both if a.kind == "F"}
    assert all(less[a] >= both[a] for a in less)
    assert any(less[a] > both[a] for a in less)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_receive_starts_before_it_is_needed_and_a_send_is_kept_for_a_while(schedule: str) -> None:
    table = table_of(schedule, 4)
    for rank in range(4):
        order = rank_order(table, rank, everything(table))
        number = {action: i for i, action in enumerate(order.actions)}
        assert all(posted <= number[a] for a, posted in order.posted.items())
        assert all(delivered > number[a] for a, delivered in order.delivered.items())


def test_another_order_than_the_planned_one_is_refused() -> None:
    actions = (Action("F", 0, 0), Action("F", 0, 1))
    progress = Progress(RankOrder(actions, {actions[1]: 1}, {}))
    with pytest.raises(PipelineError, match="receive for 0F1 after 0 actions"):
        progress.check_receive(actions[1])
    with pytest.raises(PipelineError, match="runs 0F1, and memory was planned for 0F0"):
        progress.begin(actions[1])
    progress.begin(actions[0])
    progress.check_receive(actions[1])
    progress.begin(actions[1])
    with pytest.raises(PipelineError, match="planned for the end"):
        progress.begin(actions[0])


ESTIMATED = tuple(estimate if one is lower else one for one in PASSES)


@pytest.fixture(scope="module")
def context() -> Context:
    lazy_inline(DecoderBlock)
    return Context(Options(backend="inductor"))


def planned(context: Context, schedule: str, rank: int, micro_batches: int) -> RankPlan:
    """One rank's plan, without processes or kernels and with parameters on the meta device."""
    with torch.device("meta"):
        model, args = llama(8, hidden=32, num_heads=2, vocab=50, seq=8)
    subject = Subject(LossModel(model, None), args, {})
    table = table_of(schedule, 2, micro_batches)
    state = started(context, subject, table, rank, Splitting("even", None), CPU)
    made = run(ESTIMATED, state).runs
    assert isinstance(made, RankProgram)
    return made.plan


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.sweep(keep=["[1F1B", "LoopedBFS"])
def test_no_two_live_regions_overlap_and_the_arena_grows_with_depth_alone(
    context: Context, schedule: str
) -> None:
    peaks = {}
    # Up to 16 micro-batches of this schedule one more buffer lives at a time; from there on none.
    first = 16 if schedule == "InterleavedZeroBubble" else 8
    for micro_batches in (first, 2 * first):
        made = planned(context, schedule, 0, micro_batches)
        lives = made.region_lives()
        rows = np.array(list(lives.values()))
        offsets = [made.start_of(key) for key in lives]
        check_no_overlap(rows[:, 0], rows[:, 1], offsets, rows[:, 2])
        peaks[micro_batches] = made.arena.peak_bytes
        assert made.arena.peak_bytes <= 1.12 * made.arena.lower_bound_bytes
        assert made.lower_bound_bytes <= made.arena.peak_bytes
    if schedule not in ("GPipe", "LoopedBFS"):  # these run all forwards first
        # A search that comes nearer to the bound of one of the two shows as growth.
        assert peaks[2 * first] <= 1.03 * peaks[first]


@pytest.mark.parametrize("most_boxes", [100_000, 500])
def test_every_buffer_of_a_rank_is_drawn_at_its_place(context: Context, most_boxes: int) -> None:
    made = planned(context, "Interleaved1F1B", 1, 4)
    section = arena_section(made, most_boxes)
    assert section is not None and len(section["boxes"]) <= most_boxes
    rows = np.array(section["boxes"])
    assert len(rows) + section["left_out"] == section["num_buffers"]
    assert max(rows[:, 2] + rows[:, 3]) <= made.arena.peak_bytes == section["peak_bytes"]
    assert max(live for _, live in section["live"]) == made.lower_bound_bytes
    named = [section["names"][section["calls"][number]] for number in rows[:, 5]]
    assert any("micro-batch 3, stage 1: " in name and "blocks." in name for name in named)
    used = {section["kinds"][number] for number in rows[:, 4]}
    assert used >= {"passed on", "saved for backward", "between stages"}
    if not section["left_out"]:
        check_no_overlap(rows[:, 0], rows[:, 1], rows[:, 2], rows[:, 3])
