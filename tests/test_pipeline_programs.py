"""Pipeline passes on programs: cutting, colouring, halving, partitioning. No processes."""

import itertools
import math
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from programs import assert_same, random_arguments, random_program
from test_pipeline_plan import table_of

import lazyinline
from lazyinline import PipelineError
from lazyinline.pipeline_parallel.actions import SCHEDULES
from lazyinline.pipeline_parallel.coloring import (
    color_by_bounds,
    extra_seconds,
    hull_steps,
    partition,
    units_of,
)
from lazyinline.pipeline_parallel.cut import Colors, Stage, cut_program
from lazyinline.pipeline_parallel.stage_derivative import Splitter
from lazyinline.pipeline_parallel.torch_pipelining import action_table
from lazyinline.reuse.ir.leaf import flatten_value, interpret
from lazyinline.reuse.ir.program import Composite, Program, UserInput
from lazyinline.reuse.ir.rewrite import verify

SEEDS = range(60)
BATCH = 20


def sourced(seed: int) -> Program:
    """A random program without structs, whose inputs are the user's."""
    program = random_program(seed, structs=False)
    sources = tuple(UserInput(i, f"x{i}") for i in range(len(program.inputs)))
    return replace(program, sources=sources)


def places(program: Program, *, deep: bool) -> list[tuple[int, ...]]:
    """Where a program may be cut: between calls, or between the calls of composites too."""
    opened: set[tuple[int, ...]] = set()
    while deep:
        units = [p for p, c in units_of(program, opened) if isinstance(c.closure, Composite)]
        if not units:
            break
        opened.update(units)
    return [p for p, _ in units_of(program, opened)]


def run_stages(stages: list[Stage], args: list[Any]) -> tuple[Any, ...]:
    """Runs stage after stage, handing on what is sent."""
    carried: tuple[Any, ...] = ()
    for stage in stages:
        own = [args[s.index] for s in stage.sources if isinstance(s, UserInput)]
        carried = interpret(verify(stage.program), [*carried, *own])
    return carried


@pytest.mark.parametrize("start", SEEDS[::BATCH])
def test_stages_in_a_row_give_what_the_whole_gives(start: int) -> None:
    for seed in range(start, start + BATCH):
        rng = random.Random(seed)
        program = sourced(seed)
        candidates = places(program, deep=bool(seed % 2))[1:]
        bounds = sorted(rng.sample(candidates, min(len(candidates), rng.randint(1, 4))))
        num_stages = len(bounds) + 1
        colors: Colors = color_by_bounds(program, bounds)
        stages = cut_program(program, colors, num_stages)
        args = random_arguments(program, seed)
        found, expected = run_stages(stages, args), interpret(program, args)
        what = f"seed {seed}, {num_stages} stages"
        assert_same(flatten_value(found), flatten_value(expected), what)


@pytest.mark.parametrize("structs", [False, True])
def test_halves_together_give_what_the_whole_gives(structs: bool) -> None:
    for seed in range(80):
        rng = random.Random(seed)
        program = random_program(seed, structs=structs)
        closure = Composite("whole", program)
        count = len(program.outputs)
        early = rng.sample(range(count), rng.randint(0, count))
        halves = Splitter().split(closure, early)
        args = random_arguments(program, seed)
        expected = interpret(program, args)
        results: dict[int, Any] = {}
        carried: list[Any] = []
        for half, taken, given in (
            (halves.early, halves.early_inputs, halves.early_outputs),
            (halves.late, halves.late_inputs, halves.late_outputs),
        ):
            if half is not None:
                assert isinstance(half, Composite)
                found = interpret(verify(half.program), [*carried, *(args[i] for i in taken)])
                results.update(zip(given, found, strict=False))
                carried = list(found[len(given) :])  # the early one hands on a struct
        assert not carried or halves.late is None
        together = tuple(results[i] for i in range(count))
        assert_same(flatten_value(together), flatten_value(expected), f"seed {seed}")


