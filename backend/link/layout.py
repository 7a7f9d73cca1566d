"""Layout: kernel lists relocated to their calls, on one timeline.

This is where a call is finally inlined. The launches, buffers and live ranges of a closure are
copied for each call by adding the call's start time and replacing buffer numbers; nothing is
analysed again. Several flat programs can follow one another on the timeline (a forward, then its
backward), so that one plan covers both. Results go to memory of the user's, or to a place that
lasts until the next run.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain
from operator import itemgetter
from typing import Any, Literal, TypeAlias

import torch

from ...reuse.ir.program import Leaf
from ...reuse.ir.size_tape import PLAIN, Numbers, Size
from ...reuse.ir.types import TensorType, contiguous_stride, reach
from ..arena import Buffers
from ..gpu.targets import Target, is_product
from ..kernels.torch_attention import scratch_bytes
from ..launches.kernel_list import KernelList, Launch, View, with_native
from .link import FlatProgram
from .link import Launch as ClosureCall

Results: TypeAlias = Literal["owned", "pinned", "allocated", "copied"]
"""Where results are: in memory of the caller's; in the arena, until the next run; where launches
allocated them; or in copies of those, at the same addresses in every run."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A tensor on one buffer instance of the whole program."""

    instance: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset_bytes: int

    def at(self, numbers: Numbers) -> Placed:
        """Returns the same tensor at other sizes."""
        shape, stride = (tuple(map(numbers.of, sizes)) for sizes in (self.shape, self.stride))
        offset_bytes = numbers.of(self.offset_bytes)
        return Placed(self.instance, self.dtype, shape, stride, offset_bytes)

    @property
    def has_size(self) -> bool:
        """Whether its shape, strides or offset depend on a symbolic size."""
        return Size in map(type, (*self.shape, *self.stride, self.offset_bytes))


BufferKind: TypeAlias = Literal[
    "arena", "given", "result", "foreign", "unused", "scratch", "workspace"
]


@dataclass(slots=True)
class Instance:
    """One buffer of the whole program.

    ``kind``: ``"arena"`` (the plan places it), ``"given"`` (the caller's tensor, or the model's),
    ``"result"`` (returned to the user, so allocated anew in each run), ``"foreign"`` (allocated by
    a launch), ``"unused"`` (its value is in another buffer), ``"scratch"`` (inside one launch),
    ``"workspace"`` (a library's scratch, at the same address in every run).
    Live in ``[birth, death)``, counted in launches. ``device``: None for the device that the
    program is planned for.
    """

    kind: BufferKind
    num_bytes: int
    birth: int
    death: int
    part: int
    device: torch.device | None = None


def buffers_of(instances: Sequence[Instance]) -> Buffers:
    """Returns the columns of buffers that a planner places."""
    return Buffers.of((b.birth, b.death, b.num_bytes) for b in instances)


@dataclass(frozen=True, slots=True)
class PlacedLaunch:
    """One launch of one call: the closure's launch, and where its buffers are.

    ``of`` is the call; None for a launch that the link itself adds.
    """

    launch: Launch
    bases: tuple[tuple[int, int], ...]  # per buffer: instance, offset in bytes
    time: int
    of: ClosureCall | None = None

    @property
    def block(self) -> str:
        """The call's module path and closure, for messages."""
        return self.of.block if self.of is not None else ""

    def place(self, view: View) -> Placed:
        """Returns where one of the launch's views is in the whole program."""
        return _placed(view, self.bases)


def _placed(view: View, bases: Sequence[tuple[int, int]]) -> Placed:
    instance, offset = bases[view.buffer]
    return Placed(instance, view.dtype, view.shape, view.stride, offset + view.offset_bytes)


@dataclass
class Part:
    """One flat program on the timeline: its inputs, launches and outputs."""

    inputs: list[Placed]
    launches: list[PlacedLaunch]
    outputs: list[Placed]


