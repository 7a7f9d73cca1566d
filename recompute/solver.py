"""Exact integer programs, solved by scipy (HiGHS): cuts of one leaf, and the spread over calls.

A cut of a leaf says which forward values are saved, offloaded or redone in the backward: it has
three variables per forward value. A spread says how many calls take which variant: it has two
variables per variant, whatever the number of calls: a count, and whether the variant is used.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.fx

from ..autodiff.traces.torch_make_fx import SizesAt
from ..autodiff.traces.torch_partition import ancestors, backward_nodes, compared, late_draws
from ..reuse.ir.costs import OperatorCosts, flops, is_heavy, value_bytes
from ..reuse.ir.operators import is_draw, is_view, mutated_args
from ..reuse.ir.program import outputs_of
from ..reuse.ir.types import TensorType
from ..reuse.torch_names import operator_schema


@dataclass(frozen=True, slots=True)
class ForwardValue:
    """One forward value that the backward needs, itself or to recompute another."""

    name: str  # of its node in the joint graph
    num_bytes: int  # bytes that saving it takes
    redo_s: float  # seconds to recompute it from its parents
    redo_flops: int  # FLOPs of that
    save_s: float  # seconds that saving it costs
    # Positions of the values that it is computed from (inputs of the leaf left out).
    parents: tuple[int, ...]
    can_save: bool  # whether it is a dense tensor with memory of its own
    can_redo: bool  # whether it may be recomputed; a random draw may not
    is_heavy: bool  # whether it is a matrix product, a convolution or attention
    is_wanted: bool  # whether the backward reads the value itself
    # Positions of values that are recomputed where it is. Those that its operator changes in place
    # (running statistics) would hold the changed values if saved. (The backward of a batch norm
    # reads them, too, but does not use them.) Its maximum must be equal to it, to the last bit.
    redone_with: tuple[int, ...] = ()
    # Seconds to copy it to the host and back; infinite if that is not possible.
    offload_s: float = math.inf


@dataclass(frozen=True)
class CutPoint:
    """One way to cut, evaluated."""

    saved: frozenset[str]  # names of the values saved
    num_bytes: int  # bytes they hold on the device
    extra_s: float  # seconds of recompute, of saving and of copies to the host and back
    extra_flops: int  # FLOPs of the recompute
    # Which of the saved values are in host memory meanwhile.
    offloaded: frozenset[str] = frozenset()


@dataclass(frozen=True)
class CutProblem:
    """All forward values of one leaf that matter to its backward, parents first."""

    values: tuple[ForwardValue, ...]

    @classmethod
    def of(
        cls, joint: torch.fx.GraphModule, num_outputs: int, costs: OperatorCosts, sizes: SizesAt
    ) -> CutProblem:
        """Reads the problem from a joint graph, at given sizes."""
        outputs = outputs_of(joint)
        late = set(late_draws(joint))  # draws of the backward stay there, with their readers
        backward = backward_nodes(joint)
        gradients = [g for g in outputs[num_outputs:] if isinstance(g, torch.fx.Node)]
        results = [n for n in outputs[:num_outputs] if isinstance(n, torch.fx.Node)]
        drawn = [n for n in joint.graph.nodes if is_draw(n) and n not in late]
        in_forward = ancestors((*results, *drawn))
        reached = ancestors((*gradients, *late))
        nodes = [
            n
            for n in joint.graph.nodes
            if n in reached and n not in backward and n.op == "call_function"
        ]
        place = {n: i for i, n in enumerate(nodes)}
        for node in nodes:
            if any(n in late for n in node.all_input_nodes):
                late.add(node)
        wanted = {p for n in reached & backward for p in n.all_input_nodes} | set(gradients) | late
        numbered = dict(zip(joint.graph.nodes, sizes.module(joint).graph.nodes, strict=True))
        with_it = {n: mutated_args(n) for n in nodes}
        for group in compared(joint):
            for one, other in itertools.permutations(group & place.keys(), 2):
                with_it[one] += [other] if one in ancestors([other]) else []
        value_of = partial(_forward_value, place=place, costs=costs)
        described = (
            value_of(n, numbered[n], with_it[n], n in in_forward, n in wanted, n in late)
            for n in nodes
        )
        return cls(tuple(described))

    def evaluate(self, saved: Collection[str], offloaded: Collection[str] = ()) -> CutPoint | None:
        """Returns the cost of a choice; None if it redoes a value that must not be redone."""
        keep = set(saved)
        wanted = [v.is_wanted for v in self.values]
        used: list[ForwardValue] = []
        redone: list[ForwardValue] = []
        again: set[int] = set()
        # Users first: a value is needed if the backward or a redone user reads it.
        for index in reversed(range(len(self.values))):
            value = self.values[index]
            if not wanted[index]:
                continue
            if value.name in keep and value.can_save:
                used.append(value)
                continue
            if not value.can_redo:
                return None
            redone.append(value)
            again.add(index)
            for parent in value.parents:
                wanted[parent] = True
        for index, value in enumerate(self.values):
            # Such a value would be wrong beside the second run of this one, if it was saved.
            if index in again and not again.issuperset(value.redone_with):
                return None
        copied = [v for v in used if v.name in offloaded]
        extra_s = sum(v.redo_s for v in redone) + sum(v.save_s for v in used)
        return CutPoint(
            frozenset(v.name for v in used),
            sum(v.num_bytes for v in used if v not in copied),
            extra_s + sum(v.offload_s for v in copied),
            sum(v.redo_flops for v in redone),
            frozenset(v.name for v in copied),
        )


def _forward_value(
    node: torch.fx.Node,
    numbered: torch.fx.Node,
    with_it: Sequence[torch.fx.Node],
    in_forward: bool,
    is_wanted: bool,
    is_late: bool,
    place: dict[torch.fx.Node, int],
    costs: OperatorCosts,
) -> ForwardValue:
    """Describes a node; ``numbered`` is the same node with integer sizes.

    ``with_it`` are the nodes that must be recomputed where it is.
    """
    value = node.meta.get("val")
    source = node.all_input_nodes[0] if node.all_input_nodes else node
    picks = operator_schema(node) is None
    shares = is_view(node) or (picks and is_view(source))
    dense = isinstance(value, torch.Tensor) and TensorType.of(value).is_dense
    # What only the backward computes is not extra.
    work = costs.redo_s(numbered) if in_forward else 0.0
    return ForwardValue(
        node.name,
        value_bytes(numbered),
        work,
        flops(numbered) if in_forward else 0,
        costs.save_s(numbered),
        tuple(place[n] for n in node.all_input_nodes if n in place),
        dense and not shares and not is_late,
        not (is_draw(node) and in_forward),
        in_forward and is_heavy(numbered),
        is_wanted,
        tuple(place[n] for n in with_it if n in place),
        costs.offload_s(numbered),
    )


# ---- Exact integer programs ----------------------------------------------------------------------


_TIE = 1e-6  # weight of the second goal against the first, both scaled to one
_TIME_LIMIT_S = 20.0


# ---- one closure -------------------------------------------------------------------------


def fewest_bytes(
    problem: CutProblem, may_redo: Callable[[ForwardValue], bool] = lambda value: True
) -> CutPoint:
    """Returns the cut that saves the fewest bytes, and of those the one with the least work."""
    model = _CutModel(problem, may_redo)
    point = model.solve(model.num_bytes, _TIE * model.redo_s)
    assert point is not None, "values that must not be redone can all be saved"
    return point


def cheapest(problem: CutProblem, max_bytes: int | None = None) -> CutPoint | None:
    """Returns the cut with the least work within a number of bytes; None if there is none."""
    model = _CutModel(problem, lambda value: True)
    kept, offloaded = model.save_s + _TIE * model.num_bytes, model.save_s + model.offload_s
    return model.solve(kept, model.redo_s, max_bytes, offloaded)


def frontier(problem: CutProblem, num_points: int) -> list[CutPoint]:
    """Returns Pareto-optimal cuts: none is better than another in both bytes and work.

    Each is exact for its own number of bytes; ``num_points`` of these are spread evenly. Saved
    values may be offloaded to host memory, if the device has one.
    """
    model = _CutModel(problem, lambda value: True)
    low = model.solve(model.num_bytes, _TIE * model.redo_s, None, _TIE * model.offload_s)
    assert low is not None, "values that must not be redone can all be saved"
    high = cheapest(problem)
    assert high is not None, "without a bound there is always a cut"
    steps = range(1, num_points - 1)
    room = high.num_bytes - low.num_bytes
    found = [low, high]
    for step in steps:
        point = cheapest(problem, low.num_bytes + room * step // (num_points - 1))
        if point is not None:
            found.append(point)
    return pareto(found, lambda p: (p.num_bytes, p.extra_s))


def pareto(points: Sequence[Any], key: Callable[[Any], tuple[float, float]]) -> list[Any]:
    """Returns the Pareto-optimal points, sorted: the first number grows, the second falls."""
    kept: list[Any] = []
    for point in sorted(points, key=key):
        if not kept or key(point)[1] < key(kept[-1])[1]:
            kept.append(point)
    return kept


class _CutModel:
    """The integer program of one closure: ``save``, ``redo``, ``offload`` of each value, 0 or 1.

    Bytes and seconds are scaled to a sum of one, since the solver's tolerances are absolute.
    """

    def __init__(self, problem: CutProblem, may_redo: Callable[[ForwardValue], bool]) -> None:
        self._problem = problem
        values = problem.values
        count = self._count = len(values)
        sizes = np.array([v.num_bytes for v in values], float)
        copies = [v.can_save and math.isfinite(v.offload_s) for v in values]
        rows_s = [
            (v.redo_s, v.save_s, v.offload_s if c else 0.0)
            for v, c in zip(values, copies, strict=True)
        ]
        seconds = np.array(rows_s, float).reshape(-1, 3)
        self.num_bytes = sizes / (sizes.sum() or 1.0)
        self.redo_s, self.save_s, self.offload_s = (seconds / (seconds.sum() or 1.0)).T
        rows: list[dict[int, float]] = []
        low: list[float] = []
        for index, value in enumerate(values):
            if value.is_wanted:
                rows.append(self._there(index))
                low.append(1.0)
            for parent in value.parents:  # redo needs its parents, saved or redone
                rows.append({**self._there(parent), count + index: -1.0})
                low.append(0.0)
            for changed in value.redone_with:  # and not taken as saved
                rows.append({count + changed: 1.0, count + index: -1.0})
                rows.append({changed: -1.0, 2 * count + changed: -1.0, count + index: -1.0})
                low += [0.0, -1.0]
        self._rows, self._low = rows, low
        can_save = [float(v.can_save) for v in values]
        can_redo = [float(v.can_redo and may_redo(v)) for v in values]
        self._upper = np.array([can_save, can_redo, copies], float)

    def _there(self, index: int) -> dict[int, float]:
        """Returns the variables one of which makes a value available to the backward."""
        return dict.fromkeys((index, self._count + index, 2 * self._count + index), 1.0)

    def solve(
        self,
        save: np.ndarray,
        redo: np.ndarray,
        max_bytes: int | None = None,
        offload: np.ndarray | None = None,
    ) -> CutPoint | None:
        """Returns the cut with the smallest weighted sum within a number of bytes.

        Nothing is offloaded without weights for that.
        """
        if not self._count:  # the backward needs only inputs, results and cotangents
            return self._problem.evaluate(())
        rows, low = list(self._rows), list(self._low)
        if max_bytes is not None:
            scale = max(max_bytes, 1)
            sizes = enumerate(v.num_bytes for v in self._problem.values)
            rows.append({i: -size / scale for i, size in sizes if size})
            low.append(-max_bytes / scale)
        weights = np.concatenate([save, redo, np.zeros_like(redo) if offload is None else offload])
        upper = self._upper * [[1.0], [1.0], [float(offload is not None)]]
        found = _minimize(weights, rows, low, upper.ravel())
        if found is None:
            return None
        kept, _, offloaded = (
            {v.name for v, x in zip(self._problem.values, part, strict=True) if x > 0.5}
            for part in found.reshape(3, -1)
        )
        point = self._problem.evaluate(kept | offloaded, offloaded - kept)
        assert point is not None, "the solver broke a constraint"
        return point if max_bytes is None or point.num_bytes <= max_bytes else None


# ---- many calls --------------------------------------------------------------------------


@dataclass(frozen=True)
class Group:
    """Calls of one closure, and the variants each may take."""

    num_calls: int  # how many
    num_bytes: tuple[int, ...]  # per variant, what one call saves; growing
    extra_s: tuple[float, ...]  # per variant, the seconds one call computes again; falling
    # Positions of variants that are compiled whether used or not.
    compiled: frozenset[int] = frozenset()
    max_variants: int = 3  # how many may be compiled


def spread(groups: Sequence[Group], max_bytes: int) -> list[tuple[int, ...]] | None:
    """Says how many calls of each group take which variant: the least work within the bytes.

    An exact multiple-choice knapsack with identical items; its size does not depend on the number
    of calls. Returns for each group the counts by variant, or None if the bytes do not suffice.
    """
    # The solver's bounds have a tolerance of a millionth, a budget has none. If a spread exceeds
    # it, the bound is lowered by that: exact unless the best spread is that close to the budget.
    asked = max_bytes
    while (found := _spread(groups, asked)) is not None:
        pairs = zip(groups, found, strict=True)
        used = sum(n * b for g, counts in pairs for n, b in zip(counts, g.num_bytes, strict=True))
        if used <= max_bytes:
            break
        asked -= used - max_bytes
    return found


def _spread(groups: Sequence[Group], max_bytes: int) -> list[tuple[int, ...]] | None:
    sizes = [len(g.num_bytes) for g in groups]
    total = sum(sizes)
    starts = np.cumsum([0, *sizes])
    rows: list[dict[int, float]] = []
    low: list[float] = []
    scale = max(max_bytes, 1)
    budget: dict[int, float] = {}
    work = np.zeros(total)
    for group, start in zip(groups, starts, strict=False):
        places = range(start, start + len(group.num_bytes))
        for sign in (1.0, -1.0):  # the counts add up to the number of calls
            rows.append(dict.fromkeys(places, sign))
            low.append(sign * group.num_calls)
        for variant, place in enumerate(places):
            budget[place] = -group.num_bytes[variant] / scale
            work[place] = group.extra_s[variant]
            rows.append({place: -1.0, total + place: float(group.num_calls)})
            low.append(0.0)
        rows.append({total + p: -1.0 for p in places})
        low.append(-float(group.max_variants))
    rows.append(budget)
    low.append(-max_bytes / scale)
    upper = np.concatenate([np.repeat([float(g.num_calls) for g in groups], sizes), np.ones(total)])
    lower = np.zeros(2 * total)
    for group, start in zip(groups, starts, strict=False):
        lower[[total + start + v for v in group.compiled]] = 1.0
    weights = np.concatenate([work / (work.max(initial=0.0) or 1.0), np.full(total, _TIE)])
    found = _minimize(weights, rows, low, upper, lower)
    if found is None:
        return None
    counts = np.rint(found[:total]).astype(int).tolist()
    return [tuple(counts[a:b]) for a, b in itertools.pairwise(starts)]


def _minimize(
    weights: np.ndarray,
    rows: Sequence[dict[int, float]],
    low: Sequence[float],
    upper: np.ndarray,
    lower: np.ndarray | None = None,
) -> np.ndarray | None:
    """Minimizes ``weights @ x`` for integers, ``rows @ x >= low`` and ``lower <= x <= upper``."""
    # Imported here: only a budget or a policy needs it.
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array

    entries = [(r, c, x) for r, row in enumerate(rows) for c, x in row.items()]
    at_row, at_column, data = zip(*entries, strict=True) if entries else ((), (), ())
    matrix = csr_array((data, (at_row, at_column)), shape=(len(rows), len(weights)))
    result = milp(
        weights,
        integrality=np.ones(len(weights)),
        bounds=Bounds(np.zeros(len(weights)) if lower is None else lower, upper),
        constraints=[LinearConstraint(matrix, np.array(low), np.inf)] if entries else [],
        options={"mip_rel_gap": 0.0, "time_limit": _TIME_LIMIT_S},
    )
    return None if result.x is None else result.x
