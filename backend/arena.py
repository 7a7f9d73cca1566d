"""Static memory planner: every buffer of a program gets an offset in one arena.

This is dynamic storage allocation with known live ranges: NP-hard in general, but for programs of
models within a percent of the lower bound. :func:`plan` makes several plans, cheap ones first,
takes the best, and stops as soon as one reaches the lower bound:

1. the program repeats its calls: plan repeated scratch once, colour equal long-lived buffers;
   near-linear time, for any number of buffers
2. first fit along several orders, each improved by moving up the buffers that end above the lower
   bound, on chains of equal buffers (:func:`attempts`); quadratic time
3. for few buffers, or few after repeats are joined: exact search (``exact``), with a step limit

A model of cost, not a clock, decides what to try: a plan does not depend on the machine's speed.

A program made of calls repeats the same short-lived buffers in each call. The short-lived buffers
form blocks that do not overlap in time; blocks that are equal up to a shift in time share a plan.
Blocks and long-lived buffers together are a problem of few items. (Lamprakos et al., "idealloc",
2025, group buffers by length of life, too.)

Buffers of one size share slots, by interval graph colouring: a colour is a slot. Taking any free
slot at each birth, and a new one only when none is free, needs as many slots as buffers are live at
once: optimal. Which buffer follows which in a slot is found for all sizes at once, without a Python
loop: deaths and births of one size are matched as brackets are, so a buffer takes the slot that was
freed last.

First fit takes good orders: by size and by breadth (Pisarchyk and Lee, "Efficient Memory Management
for Deep Neural Net Inference", 2020), by area and lifetime (XLA's heap simulator, MindSpore's
SOMAS).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count as counted

import numpy as np
import numpy.typing as npt

from ..reuse.errors import PlanError

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

    @classmethod
    def of(cls, rows: Iterable[tuple[int, int, int]]) -> Buffers:
        """Returns buffers by the birth, the death and the size of each."""
        return cls(*np.array(list(rows), np.int64).reshape(-1, 3).T)

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
    columns = ("birth", "death", "size")
    return Buffers(*(np.concatenate([getattr(p, one) for p in parts]) for one in columns))


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
    for turn in counted():
        offsets = fit(buffers, np.argsort(score, kind="stable"))
        yield offsets
        above = offsets + buffers.size - bound
        score[above > (above.max(initial=0) // 2 if turn % 2 else 0)] -= PROMOTION


# ---- repeats -------------------------------------------------------------------------------------


# Splits tried: short-lived means at most 2**k times the shortest life, for k below this.
SPANS = 24


@dataclass(frozen=True, eq=False)
class Layers:
    """A problem split by length of life."""

    short: IntArray  # the short-lived buffers, ordered by block, then by birth, death and size
    block: IntArray  # the block of each of them
    first: IntArray  # position in ``short`` at which each block begins
    blocks: Buffers  # the blocks as buffers; the size is the most that is live at one time inside
    long: IntArray  # the other buffers


@dataclass(frozen=True, eq=False)
class Patterns:
    """Which blocks are equal up to a shift in time."""

    # For each pattern the buffers of its first block, in the order of ``Layers.short``.
    examples: tuple[IntArray, ...]
    of_block: IntArray  # the pattern of each block


def splits(buffers: Buffers, *, largest_block: int) -> Iterator[Layers]:
    """Yields the different splits, most short-lived buffers first, without one of larger blocks."""
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
    """Returns where blocks start in an order by birth: no earlier buffer is live there."""
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
    num_short = np.diff(layers.first, append=len(layers.short))  # in each block
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
    """A smaller problem whose plan is a plan of the whole."""

    problem: Buffers  # the items to be placed
    member: IntArray  # for each buffer of the whole, the item that holds it
    shift: IntArray  # for each buffer of the whole, its offset in that item

    def expand(self, offsets: IntArray) -> IntArray:
        """Returns the whole's offsets from the items' offsets."""
        return offsets[self.member] + self.shift

    def then(self, inner: Contraction) -> Contraction:
        """Returns this contraction followed by one of its problem."""
        shift = self.shift + inner.shift[self.member]
        return Contraction(inner.problem, inner.member[self.member], shift)


def unchanged(buffers: Buffers) -> Contraction:
    """Returns the contraction that leaves a problem as it is."""
    return Contraction(buffers, np.arange(len(buffers)), np.zeros(len(buffers), np.int64))


def chains(
    buffers: Buffers, *, max_gap: int | None = None, kind: IntArray | None = None
) -> Contraction:
    """Joins buffers that can follow one another in a slot into one item with one live range.

    A joined slot is unused in between for at most ``max_gap``. Buffers of one kind share slots, by
    default those of one size; a slot has the size of the largest.
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
    while True:  # pointer doubling: each turn halves the distance to the first of the chain
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


