"""Adapter: Inductor's table of decompositions, corrected where its kernels would differ from eager.

A rule that returns ``NotImplemented`` leaves the operator to Inductor's lowering.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.fx

from ...autodiff.traces.joint_trace import draw_mask
from ...reuse.errors import PlanError
from ...reuse.ir.types import TensorType
from .torch_corrections import PUTTING, settings

aten = torch.ops.aten

NOT_FROM_THE_END = (
    torch.ops.aten.index_select.default,
    torch.ops.aten.index_add.default,
    torch.ops.aten.index_copy.default,
    torch.ops.aten.index_reduce.default,
)
"""Inductor generates ``x[index]`` for these, but in eager their index -1 is an error."""

_POOLING = (
    torch.ops.aten.max_pool2d_with_indices.default,
    torch.ops.aten.max_pool3d_with_indices.default,
)

_TRUTHS = tuple(
    getattr(packet, overload)
    for packet in (aten.all, aten.any)
    for overload in ("default", "dim", "dims")
)

_EXTREMES = (
    *(getattr(aten, name).default for name in ("amin", "amax", "argmin", "argmax", "min", "max")),
    *(getattr(aten, name).dim for name in ("min", "max")),
)

_AVERAGE_BACKWARDS = {2: aten.avg_pool2d_backward.default, 3: aten.avg_pool3d_backward.default}


def decompositions() -> Mapping[Any, Callable[..., Any]]:
    """Returns Inductor's decomposition table, with the corrections of this file."""
    from torch._inductor.decomposition import select_decomp_table

    with settings():
        table = dict(select_decomp_table())
    # Draws the same mask out of place. Inductor makes it an in-place draw, and may fuse a reader of
    # the mask into a kernel that runs before.
    table[torch.ops.aten.bernoulli.p] = draw_mask
    table[torch.ops.aten.bernoulli.default] = _below_probabilities
    for operator in NOT_FROM_THE_END:
        table[operator] = _without_wrapping(table[operator])
    table[torch.ops.aten.cat.default] = _dense(table[torch.ops.aten.cat.default])
    for operator in _POOLING:
        if operator in table:
            table[operator] = _with_lowerings(table[operator])
    table |= {operator: _into_a_copy(operator) for operator in PUTTING}
    if torch.__version__ < "2.13":
        copying = torch.ops.aten._to_copy.default
        table[copying] = _rounding(table[copying])
    table |= {operator: _of_bytes(operator, table.get(operator)) for operator in _TRUTHS}
    table |= {operator: _among_wider(operator, table.get(operator)) for operator in _EXTREMES}
    nearest = aten.upsample_nearest2d.default
    table[nearest] = _doubled(table[nearest])
    table[aten.upsample_nearest2d_backward.default] = _by_scales
    table |= {operator: _by_window(operator, n) for n, operator in _AVERAGE_BACKWARDS.items()}
    # Scatters stay whole, so that :func:`scatters_into_complex` finds them. A rule of an operator
    # is one of its ``out`` overload, too, but takes no ``out``.
    left_out = {o for o in table if o in SCATTERS or str(o).endswith(".out")}
    return {operator: rule for operator, rule in table.items() if operator not in left_out}


def _below_probabilities(probabilities: torch.Tensor, generator: Any = None) -> Any:
    """Decomposes ``bernoulli`` into the comparison of PyTorch's CPU kernel: in float64 if given."""
    if generator is not None or not probabilities.is_floating_point():
        return NotImplemented
    is_double = probabilities.dtype is torch.float64
    numbers = torch.rand(
        probabilities.shape,
        dtype=torch.float64 if is_double else torch.float32,
        device=probabilities.device,
    )
    return (numbers < probabilities).to(probabilities.dtype)


