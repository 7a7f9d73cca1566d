"""Two streams: whatever order the events leave open, numbers are eager's and no memory is shared.

Random programs, launches put on the second stream at random; the generated code is run on streams
that note what its events promise (:mod:`stream_orders`), then in the worst orders that they allow.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from halves import Halves, differentiated
from programs import assert_same
from stream_orders import (
    PREFERENCES,
    an_order,
    assert_unordered_uses_share_nothing,
    move_to,
    reordered,
    traced,
)
from test_planned import subject

from lazyinline.backend.gpu import roofline
from lazyinline.backend.gpu.roofline import (
    accesses,
    is_product,
    may_move,
    on_two_streams,
    with_streams,
)
from lazyinline.backend.gpu.targets import target_named
from lazyinline.backend.gpu.torch_triton import TritonKernel
from lazyinline.backend.kernels.torch_recorder import record_graph
from lazyinline.backend.launches.kernel_list import BufferInfo, KernelList, Launch, View
from lazyinline.backend.link.link import FlatProgram, link
from lazyinline.backend.link.placement import Place, Tools
from lazyinline.backend.run.planned import PlannedProgram, Runtime
from lazyinline.reuse.ir.leaf import flatten_value, interpret

H100 = target_named("cuda:sm_90")
ELSEWHERE = Tools(place=Place(missing="a GPU"))  # so that launches run from Python


def at_random(kernels: KernelList, rng: random.Random) -> KernelList:
    """Puts some of the launches that allocate nothing on the second stream."""
    foreign = set(kernels.foreign)
    free = [
        number
        for number, launch in enumerate(kernels.launches)
        if not launch.results and foreign.isdisjoint(v.buffer for v in launch.views())
    ]
    launches = tuple(replace(launch, native=None) for launch in kernels.launches)
    second = [] if kernels.in_place else [n for n in free if rng.random() < 0.5]
    return on_two_streams(replace(kernels, launches=launches), second)


def planned_on_two_streams(
    flats: Sequence[FlatProgram], rng: random.Random, **options: Any
) -> PlannedProgram:
    leaves = dict.fromkeys(launch.leaf for flat in flats for launch in flat.launches)
    program = PlannedProgram(
        flats,
        {leaf: at_random(record_graph(leaf), rng) for leaf in leaves},
        range(len(flats[0].inputs)) if options["results"] == "pinned" else [],
        options.pop("num_results", [len(flat.outputs) for flat in flats]),
        tools=ELSEWHERE,
        **options,
    )
    move_to(program, Place())
    return program


def streams_of(program: PlannedProgram) -> list[str]:
    (part,) = program.layout.parts
    return [placed.launch.stream for placed in part.launches]


def orders_with_the_right_bits(seed: int, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Runs a program in orders that its events allow.

    Returns how many launches were on the second stream, and how many orders not the planned one.
    """
    program, args, rng = subject(seed)
    given, expected = flatten_value(tuple(args)), flatten_value(interpret(program, args))
    runs, what = planned_on_two_streams([link(program)], rng, results="pinned"), f"seed {seed}"

    def run() -> list[torch.Tensor]:
        return [t.clone() for t in runs.lease(list(given)).runners[0]([])]

    on = streams_of(runs)
    before, results = traced(runs, run, monkeypatch)
    assert_same(results, expected, what)
    assert_unordered_uses_share_nothing(runs, before, what)
    (part,) = runs.layout.parts
    as_planned = list(part.launches)
    num_others = 0
    for prefer in PREFERENCES:
        order = an_order(before, on, prefer, rng)
        num_others += order != sorted(order)
        part.launches[:] = as_planned
        reordered(runs, order)
        assert_same(run(), expected, f"{what}, {prefer} first")
    return on.count("second"), num_others


def test_every_order_that_events_allow_gives_the_interpreters_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = [orders_with_the_right_bits(seed, monkeypatch) for seed in range(80)]
    num_beside, num_orders = map(sum, zip(*found, strict=True))
    assert num_beside > 100
    assert num_orders > 50, "the events left nothing open"