# ---- the planner ---------------------------------------------------------------------------------


ALIGNMENT = 64
EFFORT_S = 1.0

# Blocks of scratch are planned with this share of the effort, all different ones together.
SCRATCH_SHARE = 0.1
# Most buffers in one block: more are not the scratch of one call, and take too long to plan.
MAX_BLOCK = 2000
# With more different blocks than this, the program does not repeat.
MAX_PATTERNS = 500
# A split this close to the lower bound is good enough; one this far from it is not used.
GOOD_SPLIT, POOR_SPLIT = 1.0005, 1.05
# Gaps over which buffers are joined: up to two to this power.
GAP_POWERS = 20
# A larger problem is not packed by first fit.
MAX_FIRST_FIT = 100_000
# A larger problem is not searched exactly. Others get this many steps per second of effort, about
# half a second of a CPU; smaller variants of a problem get one part in EXACT_PART of that.
MAX_EXACT = 2000
EXACT_STEPS_PER_S = 500_000_000
EXACT_PART = 4
# Passes without gain after which an order goes to the end of the queue.
PATIENCE = 8
# Passes over all orders together after which improving gives up.
MAX_PASSES = 400


@dataclass(frozen=True, eq=False)
class ArenaPlan:
    """Holds the place of each buffer."""

    offsets: IntArray  # bytes from the start of the arena, in the order of the buffers
    peak_bytes: int  # size of the arena
    # The largest sum of live bytes, sizes rounded up to the alignment. No plan needs less.
    lower_bound_bytes: int
    method: str  # the name of the method that found this plan

    @property
    def ratio(self) -> float:
        """Peak over lower bound; 1 is perfect."""
        return self.peak_bytes / self.lower_bound_bytes if self.lower_bound_bytes else 1.0


def plan(
    buffers: Buffers,  # sizes in bytes, live ranges in launches or any other clock
    *,
    fit: FirstFit,
    alignment: int = ALIGNMENT,  # every offset is a multiple of this many bytes
    # How long to look for a better plan, in seconds of a nominal machine: the same effort gives the
    # same plan everywhere. The near-linear part is always done.
    effort_s: float = EFFORT_S,
    enough: float = 1.0,  # ratio of peak to lower bound at which to stop
    exact: ExactSearch | None = None,  # if the others are not enough, with the same effort again
) -> ArenaPlan:
    """Plans an arena."""
    padded = buffers.aligned(alignment)
    sized = np.flatnonzero(padded.size)
    problem = padded.take(sized)
    best = _Best(problem, enough)
    if len(problem):
        _search(problem, best, effort_s, fit, exact)
    offsets = np.zeros(len(buffers), np.int64)
    offsets[sized] = best.offsets
    return ArenaPlan(offsets, best.peak, best.bound, best.method)


class _Best:
    """The lowest plan offered so far."""

    def __init__(self, problem: Buffers, enough: float) -> None:
        self.bound = lower_bound(problem)
        self.offsets: IntArray = np.zeros(0, np.int64)
        self.peak = 0
        self.method = "empty"
        self._problem = problem
        self.enough = self.bound + int((enough - 1.0) * self.bound)

    def offer(self, method: str, offsets: IntArray) -> int:
        """Takes a plan of the whole problem; returns its peak."""
        peak = int((offsets + self._problem.size).max(initial=0))
        if self.method == "empty" or peak < self.peak:
            self.offsets, self.peak, self.method = offsets, peak, method
        return peak

    @property
    def is_enough(self) -> bool:
        return self.method != "empty" and self.peak <= self.enough


def _search(
    problem: Buffers, best: _Best, effort_s: float, fit: FirstFit, exact: ExactSearch | None
) -> None:
    layered = _plan_repeats(problem, best, effort_s, fit)
    if best.is_enough or len(problem) > MAX_FIRST_FIT:
        return
    variants = _variants(problem, layered)
    _improve(variants, best, effort_s, fit)
    if exact is not None and not best.is_enough:
        _search_exactly(variants, best, int(effort_s * EXACT_STEPS_PER_S), exact)


def _search_exactly(
    variants: list[Contraction], best: _Best, steps: int, exact: ExactSearch
) -> None:
    """Searches the variants, the smallest first and the whole problem last."""
    able = {len(v.problem): v for v in variants if len(v.problem) <= MAX_EXACT}
    for count, variant in able.items():
        share = steps if count == max(able) else steps // EXACT_PART
        enough = max(best.enough, lower_bound(variant.problem))
        offsets = exact(variant.problem, enough, best.peak, share)
        if offsets is not None:
            best.offer("exact search", variant.expand(offsets))
        if best.is_enough:
            break


