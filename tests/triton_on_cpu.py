"""GPU programs run on CPU memory: Triton kernels by Triton's interpreter, the rest by PyTorch.

The interpreter is chosen by an environment variable when Triton is imported, so this is for a
process of its own, started with ``TRITON_INTERPRET=1``.
"""

from __future__ import annotations

import importlib.util
import math
import pathlib
import re
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from lazyinline.backend.gpu.torch_cuda import TritonKernel
from lazyinline.backend.link.placement import Place

_BLOCKS = {"XBLOCK": 1024, "YBLOCK": 16, "ZBLOCK": 16, "R0_BLOCK": 1024, "R1_BLOCK": 16}
_HEADER = """import triton
import triton.language as tl
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.hints import *

@triton.jit
def _tanh(x):
    return 2 / (1 + tl.exp(-2 * x)) - 1

"""


class _Heuristics:
    """Stands for Inductor's decorators: notes how a kernel would be launched."""

    def __init__(self) -> None:
        self.meta: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        def decorator(*args: Any, **meta: Any) -> Callable[[Any], Any]:
            self.meta = {"kind": name, **meta}
            return lambda function: function

        return decorator


def interpreted(kernel: TritonKernel) -> Callable[..., None]:
    """Returns what runs a kernel on tensors in CPU memory, program by program."""
    from torch._inductor.runtime.triton_heuristics import GridExpr

    body = kernel.source[kernel.source.index("@triton_heuristics") :]
    body = re.sub(r"\b(tl_math|libdevice)\.tanh", "_tanh", body)
    body = re.sub(r"\b(tl_math|libdevice)\.", "tl.", body)
    heuristics = _Heuristics()
    function = _defined(_HEADER + body, kernel.name, heuristics)
    names = function.arg_names
    blocks = {n: size for n, size in _BLOCKS.items() if n in names}

    def run(*args: Any) -> None:
        given = dict(zip(names, args, strict=False))
        numels = {n: v for n, v in given.items() if n.endswith("numel")}
        fitted = {n: _fitted(n, size, numels) for n, size in blocks.items()}
        grid = GridExpr.from_meta(heuristics.meta["inductor_meta"], fitted)
        function[tuple(grid.eval_slow({**numels, **fitted}))](*args, **fitted)

    return run


def _defined(source: str, name: str, heuristics: _Heuristics) -> Any:
    """Defines a function in a file: the interpreter reads a kernel's text from there."""
    path = pathlib.Path(tempfile.mkdtemp(), f"{name}.py")
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    vars(module)["triton_heuristics"] = heuristics
    spec.loader.exec_module(module)
    return getattr(module, name)


def _fitted(block: str, size: int, numels: dict[str, int]) -> int:
    numel = numels.get(block.replace("BLOCK", "numel").lower(), size)
    return min(size, 2 ** max(0, math.ceil(math.log2(max(numel, 1)))))


ON_CPU_MEMORY = Place(load=interpreted)


class Philox:
    """Counter-based random numbers, as a GPU draws them: a seed, and an offset that moves on.

    Source: Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (SC11), Philox 4x32-10.
    """

    def __init__(self) -> None:
        self.manual_seed(0)

    def manual_seed(self, seed: int) -> None:
        """Starts again."""
        self.seed, self.offset = seed, 0

    def advance(self) -> tuple[int, int]:
        """Returns where a kernel begins to draw, and moves on for the next one."""
        at = self.seed, self.offset
        self.offset += 4
        return at


GENERATOR = Philox()


