"""Adapter: which attention kernel a program runs, and the scratch that the fused one allocates.

On a CPU small attentions are decomposed into matrix products. PyTorch's fused attention saves
memory and time for long sequences, but costs tens of microseconds per launch. If a row of scores is
no longer than a row of the result, the plain form saves no more memory for the backward and is
several times faster (benchmarks/step_time.py). So is that of a single query, a token of
``generate``: its scores are smaller than the keys.

On a GPU ``scaled_dot_product_attention`` and ``dropout`` choose a kernel by the device that they
are traced on, so for a GPU that is not here the choice is made before the derivative is traced. The
rules are the main ones of PyTorch (ATen/native/transformers/cuda/sdp_utils.cpp): flash attention
for half precision without a mask, memory-efficient attention for the rest, plain products if
neither accepts the operands or is enabled (``torch.backends.cuda``). cuDNN's attention, which
PyTorch from 2.13 on prefers on some GPUs, is not used: its workspace is not known in advance. A
program names its kernel, so nothing is chosen at run time. Dropout on a GPU draws its mask in one
kernel (``native_dropout``), with other random numbers than a CPU's ``bernoulli_``.

The fused CPU kernel allocates scratch for blocks of queries and keys, in each thread. No plan
places it, but it is counted in the reported peak. Not counted is what matrix products allocate
inside: oneDNN, which computes those of reduced precision, decides that by CPU, version and number
of threads.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
import torch.fx

from ...reuse.ir.types import is_contiguous
from ...reuse.torch_names import module_of
from ..launches.kernel_list import Launch, View

aten = torch.ops.aten
_FUSED = aten.scaled_dot_product_attention.default
_PLAIN = torch.ops.aten._scaled_dot_product_attention_math.default
_MAX_KEYS = 64


Copies: TypeAlias = dict[torch.fx.Node, torch.fx.Node]
"""Maps the nodes of a graph to those of its rewritten copy."""
_Write: TypeAlias = Callable[[torch.fx.Graph, torch.fx.Node, Copies], torch.fx.Node]


def _rewritten(
    module: torch.fx.GraphModule, rule: Callable[[torch.fx.Node], _Write | None]
) -> torch.fx.GraphModule:
    """Returns a copy of a graph with some nodes rewritten by rules; the same graph if none is."""
    rules = {node: rule(node) for node in module.graph.nodes}
    if not any(rules.values()):
        return module
    graph, copies = torch.fx.Graph(), Copies()
    for node, write in rules.items():
        if write is None:
            copies[node] = graph.node_copy(node, copies.__getitem__)
            continue
        num_before = len(graph.nodes)
        copies[node] = write(graph, node, copies)
        for new in list(graph.nodes)[num_before:]:
            new.meta["stamp"] = node.meta["stamp"]
        copies[node].meta.update(node.meta)
    return module_of(graph, module)


def _arguments(node: torch.fx.Node) -> dict[str, Any]:
    """Returns every argument of an attention by its name, defaults included."""
    schema = _FUSED._schema.arguments
    given = dict(zip((a.name for a in schema), node.args, strict=False)) | dict(node.kwargs)
    return {a.name: given.get(a.name, a.default_value) for a in schema}


def _order(like: torch.Tensor) -> list[int]:
    """Returns the dimensions from outermost to innermost."""
    strides = like.stride()
    return sorted(range(like.dim()), key=lambda dim: (-strides[dim], dim))


def _laid_out(graph: torch.fx.Graph, result: torch.fx.Node, like: torch.Tensor) -> torch.fx.Node:
    """Copies a value into the fused result's layout, which later operators were traced with."""
    order = _order(like)
    back = [order.index(dim) for dim in range(like.dim())]
    result = graph.call_function(aten.permute.default, (result, order))
    # ``contiguous`` copies only if the layout differs.
    result = graph.call_function(aten.contiguous.default, (result,))
    return graph.call_function(aten.permute.default, (result, back))


# ---- on a CPU ----------------------------------------------------------------------------------


