"""Programs over one planned arena give the reference interpreter's bits, run after run."""

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from halves import differentiated
from programs import assert_same, random_arguments, random_program

from lazyinline.backend.arena.proof import check_no_overlap
from lazyinline.backend.kernels.torch_recorder import record_graph
from lazyinline.backend.link.link import link
from lazyinline.backend.run.planned import PlannedProgram
from lazyinline.backend.run.runtime import PlannedRuntime
from lazyinline.reuse.ir.interpreter import flatten_value, interpret
from lazyinline.reuse.ir.leaf import flat_types
from lazyinline.reuse.ir.program import Leaf, Program, walk_closures

SEEDS = range(120)


def plan(programs: Sequence[Program], **options: Any) -> PlannedProgram:
    leaves = {c for p in programs for c in walk_closures(p) if isinstance(c, Leaf)}
    lists = {leaf: record_graph(leaf) for leaf in leaves}
    return PlannedProgram([link(p) for p in programs], lists, **options)


def check_arena(planned: PlannedProgram) -> None:
    instances = planned.layout.instances
    placed = [i for i, b in enumerate(instances) if b.kind == "arena"]
    check_no_overlap(
        [instances[i].birth for i in placed],
        [instances[i].death for i in placed],
        [planned.offsets[i] for i in placed],
        [instances[i].num_bytes for i in placed],
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_random_program_in_an_arena_equals_the_interpreter(seed: int) -> None:
    program = random_program(seed)
    args = random_arguments(program, seed)
    flat = flatten_value(tuple(args))
    expected = flatten_value(interpret(program, args))
    num_outputs = len(flat_types(v.type for v in program.outputs))
    planned = plan([program], model_inputs=[], num_results=[num_outputs])
    check_arena(planned)
    runtime = PlannedRuntime(planned, num_outputs, 0)
    first, _ = runtime.forward(list(flat))
    kept = [t.clone() for t in first]
    second, _ = runtime.forward([t + 0 for t in flat])
    assert_same(first, expected, f"seed {seed}, first run")
    assert_same(second, expected, f"seed {seed}, second run")
    assert_same(first, kept, f"seed {seed}, results of the first run after the second")


@pytest.mark.parametrize("seed", SEEDS[:40])
def test_results_pinned_in_the_arena_equal_the_interpreter(seed: int) -> None:
    program = random_program(seed)
    args = random_arguments(program, seed)
    flat = flatten_value(tuple(args))
    num_outputs = len(flat_types(v.type for v in program.outputs))
    inputs = range(len(flat))
    planned = plan([program], model_inputs=inputs, num_results=[num_outputs], results="pinned")
    check_arena(planned)
    lease = planned.lease(list(flat))
    expected = flatten_value(interpret(program, args))
    for run in range(2):
        outputs = lease.runners[0]([])
        assert_same(outputs, expected, f"seed {seed}, run {run}")
    places = [t.data_ptr() for t in lease.runners[0]([]) if t.numel()]
    assert len(set(places)) == len(places), "two pinned results share memory"


@pytest.mark.parametrize("seed", SEEDS[:40])
def test_forward_and_backward_share_one_arena(seed: int) -> None:
    halves = differentiated(seed)
    planned = plan(halves.programs, model_inputs=[], **halves.options)
    check_arena(planned)
    runtime = halves.runtime(planned)
    generator = torch.Generator().manual_seed(seed)
    flights = []
    for number in range(2):  # two forwards in flight before the first backward
        args, seeds = halves.arguments(seed + number, generator)
        flights.append((args, seeds, *runtime.forward(list(args))))
    for graph in ("keep", "free"):
        for args, seeds, results, flight in flights:
            primal, expected = halves.interpreted(args, seeds)
            gradients = runtime.backward(flight, halves.handed(args, results, seeds), graph)
            assert_same(results, primal, f"seed {seed}, forward")
            assert_same(gradients, expected, f"seed {seed}, {graph} backward")


def test_lease_returns_when_a_forward_is_dropped() -> None:
    program = random_program(3, structs=False)
    planned = plan([program], model_inputs=[], num_results=[len(program.outputs)])
    lease = planned.lease([])
    address = lease.arena.data_ptr()
    del lease
    assert planned.lease([]).arena.data_ptr() == address


def test_a_forward_that_is_dropped_while_another_takes_an_arena_blocks_nobody() -> None:
    """Python may collect garbage, and so a flight, at any allocation: under the lock too."""
    program = random_program(3, structs=False)
    planned = plan([program], model_inputs=[], num_results=[len(program.outputs)])
    lease = planned.lease([])

    def work() -> None:
        with planned._lock:
            lease.release()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(timeout=20)
    assert not thread.is_alive()


def test_threads_get_arenas_of_their_own() -> None:
    program = random_program(5, structs=False)
    args = random_arguments(program, 5)
    expected = interpret(program, args)
    planned = plan([program], model_inputs=[], num_results=[len(program.outputs)])
    runtime = PlannedRuntime(planned, len(program.outputs), 0)
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(50):
            results, _ = runtime.forward(list(args))
            if not all(torch.equal(a, b) for a, b in zip(results, expected, strict=True)):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
