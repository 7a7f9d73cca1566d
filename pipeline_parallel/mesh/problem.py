"""Chooses an option for each group, by a linear program.

Each option of a group is a variable between 0 and 1, and those of a group sum to 1. Each edge has a
variable for each pair of layouts between which its tensor can be redistributed, tied to the options
at both ends. The optimum is nearly always integral. Where it is not, HiGHS branches.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, linprog, milp
from scipy.sparse import coo_array

from ...reuse.errors import PlanError
from ...reuse.once import once
from .choices import Choices, Edge, Group, Item
from .layouts import Layouts, Moves

PREFETCHED = 0.5
"""The fraction that counts of a collective that can overlap with other work (``prefetches``)."""
# HiGHS has absolute tolerances, so it gets costs in microseconds.
_UNIT_S = 1e-6
_TOLERANCE = 1e-4
_BRANCHING_S, _NODES = 60, 100
_SIMPLEX_STEPS, _STEPS_REACHED = 20_000, 1
# With 210,000 options the simplex method had not ended after 31 s, and interior points took 21 s;
# with 55,000 options they took 1.2 s and 3.7 s.
_MOST_FOR_SIMPLEX = 100_000


class OverMemoryError(PlanError):
    """No plan fits memory; each one holds at least ``least_bytes`` on a rank."""

    def __init__(self, limit_bytes: int, least_bytes: int) -> None:
        super().__init__(
            f"No plan holds at most {limit_bytes} bytes per rank; any holds at least "
            f"{least_bytes:,}. Allow more, or use more ranks."
        )
        self.least_bytes = least_bytes


@dataclass(frozen=True)
class Solution:
    """The option that is chosen for each group, and what a step then takes."""

    options: Mapping[Group, int]  # the options
    seconds: float  # the predicted seconds of a step
    held_bytes: int  # the bytes on a rank of parameters, gradients, optimizer state, saved tensors
    bound_s: float = 0.0  # a lower bound for the seconds of any plan
    is_scarce: bool = False  # whether a plan that holds more would take less time


class Problem:
    """The linear program of some choices.

    For each option of a group that holds memory on a rank, ``memory`` has its bytes.
    """

    def __init__(
        self,
        choices: Choices,
        moves: Moves,
        memory: Mapping[Group, Any],
        limit_bytes: int | None,
    ) -> None:
        self._choices, self._moves = choices, moves
        self._memory, self._limit = memory, limit_bytes
        self._costs: list[float] = []
        self._rows: list[tuple[int, int, float]] = []
        self._right: list[float] = []
        self._below: list[tuple[int, int, float]] = []
        self._num_below = 0
        self._first: dict[Group, int] = {}
        for group in choices.groups:
            first = self._first[group] = len(self._costs)
            self._costs += list(group.seconds)
            self._equal([(first + i, 1.0) for i in range(len(group))], 1.0)
        self.num_options = len(self._costs)
        for edges in sharing(choices.edges):
            self._add(edges)

    def solve(self) -> Solution:
        """Returns the choice that takes the least time; PlanError if no choice fits memory."""
        matrix = self._matrix(self._rows, len(self._right))
        costs = np.array(self._costs) / _UNIT_S
        below = self._upper()
        found = self._relaxed(costs, matrix, below)
        if found.x is None:
            raise OverMemoryError(self._limit or 0, self._least_bytes(matrix))
        taken = found.x[: self.num_options]
        if np.all(np.minimum(taken, abs(1 - taken)) < _TOLERANCE):  # each is 0 or 1
            return self._solution(found.x, found)
        # Options that the relaxation sets to 1 are fixed; branching decides the few others.
        settled = [found.x[i] > 1 - _TOLERANCE for i in range(self.num_options)]
        for fixed in (settled, [False] * self.num_options):
            tried = self._branched(costs, matrix, below, fixed)
            if tried is not None:
                return self._solution(tried, found)
        raise PlanError(f"No plan was found that holds at most {self._limit} bytes per rank.")

    def _least_bytes(self, matrix: Any) -> int:
        """Returns a lower bound for the bytes on a rank of any plan."""
        held = np.zeros(len(self._costs))
        for group, row in self._memory.items():
            held[self._first[group] : self._first[group] + len(group)] = row
        # In a unit of the order of 1, because the tolerances of HiGHS are absolute.
        unit = max(held.max(), 1.0)
        return math.ceil(self._relaxed(held / unit, matrix, (None, None)).fun * unit)

    def _relaxed(self, costs: Any, matrix: Any, below: tuple[Any, Any]) -> Any:
        upper, bound = below
        options: dict[str, Any] = {"A_eq": matrix, "b_eq": np.array(self._right)}
        options |= {"A_ub": upper, "b_ub": bound, "bounds": (0, None)}
        # Where many plans cost nearly the same, the simplex method visits all of them. So its steps
        # are limited, and not its time: ranks of different speed would find different plans.
        limit = {"maxiter": _SIMPLEX_STEPS}
        if len(costs) <= _MOST_FOR_SIMPLEX:
            found = linprog(costs, **options, method="highs", options=limit)
            if found.status != _STEPS_REACHED:
                return found
        return linprog(costs, **options, method="highs-ipm")

    def _branched(
        self, costs: Any, matrix: Any, below: tuple[Any, Any], fixed: Sequence[bool]
    ) -> Any:
        """Returns integral values with the ``fixed`` options at 1; None if none were found."""
        lower, whole = np.zeros(len(costs)), np.zeros(len(costs))
        whole[: self.num_options] = 1
        lower[: self.num_options] = fixed
        right = np.array(self._right)
        constraints = [LinearConstraint(matrix, right, right)]
        if below[0] is not None:
            constraints.append(LinearConstraint(below[0], -np.inf, below[1]))
        return milp(
            costs,
            integrality=whole,
            bounds=Bounds(lower, np.inf),
            constraints=constraints,
            # Nodes are limited, and not time alone: loaded ranks would find different plans.
            options={"mip_rel_gap": 1e-3, "node_limit": _NODES, "time_limit": _BRANCHING_S},
        ).x

    def _solution(self, values: Any, relaxed: Any) -> Solution:
        options = {
            group: int(np.argmax(values[first : first + len(group)]))
            for group, first in self._first.items()
        }
        made = evaluated(self._choices, self._moves, self._memory, options)
        # The marginal of the last row, which bounds memory, says what one more byte would save.
        is_scarce = self._limit is not None and relaxed.ineqlin.marginals[-1] < -_TOLERANCE
        return replace(made, bound_s=relaxed.fun * _UNIT_S, is_scarce=bool(is_scarce))

    def _upper(self) -> tuple[Any, Any]:
        """Returns the rows with an upper bound; the last one bounds memory."""
        rows, number = list(self._below), self._num_below
        right = [0.0] * number
        if self._limit is not None:
            for group, held in self._memory.items():
                first = self._first[group]
                rows += [(number, first + i, one / self._limit) for i, one in enumerate(held)]
            right.append(1.0)
        if not right:
            return None, None
        return self._matrix(rows, len(right)), np.array(right)

    def _matrix(self, entries: Sequence[tuple[int, int, float]], num_rows: int) -> Any:
        rows, columns, values = zip(*entries, strict=True)
        shape = (num_rows, len(self._costs))
        return coo_array((values, (rows, columns)), shape=shape).tocsr()

    def _equal(self, terms: Sequence[tuple[int, float]], right: float) -> None:
        number = len(self._right)
        self._rows += [(number, column, value) for column, value in terms]
        self._right.append(right)

    def _tie(self, options: Sequence[int], flows: Sequence[int]) -> None:
        # A redistribution from (or to) a layout happens exactly if an option with it is chosen.
        self._equal([(o, 1.0) for o in options] + [(f, -1.0) for f in flows], 0.0)

    @once
    def _by_layout(self, item: Item, number: int, *, is_output: bool) -> dict[Layouts, list[int]]:
        first, table = self._first[item.group], defaultdict[Layouts, list[int]](list)
        for option, one in enumerate(item.group.layouts(item, number, is_output=is_output)):
            table[one].append(first + option)
        return table

    def _new(self, cost: float) -> int:
        self._costs.append(cost)
        return len(self._costs) - 1

    def _add(self, edges: Sequence[Edge]) -> None:
        """Adds the edges of one tensor, which is redistributed to each layout once."""
        made: dict[tuple[Layouts, Layouts], list[int]] = defaultdict(list)
        for edge in edges:
            before = self._by_layout(edge.source, edge.output, is_output=True)
            after = self._by_layout(edge.target, edge.operand, is_output=False)
            into: dict[Layouts, list[int]] = {layouts: [] for layouts in after}
            for given, options in before.items():
                out = []
                # On several axes most pairs have no redistribution, and so no variable.
                for taken, flows in into.items():
                    if math.isfinite(move_s(edge, self._moves, given, taken)):
                        out.append(self._new(0.0))
                        flows.append(out[-1])
                        made[given, taken].append(out[-1])
                self._tie(options, out)
            for taken, flows in into.items():
                self._tie(after[taken], flows)
        for (given, taken), flows in made.items():
            seconds = move_s(edges[0], self._moves, given, taken)
            if len(flows) == 1 or not seconds:
                self._costs[flows[0]] = seconds
                continue
            # Readers of a tensor in one layout pay once: this variable is at least each flow.
            once = self._new(seconds)
            for flow in flows:
                self._below += [(self._num_below, flow, 1.0), (self._num_below, once, -1.0)]
                self._num_below += 1


def sharing(edges: Sequence[Edge]) -> list[list[Edge]]:
    """Returns the edges of each tensor within a leaf, where each redistribution of it runs once."""
    parts: dict[tuple[Item, int, int], list[Edge]] = defaultdict(list)
    for edge in edges:
        leaf = edge.target.leaf if edge.source.leaf < 0 else edge.source.leaf
        parts[edge.source, edge.output, leaf].append(edge)
    return list(parts.values())


def move_s(edge: Edge, moves: Moves, before: Layouts, after: Layouts) -> float:
    """Returns the seconds of a step in which an edge redistributes its tensor."""
    if before == after:
        return 0.0
    seconds = edge.count * moves.seconds(before, after, edge.num_bytes)
    return seconds * PREFETCHED if edge.prefetches else seconds


def evaluated(
    choices: Choices,
    moves: Moves,
    memory: Mapping[Group, Any],
    options: Mapping[Group, int],
) -> Solution:
    """Returns a choice of options, with what a step then takes."""
    seconds = sum(float(group.seconds[option]) for group, option in options.items())
    held = sum(int(row[options[group]]) for group, row in memory.items())
    return Solution(options, seconds + moves_s(choices.edges, moves, options), held)


def moves_s(edges: Sequence[Edge], moves: Moves, options: Mapping[Group, int]) -> float:
    """Returns the seconds of a step that are spent on redistribution."""
    return sum(
        move_s(parts[0], moves, *between)
        for parts in sharing(edges)
        for between in {layouts_at(edge, options) for edge in parts}
    )


def layouts_at(edge: Edge, options: Mapping[Group, int]) -> tuple[Layouts, Layouts]:
    """Returns the layouts at both ends of an edge."""
    source, target = edge.source, edge.target
    given = source.group.ways(options[source.group])[source.group.items.index(source)]
    taken = target.group.ways(options[target.group])[target.group.items.index(target)]
    before = tuple(way.outputs[edge.output] for way in given)
    after = tuple(way.inputs[edge.operand] for way in taken)
    return before, after  # type: ignore[return-value]