def with_plain_attention(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Returns the graph with its small attentions in plain form (the same graph if it has none)."""
    return _rewritten(module, lambda node: _plain if _is_small(node) else None)


def _is_small(node: torch.fx.Node) -> bool:
    if node.target is not _FUSED:
        return False
    arguments = _arguments(node)
    query, key, value = (arguments[name].meta["val"] for name in ("query", "key", "value"))
    if arguments["attn_mask"] is not None or arguments["dropout_p"]:
        return False
    if any(t.dim() != 4 for t in (query, key, value)):
        return False
    # With one row of scores in a head, the batch and the number of keys may be symbols.
    numbers = (*query.shape[1:], key.shape[1], key.shape[3], value.shape[1], value.shape[3])
    if not all(isinstance(size, int) for size in numbers):
        return False
    small = not arguments["is_causal"] and query.shape[2] == 1
    others = (query.shape[0], key.shape[0], key.shape[2], value.shape[0], value.shape[2])
    if not small and all(isinstance(size, int) for size in others):
        small = key.shape[-2] <= min(_MAX_KEYS, value.shape[-1])
    return small and not _has_gaps(node.meta["val"])


def _has_gaps(like: torch.Tensor) -> bool:
    expected = 1
    for dim in reversed(_order(like)):
        if like.stride(dim) != expected:
            return True
        expected *= like.shape[dim]
    return False


def _plain(graph: torch.fx.Graph, node: torch.fx.Node, copies: Copies) -> torch.fx.Node:
    return _laid_out(graph, _Attention.of(graph, node, copies).plain(), node.meta["val"])


# ---- scratch of the fused kernel on a CPU ------------------------------------------------------

_ON_CPU = "_scaled_dot_product_flash_attention_for_cpu"
_ON_GPU = tuple(f"_scaled_dot_product_{k}_attention_backward" for k in ("flash", "efficient"))
_KEY_BLOCK = 512
_PACKED_WIDTH = 64
_PACKED_HEADS = 4  # and more
_PADDING_BYTES = 512  # of the small arrays that a thread allocates besides its blocks


def scratch_bytes(launch: Launch) -> int:
    """Returns the most bytes that a launch allocates and frees while it runs; 0 if unknown.

    The sizes are those of PyTorch's FlashAttentionKernel.cpp (torch 2.11 to 2.15), for the CPUs
    that need most: those with matrix units pack keys and values. For a GPU's kernels only the
    buffers that gradients are accumulated in count, by their sources; that was never measured.
    """
    name = launch.name.removeprefix("aten.").partition(".")[0]
    views = [view for view in launch.args if isinstance(view, View)]
    if not views or not name.startswith((_ON_CPU, *_ON_GPU)):  # an estimated launch has no operands
        return 0
    # A symbolic size counts as the largest that there is room for.
    views = [
        replace(v, shape=tuple(map(int, v.shape)), stride=tuple(map(int, v.stride))) for v in views
    ]
    if name in _ON_GPU:
        # Gradients are accumulated in float32, for whole blocks of 128 tokens.
        summed = views[1:4] if "efficient" in name else views[1:2]
        return sum(4 * _num_padded(v.shape) for v in summed if _is_reduced(v.dtype))
    if name == _ON_CPU:
        query, key = views[:2]
        return _forward_scratch_bytes(query, key)
    gradient, query, key = views[:3]
    return _backward_scratch_bytes(gradient, query, key)


def _num_padded(shape: Sequence[int]) -> int:
    *outer, tokens, width = shape
    return math.prod(outer) * -(-tokens // 128) * 128 * width


def _forward_scratch_bytes(query: View, key: View) -> int:
    rows, columns = _block(query.shape[-2], key.shape[-2])
    width = query.shape[-1]
    # A CPU with matrix units may pack copies of keys and values for them.
    _, heads, tokens, size = key.shape
    packs = heads >= _PACKED_HEADS and tokens >= _PACKED_WIDTH and size % _PACKED_WIDTH == 0
    packs = packs and _is_reduced(key.dtype)
    if packs:
        columns = _padded(columns)
    num_bytes = (rows * columns + 2 * rows + rows * width) * _accumulated(query.dtype)
    if _is_reduced(query.dtype):  # the block again in its own type
        num_bytes += rows * (columns + 1) * query.dtype.itemsize
    if packs:
        num_bytes += (columns + width) * _PACKED_WIDTH * query.dtype.itemsize
    num_bytes = torch.get_num_threads() * (num_bytes + _PADDING_BYTES)
    return num_bytes + (_packed_bytes(key) if packs else 0)


def _packed_bytes(key: View) -> int:
    """Copies of keys and values, padded."""
    batch, heads, tokens, width = key.shape
    padded = _padded(tokens) + (_KEY_BLOCK if tokens >= _KEY_BLOCK else 0)
    return 2 * batch * heads * padded * width * key.dtype.itemsize


def _padded(num_tokens: int) -> int:
    return -(-num_tokens // _PACKED_WIDTH) * _PACKED_WIDTH


def _backward_scratch_bytes(gradient: View, query: View, key: View) -> int:
    rows, columns = _block(query.shape[-2], key.shape[-2])
    num_bytes = (2 * rows * columns + rows) * _accumulated(query.dtype)
    if _is_reduced(query.dtype):
        num_bytes += 2 * rows * columns * query.dtype.itemsize
    num_bytes = torch.get_num_threads() * (num_bytes + _PADDING_BYTES)
    # A gradient of heads and tokens is copied unless it is contiguous as tokens and heads.
    turned = ([numbers[d] for d in (0, 2, 1, 3)] for numbers in (gradient.shape, gradient.stride))
    copied = math.prod(gradient.shape) * gradient.dtype.itemsize
    return num_bytes + (0 if is_contiguous(*map(tuple, turned)) else copied)


def _block(num_queries: int, num_keys: int) -> tuple[int, int]:
    """Queries and keys that one thread works on at a time."""
    rows = 256 if num_queries >= 768 else 64 if num_queries >= 192 else 32
    return min(rows, num_queries), min(_KEY_BLOCK, num_keys)


def _is_reduced(dtype: torch.dtype) -> bool:
    return dtype in (torch.bfloat16, torch.float16)


def _accumulated(dtype: torch.dtype) -> int:
    """Returns the bytes of an accumulator for values of a type."""
    return 4 if _is_reduced(dtype) else dtype.itemsize


# ---- on a GPU ----------------------------------------------------------------------------------

_FLASH = aten._scaled_dot_product_flash_attention.default
_EFFICIENT = aten._scaled_dot_product_efficient_attention.default
_MAX_HEAD = 256
_ROW = 16  # elements that rows of a mask are padded to
_HALF = (torch.float16, torch.bfloat16)
_CASTS = (aten.to.dtype, aten._to_copy.default)


def as_on_a_gpu(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Returns the graph with attention and dropout as a GPU runs them (the same if it has none)."""

    def rule(node: torch.fx.Node) -> _Write | None:
        if node.target is _FUSED:
            return _written_for_gpu
        return _native_dropout if _drops(node) else None

    return _rewritten(module, rule)


def _before_repeat(node: torch.fx.Node) -> torch.fx.Node | None:
    """Returns the keys or values of fewer heads that a node repeats, and may cast; else None."""
    if node.target in _CASTS:
        node = node.args[0]  # type: ignore[assignment]
    if node.target is aten.repeat_interleave.self_int and node.args[2:3] == (1,):
        return node.args[0]  # type: ignore[return-value]
    steps = [node]
    for target in (aten.reshape.default, aten.expand.default, aten.unsqueeze.default):
        if steps[-1].target is not target or not isinstance(steps[-1].args[0], torch.fx.Node):
            return None
        steps.append(steps[-1].args[0])
    repeated, expanded, _, source = (tuple(n.meta["val"].shape) for n in steps)
    times = expanded[2] if len(expanded) == 5 else 0
    batch, heads, *rest = source
    as_heads = expanded == (batch, heads, times, *rest) and steps[2].args[1] == 2
    return steps[3] if as_heads and repeated == (batch, heads * times, *rest) else None


def _drops(node: torch.fx.Node) -> bool:
    """Whether a node is a dropout that drops something."""
    if node.target is not aten.dropout.default:
        return False
    operand, p, train = node.args
    assert isinstance(operand, torch.fx.Node)
    return bool(train) and 0 < float(p) < 1 and operand.meta["val"].numel() > 0  # type: ignore[arg-type]


def _native_dropout(graph: torch.fx.Graph, node: torch.fx.Node, copies: Copies) -> torch.fx.Node:
    operand, p, _ = node.args
    assert isinstance(operand, torch.fx.Node)
    pair = graph.call_function(aten.native_dropout.default, (copies[operand], p, True))
    return graph.call_function(operator.getitem, (pair, 0))


def _written_for_gpu(graph: torch.fx.Graph, node: torch.fx.Node, copies: Copies) -> torch.fx.Node:
    return _laid_out(graph, _Attention.of(graph, node, copies).as_on_gpu(), node.meta["val"])


@dataclass(frozen=True)
class _Attention:
    """One attention, and the graph that it is written to."""

    graph: torch.fx.Graph
    given: dict[str, Any]  # its arguments, as they were traced
    operands: dict[str, torch.fx.Node]  # those that are tensors, in the new graph
    copies: Copies

    @classmethod
    def of(cls, graph: torch.fx.Graph, node: torch.fx.Node, copies: Copies) -> _Attention:
        given = _arguments(node)
        operands = {n: copies[x] for n, x in given.items() if isinstance(x, torch.fx.Node)}
        return cls(graph, given, operands, copies)

    def as_on_gpu(self) -> torch.fx.Node:
        """Adds the attention that PyTorch chooses on a GPU; returns its result."""
        query, key, value = (self._seen(name) for name in ("query", "key", "value"))
        masked = self.given["attn_mask"] is not None
        heads = {query.shape[-1], key.shape[-1], value.shape[-1]}
        fits = all(t.dim() == 4 and 0 not in t.shape for t in (query, key, value))
        wide = 16 // query.element_size()  # elements of the widest load
        if not fits or any(head % wide for head in heads) or (masked and self.given["is_causal"]):
            return self.plain()
        is_short, allowed = len(heads) == 1 and max(heads) <= _MAX_HEAD, torch.backends.cuda
        if query.dtype in _HALF and not masked and is_short and allowed.flash_sdp_enabled():
            operands = self._not_repeated()
            return self._fused(
                _FLASH, operands, self.given["dropout_p"], self.given["is_causal"], False
            )
        if query.dtype not in (*_HALF, torch.float32) or not allowed.mem_efficient_sdp_enabled():
            return self.plain()
        bias = self._bias() if masked else None
        options = bias, True, self.given["dropout_p"], self.given["is_causal"]
        return self._fused(_EFFICIENT, self._repeated(), *options)

    def _seen(self, name: str) -> torch.Tensor:
        value: torch.Tensor = self.given[name].meta["val"]
        return value

    def _call(self, target: Any, *args: Any, **kwargs: Any) -> torch.fx.Node:
        return self.graph.call_function(target, args, kwargs)

    def _fused(
        self, target: Any, operands: Sequence[torch.fx.Node], *options: Any
    ) -> torch.fx.Node:
        made = self._call(target, *operands, *options, scale=self.given["scale"])
        return self._call(operator.getitem, made, 0)

    def plain(self) -> torch.fx.Node:
        """Adds the attention as products and a softmax; returns its result."""
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
        return self._call(operator.getitem, made, 0)

    def _repeated(self) -> list[torch.fx.Node]:
        """Returns the operands, with keys and values repeated if several heads share them."""
        query, *kept = (self.operands[name] for name in ("query", "key", "value"))
        times = self._seen("query").shape[1] // self._seen("key").shape[1]
        if not self.given["enable_gqa"] or times == 1:
            return [query, *kept]
        return [query, *(self._call(aten.repeat_interleave.self_int, x, times, 1) for x in kept)]

    def _not_repeated(self) -> list[torch.fx.Node]:
        """Returns the operands, with keys and values before they are repeated for more heads."""
        given = [self.given[name] for name in ("key", "value")]
        shared = [_before_repeat(node) or node for node in given]
        if len({node.meta["val"].shape[1] for node in shared}) > 1:
            shared = given
        operands = [self.operands["query"]]
        for node, wanted in zip(shared, given, strict=True):
            dtype, made = wanted.meta["val"].dtype, self.copies[node]
            is_cast = node.meta["val"].dtype == dtype
            operands.append(made if is_cast else self._call(aten.to.dtype, made, dtype))
        return operands

    def _bias(self) -> torch.fx.Node:
        """Returns the mask as a bias of full shape, with rows padded for wide loads."""
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
