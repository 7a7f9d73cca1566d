"""Places the buffers of a layout in an arena, or in the memory of gradients not yet written.

A gradient belongs to the user, in memory of its own, which is unused until the launch that writes
it. So the memory of large gradients (*hosts*) is allocated when the forward begins, and holds
buffers that are dead by the time the gradient is written (*guests*). A host is returned after the
death of its last guest, and no launch of ours uses it again: the user gets an ordinary tensor that
aliases nothing.

One address space is planned, so that one check and one cache entry cover all of it: the arena
first, then the gradients, each with its guests inside.

This file also checks the alignment of operands of GPU kernels, and says where a program runs.
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
from ..arena import ALIGNMENT, ArenaPlan, Buffers, FirstFit, IntArray, lower_bound, plan
from ..gpu.targets import Target
from ..gpu.torch_cuda import TritonKernel
from ..launches import torch_native
from ..launches.kernel_list import KernelList, View
from ..launches.torch_native import exact_search, first_fit
from .layout import Instance, Layout, PlacedLaunch, buffers_of

# A plan within half a percent of the lower bound is good enough to stop looking.
_ENOUGH = 1.005
_PLAN_EFFORT_S = 0.3
# Smaller gradients are not used as hosts: they hold too little to be allocated early.
_MIN_HOST_BYTES = 64 * 1024
WIDEST_LOAD_BYTES = 16
"""The alignment that Inductor compiles a GPU kernel's operands for: the bytes of one load."""


@dataclass(frozen=True)
class Overlay:
    """Which gradients are hosts, and where their guests are."""

    hosts: tuple[int, ...] = ()  # instances of gradients, in order
    # Arena instance -> its host, and the offset in it in bytes.
    guests: dict[int, tuple[int, int]] = field(default_factory=dict)


Loader: TypeAlias = Callable[[TritonKernel], Callable[..., Any]]
"""Loads a kernel; returns a function that launches it on tensors and sizes."""


@dataclass(frozen=True)
class Place:
    """The device that a program runs on, and who launches its kernels."""

    # The device of the arena.
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    load: Loader = lambda kernel: kernel  # loads GPU kernels
    # Whether a step is captured as one CUDA graph, or its launches run one by one.
    graphs: Literal["captured", "none"] = "none"
    # ``"apart"`` if a kernel's first launch tunes it: that takes memory, so it runs on operands of
    # its own, before the arena is allocated.
    first_launches: Literal["apart", "within"] = "within"
    missing: str = ""  # the device that a program is compiled for but that is not here; else ""
    # The facts of the GPU; None on a CPU, and on a GPU that the table does not have.
    target: Target | None = None
    # Further devices of the program, each with an arena of its own.
    others: tuple[torch.device, ...] = ()

    @property
    def launches(self) -> Literal["native", "python"]:
        """Whether the native loop, which is for CPUs only, may run launches there."""
        return "python" if self.missing or self.device.type != "cpu" else "native"

    def check_is_here(self) -> None:
        """Raises PlanError if there is nothing to run on."""
        if self.missing:
            raise PlanError(
                f"This was compiled for {self.missing}, which is not here, so nothing was run. "
                "last_report has the plan; without target= it runs on what is here."
            )


HERE = Place()  # the CPU, where everything can run


@dataclass(frozen=True)
class Tools:
    """The functions that make a planned program, which a cache can replace."""

    # Places buffers, or returns the cached plan of an equal request.
    plan: Callable[[Buffers, Sequence[int], Callable[[], ArenaPlan]], ArenaPlan] = (
        lambda _, asked, make: make()
    )
    # Builds the native loop, or returns the cached one.
    native: Callable[[], torch_native.NativeLibrary] = torch_native.native_library
    alignment: int = ALIGNMENT  # what every offset is a multiple of, in bytes
    place: Place = HERE  # where programs run

    def answered_by(self, plans: Iterable[ArenaPlan]) -> Tools:
        """Returns the same tools with known plans, in the order of the requests for them."""
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
"""Offsets by instance, the plan, the bytes of its arena, the buffers in gradients instead, and the
bytes of arenas on further devices."""


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
    """Places arena instances, in gradients' memory where they fit; None if none fits there."""
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
    """Plans an arena for buffers, with the effort spent on a program's."""
    return tools.plan(buffers, (tools.alignment,), lambda: _plan(buffers, tools))


def _plan(buffers: Buffers, tools: Tools) -> ArenaPlan:
    fit = partial(first_fit, library=tools.functions)
    exact = partial(exact_search, library=tools.functions)
    how = {"effort_s": _PLAN_EFFORT_S, "enough": _ENOUGH}
    return plan(buffers, alignment=tools.alignment, **how, fit=fit, exact=exact)


def gradients_of(layout: Layout) -> list[int]:
    """Returns the instances of the gradients that a backward returns to the user."""
    return [
        i
        for i, b in enumerate(layout.instances)
        # Not of symbolic size: at other sizes it may be too small for its guests.
        if (b.kind, b.part) == ("result", 1) and type(b.num_bytes) is int and b.num_bytes
    ]


def movable(layout: Layout, placed: Sequence[int]) -> list[bool]:
    """Says which instances only native launches use: those accept any address."""
    fixed = {
        launch.bases[view.buffer][0]
        for part in layout.parts
        for launch in part.launches
        if launch.launch.native is None
        for view in launch.launch.views()
    }
    return [i not in fixed and layout.instances[i].num_bytes > 0 for i in placed]


