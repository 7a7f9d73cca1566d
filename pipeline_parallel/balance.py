"""Balanced stages: units of a program, their costs, and the exact split within memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..reuse.errors import PipelineError
from ..reuse.program import Call, Composite, ModelTensor, Program
from .actions import ActionTable
from .coloring import Path, color_by_bounds, units_of
from .cost import Cost, CostModel
from .cut import Colors
from .partition import partition

# A call is looked into only if it alone takes more than this part of an even share.
_SHARE = 1.05


def color_balanced(
    program: Program, model: CostModel, table: ActionTable, memory_bytes_per_rank: int | None
) -> Colors:
    """Returns the stages with the least predicted time that fit into memory.

    Raises:
        PipelineError: if there are fewer calls than stages, or no split fits.
    """
    num_stages = table.num_stages
    opened = _opened(program, model, num_stages)
    units = units_of(program, opened)
    costs = model.units(program, opened)
    if len(units) < num_stages:
        raise PipelineError(
            f"The model has {len(units)} piece(s) to spread and num_stages={num_stages}. Use fewer "
            "stages, or mark the repeated layer class with lazy_inline."
        )
    bytes_ = _stage_bytes(program, units, costs, table)
    times = _stage_times(costs, num_stages)
    if memory_bytes_per_rank is not None:
        held = max(len(table.stages_of(r)) for r in range(len(table.ranks)))
        times[bytes_ > memory_bytes_per_rank / held] = np.inf
    found = partition(times, table.num_micro_batches)
    if found is None:
        least = _least_bytes(bytes_)
        raise PipelineError(
            f"No split into {num_stages} stages fits memory_bytes_per_rank="
            f"{memory_bytes_per_rank}: the best one still needs {least} bytes on one stage "
            "(parameters, gradients and saved tensors of the micro-batches in flight). Use more "
            "stages, smaller micro-batches, or a schedule with fewer of them in flight."
        )
    return color_by_bounds(program, [units[b][0] for b in found.bounds[1:-1]])


def _opened(program: Program, model: CostModel, num_stages: int) -> set[Path]:
    """Composites to look into: those that no even share could hold, or all if units are few."""
    opened: set[Path] = set()
    while True:
        units = units_of(program, opened)
        costs = [c.forward_s + c.backward_s for c in model.units(program, opened)]
        share = _SHARE * sum(costs) / num_stages
        few = len(units) < num_stages
        found = [
            path
            for (path, call), cost in zip(units, costs, strict=True)
            if isinstance(call.closure, Composite) and (few or cost > share)
        ]
        if not found:
            return opened
        opened.update(found)


def _stage_times(costs: Sequence[Cost], num_stages: int) -> np.ndarray:
    """Times of every run of units; the same on every stage."""
    total = np.concatenate([[0.0], np.cumsum([c.forward_s + c.backward_s for c in costs])])
    size = len(total)
    times = np.broadcast_to(total[None, :] - total[:, None], (num_stages, size, size)).copy()
    times[:, ~np.triu(np.ones((size, size), np.bool_), 1)] = np.inf
    return times


def _stage_bytes(
    program: Program,
    units: Sequence[tuple[Path, Call]],
    costs: Sequence[Cost],
    table: ActionTable,
) -> np.ndarray:
    """Bytes of every run of units on each stage: parameters and gradients once, saved in flight."""
    saved = np.concatenate([[0.0], np.cumsum([c.saved_bytes for c in costs])])
    size = len(saved)
    owned = np.zeros((size, size))
    tensors = [_tensors(program, path) for path, _ in units]
    for first in range(size - 1):
        seen: dict[int, int] = {}
        held = 0
        for last in range(first, size - 1):
            for key, num_bytes in tensors[last].items():
                if key not in seen:
                    seen[key] = num_bytes
                    held += num_bytes
            owned[first, last + 1] = held
    flights = np.array(table.in_flight())[:, None, None]
    return owned[None] + flights * (saved[None, None, :] - saved[None, :, None])


def _tensors(program: Program, path: Path) -> dict[int, int]:
    """Bytes of the model's tensors (and their gradients) that a unit's outermost call uses."""
    sources = dict(zip(program.inputs, program.sources, strict=True))
    found = {}
    for value in program.calls[path[0]].args:
        source = sources.get(value)
        if isinstance(source, ModelTensor):
            copies = 2 if source.tensor.requires_grad else 1
            found[id(source)] = copies * value.type.num_bytes
    return found


def _least_bytes(bytes_: np.ndarray) -> int:
    """The smallest possible largest stage."""
    allowed = np.where(np.triu(np.ones(bytes_.shape[1:], np.bool_), 1), bytes_, np.inf)
    table = np.full(bytes_.shape[1], np.inf)
    table[0] = 0.0
    for stage in allowed:
        table = np.min(np.maximum(table[:, None], stage), axis=0)
    return int(table[-1])
