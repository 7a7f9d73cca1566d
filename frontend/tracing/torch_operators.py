"""Adapter: operators that a capture refuses, or takes in another layout.

PyTorch turns its own in-place operators into pure ones; somebody else's
(``torch.library.custom_op(mutates_args=...)``) are refused.

Where PyTorch's rule for fake tensors says another layout than the kernel's, results would be handed
out in that one: what is known is put right. (What is not known is copied into the layout that the
rule says, where a kernel is recorded.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._prims_common import suggest_memory_format

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
