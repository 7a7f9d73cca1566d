"""Adapter: how operators are made of primitives, where PyTorch has no rule for that."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._decomp import decomposition_table

from ..traces.pure_memory import draw_mask
from ..traces.torch_differentiable import copied

_ATEN, _PRIMS = torch.ops.aten, torch.ops.prims


def _broadcast_in_dim(x: torch.Tensor, shape: Sequence[int], dims: Sequence[int]) -> torch.Tensor:
    for dim in range(len(shape)):
        if dim not in dims:
            x = x.unsqueeze(dim)
    return x if list(x.shape) == list(shape) else x.expand(shape)


def _sum(x: torch.Tensor, dims: Sequence[int] | None, *, output_dtype: Any = None) -> torch.Tensor:
    return _ATEN.sum.dim_IntList(x, dims, dtype=output_dtype)


def _prod(x: torch.Tensor, dims: Sequence[int], *, output_dtype: Any = None) -> torch.Tensor:
    found = x if output_dtype is None else x.to(output_dtype)
    for dim in sorted(dims, reverse=True):
        found = _ATEN.prod.dim_int(found, dim)
    return found


def _var(x: torch.Tensor, dims: Any, correction: float = 1, *, output_dtype: Any = None) -> Any:
    found = _ATEN.var.correction(x, dims, correction=correction)
    return found if output_dtype is None else found.to(output_dtype)


def _empty_permuted(size: Sequence[int], order: Sequence[int], **options: Any) -> torch.Tensor:
    """Zeros for what may be any numbers; their layout counts, for it is the order of draws."""
    zeros = _full([size[dim] for dim in order], options)
    return zeros.permute([order.index(dim) for dim in range(len(order))])


def _empty(size: Sequence[int], **options: Any) -> torch.Tensor:
    if options.pop("memory_format", None) not in (None, torch.contiguous_format):
        return NotImplemented
    return _full(size, options)


def _empty_strided(size: Sequence[int], stride: Sequence[int], **options: Any) -> torch.Tensor:
    last = sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    length = last + 1 if 0 not in size else 0
    return _full([length], options).as_strided(size, stride)


def _full(size: Sequence[int], options: Mapping[str, Any]) -> torch.Tensor:
    dtype = options.get("dtype") or torch.get_default_dtype()
    return torch.full(size, 0, dtype=dtype, device=options.get("device"))


def _plus(product: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Makes the rule of an operator that adds a product to something."""

    def rule(x: Any, a: torch.Tensor, b: torch.Tensor, *, beta: Any = 1, alpha: Any = 1) -> Any:
        found = product(a, b) if alpha == 1 else product(a, b) * alpha
        if beta == 0:  # what it would be added to does not count, not even infinities
            return found
        return found + (x if beta == 1 else x * beta)

    return rule


def _angle(x: torch.Tensor) -> Any:
    if x.is_complex():
        real, imaginary = torch.view_as_real(x).unbind(-1)
        return torch.atan2(imaginary, real)
    if not x.is_floating_point():
        return NotImplemented
    negative = torch.where(x < 0, torch.full_like(x, math.pi), torch.zeros_like(x))
    return torch.where(x.isnan(), x, negative)


def _shrink_backward(grad: torch.Tensor, x: torch.Tensor, limit: float) -> torch.Tensor:
    return torch.where((x >= -limit) & (x <= limit), 0, grad)


def _put(x: torch.Tensor, index: torch.Tensor, values: torch.Tensor, add: bool = False) -> Any:
    places = (index.reshape(-1),)
    return x.reshape(-1).index_put(places, values.reshape(-1), add).reshape(x.shape)


def _masked_scatter_backward(grad: torch.Tensor, mask: torch.Tensor, sizes: Sequence[int]) -> Any:
    """What was read, in order, gets its gradient; the place behind it takes what was not."""
    number = math.prod(sizes)
    mask = mask.expand(grad.shape).reshape(-1)
    places = torch.where(mask, mask.cumsum(0) - 1, number)
    found = grad.new_zeros(number + 1).scatter(0, places, grad.reshape(-1))
    return found[:number].reshape(list(sizes))


def _weight_norm_backward(
    grad: torch.Tensor, v: torch.Tensor, g: torch.Tensor, norms: torch.Tensor, dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    norms = norms.to(v.dtype)
    along = (grad * v).sum([d for d in range(v.dim()) if d != dim], keepdim=True) / norms
    return (grad - v * along / norms) * (g / norms), along


def _grouped_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    offsets: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: Any = None,
) -> Any:
    """The product of each group of rows with its own matrix, as products of all rows with each.

    An element of another group is never computed with: it may be infinite.
    """
    if bias is not None or out_dtype not in (None, a.dtype):
        return NotImplemented
    if offsets is None:
        return torch.bmm(a, b)
    groups = range(offsets.shape[0])
    if (a.dim(), b.dim()) == (2, 2):
        masks = [_in_group(offsets, g, a.shape[1]) for g in groups]
        return torch.stack(
            [torch.where(m, a, 0) @ torch.where(m.unsqueeze(1), b, 0) for m in masks]
        )
    rows = (a.dim(), b.dim()) == (2, 3)
    found = a.new_zeros((a.shape[-2], b.shape[-1]))
    for group in groups:
        inside = _in_group(offsets, group, found.shape[0 if rows else 1])
        product = a @ b[group] if rows else a[group] @ b
        found = torch.where(inside.unsqueeze(1) if rows else inside, product, found)
    return found


