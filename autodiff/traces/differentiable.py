"""Operators in graphs whose gradients are differentiated in their turn."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import torch

from .torch_make_fx import Decompositions

Gradients: TypeAlias = Literal["final", "differentiated"]
"""What becomes of gradients: whether they are differentiated in their turn."""


def _differentiable_copy(target: torch.Tensor, source: torch.Tensor, _: bool = False) -> Any:
    """Decomposes ``copy``, which has no derivative, into operators that lay out as it does."""
    value = source.to(target.dtype).expand(target.shape)
    strides = target.stride()
    order = sorted(range(target.dim()), key=lambda d: (-strides[d], d))
    dense = value.permute(order).clone(memory_format=torch.contiguous_format)
    return dense.permute([order.index(d) for d in range(target.dim())])


DIFFERENTIABLE: Decompositions = {torch.ops.aten.copy.default: _differentiable_copy}
"""Operators that have no derivative, made of those that have one."""
