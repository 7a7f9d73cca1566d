"""Layouts of tensors on the axes of a mesh, and the cost of redistributing a tensor.

The planner compares many layouts, so they are plain tuples, and their costs are cached. A tensor
has one :class:`Layout` for each axis. It is redistributed in steps, each on one axis, in the order
of DTensor's ``redistribute``, so that the predicted steps are those that will run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Layout(NamedTuple):
    """The layout of a tensor on one axis of a mesh."""

    # ``"whole"`` (replicated), ``"split"`` (sharded), ``"sum"`` or ``"max"`` (partial), or
    # ``"masked"``: a partial sum to which each rank contributes other elements.
    kind: str
    dim: int = -1  # the sharded dimension
    # How many equal parts the dimension consists of, each of which is sharded by itself, such as
    # the three projections in one weight.
    factor: int = 1

    @property
    def is_split(self) -> bool:
        """Whether ranks hold different elements."""
        return self.kind == "split"

    @property
    def is_partial(self) -> bool:
        """Whether the tensor is a reduction of the ranks' tensors that is still to be done."""
        return self.kind in ("sum", "max", "masked")

    def __str__(self) -> str:
        if not self.is_split:
            return {"whole": "R", "sum": "P", "max": "Pmax", "masked": "Pmask"}[self.kind]
        return f"S{self.dim}" + (f"/{self.factor}" if self.factor > 1 else "")


WHOLE = Layout("whole")
SUM = Layout("sum")
Layouts = tuple[Layout, ...]  # one layout for each axis of the mesh


def split(dim: int, factor: int = 1) -> Layout:
    """Returns the layout that splits a dimension."""
    return Layout("split", dim, factor)


def text(layouts: Sequence[Layout | None]) -> str:
    """Returns layouts as one word, such as ``S0,R``."""
    return ",".join("-" if one is None else str(one) for one in layouts)


@dataclass(frozen=True)
class AxisRates:
    """How fast the ranks along an axis communicate.

    Each sends ``bytes_per_s`` while it receives as many; an empty collective takes ``latency_s``.
    """

    bytes_per_s: float
    latency_s: float


LINKS: Mapping[str, AxisRates] = {
    "cpu-gloo": AxisRates(2e9, 1e-4),
    "h100-nvlink": AxisRates(3.6e11, 1e-5),
    "h100-network": AxisRates(5e10, 2e-5),
}
"""Rates within a host, and between hosts that have eight network cards each."""


@dataclass(frozen=True)
class Axis:
    """A dimension of the mesh, with its number of ranks and the rates between them."""

    name: str
    size: int
    rates: AxisRates = LINKS["h100-nvlink"]


class Step(NamedTuple):
    """A step of a redistribution."""

    # ``"all_gather"``, ``"reduce_scatter"``, ``"all_reduce"``, ``"all_to_all"``, or ``"slice"``,
    # which needs no communication: a rank takes its shard, or a fraction of a value that becomes a
    # partial sum.
    kind: str
    axis: int  # the position of the axis
    # The bytes of a rank's tensor before the step or after it, whichever is larger; of a slice,
    # after it.
    num_bytes: int

    @property
    def is_collective(self) -> bool:
        """Whether ranks communicate."""
        return self.kind != "slice"


_KINDS = {
    ("split", "whole"): "all_gather",
    ("sum", "whole"): "all_reduce",
    ("max", "whole"): "all_reduce",
    ("masked", "whole"): "all_reduce",
    ("sum", "split"): "reduce_scatter",
    ("masked", "split"): "reduce_scatter",
    ("whole", "split"): "slice",
    ("whole", "sum"): "slice",
}
# A slice is a copy. What it costs only has to be small beside a collective, and not zero: of two
# plans, the one with fewer slices is then cheaper.
_COPY_BYTES_PER_S = 5e12
_SLICE_S = 1e-9


class Move(NamedTuple):
    """The redistribution of a tensor of any size.

    Each step has a kind, an axis, and the fraction of the tensor's bytes in it. An empty tensor
    takes ``fixed_s``, and each byte of the whole tensor ``byte_s`` more.
    """

    steps: tuple[tuple[str, int, float], ...]
    fixed_s: float
    byte_s: float


_IMPOSSIBLE = Move((), math.inf, 0.0)


