"""Link in random orders: any order that respects data gives the interpreter's bits.

Random programs, with fan-out, aliases, views and sums that may be made in their operand's memory,
are laid out in random topological orders of their launches, planned and run. Where buffers live is
found again from the launches, and no two that live at the same time may share a byte.
"""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from halves import differentiated
from programs import MATRIX, assert_same, binary_leaf, random_arguments, random_program

from lazyinline.backend.kernels.torch_recorder import record_graph
from lazyinline.backend.link.link import FlatProgram, link
from lazyinline.backend.run.planned import PlannedProgram
from lazyinline.backend.run.runtime import PlannedRuntime
from lazyinline.reuse.ir.interpreter import flatten_value, interpret
from lazyinline.reuse.ir.program import Call, Leaf, Program, Value

SEEDS = range(300)
BATCH = 25
"""Programs per test: a test each would cost more than the programs."""

ADD = binary_leaf(torch.ops.aten.add.Tensor, name="sum")


def with_sums(program: Program, rng: random.Random) -> Program:
    """Adds sums of a program's matrices: each may take over the memory of its first operand."""
    values = [*program.inputs, *(v for call in program.calls for v in call.results)]
    pool = [v for v in values if v.type == MATRIX]
    calls, made = list(program.calls), []
    for _ in range(rng.randint(2, 6) if pool else 0):
        first, second = rng.choice(pool), rng.choice(pool)
        total = Value(MATRIX)
        calls.append(Call(ADD, (first, second), (total,)))
        if rng.random() < 0.7 and len(pool) > 1:
            pool.remove(first)  # so that this is its last use
        pool.append(total)
        made.append(total)
    outputs = (*program.outputs, *made[-1:], *rng.sample(made, min(1, len(made))))
    return Program(program.inputs, tuple(calls), outputs)


def in_random_order(flat: FlatProgram, rng: random.Random) -> FlatProgram:
    """Returns the launches in a random topological order, with last uses found anew."""
    waiting = list(flat.launches)
    there, order = set(flat.inputs), []
    while waiting:
        ready = [launch for launch in waiting if there.issuperset(launch.operands)]
        launch = rng.choice(ready)
        waiting.remove(launch)
        there.update(launch.results)
        order.append(launch)
    last = {}
    for index, launch in enumerate(order):
        last.update(dict.fromkeys((*launch.operands, *launch.results), index))
    launches = tuple(
        replace(
            launch,
            frees=tuple(s for s, at in last.items() if at == index and s not in flat.outputs),
        )
        for index, launch in enumerate(order)
    )
    return replace(flat, launches=launches)


def planned_program(flats: Sequence[FlatProgram], **options: Any) -> PlannedProgram:
    leaves = {launch.leaf: None for flat in flats for launch in flat.launches}
    return PlannedProgram(flats, {leaf: record_graph(leaf) for leaf in leaves}, **options)


def lives(planned: PlannedProgram) -> dict[int, tuple[int, int]]:
    """First and last launch that touches each arena buffer; what stays pinned lives to the end."""
    found: dict[int, tuple[int, int]] = {}
    number = 0
    for part in planned.layout.parts:
        for placed in part.launches:
            for view in placed.launch.views():
                instance = placed.bases[view.buffer][0]
                found[instance] = (found.get(instance, (number, 0))[0], number)
            number += 1
    for place in planned.layout.parts[-1].outputs:
        if place.instance in found:
            found[place.instance] = (found[place.instance][0], number)
    kinds = [instance.kind for instance in planned.layout.instances]
    return {i: span for i, span in found.items() if kinds[i] == "arena"}


def assert_no_clash(planned: PlannedProgram, what: str) -> None:
    """All pairs: two buffers share bytes only if one is done with before the other begins."""
    boxes = [
        (*span, planned.offsets[i], planned.layout.instances[i].num_bytes)
        for i, span in lives(planned).items()
    ]
    for index, (first, last, offset, size) in enumerate(boxes):
        for other_first, other_last, other_offset, other_size in boxes[:index]:
            apart_in_time = last < other_first or other_last < first
            apart_in_memory = offset + size <= other_offset or other_offset + other_size <= offset
            assert apart_in_time or apart_in_memory, f"{what}: two live buffers share memory"
        assert offset >= 0 and offset + size <= planned.plan.peak_bytes, f"{what}: outside"


def subject(seed: int) -> tuple[Program, list[Any], random.Random]:
    rng = random.Random(seed)
    program = with_sums(random_program(seed), rng)
    return program, random_arguments(program, seed), rng


