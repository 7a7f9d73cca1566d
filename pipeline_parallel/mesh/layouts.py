"""Layouts of a tensor on one axis of a mesh, and what it costs to bring one to another.

A tensor has one :class:`Layout` per axis. Bringing it to others takes steps, each on one axis, in
the order that PyTorch's ``redistribute`` takes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Layout(NamedTuple):
    """How a tensor lies on one axis of a mesh.

    Attributes:
        kind: ``"whole"`` on each rank; ``"split"``; ``"sum"`` and ``"max"`` are parts that have to
            be reduced; ``"masked"`` is a sum in which each rank has other elements.
        dim: the dimension that is split.
        factor: the dimension counts as ``factor`` equal parts, each of which is split by itself: so
            lie three projections in one weight.
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
        """Whether the tensor is a reduction of what the ranks hold."""
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
    """Rates that an axis of a mesh sustains between its ranks.

    Attributes:
        bytes_per_s: that a rank sends while it receives as many.
        latency_s: of one collective.
    """

    bytes_per_s: float
    latency_s: float


LINKS: Mapping[str, AxisRates] = {
    "cpu-gloo": AxisRates(2e9, 1e-4),
    "h100-nvlink": AxisRates(3.6e11, 1e-5),
    "h100-network": AxisRates(5e10, 2e-5),
}
"""Rows for axes: between ranks of one host, and of several (eight network cards each)."""


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
            ``"slice"``, which moves nothing between ranks (a part of a sum is a fraction).
        axis: position of the axis.
        num_bytes: of the larger of what one rank has before and after it; of a slice, after it.
    """

    kind: str
    axis: int
    num_bytes: int

    @property
    def is_collective(self) -> bool:
        """Whether ranks exchange something."""
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
# Slices are copies; the number only has to be small next to a collective's rate.
_COPY_BYTES_PER_S = 5e12
_SLICE_S = 1e-9


class Move(NamedTuple):
    """A redistribution of tensors of any size.

    Attributes:
        steps: kind, axis, and the share of the tensor that is moved.
        fixed_s: seconds of an empty tensor.
        byte_s: further seconds for each byte of the whole tensor.
    """

    steps: tuple[tuple[str, int, float], ...]
    fixed_s: float
    byte_s: float


_NONE = Move((), math.inf, 0.0)


class Moves:
    """Knows the steps from any layout of a tensor to another, and their seconds.

    Args:
        axes: of the mesh.

    Attributes:
        sizes: of the axes.
    """

    def __init__(self, axes: Sequence[Axis]) -> None:
        self._axes = tuple(axes)
        self.sizes = tuple(axis.size for axis in axes)
        self._known: dict[tuple[Layouts, Layouts], Move] = {}

    def steps(self, before: Layouts, after: Layouts, num_bytes: int) -> list[Step]:
        """Returns the steps for a tensor of so many bytes."""
        steps = self._move(before, after).steps
        return [Step(kind, axis, round(share * num_bytes)) for kind, axis, share in steps]

    def seconds(self, before: Layouts, after: Layouts, num_bytes: int) -> float:
        """Returns what these steps take; infinite if it cannot be brought there."""
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
        """Returns what a step takes: seconds of an empty one, and those that its bytes add."""
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
                # A gather moves what it makes and a scatter what it takes: the larger of both.
                share = 0.0 if kind == "slice" else self.share(present)
                present[axis] = reached
                steps.append((kind, axis, max(share, self.share(present))))
        return tuple(steps)

    def share(self, layouts: Sequence[Layout]) -> float:
        """Returns the part of a tensor that a rank has."""
        sizes = [a.size for a, one in zip(self._axes, layouts, strict=True) if one.is_split]
        return 1 / math.prod(sizes)


def _targets(before: Layouts, after: Layouts) -> Iterator[tuple[int, Layout]]:
    """Yields axes and what each is brought to, in the order of DTensor's ``redistribute``."""
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
            # What is partial or split may become whole; whole stays until its turn.
            present[axis] = target
            yield axis, target
    for axis in axes:
        yield axis, after[axis]


def _splits(one: Layout, like: Layout) -> bool:
    return one.is_split and one.dim == like.dim


def _ways(before: Layout, after: Layout, size: int) -> list[tuple[str, Layout]]:
    """Returns the steps on one axis, each with what it leads to; one without a kind if none do."""
    if before == after:
        return []
    if before.is_split and after.is_split:
        # Parts are a dimension meanwhile: of one tensor, those of one dimension can be.
        factor = max(before.factor, after.factor)
        if 1 in (before.factor, after.factor) and (before.dim != after.dim or factor % size == 0):
            return [("all_to_all", after)]
        return [("all_gather", WHOLE), ("slice", after)]
    kind = _KINDS.get((before.kind, after.kind), "")
    if before.is_partial and after.is_split and not kind:
        return [("all_reduce", WHOLE), ("slice", after)]
    return [(kind, after)]
