"""Fits a program into a budget: the cheapest recompute whose *linked* peak stays within it.

How many bytes a choice saves is known exactly; what else is in memory at the peak (scratch,
gradients, the tensors of the block that is being computed again) only link knows. So a choice is
made, linked, and corrected by what link reports, within the few variants compiled so far.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..autodiff.choices import Choice, PerCall
from ..autodiff.derivative import Request
from ..reuse.errors import PlanError
from ..reuse.program import Composite
from .planner import Planner, Site, Variant, wish_of
from .policy import Budget
from .solver import Group, spread

MAX_VARIANTS = 3
_MAX_ROUNDS = 8
_CLOSE_ENOUGH = 0.01  # of the budget left unused

PeakOf = Callable[[Choice | None], int]


@dataclass
class _SameCalls:
    """Calls of one closure that ask for the same derivative, and their variants."""

    sites: list[Site]
    variants: tuple[Variant, ...]  # fewest bytes first
    compiled: frozenset[int]
    num_others: int = 0  # variants compiled that are not among these

    def group(self, allowed: frozenset[int]) -> Group:
        """The knapsack's view; variants that are not allowed take too many bytes."""
        return Group(
            len(self.sites),
            tuple(v.num_bytes for i, v in enumerate(self.variants) if i in allowed),
            tuple(v.extra_s for i, v in enumerate(self.variants) if i in allowed),
            frozenset(sorted(allowed).index(i) for i in self.compiled if i in allowed),
            MAX_VARIANTS - self.num_others,
        )

    def settled(self, counts: Sequence[int]) -> frozenset[int]:
        """The variants that may be compiled once these counts were linked."""
        used = {i for i, n in enumerate(counts) if n} | self.compiled
        following = range(max(used) + 1, len(self.variants))
        return frozenset([*used, *following][: MAX_VARIANTS - self.num_others])


Counts = list[tuple[int, ...]]


