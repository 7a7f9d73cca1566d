"""Planned against measured memory of a pipeline's step, for every schedule, rank by rank.

    torchrun --standalone --nproc-per-node 2 benchmarks/pipeline_memory.py [--schedules 1F1B ...]

Planned is ``pipe.step_peak_bytes``; measured is the arena and the most that PyTorch's allocator
handed out beside it in a step, by its profiler (``memory_events.py``). The bound is the largest sum
of live bytes, buffer by buffer. Exits with 1 if planned and measured differ by more than 2 percent.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from decoders import DecoderBlock, llama
from memory_events import memory_use

import lazyinline
from lazyinline import lazy_inline
from lazyinline.pipeline_parallel.actions import SCHEDULES

MOST_OFF = 0.02


def measured_row(schedule: str, options: argparse.Namespace) -> dict[str, Any]:
    """One schedule on this rank: bytes planned, measured, and at least."""
    single = schedule in ("GPipe", "1F1B")
    model, args = llama(
        options.layers,
        hidden=options.hidden,
        num_heads=4,
        vocab=500,
        seq=64,
        batch=2 * options.micro_batches,
    )
    pipe = lazyinline.pipeline(
        model,
        args,
        num_stages=dist.get_world_size() * (1 if single else 2),
        micro_batches=options.micro_batches,
        schedule=schedule,
    )
    pipe.step(*args)
    measured = memory_use(partial(pipe.step, *args)).peak_bytes + pipe.arena_bytes
    bound = pipe.last_report.lower_bound_bytes
    return {"planned": pipe.step_peak_bytes, "measured": measured, "bound": bound}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schedules", nargs="+", default=list(SCHEDULES))
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--micro-batches", type=int, default=8)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    lazy_inline(DecoderBlock)
    first = dist.get_rank() == 0
    if first:
        print(f"{'schedule':24}{'rank':>5}{'planned':>13}{'measured':>13}{'off':>8}{'/ bound':>9}")
    wrong = 0
    for schedule in options.schedules:
        rows: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(rows, measured_row(schedule, options))
        for rank, row in enumerate(rows):
            off = row["planned"] / row["measured"] - 1
            wrong += abs(off) > MOST_OFF
            if first:
                print(
                    f"{schedule:24}{rank:>5}{row['planned']:>13}{row['measured']:>13}{off:>8.2%}"
                    f"{row['planned'] / row['bound']:>9.3f}",
                    flush=True,
                )
    dist.destroy_process_group()
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