def test_no_operator_but_views_runs_in_both_halves() -> None:
    from decoders import DecoderBlock, llama

    from lazyinline.frontend.compiler import Compiler
    from lazyinline.frontend.options import Options

    lazyinline.lazy_inline(DecoderBlock)
    model, args = llama(2, hidden=16, num_heads=2, vocab=11, seq=4)
    program = lazyinline.capture(model, args, train=True)
    block = next(c for c in program.closures if c.name == "DecoderBlock")
    names = block.input_names  # type: ignore[union-attr]
    wanted = [i for i, name in enumerate(names) if name not in ("cos_TK", "sin_TK")]
    differentiator = Compiler(Options(backend="eager")).context.differentiator
    derivative = differentiator.vjp(block, wanted, [0])
    assert derivative is not None
    state = derivative.gradient_inputs.index(names.index("x_BTD"))
    halves = Splitter().split(derivative.backward, [state])
    assert halves.early is not None and halves.late is not None
    products = [
        sum(n.target is torch.ops.aten.mm.default for n in half.nodes)  # type: ignore[union-attr]
        for half in (derivative.backward, halves.early, halves.late)
    ]
    assert products == [10, 5, 5]


@pytest.mark.parametrize("num_micro_batches", [1, 8])
def test_partition_equals_brute_force(num_micro_batches: int) -> None:
    rng = np.random.default_rng(num_micro_batches)
    for _ in range(100):
        size = int(rng.integers(2, 9))
        num_stages = int(rng.integers(1, min(size, 4) + 1))
        times = np.full((num_stages, size + 1, size + 1), np.inf)
        for s, i, j in np.ndindex(*times.shape):
            if i < j and rng.random() > 0.15:
                times[s, i, j] = rng.random() * (j - i)
        best = math.inf
        for cuts in itertools.combinations(range(1, size), num_stages - 1):
            bounds = (0, *cuts, size)
            parts = [times[s, bounds[s], bounds[s + 1]] for s in range(num_stages)]
            if all(map(math.isfinite, parts)):
                best = min(best, sum(parts) + (num_micro_batches - 1) * max(parts))
        found = partition(times, num_micro_batches)
        if found is None:
            assert best == math.inf
            continue
        parts = [times[s, found[s], found[s + 1]] for s in range(num_stages)]
        assert sum(parts) + (num_micro_batches - 1) * max(parts) == pytest.approx(best)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_stage_runs_every_micro_batch_once(schedule: str) -> None:
    table = table_of(schedule, 4)
    for stage in range(table.num_stages):
        own = [a for a in table.ranks[table.rank_of[stage]] if a.stage == stage]
        by_kind: dict[str, list[int]] = {}
        for action in own:
            by_kind.setdefault(action.kind, []).append(action.micro_batch)
        assert sorted(by_kind["F"]) == list(range(8))
        whole, halves = by_kind.get("B", []), by_kind.get("I", [])
        assert sorted(whole + halves) == list(range(8))
        assert sorted(halves) == sorted(by_kind.get("W", []))


@pytest.mark.parametrize(
    ("schedule", "num_stages", "message"),
    [("1F1B", 3, "multiple of 2"), ("1F1B", 4, "one stage"), ("ZBVZeroBubble", 8, "two stage")],
)
def test_stages_that_a_schedule_cannot_place_are_refused(
    schedule: str, num_stages: int, message: str
) -> None:
    with pytest.raises(PipelineError, match=message):
        action_table(schedule, num_stages, 2, 8)


def test_without_processes_the_error_says_how_to_start() -> None:
    with pytest.raises(PipelineError, match="torchrun"):
        lazyinline.pipeline(torch.nn.Linear(2, 2), (), num_stages=2, micro_batches=2)


@pytest.mark.parametrize("seed", range(20))
def test_seconds_computed_again_are_near_the_least_there_are(seed: int) -> None:
    rng = random.Random(seed)
    kinds = []
    for _ in range(2):
        sizes = sorted(rng.sample(range(1, 40), 3))
        spent = sorted((rng.random() for _ in sizes), reverse=True)
        kinds.append(list(zip(sizes, spent, strict=True)))
    variants = [kinds[rng.randrange(2)] for _ in range(4)]
    room = np.full((1, 5, 5), rng.uniform(10.0, 150.0))
    found = extra_seconds(variants, room)
    worst = max(spared for kind in kinds for _, spared in hull_steps(kind))
    for i, j in itertools.combinations(range(5), 2):
        fitting = [
            sum(s for _, s in row)
            for row in itertools.product(*variants[i:j])
            if sum(b for b, _ in row) <= room[0, i, j]
        ]
        if not fitting:
            assert np.isinf(found[0, i, j])
        else:
            assert min(fitting) - 1e-9 <= found[0, i, j] <= min(fitting) + worst + 1e-9
