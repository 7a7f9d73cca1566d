"""What a rank of torchtitan's training holds by our program, beside what torchtitan measured.

    python benchmarks/fit_torchtitan.py     # ten rows of torchtitan's tables 1, 3, 4 and 5

Published is the peak of the memory that PyTorch's allocator reserved
(benchmarks/llama3_h100_202412_torchtitan.md there; what ran is their commit 9dec370). Predicted is
a sum of parts that are counted, and none is fitted:

    state    float32 parameters, gradients, AdamW's two tensors, divided by the ranks
    saved    what a block saves in the captured step, under their recompute, times the blocks
    head     norm, projection and loss, which run eagerly there: their operators, run on tensors
             without memory, and what an allocator that never gives back reserves for them
    units    what FSDP gathers: a block's parameters, and buffers for those and the root's
    block    what one block saves while it is computed again, in a stage without a head
    w2       without a compiler also a result that is saved and never read

Of the pipeline it is a rank's first stage, with a micro-batch in flight for each stage.
"""

from __future__ import annotations

import functools
import time
import weakref
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.parallel import loss_parallel
from torch.utils._python_dispatch import TorchDispatchMode

from lazyinline.autodiff.leaf_derivative import Choice, Cut, Request
from lazyinline.frontend.compiler import PASSES, Compiler
from lazyinline.frontend.options import Batching, Options
from lazyinline.frontend.passes.state import Subject, between, run, step_goal
from lazyinline.pipeline_parallel.mesh.torch_collectives import absent_ranks
from lazyinline.recompute import solver
from lazyinline.recompute.planner import Planner, PolicyName
from lazyinline.reuse.ir.program import Leaf
from lazyinline.reuse.ir.types import StructType

GIB = 2**30
SEQ, VOCAB = 8192, 128256
TARGET = "cuda:sm_90"
# Their policy saves every second product of wq, wk, wv, wo, w1, w3, w2.
COMPUTED_AGAIN = frozenset({"mm_1", "mm_3", "mm_5"})


@dataclass(frozen=True)
class Sizes:
    """A Llama 3.1."""

    dim: int
    layers: int
    heads: int
    ffn: int
    key_heads: int = 8

    @property
    def head_size(self) -> int:
        """Of one head."""
        return self.dim // self.heads

    @property
    def block_parameters(self) -> int:
        """Of one block."""
        few = self.key_heads * self.head_size
        return self.dim * (2 * self.dim + 2 * few + 3 * self.ffn + 2)


LLAMA = {
    "8B": Sizes(4096, 32, 32, 14336),
    "70B": Sizes(8192, 80, 64, 28672),
    "405B": Sizes(16384, 126, 128, 53248),
}


class Linear(nn.Linear):
    """Computes in bfloat16 with a parameter in float32, as FSDP's mixed precision does."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__(rows, columns, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(torch.bfloat16))


class Norm(nn.Module):
    """RMSNorm as torchtitan has it."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return scaled.type_as(x) * self.weight.to(torch.bfloat16)


