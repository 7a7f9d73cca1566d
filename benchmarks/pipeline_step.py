"""Step times of a pipeline, beside the simulator's.

    torchrun --standalone --nproc-per-node 2 benchmarks/pipeline_step.py [--backend inductor]

The simulator gets the measured duration of each action, so that it differs from the measured step
by transfers and waiting alone.
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.distributed as dist
from decoders import DecoderBlock, llama

import lazyinline
from lazyinline import lazy_inline

MICRO_BATCHES = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schedules", nargs="+", default=["GPipe", "1F1B", "ZBVZeroBubble"])
    parser.add_argument("--backend", default="eager")
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    lazy_inline(DecoderBlock)
    ranks = dist.get_world_size()
    if dist.get_rank() == 0:
        print(f"{'schedule':24}{'step ms':>9}{'simulated':>11}{'bubble':>8}   minimum of steps")
    for schedule in options.schedules:
        model, args = llama(8, hidden=128, num_heads=4, vocab=500, seq=64, batch=2 * MICRO_BATCHES)
        pipe = lazyinline.pipeline(
            model,
            args,
            num_stages=ranks if schedule in ("GPipe", "1F1B") else 2 * ranks,
            micro_batches=MICRO_BATCHES,
            schedule=schedule,
            backend=options.backend,
        )
        pipe.step(*args)
        best = float("inf")
        for count in pipe.counts.values():
            count.clear()
        for _ in range(options.steps):
            dist.barrier()
            start = time.perf_counter()
            pipe.step(*args)
            dist.barrier()
            best = min(best, time.perf_counter() - start)
        timeline = pipe.plan.simulated(pipe.measured_s())
        if dist.get_rank() == 0:
            step_ms, simulated_ms = best * 1e3, timeline.step_s * 1e3
            print(f"{schedule:24}{step_ms:>9.1f}{simulated_ms:>11.1f}{timeline.bubble:>8.1%}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
