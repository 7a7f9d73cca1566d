"""The section that shows an arena: buffers as boxes over time and address, live bytes above."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ...backend.arena.arena import ALIGNMENT, ArenaPlan
from ...backend.arena.live_ranges import Buffers, lower_bound
from ...backend.link.layout import Layout, buffers_of
from ...backend.run.rank_plan import RankPlan
from ..records.made import Memory
from .boxes import Boxes, Calls, IntArray

MOST_BOXES = 5000
MOST_POINTS = 1500
_BACKWARD = ".backward"
"""In the name of every closure that derivation made of another for its backward."""
KINDS = (
    *("scratch of one call", "passed on", "saved for backward", "gradients and results"),
    "between stages",
)


def arena_section(memory: Memory | RankPlan, most_boxes: int = MOST_BOXES) -> dict[str, Any] | None:
    """Returns the boxes and curves of an arena; None if it holds nothing."""
    return (
        _rank_section(memory, most_boxes)
        if isinstance(memory, RankPlan)
        else _program_section(memory, most_boxes)
    )


# ---- one program -----------------------------------------------------------------------------


def _program_section(memory: Memory, most_boxes: int) -> dict[str, Any] | None:
    boxes, layout = _program_boxes(memory), memory.layout
    if boxes is None:
        return None
    return _drawn(boxes, memory.plan, most_boxes) | {
        "num_launches": layout.time,
        "parts": _parts(layout),
        "arena_bytes": memory.arena_bytes,
        "lower_bound_bytes": memory.plan.lower_bound_bytes,
        "live": _curve(Buffers(boxes.birth, boxes.death, boxes.size)),
        "outside": _outside(layout),
    }


def _program_boxes(memory: Memory) -> Boxes | None:
    """The buffers of a plan, and the gradients that lie behind its arena."""
    layout, gradients = memory.layout, memory.gradients
    placed = [i for i, b in enumerate(layout.instances) if b.kind == "arena" and b.num_bytes]
    hosts = [i for i in gradients if layout.instances[i].num_bytes]
    if not (placed or hosts):
        return None
    buffers = buffers_of([layout.instances[i] for i in (*placed, *hosts)])
    offset = [memory.offsets[i] for i in placed] + [gradients[i] for i in hosts]
    is_host = np.arange(len(buffers)) >= len(placed)
    death = np.where(is_host, layout.time, buffers.death)
    calls = Calls(_program_launches(layout), layout.time)
    first, last = calls.spans(buffers.birth, death)
    is_backward = np.array([_BACKWARD in name for name in calls.names] or [False])
    turns = np.append(is_backward[np.array(calls.numbers, np.int64)], True)
    kind = np.where(first == last, 0, 1)
    kind[~turns[first] & turns[last]] = 2
    kind[is_host | (death >= layout.time)] = 3
    size = buffers.aligned(ALIGNMENT).size
    return Boxes(buffers.birth, death, np.array(offset, np.int64), size, kind, calls)


def _program_launches(layout: Layout) -> Iterator[tuple[int, int, str, str]]:
    for part in layout.parts:
        for placed in part.launches:
            # One table per call: launches that share it are of one call.
            yield placed.time, id(placed.bases), placed.block or "between", placed.launch.name


def _parts(layout: Layout) -> list[dict[str, Any]]:
    names = ("forward", "backward") if len(layout.parts) > 1 else ("step",)
    parts, start = [], 0
    for name, part in zip(names, layout.parts, strict=False):
        parts.append({"name": name, "start": start, "end": start + len(part.launches)})
        start += len(part.launches)
    return parts


def _outside(layout: Layout) -> list[list[Any]]:
    """What no plan places: kind, how many, largest sum live at once."""
    rows = []
    for kind, why in (("foreign", "made by an operator that allocates its own result"),):
        found = [b for b in layout.instances if b.kind == kind and b.num_bytes]
        if found:
            rows.append([why, len(found), lower_bound(buffers_of(found))])
    if layout.scratch:
        most = lower_bound(buffers_of(layout.scratch))
        rows.append(["scratch inside one launch", len(layout.scratch), most])
    if layout.workspaces:
        most = sum(b.num_bytes for b in layout.workspaces)
        rows.append(["what cuBLAS works in, per stream", len(layout.workspaces), most])
    return rows


# ---- one rank of a pipeline ------------------------------------------------------------------


def _rank_section(plan: RankPlan, most_boxes: int) -> dict[str, Any] | None:
    boxes = _rank_boxes(plan)
    if boxes is None:
        return None
    foreign = plan.foreign_lives()
    outside = ["made or used inside one launch", len(foreign), plan.foreign_peak_bytes]
    return _drawn(boxes, plan.arena, most_boxes) | {
        "num_launches": plan.num_launches,
        "parts": [{"name": "step", "start": 0, "end": boxes.calls.end}],
        "arena_bytes": plan.arena.peak_bytes,
        "lower_bound_bytes": plan.lower_bound_bytes,
        "live": _curve(plan.lives()),
        "outside": [outside] if len(foreign) else [],
    }


def _rank_boxes(plan: RankPlan) -> Boxes | None:
    """The buffers of all runs of a rank's parts, in the order of its schedule."""
    rows = [row for row in plan.rows() if row.num_bytes]
    if not rows:
        return None
    columns = [[r.birth, r.death, r.offset, r.num_bytes] for r in rows]
    birth, death, offset, size = np.array(columns, np.int64).T
    starts, _ = plan.moments()
    calls = Calls(_rank_launches(plan, starts), starts[-1])
    first, last = calls.spans(birth, death)
    use = np.array([r.use for r in rows])
    kind = np.where(first == last, 0, 1)
    kind[use == "flight"] = 2
    kind[use == "travels"] = 4
    return Boxes(birth, death, offset, -(-size // ALIGNMENT) * ALIGNMENT, kind, calls)


def _rank_launches(
    plan: RankPlan, starts: list[int]
) -> Iterator[tuple[int, tuple[int, int], str, str]]:
    for index, run in enumerate(plan.schedule.runs):
        number = plan.part_number(run.unit, run.part)
        if number is None:
            continue
        where = f"micro-batch {run.flight}, stage {run.unit}"
        for moment, placed in plan.units[run.unit].launches_of(number):
            call = (index, id(placed.bases))
            name = f"{where}: {placed.block or 'between'}"
            yield starts[index] + moment, call, name, placed.launch.name


# ---- both ------------------------------------------------------------------------------------


def _drawn(boxes: Boxes, plan: ArenaPlan, most_boxes: int) -> dict[str, Any]:
    """The boxes that are drawn; of too many, the largest."""
    columns, members, step = boxes.few(most_boxes)
    area = (columns[:, 1] - columns[:, 0]) * columns[:, 3]
    kept = np.sort(np.argsort(-area, kind="stable")[:most_boxes])
    return {
        "boxes": np.column_stack([columns[kept], members[kept]]).tolist(),
        "kinds": KINDS,
        "calls": boxes.calls.numbers,
        "names": boxes.calls.names,
        "launches": boxes.calls.launch_names,
        "num_buffers": len(boxes.birth),
        "step": step,
        "left_out": int(members.sum() - members[kept].sum()),
        "end": boxes.calls.end,
        "peak_bytes": plan.peak_bytes,
        "method": plan.method,
    }


def _curve(buffers: Buffers) -> list[list[int]]:
    """Live bytes over time; of many points, the largest of each stretch."""
    birth, death, size = buffers.birth, buffers.death, buffers.size
    times: IntArray = np.unique(np.concatenate([birth, death]))
    change = np.zeros(len(times), np.int64)
    np.add.at(change, np.searchsorted(times, birth), size)
    np.add.at(change, np.searchsorted(times, death), -size)
    live = np.cumsum(change)
    if len(times) > MOST_POINTS:
        starts = np.linspace(0, len(times), MOST_POINTS, endpoint=False).astype(np.int64)
        tops = np.maximum.reduceat(live, starts)
        return np.column_stack([times[starts], tops]).tolist()
    return np.column_stack([times, live]).tolist()
