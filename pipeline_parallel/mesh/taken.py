"""Answers by operator and by slot what was chosen; and gives the plan that shards a program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch.fx

from ...autodiff.training_program import StepProgram
from ...reuse.ir.program import Closure, outputs_of
from .choices import Choices, Edge, Group, Item
from .folding import Port
from .layouts import Layouts, Moves, Step
from .plan import LeafPlan, NodeLayouts, Placements
from .problem import Solution, layouts_at, move_s, sharing
from .torch_sharding_rules import placements


@dataclass(frozen=True)
class PlannedCollective:
    """Exchanges of a planned step, all of one place in a block.

    Attributes:
        block: the closure that it is in.
        tensor: what is brought to another layout.
        step: kind, axis and bytes of one of them.
        count: how many in a step.
    """

    block: str
    tensor: str
    step: Step
    count: int


@dataclass(frozen=True)
class Taken:
    """Answers by operator and by slot what was chosen.

    Attributes:
        choices: what there was to choose.
        moves: costs of bringing tensors to other layouts.
        solution: what was chosen.
    """

    choices: Choices
    moves: Moves
    solution: Solution

    def ways(
        self, item: Item, option: int | None = None
    ) -> tuple[tuple[Layouts | None, ...], tuple[Layouts, ...]]:
        """Returns the layouts of an item's operands and results: as chosen, or in an option."""
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
        """Returns how each parameter lies."""
        slots = enumerate(self.choices.folded.slots)
        return {name: self._placements(self.slot(i)) for i, slot in slots for name in slot.names}

    def batch(self, step: StepProgram) -> tuple[Placements, ...]:
        """Returns how each input of the user's is split."""
        by_input = {i: n for n, slot in enumerate(self.choices.folded.slots) for i in slot.inputs}
        inputs = [user for micro_batch in step.batch for user in micro_batch]
        lies = {user: self.slot(by_input[i]) for i, user in enumerate(inputs)}
        return tuple(self._placements(lies[user]) for user in sorted(lies))

    def leaf_plans(self) -> dict[Closure, LeafPlan]:
        """Returns the plan of the leaf of each role."""
        roles = enumerate(self.choices.folded.roles)
        return {role.leaf: self._leaf_plan(number) for number, role in roles}

    def _leaf_plan(self, role: int) -> LeafPlan:
        folded = self.choices.folded
        nodes: dict[torch.fx.Node, NodeLayouts] = {}
        for node, item in self.choices.items_of(role).items():
            inputs, outputs = self.ways(item)
            nodes[node] = NodeLayouts(
                tuple(None if one is None else self._asked(one) for one in inputs),
                tuple(map(self._placements, outputs)),
            )
        leaf = folded.roles[role].leaf

        def lies(port: Port) -> Placements | None:
            slot = folded.slot_of.get(port)
            return None if slot is None else self._placements(self.slot(slot))

        return LeafPlan(
            tuple(lies(Port(role, False, i)) for i in range(len(leaf.entries))),
            tuple(lies(Port(role, True, i)) for i in range(len(outputs_of(leaf.module)))),
            nodes,
        )

    def _asked(self, layouts: Layouts) -> Placements | None:
        """Returns what is asked for; parts of a sum are as DTensor's rules make them."""
        return None if any(one.is_partial for one in layouts) else self._placements(layouts)

    def _placements(self, layouts: Layouts) -> Placements:
        return placements(layouts, self.moves.sizes)

    def moved(self, edge: Edge) -> list[Step]:
        """Returns the steps that an edge takes."""
        before, after = layouts_at(edge, self.solution.options)
        return [] if before == after else self.moves.steps(before, after, edge.num_bytes)

    def collectives(self) -> tuple[PlannedCollective, ...]:
        """Returns the collectives of a step; what several operators share is there once."""
        found = []
        for edges in sharing(self.choices.edges):
            by_layout = {layouts_at(edge, self.solution.options): edge for edge in edges}
            for edge in by_layout.values():
                role = self.choices.folded.roles[max(edge.source.role, edge.target.role)]
                found += [
                    PlannedCollective(role.name, _name(edge.source), step, edge.count)
                    for step in self.moved(edge)
                    if step.is_collective
                ]
        return tuple(found)

    def more_s(self, group: Group, option: int) -> float:
        """Returns the seconds that another option of a group adds, all else unchanged."""
        before = dict(self.solution.options)
        after: Mapping[Group, int] = {**before, group: option}
        near = [e for e in self.choices.edges if group in (e.source.group, e.target.group)]
        more = float(group.seconds[option] - group.seconds[before[group]])
        for options, sign in ((before, -1), (after, 1)):
            for edges in sharing(near):
                for between in {layouts_at(edge, options) for edge in edges}:
                    more += sign * move_s(edges[0], self.moves, *between)
        return more


def _name(item: Item) -> str:
    if item.node is not None:
        return str(item.node.name)
    assert item.slot is not None
    return item.slot.names[0] if item.slot.names else item.slot.kind
