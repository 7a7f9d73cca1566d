"""Buffers of one size share slots: interval graph colouring, and chains of it.

For equal sizes a colour is a slot. Taking any free slot at each birth, and a new one only when
none is free, needs as many slots as buffers are live at once: optimal. Which buffer follows which
in a slot is found for all sizes at once, without a Python loop: deaths and births of one size are
matched as brackets are, so a buffer takes the slot that was freed last.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .live_ranges import Buffers, IntArray


@dataclass(frozen=True, eq=False)
class Contraction:
    """A smaller problem whose plan is a plan of the whole.

    Attributes:
        problem: the items to be placed.
        member: for each buffer of the whole, the item that holds it.
        shift: for each buffer of the whole, its offset in that item.
    """

    problem: Buffers
    member: IntArray
    shift: IntArray

    def expand(self, offsets: IntArray) -> IntArray:
        """Returns the whole's offsets from the items' offsets."""
        return offsets[self.member] + self.shift

    def then(self, inner: Contraction) -> Contraction:
        """Returns this contraction followed by one of its problem."""
        shift = self.shift + inner.shift[self.member]
        return Contraction(inner.problem, inner.member[self.member], shift)


def unchanged(buffers: Buffers) -> Contraction:
    """Returns the contraction that leaves a problem as it is."""
    count = len(buffers)
    return Contraction(buffers, np.arange(count), np.zeros(count, np.int64))


def chains(
    buffers: Buffers, *, max_gap: int | None = None, kind: IntArray | None = None
) -> Contraction:
    """Joins buffers that can follow one another in a slot into one item with one live range.

    Args:
        buffers: the problem.
        max_gap: join only over at most this time in which the slot is not used; None for any.
        kind: buffers of one kind share slots; by default those of one size. A slot has the size of
            the largest.
    """
    if kind is None:
        kind = np.unique(buffers.size, return_inverse=True)[1].astype(np.int64)
    chain, first = _chains(buffers.birth, buffers.death, kind, max_gap)
    death, size = np.zeros(len(first), np.int64), np.zeros(len(first), np.int64)
    by_death = np.argsort(buffers.death, kind="stable")
    death[chain[by_death]] = buffers.death[by_death]  # the last assignment stays
    np.maximum.at(size, chain, buffers.size)
    problem = Buffers(buffers.birth[first], death, size)
    return Contraction(problem, chain, np.zeros(len(buffers), np.int64))


def _chains(
    birth: IntArray, death: IntArray, kind: IntArray, max_gap: int | None
) -> tuple[IntArray, IntArray]:
    """Returns each buffer's chain, and each chain's first buffer."""
    earlier, later = _takeovers(birth, death, kind)
    if max_gap is not None:
        close = birth[later] - death[earlier] <= max_gap
        earlier, later = earlier[close], later[close]
    count = len(birth)
    root, is_first = np.arange(count), np.ones(count, np.bool_)
    root[later], is_first[later] = earlier, False
    while True:  # halves the way to the first of the chain
        further = root[root]
        if np.array_equal(further, root):
            break
        root = further
    return (np.cumsum(is_first) - 1)[root], np.flatnonzero(is_first)


def _takeovers(birth: IntArray, death: IntArray, kind: IntArray) -> tuple[IntArray, IntArray]:
    """Returns pairs: a buffer, and the one of its kind that takes over its slot.

    Of each kind, a death opens a bracket and a birth closes one. On one level of nesting deaths
    and births alternate, so a birth after a death on its level takes the slot of that death.
    """
    count = len(birth)
    time, kinds = np.concatenate([death, birth]), np.concatenate([kind, kind])
    is_birth = np.arange(2 * count) >= count
    order = np.lexsort((is_birth, time, kinds))
    is_birth, kinds = is_birth[order], kinds[order]
    # A kind has as many births as deaths, so the level is zero again where the next one starts.
    level = np.cumsum(np.where(is_birth, -1, 1)) + is_birth
    by_level = np.lexsort((level, kinds))
    order, is_birth = order[by_level], is_birth[by_level]
    level, kinds = level[by_level], kinds[by_level]
    same = (level[1:] == level[:-1]) & (kinds[1:] == kinds[:-1])
    at = np.flatnonzero(same & is_birth[1:] & ~is_birth[:-1])
    return order[at], order[at + 1] - count
