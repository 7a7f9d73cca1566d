"""Whether the operands of GPU kernels lie where the kernels were compiled to find them."""

from __future__ import annotations

from ...reuse.errors import PlanError
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
            if isinstance(placed.launch.function, TritonKernel):
                _check(placed)


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