def uniform(num: int, seed: int, offset: int) -> Tensor:
    """Returns numbers in [0, 1): word ``i % 4`` of counter ``i // 4``, at an offset."""
    counters = torch.arange(-(-num // 4))
    words = [torch.full_like(counters, offset), torch.zeros_like(counters), counters, counters * 0]
    keys = [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        first, second = words[0] * 0xD2511F53, words[2] * 0xCD9E8D57
        words = [
            ((second >> 32) & 0xFFFFFFFF) ^ words[1] ^ keys[0],
            second & 0xFFFFFFFF,
            ((first >> 32) & 0xFFFFFFFF) ^ words[3] ^ keys[1],
            first & 0xFFFFFFFF,
        ]
        keys = [(keys[0] + 0x9E3779B9) & 0xFFFFFFFF, (keys[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return (torch.stack(words, 1).flatten()[:num] >> 8).to(torch.float32) * 2.0**-24


def _kept(shape: Sequence[int], p: float, seed: int, offset: int) -> Tensor:
    """Which elements a dropout keeps."""
    return (uniform(math.prod(shape), seed, offset) < 1 - p).reshape(tuple(shape))


def _native_dropout(tensor: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    mask = _kept(tensor.shape, p, *GENERATOR.advance())
    return tensor * mask * (1 / (1 - p)), mask


class AsOnAGpu(TorchFunctionMode):
    """Has eager PyTorch choose, on a CPU, the operators that it chooses on a GPU."""

    def __torch_function__(self, func: Any, types_: Any, args: Any = (), kwargs: Any = None) -> Any:
        chosen = {
            functional.dropout: _dropout_of_a_gpu,
            functional.scaled_dot_product_attention: _attention_of_a_gpu,
        }
        return chosen.get(func, func)(*args, **(kwargs or {}))


def _dropout_of_a_gpu(
    tensor: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    if not training or not p:
        return tensor
    return torch.ops.aten.native_dropout(tensor, p, True)[0]


def _attention_of_a_gpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if enable_gqa:
        times = query.shape[1] // key.shape[1]
        key, value = (t.repeat_interleave(times, 1) for t in (key, value))
    if attn_mask is not None:
        if attn_mask.dtype is torch.bool:
            open_ = torch.zeros_like(attn_mask, dtype=query.dtype)
            attn_mask = open_.masked_fill(~attn_mask, float("-inf"))
        attn_mask = attn_mask.expand(*query.shape[:3], key.shape[2])
    return torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale
    )[0]


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    scale: float | None,
    *,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """Returns the probabilities and the logarithms of their sums."""
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = (query @ key.transpose(-1, -2)) * scale
    if bias is not None:
        scores = scores + bias
    if causal:
        rows, columns = scores.shape[-2:]
        mask = torch.ones(rows, columns, dtype=torch.bool).tril()
        scores = scores.masked_fill(~mask, float("-inf"))
    return scores.softmax(-1), scores.logsumexp(-1)


def _laid_out(result: Tensor) -> Tensor:
    """As the kernels of a GPU give it: the heads of one position beside each other."""
    return result.transpose(1, 2).contiguous().transpose(1, 2)


def _efficient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    chances, sums = attention(query, key, value, bias, scale, causal=is_causal)
    seed, offset = GENERATOR.advance() if dropout_p else (0, 0)
    if dropout_p:
        chances = chances * _kept(chances.shape, dropout_p, seed, offset) / (1 - dropout_p)
    rows = -(-query.shape[2] // 32) * 32
    padded = torch.zeros(*sums.shape[:2], rows)
    padded[..., : sums.shape[2]] = sums
    drawn = (torch.full((), number, dtype=torch.int64) for number in (seed, offset))
    return (_laid_out(chances @ value), padded, *drawn)


def _efficient_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    out: Tensor,
    logsumexp: Tensor,
    seed: Tensor,
    offset: Tensor,
    dropout_p: float,
    wanted: Sequence[bool],
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor | None, ...]:
    chances, _ = attention(query, key, value, bias, scale, causal=is_causal)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    of_chances = grad @ value.transpose(-1, -2)
    dropped = chances
    if dropout_p:
        kept = _kept(chances.shape, dropout_p, int(seed), int(offset)) / (1 - dropout_p)
        of_chances, dropped = of_chances * kept, chances * kept
    of_scores = chances * (of_chances - (of_chances * chances).sum(-1, keepdim=True))
    gradients = [
        of_scores @ key * scale,
        of_scores.transpose(-1, -2) @ query * scale,
        dropped.transpose(-1, -2) @ grad,
    ]
    of_bias = of_scores if bias is not None and wanted[3] else None
    return (*map(_laid_out, gradients), of_bias)


def _flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """As a GPU has it: of half precision, computed in single precision."""
    assert not dropout_p and not return_debug_mask
    wide = [query.float(), *_of_all_heads(query, key, value)]
    chances, sums = attention(wide[0], wide[1], wide[2], None, scale, causal=is_causal)
    drawn = torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64)
    result = _laid_out((chances @ wide[2]).to(query.dtype))
    lengths = query.shape[2], key.shape[2]
    return (result, sums, None, None, *lengths, *drawn, query.new_empty(0))


def _flash_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    *others: Any,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    is_causal = others[5]
    wide = [grad.float(), query.float(), *_of_all_heads(query, key, value)]
    none = torch.zeros(0)
    unread = (None, none, none, none, none)
    made = _efficient_backward(*wide, *unread, 0.0, (True,) * 4, is_causal, scale=scale)
    summed = [
        g.unflatten(1, (like.shape[1], -1)).sum(2)
        for g, like in zip(made[:3], (query, key, value), strict=True)
        if g is not None
    ]
    return tuple(_laid_out(g.to(query.dtype)) for g in summed)


def _of_all_heads(query: Tensor, *kept: Tensor) -> list[Tensor]:
    """Returns keys and values in single precision, once for each head that shares one."""
    return [t.float().repeat_interleave(query.shape[1] // t.shape[1], 1) for t in kept]


def with_operators_of_a_gpu() -> torch.library.Library:
    """Gives operators that only a GPU has a form for CPU memory, as long as the result is kept."""
    library = torch.library.Library("aten", "IMPL")
    kinds = {"efficient": (_efficient, _efficient_backward), "flash": (_flash, _flash_backward)}
    for kind, (forward, backward) in kinds.items():
        library.impl(f"_scaled_dot_product_{kind}_attention", forward, "CPU")
        library.impl(f"_scaled_dot_product_{kind}_attention_backward", backward, "CPU")
    library.impl("native_dropout", _native_dropout, "CPU", allow_override=True)
    return library