class Block(nn.Module):
    """Attention with fewer heads of keys, and SwiGLU."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        few = sizes.key_heads * sizes.head_size
        self.attention_norm, self.ffn_norm = Norm(sizes.dim), Norm(sizes.dim)
        self.wq, self.wo = Linear(sizes.dim, sizes.dim), Linear(sizes.dim, sizes.dim)
        self.wk, self.wv = Linear(sizes.dim, few), Linear(sizes.dim, few)
        self.w1, self.w3 = Linear(sizes.dim, sizes.ffn), Linear(sizes.dim, sizes.ffn)
        self.w2 = Linear(sizes.ffn, sizes.dim)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        h = self.attention_norm(x)
        q, k, v = (
            w(h).unflatten(-1, (-1, self.sizes.head_size)) for w in (self.wq, self.wk, self.wv)
        )
        q, k = _turned(q, turns), _turned(k, turns)
        groups = self.sizes.heads // self.sizes.key_heads
        k, v = (t[:, :, :, None].expand(-1, -1, -1, groups, -1).flatten(2, 3) for t in (k, v))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.wo(mixed.transpose(1, 2).flatten(2))
        h = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


def _turned(x: Tensor, turns: Tensor) -> Tensor:
    """Rotary positions, in float32, of neighbouring pairs."""
    first, second = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = turns.unbind(-1)
    pairs = torch.stack((first * cos - second * sin, first * sin + second * cos), -1)
    return pairs.flatten(-2).type_as(x)


class Stage(nn.Module):
    """Embedding and blocks; what follows is not counted here."""

    def __init__(self, sizes: Sizes, layers: int) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCAB, sizes.dim)
        self.layers = nn.ModuleList(Block(sizes) for _ in range(layers))
        self.register_buffer("turns", torch.zeros(SEQ, 1, sizes.head_size // 2, 2))

    def forward(self, ids: Tensor) -> Tensor:
        """Returns a number to differentiate."""
        x = F.embedding(ids, self.tok_embeddings.weight.to(torch.bfloat16))
        for layer in self.layers:
            x = layer(x, self.turns)
        return x.float().mean()


def every_second_product(planner: Planner, request: Request) -> Choice | None:
    """Saves the fewest bytes with their policy in place of our own."""
    assert isinstance(request.closure, Leaf)
    problem = planner._problem(request)
    redone = solver.fewest_bytes(problem, lambda v: not v.is_heavy or v.name in COMPUTED_AGAIN)
    return Cut(redone.saved)


@functools.cache
def saved_of_a_block(sizes: Sizes, rows: int, tp: int, recompute: PolicyName | None) -> int:
    """Returns what one block saves of so many rows on a rank, in bytes.

    With sequence parallel all of it is split over tensor parallel ranks: tokens, heads or columns.
    """
    more, less = (saved_of_blocks(sizes, n, rows, recompute) for n in (3, 2))
    return (more - less) // tp


def saved_of_blocks(sizes: Sizes, layers: int, rows: int, recompute: PolicyName | None) -> int:
    """Returns what is saved between forward and backward of so many blocks, in bytes."""
    with torch.device("meta"):
        model, ids = Stage(sizes, layers), torch.zeros(rows, SEQ, dtype=torch.long)
    compiler = Compiler(Options(cache="off", recompute=recompute, target=TARGET))
    with mock.patch.object(Planner, "selective", every_second_product):
        state = compiler.started(Subject(model, (ids,), {}), step_goal(Batching()))
        state = run(between(PASSES, "capture", "repeat"), state)
    calls = state.programs["step"].calls
    kinds = (value.type for call in calls for value in call.results)
    structs = [kind for kind in kinds if isinstance(kind, StructType)]
    assert structs
    return sum(kind.num_bytes for kind in structs)


class Reserved(TorchDispatchMode):
    """Counts what an allocator reserves that reuses what was freed, and gives nothing back."""

    def __init__(self, own: list[Tensor]) -> None:
        super().__init__()
        self.num_bytes, self._free, self.is_paused = 0, list[int](), False
        self._known = weakref.WeakSet(t.untyped_storage() for t in own)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # it makes operators on local tensors, which come here
        made = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(made):
            if isinstance(tensor, Tensor) and not self.is_paused:
                self._note(tensor.untyped_storage())
        return made

    def _note(self, storage: Any) -> None:
        if storage in self._known:
            return
        self._known.add(storage)
        num_bytes = storage.nbytes()
        weakref.finalize(storage, self._free.append, num_bytes)
        block = min((b for b in self._free if b >= num_bytes), default=None)
        if block is None:
            self.num_bytes += num_bytes
        else:
            self._free.remove(block)
            self._free.append(block - num_bytes)


def head_bytes(sizes: Sizes, rows: int, tp: int) -> int:
    """Returns what their eager norm, projection and loss reserve, forward and backward."""
    apart = absent_ranks({"tp": tp}) if tp > 1 else nullcontext()
    with apart as mesh, FakeTensorMode():
        tensors = [
            torch.empty(rows, SEQ // tp, sizes.dim, dtype=torch.bfloat16),
            torch.empty(VOCAB // tp, sizes.dim, dtype=torch.bfloat16),
            torch.ones(sizes.dim, dtype=torch.bfloat16),
        ]
        counted = Reserved(tensors)
        if mesh is not None:
            lies = ([Shard(1)], [Shard(0)], [Replicate()])
            pairs = zip(tensors, lies, strict=True)
            tensors = [DTensor.from_local(t, mesh, layout) for t, layout in pairs]
        x, weight, scale = (t.requires_grad_() for t in tensors)
        targets = torch.zeros(rows, SEQ, dtype=torch.long)
        rule = ShardingPropagator._propagate_tensor_meta_non_cached

        def unseen(*args: Any) -> Any:  # whole tensors, of which DTensor asks for the shape
            counted.is_paused = True
            try:
                return rule(*args)
            finally:
                counted.is_paused = False

        name = rule.__name__
        split_loss = loss_parallel() if mesh is not None else nullcontext()
        with mock.patch.object(ShardingPropagator, name, unseen), counted, split_loss:
            wide = x.float()
            wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
            normed = wide.type_as(x) * scale
            if mesh is not None:
                normed = normed.redistribute(mesh, [Replicate()])  # type: ignore[attr-defined]
            scores = F.linear(normed, weight)
            loss = F.cross_entropy(scores.flatten(0, 1).float(), targets.flatten(0, 1))
            del scores
            loss.backward()
        return counted.num_bytes


def parts_of(
    sizes: Sizes,
    rows: int,
    fsdp: int,
    tp: int,
    recompute: PolicyName,
    *,
    is_eager: bool = False,
) -> dict[str, float]:
    """Returns what a rank holds without a pipeline, by part, in bytes."""
    block, root = (n // tp for n in (sizes.block_parameters, 2 * VOCAB * sizes.dim))
    hidden = rows * SEQ * sizes.dim * 2 // tp
    return {
        "state": 16 * (sizes.layers * block + root) / fsdp,
        # And the last block's result, which the head reads.
        "saved": sizes.layers * saved_of_a_block(sizes, rows, tp, recompute) + hidden,
        "head": head_bytes(sizes, rows, tp),
        "block": 0,  # the head's memory is there when blocks are computed again, and is more
        # The last block stays gathered; each gather has a buffer, and two are there at once.
        "units": 2 * block + 2 * (root + block),
        "w2": sizes.layers * hidden if is_eager else 0,
    }


def parts_of_a_stage(sizes: Sizes, rows: int, fsdp: int, tp: int, pp: int) -> dict[str, float]:
    """Returns what a rank of a pipeline's first stage holds; FSDP gathers its stage once a step."""
    layers, part = sizes.layers // pp, rows // pp
    own = (layers * sizes.block_parameters + VOCAB * sizes.dim) // tp
    return {
        "state": 16 * own / fsdp,
        "saved": pp * layers * saved_of_a_block(sizes, part, tp, "full"),
        "head": 0,
        "block": saved_of_a_block(sizes, part, tp, None),
        "units": 2 * own + 4 * own,  # and gradients, in float32 until the last micro-batch
        "w2": 0,
    }


