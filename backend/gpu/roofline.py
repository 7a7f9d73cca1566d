"""Predicts the least time that a GPU needs, by the roofline of :mod:`...reuse.ir.costs`.

No program reaches the peak rates of a GPU, so this is a lower bound, predicted and not measured. A
launch never takes less than it takes to start. What is expected is more: each kind of kernel
usually reaches a share of the peak, and a product wastes what its last wave of tiles leaves idle.

By the same prediction some launches of a closure are on a second stream. Which are, and what waits
for what, is found once per closure, and link copies it to each of its calls. The second stream
begins after what it needs, and ends with the closure at the latest. The life of a buffer is counted
in launches of the main stream: a launch on the second stream may run at any moment between two
waits, and its operands are in use all that time. So buffers whose lives do not overlap are never in
use together, in whichever order a GPU runs the two streams, and the planner ignores streams.

A launch moves if a gain is predicted. One that does not fill the GPU leaves multiprocessors idle,
and another can use them: the gradient of a small weight while that of its input is computed. Where
every launch fills the GPU, as in a large model, nothing moves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...reuse.ir.costs import Cost, flops_of
from ...reuse.torch_names import schema_of
from ..launches.kernel_list import ENTRY, BufferInfo, KernelList, Launch, View, views_in
from .targets import Target
from .torch_triton import TritonKernel

_LEAST_S = 2e-6  # from one launch in a CUDA graph to the next
MEMORY_SHARE = 0.85  # of its peak that memory reaches in kernels that mostly move bytes
PRODUCT_SHARE = 0.75  # of its peak that a product reaches in the tiles that it fills
_PRODUCTS: Mapping[Any, Any] = {
    torch.mm: torch.ops.aten.mm,
    torch.addmm: torch.ops.aten.addmm,
    torch.bmm: torch.ops.aten.bmm,
    torch.baddbmm: torch.ops.aten.baddbmm,
}


@dataclass(frozen=True)
class Prediction:
    """The least that the launches of a program will take.

    Attributes:
        cost: of all launches, one after the other.
        expected_s: what all usually take, by the shares of the peaks that their kernels reach.
        num_launches: of the program.
        num_triton: those that are Inductor's kernels; the rest are PyTorch's.
    """

    cost: Cost
    expected_s: float
    num_launches: int
    num_triton: int


def is_product(launch: Launch) -> bool:
    """Whether cuBLAS computes it."""
    operator = _PRODUCTS.get(launch.function, launch.function)
    return getattr(operator, "overloadpacket", operator) in _PRODUCTS.values()


def predict(lists: Iterable[tuple[KernelList, int]], target: Target) -> Prediction:
    """Predicts a program: each closure once, times its calls.

    Args:
        lists: the launches of each closure, and how often the program calls it.
        target: the GPU.
    """
    total, expected_s, num_launches, num_triton = Cost(), 0.0, 0, 0
    for kernels, num_calls in lists:
        for launch in kernels.launches:
            one = launch_cost(launch, target)
            expected = expected_seconds(launch, one, target)
            if len({kernels.buffers[view.buffer].device for view in launch.views()}) > 1:
                copied_s = one.moved_bytes / 2 / target.rates.host_bytes_per_s
                one = replace(one, seconds=max(one.seconds, copied_s))
            total += one.times(num_calls)
            expected_s += max(one.seconds, expected) * num_calls
            num_launches += num_calls
            num_triton += num_calls * isinstance(launch.function, TritonKernel)
    return Prediction(total, expected_s, num_launches, num_triton)


def launch_cost(launch: Launch, target: Target) -> Cost:
    """Returns what one launch costs at least."""
    views = list(launch.views())
    moved = sum(math.prod(v.shape) * v.dtype.itemsize for v in views)
    kwargs = dict(launch.kwargs)
    results = kwargs.pop("out", None) or launch.results
    named = {name: _as_meta(value) for name, value in kwargs.items()}
    # Inductor launches ``torch.mm``; FLOPs are known of operators.
    operator = _PRODUCTS.get(launch.function, launch.function)
    flops = flops_of(operator, _as_meta(launch.args), named, _as_meta(results))
    return Cost(flops, moved, max(target.rates.seconds(flops, moved, _dtype_of(launch)), _LEAST_S))


def expected_seconds(launch: Launch, cost: Cost, target: Target) -> float:
    """Returns what a launch usually takes, if its memory is not the host's.

    Args:
        launch: on the GPU.
        cost: what it costs at least.
        target: the GPU.
    """
    computed_s = target.rates.seconds(cost.flops, 0, _dtype_of(launch))
    moved_s = target.rates.seconds(0, cost.moved_bytes)
    return max(computed_s / _share_of_peak(launch, target), moved_s / MEMORY_SHARE, _LEAST_S)


def _share_of_peak(launch: Launch, target: Target) -> float:
    """Returns which share of the peak rate of products a kernel usually reaches."""
    for kernel in ("flash", "efficient"):
        if f"{kernel}_attention" in launch.name:
            return float(getattr(target, kernel))
    if not is_product(launch):
        return 1.0
    num_waves = _num_blocks(launch) / target.num_multiprocessors
    # A product of few tiles is split along its sum, too, which wins about half of what it leaves.
    return PRODUCT_SHARE * max(num_waves / max(math.ceil(num_waves), 1), 0.5)


def _dtype_of(launch: Launch) -> torch.dtype:
    """Returns the precision that a launch computes in."""
    dtypes = (view.dtype for view in launch.views())
    return next((dtype for dtype in dtypes if dtype.is_floating_point), torch.float32)


def _as_meta(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(map(_as_meta, value))
    if not isinstance(value, View):
        return value
    return torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device="meta")


_INPUTS = -1  # any input, where one is changed: two of them may share memory
_EVENTS_S = 3e-6  # what it costs to fork and to join: an edge of a CUDA graph each, about
_TILE = 128  # rows and columns of a result that one multiprocessor computes
_THREADS = 2048  # of one multiprocessor


@dataclass(frozen=True)
class Access:
    """The buffers that a launch reads, and those that it may write."""

    reads: frozenset[int]
    writes: frozenset[int]

    def conflicts(self, other: Access) -> bool:
        """Whether the order of the two decides what is computed."""
        return bool(self.writes & (other.reads | other.writes) or self.reads & other.writes)


def accesses(kernels: KernelList) -> list[Access]:
    """Returns what each launch of a closure reads and writes."""
    found = [_access(launch) for launch in kernels.launches]
    # Two operands of a call may be one memory, so a write to one counts as a write to all.
    inputs = frozenset(range(kernels.num_inputs))
    if not any(access.writes & inputs for access in found):
        return found
    return [Access(_as_one(a.reads, inputs), _as_one(a.writes, inputs)) for a in found]


def _as_one(buffers: frozenset[int], inputs: frozenset[int]) -> frozenset[int]:
    return buffers - inputs | {_INPUTS} if buffers & inputs else buffers


def _access(launch: Launch) -> Access:
    """Finds what a launch reads and writes; an operand that may not be read-only is written."""
    written = {view.buffer for view in views_in(launch.results)}
    read: set[int] = set()
    reads_only = _reads_only(launch)
    operands: list[tuple[int | str, Any]] = [*enumerate(launch.args), *launch.kwargs]
    for key, value in operands:
        (read if reads_only(key) else written).update(v.buffer for v in views_in(value))
    return Access(frozenset(read), frozenset(written))


def _reads_only(launch: Launch) -> Callable[[int | str], bool]:
    if is_product(launch):
        return lambda argument: argument != "out"
    schema = schema_of(launch.function)
    if schema is not None:
        changed = {
            key
            for position, argument in enumerate(schema.arguments)
            if argument.alias_info is not None
            for key in (position, argument.name)
        }
        return lambda argument: argument not in changed
    kernel = launch.function
    known = kernel.read_only_arguments if isinstance(kernel, TritonKernel) else frozenset[int]()
    return lambda argument: argument in known


def on_two_streams(kernels: KernelList, second: Collection[int]) -> KernelList:
    """Returns a closure's launches with some of them on the second stream.

    Args:
        kernels: of the closure, on one stream.
        second: the numbers of those launches. They make no foreign buffer, and use none.
    """
    if not second:
        return kernels
    waits = list(_waits(accesses(kernels), second))
    launches = tuple(
        replace(launch, stream="second" if number in second else "main", waits_for=waits[number])
        for number, launch in enumerate(kernels.launches)
    )
    buffers = tuple(_lives(kernels, list(_spans(launches))))
    return replace(kernels, launches=launches, buffers=buffers)


def _waits(used: Sequence[Access], second: Collection[int]) -> Iterator[tuple[int, ...]]:
    """Yields what each launch waits for, which is one launch on the other stream or none."""
    ended = {"main": ENTRY - 1, "second": ENTRY}  # the last launch of each that the other awaited
    begun: list[int] = []
    for number, access in enumerate(used):
        own, other = ("second", "main") if number in second else ("main", "second")
        earlier = [i for i in range(number) if (i in second) == (other == "second")]
        needed = [i for i in earlier if access.conflicts(used[i])]
        # Without a wait for the last but one on the second stream, the operands of all those
        # launches would live to the end of the closure.
        needed += begun[:-1] if own == "main" else [ENTRY]
        last = max(needed, default=ENTRY)
        if last > ended[other]:
            ended[other] = last
            yield (last,)
        else:
            yield ()
        if own == "second":
            begun.append(number)


def _spans(launches: Sequence[Launch]) -> Iterator[tuple[int, int]]:
    """Yields from when till when each launch may run, in launches of the main stream."""
    begin = 0
    for number, launch in enumerate(launches):
        if launch.stream == "main":
            yield number, number + 1
            continue
        begin = max(begin, *(awaited + 1 for awaited in launch.waits_for), 0)
        awaiting = (
            later
            for later in range(number + 1, len(launches))
            if launches[later].stream == "main"
            and any(awaited >= number for awaited in launches[later].waits_for)
        )
        yield begin, next(awaiting, len(launches))


def _lives(kernels: KernelList, spans: Sequence[tuple[int, int]]) -> Iterator[BufferInfo]:
    used: dict[int, list[tuple[int, int]]] = {}
    for launch, span in zip(kernels.launches, spans, strict=True):
        for view in launch.views():
            used.setdefault(view.buffer, []).append(span)
    for number, info in enumerate(kernels.buffers):
        own = used.get(number)
        if own is None:
            yield info
            continue
        first, last = min(begin for begin, _ in own), max(end for _, end in own) - 1
        yield replace(info, first=first, last=last)


def may_move(kernels: KernelList) -> list[int]:
    """Returns the launches that can be on the second stream."""
    if kernels.in_place:  # a result that takes over an operand's memory, chosen call by call
        return []
    foreign = set(kernels.foreign)
    # A launch that allocates cannot: PyTorch hands its memory on when the main stream is done with
    # it. Nor can one whose writes are unknown.
    return [
        number
        for number, launch in enumerate(kernels.launches)
        if not launch.results
        and foreign.isdisjoint(view.buffer for view in launch.views())
        and (is_product(launch) or isinstance(launch.function, TritonKernel))
    ]


# ---- which launches gain by it ---------------------------------------------------------------


def with_streams(kernels: KernelList, target: Target) -> KernelList:
    """Returns a closure's launches, on two streams where that is predicted to pay."""
    return on_two_streams(kernels, worth_moving(kernels, target))


