"""Repeated scratch: short-lived buffers become blocks, and each different block is planned once.

A program made of calls repeats the same short-lived buffers once per call. Split by length of life,
the short-lived ones fall apart into blocks that do not overlap in time; a block that looks like
another one up to a shift in time takes its plan. What is left, blocks and long-lived buffers, is a
problem of few items. (Lamprakos et al., "idealloc", 2025, box buffers by length of life too.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from .coloring import Contraction, chains
from .live_ranges import Buffers, IntArray, concatenate, live_at_births

Planner = Callable[[Buffers], IntArray]

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
        return np.diff(np.append(self.first, len(self.short)))


def splits(buffers: Buffers) -> Iterator[Layers]:
    """Yields the different ways to split, most short-lived buffers first."""
    life = buffers.death - buffers.birth
    by_birth = np.lexsort((buffers.size, buffers.death, buffers.birth))
    before = len(buffers)
    for power in reversed(range(SPANS)):
        span = int(life.min(initial=1)) << power
        is_short = life <= span
        count = int(is_short.sum())
        if 0 < count < before:
            yield _split(buffers, by_birth[is_short[by_birth]], np.flatnonzero(~is_short))
            before = count


def _split(buffers: Buffers, short: IntArray, long: IntArray) -> Layers:
    birth, death = buffers.birth[short], buffers.death[short]
    is_first = np.ones(len(short), np.bool_)
    is_first[1:] = birth[1:] >= np.maximum.accumulate(death)[:-1]
    first = np.flatnonzero(is_first)
    _, live = live_at_births(buffers.take(short))  # ordered by birth already
    blocks = Buffers(
        birth[first], np.maximum.reduceat(death, first), np.maximum.reduceat(live, first)
    )
    return Layers(short, np.cumsum(is_first) - 1, first, blocks, long)


def stacked_bytes(buffers: Buffers, layers: Layers) -> int:
    """Returns the peak of :func:`stack` if every block can be planned at its lower bound."""
    slots = chains(buffers.take(layers.long)).problem
    return int(layers.blocks.size.max()) + int(slots.size.sum())


def patterns(buffers: Buffers, layers: Layers) -> tuple[list[IntArray], IntArray]:
    """Finds the blocks that are equal up to a shift in time.

    Returns:
        For each pattern the buffers of its first block, in the order of ``layers.short``; and the
        pattern of each block.
    """
    rows = np.stack([buffers.birth, buffers.death, buffers.size], axis=1)[layers.short]
    rows[:, :2] -= layers.blocks.birth[layers.block][:, None]
    pattern_of = np.empty(len(layers.first), np.int64)
    members: list[IntArray] = []
    for count in np.unique(layers.num_short).tolist():
        same_count = np.flatnonzero(layers.num_short == count)
        place = layers.first[same_count][:, None] + np.arange(count)
        table = rows[place].reshape(len(same_count), -1)
        _, example, which = np.unique(table, axis=0, return_index=True, return_inverse=True)
        pattern_of[same_count] = which.reshape(-1) + len(members)
        members.extend(layers.short[place[example]])
    return members, pattern_of


def contract(buffers: Buffers, layers: Layers, planner: Planner) -> Contraction:
    """Plans each pattern once; returns the problem of blocks, then long-lived buffers."""
    members, pattern_of = patterns(buffers, layers)
    plans = [planner(buffers.take(index)) for index in members]
    shift, member = np.zeros(len(buffers), np.int64), np.empty(len(buffers), np.int64)
    shift[layers.short] = _spread(plans, pattern_of, layers)
    member[layers.short] = layers.block
    member[layers.long] = len(layers.blocks) + np.arange(len(layers.long))
    top = shift[layers.short] + buffers.size[layers.short]
    size = np.maximum.reduceat(top, layers.first)
    blocks = Buffers(layers.blocks.birth, layers.blocks.death, size)
    return Contraction(concatenate(blocks, buffers.take(layers.long)), member, shift)


def _spread(plans: list[IntArray], pattern_of: IntArray, layers: Layers) -> IntArray:
    """Returns the offset inside its block of each short-lived buffer."""
    begin = np.cumsum([0, *map(len, plans)])[pattern_of]
    position = np.arange(len(layers.short)) - layers.first[layers.block]
    return np.concatenate(plans)[begin[layers.block] + position]


def stack(contraction: Contraction, num_blocks: int) -> IntArray:
    """Places the items of :func:`contract`: one region for blocks, one slot per colour above it."""
    problem = contraction.problem
    kind = np.unique(problem.size, return_inverse=True)[1] + 1
    kind[:num_blocks] = 0
    slots = chains(problem, kind=kind.astype(np.int64))
    return slots.expand(np.cumsum(slots.problem.size) - slots.problem.size)
