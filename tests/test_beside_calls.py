"""Calls beside calls on a second stream: which they are, and that no order of theirs does harm.

Random programs, whose bodies have calls on the second stream at random, are run in the extreme
orders that the events in their code allow (:mod:`stream_orders`), beside the interpreter.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from halves import Halves, differentiated
from programs import MATRIX, assert_same, unary_leaf
from stream_orders import assert_unordered_uses_share_nothing, traced
from test_link_orders import ADD as SUM
from test_link_orders import subject
from test_streams import H100, assert_every_order_gives, at_random, linear_backward, streams_of
from torch import nn

from lazyinline.backend.gpu.beside import worth_moving
from lazyinline.backend.gpu.place import Place
from lazyinline.backend.gpu.streams import changes_inputs
from lazyinline.backend.kernels.torch_recorder import record_graph
from lazyinline.backend.launches.kernel_list import KernelList, Launch
from lazyinline.backend.link import beside_calls, turns
from lazyinline.backend.link.beside_calls import BesideCalls, Placing
from lazyinline.backend.link.link import FlatProgram, link
from lazyinline.backend.link.placement import Tools
from lazyinline.backend.run import planned
from lazyinline.backend.run.planned import PlannedProgram
from lazyinline.backend.run.runtime import PlannedRuntime
from lazyinline.reuse.ir.interpreter import flatten_value, interpret
from lazyinline.reuse.ir.program import Call, Closure, Composite, Program, Value

# ---- whatever order the events leave open ----------------------------------------------------

ELSEWHERE = Tools(place=Place(missing="a GPU", target=H100))


class AtRandom:
    """Places the calls of each body at random, once."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._bodies: dict[Program, list[Placing]] = {}

    def placings(self, body: Program) -> list[Placing]:
        rng = self._rng
        if body not in self._bodies:
            sides: Any = rng.choices(("own", "main", "second"), (1, 4, 4), k=len(body.calls))
            self._bodies[body] = [
                Placing(side, rng.random() < 0.5, rng.choice(["main", "second"])) for side in sides
            ]
        return self._bodies[body]

    def gained_s(self, body: Program) -> float:
        return 0.0


def allocates_nothing(kernels: KernelList) -> bool:
    """Any kernel of a CPU may move here, where the test knows what it writes."""
    made = any(launch.results for launch in kernels.launches) or kernels.foreign
    return bool(kernels.launches) and not made and not changes_inputs(kernels)


def planned_with(
    flats: Sequence[FlatProgram],
    calls: Any,
    monkeypatch: pytest.MonkeyPatch,
    with_streams: Callable[[KernelList], KernelList] = lambda kernels: kernels,
    **options: Any,
) -> PlannedProgram:
    """Plans a program with calls where they are said to be; it runs on CPU memory."""
    leaves = dict.fromkeys(launch.leaf for flat in flats for launch in flat.launches)
    with monkeypatch.context() as patch:
        patch.setattr(planned, "BesideCalls", lambda *of: calls)
        patch.setattr(planned, "with_streams", lambda kernels, target: with_streams(kernels))
        patch.setattr(turns, "may_move_whole", allocates_nothing)
        program = PlannedProgram(
            flats,
            {leaf: without_native(record_graph(leaf)) for leaf in leaves},
            range(len(flats[0].inputs)) if options["results"] == "pinned" else [],
            options.pop("num_results", [len(flat.outputs) for flat in flats]),
            tools=ELSEWHERE,
            **options,
        )
    program.move_to(Place())
    return program


def without_native(kernels: KernelList) -> KernelList:
    return replace(kernels, launches=tuple(replace(x, native=None) for x in kernels.launches))


def test_calls_beside_calls_give_the_interpreters_bits_in_every_order_that_events_allow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num_beside = num_orders = 0
    for seed in range(80):
        program, args, rng = subject(seed)
        expected = flatten_value(interpret(program, args))
        given = flatten_value(tuple(args))
        inside = partial(at_random, rng=rng)
        runs = planned_with([link(program)], AtRandom(rng), monkeypatch, inside, results="pinned")
        num_beside += streams_of(runs).count("second")
        what = f"seed {seed}"
        num_orders += assert_every_order_gives(runs, given, expected, rng, monkeypatch, what)
    assert num_beside > 200
    assert num_orders > 50, "the events left nothing open"


