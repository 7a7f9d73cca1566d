"""Lays results and gradients out in memory as it was traced, whatever made them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.fx

from ...reuse.errors import CaptureError
from ...reuse.ir.operators import is_view, mutated_args
from ...reuse.ir.program import outputs_of
from ...reuse.ir.torch_symbols import environment_of_tensor, size_in
from ...reuse.ir.types import TensorType


def laid_out_as(gradient: torch.Tensor, type_: TensorType) -> torch.Tensor:
    """Gives a gradient its primal's layout, so that one backward serves every caller."""
    if gradient.layout is not torch.strided:
        raise CaptureError(
            f"The gradient of a {type_} tensor is sparse, and compiled programs have dense ones "
            "only. Use sparse=False in the embedding."
        )
    # One element has no order: any strides will do.
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


def laid_out_as_traced(result: Any, node: torch.fx.Node) -> Any:
    """Gives a result the layout that its node was traced with, unless it is somebody's memory."""
    if node.op != "call_function" or is_view(node) or mutated_args(node):
        return result
    return _as_traced(result, node.meta.get("val"))


def captured_results(module: torch.fx.GraphModule) -> list[Any]:
    """Returns a leaf's results as they were captured; None where that is not known."""
    nodes = outputs_of(module)
    return [n.meta.get("val") if isinstance(n, torch.fx.Node) else None for n in nodes]


def type_as_captured(type_: TensorType, captured: Any) -> TensorType:
    """Returns the type of a result that is laid out as it was captured."""
    return replace(type_, stride=TensorType.of(captured).stride) if captured is not None else type_


def results_as_captured(module: torch.fx.GraphModule, results: Sequence[Any]) -> tuple[Any, ...]:
    """Gives a leaf's results the layouts that they were captured with, which readers rely on.

    What is traced anew may be laid out otherwise: decompositions, and rules for fake tensors.
    """
    pairs = zip(results, captured_results(module), strict=True)
    return tuple(r if t is None else _permuted_as(r, t) for r, t in pairs)


def _as_traced(result: Any, traced: Any) -> Any:
    """Gives results the layouts that they were traced with, which views of them rely on.

    Some operators lay theirs out by an operand's mark (a solver, if its matrix is conjugated).
    """
    if isinstance(traced, (tuple, list)):
        return type(traced)(map(_as_traced, result, traced))
    if not isinstance(traced, torch.Tensor) or traced.layout is not torch.strided:
        return result
    return laid_out_as(result, TensorType.of(traced))


def attention_as_traced(result: Any, node: torch.fx.Node) -> Any:
    """Gives attention the layout that it was traced with, which differs from backend to backend."""
    traced = node.meta.get("val")
    if node.target is not torch.ops.aten.scaled_dot_product_attention.default or traced is None:
        return result
    return _permuted_as(result, traced)


def _permuted_as(result: Any, traced: Any) -> Any:
    """Gives a result the order of axes that it was traced with, in operators with derivatives."""
    if not isinstance(result, torch.Tensor) or not isinstance(traced, torch.Tensor):
        return result
    type_ = TensorType.of(traced)
    found, stride = TensorType.of(result).stride, type_.stride
    # Strides that are symbols cannot be ordered without settling them; they stay as they are.
    is_open = not all(isinstance(n, int) for n in (*stride, *found))
    if found == stride or is_open or not type_.is_dense:
        return result
    order = sorted(range(traced.dim()), key=lambda dim: -stride[dim])
    return result.permute(order).contiguous().permute([order.index(d) for d in range(len(order))])