def worth_moving(kernels: KernelList, target: Target) -> list[int]:
    """Returns the launches that gain from running in parallel with independent ones."""
    seconds = [launch_cost(launch, target).seconds for launch in kernels.launches]
    # Which part of the GPU's multiprocessors each keeps busy.
    shares = [min(1.0, _num_blocks(x) / target.num_multiprocessors) for x in kernels.launches]
    used, spare, chosen = accesses(kernels), list(seconds), list[int]()
    for number in may_move(kernels):
        touching = [i for i in range(len(used)) if used[number].conflicts(used[i])]
        after = max((i for i in touching if i < number), default=-1)
        before = min((i for i in touching if i > number), default=len(used))
        beside = [i for i in range(after + 1, before) if i != number and i not in chosen]
        others_s = sum(spare[i] for i in beside)
        busy_s = sum(spare[i] * shares[i] for i in beside) + seconds[number] * shares[number]
        gained_s = others_s + seconds[number] - max(others_s, seconds[number], busy_s)
        if gained_s > _EVENTS_S:
            chosen.append(number)
            _take(spare, beside, seconds[number])
    return chosen


def _take(spare: list[float], beside: Sequence[int], seconds: float) -> None:
    """Notes that for so long another launch runs in parallel with these."""
    for index in beside:
        taken = min(spare[index], seconds)
        spare[index] -= taken
        seconds -= taken


def _num_blocks(launch: Launch) -> float:
    """Returns how many multiprocessors a launch would keep busy."""
    if not is_product(launch):
        return max((math.prod(v.shape) for v in launch.views()), default=0) / _THREADS
    result = dict(launch.kwargs).get("out")
    shape = result.shape if result is not None else ()
    tiles = [-(-size // _TILE) for size in shape[-2:]]
    return math.prod(shape[:-2]) * math.prod(tiles)
