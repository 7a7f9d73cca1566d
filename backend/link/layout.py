"""Layout: kernel lists relocated to their calls, on one timeline.

This is where a call is finally inlined. What is known per closure (launches, buffers, first and
last uses) is copied by adding the call's start time and replacing buffer numbers; nothing is
analysed again. Several flat programs can follow one another on the timeline (a forward, then its
backward), so that one plan covers both. What a program returns gets memory of the user's, or a
place that lasts until the next run.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import numpy as np
import torch

from ...reuse.ir.program import Leaf
from ...reuse.ir.size_tape import PLAIN, Numbers, Size
from ...reuse.ir.types import TensorType, contiguous_stride, reach
from ..arena.live_ranges import Buffers, lower_bound
from ..gpu.roofline import is_product
from ..gpu.targets import Target
from ..kernels.torch_attention import scratch_bytes
from ..launches.kernel_list import KernelList, Launch, View, with_native
from .link import FlatProgram
from .link import Launch as ClosureCall

Results: TypeAlias = Literal["owned", "pinned", "allocated", "copied"]
"""Where what a run returns lies: in memory of the caller's, or in the arena until the next run; or
where launches allocated it, or in a copy of that, which stays where it is from run to run."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A tensor over one buffer instance of the whole program."""

    instance: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset_bytes: int

    def at(self, numbers: Numbers) -> Placed:
        """Returns the same with the numbers of other sizes."""
        shape, stride = (tuple(map(numbers.of, sizes)) for sizes in (self.shape, self.stride))
        offset_bytes = numbers.of(self.offset_bytes)
        return Placed(self.instance, self.dtype, shape, stride, offset_bytes)

    @property
    def has_size(self) -> bool:
        """Whether a size is among its numbers."""
        return Size in map(type, (*self.shape, *self.stride, self.offset_bytes))


BufferKind: TypeAlias = Literal[
    "arena", "given", "result", "foreign", "unused", "scratch", "workspace"
]


@dataclass(slots=True)
class Instance:
    """One buffer of the whole program.

    ``kind``: ``"arena"`` (the plan places it), ``"given"`` (the caller's tensor, or the model's),
    ``"result"`` (handed to the user, so made anew in each run), ``"foreign"`` (made by a launch),
    ``"unused"`` (its value is made in another buffer), ``"scratch"`` (inside one launch),
    ``"workspace"`` (what a library works in, at one place from run to run).
    Lives in ``[birth, death)``, in launches. ``device`` is where it lies, if not on the device that
    the program is planned for.
    """

    kind: BufferKind
    num_bytes: int
    birth: int
    death: int
    part: int
    device: torch.device | None = None


def buffers_of(instances: Sequence[Instance], numbers: Numbers = PLAIN) -> Buffers:
    """Returns the columns of buffers that a planner places."""
    return Buffers(
        np.array([b.birth for b in instances], np.int64),
        np.array([b.death for b in instances], np.int64),
        np.array([numbers.of(b.num_bytes) for b in instances], np.int64),
    )


@dataclass(frozen=True, slots=True)
class PlacedLaunch:
    """One launch of one call: the closure's launch, and where its buffers are.

    ``of`` is that call; none where the link itself adds a launch.
    """

    launch: Launch
    bases: tuple[tuple[int, int], ...]  # per buffer: instance, offset in bytes
    time: int
    of: ClosureCall | None = None

    @property
    def block(self) -> str:
        """For people: the call's place in the model, and its closure."""
        return self.of.block if self.of is not None else ""

    def place(self, view: View) -> Placed:
        """Returns where one of the launch's views is in the whole program."""
        return _placed(view, self.bases)


def _placed(view: View, bases: Sequence[tuple[int, int]]) -> Placed:
    instance, offset = bases[view.buffer]
    return Placed(instance, view.dtype, view.shape, view.stride, offset + view.offset_bytes)


@dataclass
class Part:
    """One flat program on the timeline: what it runs, takes and returns."""

    inputs: list[Placed]
    launches: list[PlacedLaunch]
    outputs: list[Placed]


