"""What a pipeline costs to build: over layers against torch's own tracer, and over micro-batches.

    python benchmarks/pipeline_compile.py [--layers 8 16 32 64] [--backend inductor]

One process holds both stages, so that nothing but building is measured. The tracer,
``torch.distributed.pipelining.pipeline``, exports the whole model and splits it, without a
backward; ours captures, differentiates, splits, plans and links (with ``--backend inductor``
kernels too). CPU seconds, children included. The two are run in turn.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from decoders import Decoder, DecoderBlock, DecoderConfig
from torch import Tensor

import lazyinline
from lazyinline import lazy_inline

SIZES = {"hidden": 64, "num_heads": 2, "vocab": 100, "seq": 16}


def model_and_batch(layers: int, batch: int) -> tuple[Decoder, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    config = DecoderConfig(layers, batch=batch, **SIZES)
    ids, targets = torch.randint(0, config.vocab, (2, batch, config.seq)).unbind()
    return Decoder(config), (ids, targets)


def cpu_s() -> float:
    """CPU seconds of this process and of the children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def timed(build: Callable[[], object]) -> tuple[float, float]:
    """Returns CPU and wall seconds."""
    cpu, wall = cpu_s(), time.perf_counter()
    build()
    return cpu_s() - cpu, time.perf_counter() - wall


def ours(layers: int, micro_batches: int, backend: str) -> tuple[float, float]:
    model, args = model_and_batch(layers, 2 * micro_batches)

    def build() -> None:
        lazyinline.pipeline(
            model,
            args,
            num_stages=2,
            micro_batches=micro_batches,
            schedule="Interleaved1F1B",
            backend=backend,
        )

    return timed(build)


def theirs(layers: int) -> tuple[float, float]:
    from torch.distributed.pipelining import SplitPoint, pipeline

    model, args = model_and_batch(layers, 2)
    spec = {f"blocks.{layers // 2}": SplitPoint.BEGINNING}
    return timed(lambda: pipeline(model, mb_args=args, split_spec=spec))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--backend", default="eager")
    options = parser.parse_args()
    lazy_inline(DecoderBlock)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(f"{folder}/store", 1)
        dist.init_process_group("gloo", rank=0, world_size=1, store=store)
        ours(2, 2, options.backend), theirs(2)  # imports
        print(f"{'layers':>6}{'lazyinline':>12}{'tracer':>9}   CPU s (backend {options.backend})")
        for layers in options.layers:
            own, other = ours(layers, 4, options.backend)[0], theirs(layers)[0]
            print(f"{layers:>6}{own:>12.2f}{other:>9.2f}", flush=True)
        print(f"{'micro-batches':>13}{'CPU s':>8}   at 8 layers, best of 8 in turn")
        best = {4: float("inf"), 64: float("inf")}
        for turn in range(8):
            for number in sorted(best, reverse=bool(turn % 2)):
                best[number] = min(best[number], ours(8, number, options.backend)[0])
        for number, seconds in best.items():
            print(f"{number:>13}{seconds:>8.2f}")
        print(f"64 against 4: {best[64] / best[4] - 1:+.1%}")
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
