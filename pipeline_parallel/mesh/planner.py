"""Finds the plan of a step over a mesh: a layout for every tensor, without a mark of the user's."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from ...autodiff.training_program import StepProgram
from ...reuse.errors import PlanError
from ...reuse.ir.costs import Rates
from ...reuse.ir.printer import bytes_text, seconds_text
from ...reuse.ir.program import RecomputeMark
from .choices import Choices, Group
from .folding import folded_step
from .layouts import LINKS, Axis, Layouts, Moves
from .links import Links, links_from
from .plan import MeshPlan
from .problem import OverMemoryError, Problem
from .taken import PlannedCollective, Taken, format_plan
from .torch_sharding_rules import layout_of

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement

RANKS_OF_A_HOST = 8
STATES_PER_PARAMETER = 4
"""Tensors of a parameter's size that a rank holds: itself, its gradient, two of the optimizer."""


@dataclass(frozen=True)
class FoundPlan:
    """A plan with what it costs. ``print(found)`` shows it operator by operator.

    Attributes:
        plan: the layouts.
        seconds: of a step, by the costs that it was chosen by.
        bound_s: less than which no plan with equal layers takes by these costs.
        collectives: that a step runs.
        is_scarce: whether a plan that holds more would take less time.
        whole: operators without a rule, which every rank computes whole.
    """

    plan: MeshPlan
    seconds: float
    bound_s: float
    collectives: tuple[PlannedCollective, ...]
    is_scarce: bool
    whole: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.plan}\n\n{self.plan.table}"


def axes_of_mesh(
    names: Sequence[str], sizes: Sequence[int], device: str, links: Links | None = None
) -> tuple[Axis, ...]:
    """Returns the axes of a mesh with rates: as measured, or of rows.

    Rows tell axes within a host, the inner ones, from those between hosts.
    """
    measured = {} if links is None else links_from(links, names, sizes)
    # Ranks are numbered from the inner dimension outwards, and those of a host one after another.
    axes, within = list[Axis](), 1
    for name, size in reversed(list(zip(names, sizes, strict=True))):
        within *= size
        row = "h100-nvlink" if within <= RANKS_OF_A_HOST else "h100-network"
        of_row = LINKS[row if device == "cuda" else "cpu-gloo"]
        axes.append(Axis(name, size, measured.get(name, of_row)))
    return tuple(reversed(axes))


def find_plan(
    step: StepProgram,
    axes: Sequence[Axis],
    rates: Rates,
    *,
    memory_bytes_per_rank: int | None = None,
    pinned: Mapping[str, tuple[int, Placement]] | None = None,
) -> FoundPlan:
    """Finds the plan that takes the least time by the costs of a device and of a mesh.

    Every different closure is planned once, forward and backward together, so the number of layers
    does not matter. Layers of one closure get one plan.

    Args:
        step: after ``decompose``, of global shapes; its tensors may be on the meta device.
        axes: of the mesh.
        rates: of a rank's device.
        memory_bytes_per_rank: what parameters, gradients, optimizer state and what is saved for
            backward may take; activations within one closure are not counted.
        pinned: position of an axis, and the placement along it, of parameters by their names.

    Raises:
        PlanError: if nothing fits the memory, or equal layers are pinned in different ways.
    """
    folded = folded_step(step)
    moves = Moves(axes)
    pins = {name: (axis, layout_of(one)) for name, (axis, one) in (pinned or {}).items()}
    choices = Choices(folded, axes, rates, pins)
    memory = _memory(choices, axes)
    solution = Problem(choices, moves, memory, memory_bytes_per_rank).solve()
    taken = Taken(choices, moves, solution)
    plan = MeshPlan(
        tuple((axis.name, axis.size) for axis in axes),
        taken.parameters(),
        taken.batch(step),
        leaves=taken.leaf_plans(),
        table=format_plan(taken, axes),
        moved_bytes=sum(one.step.num_bytes * one.count for one in taken.collectives()),
        held_bytes=solution.held_bytes,
    )
    return FoundPlan(
        plan,
        solution.seconds,
        solution.bound_s,
        taken.collectives(),
        solution.is_scarce,
        tuple(choices.unknown),
    )


def cheapest_plan(
    found: Callable[[RecomputeMark], FoundPlan], policies: Sequence[RecomputeMark]
) -> FoundPlan:
    """Returns the plan that takes the least time, with recompute or without.

    Where memory is not scarce without, no other is looked at.

    Args:
        found: finds the plan of a step in which each block is recomputed by a policy; ``""`` is
            none.
        policies: that may be taken instead of none.

    Raises:
        OverMemoryError: if nothing fits; of what holds least.
    """
    plans: dict[RecomputeMark, FoundPlan] = {}
    lines, refused = list[str](), list[OverMemoryError]()
    for policy in ("", *policies):
        try:
            one = plans[policy] = found(policy)
        except PlanError as error:
            if isinstance(error, OverMemoryError):
                refused.append(error)
            elif not policy:
                raise
            lines.append(f"recompute {policy or 'none'}: {str(error).partition('. ')[0]}")
            continue
        if not policy and not one.is_scarce:
            return one
        cost, held = seconds_text(one.seconds), bytes_text(one.plan.held_bytes)
        lines.append(f"recompute {policy or 'none'}: {cost} a step, {held} held on a rank")
    if not plans:
        raise min(refused, key=attrgetter("least_bytes"))
    best = min(plans, key=lambda policy: plans[policy].seconds)
    plan = plans[best].plan
    table = "\n".join([*lines, f"of these the fastest is recompute {best or 'none'}", plan.table])
    return replace(plans[best], plan=replace(plan, recompute=best, table=table))


def _memory(choices: Choices, axes: Sequence[Axis]) -> dict[Group, Any]:
    """Returns the bytes that a rank holds of each slot, for each of its options."""
    found = {}
    for item in choices.slots:
        slot = item.slot
        assert slot is not None
        times = {"parameter": STATES_PER_PARAMETER * slot.held, "saved": slot.held}
        if num_bytes := times.get(slot.kind, 0) * slot.type.num_bytes:
            layouts = item.group.layouts(item, 0, is_output=True)
            found[item.group] = np.array([num_bytes * _share(one, axes) for one in layouts])
    return found


def _share(layouts: Layouts, axes: Sequence[Axis]) -> float:
    pairs = zip(axes, layouts, strict=True)
    return 1 / math.prod(axis.size for axis, one in pairs if one.is_split)
