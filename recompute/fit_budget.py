"""Fits a program into a budget: the cheapest recompute whose *linked* peak stays within it.

The bytes that a choice saves are known exactly. What else is in memory at the peak (scratch,
gradients, the tensors of the block that is being recomputed) is known only after link, which needs
compiled kernels. So the peak is estimated without kernels, the best choice by that estimate is
linked, and the linked peak corrects the estimate. Only a few variants may be compiled.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from ..autodiff.leaf_derivative import Choice, PerCall, Request
from ..reuse.errors import PlanError
from ..reuse.ir.program import Composite
from .planner import Budget, Planner, Site, Variant, policy_of
from .solver import Group, spread

MAX_VARIANTS = 3
_MAX_ROUNDS = 6
_MAX_GUESSES = 6
_CLOSE_ENOUGH = 0.01  # of the budget left unused
_ALLOWANCE = 0.04  # of the budget, by which the first guess may be too low


@dataclass(frozen=True)
class ProgramPeaks:
    """Two functions from a requested derivative to the bytes that the program holds at its peak."""

    linked: Callable[[Request], int]  # compiles and links the program
    # Links it without kernels; exact except for scratch inside closures.
    guessed: Callable[[Request], int]


@dataclass
class _SameCalls:
    """Calls of one closure with equal requests, and their variants."""

    sites: list[Site]
    variants: tuple[Variant, ...]  # fewest bytes first
    compiled: frozenset[int] = frozenset()
    num_others: int = 0  # variants compiled that are not among these

    def group(self, max_variants: int, allowed: frozenset[int]) -> Group:
        """Returns the allowed variants as a group of the knapsack problem."""
        places = sorted(allowed | self.compiled)
        return Group(
            len(self.sites),
            tuple(self.variants[i].num_bytes for i in places),
            tuple(self.variants[i].extra_s for i in places),
            frozenset(places.index(i) for i in self.compiled),
            max(max_variants - self.num_others, len(self.compiled), 1),
        )

    def full(self, counts: Sequence[int], allowed: frozenset[int]) -> tuple[int, ...]:
        """Returns counts for all variants, from the counts of those in the group."""
        by_variant = dict(zip(sorted(allowed | self.compiled), counts, strict=True))
        return tuple(by_variant.get(i, 0) for i in range(len(self.variants)))


Counts = list[tuple[int, ...]]


class BudgetFit:
    """Searches for the choice that fits a budget, for a program: a composite closure."""

    def __init__(self, planner: Planner, request: Request, peaks: ProgramPeaks) -> None:
        assert isinstance(request.closure, Composite)
        self._num_calls = len(request.closure.program.calls)
        self._request, self._peaks = request, peaks
        self._peaks_linked: dict[tuple[tuple[int, ...], ...], int] = {}
        self._fixed: dict[int, Choice | None] = {}
        groups: dict[Request, list[Site]] = {}
        marked = planner.choice(request, "")
        marks = marked.choices if isinstance(marked, PerCall) else (None,) * self._num_calls
        for site in planner.sites(request):
            if policy_of(site.call, "") or marks[site.index] is not None:
                self._fixed[site.index] = marks[site.index]
            else:
                groups.setdefault(site.request, []).append(site)
        inside = planner.inside(request)
        self._same = [
            _SameCalls(sites, planner.few(r) if r in inside else planner.frontier(r))
            for r, sites in groups.items()
        ]

    def fit(self, budget: Budget) -> Choice | None:
        """Returns the choice with the least work within a budget; PlanError if there is none."""
        smallest, plain = self._all_at(0), self._asked(None)
        if budget.fraction is not None:
            peak, plain_peak = self._linked(smallest), self._peaks.linked(plain)
            self._keep_plain()
            limit = peak + int(budget.fraction * max(plain_peak - peak, 0))
        else:
            assert budget.saved_bytes is not None
            limit = int(budget.saved_bytes)
            plain_peak = limit + 1
            # Linking compiles kernels, so it is skipped if the guess says that it cannot fit.
            if self._peaks.guessed(plain) <= limit:
                plain_peak = self._peaks.linked(plain)
                self._keep_plain()
        if plain_peak <= limit:
            return plain.choice
        best = self._search(limit)
        if best is None:
            raise self._refusal(limit)
        return self._choice(best)

    def _keep_plain(self) -> None:
        """Counts the variants without recompute among the compiled ones."""
        for same in self._same:
            found = [i for i, v in enumerate(same.variants) if v.choice is None]
            same.compiled |= frozenset(found)
            same.num_others += not found

    def _search(self, limit: int) -> Counts | None:
        """Links the best choice by guess, corrects the guess by the linked peak, and repeats.

        Returns the choice with the least work among those linked within the limit; None without
        any.
        """
        best = self._best_linked(limit)
        allowed = [frozenset(range(len(s.variants))) for s in self._same]
        correction = int(_ALLOWANCE * limit)
        # At most three variants are compiled: the first round leaves one for a corrected guess.
        one_for_later = not any(s.compiled for s in self._same)
        for _ in range(_MAX_ROUNDS):
            counts = self._guess(limit - correction, MAX_VARIANTS - one_for_later, allowed)
            one_for_later = False
            if best is None and (counts is None or self._was_linked(counts)):
                counts = self._lowest
            if counts is None or self._was_linked(counts):
                break
            peak = self._linked(counts)
            best = self._best_linked(limit)
            if best is None:  # from now on compile only variants that are sure to help
                allowed = [frozenset(i for i, n in enumerate(c) if n) for c in self._lowest]
            if 0 <= limit - peak <= _CLOSE_ENOUGH * limit:
                break
            correction = peak - self._peaks.guessed(self._asked(counts))
        for last in (self._lowest, self._all_at(0)) if best is None else ():
            if not self._was_linked(last):
                self._linked(last)
        return best or self._best_linked(limit)

    def _was_linked(self, counts: Counts) -> bool:
        return tuple(counts) in self._peaks_linked

    def _best_linked(self, limit: int) -> Counts | None:
        """Returns the counts with the least work among those linked within a limit."""
        fitting = [list(c) for c, peak in self._peaks_linked.items() if peak <= limit]
        return min(
            fitting, key=lambda c: sum(n * v.extra_s for n, v in self._taken(c)), default=None
        )

    @functools.cached_property
    def _lowest(self) -> Counts:
        """Returns the counts, with one variant for all calls, whose guessed peak is lowest."""
        # Not always the variant that saves least: recompute needs memory, too.
        places = range(max((len(s.variants) for s in self._same), default=1))
        return min(map(self._all_at, places), key=lambda c: self._peaks.guessed(self._asked(c)))

    def _guess(
        self, limit: int, max_variants: int, allowed: Sequence[frozenset[int]]
    ) -> Counts | None:
        """Returns the counts with the least work whose guessed peak is within a limit, or None."""
        groups = [s.group(max_variants, a) for s, a in zip(self._same, allowed, strict=True)]
        best: Counts | None = None
        least = sum(g.num_calls * g.num_bytes[0] for g in groups)
        most = sum(g.num_calls * g.num_bytes[-1] for g in groups)
        target, low, high = most, least, most + 1
        for trial in range(_MAX_GUESSES):
            found = spread(groups, target)
            if found is None:
                low = target + 1
            else:
                pairs = zip(self._same, found, allowed, strict=True)
                counts = [s.full(c, a) for s, c, a in pairs]
                room = limit - self._peaks.guessed(self._asked(counts))
                if room >= 0:
                    best, low = counts, target
                    if room <= _CLOSE_ENOUGH * limit or target >= most:
                        break
                else:
                    high = min(target, self._saved(counts))
                target += room
            # A saved byte may add more or less than one to the peak: after two trials, bisect.
            if trial > 0 or not low < target < high:
                target = (low + high) // 2
            if high - low <= 1:
                break
        return best

    def _linked(self, counts: Counts) -> int:
        """Links a choice, whose variants then count as compiled; returns the peak."""
        for same, numbers in zip(self._same, counts, strict=True):
            same.compiled |= {i for i, n in enumerate(numbers) if n}
        peak = self._peaks.linked(self._asked(counts))
        self._peaks_linked[tuple(counts)] = peak
        return peak

    def _taken(self, counts: Counts) -> Iterator[tuple[int, Variant]]:
        """Yields how many calls take each variant."""
        for same, numbers in zip(self._same, counts, strict=True):
            yield from zip(numbers, same.variants, strict=True)

    def _all_at(self, variant: int) -> Counts:
        """Returns counts where all calls take one variant of their closure's frontier."""
        return [
            tuple(
                len(s.sites) if i == min(variant, len(s.variants) - 1) else 0
                for i in range(len(s.variants))
            )
            for s in self._same
        ]

    def _saved(self, counts: Counts) -> int:
        return sum(n * variant.num_bytes for n, variant in self._taken(counts))

    def _asked(self, counts: Counts | None) -> Request:
        """Returns the request for the derivative of a choice."""
        return replace(self._request, choice=self._choice(counts))

    def _choice(self, counts: Counts | None) -> Choice | None:
        """Returns the choice in which as many calls take each variant."""
        choices: list[Choice | None] = [None] * self._num_calls
        for index, choice in self._fixed.items():
            choices[index] = choice
        for same, numbers in zip(self._same, counts or (), strict=bool(counts)):
            # The first calls save least: their backwards run last, when most memory is free for
            # their recompute.
            order = [v for v, n in zip(same.variants, numbers, strict=True) for _ in range(n)]
            for site, variant in zip(same.sites, order, strict=True):
                choices[site.index] = variant.choice
        return PerCall(tuple(choices)) if any(c is not None for c in choices) else None

    def _refusal(self, limit: int) -> PlanError:
        # Any search links these two before it gives up, so a budget of this size can be met.
        smallest = min(self._peaks_linked[tuple(c)] for c in (self._lowest, self._all_at(0)))
        overhead = max(smallest - self._saved(self._lowest), 0)
        return PlanError(
            f"Budget(saved_bytes={limit}) cannot be met: the smallest peak that recompute reaches "
            f"is {smallest} bytes. A budget bounds the peak of the linked program; {overhead} "
            "bytes of it are not saved tensors but scratch, gradients and what is being computed "
            f"again. Give at least {smallest}, split the batch into more micro-batches, or mark "
            "smaller blocks."
        )