@dataclass
class Layout:
    """Every buffer instance and launch of the flat programs added so far.

    ``scratch`` are the buffers that launches allocate and free while they run: not planned, but
    counted as memory. ``workspaces`` are those of cuBLAS, if it runs products. ``runs`` says who
    runs the launches that the link adds. ``others`` are the devices besides the planned one.
    ``givens`` are the tensors that the caller passes, whole even if a part takes a saved view.
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
        now, device = self.time, type_.device if type_.device in self.others else None
        index = self._add(Instance("given", type_.num_bytes, now, now, len(self.parts), device))
        self.givens[index] = Placed(index, type_.dtype, type_.shape, type_.stride, 0)
        return self.givens[index]

    def new(self, num_bytes: int, part: int, kind: BufferKind = "arena") -> int:
        """Adds a buffer; one of no part (-1) is never reused in place."""
        return self._add(Instance(kind, num_bytes, self.time, self.time + 1, part))

    def add(
        self,
        flat: FlatProgram,
        inputs: Sequence[Placed],
        kernel_lists: Mapping[Leaf, KernelList],
        sinks: Mapping[int, Sequence[Placed]] | None = None,
    ) -> Part:
        """Lays a flat program out after those added before; returns its part.

        ``sinks`` has, for some slots, the tensors that each is added to as soon as it is computed.
        """
        slots: dict[int, Placed] = dict(zip(flat.inputs, inputs, strict=True))
        launches: list[PlacedLaunch] = []
        sinks = sinks or {}
        waiting = [s for s in flat.inputs if s in sinks]
        live = Counter(placed.instance for placed in slots.values())
        leaves = dict.fromkeys(call.leaf for call in flat.launches)
        scratch = {leaf: _scratch_of(kernel_lists[leaf]) for leaf in leaves}
        for call in flat.launches:
            # The late inline: all calls share the closure's launches; a call only gets a table from
            # the closure's buffers to buffers of the whole program.
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
            # Added at once: else every gradient would stay live until the end.
            waiting += [s for s in call.results if s in sinks]
            launches += self._added(waiting, sinks, slots)
            waiting.clear()
            live.subtract(slots[s].instance for s in call.frees)
        launches += self._added(waiting, sinks, slots)
        # An output outlives the part, unless it was added to a sink: then the sum is kept.
        part = Part(list(inputs), launches, [slots[s] for s in flat.outputs])
        for slot in flat.outputs:
            if slot not in sinks:
                instance = self.instances[slots[slot].instance]
                # A part without a launch takes no time, but an empty result of it is a buffer.
                instance.death = max(instance.death, self.time)
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
        """Adds a launch of an in-place method of tensors, such as ``copy_``.

        A foreign target is allocated by its launch: as a clone of the source.
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

    def _taken_over(
        self,
        kernels: KernelList,
        bases: tuple[tuple[int, int], ...],
        operands: Sequence[int],
        frees: Sequence[int],
        live: Counter[int],
    ) -> tuple[tuple[int, int], ...]:
        """Lets a result reuse the buffer of an operand after the operand's last use."""
        changed = list(bases)
        for buffer, source in kernels.in_place:
            instance = self.instances[bases[source][0]]
            last = operands[source] in frees and live[bases[source][0]] == 1
            # Not a buffer of another part, whose code may run again before this part does.
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
        """Returns the buffers of a call: those of its operands, and new ones."""
        bases = []
        for index, info in enumerate(kernels.buffers):
            if index < kernels.num_inputs:
                operand = operands[index]
                instance = self.instances[operand.instance]
                instance.death = max(instance.death, self.time + info.last + 1)
                bases.append((operand.instance, operand.offset_bytes))
                continue
            # Live for at least one launch, or the planner would let other buffers overlap it.
            birth, death = self.time + max(info.first, 0), self.time + info.last + 1
            kind: BufferKind = "foreign" if info.kind == "foreign" else "arena"
            lives = (birth, max(death, birth + 1), len(self.parts))
            device = info.device if info.device in self.others else None
            new = Instance(kind, info.num_bytes, *lives, device)
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
    """Returns the layout that a :class:`..run.planned.PlannedProgram` of these arguments plans."""
    layout = Layout(runs=runs, others=others)
    first = flats[0]
    layout.add(first, [layout.given(first.slot_types[s]) for s in first.inputs], kernel_lists)
    forward = layout.parts[0]
    for flat in flats[1:]:
        inputs = []
        for slot, (kind, which) in zip(flat.inputs, backward_inputs, strict=True):
            made = layout.instances[forward.outputs[which].instance] if kind == "output" else None
            # The caller passes this result back: kept here as well, it would outlive its run.
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
    """Returns the fewest bytes that a layout holds at its peak, in the arena and outside."""
    placed = [b for b in layout.instances if b.kind == "arena" and b.device is None]
    return sum(most_bytes(changes(buffers)) for buffers in (placed, outside(layout)))


