"""Adapter: rules for fake tensors where PyTorch's own differ from its kernels.

One kernel takes more than its rule allows: the added rule states the layout of the result, and the
kernel goes on checking its operands. Other rules say other strides than their kernels make, or
another dtype.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_impls import op_implementations_dict
from torch._subclasses.fake_tensor import log as failures

_ROW_BYTES = 16  # rows of a grouped product start at multiples of this


_FLASH = "_scaled_dot_product_flash_attention_for_cpu"
_IS_ACTIVE: ContextVar[bool] = ContextVar("lazyinline_fake_rules", default=False)


@contextmanager
def kernels_own_rules() -> Iterator[None]:
    """Makes fake tensors use our rule inside, unless PyTorch's table has one of its own."""
    for name, rule in (("_grouped_mm", _grouped_mm), (_FLASH, _flash_attention)):
        operator = getattr(getattr(torch.ops.aten, name, None), "default", None)
        if operator is not None and operator not in op_implementations_dict:
            # Never removed: all threads share PyTorch's table, and another may be tracing. Outside
            # of this context the rule returns NotImplemented, and PyTorch uses its own.
            op_implementations_dict[operator] = rule
    token = _IS_ACTIVE.set(True)
    try:
        yield
    finally:
        _IS_ACTIVE.reset(token)


@contextmanager
def errors_unlogged() -> Iterator[None]:
    """Stops PyTorch from also logging errors of fake tensors that it raises in this thread."""
    thread, log = threading.get_ident(), failures

    def says(record: logging.LogRecord) -> bool:
        return record.levelno < logging.ERROR or threading.get_ident() != thread

    log.addFilter(says)
    try:
        yield
    finally:
        log.removeFilter(says)


def _grouped_mm(fake_mode: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
    """The rule of ``_grouped_mm``: PyTorch's takes bfloat16 only and does not pad rows."""
    if not _IS_ACTIVE.get():
        return NotImplemented
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


def _flash_attention(fake_mode: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
    """The rule of attention on a CPU: PyTorch's said float32 of its sums before torch 2.13."""
    if not _IS_ACTIVE.get() or args[0].dtype is not torch.float64:
        return NotImplemented
    token = _IS_ACTIVE.set(False)
    try:
        with fake_mode:
            result, sums = func(*args, **kwargs)
            return result, sums.to(torch.float64)
    finally:
        _IS_ACTIVE.reset(token)


def _kinds(device: torch.device) -> tuple[torch.dtype, ...]:
    known = () if device.type == "cuda" else (torch.bfloat16,)  # a GPU's layout is PyTorch's rule
    return (torch.float32, torch.float16, *known)


IN_SUGGESTED_FORMAT = frozenset(
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


def with_strides_of_kernel(operator: Any, args: tuple[Any, ...], result: Any) -> Any:
    """Gives the fake result of an operator of the set above the strides of its kernel."""
    if operator not in IN_SUGGESTED_FORMAT:
        return result
    if isinstance(result, tuple | list):
        return (with_strides_of_kernel(operator, args, result[0]), *result[1:])
    if not isinstance(result, torch.Tensor) or result.device.type != "cpu":
        return result
    wanted = suggest_memory_format(args[0])
    if result.is_contiguous(memory_format=wanted):
        return result
    return torch.empty_like(result, memory_format=wanted)