def test_a_missing_event_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof of the proof: without what launches wait for, it fails."""

    def without_waits(kernels: KernelList, second: Any) -> KernelList:
        made = roofline.on_two_streams(kernels, second)
        entry = {n: (-1,) for n in second}
        launches = [replace(x, waits_for=entry.get(n, ())) for n, x in enumerate(made.launches)]
        return replace(made, launches=tuple(launches))

    monkeypatch.setitem(globals(), "on_two_streams", without_waits)
    with pytest.raises(AssertionError, match=r"share bytes|differs"):
        test_every_order_that_events_allow_gives_the_interpreters_bits(monkeypatch)


def both_ways(halves: Halves, runtime: Runtime, args: Any, seeds: Any) -> Any:
    results, flight = runtime.forward(list(args))
    return runtime.backward(flight, halves.handed(args, results, seeds), "free")


def test_a_backward_on_two_streams_keeps_what_the_forward_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two parts over one arena; what is returned is the user's."""
    num_beside = 0
    for seed in range(30):
        halves = differentiated(seed)
        rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        flats = [link(half) for half in halves.programs]
        runs = planned_on_two_streams(flats, rng, results="owned", **halves.options)
        runtime = halves.runtime(runs)
        args, seeds = halves.arguments(seed, generator)
        _, expected = halves.interpreted(args, seeds)

        run = partial(both_ways, halves, runtime, args, seeds)
        for which in (0, 1):
            before, gradients = traced(runs, run, monkeypatch, which=which)
            assert_same(gradients, expected, f"seed {seed}, backward")
            assert_unordered_uses_share_nothing(runs, before, f"seed {seed}", which)
        num_beside += runs.num_beside
    assert num_beside > 50


def test_what_the_second_stream_makes_for_the_user_is_allocated_first() -> None:
    """Later, PyTorch might hand out memory that the main stream still works in."""
    for seed in range(40):
        program, args, rng = subject(seed)
        runs = planned_on_two_streams([link(program)], rng, results="owned")
        lines = [line.strip() for line in runs._codes[0].source.splitlines()]
        beside = [line for line in lines if line.startswith("with beside")]
        made = {line.split(" = ")[0]: n for n, line in enumerate(lines) if "new_tensor" in line}
        begins = lines.index("main = current_stream()") if beside else 0
        used = [name for name in made if re.search(rf"\b{name}\b", "\n".join(beside))]
        assert all(made[name] < begins for name in used)
        if used:
            results = runs.lease([]).runners[0](flatten_value(tuple(args)))
            assert_same(results, flatten_value(interpret(program, args)), f"seed {seed}")
            return
    raise AssertionError("no program had a result on the second stream")


# ---- which launches are worth it -------------------------------------------------------------


def linear_backward(batch: int, inner: int, outer: int) -> KernelList:
    """``gi = g @ w``, ``gw = g.T @ x``, then something of ``gi``: what a linear layer launches."""

    def view(buffer: int, *shape: int) -> View:
        return View(buffer, torch.bfloat16, shape, (shape[1], 1), 0)

    g, x, w = view(0, batch, outer), view(1, batch, inner), view(2, outer, inner)
    gi, gw, last = view(3, batch, inner), view(4, outer, inner), view(5, batch, inner)
    transposed = View(0, torch.bfloat16, (outer, batch), (1, outer), 0)
    source = "def triton_poi_fused_0(in_ptr0, out_ptr0, xnumel, XBLOCK : tl.constexpr):"
    launches = (
        Launch("mm", torch.mm, (transposed, x), (("out", gw),)),
        Launch("mm", torch.mm, (g, w), (("out", gi),)),
        Launch("poi", TritonKernel("triton_poi_fused_0", source), (gi, last, batch * inner), ()),
    )
    sizes = [2 * v.shape[0] * v.shape[1] for v in (g, x, w, gi, gw, last)]
    spans = ((0, 1), (0, 0), (1, 1), (1, 2), (0, 0), (2, 2))
    buffers = tuple(
        BufferInfo("input" if i < 3 else "private", size, *span)
        for i, (size, span) in enumerate(zip(sizes, spans, strict=True))
    )
    return KernelList("linear.backward", 3, buffers, launches, (gw, last), ())


