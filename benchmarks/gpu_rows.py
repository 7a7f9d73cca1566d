"""Published training steps on GPUs beside what is predicted for them; nothing runs.

    python benchmarks/gpu_rows.py             # a minute
    python benchmarks/gpu_rows.py llama-8b

Parameters are on the meta device. The time of a row is printed as a bound and as expected, with the
error of the second; memory beside what its source counted, and what is not the same.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from decoders import InAutocast
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from lazyinline.backend.gpu import targets
from lazyinline.backend.gpu.targets import GIB, MEMORY_SHARE, PRODUCT_SHARE
from lazyinline.frontend.compiler import Compiler
from lazyinline.frontend.marks import lazy_inline
from lazyinline.frontend.options import Batching, Options
from lazyinline.frontend.passes.state import step_goal

Made = tuple[nn.Module, dict[str, torch.Tensor]]


@dataclass(frozen=True)
class Row:
    """A published step.

    Attributes:
        make: the model and its batch.
        target: the GPU, or the nearest in the table.
        published_s: of a step, with its optimizer.
        update_bytes: that the optimizer moves, which is no part of our step.
        source: where it was published.
        differs: what it has that ours has not.
        recompute: the policy.
        recomputed_flops: that the policy's products do not have: of those computed again.
        bytes_per_s: of its memory, where the board's is another than the target's.
    """

    make: Callable[[], Made]
    target: str
    published_s: float
    update_bytes: int
    source: str
    differs: str
    recompute: Any = None
    recomputed_flops: float = 0
    bytes_per_s: float | None = None


def batch(rows: int, tokens: int) -> dict[str, torch.Tensor]:
    """Returns tokens, which are also the labels."""
    ids = torch.zeros(rows, tokens, dtype=torch.long, device="meta")
    return {"input_ids": ids, "labels": ids}


def gpt2() -> Made:
    """Returns GPT-2 124M as nanoGPT trains it."""
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(vocab_size=50304, use_cache=False, **rates))
    model.loss_type = "ForCausalLM"  # or it warns in the forward
    return InAutocast(model), batch(16, 1024)


def llama_8b(rows: int) -> Made:
    """Returns Llama 3 8B in bfloat16, and rows of 8,192 tokens."""
    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        rope_theta=500000.0,
        use_cache=False,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    return model, batch(rows, 8192)


AGAIN = 6_980_000_000
"""FLOPs of a token: torchtitan computes every other product of a block again, two for a weight."""
ROWS = {
    "gpt2": Row(
        gpt2,
        "cuda:sm_80",
        0.093,
        124_000_000 * 28,
        "A. Karpathy, Let's reproduce GPT-2, lecture 10: 93 ms with torch.compile, 50304 tokens",
        "nothing but AdamW, added by the bytes that it moves",
    ),
    "llama-8b-a100": Row(
        partial(llama_8b, 1),
        "cuda:sm_80",
        8192 / 2973,
        8_030_000_000 * 28 // 64,
        "torchtitan, 2024-05: 2,973 tokens/s per GPU, selective recompute, compile",
        "FSDP over 64 GPUs",
        "selective",
        AGAIN * 8192,
    ),
    "llama-8b": Row(
        partial(llama_8b, 2),
        "cuda:sm_90",
        2 * 8192 / 6667,
        8_030_000_000 * 28 // 8,
        "torchtitan, 2024-12, table 1: 6,667 tokens/s per GPU, selective recompute, compile",
        "FSDP over 8 GPUs (125 ms at most over NVLink), on boards held at 500 W in place of 700 W",
        "selective",
        AGAIN * 2 * 8192,
        2.4e12,
    ),
}


def show(name: str, row: Row) -> None:
    """Compiles a row's step, and prints what is predicted beside what was published."""
    model, kwargs = row.make()
    for kind in (GPT2Block, LlamaDecoderLayer):
        lazy_inline(kind)
    board = targets.target_named(row.target)
    rates = replace(board.rates, bytes_per_s=row.bytes_per_s or board.rates.bytes_per_s)
    with mock.patch.object(targets, "TARGETS", (replace(board, rates=rates),)):
        compiler = Compiler(Options(target=row.target, recompute=row.recompute, cache="off"))
        _, report = compiler.compile(model, (), kwargs, step_goal(Batching(1)))
    gpu = report.gpu
    assert gpu is not None
    update_s = row.update_bytes / gpu.target.rates.bytes_per_s
    again_s = row.recomputed_flops / rates.half_flops_per_s
    bound_s = gpu.prediction.cost.seconds + update_s + again_s
    expected_s = gpu.prediction.expected_s + update_s / MEMORY_SHARE + again_s / PRODUCT_SHARE
    print(report)
    print(f"{name}: published {row.published_s * 1e3:.0f} ms ({row.source})")
    print(
        f"  at least {bound_s * 1e3:.1f} ms, expected {expected_s * 1e3:.1f} ms: "
        f"{expected_s / row.published_s - 1:+.0%}; it has besides: {row.differs}"
    )
    print(f"  memory of the step {gpu.peak_bytes / GIB:.1f} GiB, without an optimizer's")


def main() -> None:
    """Prints the rows that are asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("rows", nargs="*", default=[*ROWS], metavar="ROW")
    for name in parser.parse_args().rows:
        show(name, ROWS[name])


if __name__ == "__main__":
    main()
