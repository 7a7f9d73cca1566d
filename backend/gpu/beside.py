"""Which launches of a closure are worth a second stream: by the roofline, predicted only.

A launch that does not fill the GPU leaves multiprocessors idle, and another can use them: the
gradient of a small weight beside that of its input. Where every launch fills the GPU, as in a large
model, a second stream gains nothing, and its buffers live longer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from ..launches.kernel_list import KernelList, Launch
from .roofline import is_product, launch_seconds
from .streams import accesses, may_move, on_two_streams
from .targets import Target

_EVENTS_S = 3e-6  # what it costs to fork and to join: an edge of a CUDA graph each, about
_TILE = 128  # rows and columns of a result that one multiprocessor computes
_THREADS = 2048  # of one multiprocessor


@dataclass(frozen=True)
class Work:
    """What something takes by itself.

    Attributes:
        seconds: until it is done.
        busy_s: the same, times the part of the multiprocessors that it keeps busy meanwhile.
    """

    seconds: float = 0.0
    busy_s: float = 0.0

    def plus(self, other: Work) -> Work:
        """Returns both together, one after the other."""
        return Work(self.seconds + other.seconds, self.busy_s + other.busy_s)

    def rest(self, seconds: float) -> Work:
        """Returns so many seconds of it."""
        return Work(seconds, self.busy_s * seconds / self.seconds if self.seconds else 0.0)


@dataclass(frozen=True)
class Moves:
    """Launches of a closure that are worth the second stream, and what that gains."""

    launches: tuple[int, ...]
    gained_s: float


def gained_s(moved: Work, beside: Iterable[Work]) -> float:
    """Returns what it gains to run something beside others; negative if events cost more."""
    others = total(beside)
    needed_s = max(others.seconds, moved.seconds, others.busy_s + moved.busy_s)
    return others.seconds + moved.seconds - needed_s - _EVENTS_S


def total(works: Iterable[Work]) -> Work:
    """Returns all of it, one after the other."""
    found = Work()
    for work in works:
        found = found.plus(work)
    return found


def works(kernels: KernelList, target: Target) -> list[Work]:
    """Returns what each launch of a closure takes."""
    seconds = [launch_seconds(launch, target) for launch in kernels.launches]
    shares = [share(launch, target) for launch in kernels.launches]
    return [Work(s, s * part) for s, part in zip(seconds, shares, strict=True)]


def with_streams(kernels: KernelList, target: Target) -> KernelList:
    """Returns a closure's launches, on two streams where that is predicted to pay."""
    return on_two_streams(kernels, worth_moving(kernels, target).launches)


def worth_moving(kernels: KernelList, target: Target) -> Moves:
    """Returns the launches that gain from running beside those that neither need nor feed them."""
    all_of, gained, chosen = works(kernels, target), 0.0, list[int]()
    used, spare = accesses(kernels), list(all_of)
    for number in may_move(kernels):
        touching = [i for i in range(len(used)) if used[number].conflicts(used[i])]
        after = max((i for i in touching if i < number), default=-1)
        before = min((i for i in touching if i > number), default=len(used))
        beside = [i for i in range(after + 1, before) if i != number and i not in chosen]
        gain = gained_s(all_of[number], (spare[i] for i in beside))
        if gain > 0:
            chosen.append(number)
            gained += gain
            take(spare, beside, all_of[number].seconds)
    return Moves(tuple(chosen), gained)


def take(spare: list[Work], beside: Iterable[int], seconds: float) -> None:
    """Notes that so long something runs beside these already."""
    for index in beside:
        left_s = max(spare[index].seconds - seconds, 0.0)
        seconds -= spare[index].seconds - left_s
        spare[index] = spare[index].rest(left_s)


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
