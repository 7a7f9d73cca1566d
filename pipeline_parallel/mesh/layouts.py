"""Layouts of a tensor on the axes of a mesh, and the cost of redistribution between them.

A tensor has one :class:`Layout` per axis. A redistribution takes steps, each on one axis, in the
order of PyTorch's ``redistribute``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Layout(NamedTuple):
    """The layout of a tensor on one axis of a mesh.

    Attributes:
        kind: ``"whole"`` (replicated); ``"split"`` (sharded); ``"sum"`` and ``"max"`` are partial;
            ``"masked"`` is a partial sum in which each rank has other elements.
        dim: the dimension that is sharded.
        factor: the dimension consists of ``factor`` equal parts, each of which is sharded by
            itself, as three projections in one weight.
    """

    kind: str
    dim: int = -1
    factor: int = 1

    @property
    def is_split(self) -> bool:
        """Whether ranks hold different elements."""
        return self.kind == "split"

    @property
    def is_partial(self) -> bool:
        """Whether the tensor is a reduction of the ranks' tensors, not yet done."""
        return self.kind in ("sum", "max", "masked")

    def __str__(self) -> str:
        if not self.is_split:
            return {"whole": "R", "sum": "P", "max": "Pmax", "masked": "Pmask"}[self.kind]
        return f"S{self.dim}" + (f"/{self.factor}" if self.factor > 1 else "")


WHOLE = Layout("whole")
SUM = Layout("sum")
Layouts = tuple[Layout, ...]
"""One layout for each axis of the mesh."""


def split(dim: int, factor: int = 1) -> Layout:
    """Returns the layout that splits a dimension."""
    return Layout("split", dim, factor)


def text(layouts: Sequence[Layout | None]) -> str:
    """Returns layouts as one word: ``S0,R``."""
    return ",".join("-" if one is None else str(one) for one in layouts)


@dataclass(frozen=True)
class AxisRates:
    """Rates between the ranks of an axis.

    Attributes:
        bytes_per_s: bytes that a rank sends per second while it receives as many.
        latency_s: of one collective.
    """

    bytes_per_s: float
    latency_s: float


LINKS: Mapping[str, AxisRates] = {
    "cpu-gloo": AxisRates(2e9, 1e-4),
    "h100-nvlink": AxisRates(3.6e11, 1e-5),
    "h100-network": AxisRates(5e10, 2e-5),
}
"""Rates of axes within a host, and between hosts (with eight network cards each)."""


@dataclass(frozen=True)
class Axis:
    """A dimension of the mesh.

    Attributes:
        name: its name.
        size: its ranks.
        rates: between them.
    """

    name: str
    size: int
    rates: AxisRates = LINKS["h100-nvlink"]


class Step(NamedTuple):
    """A part of a redistribution.

    Attributes:
        kind: ``"all_gather"``, ``"reduce_scatter"``, ``"all_reduce"``, ``"all_to_all"``, or
            ``"slice"``, which needs no communication (for a partial sum, a division).
        axis: position of the axis.
        num_bytes: of one rank's tensor before or after it, the larger one; of a slice, after it.
    """

    kind: str
    axis: int
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
# Slices are copies: their cost only has to be small next to a collective's.
_COPY_BYTES_PER_S = 5e12
_SLICE_S = 1e-9


class Move(NamedTuple):
    """A redistribution of tensors of any size.

    Attributes:
        steps: kind, axis, and the share of the tensor's bytes.
        fixed_s: seconds for an empty tensor.
        byte_s: further seconds for each byte of the whole tensor.
    """

    steps: tuple[tuple[str, int, float], ...]
    fixed_s: float
    byte_s: float


_NONE = Move((), math.inf, 0.0)