def buffers_with_gradients(instances: Sequence[Instance], gradients: Sequence[Instance]) -> Buffers:
    """Returns the arena's instances, then the gradients, which live to the end."""
    end = max(b.death for b in (*instances, *gradients))
    kept = [replace(b, death=max(end, b.birth + 1)) for b in gradients]
    return buffers_of([*instances, *kept])


def plan_overlaid(buffers: Buffers, can_move: Sequence[bool], tools: Tools) -> ArenaPlan:
    """Plans ``len(can_move)`` buffers, in the gradients that follow them or in an arena."""
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
    """The gradients of a problem, while guests are placed in them."""

    def __init__(self, padded: Buffers, sizes: IntArray, num_placed: int, fit: FirstFit) -> None:
        self._padded, self._fit = padded, fit
        self._first = num_placed
        self._room = sizes // ALIGNMENT * ALIGNMENT
        hosts = num_placed + np.flatnonzero(self._room[num_placed:] >= _MIN_HOST_BYTES)
        # The gradient that is written last can hold guests for the longest time.
        self._hosts = hosts[np.argsort(-padded.birth[hosts], kind="stable")]
        self.of = np.full(num_placed, -1, np.int64)  # for each buffer its host; -1 for none
        self.place = np.zeros(num_placed, np.int64)  # for each buffer its offset in the host

    def fill(self, waiting: IntArray) -> None:
        """Packs one host after the other by first fit, the buffers that die last first."""
        birth, death, size = self._padded.birth, self._padded.death, self._padded.size
        for host in self._hosts:
            room = self._room[host]
            found = waiting[(death[waiting] <= birth[host]) & (size[waiting] <= room)]
            if not len(found):
                continue
            # Buffers that die last are placed first, at the bottom; others fit above them.
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
    """Reads a plan of :func:`plan_overlaid`: the bytes of its arena, and the guests."""
    offsets = found.offsets.tolist()
    starts = offsets[len(placed) :]
    arena_bytes, guests = starts[0], dict[int, tuple[int, int]]()
    for instance, offset in zip(placed, offsets, strict=False):
        if offset >= arena_bytes and layout.instances[instance].num_bytes:
            index = int(np.searchsorted(starts, offset, side="right")) - 1
            guests[instance] = (gradients[index], offset - starts[index])
    return arena_bytes, Overlay(tuple(dict.fromkeys(host for host, _ in guests.values())), guests)


def copy_of_host(host: torch.Tensor) -> torch.Tensor:
    """Copies a host with its whole storage, guests included."""
    memory = host.untyped_storage().clone()
    twin = torch.empty(0, dtype=host.dtype, device=host.device)
    return twin.set_(memory, host.storage_offset(), host.shape, host.stride())  # type: ignore[call-overload, no-any-return]


class UnalignedError(PlanError):
    """Kernels get views with another alignment than they were compiled for."""

    def __init__(self, message: str, inputs: Mapping[Leaf, frozenset[int]]) -> None:
        super().__init__(message)
        # For each leaf, its unaligned inputs: kernels can be compiled that allow them.
        self.inputs = inputs


def check_aligned(layout: Layout, kernel_lists: Mapping[Leaf, KernelList]) -> None:
    """Checks the alignment of each operand of a Triton kernel; buffers themselves are aligned.

    Raises UnalignedError for unaligned views of closures' inputs, PlanError for one of another
    buffer.
    """
    found: dict[Leaf, set[int]] = defaultdict(set)
    message = ""
    for placed, view in _unaligned(layout):
        message = (
            f"{placed.launch.name} of {placed.block} is handed a view that begins at byte "
            f"{placed.place(view).offset_bytes} of its buffer, and was compiled for multiples of "
            f"{WIDEST_LOAD_BYTES}. Hand the block a copy of it: .contiguous() or .clone()."
        )
        assert placed.of is not None  # launches that the link adds are no Triton kernels
        kernels = kernel_lists[placed.of.leaf]
        # A buffer that reuses an input's memory has the input's alignment.
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
    """Yields the operands from which a launch loads several elements at once."""
    kernel, args = placed.launch.function, placed.launch.args
    wide = kernel.aligned_arguments if isinstance(kernel, TritonKernel) else ()
    yield from (args[i] for i in wide if i < len(args) and isinstance(args[i], View))


def loaded_wide(launches: Iterable[PlacedLaunch]) -> set[int]:
    """Returns the instances from which GPU kernels load several elements at once."""
    return {one.bases[view.buffer][0] for one in launches for view in _loaded_wide(one)}


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor that is aligned for GPU kernels: a copy of the same layout if need be."""
    if not tensor.data_ptr() % WIDEST_LOAD_BYTES:
        return tensor
    whole = tensor.as_strided((reach(tensor.shape, tensor.stride()),), (1,)).clone()
    return whole.as_strided(tensor.shape, tensor.stride())


def check_tensors_aligned(tensors: Sequence[torch.Tensor], names: Sequence[str]) -> None:
    """Raises PlanError if one of the model's own tensors is not aligned for GPU kernels."""
    for index, tensor in enumerate(tensors):
        if tensor.data_ptr() % WIDEST_LOAD_BYTES:
            name = names[index] if index < len(names) and names[index] else "an input"
            raise PlanError(
                f"{name} begins at an address that is no multiple of {WIDEST_LOAD_BYTES} bytes, "
                "which GPU kernels are compiled for: is it a view into another tensor? Give it "
                "memory of its own: tensor.data = tensor.clone()."
            )
