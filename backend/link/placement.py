"""Places the buffers of a layout in an arena, and some in memory that gradients will fill.

A gradient belongs to the user, in memory of its own. Until the launch that writes it, that memory
is idle. So the memory of large gradients (*hosts*) is allocated as the forward begins, and buffers
that are dead by the time the gradient is written (*guests*) lie in it. A host is handed out after
its last guest died, and nothing of ours looks at it again: what the user receives is an ordinary
tensor that shares its memory with nothing.

Everything is planned as one address space, so that one proof covers it and one cache keeps it: the
arena first, then the gradients, each with its guests inside.

Last, whether the operands of GPU kernels lie where the kernels were compiled to find them; and the
place where a program runs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, TypeAlias

import numpy as np
import torch

from ...reuse.errors import PlanError
from ...reuse.ir.program import Leaf
from ...reuse.ir.types import reach
from ..arena.arena import ALIGNMENT, ArenaPlan, plan
from ..arena.live_ranges import Buffers, FirstFit, IntArray, lower_bound
from ..gpu.targets import Target
from ..gpu.torch_triton import TritonKernel
from ..launches import torch_native
from ..launches.kernel_list import KernelList, View
from ..launches.torch_native import exact_search, first_fit
from .layout import Instance, Layout, PlacedLaunch, buffers_of

# A plan within half a percent of the lower bound is good enough to stop looking.
_ENOUGH = 1.005
_PLAN_EFFORT_S = 0.3
# Smaller gradients are no hosts: allocating them early costs more than they can hold.
_MIN_HOST_BYTES = 64 * 1024
WIDEST_LOAD_BYTES = 16
"""Inductor compiles a kernel for operands at multiples of this, and loads so much at once."""


@dataclass(frozen=True)
class Overlay:
    """Which gradients are hosts, and where guests lie.

    Attributes:
        hosts: instances of gradients, in order.
        guests: arena instance -> its host, and the offset in it in bytes.
    """

    hosts: tuple[int, ...] = ()
    guests: dict[int, tuple[int, int]] = field(default_factory=dict)


Loader: TypeAlias = Callable[[TritonKernel], Callable[..., Any]]
"""Makes a kernel something that takes tensors and sizes, and launches it."""


@dataclass(frozen=True)
class Place:
    """The memory that a program runs in, and who launches its kernels.

    Attributes:
        device: of the memory.
        load: makes GPU kernels something to launch.
        graphs: whether a step is captured as one CUDA graph, or its launches run one by one.
        first_launches: ``"apart"`` where a kernel's first launch chooses how it is launched: that
            takes memory, so it is on operands of its own, before there is an arena.
        missing: the device that it is not, where a program only is compiled for that; or "".
        target: what is known of the GPU; None on a CPU, and on a GPU that the table does not have.
        others: further devices that the program works on, each with an arena of its own.
    """

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    load: Loader = lambda kernel: kernel
    graphs: Literal["captured", "none"] = "none"
    first_launches: Literal["apart", "within"] = "within"
    missing: str = ""
    target: Target | None = None
    others: tuple[torch.device, ...] = ()

    @property
    def launches(self) -> Literal["native", "python"]:
        """Whether the native loop, which is of the CPU, may run launches there."""
        return "python" if self.missing or self.device.type != "cpu" else "native"

    def check_is_here(self) -> None:
        """Raises PlanError if there is nothing to run on."""
        if self.missing:
            raise PlanError(
                f"This was compiled for {self.missing}, which is not here, so nothing was run. "
                "last_report has the plan; without target= it runs on what is here."
            )


HERE = Place()
"""The CPU, where everything can run."""


@dataclass(frozen=True)
class Tools:
    """Functions that a planned program is made with, so that a cache can answer in their place.

    Attributes:
        plan: places buffers, or remembers where they were placed when the same was asked.
        native: builds the native loop, or remembers it.
        alignment: what every offset is a multiple of, in bytes.
        place: where programs run.
    """

    plan: Callable[[Buffers, Sequence[int], Callable[[], ArenaPlan]], ArenaPlan] = (
        lambda _, asked, make: make()
    )
    native: Callable[[], torch_native.NativeLibrary] = torch_native.native_library
    alignment: int = ALIGNMENT
    place: Place = HERE

    def answered_by(self, plans: Iterable[ArenaPlan]) -> Tools:
        """Returns the same with places that are known, in the order in which they are asked."""
        left = list(plans)

        def answer(buffers: Buffers, asked: Sequence[int], make: Callable[[], ArenaPlan]) -> Any:
            fits = left and len(left[0].offsets) == len(buffers)
            return left.pop(0) if fits else self.plan(buffers, asked, make)

        return replace(self, plan=answer)

    def functions(self) -> Any:
        """Returns our C++, by ctypes."""
        return self.native().functions


TOOLS = Tools()

Placement = tuple[list[int], ArenaPlan, int, Overlay, dict[torch.device, int]]
"""Offsets by instance, the plan, the bytes of its arena, what lies outside of that, and the bytes
of arenas on further devices."""


def planned(layout: Layout, tools: Tools) -> Placement:
    """Places every arena instance, on each device in an arena of its own."""
    offsets = [0] * len(layout.instances)
    placed: dict[torch.device | None, list[int]] = {None: []}
    for index, instance in enumerate(layout.instances):
        if instance.kind == "arena":
            placed.setdefault(instance.device, []).append(index)
    arenas = {}
    for device, found in placed.items():
        arenas[device] = place(buffers_of([layout.instances[i] for i in found]), tools)
        for index, offset in zip(found, arenas[device].offsets.tolist(), strict=True):
            offsets[index] = offset
    own = arenas[None]
    others = {device: arena.peak_bytes for device, arena in arenas.items() if device is not None}
    return offsets, own, own.peak_bytes, Overlay(), others


def planned_overlaid(layout: Layout, tools: Tools) -> Placement | None:
    """Places every arena instance, in a gradient's memory if it fits there; None if none does."""
    placed = [i for i, b in enumerate(layout.instances) if b.kind == "arena"]
    gradients = gradients_of(layout)
    if not placed or not gradients or layout.others:
        return None
    both = [[layout.instances[i] for i in part] for part in (placed, gradients)]
    buffers, can_move = buffers_with_gradients(*both), movable(layout, placed)
    asked = [len(gradients), *map(int, can_move)]
    found = tools.plan(buffers, asked, lambda: plan_overlaid(buffers, can_move, tools))
    arena_bytes, overlay = overlay_of(found, placed, gradients, layout)
    if not overlay.guests:
        return None
    offsets = [0] * len(layout.instances)
    for index, offset in zip(placed, found.offsets.tolist(), strict=False):
        offsets[index] = offset
    return offsets, found, arena_bytes, overlay, {}