class Moves:
    """Finds the steps from a layout to another on the axes of a mesh, and their seconds."""

    def __init__(self, axes: Sequence[Axis]) -> None:
        self._axes = tuple(axes)
        self.sizes = tuple(axis.size for axis in axes)
        self._known: dict[tuple[Layouts, Layouts], Move] = {}

    def steps(self, before: Layouts, after: Layouts, num_bytes: int) -> list[Step]:
        """Returns the steps that redistribute a tensor of so many bytes."""
        steps = self._move(before, after).steps
        return [Step(kind, axis, round(share * num_bytes)) for kind, axis, share in steps]

    def seconds(self, before: Layouts, after: Layouts, num_bytes: int) -> float:
        """Returns the seconds of these steps; infinite if no steps lead there."""
        move = self._move(before, after)
        return move.fixed_s + move.byte_s * num_bytes

    def _move(self, before: Layouts, after: Layouts) -> Move:
        key = (before, after)
        if key not in self._known:
            self._known[key] = self._found(before, after)
        return self._known[key]

    def step_s(self, kind: str, axis: int, num_bytes: float) -> tuple[float, float]:
        """Returns the seconds of a step without bytes, and the seconds that its bytes add."""
        if kind == "slice":
            return _SLICE_S, num_bytes / _COPY_BYTES_PER_S
        size, rates = self._axes[axis].size, self._axes[axis].rates
        sent = num_bytes * (size - 1) / size
        if kind == "all_reduce":  # a reduce-scatter and an all-gather
            sent *= 2
        return rates.latency_s, sent / rates.bytes_per_s

    def _found(self, before: Layouts, after: Layouts) -> Move:
        present, steps = list(before), list[tuple[str, int, float]]()
        for axis, target in _targets(before, after):
            for kind, reached in _steps_on_axis(present[axis], target, self.sizes[axis]):
                if kind == "":
                    return _IMPOSSIBLE
                # A gather moves its output's bytes, a scatter its input's: the larger of both.
                share = 0.0 if kind == "slice" else self.share(present)
                present[axis] = reached
                steps.append((kind, axis, max(share, self.share(present))))
        costs = [self.step_s(*step) for step in steps]
        return Move(tuple(steps), sum(c[0] for c in costs), sum(c[1] for c in costs))

    def share(self, layouts: Sequence[Layout]) -> float:
        """Returns the fraction of a tensor's elements that a rank holds."""
        sizes = [a.size for a, one in zip(self._axes, layouts, strict=True) if one.is_split]
        return 1 / math.prod(sizes)


def _targets(before: Layouts, after: Layouts) -> Iterator[tuple[int, Layout]]:
    """Yields axes with the layouts to reach, in the order of DTensor's ``redistribute``."""
    axes = range(len(before))
    present = list(before)
    if any(one.is_split for one in before):
        # From inner to outer axes. A tensor that an outer axis splits along the same dimension, but
        # no longer after the redistribution (or only then), is gathered on the inner axis first.
        for axis in reversed(axes):
            target, outer = after[axis], range(axis)
            if target.is_split and any(
                _splits(present[i], target) != _splits(after[i], target) for i in outer
            ):
                target = WHOLE
            # Partial and split layouts may become whole here; whole ones change in the second loop.
            present[axis] = target
            yield axis, target
    for axis in axes:
        yield axis, after[axis]


def _splits(one: Layout, like: Layout) -> bool:
    return one.is_split and one.dim == like.dim


def _steps_on_axis(before: Layout, after: Layout, size: int) -> list[tuple[str, Layout]]:
    """Returns the kinds of the steps on one axis with their results; ``""`` if there is no way."""
    if before == after:
        return []
    if before.is_split and after.is_split:
        # An all-to-all exchanges parts as a dimension of their own, so only one side may have any.
        factor = max(before.factor, after.factor)
        if 1 in (before.factor, after.factor) and (before.dim != after.dim or factor % size == 0):
            return [("all_to_all", after)]
        return [("all_gather", WHOLE), ("slice", after)]
    kind = _KINDS.get((before.kind, after.kind), "")
    if before.is_partial and after.is_split and not kind:
        return [("all_reduce", WHOLE), ("slice", after)]
    return [(kind, after)]
