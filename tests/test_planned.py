"""Programs in one arena, their launches in any order, give the reference interpreter's bits.

Random programs, with fan-out, aliases, views and sums that may be made in their operand's memory,
are laid out as they stand and in random topological orders, planned and run. Where buffers live is
found again from the launches, and no two that live at the same time may share a byte.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from apart import in_threads
from halves import differentiated
from programs import MATRIX, assert_same, binary_leaf, random_arguments, random_program
from pytest import MonkeyPatch

from lazyinline.backend.kernels.torch_recorder import record_graph
from lazyinline.backend.link import placement
from lazyinline.backend.link.link import FlatProgram, link
from lazyinline.backend.run.planned import PlannedProgram, Runtime
from lazyinline.reuse.ir.leaf import flatten_value, interpret
from lazyinline.reuse.ir.program import Call, Program, Value

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


def plan(flats: Sequence[FlatProgram], **options: Any) -> PlannedProgram:
    """Plans linked programs in one arena; no two live buffers share memory."""
    leaves = {launch.leaf: None for flat in flats for launch in flat.launches}
    planned = PlannedProgram(flats, {leaf: record_graph(leaf) for leaf in leaves}, **options)
    assert_no_clash(planned)
    return planned


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


def assert_no_clash(planned: PlannedProgram) -> None:
    """All pairs: two buffers share bytes only if one is done with before the other begins."""
    boxes = [
        (*span, planned.offsets[i], planned.layout.instances[i].num_bytes)
        for i, span in lives(planned).items()
    ]
    for index, (first, last, offset, size) in enumerate(boxes):
        for other_first, other_last, other_offset, other_size in boxes[:index]:
            apart_in_time = last < other_first or other_last < first
            apart_in_memory = offset + size <= other_offset or other_offset + other_size <= offset
            assert apart_in_time or apart_in_memory, "two live buffers share memory"
        assert offset >= 0 and offset + size <= planned.plan.peak_bytes, "outside of the arena"


def subject(seed: int) -> tuple[Program, list[Any], random.Random]:
    rng = random.Random(seed)
    program = with_sums(random_program(seed), rng)
    return program, random_arguments(program, seed), rng


@pytest.mark.parametrize("start", SEEDS[::BATCH])
@pytest.mark.sweep(keep=["[0]", "[150]"])
def test_any_order_of_launches_gives_the_interpreters_bits(start: int) -> None:
    for seed in range(start, start + BATCH):
        program, args, rng = subject(seed)
        expected = flatten_value(interpret(program, args))
        given = flatten_value(tuple(args))
        before = [t.clone() for t in given]
        flat = link(program)
        for order, run in (
            (flat, run_owned),
            (flat, run_pinned),
            (in_random_order(flat, rng), run_pinned if seed % 3 else run_owned),
        ):
            for number, results in enumerate(run(order, given)):
                assert_same(results, expected, f"seed {seed}, run {number}")
            assert_same(given, before, f"seed {seed}: inputs")


def run_owned(flat: FlatProgram, given: list[Any]) -> list[list[Any]]:
    """Runs twice; results belong to the user, so both runs' are looked at in the end."""
    count = len(flat.outputs)
    runtime = Runtime(plan([flat], model_inputs=[], num_results=[count]), count, 0)
    return [runtime.forward([t + 0 for t in given])[0] for _ in range(2)]


def run_pinned(flat: FlatProgram, given: list[Any]) -> list[list[Any]]:
    """Runs twice; results stay in the arena, so each run's are copied before the next."""
    inputs, count = range(len(given)), len(flat.outputs)
    lease = plan([flat], model_inputs=inputs, num_results=[count], results="pinned").lease(given)
    found = [[t.clone() for t in lease.runners[0]([])] for _ in range(2)]
    places = [t.data_ptr() for t in lease.runners[0]([]) if t.numel()]
    assert len(set(places)) == len(places), "two pinned results share memory"
    return found


@pytest.mark.parametrize("num_programs", [8, pytest.param(80, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("gradients", ["apart", "overlaid"])
def test_forward_and_backward_share_one_arena(
    gradients: Any, num_programs: int, monkeypatch: MonkeyPatch
) -> None:
    """Two flights, each through a backward that keeps the graph and one that frees it.

    Overlaid, activations lie in the memory of gradients to come: inside their host, apart from one
    another, and dead when it is written.
    """
    monkeypatch.setattr(placement, "_MIN_HOST_BYTES", 4)
    monkeypatch.setattr(placement, "ALIGNMENT", 4)
    num_guests = 0
    for seed in range(num_programs):
        halves = differentiated(seed)
        flats = list(map(link, halves.programs))
        if seed % 2:
            flats = [in_random_order(flat, random.Random(seed)) for flat in flats]
        planned = plan(flats, model_inputs=[], **halves.options, gradients=gradients)
        check_guests(planned)
        num_guests += len(planned.overlay.guests)
        runtime = halves.runtime(planned)
        generator = torch.Generator().manual_seed(seed)
        flights = []
        for number in range(2):
            args, seeds = halves.arguments(seed + number, generator)
            flights.append((args, seeds, *runtime.forward(list(args))))
        received = []
        for graph in ("keep", "free"):
            for args, seeds, results, flight in flights:
                primal, expected = halves.interpreted(args, seeds)
                handed = halves.handed(args, results, seeds)
                received.append((runtime.backward(flight, handed, graph), expected))
                assert_same(results, primal, f"seed {seed}, forward")
        for found, expected in received:  # after all runs: nobody wrote to them since
            assert_same(found, expected, f"seed {seed}, backward")
    assert (num_guests > num_programs * 3 / 4) == (gradients == "overlaid"), num_guests


def check_guests(planned: PlannedProgram) -> None:
    """Guests are inside their host, overlap no other guest, and are dead when it is written."""
    instances, overlay = planned.layout.instances, planned.overlay
    for guest, (host, at) in overlay.guests.items():
        assert at + instances[guest].num_bytes <= instances[host].num_bytes
        assert instances[guest].death <= instances[host].birth
        for other, (other_host, other_at) in overlay.guests.items():
            if other == guest or other_host != host:
                continue
            first, second = instances[guest], instances[other]
            apart = first.death <= second.birth or second.death <= first.birth
            assert apart or at + first.num_bytes <= other_at or other_at + second.num_bytes <= at


def test_the_proof_finds_a_clash(monkeypatch: MonkeyPatch) -> None:
    program, _, _ = subject(1)
    planned = plan([link(program)], model_inputs=[], num_results=[1])
    monkeypatch.setattr(planned, "offsets", [0] * len(planned.offsets))
    with pytest.raises(AssertionError, match="share memory"):
        assert_no_clash(planned)


def test_a_forward_that_is_dropped_while_another_takes_an_arena_blocks_nobody() -> None:
    """Python may collect garbage, and so a flight, at any allocation: under the lock too."""
    program = random_program(3, structs=False)
    planned = plan([link(program)], model_inputs=[], num_results=[len(program.outputs)])
    lease = planned.lease([])

    def work(number: int) -> None:
        with planned._arenas.lock:
            lease.release()

    in_threads(work, 1)  # fails if it hangs
