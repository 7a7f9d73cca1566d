"""A pipeline rank: the memory plan for all units and flights in the schedule's order, and its runs.

The order is known beforehand, so every region of every run gets an offset at link: scratch is
shared by all runs, there are as many slabs as flights overlap, and the memory of a sent value is
not reused until the value has arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from itertools import pairwise
from types import CodeType
from typing import Any, Literal, TypeAlias

import torch

from ...reuse.ir.leaf import without_autocast
from ...reuse.ir.types import TensorType
from ..arena import ArenaPlan, Buffers, lower_bound
from ..launches.torch_native import check_addresses, check_memory
from ..link.placement import Tools
from ..link.torch_generated import Memory, Runner, as_predicted
from ..link.unit_layout import Box, PlacedBuffer, UnitLayout
from .leases import new_memory


@dataclass(frozen=True)
class Run:
    """One run of one part of a unit for a flight."""

    unit: int
    part: str
    flight: int


@dataclass(frozen=True)
class Schedule:
    """A rank's runs in order, and when values are received and sent values have arrived."""

    runs: Sequence[Run]  # in order. A run of a part that its unit does not have does nothing.
    # (unit, way, flight) -> number of the run before which a receive may start.
    posted: Mapping[tuple[int, str, int], int]
    # (unit, way, flight) -> number of the run that waits for the receive.
    arriving: Mapping[tuple[int, str, int], int]
    # (unit, way, flight) -> number of the run by which a sent value has arrived.
    delivered: Mapping[tuple[int, str, int], int]
    # (unit, way, unit): the outbox of one is the inbox of the other, on the same rank.
    handed: Sequence[tuple[int, str, int]]
    # The runs of ``runs`` that start by themselves after a run, before the next one.
    due: Mapping[Run, Sequence[Run]] = field(default_factory=dict)


Key = tuple[int, int, int]  # unit, region, flight
_SUMS = -1  # in place of a unit: a sum, by number
BufferUse: TypeAlias = Literal["part", "flight", "travels"]
"""Whether a buffer is for one run, for several runs of a flight, or between units."""


@dataclass(frozen=True, slots=True)
class BufferRow:
    """A buffer of a run: its life in moments, its offset and size in bytes, and its use."""

    birth: int
    death: int
    offset: int
    num_bytes: int
    use: BufferUse


