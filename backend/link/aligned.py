"""Whether the operands of GPU kernels lie where the kernels were compiled to find them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...reuse.errors import PlanError
from ..gpu.torch_triton import LoadedKernel
from ..gpu.triton_kernel import TritonKernel
from ..launches.kernel_list import View
from .layout import Layout, PlacedLaunch

WIDEST_LOAD_BYTES = 16
"""Inductor compiles a kernel for operands at multiples of this, and loads so much at once."""


def check_aligned(layout: Layout) -> None:
    """Checks each operand of a Triton kernel; buffers themselves begin at multiples of more.

    Raises:
        PlanError: if one is a view that begins in between.
    """
    for part in layout.parts:
        for placed in part.launches:
            if isinstance(placed.launch.function, (TritonKernel, LoadedKernel)):
                _check(placed)


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


def _check(placed: PlacedLaunch) -> None:
    for view in placed.launch.args:
        if not isinstance(view, View):
            continue
        offset_bytes = placed.bases[view.buffer][1] + view.offset_bytes
        if offset_bytes % WIDEST_LOAD_BYTES:
            raise PlanError(
                f"{placed.launch.name} of {placed.block} is handed a view that begins at byte "
                f"{offset_bytes} of its buffer, and GPU kernels are compiled for multiples of "
                f"{WIDEST_LOAD_BYTES}. Hand the block a copy of it: .contiguous() or .clone()."
            )