def place(buffers: Buffers, tools: Tools) -> ArenaPlan:
    """Places buffers in an arena as well as a program's are placed."""
    return tools.plan(buffers, (tools.alignment,), lambda: _plan(buffers, tools))


def _plan(buffers: Buffers, tools: Tools) -> ArenaPlan:
    fit = partial(first_fit, library=tools.functions)
    exact = partial(exact_search, library=tools.functions)
    how = {"effort_s": _PLAN_EFFORT_S, "enough": _ENOUGH}
    return plan(buffers, alignment=tools.alignment, **how, fit=fit, exact=exact)


def gradients_of(layout: Layout) -> list[int]:
    """Returns the instances that a backward makes for the user."""
    return [
        i
        for i, b in enumerate(layout.instances)
        # The memory of one whose size varies may be too small for a guest at other sizes.
        if (b.kind, b.part) == ("result", 1) and type(b.num_bytes) is int and b.num_bytes
    ]


def movable(layout: Layout, placed: Sequence[int]) -> list[bool]:
    """Returns which instances only native launches use: those take any address."""
    fixed = {
        launch.bases[view.buffer][0]
        for part in layout.parts
        for launch in part.launches
        if launch.launch.native is None
        for view in launch.launch.views()
    }
    return [i not in fixed and layout.instances[i].num_bytes > 0 for i in placed]


