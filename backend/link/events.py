"""The events of a generated function: what lets two streams run beside each other, and no more.

Each is recorded on one stream after a launch, and the other stream waits for it before another one.
What runs on the second stream ends with the call of its closure: the main stream waits for it
before the next call, and at the end of the function, so that a CUDA graph can be captured of it.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..launches.kernel_list import ENTRY, Stream
from .layout import PlacedLaunch

BESIDE = "with beside(second): "
"""Comes before a launch on the second stream."""


class Events:
    """Lines to write between the launches of a part; none where all are on one stream.

    Args:
        launches: of the part.

    Attributes:
        is_open: whether something may still run on the second stream, so far.
    """

    def __init__(self, launches: Sequence[PlacedLaunch]) -> None:
        awaited = [(one.call, number) for one in launches for number in one.launch.waits_for]
        self._entries = {call for call, number in awaited if number == ENTRY}
        self._awaited = {call + number for call, number in awaited if number != ENTRY}
        self._is_used = any(one.launch.stream == "second" for one in launches)
        self._call = -1
        self.is_open = False

    def begin(self) -> list[str]:
        """Returns what comes first."""
        return ["  main = current_stream()"] if self._is_used else []

    def before(self, placed: PlacedLaunch) -> list[str]:
        """Returns what comes before a launch."""
        if not self._is_used:
            return []
        lines = []
        if placed.call != self._call:
            lines += self.end()
            self._call = placed.call
            if placed.call in self._entries:
                lines.append(f"  {_event(ENTRY)} = {_recorded('main')}")
        stream = placed.launch.stream
        return lines + [f"  {stream}.wait_event({_event(n)})" for n in placed.launch.waits_for]

    def after(self, placed: PlacedLaunch) -> list[str]:
        """Returns what comes after a launch."""
        stream = placed.launch.stream
        self.is_open = self.is_open or stream == "second"
        if placed.time not in self._awaited:
            return []
        return [f"  {_event(placed.time - placed.call)} = {_recorded(stream)}"]

    def end(self) -> list[str]:
        """Returns what comes after the last launch of a call."""
        if not self.is_open:
            return []
        self.is_open = False
        return [f"  main.wait_event({_recorded('second')})"]


def _recorded(stream: Stream) -> str:
    return f"{stream}.record_event()"


def _event(number: int) -> str:
    """The name of what is recorded after a launch of a call; the next call uses it again."""
    return "entry" if number == ENTRY else f"event{number}"
