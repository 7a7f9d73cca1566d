"""Adapter: operators whose kernels differ from PyTorch's rules for fake tensors.

Where a kernel takes more than the rule allows, the rule stands in the way of capture only. What is
added here states the layout of the result, as the kernel makes it; the kernel itself goes on
checking its operands. Where a rule says another layout than the kernel's, results would be handed
out in that one: what is known is put right. (What is not known is copied into the layout that the
rule says, where a kernel is recorded.)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_impls import op_implementations_dict

LAID_OUT_AS_SUGGESTED = frozenset(
    {
        torch.ops.aten.native_group_norm.default,
        torch.ops.aten.native_batch_norm.default,
        torch.ops.aten._native_batch_norm_legit.default,
        torch.ops.aten._native_batch_norm_legit.no_stats,
        torch.ops.aten.native_channel_shuffle.default,
        torch.ops.aten.channel_shuffle.default,
        torch.ops.aten.roll.default,
    }
)
"""Operators whose first result on a CPU is channels-last if the first operand is, else contiguous.
"""

_ROW_BYTES = 16  # rows of a grouped product start at multiples of this


@contextmanager
def kernels_own_rules() -> Iterator[None]:
    """Adds the rules inside, where PyTorch has none of its own."""
    added = [op for op in _rules() if op not in op_implementations_dict]
    for op in added:
        op_implementations_dict[op] = _rules()[op]
    try:
        yield
    finally:
        for op in added:
            del op_implementations_dict[op]


def _rules() -> dict[Any, Any]:
    grouped = getattr(torch.ops.aten, "_grouped_mm", None)
    return {} if grouped is None else {grouped.default: _grouped_mm}


def laid_out_by_kernel(operator: Any, args: tuple[Any, ...], result: Any) -> Any:
    """Returns the result of one of these operators, fake, in its kernel's layout."""
    if isinstance(result, tuple | list):
        return (laid_out_by_kernel(operator, args, result[0]), *result[1:])
    if not isinstance(result, torch.Tensor) or result.device.type != "cpu":
        return result
    wanted = suggest_memory_format(args[0])
    if result.is_contiguous(memory_format=wanted):
        return result
    return torch.empty_like(result, memory_format=wanted)


def _grouped_mm(fake_mode: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
    """Product by groups of rows: PyTorch's rule knows bfloat16 only, and no padding of rows."""
    a, b = args[:2]
    offsets: Any = args[2] if len(args) > 2 else kwargs.get("offs")
    others = [*args[3:], *(kwargs.get(name) for name in ("bias", "out_dtype"))]
    if a.dtype not in _kinds(a.device) or b.dtype != a.dtype or any(x is not None for x in others):
        return NotImplemented
    groups = (offsets.shape[0],) if (a.dim(), b.dim()) == (2, 2) else ()
    groups = (a.shape[0],) if (a.dim(), b.dim()) == (3, 3) else groups
    shape = (*groups, a.shape[-2], b.shape[-1])
    multiple = _ROW_BYTES // a.element_size()
    row = (shape[-1] + multiple - 1) // multiple * multiple
    strides = (shape[-2] * row, row, 1)[-len(shape) :]
    with fake_mode:
        return torch.empty_strided(shape, strides, dtype=a.dtype, device=a.device)


def _kinds(device: torch.device) -> tuple[torch.dtype, ...]:
    known = () if device.type == "cuda" else (torch.bfloat16,)  # a GPU's layout is PyTorch's rule
    return (torch.float32, torch.float16, *known)