def buffers_with_gradients(instances: Sequence[Instance], gradients: Sequence[Instance]) -> Buffers:
    """Returns columns of the arena's instances, then of gradients, which live on."""
    end = max(b.death for b in (*instances, *gradients))
    kept = [replace(b, death=max(end, b.birth + 1)) for b in gradients]
    return buffers_of([*instances, *kept])


def plan_overlaid(buffers: Buffers, can_move: Sequence[bool], tools: Tools) -> ArenaPlan:
    """Plans ``len(can_move)`` buffers, in memory of the gradients that follow or in an arena."""
    padded = buffers.aligned(ALIGNMENT)
    num_placed = len(can_move)
    hosts = _Hosts(padded, buffers.size, num_placed, partial(first_fit, library=tools.functions))
    hosts.fill(np.flatnonzero(can_move))
    rest = np.flatnonzero(hosts.of < 0)
    arena = _plan(buffers.take(rest), replace(tools, alignment=ALIGNMENT))
    starts, peak_bytes = hosts.starts(arena.peak_bytes)
    offsets = np.concatenate([hosts.place, starts])
    guests = np.flatnonzero(hosts.of >= 0)
    offsets[guests] += offsets[hosts.of[guests]]
    offsets[rest] = arena.offsets
    return ArenaPlan(offsets, peak_bytes, lower_bound(padded), f"overlay, {arena.method}")


class _Hosts:
    """The gradients of a problem, being filled.

    Attributes:
        of: which host each buffer lies in, -1 for none.
        place: at which offset in it.
    """

    def __init__(self, padded: Buffers, sizes: IntArray, num_placed: int, fit: FirstFit) -> None:
        self._padded, self._fit = padded, fit
        self._first = num_placed
        self._room = sizes // ALIGNMENT * ALIGNMENT
        hosts = num_placed + np.flatnonzero(self._room[num_placed:] >= _MIN_HOST_BYTES)
        # What is written last serves longest.
        self._hosts = hosts[np.argsort(-padded.birth[hosts], kind="stable")]
        self.of = np.full(num_placed, -1, np.int64)
        self.place = np.zeros(num_placed, np.int64)

    def fill(self, waiting: IntArray) -> None:
        """Packs one host after the other by first fit, what dies last first."""
        birth, death, size = self._padded.birth, self._padded.death, self._padded.size
        for host in self._hosts:
            room = self._room[host]
            found = waiting[(death[waiting] <= birth[host]) & (size[waiting] <= room)]
            if not len(found):
                continue
            # What dies last is placed first, at the bottom: what dies sooner fits above it.
            sub = self._padded.take(found)
            places = self._fit(sub, np.lexsort((-sub.size, -sub.death)))
            fits = places + sub.size <= room
            self.of[found[fits]], self.place[found[fits]] = host, places[fits]
            waiting = np.setdiff1d(waiting, found[fits], assume_unique=True)

    def starts(self, base: int) -> tuple[IntArray, int]:
        """Returns where each gradient starts, one after the other from ``base``, and the end."""
        own = self._padded.size[self._first :]
        ends = base + np.cumsum(own)
        return ends - own, int(ends[-1])


def overlay_of(
    found: ArenaPlan, placed: Sequence[int], gradients: Sequence[int], layout: Layout
) -> tuple[int, Overlay]:
    """Reads a plan of :func:`plan_overlaid`: the bytes of its arena, and who lies where."""
    offsets = found.offsets.tolist()
    starts = offsets[len(placed) :]
    arena_bytes, guests = starts[0], dict[int, tuple[int, int]]()
    for instance, offset in zip(placed, offsets, strict=False):
        if offset >= arena_bytes and layout.instances[instance].num_bytes:
            index = int(np.searchsorted(starts, offset, side="right")) - 1
            guests[instance] = (gradients[index], offset - starts[index])
    return arena_bytes, Overlay(tuple(dict.fromkeys(host for host, _ in guests.values())), guests)


