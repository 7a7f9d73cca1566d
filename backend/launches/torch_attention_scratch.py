"""Adapter: what PyTorch's fused attention on CPU allocates while it runs.

The fused kernel works through blocks of queries and keys in scratch that it allocates itself, in
each thread. No plan places that, so it is counted: a reported peak is a promise. What the products
inside take for themselves is not: oneDNN, which makes those of reduced precision, decides that anew
for each CPU, version and number of threads, for a single matrix product as well.
"""

from __future__ import annotations

import math

import torch

from .kernel_list import Launch, View

_ON_CPU = "_scaled_dot_product_flash_attention_for_cpu"
_KEY_BLOCK = 512
_PACKED_WIDTH = 64
_PACKED_HEADS = 4  # and more
_PADDING_BYTES = 512  # of the small arrays that a thread allocates beside its blocks


def scratch_bytes(launch: Launch) -> int:
    """Returns what a launch allocates and frees while it runs, at most; 0 if nothing is known.

    The sizes are those of PyTorch's FlashAttentionKernel.cpp (torch 2.11 to 2.15), for a CPU that
    needs most: those with matrix units work on packed keys and values.
    """
    name = launch.name.removeprefix("aten.").partition(".")[0]
    views = [view for view in launch.args if isinstance(view, View)]
    if not name.startswith(_ON_CPU) or not views:  # an estimated launch has no operands
        return 0
    if name == _ON_CPU:
        query, key = views[:2]
        return _forward_scratch_bytes(query, key)
    gradient, query, key = views[:3]
    return _backward_scratch_bytes(gradient, query, key)


def _forward_scratch_bytes(query: View, key: View) -> int:
    rows, columns = _block(query.shape[-2], key.shape[-2])
    width = query.shape[-1]
    packs = _may_pack(key)
    if packs:
        columns = _padded(columns)
    num_bytes = (rows * columns + 2 * rows + rows * width) * _accumulated(query.dtype)
    if _is_reduced(query.dtype):  # the block again in its own type
        num_bytes += rows * (columns + 1) * query.dtype.itemsize
    if packs:
        num_bytes += (columns + width) * _PACKED_WIDTH * query.dtype.itemsize
    num_bytes = torch.get_num_threads() * (num_bytes + _PADDING_BYTES)
    return num_bytes + (_packed_bytes(key) if packs else 0)


def _may_pack(key: View) -> bool:
    """Whether a CPU with matrix units may make copies of keys and values as these want them."""
    _, heads, tokens, width = key.shape
    fit = heads >= _PACKED_HEADS and tokens >= _PACKED_WIDTH and width % _PACKED_WIDTH == 0
    return _is_reduced(key.dtype) and fit


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
    return num_bytes + (0 if _has_tokens_first(gradient) else _num_bytes(gradient))  # a copy


def _has_tokens_first(view: View) -> bool:
    """Whether a tensor of heads and tokens lies contiguous as tokens and heads."""
    expected = 1
    for dim in (3, 1, 2, 0):
        if view.shape[dim] != 1 and view.stride[dim] != expected:
            return False
        expected *= view.shape[dim]
    return True


def _num_bytes(view: View) -> int:
    return math.prod(view.shape) * view.dtype.itemsize


def _block(num_queries: int, num_keys: int) -> tuple[int, int]:
    """Queries and keys that one thread works on at a time."""
    rows = 256 if num_queries >= 768 else 64 if num_queries >= 192 else 32
    return min(rows, num_queries), min(_KEY_BLOCK, num_keys)


def _is_reduced(dtype: torch.dtype) -> bool:
    return dtype in (torch.bfloat16, torch.float16)


def _accumulated(dtype: torch.dtype) -> int:
    """Bytes of an element in which sums of such a type are kept."""
    return 4 if _is_reduced(dtype) else dtype.itemsize