def outside(layout: Layout) -> list[Instance]:
    """Returns the buffers that launches allocate for themselves."""
    found = [b for b in layout.instances if b.kind == "foreign" and b.device is None]
    return found + layout.scratch + layout.workspaces


def changes(instances: Sequence[Instance]) -> list[tuple[int, int]]:
    """Returns what buffers add to the live bytes (1) or take (-1), in time; ends come first."""
    both = (((b.death, -1, b.num_bytes), (b.birth, 1, b.num_bytes)) for b in instances)
    return [(s, n) for _, s, n in sorted(chain.from_iterable(both), key=itemgetter(0, 1))]


def most_bytes(changed: Sequence[tuple[int, int]], numbers: Numbers = PLAIN) -> int:
    """Returns the most bytes that are live at one time, of the changes of buffers."""
    return max(accumulate((sign * int(numbers.of(n)) for sign, n in changed), initial=0))


def add_workspaces(layout: Layout, target: Target) -> None:
    """Adds the workspace of cuBLAS, live for the whole run, if the program has matrix products."""
    if any(is_product(placed.launch) for part in layout.parts for placed in part.launches):
        # PyTorch allocates it and cannot be given memory of ours: the plan counts its bytes but
        # does not place it.
        whole = Instance("workspace", target.workspace_bytes, 0, max(layout.time, 1), 0)
        layout.workspaces.append(whole)


def handed_on(layout: Layout) -> list[int]:
    """Returns the foreign buffers that the forward saves, the same for each of its backwards."""
    if len(layout.parts) < 2:
        return []
    saved = {p.instance for p in layout.parts[1].inputs}
    return [
        i
        for i, b in enumerate(layout.instances)
        if b.kind == "foreign" and b.part == 0 and i in saved
    ]


def _own_results(layout: Layout, num_results: Sequence[int], roots: Sequence[object] = ()) -> None:
    """Moves results into buffers that belong to the user."""
    # Results of the forward with one root alias in eager, so they do here: a change in one shows in
    # the other. A result that the program still needs, or that shares a buffer with one of another
    # root, is copied; others are computed in the user's buffer.
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
                whole = placed
                if is_shared:  # the whole buffer, as a 1-d tensor of its dtype
                    count = layout.instances[placed.instance].num_bytes // placed.dtype.itemsize
                    whole = Placed(placed.instance, placed.dtype, (count,), (1,), 0)
                copied = copied_out(layout, part, whole, "result")
                copies[key] = copied.instance
                part.outputs[index] = (
                    replace(placed, instance=copied.instance) if is_shared else copied
                )
            else:
                instance.kind = "result" if instance.kind == "arena" else instance.kind
                owners[placed.instance] = key


def _pin_results(layout: Layout, num_results: int) -> None:
    """Gives each result a place of its own in the arena, which lasts until the next run.

    Outputs after the results are updates, in the memory of the tensors that they replace.
    """
    part = layout.parts[-1]
    taken: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for index, placed in enumerate(part.outputs[:num_results]):
        own = _bytes_of(placed)
        # Gradients that were reduced together are next to one another in one buffer.
        free = all(own[1] <= start or end <= own[0] for start, end in taken[placed.instance])
        if layout.instances[placed.instance].kind != "arena" or not free:
            placed = part.outputs[index] = copied_out(layout, part, placed, "arena")
            own = _bytes_of(placed)
        taken[placed.instance].append(own)
    for instance in taken:
        if taken[instance]:
            layout.instances[instance].death = max(layout.instances[instance].death, layout.time)


def _bytes_of(placed: Placed) -> tuple[int, int]:
    """Returns the first byte of a tensor in its buffer, and the byte after its last."""
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
