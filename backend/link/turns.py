"""When calls beside others may run, and what they wait for: per inlined copy, by slots alone.

Which calls those are is found per body (:mod:`.beside_calls`). Calls that follow one another and
are wholly on one stream each are a *stretch*: in it the second stream begins after what it needs
and where its body says, the main stream waits for it before the first call that reads what it made,
and what still runs at the end of a stretch is waited for there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ...reuse.ir.program import Leaf, Program
from ..gpu.streams import may_move_whole, wholly_on
from ..launches.kernel_list import ENTRY, KernelList, Stream
from .beside_calls import OWN, Placing
from .link import Copy, FlatProgram, Launch

Placings = Callable[[Program], Sequence[Placing]]
"""Where each call of a body is."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A call in a stretch. Moments are launches, counted from the start of its flat program.

    Attributes:
        kernels: its closure's, on one stream.
        stream: that stream.
        start, stop: of the stretch: what is waited for counts from its start.
        waits_for: a launch of the other stream that ends before this call begins.
        begin, end: from when till when it may run, on the second stream.
        beside: whether something issued before it may still run on the second stream.
    """

    kernels: KernelList
    stream: Stream
    start: int
    stop: int
    waits_for: tuple[int, ...]
    begin: int
    end: int
    beside: bool

    @property
    def is_second(self) -> bool:
        """Whether it is on the second stream."""
        return self.stream == "second"


def turns(
    flat: FlatProgram, placings: Placings, kernel_lists: Mapping[Leaf, KernelList]
) -> dict[int, Turn]:
    """Returns the calls of a flat program that are in a stretch, by number.

    Args:
        flat: the program.
        placings: where each call of a body is.
        kernel_lists: of its leaves, on one stream.
    """
    found: dict[int, Turn] = {}
    places = _Places(placings)
    lists = _Lists(kernel_lists)
    stretch: list[_Member] = []
    time = 0
    for number, launch in enumerate(flat.launches):
        place, starts = places.of(launch)
        wanted = place.sums if launch.follows else "second"
        is_second = place.side == wanted == "second" and lists.may_move(launch.leaf)
        stream: Stream = "second" if is_second else "main"
        kernels = lists.on(launch.leaf, stream)
        if place.side == "own" and kernels.launches:
            found.update(_of_stretch(stretch))
            stretch = []
        else:
            stretch.append(_Member(number, launch, kernels, stream, starts, time))
        time += len(kernels.launches)
    found.update(_of_stretch(stretch))
    return found


class _Lists:
    """Kernel lists on one stream or the other, each made once."""

    def __init__(self, kernel_lists: Mapping[Leaf, KernelList]) -> None:
        self._lists = kernel_lists
        self._on_second: dict[Leaf, KernelList] = {}
        self._may_move: dict[Leaf, bool] = {}

    def on(self, leaf: Leaf, stream: Stream) -> KernelList:
        """Returns the launches of a leaf, on a stream."""
        if stream == "main":
            return self._lists[leaf]
        if leaf not in self._on_second:
            self._on_second[leaf] = wholly_on(self._lists[leaf], stream)
        return self._on_second[leaf]

    def may_move(self, leaf: Leaf) -> bool:
        """Whether all of a leaf can be on the second stream."""
        if leaf not in self._may_move:
            self._may_move[leaf] = may_move_whole(self._lists[leaf])
        return self._may_move[leaf]


class _Places:
    """Where launches are: as their body says, or one that it was inlined into."""

    def __init__(self, placings: Placings) -> None:
        self._placings = placings
        self._outer: dict[Copy, tuple[Placing, Copy, int] | None] = {}
        self._last: tuple[Copy, int] | None = None

    def of(self, launch: Launch) -> tuple[Placing, bool]:
        """Returns where a launch is, and whether a second stream may fork before it."""
        if launch.copy is None:
            return OWN, False
        found = self._found(launch.copy, launch.number)
        if found is None:
            self._last = None
            return OWN, False
        placing, copy, number = found
        is_first = self._last is None or self._last[0] is not copy or self._last[1] != number
        self._last = (copy, number)
        return placing, placing.starts and is_first

    def _found(self, copy: Copy, number: int) -> tuple[Placing, Copy, int] | None:
        """Returns what was found for a call, or for the outermost one that it is part of."""
        outer = self._of_copy(copy)
        if outer is not None:
            return outer
        placing = self._placings(copy.body)[number]
        return None if placing.side == "own" else (placing, copy, number)

    def _of_copy(self, copy: Copy) -> tuple[Placing, Copy, int] | None:
        if copy.within is None:
            return None
        if copy not in self._outer:
            self._outer[copy] = self._found(copy.within, copy.number)
        return self._outer[copy]


@dataclass(frozen=True, slots=True)
class _Member:
    """A call in a stretch, and the moment of its first launch."""

    number: int
    launch: Launch
    kernels: KernelList
    stream: Stream
    starts: bool
    time: int


_Made = tuple[int, int]
"""The last launch of the main stream, and of the second, that a slot needs: from a stretch's start.
"""


@dataclass
class _Stretch:
    """How far each stream is, and how much of it the other has waited for."""

    start: int
    main: int = ENTRY
    fork: int = ENTRY
    ended_main: int = ENTRY - 1
    ended_second: int = ENTRY
    made: dict[int, _Made] = field(default_factory=dict)
    open: dict[int, int] = field(default_factory=dict)  # calls on the second: their last launches
    begins: dict[int, int] = field(default_factory=dict)
    ends: dict[int, int] = field(default_factory=dict)

    def add(self, member: _Member) -> tuple[tuple[int, ...], bool]:
        """Adds the next call; returns what it waits for, and whether others may still run."""
        if member.starts:
            self.fork = self.main
        needed = self._needed(member.launch)
        first = member.time - self.start
        last = first + len(member.kernels.launches) - 1
        if last < first:  # it launches nothing: its results are views of what it is given
            self.made.update(dict.fromkeys(member.launch.results, needed))
            return (), False
        if member.stream == "main":
            waits = self._joined(needed[1], member.time)
            self.main = last
            self.made.update(dict.fromkeys(member.launch.results, (last, ENTRY)))
            return waits, bool(self.open)
        waits = self._forked(max(needed[0], self.fork))
        self.begins[member.number] = self.start + self.ended_main + 1
        self.open[member.number] = last
        self.made.update(dict.fromkeys(member.launch.results, (ENTRY, last)))
        return waits, True

    def end(self, time: int) -> None:
        """Notes that all of it has ended."""
        self.ends.update(dict.fromkeys(self.open, time))
        self.open.clear()

    def _needed(self, launch: Launch) -> _Made:
        made = [self.made.get(slot, (ENTRY, ENTRY)) for slot in launch.operands]
        return max((m for m, _ in made), default=ENTRY), max((s for _, s in made), default=ENTRY)

    def _joined(self, needed: int, time: int) -> tuple[int, ...]:
        if needed <= self.ended_second:
            return ()
        self.ended_second = needed
        for number in [n for n, last in self.open.items() if last <= needed]:
            self.ends[number] = time
            del self.open[number]
        return (needed,)

    def _forked(self, needed: int) -> tuple[int, ...]:
        if needed <= self.ended_main:
            return ()
        self.ended_main = needed
        return (needed,)


def _of_stretch(members: Sequence[_Member]) -> Iterator[tuple[int, Turn]]:
    if not any(member.stream == "second" for member in members):
        return
    stretch = _Stretch(members[0].time)
    waits = [stretch.add(member) for member in members]
    last = members[-1]
    stop = last.time + len(last.kernels.launches)
    stretch.end(stop)
    for member, (waits_for, beside) in zip(members, waits, strict=True):
        begin = stretch.begins.get(member.number, member.time)
        end = stretch.ends.get(member.number, member.time + len(member.kernels.launches))
        turn = Turn(
            member.kernels, member.stream, stretch.start, stop, waits_for, begin, end, beside
        )
        yield member.number, turn
