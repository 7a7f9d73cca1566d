"""Finds the plan of a step over a mesh: a layout for every tensor, without the user's help.

``choices`` lists what can be chosen, ``problem`` chooses by a linear program, and here the solution
becomes a plan, and a text about it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch.fx

from ...autodiff.training_program import StepProgram
from ...reuse.errors import PlanError
from ...reuse.ir.costs import Rates, is_heavy
from ...reuse.ir.printer import bytes_text, seconds_text
from ...reuse.ir.program import RecomputeMark, outputs_of
from .choices import Choices, Edge, Group, Item
from .folding import Port, folded_step
from .layouts import LINKS, Axis, Layouts, Links, Moves, Step, links_from, text
from .plan import LeafPlan, MeshPlan, NodeLayouts, Placements
from .problem import OverMemoryError, Problem, Solution, layouts_at, moves_s, sharing
from .torch_sharding_rules import layout_of, placements

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement


@dataclass(frozen=True)
class Taken:
    """A solution of the linear program, as layouts of operators and of slots."""

    choices: Choices
    moves: Moves
    solution: Solution

    def ways(
        self, item: Item, option: int | None = None
    ) -> tuple[tuple[Layouts | None, ...], tuple[Layouts, ...]]:
        """Returns the layouts of an item's operands and results, by default as chosen."""
        group = item.group
        option = self.solution.options[group] if option is None else option
        ways = group.ways(option)[group.items.index(item)]
        inputs = zip(*(way.inputs for way in ways), strict=True)
        outputs = tuple(zip(*(way.outputs for way in ways), strict=True))
        return tuple(None if None in one else one for one in inputs), outputs  # type: ignore[return-value]

    def slot(self, number: int) -> Layouts:
        """Returns the layout of a slot."""
        return self.ways(self.choices.slots[number])[1][0]

    def parameters(self) -> dict[str, Placements]:
        """Returns the layout of each parameter."""
        slots = enumerate(self.choices.folded.slots)
        return {name: self._placements(self.slot(i)) for i, slot in slots for name in slot.names}

    def batch(self, step: StepProgram) -> tuple[Placements, ...]:
        """Returns the layout of each user input."""
        by_input = {i: n for n, slot in enumerate(self.choices.folded.slots) for i in slot.inputs}
        inputs = [user for micro_batch in step.batch for user in micro_batch]
        layouts = {user: self.slot(by_input[i]) for i, user in enumerate(inputs)}
        return tuple(self._placements(layouts[user]) for user in sorted(layouts))

    def leaf_plan(self, number: int) -> LeafPlan:
        """Returns the plan of a leaf."""
        folded = self.choices.folded
        nodes: dict[torch.fx.Node, NodeLayouts] = {}
        for node, item in self.choices.items_of(number).items():
            inputs, outputs = self.ways(item)
            nodes[node] = NodeLayouts(
                tuple(None if one is None else self._asked(one) for one in inputs),
                tuple(map(self._placements, outputs)),
            )
        leaf, _ = folded.leaves[number]

        def at(port: Port) -> Placements | None:
            slot = folded.slot_of.get(port)
            return None if slot is None else self._placements(self.slot(slot))

        return LeafPlan(
            tuple(at(Port(number, False, i)) for i in range(len(leaf.entries))),
            tuple(at(Port(number, True, i)) for i in range(len(outputs_of(leaf.module)))),
            nodes,
        )

    def _asked(self, layouts: Layouts) -> Placements | None:
        """Returns placements to redistribute to; None for partial ones, which rules make."""
        return None if any(one.is_partial for one in layouts) else self._placements(layouts)

    def _placements(self, layouts: Layouts) -> Placements:
        return placements(layouts, self.moves.sizes)

    def moved(self, edge: Edge) -> list[Step]:
        """Returns the steps that redistribute an edge's tensor."""
        before, after = layouts_at(edge, self.solution.options)
        return [] if before == after else self.moves.steps(before, after, edge.num_bytes)

    def collectives(self) -> list[tuple[str, Step, int]]:
        """Returns the collectives of a step, each with the name of its leaf and its count.

        A collective whose result several operators read is listed once.
        """
        found = []
        for edges in sharing(self.choices.edges):
            by_layout = {layouts_at(edge, self.solution.options): edge for edge in edges}
            for edge in by_layout.values():
                leaf, _ = self.choices.folded.leaves[max(edge.source.leaf, edge.target.leaf)]
                steps = (step for step in self.moved(edge) if step.is_collective)
                found += [(leaf.name, step, edge.count) for step in steps]
        return found

    def more_s(self, group: Group, option: int) -> float:
        """Returns the seconds that another option of a group adds, if all other groups stay."""
        before = self.solution.options
        near = [e for e in self.choices.edges if group in (e.source.group, e.target.group)]
        own = float(group.seconds[option] - group.seconds[before[group]])
        after = {**before, group: option}
        return own + moves_s(near, self.moves, after) - moves_s(near, self.moves, before)


