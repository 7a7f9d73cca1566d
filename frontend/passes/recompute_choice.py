"""Chooses per call what is saved for the backward, and notes it in the report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from ...autodiff.derivative import Differentiator
from ...autodiff.leaf_derivative import Choice, Request
from ...autodiff.traces.torch_make_fx import SizesAt
from ...recompute.fit_budget import BudgetFit, ProgramPeaks
from ...recompute.planner import Budget, Planner, Policy, policy_of, summarize
from ...reuse.errors import PlanError
from ...reuse.ir.operators import OperatorCosts
from ...reuse.ir.program import Composite, Leaf, RecomputeMark
from ...reuse.ir.torch_symbols import Values
from ..report import CompileReport


@dataclass(frozen=True, eq=False)
class Recompute:
    """Chooses what is saved, for all programs of one compiler, by its recompute policy."""

    _make: Differentiator
    _policy: Policy
    _costs: OperatorCosts
    _sizes: SizesAt = field(default_factory=SizesAt)

    @cached_property
    def _planner(self) -> Planner:
        return Planner(self._make, self._costs, self._sizes)

    def at(self, values: Values) -> Recompute:
        """Returns the same policy, which measures symbolic sizes at these numbers."""
        return replace(self, _sizes=SizesAt(values))

    def chosen(self, request: Request, peaks: ProgramPeaks, policy: Policy = None) -> Request:
        """Returns the request with the choice that the policy and the program's marks demand.

        ``policy`` replaces the compiler's own. It raises PlanError if a budget cannot be met, or a
        policy finds no block.
        """
        closure = request.closure
        assert isinstance(closure, Composite)
        policy = policy or self._policy
        # Without recompute, what is saved is what autograd would save.
        if policy is None and not has_marks(closure):
            return request
        return replace(request, choice=self._choice(request, peaks, policy))

    def note(self, requests: Sequence[Request], report: CompileReport) -> None:
        """Notes in a report what is saved under requests, and what is recomputed."""
        found = (summarize(self._make, request, self._sizes) for request in requests)
        report.recompute = [record for records in found for record in records]
        report.recomputed_flops = sum(r.num_calls * r.recomputed_flops for r in report.recompute)
        derivatives = [self._make.of(request) for request in requests]
        types = [d.saved_type for d in derivatives if d is not None]
        report.saved_bytes = sum(map(self._sizes.num_bytes, types))

    def trade_offs(self, request: Request) -> list[tuple[int, float]]:
        """Returns the bytes that one call can save under the policy, and seconds of recompute."""
        if self._policy == "selective":
            derivative = self._make.of(replace(request, choice=self._planner.selective(request)))
            assert derivative is not None
            return [(derivative.saved_type.num_bytes, 0.0)]
        variants = self._planner.frontier(request)
        # Variants are sorted by bytes; the first is full recompute.
        return [(v.num_bytes, v.extra_s) for v in variants[: 1 if self._policy == "full" else None]]

    def frontiers(self, request: Request) -> list[dict[str, Any]]:
        """Returns the Pareto frontier of each block: bytes saved by one call against recompute.

        Points are sorted by bytes, fewest first.
        """
        # Calls with equal requests share one frontier.
        counts = Counter(
            site.request
            for site in self._planner.sites(request)
            if site.call.path and isinstance(site.request.closure, Leaf)
        )
        found = []
        for asked, number in counts.items():
            points = [
                {"saved_bytes": v.num_bytes, "extra_s": v.extra_s, "extra_flops": v.extra_flops}
                for v in self._planner.frontier(asked)
            ]
            found.append({"closure": asked.closure.name, "num_calls": number, "points": points})
        return found

    def _choice(self, request: Request, peaks: ProgramPeaks, policy: Policy) -> Choice | None:
        if isinstance(policy, Budget):
            return BudgetFit(self._planner, request, peaks).fit(policy)
        assert isinstance(request.closure, Composite)
        if policy and not _has_policies(request.closure, policy):
            raise PlanError(
                f"recompute={policy!r} is decided for each block, and the model has none. Mark its "
                "layer class with lazy_inline, or a module with lazyinline.recompute."
            )
        return self._planner.choice(request, policy or "")


def has_marks(closure: Composite) -> bool:
    """Whether any call in a program is marked for recompute."""
    return _has_policies(closure, "")


def _has_policies(closure: Composite, policy: RecomputeMark) -> bool:
    """Whether a call, at any depth, has a recompute policy; visits each closure once."""
    todo, seen = [closure], {closure}
    while todo:
        for call in todo.pop().program.calls:
            if policy_of(call, policy):
                return True
            if isinstance(call.closure, Composite) and call.closure not in seen:
                seen.add(call.closure)
                todo.append(call.closure)
    return False
