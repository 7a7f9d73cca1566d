"""Placing buffers one by one: first fit along an order, and best fit along time.

First fit over good orders is what allocators use that plan ahead: by size and by breadth (Pisarchyk
and Lee, "Efficient Memory Management for Deep Neural Net Inference", 2020), by area and by lifetime
(XLA's heap simulator, MindSpore's SOMAS). :func:`attempts` improves any order.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from itertools import count

import numpy as np

from .live_ranges import Buffers, IntArray, breadth

FirstFit = Callable[[Buffers, IntArray], IntArray]
ExactSearch = Callable[[Buffers, int, int, int], IntArray | None]
"""Given buffers with bytes, ``enough``, ``peak`` and steps: a plan below ``peak``, or None."""

# How far buffers above the lower bound move up in an order, as a part of its length.
PROMOTION = 0.5


def orders(buffers: Buffers) -> Iterator[tuple[str, IntArray]]:
    """Yields names and orders in which to place buffers, the most promising one first."""
    birth, size = buffers.birth, buffers.size
    life = buffers.death - birth
    yield "breadth", np.lexsort((birth, -size, -breadth(buffers)))
    yield "size", np.lexsort((birth, -life, -size))
    yield "area", np.lexsort((birth, -size.astype(np.float64) * life))
    yield "lifetime", np.lexsort((birth, -size, -life))


def attempts(buffers: Buffers, order: IntArray, bound: int, fit: FirstFit) -> Iterator[IntArray]:
    """Yields plans without end: ``fit`` along ``order``, then along ever better orders.

    After each plan the buffers that reach above ``bound`` move up in the order (in every second
    turn only the upper half of them), so that they find room before others do.
    """
    score = np.empty(len(buffers))
    score[order] = np.arange(len(buffers)) / max(len(buffers), 1)
    for turn in count():
        offsets = fit(buffers, np.argsort(score, kind="stable"))
        yield offsets
        above = offsets + buffers.size - bound
        score[above > (above.max(initial=0) // 2 if turn % 2 else 0)] -= PROMOTION


def first_fit(buffers: Buffers, order: IntArray) -> IntArray:
    """Gives each buffer, in this order, the lowest address that is free all its life."""
    offsets = np.zeros(len(buffers), np.int64)
    # Of the buffers placed so far, by address: lowest and highest address, birth, death.
    table = np.empty((4, len(buffers)), np.int64)
    low, high, born, dead = table
    births, deaths, sizes = buffers.birth.tolist(), buffers.death.tolist(), buffers.size.tolist()
    for placed, i in enumerate(order.tolist()):
        birth, death, size = births[i], deaths[i], sizes[i]
        beside = ((born[:placed] < death) & (dead[:placed] > birth)).nonzero()[0]
        address = lowest_gap(low.take(beside), high.take(beside), size) if beside.size else 0
        offsets[i] = address
        at = int(low[:placed].searchsorted(address))
        table[:, at + 1 : placed + 1] = table[:, at:placed]
        table[:, at] = address, address + size, birth, death
    return offsets


def lowest_gap(low: IntArray, high: IntArray, size: int) -> int:
    """Returns the lowest gap of ``size`` bytes between these, which are sorted by ``low``."""
    if low[0] >= size:
        return 0
    top = np.maximum.accumulate(high)
    fits = low[1:] - top[:-1] >= size
    at = int(fits.argmax()) if fits.size else 0
    return int(top[at] if fits.size and fits[at] else top[-1])


def sweep(buffers: Buffers) -> IntArray:
    """Goes along time as an allocator does: each birth takes the smallest hole that it fits in.

    n log n, for problems that are too large for :func:`first_fit`.
    """
    births, deaths, sizes = buffers.birth.tolist(), buffers.death.tolist(), buffers.size.tolist()
    offsets = [0] * len(births)
    holes = _Holes()
    live: list[tuple[int, int]] = []
    for i in np.lexsort((-buffers.size, buffers.birth)).tolist():
        while live and live[0][0] <= births[i]:
            j = heapq.heappop(live)[1]
            holes.free(offsets[j], sizes[j])
        offsets[i] = holes.take(sizes[i])
        heapq.heappush(live, (deaths[i], i))
    return np.array(offsets, np.int64)


class _Holes:
    """The free parts of an arena that grows as needed; neighbours are merged."""

    def __init__(self) -> None:
        self._by_size: list[tuple[int, int]] = []  # (bytes, address)
        self._end_of: dict[int, int] = {}
        self._start_of: dict[int, int] = {}
        self._top = 0

    def take(self, size: int) -> int:
        """Returns the address of ``size`` bytes that are now in use."""
        if size == 0:
            return 0
        at = bisect_left(self._by_size, (size, -1))
        if at < len(self._by_size):
            start = self._by_size[at][1]
        else:
            start = self._start_of.get(self._top, self._top)
            self._top = start + size
        end = self._end_of.get(start, start)
        self._remove(start)
        if start + size < end:
            self._add(start + size, end)
        return start

    def free(self, start: int, size: int) -> None:
        """Gives bytes back."""
        if size == 0:
            return
        end = start + size
        if end in self._end_of:
            after, end = end, self._end_of[end]
            self._remove(after)
        if start in self._start_of:
            start = self._start_of[start]
            self._remove(start)
        self._add(start, end)

    def _add(self, start: int, end: int) -> None:
        self._end_of[start], self._start_of[end] = end, start
        insort(self._by_size, (end - start, start))

    def _remove(self, start: int) -> None:
        end = self._end_of.pop(start, None)
        if end is not None:
            del self._start_of[end]
            del self._by_size[bisect_left(self._by_size, (end - start, start))]
