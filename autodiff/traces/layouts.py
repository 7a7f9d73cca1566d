"""How results and gradients lie in memory: as it was traced, whatever made them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.fx

from ...reuse.errors import CaptureError
from ...reuse.ir.leaf import is_view, mutated_args
from ...reuse.ir.torch_symbols import environment_of_tensor, size_in
from ...reuse.ir.types import TensorType


def laid_out_as(gradient: torch.Tensor, type_: TensorType) -> torch.Tensor:
    """Gives a gradient its primal's layout, so that one backward serves every caller."""
    if gradient.layout is not torch.strided:
        raise CaptureError(
            f"The gradient of a {type_} tensor is sparse, and compiled programs have dense ones "
            "only. Use sparse=False in the embedding."
        )
    if TensorType.of(gradient).stride == type_.stride or gradient.numel() <= 1:
        return gradient
    environment = environment_of_tensor(gradient)
    shape, stride = ([size_in(environment, n) for n in ns] for ns in (type_.shape, type_.stride))
    repeated = [d for d, (n, step) in enumerate(zip(shape, stride, strict=True)) if step == 0]
    if repeated:  # elements that are one in memory: written once
        for dim in repeated:
            gradient = gradient.narrow(dim, 0, 1)
        once = [1 if d in repeated else n for d, n in enumerate(shape)]
        return _copied(gradient, once, stride).expand(shape)
    return _copied(gradient, shape, stride)


def _copied(tensor: torch.Tensor, shape: Sequence[Any], stride: Sequence[Any]) -> torch.Tensor:
    target = torch.empty_strided(shape, stride, dtype=tensor.dtype, device=tensor.device)
    return torch.ops.aten.copy.default(target, tensor)


def lying_as_traced(result: Any, node: torch.fx.Node) -> Any:
    """Gives a result the layout that its node was traced with, unless it is somebody's memory."""
    if node.op != "call_function" or is_view(node) or mutated_args(node):
        return result
    return _lying_as(result, node.meta.get("val"))


def _lying_as(result: Any, traced: Any) -> Any:
    """Gives results the layouts that they were traced with, which views of them rely on.

    Some operators lay theirs out by an operand's mark (a solver, if its matrix is conjugated).
    """
    if isinstance(traced, (tuple, list)):
        return type(traced)(map(_lying_as, result, traced))
    if not isinstance(traced, torch.Tensor) or traced.layout is not torch.strided:
        return result
    return laid_out_as(result, TensorType.of(traced))


def attention_as_traced(result: Any, node: torch.fx.Node) -> Any:
    """Gives attention the layout that it was traced with, which differs from backend to backend."""
    traced = node.meta.get("val")
    if node.target is not torch.ops.aten.scaled_dot_product_attention.default or traced is None:
        return result
    stride = TensorType.of(traced).stride
    if TensorType.of(result).stride == stride or not all(isinstance(n, int) for n in stride):
        return result
    order = sorted(range(traced.dim()), key=lambda dim: -stride[dim])
    return result.permute(order).contiguous().permute([order.index(d) for d in range(len(order))])
