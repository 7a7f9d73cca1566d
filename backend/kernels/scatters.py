"""Writing into a part of a complex tensor, for Inductor: as into one of pairs of real numbers.

Inductor makes these operators a write in place through a view. It orders what reads the tensor
after the write only where the view is its own, and the views of complex numbers are PyTorch's: a
product after the write could run before it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


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