def test_a_backward_on_two_streams_keeps_what_the_forward_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two parts over one arena; what is returned is the user's."""
    num_beside = 0
    for seed in range(30):
        halves = differentiated(seed)
        rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        runs = planned_with(
            [link(half) for half in halves.programs],
            AtRandom(rng),
            monkeypatch,
            partial(at_random, rng=rng),
            results="owned",
            **halves.options,
        )
        runtime = halves.runtime(runs)
        args, seeds = halves.arguments(seed, generator)
        _, expected = halves.interpreted(args, seeds)

        def run(
            halves: Halves = halves,
            runtime: PlannedRuntime = runtime,
            args: Any = args,
            seeds: Any = seeds,
        ) -> Any:
            results, flight = runtime.forward(list(args))
            return runtime.backward(flight, halves.handed(args, results, seeds), "free")

        for which in (0, 1):
            before, gradients = traced(runs, run, monkeypatch, which=which)
            assert_same(gradients, expected, f"seed {seed}, backward")
            assert_unordered_uses_share_nothing(runs, before, f"seed {seed}", which)
        num_beside += runs.num_beside
    assert num_beside > 50


def as_if_nothing_were_awaited(turn: turns.Turn) -> turns.Turn:
    return replace(turn, waits_for=(-1,) if turn.is_second else ())


def as_if_it_ran_at_its_place(turn: turns.Turn) -> turns.Turn:
    return replace(turn, stream="main")


def as_if_nobody_were_beside_it(turn: turns.Turn) -> turns.Turn:
    return replace(turn, beside=False)