@dataclass
class Layout:
    """Every buffer instance and launch of the flat programs added so far.

    ``scratch`` is what launches allocate and free while they run, each alive for its launch: no
    plan places it and nothing refers to it, but it is memory too. ``workspaces`` are what cuBLAS
    has besides, if it runs products. ``runs`` says who may run the launches that
    are added here. ``others`` are devices beside the one that is planned for. ``givens`` are what
    the caller passes: the whole, also to a part that takes a view of it that an earlier part saved.
    """

    instances: list[Instance] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    time: int = 0
    scratch: list[Instance] = field(default_factory=list)
    workspaces: list[Instance] = field(default_factory=list)
    runs: Literal["native", "python"] = "native"
    others: tuple[torch.device, ...] = ()
    givens: dict[int, Placed] = field(default_factory=dict)

    def given(self, type_: TensorType) -> Placed:
        """Adds a buffer that the caller provides."""
        now, device = self.time, self._elsewhere(type_.device)
        index = self._add(Instance("given", type_.num_bytes, now, now, len(self.parts), device))
        self.givens[index] = Placed(index, type_.dtype, type_.shape, type_.stride, 0)
        return self.givens[index]

    def new(self, num_bytes: int, part: int, kind: BufferKind = "arena") -> int:
        """Adds a buffer; no launch takes over one that belongs to no part (-1)."""
        return self._add(Instance(kind, num_bytes, self.time, self.time + 1, part))

    def add(
        self,
        flat: FlatProgram,
        inputs: Sequence[Placed],
        kernel_lists: Mapping[Leaf, KernelList],
        sinks: Mapping[int, Sequence[Placed]] | None = None,
    ) -> Part:
        """Lays a flat program out after what is there; returns its part.

        Args:
            flat: the program.
            inputs: where its inputs are.
            kernel_lists: of its leaves.
            sinks: slots that are added to something as soon as they are there.
        """
        slots: dict[int, Placed] = dict(zip(flat.inputs, inputs, strict=True))
        launches: list[PlacedLaunch] = []
        sinks = sinks or {}
        waiting = [s for s in flat.inputs if s in sinks]
        live = Counter(placed.instance for placed in slots.values())
        leaves = dict.fromkeys(call.leaf for call in flat.launches)
        scratch = {leaf: _scratch_of(kernel_lists[leaf]) for leaf in leaves}
        for call in flat.launches:
            # The late inline: the closure's launches are used as they are, and only a table from
            # its buffers to buffers of the whole program is made for this call.
            kernels = kernel_lists[call.leaf]
            for index, num_bytes in scratch[call.leaf]:
                at = self.time + index
                self.scratch.append(Instance("scratch", num_bytes, at, at + 1, len(self.parts)))
            bases = self._bases(kernels, [slots[s] for s in call.operands])
            bases = self._taken_over(kernels, bases, call.operands, call.frees, live)
            launches += [
                PlacedLaunch(launch, bases, self.time + index, call)
                for index, launch in enumerate(kernels.launches)
            ]
            self.time += len(kernels.launches)
            results = (_placed(view, bases) for view in kernels.outputs)
            slots.update(zip(call.results, results, strict=True))
            live.update(slots[s].instance for s in call.results)
            # Added up at once: a gradient that waited for the end would be live until then.
            waiting += [s for s in call.results if s in sinks]
            launches += self._added(waiting, sinks, slots)
            waiting.clear()
            live.subtract(slots[s].instance for s in call.frees)
        launches += self._added(waiting, sinks, slots)
        # An output outlives the part. What went into a sink does not: the sum is what is kept.
        part = Part(list(inputs), launches, [slots[s] for s in flat.outputs])
        for slot in flat.outputs:
            if slot not in sinks:
                self.instances[slots[slot].instance].death = self.time
        self.parts.append(part)
        return part

    def _added(
        self,
        waiting: Iterable[int],
        sinks: Mapping[int, Sequence[Placed]],
        slots: Mapping[int, Placed],
    ) -> list[PlacedLaunch]:
        return [self.apply("add_", sink, slots[slot]) for slot in waiting for sink in sinks[slot]]

    def apply(self, name: str, target: Placed, source: Placed) -> PlacedLaunch:
        """Makes a launch, now, of a method of tensors that changes one by another.

        A target outside of the arena is there once its launch made it: as a copy.
        """
        views = tuple(
            View(b, p.dtype, p.shape, p.stride, 0) for b, p in enumerate((target, source))
        )
        launch = self.method(name, views)
        if self.instances[target.instance].kind == "foreign":
            launch = Launch("clone", torch.clone, views[1:], (), views[:1], "tensor")
        bases = tuple((p.instance, p.offset_bytes) for p in (target, source))
        for placed in (target, source):
            instance = self.instances[placed.instance]
            instance.death = max(instance.death, self.time + 1)
        self.time += 1
        return PlacedLaunch(launch, bases, self.time - 1)

    def method(self, name: str, views: tuple[Any, ...]) -> Launch:
        """Returns a launch of a method of tensors."""
        launch = Launch(name, getattr(torch.Tensor, name), views, ())
        return with_native(launch) if self.runs == "native" else launch

    def _elsewhere(self, device: torch.device | None) -> torch.device | None:
        """Returns a device if it is another one than is planned for."""
        return device if device in self.others else None

    def _taken_over(
        self,
        kernels: KernelList,
        bases: tuple[tuple[int, int], ...],
        operands: Sequence[int],
        frees: Sequence[int],
        live: Counter[int],
    ) -> tuple[tuple[int, int], ...]:
        """Lets a result take over the memory of an operand that nobody else needs."""
        changed = list(bases)
        for buffer, source in kernels.in_place:
            instance = self.instances[bases[source][0]]
            last = operands[source] in frees and live[bases[source][0]] == 1
            # Another part's buffer is left alone: its code may run again before this part does.
            whole = instance.num_bytes == self.instances[bases[buffer][0]].num_bytes
            if last and whole and instance.kind == "arena" and instance.part == len(self.parts):
                self.instances[bases[buffer][0]].kind = "unused"
                changed[buffer] = bases[source]
        return tuple(changed)

    def _add(self, instance: Instance) -> int:
        self.instances.append(instance)
        return len(self.instances) - 1

    def _bases(
        self, kernels: KernelList, operands: Sequence[Placed]
    ) -> tuple[tuple[int, int], ...]:
        """Gives a call its buffers."""
        bases = []
        for index, info in enumerate(kernels.buffers):
            if index < kernels.num_inputs:
                operand = operands[index]
                instance = self.instances[operand.instance]
                instance.death = max(instance.death, self.time + info.last + 1)
                bases.append((operand.instance, operand.offset_bytes))
                continue
            # A buffer lives for one launch at least, or the planner would let others overlap it.
            birth, death = self.time + max(info.first, 0), self.time + info.last + 1
            kind: BufferKind = "foreign" if info.kind == "foreign" else "arena"
            lives = (birth, max(death, birth + 1), len(self.parts))
            new = Instance(kind, info.num_bytes, *lives, self._elsewhere(info.device))
            bases.append((self._add(new), 0))
        return tuple(bases)


