"""Adapter: small attentions as plain products.

PyTorch's fused attention saves memory and time over long sequences, but costs tens of microseconds
per launch. Where a row of scores is no longer than a row of the result, the plain form keeps no
more than the fused one and is several times faster (benchmarks/step_time.py). So is that of a
single query, a token of ``generate``: its scores are less than the keys, however many those are.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.fx

from ...reuse.torch_names import module_of

_FUSED = torch.ops.aten.scaled_dot_product_attention.default
_PLAIN = torch.ops.aten._scaled_dot_product_attention_math.default
_MAX_KEYS = 64


def with_plain_attention(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Returns the graph with its small attentions in plain form (the same graph if it has none)."""
    if not any(_is_small(node) for node in module.graph.nodes):
        return module
    graph = torch.fx.Graph()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in module.graph.nodes:
        if _is_small(node):
            copies[node] = _plain(graph, node, copies)
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    return module_of(graph, module)


def _is_small(node: torch.fx.Node) -> bool:
    if node.target is not _FUSED:
        return False
    arguments = _arguments(node)
    query, key, value = (arguments[name].meta["val"] for name in ("query", "key", "value"))
    if arguments["attn_mask"] is not None or arguments["dropout_p"]:
        return False
    if any(t.dim() != 4 for t in (query, key, value)):
        return False
    single = not arguments["is_causal"] and _has_one_query(query, key, value)
    small = single or _has_few_keys(query, key, value)
    return small and _contiguous_order(node.meta["val"]) is not None


def _has_one_query(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether a head has one row of scores; the batch and the number of keys may be symbols."""
    numbers = (*query.shape[1:], key.shape[1], key.shape[3], value.shape[1], value.shape[3])
    return _are_numbers(*numbers) and query.shape[2] == 1


def _has_few_keys(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    if not _are_numbers(*query.shape, *key.shape, *value.shape):
        return False
    return key.shape[-2] <= min(_MAX_KEYS, value.shape[-1])


def _are_numbers(*sizes: int | torch.SymInt) -> bool:
    return all(isinstance(size, int) for size in sizes)


def _arguments(node: torch.fx.Node) -> dict[str, Any]:
    """Returns every argument by its name, defaults included."""
    schema = _FUSED._schema.arguments
    given = dict(zip((a.name for a in schema), node.args, strict=False)) | dict(node.kwargs)
    return {a.name: given.get(a.name, a.default_value) for a in schema}


def _plain(
    graph: torch.fx.Graph, node: torch.fx.Node, copies: dict[torch.fx.Node, torch.fx.Node]
) -> torch.fx.Node:
    arguments = _arguments(node)
    query, key, value = (copies[arguments[name]] for name in ("query", "key", "value"))
    positional = (query, key, value, None, 0.0, arguments["is_causal"])
    named = {name: arguments[name] for name in ("scale", "enable_gqa")}
    pair = graph.call_function(_PLAIN, positional, named)
    result = _with_stride_of(
        graph, graph.call_function(operator.getitem, (pair, 0)), node.meta["val"]
    )
    for new in _from(graph, pair):
        new.meta["stamp"] = node.meta["stamp"]
    result.meta.update(node.meta)
    return result


def _with_stride_of(
    graph: torch.fx.Graph, value: torch.fx.Node, like: torch.Tensor
) -> torch.fx.Node:
    """Lays a value out as the fused operator does: the operators that follow were traced on it."""
    order = _contiguous_order(like)
    assert order is not None
    back = [order.index(d) for d in range(like.dim())]
    aten = torch.ops.aten
    value = graph.call_function(aten.permute.default, (value, order))
    value = graph.call_function(
        aten.clone.default, (value,), {"memory_format": torch.contiguous_format}
    )
    return graph.call_function(aten.permute.default, (value, back))


def _from(graph: torch.fx.Graph, first: torch.fx.Node) -> list[torch.fx.Node]:
    nodes = list(graph.nodes)
    return nodes[nodes.index(first) :]


def _contiguous_order(like: torch.Tensor) -> list[int] | None:
    """Returns the dimensions from outermost to innermost, or None if there are gaps."""
    strides = like.stride()
    order = sorted(range(like.dim()), key=lambda d: (-strides[d], d))
    expected = 1
    for dim in reversed(order):
        if strides[dim] != expected:
            return None
        expected *= like.shape[dim]
    return order
