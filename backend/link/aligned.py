"""Whether the operands of GPU kernels lie where the kernels were compiled to find them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import torch

from ...reuse.errors import PlanError
from ...reuse.ir.program import Leaf
from ..gpu.torch_triton import aligned_arguments
from ..launches.kernel_list import KernelList, View
from .layout import Layout, PlacedLaunch

WIDEST_LOAD_BYTES = 16
"""Inductor compiles a kernel for operands at multiples of this, and loads so much at once."""


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
        aligned = aligned_arguments(placed.launch.function)
        for position in aligned.intersection(range(len(placed.launch.args))):
            view = placed.launch.args[position]
            if isinstance(view, View) and placed.place(view).offset_bytes % WIDEST_LOAD_BYTES:
                yield placed, view


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