def _into_a_copy(operator: Any) -> Callable[..., Any]:
    """Applies an operator to a clone of a tensor that has gaps or overlapping elements."""

    def decomposition(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if _is_dense(x):
            return NotImplemented
        copy = x.clone()
        if not _is_dense(copy):  # this rule would be asked again without end
            raise PlanError(f"whether strides {copy.stride()} have gaps depends on the sizes")
        return operator(copy, *args, **kwargs)

    return decomposition


def _is_dense(tensor: torch.Tensor) -> bool:
    # Of symbolic strides PyTorch can tell that they are contiguous where their terms do not.
    return tensor.is_contiguous() or TensorType.of(tensor).is_dense


def _of_bytes(operator: Any, rule: Callable[..., Any] | None) -> Callable[..., Any]:
    """Makes the result of ``all`` or ``any`` a byte where the operand has bytes."""

    def decomposition(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if x.dtype is torch.uint8:
            return operator(x != 0, *args, **kwargs).to(torch.uint8)
        return rule(x, *args, **kwargs) if rule is not None else NotImplemented

    return decomposition


def _among_wider(operator: Any, rule: Callable[..., Any] | None) -> Callable[..., Any]:
    """Finds the least or greatest of 8-bit integers among 32-bit ones.

    Inductor fills vectors of bytes in part, and zeros of the rest count (pytorch/pytorch#191499).
    """

    def decomposition(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if x.dtype not in (torch.int8, torch.uint8):
            return rule(x, *args, **kwargs) if rule is not None else NotImplemented
        found = operator(x.to(torch.int32), *args, **kwargs)
        places = found if isinstance(found, tuple) else (found,)
        narrow = [t.to(x.dtype) if t.dtype is torch.int32 else t for t in places]
        return tuple(narrow) if isinstance(found, tuple) else narrow[0]

    return decomposition


def _rounding(cast: Callable[..., Any]) -> Callable[..., Any]:
    """Writes the result of a cast to fewer bits to memory, where no lowering can make it round."""
    import torch._inductor.test_operators

    def decomposition(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        made = cast(x, *args, **kwargs)
        is_short = made.dtype in (torch.bfloat16, torch.float16)
        is_longer = x.dtype in (torch.float32, torch.float64)
        return torch.ops._inductor_test.realize.default(made) if is_short and is_longer else made

    return decomposition


def _by_scales(
    gradient: torch.Tensor,
    output_size: Sequence[Any],
    input_size: Sequence[Any],
    scales_h: float | None = None,
    scales_w: float | None = None,
) -> Any:
    """Leaves the gradient of nearest upsampling to PyTorch's kernel where Inductor's differs.

    Inductor's follows the sizes alone: with ``scale_factor=0.6`` eager takes every 1.67th element
    of seven, Inductor the gradient of every 1.75th. Its lowering is for the operator in 2d; that
    in 3d, of depth 1, is PyTorch's kernel.
    """
    heights, widths = zip(output_size, input_size[-2:], strict=True)
    if _is_doubled(*heights, scales_h) and _is_doubled(*widths, scales_w):
        return NotImplemented
    batch, (height, width) = input_size[:-2], input_size[-2:]
    sizes, sizes_before = [1, *output_size], [*batch, 1, height, width]
    scales = (None, scales_h, scales_w)
    return aten.upsample_nearest3d_backward.default(
        gradient.unsqueeze(2), sizes, sizes_before, *scales
    ).squeeze(2)


def _is_doubled(size: Any, size_before: Any, scale: float | None) -> bool:
    """Whether a size is another one times a power of two, so that no quotient is rounded."""
    if not (isinstance(size, int) and isinstance(size_before, int)) or size % size_before:
        return False
    factor = size // size_before
    # Twice the size, or the same, is what eager takes without a look at the scale.
    return factor in (1, 2) or (factor & (factor - 1) == 0 and scale in (None, factor))


def _doubled(upsample: Callable[..., Any]) -> Callable[..., Any]:
    """Upsamples to twice the size (2.1 times seven is 14, too) as eager: each element twice."""

    def decomposition(
        x: torch.Tensor,
        output_size: Sequence[Any],
        scales_h: float | None = None,
        scales_w: float | None = None,
    ) -> Any:
        scales = zip(output_size, x.shape[-2:], (scales_h, scales_w), strict=True)
        return upsample(x, output_size, *(None if _is_doubled(*one) else one[2] for one in scales))

    return decomposition


def _by_window(backward: Any, num_dims: int) -> Callable[..., Any]:
    """Corrects the gradient of average pooling for windows that ``ceil_mode`` cuts off.

    Inductor divides by the size of a whole window, eager and the forward by what is left of it.
    """

    def decomposition(
        gradient: torch.Tensor,
        x: torch.Tensor,
        kernel_size: Sequence[int],
        stride: Sequence[int],
        padding: Sequence[int],
        *how: Any,
    ) -> Any:
        ceil_mode, count_include_pad, divisor = (*how, None)[:3]
        if not (ceil_mode and count_include_pad) or divisor is not None:
            return NotImplemented
        kind = torch.promote_types(gradient.dtype, torch.float32)
        scaled = gradient.to(kind)
        # Each is a list of one number, for all dimensions, or of one for each.
        given = (kernel_size, stride or kernel_size, padding)
        windows, steps, pads = each = [[*one] * (num_dims // len(one)) for one in given]
        for dim, window, step, pad in zip(range(-num_dims, 0), windows, steps, pads, strict=True):
            starts = torch.arange(gradient.shape[dim], device=gradient.device) * step
            left = (x.shape[dim] + 2 * pad - starts).clamp(max=window)
            scaled = scaled * (window / left.to(kind)).view([-1] + [1] * (-dim - 1))
        return backward(scaled.to(gradient.dtype), x, *each, True, True, math.prod(windows))

    return decomposition


def _with_lowerings(decomposition: Callable[..., Any]) -> Callable[..., Any]:
    """Imports the module that a decomposition of pooling needs; Inductor imports it later."""

    def decomposed(*args: Any, **kwargs: Any) -> Any:
        importlib.import_module("torch._inductor.lowering")
        return decomposition(*args, **kwargs)

    return decomposed


def _dense(cat: Callable[..., Any]) -> Callable[..., Any]:
    """Makes the result of ``cat`` contiguous, unless it is channels-last: it may be a mere copy."""

    def decomposition(tensors: list[torch.Tensor], dim: int = 0) -> Any:
        made = cat(tensors, dim)
        if not isinstance(made, torch.Tensor):
            return made
        form = {4: torch.channels_last, 5: torch.channels_last_3d}.get(made.dim())
        is_last = form is not None and made.is_contiguous(memory_format=form)
        return made if is_last else made.contiguous()

    return decomposition


def _without_wrapping(decomposition: Callable[..., Any]) -> Callable[..., Any]:
    """Replaces negative indices by one that is out of range, for which a kernel raises."""

    def checked(x: torch.Tensor, dim: int, index: torch.Tensor, *rest: Any, **options: Any) -> Any:
        size = x.shape[dim] if x.dim() else 1
        return decomposition(x, dim, torch.where(index < 0, size, index), *rest, **options)

    return checked


SCATTERS = (
    aten.diagonal_scatter.default,
    aten.select_scatter.default,
    aten.slice_scatter.default,
    aten.as_strided_scatter.default,
)


def scatters_into_complex(module: torch.fx.GraphModule) -> bool:
    """Whether a graph scatters into a complex tensor.

    Inductor turns scatters into an in-place write through a view, and runs later readers after the
    write only if the view is its own. Views of complex tensors are PyTorch's: a product after the
    write could run before it.
    """
    scatters = (n for n in module.graph.nodes if n.target in SCATTERS)
    return any(node.meta["val"].is_complex() for node in scatters)
