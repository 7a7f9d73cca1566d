"""The section that shows the arena: buffers as boxes over time and address, live bytes above.

A program of many calls has more buffers than a picture can show. Buffers that are live in the same
calls and lie side by side then become one box, whose time is that of whole calls; if need be also
those that differ in time by less than can be seen. What is still too much is left out, the smallest
first, and counted.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ...backend.arena.arena import ALIGNMENT
from ...backend.arena.live_ranges import lower_bound
from ...backend.link.layout import Layout, buffers_of
from ..records.made import Memory

MOST_BOXES = 5000
MOST_POINTS = 1500
_RESOLUTIONS = (1600, 800, 400, 200)
"""Parts of the whole time to which boxes are drawn where there are too many."""
_BACKWARD = ".backward"
"""In the name of every closure that derivation made of another for its backward."""
KINDS = ("scratch of one call", "passed on", "saved for backward", "gradients and results")

IntArray = npt.NDArray[np.int64]


def arena_section(memory: Memory, most_boxes: int = MOST_BOXES) -> dict[str, Any] | None:
    """Returns the boxes and curves of an arena; None if it holds nothing."""
    boxes = _Boxes(memory)
    if not len(boxes.birth):
        return None
    live = _curve(boxes.birth, boxes.death, boxes.size)
    columns, members, step = boxes.few(most_boxes)
    area = (columns[:, 1] - columns[:, 0]) * columns[:, 3]
    kept = np.sort(np.argsort(-area, kind="stable")[:most_boxes])
    left = int(members.sum() - members[kept].sum())
    return {
        "boxes": np.column_stack([columns[kept], members[kept]]).tolist(),
        "kinds": KINDS,
        "calls": boxes.call_names,
        "names": boxes.names,
        "launches": boxes.launch_names,
        "num_buffers": len(boxes.birth),
        "step": step,
        "left_out": left,
        "num_launches": memory.layout.time,
        "parts": _parts(memory.layout),
        "peak_bytes": memory.plan.peak_bytes,
        "arena_bytes": memory.arena_bytes,
        "lower_bound_bytes": memory.plan.lower_bound_bytes,
        "method": memory.plan.method,
        "live": live,
        "outside": _outside(memory.layout),
    }


class _Boxes:
    """Buffers of a plan as columns, with the calls and launches that made them."""

    def __init__(self, memory: Memory) -> None:
        layout = memory.layout
        placed = [i for i, b in enumerate(layout.instances) if b.kind == "arena" and b.num_bytes]
        gradients = memory.gradients
        hosts = [i for i in gradients if layout.instances[i].num_bytes]
        shown = [layout.instances[i] for i in (*placed, *hosts)]
        buffers = buffers_of(shown)
        self.birth, self.death = buffers.birth, buffers.death.copy()
        self.size = buffers.aligned(ALIGNMENT).size
        self.offset = np.array(
            [memory.offsets[i] for i in placed] + [gradients[i] for i in hosts], np.int64
        )
        self._end = layout.time
        self._is_host = np.arange(len(shown)) >= len(placed)
        self.death[self._is_host] = layout.time
        self._number_launches(layout)
        self.kind = self._kinds()

    def _number_launches(self, layout: Layout) -> None:
        """Says of each time which launch runs and in which call."""
        calls, launches = dict[str, int](), dict[str, int]()
        call_of, launch_of = (
            np.zeros(layout.time + 1, np.int64),
            np.zeros(layout.time + 1, np.int64),
        )
        number, before = -1, None
        self.call_names: list[int] = []
        for part in layout.parts:
            for placed in part.launches:
                # One table per call: launches that share it are of one call.
                if placed.bases is not before:
                    number, before = number + 1, placed.bases
                    self.call_names.append(calls.setdefault(placed.block or "between", len(calls)))
                call_of[placed.time] = number
                launch_of[placed.time] = launches.setdefault(placed.launch.name, len(launches))
        call_of[layout.time] = number + 1
        self.names = list(calls)
        self.launch_names = list(launches)
        self._call_of, self._launch_of = call_of, launch_of
        starts = np.flatnonzero(np.diff(call_of[: layout.time], prepend=-1))
        self._start_of_call = np.append(starts, layout.time)

    def _kinds(self) -> IntArray:
        first, last = self._calls()
        is_backward = np.array([_BACKWARD in name for name in self.names] or [False])
        turns = np.append(is_backward[np.array(self.call_names, np.int64)], True)
        kind = np.where(first == last, 0, 1)
        kind[~turns[first] & turns[last]] = 2
        kind[self._is_host | (self.death >= self._end)] = 3
        return kind

    def _calls(self) -> tuple[IntArray, IntArray]:
        """The calls in which each buffer is made and is used last."""
        end = len(self._call_of) - 1
        first = self._call_of[np.minimum(self.birth, end)]
        return first, self._call_of[np.minimum(self.death - 1, end)]

    def exact(self) -> tuple[IntArray, IntArray]:
        """Returns a row for each buffer, and how many buffers it stands for."""
        end = len(self._call_of) - 1
        made = self._launch_of[np.minimum(self.birth, end)]
        first, _ = self._calls()
        columns = [self.birth, self.death, self.offset, self.size, self.kind, first, made]
        return np.column_stack(columns), np.ones(len(self.birth), np.int64)

    def merged(self, step: int) -> tuple[IntArray, IntArray]:
        """Returns a row for each run of neighbours that live in the same calls.

        Args:
            step: launches by which their times may differ.
        """
        first, last = self._calls()
        calls_end = len(self._start_of_call) - 1
        begin = self._start_of_call[np.minimum(first, calls_end)]
        end = self._start_of_call[np.minimum(last + 1, calls_end)]
        alike = np.column_stack([begin // step, -(-end // step), self.kind])
        order = np.lexsort((self.offset, *alike.T))
        same = np.ones(len(order), np.bool_)
        same[0] = False
        same[1:] = (alike[order][1:] == alike[order][:-1]).all(axis=1)
        # Scratch of one call lies on top of itself: what overlaps or touches is one box.
        ends = (self.offset + self.size)[order]
        reach = np.zeros(len(order), np.int64)
        for start, stop in zip(*_spans(_groups(same)), strict=True):
            reach[start:stop] = np.maximum.accumulate(ends[start:stop])
        same[1:] &= self.offset[order][1:] <= reach[:-1]
        starts, stops = _spans(_groups(same))
        low, high = self.offset[order][starts], np.maximum.reduceat(ends, starts)
        columns = [
            np.minimum.reduceat(begin[order], starts),
            np.maximum.reduceat(end[order], starts),
            low,
            high - low,
            self.kind[order][starts],
            np.minimum.reduceat(first[order], starts),
            np.full(len(starts), -1),
        ]
        return np.column_stack(columns), stops - starts

    def few(self, most: int) -> tuple[IntArray, IntArray, int]:
        """Returns rows of buffers, or of ever longer runs of them; and what times may be off."""
        if len(self.birth) <= most:
            return *self.exact(), 0
        for parts in (self._end, *_RESOLUTIONS):
            step = max(self._end // parts, 1)
            columns, members = self.merged(step)
            if len(columns) <= most:
                break
        return columns, members, step


def _groups(same: npt.NDArray[np.bool_]) -> IntArray:
    """Numbers runs, from whether each member is of the same run as the one before."""
    return np.cumsum(~same, dtype=np.int64)


def _spans(group: IntArray) -> tuple[IntArray, IntArray]:
    """Where each run of equal numbers starts and ends."""
    starts = np.flatnonzero(np.diff(group, prepend=group[0] - 1))
    return starts, np.append(starts[1:], len(group))


def _curve(birth: IntArray, death: IntArray, size: IntArray) -> list[list[int]]:
    """Live bytes over time; of many points, the largest of each stretch."""
    times = np.unique(np.concatenate([birth, death]))
    change = np.zeros(len(times), np.int64)
    np.add.at(change, np.searchsorted(times, birth), size)
    np.add.at(change, np.searchsorted(times, death), -size)
    live = np.cumsum(change)
    if len(times) > MOST_POINTS:
        starts = np.linspace(0, len(times), MOST_POINTS, endpoint=False).astype(np.int64)
        tops = np.maximum.reduceat(live, starts)
        return np.column_stack([times[starts], tops]).tolist()
    return np.column_stack([times, live]).tolist()


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
    return rows
