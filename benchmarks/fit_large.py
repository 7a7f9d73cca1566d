"""Steps too large for a machine, compiled and planned on it: what a rank holds.

    python benchmarks/fit_large.py 13b     # Llama-2-13B on 8 x 8 ranks: planned and compiled
    python benchmarks/fit_large.py 175b    # GPT-3 on 8 x 16 x 8 ranks: eight stages compiled

Nothing of a model has memory and nothing runs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from decoders import Decoder, DecoderConfig
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import lazyinline

LLAMA_13B = {"hidden": 5120, "num_heads": 40, "ffn": 13824, "vocab": 32000, "seq": 4096}
TARGET = "cuda:sm_90"
WIDTH, LAYERS, VOCABULARY, SEQ = 12288, 96, 51200, 2048  # the vocabulary of 50257, rounded up
STAGES, DATA, TENSOR, MICRO_BATCHES = 8, 16, 8, 96
MEGATRON = {
    "layers.*.[qkv]": ColwiseParallel(),
    "layers.*.out": RowwiseParallel(),
    "layers.*.up": ColwiseParallel(),
    "layers.*.down": RowwiseParallel(),
    "embedding": RowwiseParallel(),
    "head": ColwiseParallel(),
}


def llama_13b(layers: int = 40) -> lazyinline.Fit:
    """Plans and compiles Llama-2-13B on 8 x 8 ranks, 64 sequences of 4,096 tokens."""
    with torch.device("meta"):
        model = Decoder(DecoderConfig(layers, **LLAMA_13B)).bfloat16()
        ids = torch.zeros(64, LLAMA_13B["seq"], dtype=torch.long)
    mesh = {"data": 8, "tp": 8}
    return lazyinline.fit(model, (ids, ids), mesh=mesh, target=TARGET, plan="auto")


class GptBlock(nn.Module):
    """A block of GPT-3, its projections of query, key and value apart."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the residual stream after this layer."""
        h = self.norm_1(x)
        q, k, v = (w(h).unflatten(-1, (-1, 128)).transpose(1, 2) for w in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        y: Tensor = x + self.down(F.gelu(self.up(self.norm_2(x)), approximate="tanh"))
        return y


class Gpt(nn.Module):
    """Returns the loss of the next tokens."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(SEQ, WIDTH)
        self.layers = nn.ModuleList(GptBlock() for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Computes it."""
        x = self.embedding(ids) + self.positions.weight
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def gpt_175b(recompute: lazyinline.PolicyName | None = None) -> lazyinline.Fit:
    """Compiles GPT-3's stages for 1,024 ranks, 1,536 sequences of 2,048 tokens."""
    with torch.device("meta"):
        model = Gpt(LAYERS).bfloat16()
        ids = torch.zeros(MICRO_BATCHES * DATA, SEQ, dtype=torch.long)
    return lazyinline.fit(
        model,
        (ids, ids),
        mesh={"pp": STAGES, "data": DATA, "tensor": TENSOR},
        target=TARGET,
        plan=MEGATRON,
        micro_batches=MICRO_BATCHES,
        recompute=recompute,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", choices=("13b", "175b"))
    parser.add_argument("--recompute", choices=("full", "selective"))
    options = parser.parse_args(arguments)
    cpu, wall = time.process_time(), time.perf_counter()
    found = llama_13b() if options.model == "13b" else gpt_175b(options.recompute)
    print(*filter(None, (found, found.pipeline)), sep="\n")
    seconds = time.perf_counter() - wall
    print(f"found in {seconds:.1f} s, {time.process_time() - cpu:.1f} CPU-seconds")


if __name__ == "__main__":
    main()
