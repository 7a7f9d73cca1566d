"""Buffers over time and address as boxes, and fewer of them where a picture cannot show so many.

Buffers that are live in the same calls and lie side by side then become one box, whose time is that
of whole calls; if need be also those that differ in time by less than can be seen.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]

_RESOLUTIONS = (1600, 800, 400, 200)
"""Parts of the whole time to which boxes are drawn where there are too many."""


class Calls:
    """Which launch runs at each moment, and in which call.

    Args:
        launches: in order: its moment, what tells its call from the one before, the name of the
            call, and its own.
        end: the number of moments.

    Attributes:
        end: the number of moments.
        numbers: for each call, in order, which of the names it has.
        names: of calls, each once.
        launch_names: of launches, each once.
    """

    def __init__(self, launches: Iterable[tuple[int, Hashable, str, str]], end: int) -> None:
        self.end = end
        self.numbers: list[int] = []
        names, launch_names = dict[str, int](), dict[str, int]()
        call_of, launch_of = np.zeros(end + 1, np.int64), np.zeros(end + 1, np.int64)
        number, before, filled = -1, None, 0
        for moment, call, name, launch_name in launches:
            # A moment without a launch belongs to the call before it.
            call_of[filled:moment] = max(number, 0)
            if call != before:
                number, before = number + 1, call
                self.numbers.append(names.setdefault(name, len(names)))
            call_of[moment], filled = number, moment + 1
            launch_of[moment] = launch_names.setdefault(launch_name, len(launch_names))
        call_of[filled:end] = max(number, 0)
        call_of[end] = number + 1
        self.names, self.launch_names = list(names), list(launch_names)
        self._call_of, self._launch_of = call_of, launch_of
        starts = np.flatnonzero(np.diff(call_of[:end], prepend=-1))
        self._starts = np.append(starts, end)

    def spans(self, birth: IntArray, death: IntArray) -> tuple[IntArray, IntArray]:
        """The calls in which each buffer is made and is used last."""
        first = self._call_of[np.minimum(birth, self.end)]
        return first, self._call_of[np.minimum(death - 1, self.end)]

    def begin(self, call: IntArray) -> IntArray:
        """When calls start; the end, for what is after the last."""
        return self._starts[np.minimum(call, len(self._starts) - 1)]

    def launches_at(self, moment: IntArray) -> IntArray:
        """Numbers of the names of the launches at these moments."""
        return self._launch_of[np.minimum(moment, self.end)]


@dataclass(frozen=True, eq=False)
class Boxes:
    """Buffers as columns: when they live, where, of which kind; and what runs meanwhile."""

    birth: IntArray
    death: IntArray
    offset: IntArray
    size: IntArray
    kind: IntArray
    calls: Calls

    def few(self, most: int) -> tuple[IntArray, IntArray, int]:
        """Returns rows of buffers, or of ever longer runs of them; and what times may be off.

        A row is birth, death, offset, size, kind, call and launch; beside it stands how many
        buffers it is.
        """
        if len(self.birth) <= most:
            return *self._exact(), 0
        for parts in (self.calls.end, *_RESOLUTIONS):
            step = max(self.calls.end // parts, 1)
            columns, members = self._merged(step)
            if len(columns) <= most:
                break
        return columns, members, step

    def _exact(self) -> tuple[IntArray, IntArray]:
        """A row for each buffer."""
        made = self.calls.launches_at(self.birth)
        first, _ = self.calls.spans(self.birth, self.death)
        columns = [self.birth, self.death, self.offset, self.size, self.kind, first, made]
        return np.column_stack(columns), np.ones(len(self.birth), np.int64)

    def _merged(self, step: int) -> tuple[IntArray, IntArray]:
        """A row for each run of neighbours that live in the same calls.

        Args:
            step: launches by which their times may differ.
        """
        first, last = self.calls.spans(self.birth, self.death)
        begin, end = self.calls.begin(first), self.calls.begin(last + 1)
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


def _groups(same: npt.NDArray[np.bool_]) -> IntArray:
    """Numbers runs, from whether each member is of the same run as the one before."""
    return np.cumsum(~same, dtype=np.int64)


def _spans(group: IntArray) -> tuple[IntArray, IntArray]:
    """Where each run of equal numbers starts and ends."""
    starts = np.flatnonzero(np.diff(group, prepend=group[0] - 1))
    return starts, np.append(starts[1:], len(group))