@dataclass(eq=False)
class RankPlan:
    """One arena for all that a rank runs."""

    units: Mapping[int, UnitLayout]  # by number
    schedule: Schedule
    plan: InitVar[Callable[[Buffers], ArenaPlan]]  # places regions
    tensors_of: Mapping[int, Sequence[int]]  # per unit, of its model tensors and sums among all
    # Types of the sums in the arena, which are live from the first run that adds to them to the
    # last of a unit that uses them. They are the last of all tensors.
    sums: Sequence[TensorType] = ()

    def __post_init__(self, plan: Callable[[Buffers], ArenaPlan]) -> None:
        self._numbers = {run: i for i, run in enumerate(self.schedule.runs)}
        self._part_numbers = {
            unit: {spec.name: i for i, spec in enumerate(layout.specs)}
            for unit, layout in self.units.items()
        }
        self._times = self._run_times()
        # Between two units of one rank, the outbox is the inbox: nothing is copied.
        self._joined = self._join()
        last = max(max(own, default=0) for own in self.tensors_of.values())
        first_sum = 1 + last - len(self.sums)
        self._first = self._first_additions(first_sum)
        lives = self.region_lives()
        self.arena = plan(Buffers.of(lives.values()))
        self._starts = dict(zip(lives, self.arena.offsets.tolist(), strict=True))

    def part_number(self, unit: int, part: str) -> int | None:
        """Returns the number of a part of a unit; None if the unit has no such part."""
        return self._part_numbers[unit].get(part)

    def _join(self) -> dict[Key, Key]:
        """Maps each inbox that is the outbox of another unit of this rank to that outbox."""
        joined: dict[Key, Key] = {}
        flights = sorted({run.flight for run in self.schedule.runs})
        for source, way, target in self.schedule.handed:
            pairs = zip(
                self.units[source].outboxes.get(way, ()),
                self.units[target].inboxes.get(way, ()),
                strict=True,
            )
            for out, into in pairs:
                for flight in flights:
                    a = _root(joined, (source, out.region, flight))
                    b = _root(joined, (target, into.region, flight))
                    if a != b:
                        joined[b] = a
        return joined

    def _run_times(self) -> list[int]:
        """Returns when runs begin, and the end; a run takes one unit more than it has phases."""
        times = [0]
        for run in self.schedule.runs:
            part = self.part_number(run.unit, run.part)
            phases = 1 if part is None else self.units[run.unit].num_phases(part)
            times.append(times[-1] + 1 + phases)
        return times

    def region_lives(self) -> dict[Key, tuple[int, int, int]]:
        """Birth, death and bytes of every region and sum, in phases."""
        found: dict[Key, tuple[int, int, int]] = {}
        times, schedule = self._times, self.schedule
        for unit, layout in self.units.items():
            names = [spec.name for spec in layout.specs]
            inboxes = {b.region: way for way, boxes in layout.inboxes.items() for b in boxes}
            outboxes = {b.region: way for way, boxes in layout.outboxes.items() for b in boxes}
            for flight in sorted({run.flight for run in schedule.runs if run.unit == unit}):
                begins = [times[self._numbers[Run(unit, name, flight)]] + 1 for name in names]
                for number, region in enumerate(layout.regions):
                    birth = begins[region.first] + region.first_phase
                    death = begins[region.last] + region.last_phase + 1
                    # The other rank may write as soon as the receive is posted.
                    if number in inboxes:
                        key = (unit, inboxes[number], flight)
                        arriving = schedule.arriving[key]
                        birth = times[schedule.posted.get(key, arriving)]
                        death = max(death, times[arriving] + 2)
                    # It may read until it has certainly received the value.
                    if number in outboxes:
                        key = (unit, outboxes[number], flight)
                        death = max(death, times[schedule.delivered.get(key, 0)] + 1)
                    self._add_life(found, (unit, number, flight), (birth, death, region.num_bytes))
        ends = {run.unit: times[number + 1] for run, number in self._numbers.items()}
        for place, (tensor, (run, phase)) in enumerate(self._first.items()):
            death = max(ends[unit] for unit, own in self.tensors_of.items() if tensor in own)
            found[_SUMS, place, 0] = (times[run] + 1 + phase, death, self.sums[place].num_bytes)
        return found

    def _is_between(self, unit: int, region: int) -> bool:
        """Whether a region is between units: a box, or a sum for an update."""
        return unit == _SUMS or self.units[unit].regions[region].is_box

    def _first_additions(self, first_sum: int) -> dict[int, tuple[int, int]]:
        """Returns, for each sum in the arena, the run that first adds to it, and the phase."""
        begins: dict[tuple[int, int], int] = {}
        for index, run, _, part in self.parts():
            begins.setdefault((run.unit, part), index)
        found: dict[int, tuple[int, int]] = {}
        for unit, numbers in self.tensors_of.items():
            for place, tensor in enumerate(numbers):
                added = self.units[unit].addition_to(place) if tensor >= first_sum else None
                if added is not None:
                    at = (begins[unit, added[0]], added[1])
                    found[tensor] = min(at, found.get(tensor, at))
        return dict(sorted(found.items()))

    def _add_life(
        self, found: dict[Key, tuple[int, int, int]], key: Key, life: tuple[int, int, int]
    ) -> None:
        root = _root(self._joined, key)
        birth, death, num_bytes = life
        if root in found:
            other = found[root]
            assert other[2] == num_bytes, "two ends of a hand-over differ"
            birth, death = min(birth, other[0]), max(death, other[1])
        found[root] = (birth, death, num_bytes)

    @property
    def lower_bound_bytes(self) -> int:
        """Largest sum of live bytes, each buffer counted by itself. No plan needs less."""
        return lower_bound(self.lives())

    def lives(self) -> Buffers:
        """Returns every buffer with its shortest possible life, in moments; see :meth:`moments`."""
        starts, phases = self.moments()
        found = []
        for (unit, region, _), (birth, death, num_bytes) in self.region_lives().items():
            if self._is_between(unit, region):
                begin, end = phases[birth], phases[death - 1]
                born = max(begin[1] - 1, begin[0])
                dead = end[0] + (end[0] < end[1])
                found.append((born, max(dead, born + 1), num_bytes))
        found += [(birth, death, b.num_bytes) for _, _, b, birth, death in self._placed(starts)]
        return Buffers.of(life for life in found if life[2])

    def moments(self) -> tuple[list[int], list[tuple[int, int]]]:
        """Returns when each run starts and the last ends, and the begin and end of each phase.

        A moment is a launch; each run has one more, in which its results are read. Begin and end
        are equal for the phase before a run.
        """
        starts, phases = [0], list[tuple[int, int]]()
        for run in self.schedule.runs:
            part = self.part_number(run.unit, run.part)
            cuts = [0, 1] if part is None else self.units[run.unit].phase_moments(part)
            phases.append((starts[-1], starts[-1]))
            phases += [(starts[-1] + a, starts[-1] + b) for a, b in pairwise(cuts)]
            starts.append(starts[-1] + cuts[-1])
        phases.append((starts[-1], starts[-1]))
        return starts, phases

    def parts(self) -> Iterator[tuple[int, Run, UnitLayout, int]]:
        """Yields the runs that have a part: number, run, unit, number of the part."""
        for index, run in enumerate(self.schedule.runs):
            number = self.part_number(run.unit, run.part)
            if number is not None:
                yield index, run, self.units[run.unit], number

    def _end_of(self, run: Run, part: int) -> int:
        """Returns the number of the run of another part for the same flight."""
        name = self.units[run.unit].specs[part].name
        return self._numbers[Run(run.unit, name, run.flight)]

    def _placed(self, starts: Sequence[int]) -> Iterator[tuple[Run, int, PlacedBuffer, int, int]]:
        """Yields the buffers without boxes: run, number of part, buffer, birth, death (moments)."""
        for index, run, unit, number in self.parts():
            for buffer in unit.placed(number):
                death = starts[self._end_of(run, buffer.last)] + buffer.death
                yield run, number, buffer, starts[index] + buffer.birth, death

    def rows(self) -> Iterator[BufferRow]:
        """Yields every buffer with its life in moments and its offset, for a picture."""
        starts, phases = self.moments()
        for run, number, buffer, birth, death in self._placed(starts):
            offset = self.start_of((run.unit, buffer.region, run.flight)) + buffer.offset
            use: BufferUse = "part" if buffer.last == number else "flight"
            yield BufferRow(birth, death, offset, buffer.num_bytes, use)
        for key, (birth, death, num_bytes) in self.region_lives().items():
            if self._is_between(*key[:2]):
                begin, end = phases[birth][0], phases[death - 1][1]
                row = (begin, max(end, begin + 1), self.start_of(key), num_bytes)
                yield BufferRow(*row, "travels")

    @property
    def foreign_peak_bytes(self) -> int:
        """Most bytes at one time in tensors that launches allocate themselves."""
        return lower_bound(self.foreign_lives())

    def foreign_lives(self) -> Buffers:
        """Returns the buffers outside the arena, with lives counted in runs."""
        lives = []
        for index, run, layout, number in self.parts():
            # Between two runs only the buffers for later runs are held.
            lives.append((2 * index + 1, 2 * index + 2, layout.foreign_scratch_bytes(number)))
            for instance in layout.hand_overs[number].left:
                _, last, num_bytes = layout.foreign_span(instance)
                lives.append((2 * index + 1, 2 * self._end_of(run, last) + 2, num_bytes))
        return Buffers.of(life for life in lives if life[2])

    @property
    def held_bytes(self) -> int:
        """Most bytes that a step holds: in the arena, and outside of it."""
        return self.arena.peak_bytes + self.foreign_peak_bytes

    @property
    def num_launches(self) -> int:
        """Kernel launches of all runs together."""
        return sum(layout.num_launches[number] for _, _, layout, number in self.parts())

    def set_by(self, unit: int, number: int, flight: int) -> tuple[int, ...]:
        """Returns the unit's sums in the arena that this run is the first to add to."""
        run = self._numbers[Run(unit, self.units[unit].specs[number].name, flight)]
        mine = {tensor for tensor, (first, _) in self._first.items() if first == run}
        return tuple(i for i, tensor in enumerate(self.tensors_of[unit]) if tensor in mine)

    def start_of(self, key: Key) -> int:
        """Returns the start of a region of a flight in the arena, in bytes."""
        return self._starts[_root(self._joined, key)]


