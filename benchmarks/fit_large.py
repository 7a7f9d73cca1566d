"""Steps too large for a machine, compiled and planned on it: what a rank holds.

    python benchmarks/fit_large.py 13b     # Llama-2-13B on 8 x 8 ranks: planned and compiled
    python benchmarks/fit_large.py 175b    # GPT-3 on 8 x 16 x 8 ranks: a pipeline, simulated

Nothing of a model has memory and nothing runs. Of the pipeline, a rank's block is compiled; stages
are so many of it, and the step is simulated from the table of the schedule.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from decoders import Decoder, DecoderConfig
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import lazyinline
from lazyinline.backend.gpu.targets import GIB
from lazyinline.frontend.fit import collectives_s
from lazyinline.pipeline_parallel.actions import Action
from lazyinline.pipeline_parallel.plan import (
    PipelinePlan,
    StagePlan,
    predicted_durations,
    simulate,
)
from lazyinline.pipeline_parallel.torch_pipelining import action_table

LLAMA_13B = {"hidden": 5120, "num_heads": 40, "ffn": 13824, "vocab": 32000, "seq": 4096}
TARGET = "cuda:sm_90"
WIDTH, LAYERS, VOCABULARY, SEQ = 12288, 96, 51200, 2048  # the vocabulary of 50257, rounded up
STAGES, DATA, TENSOR, MICRO_BATCHES = 8, 16, 8, 96
NETWORK_BYTES_PER_S = 5e10
MEGATRON = {
    "layers.*.[qkv]": ColwiseParallel(),
    "layers.*.out": RowwiseParallel(),
    "layers.*.up": ColwiseParallel(),
    "layers.*.down": RowwiseParallel(),
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


@dataclass(frozen=True)
class Share:
    """What a part of a model takes of a rank, per micro-batch where it says so.

    Attributes:
        seconds: forward and backward, per micro-batch, with its collectives over tensor.
        reduce_s: of its gradients, once a step.
        parameter_bytes: of its parameters.
        saved_bytes: from forward to backward, per micro-batch.
    """

    seconds: float
    reduce_s: float
    parameter_bytes: float
    saved_bytes: float

    @classmethod
    def of(cls, layers: int, recompute: str | None) -> Share:
        """Compiles a rank's program of so many layers, with the ends of the model."""
        with torch.device("meta"):
            model, ids = Gpt(layers).bfloat16(), torch.zeros(DATA, SEQ, dtype=torch.long)
        mesh = {"data": DATA, "tensor": TENSOR}
        made = lazyinline.fit(
            model, (ids, ids), mesh=mesh, target=TARGET, plan=MEGATRON, recompute=recompute
        )
        moved = {axis: tuple(c for c in made.step.collectives if c.axis == axis) for axis in mesh}
        reduce_s, sum_s = (
            collectives_s(replace(made.step, collectives=moved[axis])) for axis in mesh
        )
        seconds = made.compute_s + sum_s
        return cls(seconds, reduce_s, made.memory.parameters, made.step.saved_bytes)

    def minus(self, other: Share) -> Share:
        """Returns the difference."""
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Share(*(a - b for a, b in pairs))

    def times(self, number: float) -> Share:
        """Returns so many of it."""
        return Share(*(number * one for one in vars(self).values()))


def gpt_175b(recompute: str | None = None) -> tuple[PipelinePlan, float, float]:
    """Simulates GPT-3's step on 1,024 ranks; returns it, seconds to reduce, and bytes of AdamW."""
    few, more = Share.of(2, recompute), Share.of(4, recompute)
    block = more.minus(few).times(0.5)
    ends = few.minus(block.times(2))
    parts = [block.times(LAYERS / STAGES) for _ in range(STAGES)]
    table = action_table("1F1B", STAGES, STAGES, MICRO_BATCHES)
    in_flight, sent_bytes = table.in_flight(), SEQ * WIDTH * 2
    stages = []
    for index, part in enumerate(parts):
        # Embedding and head are equally large; of the rest of both ends the head has nearly all.
        own = {0: Share(0.0, 0.0, 0.5 * ends.parameter_bytes, 0.0)}
        own[STAGES - 1] = replace(ends, parameter_bytes=0.5 * ends.parameter_bytes)
        end = own.get(index, Share(0.0, 0.0, 0.0, 0.0))
        stages.append(
            StagePlan(
                index,
                index,
                LAYERS // STAGES,
                f"layers.{index * LAYERS // STAGES}",
                f"layers.{(index + 1) * LAYERS // STAGES - 1}",
                (part.seconds + end.seconds) / 3,  # a backward is two forwards' work
                (part.seconds + end.seconds) * 2 / 3,
                0,
                round(part.parameter_bytes + end.parameter_bytes),
                round(part.parameter_bytes + end.parameter_bytes),
                round(part.saved_bytes + end.saved_bytes),
                sent_bytes if index else 0,
                in_flight[index],
            )
        )

    def transfer_s(action: Action) -> float:
        return sent_bytes / NETWORK_BYTES_PER_S

    timeline = simulate(table, predicted_durations(stages), transfer_s)
    plan = PipelinePlan(table, tuple(stages), timeline)
    reduce_s = max(part.reduce_s for part in parts)
    return plan, reduce_s, 2 * max(stage.parameter_bytes for stage in stages)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", choices=("13b", "175b"))
    parser.add_argument("--recompute", choices=("full", "selective"))
    options = parser.parse_args(arguments)
    cpu, wall = time.process_time(), time.perf_counter()
    if options.model == "13b":
        print(llama_13b())
    else:
        plan, reduce_s, optimizer_bytes = gpt_175b(options.recompute)
        print(plan)
        peak = max(plan.peak_bytes(rank) for rank in range(STAGES)) + optimizer_bytes
        print(
            f"on {STAGES} x {DATA} x {TENSOR} ranks: a rank holds at most {peak / GIB:.1f} GiB "
            f"with AdamW's state; a step takes {plan.step_s:.1f} s at least, "
            f"{plan.bubble:.1%} of it waiting, and {reduce_s:.2f} s to reduce gradients"
        )
    seconds = time.perf_counter() - wall
    print(f"found in {seconds:.1f} s, {time.process_time() - cpu:.1f} CPU-seconds")


if __name__ == "__main__":
    main()
