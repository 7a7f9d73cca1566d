"""Balanced stages: units of a program, their costs, and the exact split within memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...reuse.errors import PipelineError
from ...reuse.ir.program import Call, Composite, ModelTensor, Program
from ..schedule.actions import ActionTable
from .call_costs import CallCost, CallCosts
from .coloring import Path, color_by_bounds, units_of
from .cut import Colors
from .partition import partition

# A call is looked into only if it alone takes more than this part of an even share.
_SHARE = 1.05


def color_balanced(
    program: Program, model: CallCosts, table: ActionTable, memory_bytes_per_rank: int | None
) -> Colors:
    """Returns the stages with the least predicted time that fit into memory.

    What has to be computed again so that a stage fits counts as its time.

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
    times = _stage_times(costs, num_stages)
    owned = _owned_bytes(program, units)
    flights = np.array(table.in_flight())[:, None, None]
    if memory_bytes_per_rank is not None:
        room = memory_bytes_per_rank / stages_per_rank(table) - owned
        times += extra_seconds([c.variants for c in costs], room[None] / flights - _kept(costs))
    found = partition(times, table.num_micro_batches)
    if found is None:
        smallest = _run_sums([c.variants[0][0] for c in costs]) + _kept(costs)
        least = _least_bytes(owned[None] + flights * smallest[None])
        raise PipelineError(
            f"No split into {num_stages} stages fits memory_bytes_per_rank="
            f"{memory_bytes_per_rank}: the best one still needs {least} bytes on one stage "
            "(parameters, gradients and saved tensors of the micro-batches in flight). Use more "
            "stages, smaller micro-batches, or a schedule with fewer of them in flight."
        )
    return color_by_bounds(program, [units[b][0] for b in found.bounds[1:-1]])


def _opened(program: Program, model: CallCosts, num_stages: int) -> set[Path]:
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


def _stage_times(costs: Sequence[CallCost], num_stages: int) -> np.ndarray:
    """Times of every run of units; the same on every stage."""
    total = np.concatenate([[0.0], np.cumsum([c.forward_s + c.backward_s for c in costs])])
    size = len(total)
    times = np.broadcast_to(total[None, :] - total[:, None], (num_stages, size, size)).copy()
    times[:, ~np.triu(np.ones((size, size), np.bool_), 1)] = np.inf
    return times


def _run_sums(numbers: Sequence[float]) -> np.ndarray:
    """Sums over every run of units."""
    total = np.concatenate([[0.0], np.cumsum(numbers)])
    return total[None, :] - total[:, None]


def _kept(costs: Sequence[CallCost]) -> np.ndarray:
    return _run_sums([c.kept_bytes for c in costs])


def _owned_bytes(program: Program, units: Sequence[tuple[Path, Call]]) -> np.ndarray:
    """Bytes of parameters and gradients of every run of units; what several units use once."""
    size = len(units) + 1
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
    return owned


def extra_seconds(
    variants: Sequence[Sequence[tuple[int, float]]], room_bytes: np.ndarray
) -> np.ndarray:
    """Returns what every run of units computes again so that what it saves fits.

    Saved bytes are bought where they spare most seconds each; a unit that would fit in part only
    is left out. So the seconds are reached, and at most one unit's above the least there are.

    Args:
        variants: for each unit, bytes saved and seconds computed again, fewest bytes first.
        room_bytes: ``room_bytes[s, i, j]`` is what units i to j - 1 may save on stage s.

    Returns:
        The seconds, of the shape of ``room_bytes``; infinite where even the fewest bytes are too
        many.
    """
    room = room_bytes - _run_sums([v[0][0] for v in variants])[None]
    seconds = np.broadcast_to(_run_sums([v[0][1] for v in variants]), room.shape).copy()
    seconds[room < 0] = np.inf
    kinds: dict[tuple[tuple[int, float], ...], list[int]] = {}
    for unit, options in enumerate(variants):
        kinds.setdefault(tuple(options), []).append(unit)
    steps = [(step, units) for options, units in kinds.items() for step in hull_steps(options)]
    taken: dict[int, np.ndarray] = {}  # units of each kind that went up to the step before
    for (num_bytes, spared), units in sorted(steps, key=lambda s: -s[0][1] / s[0][0]):
        ones = np.zeros(len(variants))
        ones[units] = 1.0
        before = taken.get(units[0], _run_sums(list(ones))[None])
        count = np.clip(np.floor(room / num_bytes), 0.0, before)
        taken[units[0]] = count
        room = room - count * num_bytes
        seconds = seconds - count * spared
    return seconds


def hull_steps(options: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """From variant to variant, those that pay best: bytes added, seconds spared; best first."""
    found, here = [], 0
    while here < len(options) - 1:
        rest = range(here + 1, len(options))
        slopes = [
            ((options[here][1] - options[i][1]) / (options[i][0] - options[here][0]), i)
            for i in rest
            if options[i][0] > options[here][0]
        ]
        slope, there = max(slopes, default=(0.0, 0))
        if slope <= 0.0:
            break
        found.append((options[there][0] - options[here][0], options[here][1] - options[there][1]))
        here = there
    return found


def stages_per_rank(table: ActionTable) -> int:
    """The most stages that one rank holds."""
    return max(len(table.stages_of(r)) for r in range(len(table.ranks)))


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