def main() -> None:
    """Prints the table."""
    start = time.perf_counter()
    small = parts_of(LLAMA["8B"], 2, 8, 1, "selective")
    wide = {**small, "state": small["state"] / 16}
    w2 = {"w2": LLAMA["8B"].layers * 2 * SEQ * LLAMA["8B"].dim * 2}
    large = parts_of(LLAMA["70B"], 16, 32, 8, "full")
    huge = parts_of_a_stage(LLAMA["405B"], 32, 8, 8, 8)
    rows = [
        ("8B, 8 GPUs: FSDP", small | w2, 82.4),
        ("8B, 8 GPUs: FSDP, compile", small, 77.0),
        ("8B, 8 GPUs: FSDP, compile, float8", small, 76.8),
        ("8B, 128 GPUs: FSDP", wide | w2, 67.0),
        ("8B, 128 GPUs: FSDP, compile", wide, 62.0),
        ("8B, 128 GPUs: FSDP, compile, float8", wide, 61.8),
        ("70B, 256 GPUs: 2D", large, 71.9),
        ("70B, 256 GPUs: 2D, AsyncTP", large, 67.6),
        ("405B, 512 GPUs: 1F1B", huge, 82.5),
        ("405B, 512 GPUs: Interleaved 1F1B", huge, 72.7),
    ]
    print(f"{'GiB':36}" + "".join(f"{n:>7}" for n in (*small, "sum", "there", "off")))
    for name, parts, published in rows:
        total = sum(parts.values()) / GIB
        cells = "".join(f"{b / GIB:7.1f}" for b in parts.values())
        off = total / published - 1
        print(f"{name:36}{cells}{total:7.1f}{published:7.1f}{off:+7.1%}")
    print(f"in {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