def _scratch_of(kernels: KernelList) -> list[tuple[int, int]]:
    """Returns which launches of a closure allocate scratch, and how much."""
    sizes = [(i, scratch_bytes(launch)) for i, launch in enumerate(kernels.launches)]
    return [(i, num_bytes) for i, num_bytes in sizes if num_bytes]


def layout_of(
    flats: Sequence[FlatProgram],
    kernel_lists: Mapping[Leaf, KernelList],
    num_results: Sequence[int],
    backward_inputs: Sequence[tuple[str, Any]] = (),
    results: Results = "owned",
    runs: Literal["native", "python"] = "native",
    roots: Sequence[object] = (),
    others: tuple[torch.device, ...] = (),
) -> Layout:
    """Lays out what a :class:`..run.planned.PlannedProgram` of the same arguments plans."""
    layout = Layout(runs=runs, others=others)
    first = flats[0]
    layout.add(first, [layout.given(first.slot_types[s]) for s in first.inputs], kernel_lists)
    forward = layout.parts[0]
    for flat in flats[1:]:
        inputs = []
        for slot, (kind, which) in zip(flat.inputs, backward_inputs, strict=True):
            made = layout.instances[forward.outputs[which].instance] if kind == "output" else None
            # What the caller got comes back from there: kept here as well, it would hold this run.
            if made is not None and made.kind == "foreign" and which < num_results[0]:
                inputs.append(layout.given(flat.slot_types[slot]))
            elif kind == "output":
                inputs.append(forward.outputs[which])
            elif kind == "input":
                inputs.append(forward.inputs[which])
            else:
                inputs.append(layout.given(which))
        layout.add(flat, inputs, kernel_lists)
    if results == "pinned":
        _pin_results(layout, num_results[0])
    elif results == "owned":
        _own_results(layout, num_results, roots)
    return layout


def least_bytes(layout: Layout) -> int:
    """Returns what a layout holds at least at its peak: in the arena, and outside of it."""
    placed = [b for b in layout.instances if b.kind == "arena" and b.device is None]
    return most_bytes(placed) + most_bytes(outside(layout))


def outside(layout: Layout) -> list[Instance]:
    """Returns what launches allocate for themselves."""
    found = [b for b in layout.instances if b.kind == "foreign" and b.device is None]
    return found + layout.scratch + layout.workspaces


def most_bytes(instances: Sequence[Instance], numbers: Numbers = PLAIN) -> int:
    """Returns the bytes of buffers, at most, at one time."""
    return lower_bound(buffers_of(instances, numbers)) if instances else 0


