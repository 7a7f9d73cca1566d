"""The layout of a pipeline stage: its parts laid out once, for any number of micro-batches.

A unit (a pipeline stage) has a few parts: a forward and a backward, or a forward and two halves of
a backward. They run for one flight (a micro-batch) after the other, interleaved with other flights
and units. Each part is laid out once. Each buffer belongs to one of three kinds of region:

* scratch is live within one phase of a part (a run of its launches), and is placed once per phase,
* a slab holds the buffers that are live from one phase to another, one slab per pair of phases,
* an inbox or outbox holds one value that is received from or sent to another unit.

A run gets the addresses of its regions, and nothing else. If memory is not planned, each closure is
one launch that allocates its results, so that only boxes are in the arena.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, TypeAlias

import numpy as np

from ...reuse.ir.program import Leaf
from ...reuse.ir.types import TensorType, Wire, contiguous_stride, reach
from ..arena import ALIGNMENT, ArenaPlan, Buffers, lower_bound
from ..launches.kernel_list import KernelList
from .layout import BufferKind, Layout, Part, Placed, PlacedLaunch, buffers_of
from .link import FlatProgram
from .program_writer import CodeWriter
from .torch_generated import GeneratedCode

PlanBuffers = Callable[[Buffers], ArenaPlan]
UnitResults: TypeAlias = Literal["planned", "allocated"]


@dataclass(frozen=True)
class Source:
    """Names the origin of an input of a part.

    ``kind``: ``"inbox"`` (number ``index`` of the part's own way), ``"model"``, ``"given"`` (passed
    by the caller in each run), ``"output"`` or ``"input"`` (number ``index`` of ``part``).
    """

    kind: Literal["inbox", "model", "given", "output", "input"]
    index: int
    part: str = ""


@dataclass(frozen=True)
class PartSpec:
    """One part of a unit."""

    name: str  # of the part
    way: str  # which inboxes and outboxes are its own, such as ``"F"``
    flat: FlatProgram  # its program
    sources: Sequence[Source]  # where each input comes from
    inboxes: Sequence[Wire] = ()  # values received from another unit, for it or for a later part
    outboxes: Sequence[tuple[int, Wire]] = ()  # outputs that are sent to another unit
    returned: Sequence[int] = ()  # outputs that the caller gets
    # Output -> number of the tensor it is added to, counted after the model's.
    sums: Mapping[int, int] = field(default_factory=dict)
    # Numbers of the model's tensors that the caller writes to after the part.
    written: Sequence[int] = ()


@dataclass(frozen=True)
class Region:
    """A range of bytes that is placed as a whole."""

    num_bytes: int
    first: int  # number of the first part that uses it
    last: int  # number of the last one
    first_phase: int  # phase of the first part; each part's are counted from 0
    last_phase: int  # phase of the last one
    is_box: bool  # whether it is an inbox or outbox

    @property
    def is_kept(self) -> bool:
        """Whether the region may outlive a part."""
        return self.is_box or self.first < self.last


@dataclass(frozen=True)
class Box:
    """A region for a value that is sent or received, and the form of the value."""

    region: int
    wire: Wire


@dataclass(frozen=True)
class HandOver:
    """Lists the tensors outside the arena that a run of a part takes and passes on."""

    given: Sequence[int]  # which of the caller's tensors its code takes, in order
    # Buffers outside the arena that an earlier part allocated and this one uses.
    taken: Sequence[int]
    left: Sequence[int]  # buffers outside the arena that it allocates for later parts
    done: Sequence[int]  # those of ``taken`` that no later part uses


@dataclass(frozen=True, slots=True)
class PlacedBuffer:
    """A buffer that a part makes."""

    birth: int  # counted from the start of the part that makes it
    death: int  # counted from the start of the last part that uses it
    last: int  # number of that part
    region: int
    offset: int  # the byte in its region at which it starts
    num_bytes: int  # its size


class UnitLayout:
    """One unit's parts on one timeline, their regions, and their code."""

    def __init__(
        self,
        parts: Sequence[PartSpec],  # in the order in which one flight runs them
        kernel_lists: Mapping[Leaf, KernelList],
        tensor_types: Sequence[TensorType],  # of the model's tensors, and then of the sums
        given_types: Sequence[TensorType],  # of the tensors that the caller passes
        plan: PlanBuffers,  # places the scratch of a phase
        num_phases: int = 1,  # at most, of a part: more need less memory and more regions
        # "allocated" if launches allocate their results. These may be views of operands, so the
        # memory of operands is not reused.
        results: UnitResults = "planned",
    ) -> None:
        self.specs = parts
        self.results = results
        self.layout = Layout(runs="native" if results == "planned" else "python")
        # Inputs of a part that a later part takes, too.
        self._shared = {(s.part, s.index) for p in parts for s in p.sources if s.kind == "input"}
        self.inboxes: dict[str, list[Box]] = {}
        self.outboxes: dict[str, list[Box]] = {}
        self._tensor_types = tensor_types
        self._tensors = [self.layout.given(t) for t in tensor_types]
        self._given = [self.layout.given(t) for t in given_types]
        self.fixed = {p.instance: i for i, p in enumerate(self._tensors)}
        self._givens = {p.instance: i for i, p in enumerate(self._given)}
        self._inbox_places: dict[str, list[tuple[int, Wire]]] = {}
        self._outbox_places: dict[str, list[tuple[int, Wire]]] = {}
        self._spans: list[tuple[int, int]] = []
        self._added: dict[int, PlacedLaunch] = {}
        self._parts = [
            self._lay_out(number, spec, kernel_lists) for number, spec in enumerate(parts)
        ]
        self._used = self._find_spans([start for start, _ in self._spans])
        self._cuts = [self._cut(number, num_phases) for number in range(len(parts))]
        self.regions: list[Region] = []
        self._region_of: dict[int, int] = {}
        self._offsets = [0] * len(self.layout.instances)
        self._make_regions(plan)

    # ---- layout --------------------------------------------------------------------------

    def _lay_out(
        self, number: int, spec: PartSpec, kernel_lists: Mapping[Leaf, KernelList]
    ) -> Part:
        start = self.layout.time
        self._inbox_places.setdefault(spec.way, [])
        for wire in spec.inboxes:
            # It belongs to no part (-1): a receive may fill it before the part starts, so no launch
            # may reuse its memory.
            self._inbox_places[spec.way].append((self.layout.new(wire.num_bytes, -1), wire))
        unpacked: list[Any] = []
        inputs = [self._input(spec, index, number, unpacked) for index in range(len(spec.sources))]
        sinks: dict[int, list[Placed]] = {}
        for output, tensor in spec.sums.items():
            sinks.setdefault(spec.flat.outputs[output], []).append(self._tensors[tensor])
        part = self.layout.add(spec.flat, inputs, kernel_lists, sinks)
        sums = {placed.instance for own in sinks.values() for placed in own}
        for launch in part.launches:
            if launch.of is None and launch.bases[0][0] in sums:
                self._added[launch.bases[0][0]] = launch
        part.launches[:0] = unpacked
        for output in (*spec.returned, *(output for output, _ in spec.outboxes)):
            instance = self.layout.instances[part.outputs[output].instance]
            # An input that is returned unchanged is used in this part, even without a launch.
            instance.death = max(instance.death, start + 1)
        for output, wire in spec.outboxes:
            place = self._outbox(number, part, part.outputs[output], wire)
            self._outbox_places.setdefault(spec.way, []).append((place, wire))
        for output in spec.returned:  # the caller reads it after the copies into outboxes
            instance = self.layout.instances[part.outputs[output].instance]
            instance.death = max(instance.death, self.layout.time)
        self._spans.append((start, self.layout.time))
        # A part may launch nothing, but two parts must not share a time: a buffer's times say in
        # which parts it is live.
        self.layout.time += 1
        return part

    def _input(self, spec: PartSpec, index: int, number: int, unpacked: list[Any]) -> Placed:
        source = spec.sources[index]
        if source.kind == "inbox":
            way = source.part or spec.way
            return self._arrived(*self._inbox_places[way][source.index], number, unpacked)
        if source.kind == "model":
            tensor = self._tensors[source.index]
            if source.index not in spec.written or (spec.name, index) not in self._shared:
                return tensor
            # The caller changes it after the part; the backward needs the earlier value: a copy.
            return self._copied(Wire(self._tensor_types[source.index]), tensor, number, unpacked)
        if source.kind == "given":
            return self._given[source.index]
        names = [s.name for s in self.specs[:number]]
        part = self.layout.parts[names.index(source.part)]
        return (part.outputs if source.kind == "output" else part.inputs)[source.index]

    def _arrived(self, instance: int, wire: Wire, number: int, unpacked: list[Any]) -> Placed:
        """Returns a received value, in the layout of its type."""
        type_ = wire.type
        stride = type_.stride if wire.needs_no_copy else contiguous_stride(wire.once)
        box = Placed(instance, type_.dtype, wire.once, stride, 0)
        if wire.needs_no_copy and self.results == "planned":
            return replace(box, shape=type_.shape)
        return self._copied(wire, box, number, unpacked)

    def _copied(self, wire: Wire, source: Placed, number: int, launches: list[Any]) -> Placed:
        """Copies a value into the layout of its type, expanded elements once."""
        type_ = wire.type
        kind: BufferKind = "arena" if self.results == "planned" else "foreign"
        num_bytes = max(reach(wire.once, type_.stride), 0) * type_.dtype.itemsize
        made = self.layout.new(num_bytes, number, kind)
        copy = Placed(made, type_.dtype, wire.once, type_.stride, 0)
        launches.append(self.layout.apply("copy_", copy, replace(source, shape=wire.once)))
        return replace(copy, shape=type_.shape)

    def _outbox(self, number: int, part: Part, placed: Placed, wire: Wire) -> int:
        """Returns the buffer to send: the output's own if it has the right form, else a copy."""
        type_, instance = wire.type, self.layout.instances[placed.instance]
        same = (placed.shape, placed.stride, placed.offset_bytes) == (type_.shape, type_.stride, 0)
        whole = instance.kind == "arena" and instance.num_bytes == wire.num_bytes
        if same and whole and wire.needs_no_copy:
            return placed.instance
        box = self.layout.new(wire.num_bytes, number)
        stride = type_.stride if wire.needs_no_copy else contiguous_stride(wire.once)
        target = Placed(box, type_.dtype, wire.once, stride, 0)
        source = replace(placed, shape=wire.once)
        part.launches.append(self.layout.apply("copy_", target, source))
        return box

    # ---- regions -------------------------------------------------------------------------

    def _find_spans(self, starts: Sequence[int]) -> list[tuple[int, int]]:
        """Returns for each buffer the first and last span with these starts in which it is live."""
        births = np.array([b.birth for b in self.layout.instances])
        deaths = np.array([b.death for b in self.layout.instances])
        first = np.searchsorted(starts, births, side="right") - 1
        last = np.searchsorted(starts, deaths - 1, side="right") - 1
        return list(zip(first.tolist(), np.maximum(first, last).tolist(), strict=True))

    def _cut(self, number: int, num_phases: int) -> list[int]:
        """Returns the starts of a part's phases: about equally long, cut where little is live."""
        start, end = self._spans[number]
        live = np.zeros(end - start + 1, np.int64)
        for instance, used in zip(self.layout.instances, self._used, strict=True):
            if instance.kind == "arena" and used == (number, number):
                live[instance.birth - start + 1 : instance.death - start] += instance.num_bytes
        # Buffers that are live across a cut go into a slab, where no memory is shared. So a cut
        # moves by up to half a phase to where the fewest bytes are live.
        cuts = [0]
        step = (end - start) / num_phases
        for phase in range(1, num_phases):
            low = max(cuts[-1] + 1, round((phase - 0.5) * step))
            high = round((phase + 0.5) * step)
            if low < min(high, end - start):
                cuts.append(low + int(live[low:high].argmin()))
        return [start + cut for cut in cuts]

    def _make_regions(self, plan: PlanBuffers) -> None:
        ways = [*self._inbox_places.values(), *self._outbox_places.values()]
        boxes = {instance for places in ways for instance, _ in places}
        where = [(part, i) for part, cuts in enumerate(self._cuts) for i in range(len(cuts))]
        phases = self._find_spans([cut for cuts in self._cuts for cut in cuts])
        groups: dict[tuple[int, int], list[int]] = {}
        for index, instance in enumerate(self.layout.instances):
            (first, a), (last, b) = (where[phase] for phase in phases[index])
            if instance.kind == "arena" and index in boxes:
                self._add_region([index], Region(instance.num_bytes, first, last, a, b, True))
            elif instance.kind == "arena":
                groups.setdefault(phases[index], []).append(index)
        for (begin, end), members in groups.items():
            (first, a), (last, b) = where[begin], where[end]
            # All buffers that are live from one phase to another are live at once between the two,
            # so they are stacked. The planner places those of a single phase.
            num_bytes = self._stack(members) if begin < end else self._place(members, plan)
            self._add_region(members, Region(num_bytes, first, last, a, b, False))
        for target, places in (
            (self.inboxes, self._inbox_places),
            (self.outboxes, self._outbox_places),
        ):
            for way, found in places.items():
                target[way] = [Box(self._region_of[i], wire) for i, wire in found]

    def _stack(self, members: Sequence[int]) -> int:
        """Places buffers one after the other; returns their total bytes."""
        total = 0
        for index in members:
            self._offsets[index] = total
            total += -(-self.layout.instances[index].num_bytes // ALIGNMENT) * ALIGNMENT
        return total

    def _place(self, members: Sequence[int], plan: PlanBuffers) -> int:
        """Places the scratch of a phase; returns its bytes."""
        # Scratch is shared by all flights, since parts run one at a time.
        found = plan(buffers_of([self.layout.instances[i] for i in members]))
        for index, offset in zip(members, found.offsets.tolist(), strict=True):
            self._offsets[index] = offset
        return found.peak_bytes

    def _add_region(self, members: Sequence[int], region: Region) -> None:
        for index in members:
            self._region_of[index] = len(self.regions)
        self.regions.append(region)

    # ---- code ----------------------------------------------------------------------------

    @cached_property
    def codes(self) -> list[GeneratedCode]:
        """The code of each part."""
        return [self._code(number) for number in range(len(self._parts))]

    @cached_property
    def used_regions(self) -> list[list[int]]:
        """The regions that the code of each part uses."""
        views = (code.arena_views.values() for code in self.codes)
        placed = ({self._region_of[p.instance] for p in own} for own in views)
        return [sorted(p | set(c.regions)) for p, c in zip(placed, self.codes, strict=True)]

    def bytes_per_flight(self, num_flights: int) -> int:
        """Returns the bytes of one of several flights at once, with its share of the scratch."""
        kept = sum(r.num_bytes for r in self.regions if r.is_kept)
        # Flights share the scratch, since one part runs at a time: each counts its share of the
        # largest phase.
        scratch = 0
        for part, cuts in enumerate(self._cuts):
            own = [r for r in self.regions if r.first == part and not r.is_kept]
            for phase in range(len(cuts)):
                live = [r for r in own if r.first_phase <= phase <= r.last_phase]
                scratch = max(scratch, sum(r.num_bytes for r in live))
        return kept - (-scratch // max(num_flights, 1))

    def num_phases(self, number: int) -> int:
        """Phases of a part."""
        return len(self._cuts[number])

    def phase_moments(self, number: int) -> list[int]:
        """Returns the starts of the phases, and the end of the last, from the start of the part."""
        start, end = self._spans[number]
        return [*(cut - start for cut in self._cuts[number]), end - start + 1]

    def addition_to(self, tensor: int) -> tuple[int, int] | None:
        """Returns the part and the phase in which a sum is added to; None if in none."""
        added = self._added.get(self._tensors[tensor].instance)
        if added is None:
            return None
        part = bisect_right(self._spans, added.time, key=lambda span: span[0]) - 1
        return part, bisect_right(self._cuts[part], added.time) - 1

    def code_of_first(self, number: int, tensors: Collection[int]) -> GeneratedCode:
        """Returns the code of a part that sets these tensors instead of adding to them."""
        added = [self._added[self._tensors[tensor].instance] for tensor in tensors]
        return self._code(number, added)

    def _code(self, number: int, first: Sequence[PlacedLaunch] = ()) -> GeneratedCode:
        part, spec = self._parts[number], self.specs[number]
        returned = [part.outputs[i] for i in spec.returned]
        sets = {id(one): self.layout.method("copy_", one.launch.args) for one in first}
        launches = [replace(one, launch=sets.get(id(one), one.launch)) for one in part.launches]
        return CodeWriter(
            self.layout,
            self._offsets,
            Part(part.inputs, launches, returned),
            set(self.fixed),
            len(returned),
            self._foreign_taken(number),
            self._foreign_left(number),
            self._region_of,
        ).write()

    @cached_property
    def hand_overs(self) -> list[HandOver]:
        """The tensors outside the arena that each part takes and passes on."""
        return [self._hand_over(number) for number in range(len(self._parts))]

    def _hand_over(self, number: int) -> HandOver:
        part, taken = self._parts[number], self._foreign_taken(number)
        return HandOver(
            [self._givens[part.inputs[i].instance] for i in self.codes[number].inputs],
            taken,
            self._foreign_left(number),
            [instance for instance in taken if self._used[instance][1] == number],
        )

    def _foreign_taken(self, number: int) -> list[int]:
        return [i for i, (first, last) in self._foreign() if first < number <= last]

    def _foreign_left(self, number: int) -> list[int]:
        return [i for i, (first, last) in self._foreign() if first == number < last]

    def foreign_span(self, instance: int) -> tuple[int, int, int]:
        """First and last part that use a buffer outside the arena, and its bytes."""
        return *self._used[instance], self.layout.instances[instance].num_bytes

    def _foreign(self) -> list[tuple[int, tuple[int, int]]]:
        instances = self.layout.instances
        return [(i, u) for i, u in enumerate(self._used) if instances[i].kind == "foreign"]

    def foreign_scratch_bytes(self, number: int) -> int:
        """Most bytes outside the arena that live at once within a part."""
        own = [self.layout.instances[i] for i, u in self._foreign() if u == (number, number)]
        own += [b for b in self.layout.scratch if b.part == number]
        return lower_bound(buffers_of(own)) if own else 0

    def offsets_from(self, number: int, starts: Mapping[int, int]) -> dict[int, int]:
        """Returns the arena offsets of the buffers that a part's code has views of."""
        used = {placed.instance for placed in self.codes[number].arena_views.values()}
        return {i: starts[self._region_of[i]] + self._offsets[i] for i in used}

    def placed(self, number: int) -> list[PlacedBuffer]:
        """Returns the buffers that a part makes, without boxes."""
        found = []
        for index, instance in enumerate(self.layout.instances):
            first, last = self._used[index]
            if instance.kind != "arena" or first != number:
                continue
            region = self._region_of[index]
            if self.regions[region].is_box:
                continue
            birth = instance.birth - self._spans[first][0]
            death = max(instance.death - self._spans[last][0], 1)
            offset = self._offsets[index]
            found.append(PlacedBuffer(birth, death, last, region, offset, instance.num_bytes))
        return found

    def launches_of(self, number: int) -> list[tuple[int, PlacedLaunch]]:
        """Returns the launches of a part, each with its time from the part's start."""
        start = self._spans[number][0]
        return [(launch.time - start, launch) for launch in self._parts[number].launches]

    @property
    def num_launches(self) -> list[int]:
        """Launches of each part."""
        return [len(part.launches) for part in self._parts]


def least(buffers: Buffers) -> ArenaPlan:
    """Returns a plan without offsets, whose peak is the lower bound."""
    bound = lower_bound(buffers)
    return ArenaPlan(np.zeros(len(buffers), np.int64), bound, bound, "lower bound")