def _root(joined: Mapping[Key, Key], key: Key) -> Key:
    while key in joined:
        key = joined[key]
    return key


class RankProgram:
    """Runs the parts of a rank's units in one planned arena.

    A run binds the code of its part to the offsets of its regions, once per different set of them.
    """

    def __init__(self, plan: RankPlan, tools: Tools) -> None:
        self.plan = plan
        self._tools = tools
        self._due: Sequence[Run] = ()
        self._compiled: dict[tuple[Any, ...], CodeType] = {}
        self._bound: dict[tuple[Any, ...], Runner] = {}  # by unit, part and places of regions
        self._runners: dict[tuple[int, int, int], Runner] = {}  # by unit, part and flight
        self._tensors: Sequence[torch.Tensor] = ()
        self._addresses: list[int] = []
        self._arena: torch.Tensor | None = None
        self._foreign: dict[tuple[int, int], dict[int, torch.Tensor]] = {}

    @property
    def num_launches(self) -> int:
        """Kernel launches of all runs together."""
        return self.plan.num_launches

    @property
    def arena_bytes(self) -> int:
        """Bytes of the arena, if there is one already."""
        return 0 if self._arena is None else self._arena.numel()

    def begin(self, tensors: Sequence[torch.Tensor], names: Sequence[str] = ()) -> None:
        """Binds the model's present tensors and the sums; RuntimeError if one was freed."""
        addresses = [t.data_ptr() for t in tensors]
        if self._arena is None:
            self._arena = new_memory(self.plan.arena.peak_bytes, self._tools.place.device)
        if addresses != self._addresses:
            check_memory(tensors, names)
            # Detached: `parameter.data = ...` must not change the memory of a bound tensor.
            self._tensors, self._addresses = [t.detach() for t in tensors], addresses
            self._tensors += self._sums_in(self._arena)
            self._bound.clear()
            self._runners.clear()

    def _sums_in(self, arena: torch.Tensor) -> list[torch.Tensor]:
        """Returns the sums in the arena, which are numbered after the caller's tensors."""
        found = []
        for place, type_ in enumerate(self.plan.sums):
            start = self.plan.start_of((_SUMS, place, 0))
            whole = arena.narrow(0, start, type_.num_bytes).view(type_.dtype)
            found.append(whole.as_strided(type_.shape, type_.stride))
        return found

    def forget(self) -> None:
        """Drops the tensors outside the arena that runs have left for later runs."""
        self._foreign.clear()
        self._due = ()

    def run_due(self) -> None:
        """Runs what is due after the last run; not within it, since its sends go first."""
        due, self._due = self._due, ()
        for run in due:
            self.run(run.unit, run.part, run.flight, ())

    @without_autocast()
    def run(
        self, unit: int, part: str, flight: int, given: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Runs a part for a flight; returns what the caller gets, which later runs overwrite."""
        self.run_due()
        self._due = self.plan.schedule.due.get(Run(unit, part, flight), ())
        number = self.plan.part_number(unit, part)
        if number is None:
            return []
        layout = self.plan.units[unit]
        foreign = self._foreign.setdefault((unit, flight), {})
        between = layout.hand_overs[number]
        inputs = [given[i] for i in between.given]
        check_addresses(inputs)
        inputs += [foreign[i] for i in between.taken]
        for instance in between.done:
            del foreign[instance]
        found = self._runner(unit, number, flight)(inputs)
        num_returned = len(layout.specs[number].returned)
        foreign.update(zip(between.left, found[num_returned:], strict=True))
        return found[:num_returned]

    def inbox(self, unit: int, way: str, flight: int) -> list[torch.Tensor]:
        """Returns flat tensors to receive the values of another rank into."""
        return self._views(unit, self.plan.units[unit].inboxes.get(way, ()), flight)

    def outbox(self, unit: int, way: str, flight: int) -> list[torch.Tensor]:
        """Returns the values for another rank, as flat tensors."""
        return self._views(unit, self.plan.units[unit].outboxes.get(way, ()), flight)

    def _views(self, unit: int, boxes: Sequence[Box], flight: int) -> list[torch.Tensor]:
        assert self._arena is not None
        found = []
        for box in boxes:
            start = self.plan.start_of((unit, box.region, flight))
            whole = self._arena.narrow(0, start, box.wire.num_bytes)
            found.append(whole.view(box.wire.type.dtype))
        return found

    def _runner(self, unit: int, number: int, flight: int) -> Runner:
        known = self._runners.get((unit, number, flight))
        if known is not None:
            return known
        layout = self.plan.units[unit]
        starts = {r: self.plan.start_of((unit, r, flight)) for r in layout.used_regions[number]}
        sets = self.plan.set_by(unit, number, flight)
        # Flights whose regions have equal offsets share one bound function.
        places = (unit, number, sets, *starts.values())
        if places not in self._bound:
            self._bound[places] = self._bind(unit, number, sets, starts)
        return self._runners.setdefault((unit, number, flight), self._bound[places])

    def _bind(
        self, unit: int, number: int, sets: tuple[int, ...], starts: Mapping[int, int]
    ) -> Runner:
        layout, arena = self.plan.units[unit], self._arena
        code = layout.code_of_first(number, sets) if sets else layout.codes[number]
        assert arena is not None
        own = self.plan.tensors_of[unit]
        tensors = {instance: self._tensors[own[i]] for instance, i in layout.fixed.items()}
        offsets = layout.offsets_from(number, starts)
        memory = Memory(arena, offsets, tensors, self._tools, starts)
        key = (unit, number, sets)
        if key not in self._compiled:
            self._compiled[key] = compile(code.source, "<lazyinline program>", "exec")
        # Unplanned closures may return tensors on other devices than the arena's.
        names = {} if layout.results == "planned" else {"as_predicted": as_predicted}
        return memory.runner(code, self._compiled[key], **names)
