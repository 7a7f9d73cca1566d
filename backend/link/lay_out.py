"""Programs laid out one after the other, and who owns the memory of what they return."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import torch

from ...reuse.ir.program import Leaf
from ...reuse.ir.types import TensorType, contiguous_stride
from ..arena.live_ranges import lower_bound
from ..gpu.roofline import is_product
from ..gpu.targets import Target
from ..launches.kernel_list import KernelList
from .layout import BufferKind, Instance, Layout, Part, Placed, buffers_of
from .link import FlatProgram

Results: TypeAlias = Literal["owned", "pinned"]
"""Whether the caller keeps what a run returns, or it stays in the arena until the next run."""


def lay_out(
    flats: Sequence[FlatProgram],
    kernel_lists: Mapping[Leaf, KernelList],
    num_results: Sequence[int],
    backward_inputs: Sequence[tuple[str, Any]] = (),
    results: Results = "owned",
    runs: Literal["native", "python"] = "native",
) -> Layout:
    """Lays out what a :class:`..run.planned.PlannedProgram` of the same arguments plans."""
    layout = Layout(runs=runs)
    first = flats[0]
    layout.add(first, [layout.given(first.slot_types[s]) for s in first.inputs], kernel_lists)
    forward = layout.parts[0]
    for flat in flats[1:]:
        inputs = []
        for kind, which in backward_inputs:
            if kind == "output":
                inputs.append(forward.outputs[which])
            elif kind == "input":
                inputs.append(forward.inputs[which])
            else:
                inputs.append(layout.given(which))
        layout.add(flat, inputs, kernel_lists)
    if results == "pinned":
        _pin_results(layout)
    else:
        _own_results(layout, num_results)
    return layout


def least_bytes(layout: Layout) -> int:
    """Returns what a layout holds at least at its peak: in the arena, and outside of it."""
    placed = [b for b in layout.instances if b.kind == "arena"]
    return (lower_bound(buffers_of(placed)) if placed else 0) + outside_bytes(layout)


def outside_bytes(layout: Layout) -> int:
    """Returns what launches allocate for themselves, at most, at one time."""
    outside = [b for b in layout.instances if b.kind == "foreign"]
    outside += layout.scratch + layout.workspaces
    return lower_bound(buffers_of(outside)) if outside else 0


def add_workspaces(layout: Layout, target: Target) -> None:
    """Adds what cuBLAS works in: one place for each stream with products, as long as it runs.

    PyTorch hands it out, and no public interface of PyTorch takes memory of ours for it: the plan
    knows its size and its life, and not its address.
    """
    launches = [placed.launch for part in layout.parts for placed in part.launches]
    for _ in dict.fromkeys(launch.stream for launch in launches if is_product(launch)):
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


def _own_results(layout: Layout, num_results: Sequence[int]) -> None:
    """Gives the user buffers of their own for what they receive.

    A result that the program still needs, or that shares its buffer with another result, is
    copied out; any other is made by its launch in the user's buffer.
    """
    for number, part in enumerate(layout.parts):
        needed = {p.instance for p in part.outputs[num_results[number] :]}
        taken: set[int] = set()
        for index in range(num_results[number]):
            placed = part.outputs[index]
            instance = layout.instances[placed.instance]
            if instance.kind == "given":
                continue
            shared = placed.instance in needed or placed.instance in taken
            if shared or instance.part != number:
                part.outputs[index] = _copy_out(layout, part, placed, "result")
            elif instance.kind == "arena":
                instance.kind = "result"
            taken.add(placed.instance)


def _pin_results(layout: Layout) -> None:
    """Gives every output a place of its own in the arena, which lasts until the next run."""
    part = layout.parts[-1]
    taken: set[int] = set()
    for index, placed in enumerate(part.outputs):
        if layout.instances[placed.instance].kind != "arena" or placed.instance in taken:
            placed = part.outputs[index] = _copy_out(layout, part, placed, "arena")
        taken.add(placed.instance)
    for instance in taken:
        layout.instances[instance].death = layout.time


def _copy_out(layout: Layout, part: Part, placed: Placed, kind: BufferKind) -> Placed:
    """Adds a launch that copies a value into a buffer of its own, at the end of a part."""
    type_ = TensorType(placed.dtype, placed.shape, placed.stride, torch.device("cpu"))
    stride = placed.stride if type_.is_dense else contiguous_stride(placed.shape)
    number = layout.parts.index(part)
    layout.instances.append(Instance(kind, type_.num_bytes, layout.time, layout.time + 1, number))
    target = Placed(len(layout.instances) - 1, placed.dtype, placed.shape, stride, 0)
    part.launches.append(layout.apply("copy_", target, placed))
    return target