def copy_of_host(host: torch.Tensor) -> torch.Tensor:
    """Copies a host with everything in its memory."""
    memory = host.untyped_storage().clone()
    twin = torch.empty(0, dtype=host.dtype, device=host.device)
    return twin.set_(memory, host.storage_offset(), host.shape, host.stride())  # type: ignore[call-overload, no-any-return]


class UnalignedError(PlanError):
    """Kernels are handed views that begin elsewhere than they were compiled for.

    Attributes:
        inputs: by leaf, which of its inputs begin anywhere: kernels can be made that allow it.
    """

    def __init__(self, message: str, inputs: Mapping[Leaf, frozenset[int]]) -> None:
        super().__init__(message)
        self.inputs = inputs


def check_aligned(layout: Layout, kernel_lists: Mapping[Leaf, KernelList]) -> None:
    """Checks each operand of a Triton kernel; buffers themselves begin at multiples of more.

    Raises:
        UnalignedError: if some are views that begin in between, all inputs of closures.
        PlanError: if one is a view of anything else.
    """
    found: dict[Leaf, set[int]] = defaultdict(set)
    message = ""
    for placed, view in _unaligned(layout):
        message = (
            f"{placed.launch.name} of {placed.block} is handed a view that begins at byte "
            f"{placed.place(view).offset_bytes} of its buffer, and was compiled for multiples of "
            f"{WIDEST_LOAD_BYTES}. Hand the block a copy of it: .contiguous() or .clone()."
        )
        assert placed.of is not None  # what the link adds itself is no Triton kernel
        kernels = kernel_lists[placed.of.leaf]
        # What takes over the memory of an input begins where that begins.
        buffer = dict(kernels.in_place).get(view.buffer, view.buffer)
        if buffer >= kernels.num_inputs:
            raise PlanError(message)
        found[placed.of.leaf].add(buffer)
    if found:
        raise UnalignedError(message, {leaf: frozenset(inputs) for leaf, inputs in found.items()})


def _unaligned(layout: Layout) -> Iterator[tuple[PlacedLaunch, View]]:
    for placed in (placed for part in layout.parts for placed in part.launches):
        for view in _loaded_wide(placed):
            if placed.place(view).offset_bytes % WIDEST_LOAD_BYTES:
                yield placed, view


def _loaded_wide(placed: PlacedLaunch) -> Iterator[View]:
    """Yields the operands of a launch of which it loads several elements at once."""
    kernel, args = placed.launch.function, placed.launch.args
    wide = kernel.aligned_arguments if isinstance(kernel, TritonKernel) else ()
    yield from (args[i] for i in wide if i < len(args) and isinstance(args[i], View))


def loaded_wide(launches: Iterable[PlacedLaunch]) -> set[int]:
    """Returns the instances of which GPU kernels load several elements at once."""
    return {one.bases[view.buffer][0] for one in launches for view in _loaded_wide(one)}


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor where GPU kernels can load it: a copy, in the same layout, if need be."""
    if not tensor.data_ptr() % WIDEST_LOAD_BYTES:
        return tensor
    whole = tensor.as_strided((reach(tensor.shape, tensor.stride()),), (1,)).clone()
    return whole.as_strided(tensor.shape, tensor.stride())


def check_tensors_aligned(tensors: Sequence[torch.Tensor], names: Sequence[str]) -> None:
    """Checks where the model's own tensors begin.

    Raises:
        PlanError: if one begins where GPU kernels cannot load it.
    """
    for index, tensor in enumerate(tensors):
        if tensor.data_ptr() % WIDEST_LOAD_BYTES:
            name = names[index] if index < len(names) and names[index] else "an input"
            raise PlanError(
                f"{name} begins at an address that is no multiple of {WIDEST_LOAD_BYTES} bytes, "
                "which GPU kernels are compiled for: is it a view into another tensor? Give it "
                "memory of its own: tensor.data = tensor.clone()."
            )