# ---- as text ----------------------------------------------------------------------------------


_CERTAIN = 1e-3
_HEAD = ("operator", "operands -> results", "moved before", "next best")


def format_plan(taken: Taken, axes: Sequence[Axis]) -> str:
    """Returns a table for each leaf: its matrix products, and operators that wait for collectives.

    A layout has a word for each axis: ``R`` is replicated, ``S0`` sharded along dimension 0,
    ``S0/3`` sharded in each third of it, ``P`` partial.
    """
    mesh = " x ".join(f"{axis.name} {axis.size}" for axis in axes)
    solution, folded = taken.solution, taken.choices.folded
    lines = [
        f"mesh {mesh}: {seconds_text(solution.seconds)} a step, "
        f"{bytes_text(solution.held_bytes)} held on a rank"
    ]
    if solution.bound_s < (1 - _CERTAIN) * solution.seconds:
        lines.append(f"no plan with equal layers takes less than {seconds_text(solution.bound_s)}")
    if taken.choices.unknown:
        lines.append(f"whole on each rank, without a rule: {', '.join(taken.choices.unknown)}")
    for number, (leaf, count) in enumerate(folded.leaves):
        items = taken.choices.items_of(number).values()
        rows = [row for item in items if (row := _row(taken, item, axes))]
        if rows:
            lines += ["", f"@{leaf.name}, {count} calls", *_aligned([_HEAD, *rows])]
    return "\n".join(lines)


def _row(taken: Taken, item: Item, axes: Sequence[Axis]) -> tuple[str, ...] | None:
    assert item.node is not None
    into = [e for e in taken.choices.edges if e.target is item]
    steps = [step for edge in into for step in taken.moved(edge) if step.is_collective]
    # Elementwise operators without collectives are left out: they have their operands' layout.
    if not steps and not is_heavy(item.node):
        return None
    moves = " + ".join(
        f"{one.kind} over {axes[one.axis].name} {bytes_text(one.num_bytes)}" for one in steps
    )
    name = f"{item.node.name} {tuple(item.outputs[0].shape)}"
    return name, _layouts(taken, item), moves, _next_best(taken, item)


def _next_best(taken: Taken, item: Item) -> str:
    """Returns the cheapest other option of an item, if other groups stay, and why it costs more."""
    group = item.group
    chosen = taken.solution.options[group]
    others = [i for i in range(len(group)) if i != chosen]
    if not others:
        return "no other"
    more = [taken.more_s(group, i) for i in others]
    best = int(np.argmin(more))
    own = float(group.seconds[others[best]] - group.seconds[chosen])
    # It costs more time to compute in another layout, or to redistribute to it and from it.
    reason = "computing" if own > 0 else "moving"
    found = _layouts(taken, item, others[best])
    if not np.isfinite(more[best]):
        return f"{found}: cannot be reached"
    return f"{found}: {seconds_text(more[best])} more, by {reason}"


def _layouts(taken: Taken, item: Item, option: int | None = None) -> str:
    inputs, outputs = taken.ways(item, option)
    given = " ".join(text(one) for one in inputs if one is not None)
    return f"{given} -> {' '.join(map(text, outputs))}"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  " + "  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in rows
    ]


# ---- Finding a plan ------------------------------------------------------------------------------


RANKS_OF_A_HOST = 8
STATES_PER_PARAMETER = 4
"""Tensors per parameter that a rank holds: the parameter, its gradient, two of the optimizer."""


