"""Adapter: Inductor's table of decompositions, with what eager does where the two differ.

Writing into a part of a complex tensor is writing into one of pairs of real numbers. Inductor makes
these operators a write in place through a view. It orders what reads the tensor after the write
only where the view is its own, and the views of complex numbers are PyTorch's: a product after the
write could run before it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...autodiff.traces.pure_memory import draw_mask
from ...reuse.ir.types import TensorType
from .torch_inductor import settings

aten = torch.ops.aten

NOT_FROM_THE_END = (
    torch.ops.aten.index_select.default,
    torch.ops.aten.index_add.default,
    torch.ops.aten.index_copy.default,
    torch.ops.aten.index_reduce.default,
)
"""Inductor writes them as ``x[index]``, but in eager their index -1 is an error."""

_POOLING = (
    torch.ops.aten.max_pool2d_with_indices.default,
    torch.ops.aten.max_pool3d_with_indices.default,
)

_PUTTING = (torch.ops.aten.index_put.default, torch.ops.aten._unsafe_index_put.default)


def decompositions() -> Mapping[Any, Callable[..., Any]]:
    """Returns Inductor's decomposition table, with seven corrections.

    Operators that do not count from the end do not here either. ``cat`` of one tensor and empty
    ones is laid out as PyTorch lays it out. And Inductor lowers ``bernoulli.p`` to an in-place
    draw, and on CPU it may fuse a reader of the mask into a kernel that runs before the draw.
    ``native_dropout`` draws the same mask out of place. ``bernoulli`` of probabilities in double
    precision draws numbers of double precision, as the operator itself does. Those of pooling ask a
    module of Inductor's that is imported only when Inductor compiles, which is later. And elements
    are put into a copy where those of a tensor share memory: Inductor would put them into that
    memory. Parts of complex tensors are written as pairs of real numbers.
    """
    from torch._inductor.decomposition import select_decomp_table

    with settings():
        table = dict(select_decomp_table())
    table[torch.ops.aten.bernoulli.p] = draw_mask
    table[torch.ops.aten.bernoulli.default] = _below_probabilities
    for operator in NOT_FROM_THE_END:
        table[operator] = _without_wrapping(table[operator])
    table[torch.ops.aten.cat.default] = _dense(table[torch.ops.aten.cat.default])
    for operator in _POOLING:
        if operator in table:
            table[operator] = _with_lowerings(table[operator])
    table |= {operator: _into_a_copy(operator) for operator in _PUTTING}
    table |= scatters_of_pairs()
    return table


def _below_probabilities(probabilities: torch.Tensor, generator: Any = None) -> Any:
    """Decomposes ``bernoulli`` into the comparison that PyTorch's kernel for a CPU makes."""
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
    """Keeps an operator from a tensor that has gaps, or one place for several elements."""

    def decomposition(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return NotImplemented if TensorType.of(x).is_dense else operator(x.clone(), *args, **kwargs)

    return decomposition


def _with_lowerings(decomposition: Callable[..., Any]) -> Callable[..., Any]:
    """Imports what a decomposition of PyTorch takes for imported."""

    def decomposed(*args: Any, **kwargs: Any) -> Any:
        importlib.import_module("torch._inductor.lowering")
        return decomposition(*args, **kwargs)

    return decomposed


def _dense(cat: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a result contiguous that is a mere copy, in an operand's order of strides."""

    def decomposition(tensors: list[torch.Tensor], dim: int = 0) -> Any:
        made = cat(tensors, dim)
        if not isinstance(made, torch.Tensor) or (made.dim() in (4, 5) and _is_channels_last(made)):
            return made
        return made.contiguous()

    return decomposition


def _is_channels_last(tensor: torch.Tensor) -> bool:
    form = torch.channels_last if tensor.dim() == 4 else torch.channels_last_3d
    return tensor.is_contiguous(memory_format=form)


def _without_wrapping(decomposition: Callable[..., Any]) -> Callable[..., Any]:
    """Makes an index below zero one that is out of range, which a kernel notices."""

    def checked(x: torch.Tensor, dim: int, index: torch.Tensor, *rest: Any, **options: Any) -> Any:
        size = x.shape[dim] if x.dim() else 1
        return decomposition(x, dim, torch.where(index < 0, size, index), *rest, **options)

    return checked


def scatters_of_pairs() -> Mapping[Any, Callable[..., Any]]:
    """Returns a decomposition for each operator that writes into a view of a copy."""
    return {
        aten.diagonal_scatter.default: _of_pairs(_diagonal),
        aten.select_scatter.default: _of_pairs(_select),
        aten.slice_scatter.default: _of_pairs(_slice),
        aten.as_strided_scatter.default: _of_pairs(_as_strided),
    }


def _of_pairs(scatter: Callable[..., Tensor]) -> Callable[..., Any]:
    """Makes a scatter one of complex numbers; of real ones it stays the operator it is."""

    def decomposition(x: Tensor, source: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not x.is_complex():
            return NotImplemented
        pairs = torch.view_as_real(x), torch.view_as_real(source.to(x.dtype))
        return torch.view_as_complex(scatter(*pairs, *args, **kwargs))

    return decomposition


def _diagonal(x: Tensor, source: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    # The diagonal is the last dimension of what is taken, after that of the pairs.
    dims = _from_the_start(dim1, x), _from_the_start(dim2, x)
    return aten.diagonal_scatter.default(x, source.transpose(-1, -2), offset, *dims)


def _select(x: Tensor, source: Tensor, dim: int, index: int) -> Tensor:
    return aten.select_scatter.default(x, source, _from_the_start(dim, x), index)


def _slice(x: Tensor, source: Tensor, dim: int = 0, *range_: Any, **named: Any) -> Tensor:
    return aten.slice_scatter.default(x, source, _from_the_start(dim, x), *range_, **named)


def _as_strided(
    x: Tensor,
    source: Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    storage_offset: int | None = None,
) -> Tensor:
    offset = None if storage_offset is None else 2 * storage_offset
    strides = (*(2 * s for s in stride), 1)
    return aten.as_strided_scatter.default(x, source, (*size, 2), strides, offset)


def _from_the_start(dim: int, pairs: Tensor) -> int:
    """Returns a dimension of complex numbers as one of their pairs."""
    return dim % (pairs.dim() - 1)