def _in_group(offsets: torch.Tensor, group: int, length: int) -> torch.Tensor:
    """Says of each of so many places whether it belongs to a group; offsets are their ends."""
    places = torch.arange(length, device=offsets.device)
    before = places < offsets[group]
    return before & (places >= offsets[group - 1]) if group else before


def _where_there_is(name: str, rule: Callable[..., Any]) -> Mapping[Any, Callable[..., Any]]:
    """A rule for an operator that only some versions of PyTorch have."""
    operator = getattr(_ATEN, name, None)
    return {} if operator is None else {operator.default: rule}


RULES: Mapping[Any, Callable[..., Any]] = {
    **_where_there_is("_grouped_mm", _grouped_mm),
    **_where_there_is("_weight_norm_interface_backward", _weight_norm_backward),
    _ATEN.bernoulli.p: draw_mask,
    _ATEN.copy.default: copied,
    _ATEN.empty.memory_format: _empty,
    _ATEN.empty_permuted.default: _empty_permuted,
    _ATEN.empty_strided.default: _empty_strided,
    _ATEN.lift_fresh_copy.default: lambda x: x.clone(),
    _ATEN.addmm.default: _plus(torch.mm),
    _ATEN.addbmm.default: _plus(lambda a, b: torch.bmm(a, b).sum(0)),
    _ATEN.baddbmm.default: _plus(torch.bmm),
    _ATEN.angle.default: _angle,
    _ATEN.exp2.default: lambda x: _ATEN.pow.Scalar(2.0, x),
    _ATEN.max.default: lambda x: _ATEN.amax.default(x, list(range(x.dim()))),
    _ATEN.min.default: lambda x: _ATEN.amin.default(x, list(range(x.dim()))),
    _ATEN.put.default: _put,
    _ATEN.softshrink_backward.default: _shrink_backward,
    _ATEN.hardshrink_backward.default: _shrink_backward,
    _ATEN.masked_scatter_backward.default: _masked_scatter_backward,
    _PRIMS.broadcast_in_dim.default: _broadcast_in_dim,
    _PRIMS.conj_physical.default: torch.ops.aten._conj_physical.default,
    _PRIMS.copy_to.default: lambda target, source: target.copy_(source),
    _PRIMS.sum.default: _sum,
    _PRIMS.prod.default: _prod,
    _PRIMS.var.default: _var,
    _PRIMS.abs.default: _ATEN.abs.default,
    _PRIMS.add.default: _ATEN.add.Tensor,
    _PRIMS.div.default: _ATEN.div.Tensor,
    _PRIMS.mul.default: _ATEN.mul.Tensor,
    _PRIMS.neg.default: _ATEN.neg.default,
    _PRIMS.sub.default: _ATEN.sub.Tensor,
    _PRIMS.where.default: _ATEN.where.self,
}
"""What PyTorch has no rule for, or one that would draw other numbers, or one made of ``prims``."""


# ---- backwards, by differentiating the rule of the forward ---------------------------------------


def _of_resizing(forward: Any) -> Callable[..., Any]:
    def backward(gradient: torch.Tensor, output_size: Any, input_size: Any, *options: Any) -> Any:
        x = gradient.new_zeros(input_size)  # it is linear: its operand does not count
        rule = decomposition_table[forward]
        return _gradients(lambda x: rule(x, output_size, *options), (x,), gradient)[0]

    return backward


def _of_padding(forward: Any) -> Callable[..., Any]:
    def backward(gradient: torch.Tensor, x: torch.Tensor, padding: Sequence[int]) -> Any:
        rule = decomposition_table[forward]
        return _gradients(lambda x: rule(x, padding), (x,), gradient)[0]

    return backward


def _grid_sampler_backward(
    gradient: torch.Tensor, x: torch.Tensor, grid: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor | None, ...]:
    *options, wanted = rest
    rule = decomposition_table[_ATEN.grid_sampler_2d.default]
    found = _gradients(lambda x, grid: rule(x, grid, *options), (x, grid), gradient)
    return tuple(g if flag else None for g, flag in zip(found, wanted, strict=True))


def _gradients(
    function: Callable[..., Any], operands: Sequence[torch.Tensor], gradient: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    with torch.enable_grad():
        active = [x.detach().requires_grad_() for x in operands]
        return torch.autograd.grad(function(*active), active, gradient)


BACKWARDS: Mapping[Any, Callable[..., Any]] = {
    _ATEN.grid_sampler_2d_backward.default: _grid_sampler_backward,
    **{
        getattr(_ATEN, f"{name}_backward").default: _of_resizing(getattr(_ATEN, name).default)
        for name in (
            "upsample_nearest1d",
            "upsample_nearest2d",
            "upsample_nearest3d",
            "upsample_linear1d",
            "upsample_bilinear2d",
            "upsample_trilinear3d",
            "upsample_bicubic2d",
        )
    },
    **{
        getattr(_ATEN, f"{name}_backward").default: _of_padding(getattr(_ATEN, name).default)
        for name in ("replication_pad1d", "replication_pad2d", "replication_pad3d")
    },
}
"""Derivatives for which PyTorch has no rule, though it has one for what is differentiated.

Autograd runs in them, so they are called in place of the operator, not below its dispatch.
"""
