"""Cotangents in the layout that a backward was compiled for."""

from __future__ import annotations

import torch

from ...reuse.ir.types import TensorType, Type
from ...reuse.torch_names import is_lazy
from ..checks.torch_state import plain_cotangent


def cotangent_like(type_: Type, gradient: torch.Tensor | None = None) -> torch.Tensor:
    """Returns a cotangent in the layout of a type, differentiably; zeros if there is none."""
    assert isinstance(type_, TensorType)
    if gradient is None:
        return torch.empty_strided(
            type_.shape, type_.stride, dtype=type_.dtype, device=type_.device
        ).zero_()
    gradient = plain_cotangent(gradient)
    same = gradient.stride() == type_.stride and gradient.dtype == type_.dtype
    if same and not is_lazy(gradient):
        return gradient
    target = torch.empty_strided(type_.shape, type_.stride, dtype=type_.dtype, device=type_.device)
    return target.copy_(gradient)
