"""Which launches of a closure are worth a second stream: by the roofline, predicted only.

A launch that does not fill the GPU leaves multiprocessors idle, and another can use them: the
gradient of a small weight beside that of its input. Where every launch fills the GPU, as in a large
model, a second stream gains nothing, and its buffers live longer.
"""

from __future__ import annotations

import math

from ..launches.kernel_list import KernelList, Launch
from .roofline import is_product, launch_seconds
from .streams import accesses, may_move, on_two_streams
from .targets import Target

_EVENTS_S = 3e-6  # what it costs to fork and to join: an edge of a CUDA graph each, about
_TILE = 128  # rows and columns of a result that one multiprocessor computes
_THREADS = 2048  # of one multiprocessor


def with_streams(kernels: KernelList, target: Target) -> KernelList:
    """Returns a closure's launches, on two streams where that is predicted to pay."""
    return on_two_streams(kernels, worth_moving(kernels, target))


def worth_moving(kernels: KernelList, target: Target) -> list[int]:
    """Returns the launches that gain from running beside those that neither need nor feed them."""
    seconds = [launch_seconds(launch, target) for launch in kernels.launches]
    shares = [share(launch, target) for launch in kernels.launches]
    used, spare, chosen = accesses(kernels), list(seconds), list[int]()
    for number in may_move(kernels):
        touching = [i for i in range(len(used)) if used[number].conflicts(used[i])]
        after = max((i for i in touching if i < number), default=-1)
        before = min((i for i in touching if i > number), default=len(used))
        beside = [i for i in range(after + 1, before) if i != number and i not in chosen]
        time_s = sum(spare[i] for i in beside)
        work_s = sum(spare[i] * shares[i] for i in beside) + seconds[number] * shares[number]
        gained_s = time_s + seconds[number] - max(time_s, seconds[number], work_s)
        if gained_s > _EVENTS_S:
            chosen.append(number)
            _take(spare, beside, seconds[number])
    return chosen


def _take(spare: list[float], beside: list[int], seconds: float) -> None:
    """Notes that so long another launch runs beside these already."""
    for index in beside:
        taken = min(spare[index], seconds)
        spare[index] -= taken
        seconds -= taken


def share(launch: Launch, target: Target) -> float:
    """Returns which part of the GPU's multiprocessors a launch keeps busy."""
    if is_product(launch):
        result = dict(launch.kwargs).get("out")
        shape = result.shape if result is not None else ()
        tiles = [-(-size // _TILE) for size in shape[-2:]]
        num_blocks: float = math.prod(shape[:-2]) * math.prod(tiles)
    else:
        num_blocks = max((math.prod(v.shape) for v in launch.views()), default=0) / _THREADS
    return min(1.0, num_blocks / target.num_multiprocessors)
