"""Buffers with live ranges, how many bytes are live at once, and buffers placed one by one.

Static planners place buffers by first fit along good orders: by size and by breadth (Pisarchyk and
Lee, "Efficient Memory Management for Deep Neural Net Inference", 2020), by area and by lifetime
(XLA's heap simulator, MindSpore's SOMAS). :func:`attempts` improves any order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count

import numpy as np
import numpy.typing as npt

from ...reuse.errors import PlanError

IntArray = npt.NDArray[np.int64]

# Sums of sizes stay exact in 64 bits.
MAX_TOTAL_BYTES = 2**62


@dataclass(frozen=True, eq=False)
class Buffers:
    """Buffers that need an address, as read-only columns of equal length.

    Raises:
        PlanError: columns of different lengths, an empty live range or a negative size.
    """

    birth: IntArray  # first time at which a buffer is live
    # First time at which it is no longer live: it lives in ``[birth, death)``. Times are any
    # integers that grow along the program, such as launch numbers.
    death: IntArray
    size: IntArray  # bytes, zero or more

    def __post_init__(self) -> None:
        for name in ("birth", "death", "size"):
            column = np.array(getattr(self, name), dtype=np.int64)
            column.setflags(write=False)
            object.__setattr__(self, name, column)
        self._check()

    def _check(self) -> None:
        shapes = [self.birth.shape, self.death.shape, self.size.shape]
        if shapes != [(len(self.birth),)] * 3:
            raise PlanError(f"birth, death and size must be columns of one length, got {shapes}")
        for i in np.flatnonzero(self.birth >= self.death)[:1]:
            raise PlanError(
                f"buffer {i} lives in [{self.birth[i]}, {self.death[i]}): "
                "its death must be after its birth"
            )
        for i in np.flatnonzero(self.size < 0)[:1]:
            raise PlanError(f"buffer {i} has {self.size[i]} bytes: give zero or more")
        if float(self.size.sum(dtype=np.float64)) >= MAX_TOTAL_BYTES:
            raise PlanError("the sizes add up to 2**62 bytes or more: are they in bytes?")

    def __len__(self) -> int:
        return len(self.birth)

    def take(self, index: npt.NDArray) -> Buffers:
        """Returns the buffers at these positions (or where a mask is true), in that order."""
        return Buffers(self.birth[index], self.death[index], self.size[index])

    def aligned(self, alignment: int) -> Buffers:
        """Returns the same buffers with every size rounded up to a multiple of ``alignment``."""
        if alignment < 1:
            raise PlanError(f"the alignment is {alignment} bytes: give 1 or more")
        return Buffers(self.birth, self.death, -(-self.size // alignment) * alignment)


def concatenate(*parts: Buffers) -> Buffers:
    """Returns the buffers of all parts, one part after the other."""
    return Buffers(
        np.concatenate([p.birth for p in parts]),
        np.concatenate([p.death for p in parts]),
        np.concatenate([p.size for p in parts]),
    )


def live_at_births(buffers: Buffers) -> tuple[IntArray, IntArray]:
    """Returns an order by birth and, in that order, the bytes live right after each birth.

    Of several births at one time, only the last has the full sum.
    """
    order = np.argsort(buffers.birth, kind="stable")
    leaving = np.argsort(buffers.death, kind="stable")
    freed = np.concatenate([[0], np.cumsum(buffers.size[leaving])])
    num_dead = np.searchsorted(buffers.death[leaving], buffers.birth[order], side="right")
    return order, np.cumsum(buffers.size[order]) - freed[num_dead]


def lower_bound(buffers: Buffers) -> int:
    """Returns the largest sum of bytes live at one time. No plan can have a smaller peak."""
    return int(live_at_births(buffers)[1].max(initial=0))


def breadth(buffers: Buffers) -> IntArray:
    """Returns for each buffer the largest sum of live bytes during its life."""
    order, live = live_at_births(buffers)
    births = buffers.birth[order]
    first = np.searchsorted(births, buffers.birth, side="left")
    last = np.searchsorted(births, buffers.death, side="left")
    return _range_max(live, first, last)


def _range_max(values: IntArray, first: IntArray, last: IntArray) -> IntArray:
    """Maxima of values[first:last], by a table of maxima over powers of two."""
    result = np.empty(len(first), np.int64)
    level = np.frexp((last - first).astype(np.float64))[1] - 1
    table = values
    for k in range(int(level.max(initial=-1)) + 1):
        here = np.flatnonzero(level == k)
        result[here] = np.maximum(table[first[here]], table[last[here] - (1 << k)])
        table = np.maximum(table[: -(1 << k)], table[1 << k :])
    return result


FirstFit = Callable[[Buffers, IntArray], IntArray]
"""Places buffers in an order, each at the lowest address that is free during its life."""
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
    """Yields an endless series of plans: ``fit`` along ``order``, then along changed orders.

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
