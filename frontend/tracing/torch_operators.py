"""Adapter: operators that a capture refuses, or takes in another layout.

PyTorch turns its own in-place operators into pure ones; somebody else's
(``torch.library.custom_op(mutates_args=...)``) are refused.

Where a kernel takes more than PyTorch's rule for fake tensors allows, the rule stands in the way of
capture only. What is added here states the layout of the result, as the kernel makes it; the kernel
itself goes on checking its operands. Where a rule says another layout than the kernel's, results
would be handed out in that one: what is known is put right. (What is not known is copied into the
layout that the rule says, where a kernel is recorded.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_impls import op_implementations_dict

from ...reuse.errors import CaptureError
from ...reuse.torch_names import operator_named
from .frames import user_line

_OWN_NAMESPACES = """
    _c10d_functional _c10d_functional_autograd _dtensor _native _quantized _test aten c10d cuda
    debug_mode_ops debugprims export fsdp higher_order inductor inductor_prims mkl
    mkldnn mkldnn_prepacked onednn prepacked prim prims profiler quantization quantized
    quantized_decomposed rngprims sparse static_runtime streams symm_mem xnnpack
"""
_PYTORCHS = tuple(f"{name}::" for name in _OWN_NAMESPACES.split())


def refused_operators() -> dict[Any, Callable[..., Any]]:
    """Returns, for each operator of somebody else that changes operands, what refuses it."""
    names = torch._C._dispatch_get_all_op_names()
    found = [operator_named(name) for name in names if not name.startswith(_PYTORCHS)]
    return {o: _refusing(o) for o in found if o is not None and o._schema.is_mutable}


def _refusing(operator: Any) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise CaptureError(
            f"The model's forward calls {operator} at {user_line()}, which changes what it is "
            "given, and a program only knows how PyTorch's own operators do that. Let it return "
            "new tensors (mutates_args=())."
        )

    return refuse


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
    """Adds the rule inside, where PyTorch has none of its own."""
    operator = getattr(getattr(torch.ops.aten, "_grouped_mm", None), "default", None)
    if operator is None or operator in op_implementations_dict:
        yield
        return
    op_implementations_dict[operator] = _grouped_mm
    try:
        yield
    finally:
        del op_implementations_dict[operator]


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
