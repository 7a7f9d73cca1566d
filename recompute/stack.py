"""The exact spread over a stack: many calls of one closure, and single calls of others around it.

That is what a transformer is. Three variants of the layer leave two counts free. A spread with
fractions needs two of the three, and says what each call of the third would lose; more is lost than
such a spread saves after a few calls, so only so many are tried. The work depends on the number of
variants, not of calls, and all of it is array operations: a millisecond, where an integer solver
takes ten to a hundred.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .group import Group

NUM_VARIANTS = 3
_MAX_POINTS = 1000  # ways to take the single calls, none better than another


@dataclass(frozen=True)
class Spread:
    """Counts by variant for each group, and how many counts were compared to find them."""

    counts: tuple[tuple[int, ...], ...]
    num_compared: int


@dataclass(frozen=True)
class _Point:
    """One way to take the single calls: variants in order, bytes, seconds."""

    variants: tuple[int, ...] = ()
    num_bytes: int = 0
    extra_s: float = 0.0


def spread_of_stack(groups: Sequence[Group], max_bytes: int, tie: float) -> Spread | None:
    """Says how many calls take which variant: the least work within the bytes.

    Args:
        groups: the calls; at most one group has more than one (see :func:`is_stack`).
        max_bytes: of all calls together.
        tie: what each variant that is used costs, against the dearest variant's work.

    Returns:
        None if the bytes do not suffice.
    """
    points = _single_calls([g for g in groups if g.num_calls == 1])
    assert points is not None, "the caller has asked is_stack"
    stack = next((g for g in groups if g.num_calls > 1), Group(0, (0,), (0.0,)))
    found = _Search(stack, points, max_bytes, tie).best()
    if found is None:
        return None
    point, counts, num_compared = found
    taken = iter(point.variants)
    all_counts = [
        tuple(int(i == v) for i in range(len(g.num_bytes)))
        for g in groups
        if g.num_calls == 1
        for v in [next(taken)]
    ]
    singles = iter(all_counts)
    return Spread(
        tuple(next(singles) if g.num_calls == 1 else counts for g in groups), num_compared
    )


def is_stack(groups: Sequence[Group]) -> bool:
    """Whether :func:`spread_of_stack` can answer."""
    many = [g for g in groups if g.num_calls > 1]
    few_variants = all(max(len(g.compiled), 1) <= g.max_variants <= NUM_VARIANTS for g in groups)
    if len(many) > 1 or not few_variants:
        return False
    return _single_calls([g for g in groups if g.num_calls == 1]) is not None


def _single_calls(groups: Sequence[Group]) -> list[_Point] | None:
    """Returns the ways to take calls that no other beats, fewest bytes first; None if too many."""
    points = [_Point()]
    for group in groups:
        full = len(group.compiled) >= group.max_variants
        allowed = sorted(group.compiled) if full else range(len(group.num_bytes))
        more = [
            _Point((*p.variants, i), p.num_bytes + group.num_bytes[i], p.extra_s + group.extra_s[i])
            for p in points
            for i in allowed
        ]
        points = []
        for point in sorted(more, key=lambda p: (p.num_bytes, p.extra_s)):
            if not points or point.extra_s < points[-1].extra_s:
                points.append(point)
        if len(points) > _MAX_POINTS:
            return None
    return points


class _Search:
    """All choices of three variants of the stack, for all ways to take the single calls at once.

    Arrays have a row per way and a column per choice.
    """

    def __init__(self, stack: Group, points: Sequence[_Point], max_bytes: int, tie: float) -> None:
        self._calls = stack.num_calls
        self._points = points
        self._bytes, self._work = np.array(stack.num_bytes), np.array(stack.extra_s)
        self._choices = _choices(stack)
        self._room = max_bytes - np.array([p.num_bytes for p in points])[:, None]
        self._paid = np.array([p.extra_s for p in points])[:, None]
        self._tie = tie * (self._work.max() or 1.0)

    def best(self) -> tuple[_Point, tuple[int, ...], int] | None:
        """Returns the way, the counts of the stack's variants, and how many were compared."""
        low, high, third = self._pairs()
        step = self._bytes[high] - self._bytes[low]
        room = self._room - self._calls * self._bytes[low]
        fits = room >= 0
        if not fits.any():
            return None
        per_step = self._work[low] - self._work[high]
        # A spread with fractions, and the same rounded down: what is best lies in between.
        price = np.where(room < self._calls * step, per_step / np.maximum(step, 1), 0.0)
        rounded = np.where(step > 0, np.minimum(room // np.maximum(step, 1), self._calls), 0)
        fraction = np.where(step > 0, np.minimum(room / np.maximum(step, 1), self._calls), 0)
        base = self._paid + self._calls * self._work[low]
        bound = base - fraction * per_step
        limit = np.where(fits, base - rounded * per_step, np.inf).min()
        limit += NUM_VARIANTS * self._tie + 1e-12 * abs(limit)
        # What one call of the third variant loses against that price.
        loss = self._work[third] - self._work[high]
        loss += price * (self._bytes[third] - self._bytes[high])
        distinct = (third != low) & (third != high)
        most = np.clip((limit - bound) / np.maximum(loss, 1e-300), 0, self._calls)
        tried = np.where(distinct, most, 0).astype(np.int64) + 1
        return self._compare(np.where(fits & (bound <= limit), tried, 0), low, high, third)

    def _pairs(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """For each way and choice: the two variants of a spread with fractions, and the third."""
        a, b, c = self._choices.T[:, None, :]
        across = (self._bytes[b] - self._bytes[a]) / np.maximum(self._bytes[c] - self._bytes[a], 1)
        line = self._work[a] + across * (self._work[c] - self._work[a])
        bends = self._work[b] < line  # else the middle variant is never worth it
        below = bends & (self._room < self._calls * self._bytes[b])
        above = bends & ~below
        third = np.where(above, a, np.where(below, c, b))
        return np.where(above, b, a), np.where(below, b, c), third

    def _compare(
        self, tried: np.ndarray, low: np.ndarray, high: np.ndarray, third: np.ndarray
    ) -> tuple[_Point, tuple[int, ...], int] | None:
        """Tries counts of the third variant from 0 on, with the best counts of the other two."""
        rows, columns = np.nonzero(tried)
        sizes = tried[rows, columns]
        of_third = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        rows, columns = np.repeat(rows, sizes), np.repeat(columns, sizes)
        low, high, third = low[rows, columns], high[rows, columns], third[rows, columns]
        rest = self._calls - of_third
        room = self._room[rows, 0] - of_third * self._bytes[third] - rest * self._bytes[low]
        step = np.maximum(self._bytes[high] - self._bytes[low], 1)
        of_high = np.where(high != low, np.minimum(rest, room // step), 0)
        of_low = rest - of_high
        work = self._paid[rows, 0] + of_third * self._work[third]
        work = work + of_low * self._work[low] + of_high * self._work[high]
        used = (of_third > 0) + (of_high > 0).astype(int) + (of_low > 0)
        cost = np.where(room >= 0, work + self._tie * used, np.inf)
        best = int(np.argmin(cost))
        counts = np.zeros(len(self._bytes), int)
        for variant, count in ((low, of_low), (high, of_high), (third, of_third)):
            counts[variant[best]] += count[best]
        return self._points[rows[best]], tuple(counts.tolist()), len(cost)


def _choices(group: Group) -> np.ndarray:
    """Returns each choice of three variants with those that are compiled, in order of bytes.

    Where there are fewer, the last one stands for the missing ones too.
    """
    others = [i for i in range(len(group.num_bytes)) if i not in group.compiled]
    free = min(group.max_variants - len(group.compiled), len(others))
    found = []
    for more in itertools.combinations(others, free):
        places = sorted({*group.compiled, *more})
        found.append(places + places[-1:] * (NUM_VARIANTS - len(places)))
    return np.array(found)