@dataclass(frozen=True)
class FoundPlan:
    """A plan that was found, and the solution that it is from.

    Its seconds of a step are those that the linear program predicts, or that the caller of
    :func:`cheapest_plan` judges.
    """

    plan: MeshPlan
    seconds: float
    taken: Taken


def axes_of_mesh(
    names: Sequence[str], sizes: Sequence[int], device: str, links: Links | None = None
) -> tuple[Axis, ...]:
    """Returns the axes of a mesh with their rates, as measured or by the table ``LINKS``."""
    measured = {} if links is None else links_from(links, names, sizes)
    # Ranks are numbered along the innermost dimension first, and those of a host one after another:
    # so the inner axes are within a host.
    axes, within = list[Axis](), 1
    for name, size in reversed(list(zip(names, sizes, strict=True))):
        within *= size
        row = "h100-nvlink" if within <= RANKS_OF_A_HOST else "h100-network"
        of_row = LINKS[row if device == "cuda" else "cpu-gloo"]
        axes.append(Axis(name, size, measured.get(name, of_row)))
    return tuple(reversed(axes))


def find_plan(
    step: StepProgram,  # decomposed, of global shapes; its tensors may be on the meta device
    axes: Sequence[Axis],
    rates: Rates,  # of a rank's device
    *,
    # The most bytes of parameters, gradients, optimizer state and tensors saved for backward; other
    # tensors within one closure are not counted.
    memory_bytes_per_rank: int | None = None,
    # By name, for parameters that the user fixed: the position of an axis, and the placement.
    pinned: Mapping[str, tuple[int, Placement]] | None = None,
) -> FoundPlan:
    """Finds the plan that takes the least time by the costs of a device and of a mesh.

    Each different closure is planned once, forward and backward together, so equal layers get one
    plan, and their number does not matter.

    Raises:
        PlanError: if no plan fits memory, or equal layers are pinned in different ways.
    """
    folded = folded_step(step)
    moves = Moves(axes)
    pins = {name: (axis, layout_of(one)) for name, (axis, one) in (pinned or {}).items()}
    choices = Choices(folded, axes, rates, pins)
    memory = _memory(choices, moves)
    solution = Problem(choices, moves, memory, memory_bytes_per_rank).solve()
    taken = Taken(choices, moves, solution)
    plan = MeshPlan(
        tuple((axis.name, axis.size) for axis in axes),
        taken.parameters(),
        taken.batch(step),
        leaves={leaf: taken.leaf_plan(i) for i, (leaf, _) in enumerate(folded.leaves)},
        table=format_plan(taken, axes),
        moved_bytes=sum(step.num_bytes * count for _, step, count in taken.collectives()),
        held_bytes=solution.held_bytes,
    )
    return FoundPlan(plan, solution.seconds, taken)


def cheapest_plan(
    found: Callable[[RecomputeMark], FoundPlan], policies: Sequence[RecomputeMark]
) -> FoundPlan:
    """Returns the plan that takes the least time, with recompute by one of the policies or without.

    If more memory would not make the plan without recompute faster, no policy is tried. If no plan
    fits memory, raises the error of the policy that needs least.
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
        if not policy and not one.taken.solution.is_scarce:
            return one
        cost, held = seconds_text(one.seconds), bytes_text(one.plan.held_bytes)
        lines.append(f"recompute {policy or 'none'}: {cost} a step, {held} held on a rank")
    if not plans:
        raise min(refused, key=attrgetter("least_bytes"))
    best = min(plans, key=lambda policy: plans[policy].seconds)
    plan = plans[best].plan
    table = "\n".join([*lines, f"of these the fastest is recompute {best or 'none'}", plan.table])
    return replace(plans[best], plan=replace(plan, recompute=best, table=table))


def _memory(choices: Choices, moves: Moves) -> dict[Group, Any]:
    """Returns the bytes that a rank holds of each group's slot, in each option."""
    found = {}
    for item in choices.slots:
        slot = item.slot
        assert slot is not None
        times = {"parameter": STATES_PER_PARAMETER * slot.held, "saved": slot.held}
        if num_bytes := times.get(slot.kind, 0) * slot.type.num_bytes:
            layouts = item.group.layouts(item, 0, is_output=True)
            found[item.group] = np.array([num_bytes * moves.share(one) for one in layouts])
    return found