def test_the_gradient_of_a_small_weight_is_computed_beside_that_of_the_input() -> None:
    small = with_streams(linear_backward(8192, 1024, 1024), H100)
    assert [launch.stream for launch in small.launches] == ["second", "main", "main"]
    assert [launch.waits_for for launch in small.launches] == [(-1,), (), ()]
    # What it reads and makes is in use until it has certainly ended.
    lives = [(b.first, b.last) for b in small.buffers]
    assert lives == [(0, 2), (0, 2), (1, 1), (1, 2), (0, 2), (2, 2)]


def test_launches_that_fill_the_gpu_stay_on_one_stream() -> None:
    large = linear_backward(8192, 5120, 5120)
    assert with_streams(large, H100) is large
    tiny = linear_backward(16, 32, 32)
    assert with_streams(tiny, H100) is tiny, "events cost more than is gained"


def test_what_allocates_stays_on_the_main_stream() -> None:
    kernels = linear_backward(8192, 1024, 1024)
    foreign = replace(kernels.buffers[4], kind="foreign")
    buffers = (*kernels.buffers[:4], foreign, kernels.buffers[5])
    assert may_move(kernels) == [0, 1, 2]
    assert may_move(replace(kernels, buffers=buffers)) == [1, 2]


def test_a_launch_of_which_nothing_is_known_may_change_what_it_is_given() -> None:
    kernels = linear_backward(8, 8, 8)
    unknown = replace(kernels.launches[2], function=print)
    found = accesses(replace(kernels, launches=(*kernels.launches[:2], unknown)))
    assert (found[1].reads, found[1].writes) == ({0, 2}, {3})
    assert (found[2].reads, found[2].writes) == (set(), {3, 5})
    known = accesses(kernels)[2]
    assert (known.reads, known.writes) == ({3}, {5})


def test_a_kernel_that_changes_a_buffer_in_place_may_move() -> None:
    kernels = linear_backward(8, 8, 8)
    changes = TritonKernel("triton_poi_fused_1", "def triton_poi_fused_1(in_out_ptr0, xnumel):")
    last = replace(kernels.launches[2], function=changes, args=(kernels.outputs[1], 64))
    kernels = replace(kernels, launches=(*kernels.launches, last))
    assert may_move(kernels) == [0, 1, 2, 3]
    assert (accesses(kernels)[3].reads, accesses(kernels)[3].writes) == (set(), {5})


def test_inputs_may_share_memory_where_one_is_changed() -> None:
    kernels = linear_backward(8, 8, 8)
    changes = Launch("add_", torch.ops.aten.add_.Tensor, (kernels.launches[1].args[0],) * 2, ())
    found = accesses(replace(kernels, launches=(*kernels.launches, changes)))
    assert all(found[3].conflicts(one) for one in found[:2])
    assert not found[3].conflicts(found[2])


def test_products_are_told_from_other_launches() -> None:
    products = [torch.mm, torch.bmm, torch.ops.aten.addmm.out, torch.ops.aten.mm.out]
    others: list[Any] = [torch.add, print, TritonKernel("name", "")]
    launched = {function: Launch("", function, (), ()) for function in (*products, *others)}
    found = {function: is_product(launch) for function, launch in launched.items()}
    assert [f for f, is_one in found.items() if is_one] == products


def test_kernels_of_a_gpu_say_what_they_read() -> None:
    text = "def triton_poi_0(in_ptr0, in_out_ptr0, out_ptr1, xnumel):"
    assert TritonKernel("triton_poi_0", text).read_only_arguments == {0}