def _plan_repeats(
    problem: Buffers, best: _Best, effort_s: float, fit: FirstFit
) -> list[Contraction]:
    """Offers the near-linear plans; returns the contraction by repeats, if it is useful."""
    best.offer("colors", stack(problem, 0))
    layers = _choose_split(problem, best) if best.peak > GOOD_SPLIT * best.bound else None
    found = patterns(problem, layers) if layers is not None else None
    if layers is None or found is None or len(found.examples) > MAX_PATTERNS:
        return []
    share_s = effort_s * SCRATCH_SHARE / len(found.examples)
    plans = [_plan_block(problem.take(block), share_s, fit) for block in found.examples]
    contraction = contract(problem, layers, found, plans)
    offsets = stack(contraction.problem, len(layers.blocks))
    best.offer("repeats", contraction.expand(offsets))
    return [contraction] if lower_bound(contraction.problem) < best.peak else []


def _choose_split(problem: Buffers, best: _Best) -> Layers | None:
    """Returns the split that promises the lowest plan, if it can be lower than the best so far."""
    chosen, lowest = None, min(best.peak, int(POOR_SPLIT * best.bound))
    for layers in splits(problem, largest_block=min(MAX_BLOCK, len(problem) // 4)):
        stacked = stacked_bytes(problem, layers)
        if stacked < lowest:
            chosen, lowest = layers, stacked
        if lowest <= GOOD_SPLIT * best.bound:
            break
    return chosen


def _plan_block(block: Buffers, effort_s: float, fit: FirstFit) -> IntArray:
    best = _Best(block, 1.0)
    best.offer("colors", stack(block, 0))
    if not best.is_enough:
        _improve([unchanged(block)], best, effort_s, fit)
    return best.offsets


def _variants(problem: Buffers, layered: list[Contraction]) -> list[Contraction]:
    """Returns the problem and smaller variants of it, the smallest first."""
    found: list[Contraction] = []
    for whole in [unchanged(problem), *layered]:
        gap = _longest_harmless_gap(whole.problem)
        for shorter in (gap, gap // 4):
            found.append(whole.then(chains(whole.problem, max_gap=shorter)))
        found.append(whole)
    return sorted(found, key=lambda variant: len(variant.problem))


def _longest_harmless_gap(problem: Buffers) -> int:
    """Returns a longest gap over which joining equal buffers leaves the lower bound as it is."""
    bound, gap = lower_bound(problem), 0
    for power in range(GAP_POWERS):
        joined = chains(problem, max_gap=2**power).problem
        if lower_bound(joined) > bound:
            break
        gap = 2**power
    return gap


@dataclass(eq=False)
class _Try:
    """One order of one variant, which is improved step by step."""

    name: str
    plans: Iterator[IntArray]
    variant: Contraction
    cost_s: float
    bound: int
    num_passes: int = 0
    num_stale: int = 0  # passes since the last gain
    peak: int = 0

    def step(self, best: _Best) -> None:
        """Makes the next plan."""
        peak = best.offer(self.name, self.variant.expand(next(self.plans)))
        self.num_passes += 1
        self.num_stale += 1
        if self.num_passes == 1 or peak < self.peak:
            self.peak, self.num_stale = peak, 0


def _tries(variants: list[Contraction], fit: FirstFit) -> Iterator[_Try]:
    for variant in variants:
        problem = variant.problem
        count, bound = len(problem), lower_bound(problem)
        cost_s = count * (10e-6 + 0.4e-9 * count)  # of one first fit, on a nominal machine
        for name, order in orders(problem):
            plans = attempts(problem, order, bound, fit)
            yield _Try(f"first fit by {name}", plans, variant, cost_s, bound)


def _improve(variants: list[Contraction], best: _Best, effort_s: float, fit: FirstFit) -> None:
    """Tries one order after the other, and in between improves the best orders so far."""
    unopened, opened = _tries(variants, fit), list[_Try]()
    for turn in range(1, MAX_PASSES + 1):
        chosen = next(unopened, None) if turn % 2 else None
        if chosen is None or chosen.cost_s > effort_s:
            chosen = _choose(opened, turn // 2, effort_s)
        if chosen is None:
            break
        if not chosen.num_passes:
            opened.append(chosen)
        chosen.step(best)
        effort_s -= chosen.cost_s
        if best.is_enough:
            break


def _choose(opened: list[_Try], turn: int, effort_s: float) -> _Try | None:
    """Returns the best order in every second turn, the next one in every fourth, and so on."""
    able = [t for t in opened if t.cost_s <= effort_s and t.peak > t.bound]
    # Those that have not gained for long come last.
    able.sort(key=lambda t: (t.num_stale // PATIENCE, t.peak, t.num_passes))
    rank = (turn & -turn).bit_length() - 1
    return able[min(rank, len(able) - 1)] if able else None