class BudgetFit:
    """Looks for the choice that fits.

    Args:
        planner: finds the variants.
        request: for the program, a composite closure.
        peak_of: links the program with a choice and returns its peak in bytes.
    """

    def __init__(self, planner: Planner, request: Request, peak_of: PeakOf) -> None:
        assert isinstance(request.closure, Composite)
        self._num_calls = len(request.closure.program.calls)
        self._peak_of = peak_of
        self._fixed: dict[int, Choice | None] = {}
        groups: dict[Request, list[Site]] = {}
        marked = planner.choice(request, "")
        marks = marked.choices if isinstance(marked, PerCall) else (None,) * self._num_calls
        for site in planner.sites(request):
            if wish_of(site.call, "") or marks[site.index] is not None:
                self._fixed[site.index] = marks[site.index]
            else:
                groups.setdefault(site.request, []).append(site)
        self._same = [
            _SameCalls(sites, planner.frontier(r), frozenset([0])) for r, sites in groups.items()
        ]
        self._plain_bytes = sum(
            len(s.sites) * planner.as_it_is(s.sites[0].request).num_bytes for s in self._same
        )

    def fit(self, budget: Budget) -> Choice | None:
        """Returns the choice with the least recomputed work within a budget.

        Raises:
            PlanError: if no choice fits; names the smallest peak that was reached.
        """
        smallest = self._all_at(0)
        peak, saved = self._peak_of(self._choice(smallest)), self._saved(smallest)
        overhead, plain = peak - saved, self._choice(None)
        if budget.fraction is not None:
            plain_peak = self._peak_of(plain)
            self._keep_plain()
            limit = peak + int(budget.fraction * max(plain_peak - peak, 0))
        else:
            assert budget.saved_bytes is not None
            limit = int(budget.saved_bytes)
            fits = self._plain_bytes + overhead <= limit
            plain_peak = self._peak_of(plain) if fits or peak > limit else limit + 1
        if plain_peak <= limit:
            return plain
        if peak > limit:
            return self._smallest_peak(limit, min(peak, plain_peak), overhead)
        return self._choice(self._search(limit, limit - overhead, smallest))

    def _smallest_peak(self, limit: int, reached: int, overhead: int) -> Choice | None:
        """Tries to save a little: what is computed again is in memory too, and may be more.

        Raises:
            PlanError: if no choice fits; names the smallest peak that was reached.
        """
        for variant in range(1, MAX_VARIANTS):
            choice = self._choice(self._all_at(variant))
            peak = self._peak_of(choice)
            if peak <= limit:
                return choice
            if peak > reached:
                break
            reached = peak
        raise _refusal(limit, reached, overhead)

    def _keep_plain(self) -> None:
        """Counts the variants without recompute among the compiled ones."""
        for same in self._same:
            plain = [i for i, v in enumerate(same.variants) if v.choice is None]
            same.compiled |= frozenset(plain)
            same.num_others += not plain

    def _search(self, limit: int, target: int, smallest: Counts) -> Counts:
        """Corrects the bytes that may be saved until the linked peak is close below the limit."""
        best, low, high = smallest, self._saved(smallest), None
        allowed = [frozenset(range(len(s.variants))) for s in self._same]
        tried: set[tuple[tuple[int, ...], ...]] = {tuple(smallest)}
        for _ in range(_MAX_ROUNDS):
            counts = self._solve(max(target, low), allowed)
            if tuple(counts) in tried:
                break
            tried.add(tuple(counts))
            if len(tried) == 2:  # from now on nothing but these is compiled
                allowed = [s.settled(c) for s, c in zip(self._same, counts, strict=True)]
            peak = self._peak_of(self._choice(counts))
            if peak <= limit:
                best, low = counts, max(low, target)
                if limit - peak <= _CLOSE_ENOUGH * limit:
                    break
                target += limit - peak
            else:
                high = target
                target -= peak - limit
            if high is not None and not low < target < high:
                target = (low + high) // 2
        return best

    def _solve(self, target: int, allowed: Sequence[frozenset[int]]) -> Counts:
        groups = [s.group(a) for s, a in zip(self._same, allowed, strict=True)]
        found = spread(groups, target)
        if found is None:
            return self._all_at(0)
        full: Counts = []
        for same, places, counts in zip(self._same, allowed, found, strict=True):
            by_variant = dict(zip(sorted(places), counts, strict=True))
            full.append(tuple(by_variant.get(i, 0) for i in range(len(same.variants))))
        return full

    def _all_at(self, variant: int) -> Counts:
        """All calls at one place of their closure's frontier."""
        return [
            tuple(
                len(s.sites) if i == min(variant, len(s.variants) - 1) else 0
                for i in range(len(s.variants))
            )
            for s in self._same
        ]

    def _saved(self, counts: Counts) -> int:
        return sum(
            n * v.num_bytes
            for same, numbers in zip(self._same, counts, strict=True)
            for n, v in zip(numbers, same.variants, strict=True)
        )

    def _choice(self, counts: Counts | None) -> Choice | None:
        """Gives variants to calls. The first calls save least.

        Their backwards run last, when most of memory is free for what they compute again.
        """
        choices: list[Choice | None] = [None] * self._num_calls
        for index, choice in self._fixed.items():
            choices[index] = choice
        for same, numbers in zip(self._same, counts or (), strict=bool(counts)):
            order = [v for v, n in zip(same.variants, numbers, strict=True) for _ in range(n)]
            for site, variant in zip(same.sites, order, strict=True):
                choices[site.index] = variant.choice
        return PerCall(tuple(choices)) if any(c is not None for c in choices) else None


def _refusal(limit: int, smallest: int, overhead: int) -> PlanError:
    return PlanError(
        f"Budget(saved_bytes={limit}) cannot be met: the smallest peak that recompute reaches is "
        f"{smallest} bytes. A budget bounds the peak of the linked program; {overhead} bytes of it "
        "are not saved tensors but scratch, gradients and what is being computed again. Give at "
        f"least {smallest}, split the batch into more micro-batches, or mark smaller blocks."
    )
