"""A leaf run by PyTorch's own kernels, operator by operator.

The strides that a trace saw are those of fake tensors, and a few kernels lay their results out in
another way (``softplus_backward`` of operands of different strides). Numbers do not depend on that,
but a view may be impossible then, and ``as_strided`` would read other elements.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.fx

from ...reuse.torch_names import RESHAPES

_aten = torch.ops.aten
_STRIDED = (_aten.as_strided.default,)


def eager_function(module: torch.fx.GraphModule) -> Callable[..., Any]:
    """Returns what runs a leaf's operators, right for whatever layout a kernel chooses."""
    graph = module.graph
    if any(node.target in (*RESHAPES, *_STRIDED) for node in graph.nodes):
        graph = _of_any_layout(graph)
    # Not a lazy one, whose function would look at each call whether it is compiled.
    forward: Callable[..., Any] = torch.fx.GraphModule(module, graph).forward
    return forward


def _of_any_layout(graph: torch.fx.Graph) -> torch.fx.Graph:
    copied = torch.fx.Graph()
    copied.output(copied.graph_copy(graph, {}))
    for node in copied.nodes:
        if node.target in RESHAPES:
            node.target = _aten.reshape.default
        elif node.target in _STRIDED:
            base = node.args[0]
            if isinstance(base, torch.fx.Node) and isinstance(base.meta.get("val"), torch.Tensor):
                with copied.inserting_before(node):
                    placed = copied.call_function(in_layout, (base, base.meta["val"].stride()))
                node.args = (placed, *node.args[1:])
    return copied


def in_layout(tensor: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """Returns a tensor of these strides, the same one if it has them."""
    if tensor.stride() == stride:
        return tensor
    shape, dtype, device = tensor.shape, tensor.dtype, tensor.device
    return torch.empty_strided(shape, stride, dtype=dtype, device=device).copy_(tensor)