@pytest.mark.parametrize(
    "wrong",
    [as_if_nothing_were_awaited, as_if_it_ran_at_its_place, as_if_nobody_were_beside_it],
)
def test_a_mistake_about_turns_is_noticed(
    wrong: Callable[[turns.Turn], turns.Turn], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proof of the proof: without waits, longer lives, or taking memory over, it fails."""

    def wrongly(*args: Any) -> dict[int, turns.Turn]:
        return {number: wrong(turn) for number, turn in turns.turns(*args).items()}

    monkeypatch.setattr(planned, "turns", wrongly)
    with pytest.raises(AssertionError, match=r"share bytes|differs"):
        test_calls_beside_calls_give_the_interpreters_bits_in_every_order_that_events_allow(
            monkeypatch
        )


# ---- which calls are worth it ----------------------------------------------------------------

EXPERT = unary_leaf(torch.ops.aten.silu.default, name="expert")
GLUE = unary_leaf(torch.ops.aten.silu.default, name="glue")
OTHER = unary_leaf(torch.ops.aten.silu.default, name="other")
SMALL, LARGE = linear_backward(256, 1024, 1024), linear_backward(8192, 5120, 5120)
OWN, MAIN, SECOND = Placing(), Placing("main"), Placing("second")
STARTS = Placing("main", starts=True)


class Body:
    """A program in the making."""

    def __init__(self) -> None:
        self.input = Value(MATRIX)
        self.calls: list[Call] = []

    def call(self, closure: Closure, *args: Value) -> Value:
        result = Value(MATRIX)
        self.calls.append(Call(closure, args, (result,)))
        return result

    def program(self, *outputs: Value) -> Program:
        return Program((self.input,), tuple(self.calls), outputs)


def experts(number: int, closure: Closure = EXPERT) -> Program:
    """A layer with experts, added up as a backward does: each as soon as it is there."""
    body = Body()
    y = body.call(GLUE, body.input)
    total = body.call(closure, y)
    for _ in range(number - 1):
        total = body.call(SUM, total, body.call(closure, y))
    return body.program(total)


def found(body: Program, **lists: KernelList) -> BesideCalls:
    tiny = linear_backward(16, 32, 32)
    leaves = {EXPERT: SMALL, GLUE: tiny, SUM: tiny, OTHER: tiny}
    by_name = {leaf.name: leaf for leaf in leaves}
    leaves.update({by_name[name]: kernels for name, kernels in lists.items()})
    return BesideCalls(leaves, H100)


def sides(placings: Sequence[Placing]) -> str:
    return " ".join(placing.side for placing in placings)


def test_experts_run_beside_one_another() -> None:
    body = experts(4)
    placings = found(body).placings(body)
    # y, first, second, their sum, third, its sum, fourth, its sum
    assert sides(placings) == "own second main own second second main own"
    assert [placing.starts for placing in placings].count(True) == 2


def test_experts_that_fill_the_gpu_stay_on_one_stream() -> None:
    body = experts(4)
    assert set(found(body, expert=LARGE).placings(body)) == {OWN}


def test_calls_that_need_each_other_stay_on_one_stream() -> None:
    body = Body()
    x = body.input
    for _ in range(6):
        x = body.call(EXPERT, x)
    chain = body.program(x)
    assert set(found(chain).placings(chain)) == {OWN}


def test_a_view_of_what_a_call_makes_does_not_end_what_runs_beside_it() -> None:
    """Query, key and value as blocks: each is seen in another shape as soon as it is there."""
    body = Body()
    parts = [body.call(OTHER, body.call(EXPERT, body.input)) for _ in range(3)]
    program = body.program(body.call(GLUE, *parts))
    views = replace(SMALL, launches=())
    placings = found(program, other=views).placings(program)
    assert sides(placings) == "second main main own own own own"


def test_a_tower_moves_whole_beside_the_other_one() -> None:
    inner = Body()
    tower = Composite("tower", inner.program(inner.call(EXPERT, inner.call(EXPERT, inner.input))))
    body = Body()
    one, other = (body.call(tower, body.call(GLUE, body.input)) for _ in range(2))
    program = body.program(body.call(SUM, one, other))
    calls = found(program)
    assert sides(calls.placings(program)) == "own second main main own"
    assert set(calls.placings(tower.program)) == {OWN}
    assert calls.gained_s(program) > 0


def test_a_call_that_allocates_or_changes_what_it_is_given_stays_on_the_main_stream() -> None:
    body = experts(2)
    foreign = replace(SMALL.buffers[4], kind="foreign")
    allocates = replace(SMALL, buffers=(*SMALL.buffers[:4], foreign, SMALL.buffers[5]))
    view = SMALL.launches[1].args[0]
    adds = Launch("add_", torch.ops.aten.add_.Tensor, (view, view), ())
    changes = replace(SMALL, launches=(*SMALL.launches, adds))
    for kernels in (allocates, changes):
        assert set(found(body, expert=kernels).placings(body)) == {OWN}


def test_what_allocates_may_have_others_beside_it() -> None:
    body = Body()
    attention, mlp = body.call(OTHER, body.input), body.call(EXPERT, body.input)
    parallel = body.program(body.call(SUM, attention, mlp))
    foreign = replace(SMALL.buffers[4], kind="foreign")
    allocates = replace(SMALL, buffers=(*SMALL.buffers[:4], foreign, SMALL.buffers[5]))
    placings = found(parallel, other=allocates).placings(parallel)
    assert sides(placings) == "main second own"


def test_nothing_runs_beside_a_call_past_one_that_changes_what_it_is_given() -> None:
    body = Body()
    one = body.call(EXPERT, body.input)
    between, two = body.call(OTHER, body.input), body.call(EXPERT, body.input)
    program = body.program(one, between, two)
    assert sides(found(program).placings(program)) == "second main own"
    view = SMALL.launches[1].args[0]
    changes = Launch("add_", torch.ops.aten.add_.Tensor, (view, view), ())
    changing = replace(linear_backward(16, 32, 32), launches=(changes,))
    assert set(found(program, other=changing).placings(program)) == {OWN}


def test_what_a_closure_gains_by_itself_is_not_given_up_for_less() -> None:
    body = experts(2)
    by_itself = linear_backward(8192, 1024, 1024)
    gained_s = worth_moving(by_itself, H100).gained_s
    assert gained_s > 0
    calls = found(body, expert=by_itself)
    assert set(calls.placings(body)) == {OWN}
    assert calls.gained_s(body) == pytest.approx(2 * gained_s)


def test_a_body_is_looked_at_once_however_often_it_is_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer = Composite("layer", experts(4))
    body = Body()
    x = body.input
    for _ in range(40):
        x = body.call(layer, x)
    program = body.program(x)
    looked_at: list[Program] = []
    as_it_was = beside_calls._Body

    def counted(body: Program, costs: Any) -> Any:
        looked_at.append(body)
        return as_it_was(body, costs)

    monkeypatch.setattr(beside_calls, "_Body", counted)
    calls = found(program)
    flat = link(program)
    lists = {EXPERT: SMALL, GLUE: SMALL, SUM: SMALL}
    moved = [turn for turn in turns.turns(flat, calls.placings, lists).values() if turn.is_second]
    assert len(moved) == 40 * 3
    assert looked_at == [layer.program, flat.program]


# ---- in a compiled program -------------------------------------------------------------------


def test_what_the_second_stream_makes_for_the_user_is_allocated_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Later, PyTorch might hand out memory that the main stream still works in."""
    body = Body()
    y = body.call(GLUE, body.input)
    program = body.program(body.call(EXPERT, y), body.call(EXPERT, y))

    class Fixed(AtRandom):
        def placings(self, body: Program) -> list[Placing]:
            return [OWN, Placing("main", starts=True), Placing("second")]

    calls = Fixed(random.Random(0))
    runs = planned_with([link(program)], calls, monkeypatch, results="owned")
    lines = [line.strip() for line in runs._codes[0].source.splitlines()]
    allocated = [n for n, line in enumerate(lines) if "new_tensor" in line]
    launched = [n for n, line in enumerate(lines) if line.startswith(("k", "with beside"))]
    assert len(allocated) == 2
    assert allocated[0] < lines.index("main = current_stream()") < launched[0] < allocated[1]
    x = torch.randn(3, 4, dtype=torch.float64)
    results = runs.lease([]).runners[0]([x])
    expected = nn.functional.silu(nn.functional.silu(x))
    assert_same(results, [expected] * 2, "on CPU memory")
