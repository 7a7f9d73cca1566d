"""Static memory planner: every buffer of a program gets an offset in one arena.

This is dynamic storage allocation with all live ranges known: NP-hard, and easy to get within a
percent on the programs at hand. :func:`plan` takes the best of several plans, from cheap to dear,
and stops as soon as one reaches the lower bound:

1. the program repeats its calls: plan repeated scratch once, colour equal long-lived buffers
   (:mod:`.repeats`); near-linear time, for any number of buffers
2. best fit along time (:func:`.live_ranges.sweep`)
3. first fit along several orders, each improved by moving up the buffers that end above the lower
   bound, on chains of equal buffers (:func:`.live_ranges.attempts`); quadratic time
4. few buffers, or few once repeats are joined: exact search (``exact``), of so many steps

What is worth trying is decided by a model of its cost, not by a clock: a plan does not depend on
how fast the machine is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from .live_ranges import (
    Buffers,
    ExactSearch,
    FirstFit,
    IntArray,
    attempts,
    first_fit,
    lower_bound,
    orders,
    sweep,
)
from .repeats import (
    Contraction,
    Layers,
    chains,
    contract,
    patterns,
    splits,
    stack,
    stacked_bytes,
    unchanged,
)

ALIGNMENT = 64
EFFORT_S = 1.0

# Blocks of scratch are planned with this share of the effort, all different ones together.
SCRATCH_SHARE = 0.1
# Most buffers in one block: more are no scratch of one call, and too many to plan for each block.
MAX_BLOCK = 2000
# More patterns of blocks than this are no repetition.
MAX_PATTERNS = 500
# A split by length of life this close to the lower bound is good, this far from it is none.
GOOD_SPLIT, POOR_SPLIT = 1.0005, 1.05
# Gaps over which buffers are joined: up to two to this power.
GAP_POWERS = 20
# A larger problem is not packed by first fit.
MAX_FIRST_FIT = 100_000
# A larger problem is not searched exactly. Others are with so many steps per second of effort,
# about half a second of a CPU, and variants of them with a part of that.
MAX_EXACT = 2000
EXACT_STEPS_PER_S = 500_000_000
EXACT_PART = 4
# Passes without gain after which an order goes to the end of the queue.
PATIENCE = 8
# Passes over all orders together after which improving gives up.
MAX_PASSES = 400


@dataclass(frozen=True, eq=False)
class ArenaPlan:
    """Holds the place of each buffer.

    Attributes:
        offsets: bytes from the start of the arena, in the order of the buffers.
        peak_bytes: size of the arena.
        lower_bound_bytes: the largest sum of live bytes, sizes rounded up to the alignment. No plan
            needs less.
        method: which of the planner's ways this plan came from.
    """

    offsets: IntArray
    peak_bytes: int
    lower_bound_bytes: int
    method: str

    @property
    def ratio(self) -> float:
        """Peak over lower bound; 1 is perfect."""
        return self.peak_bytes / self.lower_bound_bytes if self.lower_bound_bytes else 1.0


def plan(
    buffers: Buffers,
    *,
    alignment: int = ALIGNMENT,
    effort_s: float = EFFORT_S,
    enough: float = 1.0,
    fit: FirstFit = first_fit,
    exact: ExactSearch | None = None,
) -> ArenaPlan:
    """Plans an arena.

    Args:
        buffers: sizes in bytes, live ranges in launches or any other clock.
        alignment: every offset is a multiple of this many bytes.
        effort_s: what to spend on finding a better plan, in seconds of a nominal machine. The same
            effort gives the same plan everywhere. The near-linear part is always done.
        enough: ratio of peak to lower bound at which to stop.
        fit: does what :func:`.live_ranges.first_fit` does; the plan is the same, and sooner there.
        exact: searches where these plans are not enough, with the same effort again; None for not.
    """
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
    if not best.is_enough and _sweep_cost_s(len(problem)) <= effort_s:
        best.offer("sweep", sweep(problem))
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
    """Offers the near-linear plans; returns the contraction behind the second, if there is one."""
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
    best.offer("sweep", sweep(block))
    if not best.is_enough:
        _improve([unchanged(block)], best, effort_s, fit)
    return best.offsets


def _variants(problem: Buffers, layered: list[Contraction]) -> list[Contraction]:
    """Returns the problem and smaller ones in its place, the smallest first."""
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
    """One order of one variant, being improved."""

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
        cost_s, bound = _pass_cost_s(len(problem)), lower_bound(problem)
        for name, order in orders(problem):
            plans = attempts(problem, order, bound, fit)
            yield _Try(f"first fit by {name}", plans, variant, cost_s, bound)


def _improve(variants: list[Contraction], best: _Best, effort_s: float, fit: FirstFit) -> None:
    """Opens one order after the other, and between them improves the best ones so far."""
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
    """Takes the best in every second turn, the next one in every fourth, and so on."""
    able = [t for t in opened if t.cost_s <= effort_s and t.peak > t.bound]
    # Those that have not gained for long come last.
    able.sort(key=lambda t: (t.num_stale // PATIENCE, t.peak, t.num_passes))
    rank = (turn & -turn).bit_length() - 1
    return able[min(rank, len(able) - 1)] if able else None


def _pass_cost_s(count: int) -> float:
    """Seconds that one first fit takes on a nominal machine."""
    return count * (10e-6 + 0.4e-9 * count)


def _sweep_cost_s(count: int) -> float:
    """Seconds that one sweep takes on a nominal machine."""
    return count * 4e-6