class Moves:
    """Finds the steps from any layout of a tensor to another, and their seconds.

    Args:
        axes: the axes of the mesh.

    Attributes:
        sizes: the sizes of the axes.
    """

    def __init__(self, axes: Sequence[Axis]) -> None:
        self._axes = tuple(axes)
        self.sizes = tuple(axis.size for axis in axes)
        self._known: dict[tuple[Layouts, Layouts], Move] = {}

    def steps(self, before: Layouts, after: Layouts, num_bytes: int) -> list[Step]:
        """Returns the steps for a tensor of this size."""
        steps = self._move(before, after).steps
        return [Step(kind, axis, round(share * num_bytes)) for kind, axis, share in steps]

    def seconds(self, before: Layouts, after: Layouts, num_bytes: int) -> float:
        """Returns the seconds of these steps; infinite if there are no such steps."""
        move = self._move(before, after)
        return move.fixed_s + move.byte_s * num_bytes

    def _move(self, before: Layouts, after: Layouts) -> Move:
        key = (before, after)
        known = self._known.get(key)
        if known is None:
            steps = self._found(before, after)
            known = _NONE
            if steps is not None:
                costs = [self.taken_s(kind, axis, share) for kind, axis, share in steps]
                known = Move(steps, sum(c[0] for c in costs), sum(c[1] for c in costs))
            self._known[key] = known
        return known

    def taken_s(self, kind: str, axis: int, num_bytes: float) -> tuple[float, float]:
        """Returns the seconds of a step: of an empty one, and those that its bytes add."""
        if kind == "slice":
            return _SLICE_S, num_bytes / _COPY_BYTES_PER_S
        size, rates = self._axes[axis].size, self._axes[axis].rates
        sent = num_bytes * (size - 1) / size
        if kind == "all_reduce":  # a reduce-scatter and an all-gather
            sent *= 2
        return rates.latency_s, sent / rates.bytes_per_s

    def _found(self, before: Layouts, after: Layouts) -> tuple[tuple[str, int, float], ...] | None:
        present, steps = list(before), list[tuple[str, int, float]]()
        for axis, target in _targets(before, after):
            for kind, reached in _ways(present[axis], target, self.sizes[axis]):
                if kind == "":
                    return None
                # A gather moves its output's bytes, a scatter its input's: the larger of both.
                share = 0.0 if kind == "slice" else self.share(present)
                present[axis] = reached
                steps.append((kind, axis, max(share, self.share(present))))
        return tuple(steps)

    def share(self, layouts: Sequence[Layout]) -> float:
        """Returns the share of a tensor that a rank has."""
        sizes = [a.size for a, one in zip(self._axes, layouts, strict=True) if one.is_split]
        return 1 / math.prod(sizes)


def _targets(before: Layouts, after: Layouts) -> Iterator[tuple[int, Layout]]:
    """Yields axes and their target layouts, in the order of DTensor's ``redistribute``."""
    axes = range(len(before))
    present = list(before)
    if any(one.is_split for one in before):
        # From the inner axes outwards; a shard inside of one that changes is gathered first.
        for axis in reversed(axes):
            target, outer = after[axis], range(axis)
            if target.is_split and any(
                _splits(present[i], target) != _splits(after[i], target) for i in outer
            ):
                target = WHOLE
            # Partial or split layouts may become whole here; whole ones change in the second loop.
            present[axis] = target
            yield axis, target
    for axis in axes:
        yield axis, after[axis]


def _splits(one: Layout, like: Layout) -> bool:
    return one.is_split and one.dim == like.dim


def _ways(before: Layout, after: Layout, size: int) -> list[tuple[str, Layout]]:
    """Returns the steps on one axis, each with its result; one with an empty kind if none exist."""
    if before == after:
        return []
    if before.is_split and after.is_split:
        # For the exchange, the parts are a dimension of their own: only one of both can have parts.
        factor = max(before.factor, after.factor)
        if 1 in (before.factor, after.factor) and (before.dim != after.dim or factor % size == 0):
            return [("all_to_all", after)]
        return [("all_gather", WHOLE), ("slice", after)]
    kind = _KINDS.get((before.kind, after.kind), "")
    if before.is_partial and after.is_split and not kind:
        return [("all_reduce", WHOLE), ("slice", after)]
    return [(kind, after)]
