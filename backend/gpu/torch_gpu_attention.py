"""Adapter: which attention and which dropout a GPU runs.

``scaled_dot_product_attention`` and ``dropout`` decide by the device that they are traced on, so
for a GPU that is not here it is decided before the derivative is traced. Dropout draws its mask in
a kernel of its own there, whose numbers a CPU's ``bernoulli_`` does not draw.

The rules of attention are the main ones of PyTorch's own choice (ATen/native/transformers/cuda/
sdp_utils.cpp): flash attention for half precision without a mask, memory-efficient attention for
the rest, plain products where neither takes the operands.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from ...reuse.torch_names import module_of

aten = torch.ops.aten
FUSED = aten.scaled_dot_product_attention.default
_FLASH = aten._scaled_dot_product_flash_attention.default
_EFFICIENT = aten._scaled_dot_product_efficient_attention.default
_PLAIN = aten._scaled_dot_product_attention_math.default
_MAX_HEAD = 256
_ROW = 16  # elements that rows of a mask are padded to
_HALF = (torch.float16, torch.bfloat16)


def as_on_a_gpu(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Returns the graph with attention and dropout as a GPU runs them (the same if it has none)."""
    if not any(node.target is FUSED or _drops(node) for node in module.graph.nodes):
        return module
    graph = torch.fx.Graph()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in module.graph.nodes:
        if node.target is FUSED:
            copies[node] = _Attention.of(graph, node, copies).written(node)
        elif _drops(node):
            copies[node] = _native_dropout(graph, node, copies)
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    return module_of(graph, module)


def _drops(node: torch.fx.Node) -> bool:
    """Whether a node is a dropout that drops something."""
    if node.target is not aten.dropout.default:
        return False
    operand, p, train = node.args
    assert isinstance(operand, torch.fx.Node)
    return bool(train) and 0 < float(p) < 1 and operand.meta["val"].numel() > 0  # type: ignore[arg-type]


def _native_dropout(
    graph: torch.fx.Graph, node: torch.fx.Node, copies: dict[torch.fx.Node, torch.fx.Node]
) -> torch.fx.Node:
    operand, p, _ = node.args
    assert isinstance(operand, torch.fx.Node)
    pair = graph.call_function(aten.native_dropout.default, (copies[operand], p, True))
    pair.meta["stamp"] = node.meta["stamp"]
    result = graph.call_function(operator.getitem, (pair, 0))
    result.meta.update(node.meta)
    return result


