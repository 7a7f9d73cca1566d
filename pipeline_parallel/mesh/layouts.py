"""Layouts of tensors on the axes of a mesh, and the cost of redistributing a tensor.

The planner compares many layouts, so they are plain tuples, and their costs are cached. A tensor
has one :class:`Layout` for each axis. It is redistributed in steps, each on one axis, in the order
of DTensor's ``redistribute``, so that the predicted steps are those that will run.

How fast ranks communicate is a table, or measured on a mesh and kept in a file.
"""

from __future__ import annotations

import json
import math
import os
import pathlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist

from ...reuse.errors import PlanError, door
from ...reuse.once import once
from .plan import check_mesh


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


Links: TypeAlias = "Mapping[str, AxisRates] | str | os.PathLike[str]"
"""Rates by the name of a mesh dimension, or the path of a file that holds them."""

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

    def steps(self, before: Layouts, after: Layouts, num_bytes: int) -> list[Step]:
        """Returns the steps that redistribute a tensor of so many bytes."""
        steps = self._move(before, after).steps
        return [Step(kind, axis, round(share * num_bytes)) for kind, axis, share in steps]

    def seconds(self, before: Layouts, after: Layouts, num_bytes: int) -> float:
        """Returns the seconds of these steps; infinite if no steps lead there."""
        move = self._move(before, after)
        return move.fixed_s + move.byte_s * num_bytes

    def step_s(self, kind: str, axis: int, num_bytes: float) -> tuple[float, float]:
        """Returns the seconds of a step without bytes, and the seconds that its bytes add."""
        if kind == "slice":
            return _SLICE_S, num_bytes / _COPY_BYTES_PER_S
        size, rates = self._axes[axis].size, self._axes[axis].rates
        sent = num_bytes * (size - 1) / size
        if kind == "all_reduce":  # a reduce-scatter and an all-gather
            sent *= 2
        return rates.latency_s, sent / rates.bytes_per_s

    @once
    def _move(self, before: Layouts, after: Layouts) -> Move:
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


# ---- Measured rates ------------------------------------------------------------------------------


# A small gather shows the latency of a collective, a large one the bandwidth.
_SMALL_BYTES, _LARGE_BYTES = 2**12, 2**25
_TIMES = 5


@door
def measure_links(mesh: Any, path: str | os.PathLike[str] | None = None) -> dict[str, AxisRates]:
    """Measures latency and bandwidth along each dimension of a mesh; call it on every rank.

    All groups of a dimension gather at once, as they do in a step. A gather takes as long as on its
    slowest rank, and the fastest of several gathers counts.

    Args:
        mesh: a ``DeviceMesh``; dimensions of one rank are left out.
        path: a file to write, for ``parallelize(plan="auto", links=path)`` and
            ``lazyinline fit --links``; rank 0 writes it.

    Returns:
        For each dimension, the bytes per second that a rank sends, and the seconds of an empty
        collective; the same on every rank.

    Example:
        >>> lazyinline.measure_links(mesh, "links.json")
        >>> parallel = lazyinline.parallelize(
        ...     model, (ids, targets), mesh=mesh, plan="auto", links="links.json"
        ... )
    """
    # Imported late: DTensor takes as long to import as all of lazyinline.
    from .torch_collectives import collectives_over, groups_of

    mesh = check_mesh(mesh, any_names=True)
    names = mesh.mesh_dim_names or ()
    sizes = {name: mesh.size(i) for i, name in enumerate(names) if mesh.size(i) > 1}
    with collectives_over(groups_of(mesh)):
        found = {name: _measured(mesh.device_type, name, size) for name, size in sizes.items()}
    if path is not None and dist.get_rank() == 0:
        text = json.dumps({name: asdict(rates) for name, rates in found.items()}, indent=1)
        pathlib.Path(path).write_text(text + "\n", encoding="utf-8")
    return found


def _measured(device: str, name: str, size: int) -> AxisRates:
    small_s, large_s = (
        _gather_s(device, name, size, num_bytes) for num_bytes in (_SMALL_BYTES, _LARGE_BYTES)
    )
    sent_bytes = (_LARGE_BYTES - _SMALL_BYTES) * (size - 1) / size
    return AxisRates(sent_bytes / max(large_s - small_s, 1e-9), small_s)


def _gather_s(device: str, name: str, size: int, num_bytes: int) -> float:
    """Returns the seconds of an all-gather of so many bytes in all, on the slowest rank."""
    from .torch_collectives import WAIT

    own = torch.ones(num_bytes // size, dtype=torch.uint8, device=device)
    best = torch.full((), float("inf"), device=device)
    for _ in range(_TIMES + 1):  # the first one also connects the ranks
        dist.barrier()
        start = time.perf_counter()
        made = WAIT(torch.ops.lazyinline.all_gather(own, size, name), own)
        made[-1].item()  # waits until the device is done, too
        taken = torch.full((), time.perf_counter() - start, device=device)
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        best = torch.minimum(best, taken)
    return float(best)


def links_from(links: Links, names: Sequence[str], sizes: Sequence[int]) -> Mapping[str, AxisRates]:
    """Returns rates of the dimensions of a mesh, read from a file if ``links`` is a path."""
    if isinstance(links, (str, os.PathLike)):
        try:
            read = json.loads(pathlib.Path(links).read_text(encoding="utf-8"))
            links = {name: AxisRates(**rates) for name, rates in read.items()}
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise PlanError(
                f"links={str(links)!r} is no file of lazyinline.measure_links: {error}."
            ) from error
    if missing := [n for n, size in zip(names, sizes, strict=True) if size > 1 and n not in links]:
        raise PlanError(
            f"links= has rates of {', '.join(links) or 'nothing'}, and the mesh has the dimension "
            f"{missing[0]!r}. Measure this mesh: lazyinline.measure_links(mesh, path)."
        )
    return links
