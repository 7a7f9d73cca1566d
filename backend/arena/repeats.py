"""Repeated scratch: short-lived buffers become blocks, and each different block is planned once.

A program made of calls repeats the same short-lived buffers once per call. Split by length of life,
the short-lived ones fall apart into blocks that do not overlap in time; a block that looks like
another one up to a shift in time takes its plan. What is left, blocks and long-lived buffers, is a
problem of few items. (Lamprakos et al., "idealloc", 2025, box buffers by length of life too.)

Buffers of one size share slots, by interval graph colouring: a colour is a slot. Taking any free
slot at each birth, and a new one only when none is free, needs as many slots as buffers are live at
once: optimal. Which buffer follows which in a slot is found for all sizes at once, without a Python
loop: deaths and births of one size are matched as brackets are, so a buffer takes the slot that was
freed last.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from .live_ranges import Buffers, IntArray, concatenate, live_at_births

# Short-lived means at most this many times as long as the shortest-lived buffer: powers of two.
SPANS = 24


@dataclass(frozen=True, eq=False)
class Layers:
    """A problem split by length of life.

    Attributes:
        short: the short-lived buffers, ordered by block, then by birth, death and size.
        block: the block of each of them.
        first: position in ``short`` at which each block begins.
        blocks: the blocks as buffers; the size is the most that is live at one time inside.
        long: the other buffers.
    """

    short: IntArray
    block: IntArray
    first: IntArray
    blocks: Buffers
    long: IntArray

    @property
    def num_short(self) -> IntArray:
        """Number of short-lived buffers in each block."""
        return np.diff(self.first, append=len(self.short))


@dataclass(frozen=True, eq=False)
class Patterns:
    """Which blocks are equal up to a shift in time.

    Attributes:
        examples: for each pattern the buffers of its first block, in the order of ``Layers.short``.
        of_block: the pattern of each block.
    """

    examples: tuple[IntArray, ...]
    of_block: IntArray


def splits(buffers: Buffers, *, largest_block: int) -> Iterator[Layers]:
    """Yields the different ways to split, most short-lived buffers first.

    Args:
        buffers: the problem.
        largest_block: most buffers in one block; splits with a larger one are left out.
    """
    life = buffers.death - buffers.birth
    by_birth = np.lexsort((buffers.size, buffers.death, buffers.birth))
    before = len(buffers)
    for power in reversed(range(SPANS)):
        is_short = life <= int(life.min(initial=1)) << power
        count = int(is_short.sum())
        if 0 < count < before:
            before = count
            short = by_birth[is_short[by_birth]]
            first = _block_starts(buffers.birth[short], buffers.death[short])
            if np.diff(first, append=count).max() <= largest_block:
                yield _layers(buffers, short, first, np.flatnonzero(~is_short))


def _block_starts(birth: IntArray, death: IntArray) -> IntArray:
    """Returns where, ordered by birth, nothing lives on from before."""
    is_first = np.ones(len(birth), np.bool_)
    is_first[1:] = birth[1:] >= np.maximum.accumulate(death)[:-1]
    return np.flatnonzero(is_first)


def _layers(buffers: Buffers, short: IntArray, first: IntArray, long: IntArray) -> Layers:
    block = np.repeat(np.arange(len(first)), np.diff(first, append=len(short)))
    _, live = live_at_births(buffers.take(short))  # in this order, as it is by birth
    blocks = Buffers(
        buffers.birth[short[first]],
        np.maximum.reduceat(buffers.death[short], first),
        np.maximum.reduceat(live, first),
    )
    return Layers(short, block, first, blocks, long)


def stacked_bytes(buffers: Buffers, layers: Layers) -> int:
    """Returns the peak of :func:`stack` if every block can be planned at its lower bound."""
    slots = chains(buffers.take(layers.long)).problem
    return int(layers.blocks.size.max()) + int(slots.size.sum())


def patterns(buffers: Buffers, layers: Layers) -> Patterns:
    """Finds the blocks that are equal up to a shift in time."""
    rows = np.stack([buffers.birth, buffers.death, buffers.size], axis=1)[layers.short]
    rows[:, :2] -= layers.blocks.birth[layers.block][:, None]
    num_short = layers.num_short
    of_block = np.empty(len(num_short), np.int64)
    examples: list[IntArray] = []
    for count in np.unique(num_short).tolist():
        same_count = np.flatnonzero(num_short == count)
        place = layers.first[same_count][:, None] + np.arange(count)
        table = rows[place].reshape(len(same_count), -1)
        _, example, which = np.unique(table, axis=0, return_index=True, return_inverse=True)
        of_block[same_count] = which.reshape(-1) + len(examples)
        examples.extend(layers.short[place[example]])
    return Patterns(tuple(examples), of_block)


def contract(
    buffers: Buffers, layers: Layers, found: Patterns, plans: Sequence[IntArray]
) -> Contraction:
    """Returns the problem of blocks, then long-lived buffers, given the offsets of each pattern."""
    shift, member = np.zeros(len(buffers), np.int64), np.empty(len(buffers), np.int64)
    begin = np.cumsum([0, *map(len, plans)])[found.of_block]
    position = np.arange(len(layers.short)) - layers.first[layers.block]
    shift[layers.short] = np.concatenate(plans)[begin[layers.block] + position]
    member[layers.short] = layers.block
    member[layers.long] = len(layers.blocks) + np.arange(len(layers.long))
    top = shift[layers.short] + buffers.size[layers.short]
    size = np.maximum.reduceat(top, layers.first)
    blocks = Buffers(layers.blocks.birth, layers.blocks.death, size)
    return Contraction(concatenate(blocks, buffers.take(layers.long)), member, shift)


def stack(items: Buffers, num_blocks: int) -> IntArray:
    """Places blocks, which come first, in one region and the rest above it, a slot per colour.

    Blocks that overlap in time get further regions. Buffers of one size share slots.
    """
    kind = np.unique(items.size, return_inverse=True)[1] + 1
    kind[:num_blocks] = 0
    slots = chains(items, kind=kind.astype(np.int64))
    return slots.expand(np.cumsum(slots.problem.size) - slots.problem.size)


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
    """Returns pairs: a buffer, and the one of its kind that takes over its slot."""
    count = len(birth)
    time, kinds = np.concatenate([death, birth]), np.concatenate([kind, kind])
    is_birth = np.arange(2 * count) >= count
    order = np.lexsort((is_birth, time, kinds))
    is_birth, kinds = is_birth[order], kinds[order]
    # A death opens a bracket and a birth closes one. On one level of nesting deaths and births
    # alternate, so a birth after a death on its level takes the slot of that death. A kind has as
    # many births as deaths, so the level is zero again where the next one starts.
    level = np.cumsum(np.where(is_birth, -1, 1)) + is_birth
    by_level = np.lexsort((level, kinds))
    order, is_birth = order[by_level], is_birth[by_level]
    level, kinds = level[by_level], kinds[by_level]
    same = (level[1:] == level[:-1]) & (kinds[1:] == kinds[:-1])
    at = np.flatnonzero(same & is_birth[1:] & ~is_birth[:-1])
    return order[at], order[at + 1] - count