@dataclass(frozen=True)
class _Attention:
    """One attention, and the graph that it is written to.

    Attributes:
        graph: gets its operators.
        given: its arguments, by name, as they were traced.
        operands: those that are tensors, in the new graph.
    """

    graph: torch.fx.Graph
    given: dict[str, Any]
    operands: dict[str, torch.fx.Node]

    @classmethod
    def of(
        cls,
        graph: torch.fx.Graph,
        node: torch.fx.Node,
        copies: dict[torch.fx.Node, torch.fx.Node],
    ) -> _Attention:
        schema = FUSED._schema.arguments
        given = dict(zip((a.name for a in schema), node.args, strict=False)) | dict(node.kwargs)
        given = {a.name: given.get(a.name, a.default_value) for a in schema}
        tensors = {n: copies[x] for n, x in given.items() if isinstance(x, torch.fx.Node)}
        return cls(graph, given, tensors)

    def written(self, node: torch.fx.Node) -> torch.fx.Node:
        """Writes it; returns its result, laid out as ``node`` was."""
        num_before = len(self.graph.nodes)
        result = self._laid_out(self._kind()(), node.meta["val"])
        for new in list(self.graph.nodes)[num_before:]:
            new.meta["stamp"] = node.meta["stamp"]
        result.meta.update(node.meta)
        return result

    def _kind(self) -> Callable[[], torch.fx.Node]:
        query, key, value = (self._seen(name) for name in ("query", "key", "value"))
        masked = self.given["attn_mask"] is not None
        heads = {query.shape[-1], key.shape[-1], value.shape[-1]}
        fits = all(t.dim() == 4 and 0 not in t.shape for t in (query, key, value))
        wide = 16 // query.element_size()  # elements of the widest load
        if not fits or any(head % wide for head in heads) or (masked and self.given["is_causal"]):
            return self._plain
        if query.dtype in _HALF and not masked and len(heads) == 1 and max(heads) <= _MAX_HEAD:
            return self._flash
        return self._efficient if query.dtype in (*_HALF, torch.float32) else self._plain

    def _seen(self, name: str) -> torch.Tensor:
        value: torch.Tensor = self.given[name].meta["val"]
        return value

    def _call(self, target: Any, *args: Any, **kwargs: Any) -> torch.fx.Node:
        return self.graph.call_function(target, args, kwargs)

    def _first(self, results: torch.fx.Node) -> torch.fx.Node:
        return self._call(operator.getitem, results, 0)

    def _flash(self) -> torch.fx.Node:
        query, key, value = self._repeated()
        dropout, causal = self.given["dropout_p"], self.given["is_causal"]
        made = self._call(
            _FLASH, query, key, value, dropout, causal, False, scale=self.given["scale"]
        )
        return self._first(made)

    def _efficient(self) -> torch.fx.Node:
        query, key, value = self._repeated()
        dropout, causal = self.given["dropout_p"], self.given["is_causal"]
        bias = self._bias() if self.given["attn_mask"] is not None else None
        made = self._call(
            _EFFICIENT, query, key, value, bias, True, dropout, causal, scale=self.given["scale"]
        )
        return self._first(made)

    def _plain(self) -> torch.fx.Node:
        operands = [self.operands[name] for name in ("query", "key", "value")]
        made = self._call(
            _PLAIN,
            *operands,
            self.operands.get("attn_mask"),
            self.given["dropout_p"],
            self.given["is_causal"],
            scale=self.given["scale"],
            enable_gqa=self.given["enable_gqa"],
        )
        return self._first(made)

    def _repeated(self) -> list[torch.fx.Node]:
        """The operands, with keys and values repeated where several heads share one."""
        query, key, value = (self.operands[name] for name in ("query", "key", "value"))
        num_heads = self._seen("query").shape[1]
        if not self.given["enable_gqa"] or self._seen("key").shape[1] == num_heads:
            return [query, key, value]
        times = num_heads // self._seen("key").shape[1]
        return [
            query,
            *(self._call(aten.repeat_interleave.self_int, x, times, 1) for x in (key, value)),
        ]

    def _bias(self) -> torch.fx.Node:
        """The mask as numbers to add, of full shape, in rows that wide loads can read."""
        mask, seen, query = self.operands["attn_mask"], self._seen("attn_mask"), self._seen("query")
        num_keys = self._seen("key").shape[2]
        if seen.dtype is torch.bool:
            zeros = self._call(aten.zeros_like.default, mask, dtype=query.dtype)
            off = self._call(aten.logical_not.default, mask)
            mask = self._call(aten.masked_fill.Scalar, zeros, off, float("-inf"))
        full = [query.shape[0], query.shape[1], query.shape[2], num_keys]
        if missing := -num_keys % _ROW:
            mask = self._call(aten.expand.default, mask, [*seen.shape[:-1], num_keys])
            mask = self._call(aten.constant_pad_nd.default, mask, [0, missing], 0.0)
            mask = self._call(aten.slice.Tensor, mask, -1, 0, num_keys)
        return self._call(aten.expand.default, mask, full)

    def _laid_out(self, result: torch.fx.Node, like: torch.Tensor) -> torch.fx.Node:
        """Lays a value out as it was traced: what follows relies on it."""
        strides = like.stride()
        order = sorted(range(like.dim()), key=lambda dim: (-strides[dim], dim))
        back = [order.index(dim) for dim in range(like.dim())]
        result = self._call(aten.permute.default, result, order)
        # A copy only where it lies otherwise.
        result = self._call(aten.contiguous.default, result)
        return self._call(aten.permute.default, result, back)