@pytest.mark.parametrize("start", SEEDS[::BATCH])
@pytest.mark.sweep(keep=["[0]", "[75]", "[150]"])
def test_any_order_of_launches_gives_the_interpreters_bits(start: int) -> None:
    for seed in range(start, start + BATCH):
        program, args, rng = subject(seed)
        expected = flatten_value(interpret(program, args))
        given = flatten_value(tuple(args))
        before = [t.clone() for t in given]
        for order in range(2):
            what = f"seed {seed}, order {order}"
            flat = in_random_order(link(program), rng)
            run = run_pinned if (seed + order) % 3 == 0 else run_owned
            for number, results in enumerate(run(flat, given, what)):
                assert_same(results, expected, f"{what}, run {number}")
            assert_same(given, before, f"{what}: inputs")


def run_owned(flat: FlatProgram, given: list[Any], what: str) -> list[list[Any]]:
    """Runs twice; results belong to the user, so both runs' are looked at in the end."""
    count = len(flat.outputs)
    planned = planned_program([flat], model_inputs=[], num_results=[count])
    assert_no_clash(planned, what)
    runtime = PlannedRuntime(planned, count, 0)
    return [runtime.forward(list(given))[0] for _ in range(2)]


def run_pinned(flat: FlatProgram, given: list[Any], what: str) -> list[list[Any]]:
    """Runs twice; results stay in the arena, so each run's are copied before the next."""
    count = len(flat.outputs)
    planned = planned_program(
        [flat], model_inputs=range(len(given)), num_results=[count], results="pinned"
    )
    assert_no_clash(planned, what)
    lease = planned.lease(list(given))
    return [[t.clone() for t in lease.runners[0]([])] for _ in range(2)]


@pytest.mark.parametrize("start", range(0, 50, BATCH))
@pytest.mark.sweep(keep="[0]")
def test_forward_and_backward_in_any_order_share_one_arena(start: int) -> None:
    for seed in range(start, start + BATCH):
        halves = differentiated(seed)
        rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        flats = [in_random_order(link(p), rng) for p in halves.programs]
        planned = planned_program(flats, model_inputs=[], **halves.options)
        assert_no_clash(planned, f"seed {seed}")
        runtime = halves.runtime(planned)
        args, seeds = halves.arguments(seed, generator)
        results, flight = runtime.forward(list(args))
        primal, expected = halves.interpreted(args, seeds)
        gradients = runtime.backward(flight, halves.handed(args, results, seeds), "free")
        assert_same(results, primal, f"seed {seed}, forward")
        assert_same(gradients, expected, f"seed {seed}, backward")


def test_orders_and_programs_cover_what_they_should() -> None:
    seen: Counter[str] = Counter()
    for seed in SEEDS[::3]:
        program, _, rng = subject(seed)
        flat = link(program)
        shuffled = in_random_order(flat, rng)
        seen["another order"] += [x.results for x in shuffled.launches] != [
            x.results for x in flat.launches
        ]
        uses = Counter(s for launch in flat.launches for s in launch.operands)
        seen["fan-out"] += any(n > 1 for n in uses.values())
        planned = planned_program([shuffled], model_inputs=[], num_results=[len(flat.outputs)])
        kinds = Counter(instance.kind for instance in planned.layout.instances)
        seen["made in its operand's memory"] += kinds["unused"] > 0
        seen["made by the operator"] += kinds["foreign"] > 0
        places = [p for part in planned.layout.parts for p in part.outputs]
        seen["results that share memory"] += len({p.instance for p in places}) < len(places)
        seen["views with an offset"] += any(
            view.offset_bytes
            for part in planned.layout.parts
            for placed in part.launches
            for view in placed.launch.views()
        )
        seen["bytes used twice"] += (
            sum(planned.layout.instances[i].num_bytes for i in lives(planned))
            > planned.plan.peak_bytes
        )
        leaves = {launch.leaf for launch in flat.launches if isinstance(launch.leaf, Leaf)}
        seen["operators in place"] += any(
            getattr(getattr(node.target, "_schema", None), "is_mutable", False)
            for leaf in leaves
            for node in leaf.module.graph.nodes
        )
    few = {what: n for what, n in seen.items() if n < len(SEEDS[::3]) // 10}
    assert not few, f"hardly ever, of {len(SEEDS[::3])} programs: {few}"


def test_the_proof_finds_a_clash(monkeypatch: pytest.MonkeyPatch) -> None:
    program, _, _ = subject(1)
    planned = planned_program([link(program)], model_inputs=[], num_results=[1])
    assert_no_clash(planned, "as planned")
    monkeypatch.setattr(planned, "offsets", [0] * len(planned.offsets))
    with pytest.raises(AssertionError, match="share memory"):
        assert_no_clash(planned, "all at 0")