def add_workspaces(layout: Layout, target: Target) -> None:
    """Adds what cuBLAS works in, if the program has products, as long as it runs."""
    if any(is_product(placed.launch) for part in layout.parts for placed in part.launches):
        # PyTorch hands it out, and has no public interface that takes memory of ours for it: the
        # plan knows its size and its life, and not its address.
        whole = Instance("workspace", target.workspace_bytes, 0, max(layout.time, 1), 0)
        layout.workspaces.append(whole)


def handed_on(layout: Layout) -> list[int]:
    """Foreign buffers that the forward makes and saves: the same for every backward of it."""
    if len(layout.parts) < 2:
        return []
    saved = {p.instance for p in layout.parts[1].inputs}
    return [
        i
        for i, b in enumerate(layout.instances)
        if b.kind == "foreign" and b.part == 0 and i in saved
    ]


def _own_results(layout: Layout, num_results: Sequence[int], roots: Sequence[object] = ()) -> None:
    """Gives the user buffers of their own for what they receive."""
    # Results of the forward with one root share memory in eager, so they do here: a change in one
    # is seen in the other. A result that the program still needs, or that lies in the buffer of one
    # with another root, is copied out; others are made in the user's buffer.
    for number, part in enumerate(layout.parts):
        results = part.outputs[: num_results[number]]
        needed = {p.instance for p in part.outputs[num_results[number] :]}
        keys = [
            (p.instance, roots[i] if roots and not number else i) for i, p in enumerate(results)
        ]
        owners: dict[int, object] = {}
        copies: dict[object, int] = {}
        for index, (key, placed) in enumerate(zip(keys, results, strict=True)):
            instance = layout.instances[placed.instance]
            if instance.kind == "given" or owners.get(placed.instance) == key:
                continue
            if key in copies:
                part.outputs[index] = replace(placed, instance=copies[key])
            elif placed.instance in needed | owners.keys() or instance.part != number:
                is_shared = keys.count(key) > 1
                whole = _whole(layout, placed) if is_shared else placed
                copied = copied_out(layout, part, whole, "result")
                copies[key] = copied.instance
                part.outputs[index] = (
                    replace(placed, instance=copied.instance) if is_shared else copied
                )
            else:
                instance.kind = "result" if instance.kind == "arena" else instance.kind
                owners[placed.instance] = key


def _whole(layout: Layout, placed: Placed) -> Placed:
    """Returns the whole buffer that something lies in, as one row of its type."""
    count = layout.instances[placed.instance].num_bytes // placed.dtype.itemsize
    return Placed(placed.instance, placed.dtype, (count,), (1,), 0)


def _pin_results(layout: Layout, num_results: int) -> None:
    """Gives each result a place of its own in the arena, which lasts until the next run.

    Outputs after the results are updates, which lie where the tensors lay that they replace.
    """
    part = layout.parts[-1]
    taken: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for index, placed in enumerate(part.outputs[:num_results]):
        own = _bytes_of(placed)
        # Gradients that were reduced together lie one after another in one buffer.
        free = all(own[1] <= start or end <= own[0] for start, end in taken[placed.instance])
        if layout.instances[placed.instance].kind != "arena" or not free:
            placed = part.outputs[index] = copied_out(layout, part, placed, "arena")
            own = _bytes_of(placed)
        taken[placed.instance].append(own)
    for instance in taken:
        if taken[instance]:
            layout.instances[instance].death = layout.time


def _bytes_of(placed: Placed) -> tuple[int, int]:
    """Returns where the bytes of its buffer that a tensor reaches over begin and end."""
    num_elements = 0 if 0 in placed.shape else reach(placed.shape, placed.stride)
    num_bytes = num_elements * placed.dtype.itemsize
    return placed.offset_bytes, placed.offset_bytes + num_bytes


def copied_out(layout: Layout, part: Part, placed: Placed, kind: BufferKind) -> Placed:
    """Copies a value into a buffer of its own, at the end of a part; returns the copy."""
    type_ = TensorType(placed.dtype, placed.shape, placed.stride, torch.device("cpu"))
    stride = placed.stride if type_.is_dense else contiguous_stride(placed.shape)
    number, device = layout.parts.index(part), layout.instances[placed.instance].device
    lives = (layout.time, layout.time + 1, number)
    layout.instances.append(Instance(kind, type_.num_bytes, *lives, device))
    target = Placed(len(layout.instances) - 1, placed.dtype, placed.shape, stride, 0)
    part.launches.append(layout.apply("copy_", target, placed))
    return target
