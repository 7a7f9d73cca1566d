"""What the boundary of a block costs a step: launches, CPU time and memory, late beside early.

``python benchmarks/boundaries.py`` compiles a step of two decoders by width, once with blocks as
closures and once inlined first (``reuse="off"``), where kernels fuse across boundaries. Both take
steps in turn in one process, on one thread; CPU seconds, minima and medians of the rounds.

With ``--target cuda:sm_90`` nothing runs: what both launch there, the bytes that launches move, and
the least time of that by the roofline.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import statistics
import time

import decoders
import torch
from torch import nn

import lazyinline

WIDTHS = ((64, 128), (256, 256), (512, 256), (1024, 256))


def main() -> None:
    """Prints a line for each model and width."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--target", default=None)
    parser.add_argument("--seq", type=int, default=0, help="in place of each width's own")
    options = parser.parse_args()
    torch.set_num_threads(1)
    lazyinline.lazy_inline(decoders.DecoderBlock)
    lazyinline.lazy_inline(decoders.GptBlock)
    for name, make in (("llama", decoders.llama), ("gpt", decoders.gpt)):
        for hidden, seq in WIDTHS:
            seq = options.seq or seq
            sizes = {"hidden": hidden, "num_heads": max(1, hidden // 64), "seq": seq, "batch": 1}
            model, args = make(options.layers, **sizes, vocab=1000)
            if options.target is not None:
                print(f"{name:<6} {hidden:>4} x {seq}: {planned(model, args, options.target)}")
                continue
            steps = {
                "late": lazyinline.compile_step(copy.deepcopy(model), reuse="marked"),
                "early": lazyinline.compile_step(copy.deepcopy(model), reuse="off"),
            }
            times: dict[str, list[float]] = {way: [] for way in steps}
            for turn in range(options.rounds + 1):
                for way, step in steps.items():
                    begun = time.process_time()
                    step(*args)
                    if turn:  # the first call compiles
                        times[way].append(time.process_time() - begun)
            least, middle = (
                measure(times["late"]) / measure(times["early"])
                for measure in (min, statistics.median)
            )
            peaks = [step.last_report.peak_bytes for step in steps.values()]
            launches = [step.stats.kernels for step in steps.values()]
            print(
                f"{name:<6} {hidden:>4} x {seq}: launches {launches[0]} and {launches[1]}, "
                f"time {least:.3f} ({middle:.3f}), peak {peaks[0] / peaks[1]:.3f}"
            )


def planned(model: nn.Module, args: tuple[torch.Tensor, ...], target: str) -> str:
    """Returns the numbers of both plans for a GPU, late and early."""
    found = []
    for reuse in ("marked", "off"):
        step = lazyinline.compile_step(model, reuse=reuse, target=target)
        with contextlib.suppress(lazyinline.PlanError):  # it is not here
            step(*args)
        gpu = step.last_report.gpu
        cost = gpu.prediction.cost
        found.append((gpu.prediction.num_launches, cost.moved_bytes, cost.seconds, gpu.arena_bytes))
    (late, late_bytes, late_s, late_peak), (early, early_bytes, early_s, early_peak) = found
    return (
        f"launches {late} and {early}, moved {late_bytes / 2**20:.1f} and "
        f"{early_bytes / 2**20:.1f} MiB ({late_bytes / early_bytes:.3f}), predicted "
        f"{late_s / early_s:.3f}, peak {late_peak / early_peak:.3f}"
    )


if __name__ == "__main__":
    main()
