"""The recompute policies and the budget that a user asks for."""

from __future__ import annotations

import numbers
from dataclasses import dataclass
from typing import Literal, TypeAlias, Union, get_args

from ..reuse.errors import PlanError
from ..reuse.ir.program import Call, RecomputeMark

PolicyName: TypeAlias = Literal["full", "selective"]
POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)
Costs: TypeAlias = Literal["estimated", "measured"]
COSTS: tuple[Costs, ...] = get_args(Costs)


@dataclass(frozen=True)
class Budget:
    """As little recomputed work as fits into so many bytes. Exactly one bound is given.

    The bound is kept by the linked program: what its memory holds at the peak (saved tensors,
    scratch, and in a training step the gradients) stays within it. Not in it is what PyTorch's
    math libraries take for themselves inside a single product, as oneDNN does in bfloat16: how much
    is up to the CPU.

    Attributes:
        saved_bytes: the most bytes that the program's memory may hold at its peak.
        fraction: the same bound, relative: 0 is the peak with ``recompute="full"``, also outside
            of blocks, and 1 is the peak without recompute.
        costs: what computing an operator again costs: ``"estimated"`` from its FLOPs and bytes, or
            ``"measured"`` by running it here.

    Raises:
        PlanError: not exactly one bound, or one that makes no sense.

    Example:
        >>> lazyinline.compile(model, recompute=lazyinline.Budget(saved_bytes=2 * 2**30))
    """

    saved_bytes: int | None = None
    fraction: float | None = None
    costs: Costs = "estimated"

    def __post_init__(self) -> None:
        given = [v for v in (self.saved_bytes, self.fraction) if v is not None]
        if len(given) != 1:
            raise PlanError("A Budget has one bound: give saved_bytes= or fraction=.")
        number = isinstance(given[0], numbers.Real) and not isinstance(given[0], bool)
        if not number or not given[0] >= 0:
            raise PlanError(f"Budget({given[0]!r}): give a number that is not negative.")
        if self.fraction is not None and self.fraction > 1:
            raise PlanError(f"Budget(fraction={self.fraction}): give a number from 0 to 1.")
        if self.costs not in COSTS:
            raise PlanError(f"Budget(costs={self.costs!r}) is unknown; there are {COSTS}.")


Policy = Union[PolicyName, Budget, None]  # noqa: UP007


def check_policy(policy: object) -> Policy:
    """Returns a policy if it is one.

    Raises:
        PlanError: if there is not.
    """
    if policy is None or isinstance(policy, Budget):
        return policy
    if isinstance(policy, str) and policy in POLICIES:
        return policy
    raise PlanError(
        f"recompute={policy!r} is unknown; give None, {', '.join(map(repr, POLICIES))}, "
        "Budget(saved_bytes=...) or Budget(fraction=...)."
    )


def policy_of(call: Call, policy: RecomputeMark) -> RecomputeMark:
    """Returns the policy of a call: its own mark, or the given one if it is a block's call."""
    return call.recompute or (policy if call.path else "")
