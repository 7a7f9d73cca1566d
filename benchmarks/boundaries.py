"""What the boundary of a block costs a step: launches, CPU time and memory.

``python benchmarks/boundaries.py`` compiles a step of two decoders by width, in three ways: with
blocks as closures (*kept*), with fused boundaries (``boundaries="fused"``), and inlined first
(*early*, ``reuse="off"``), where kernels fuse across boundaries as well. All take steps in turn in
one process, on one thread: CPU seconds, minima and medians of the rounds, each over early's.

With ``--target cuda:sm_90`` nothing runs: what they launch there, the bytes that launches move, and
the least time of that by the roofline. With ``--compile`` the CPU seconds of a first compile, with
empty caches, fused over kept.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import decoders
import torch
from torch import nn

import lazyinline

WIDTHS = ((64, 128), (256, 256), (512, 256), (1024, 256))
WAYS: dict[str, dict[str, Any]] = {
    "kept": {},
    "fused": {"boundaries": "fused"},
    "early": {"reuse": "off"},
}
MODELS: dict[str, Callable[..., Any]] = {"llama": decoders.llama, "gpt": decoders.gpt}


def main() -> None:
    """Prints a line for each model and width."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--target", default=None)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--cold", nargs=2, metavar=("MODEL", "WAY"), help="one first compile")
    parser.add_argument("--seq", type=int, default=0, help="in place of each width's own")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.cold:
        return print(cold_seconds(*options.cold, options.layers))
    for name, make in MODELS.items():
        if options.compile:
            print(
                f"{name:<6} first compile, fused / kept: {compile_ratio(name, options.layers):.3f}"
            )
            continue
        for hidden, seq in WIDTHS:
            seq = options.seq or seq
            sizes = {"hidden": hidden, "num_heads": max(1, hidden // 64), "seq": seq, "batch": 1}
            model, args = make(options.layers, **sizes, vocab=1000)
            found = (
                planned(model, args, options.target)
                if options.target is not None
                else timed(model, args, options.rounds)
            )
            print(f"{name:<6} {hidden:>4} x {seq}: {found}", flush=True)


def timed(model: nn.Module, args: tuple[torch.Tensor, ...], rounds: int) -> str:
    """Returns launches, and times and peaks over those of early inlining."""
    steps = {w: lazyinline.compile_step(copy.deepcopy(model), **o) for w, o in WAYS.items()}
    times: dict[str, list[float]] = {way: [] for way in steps}
    for turn in range(rounds + 1):
        for way, step in steps.items():
            begun = time.process_time()
            step(*args)
            if turn:  # the first call compiles
                times[way].append(time.process_time() - begun)
    peaks = {way: step.last_report.peak_bytes for way, step in steps.items()}
    return "; ".join(
        f"{way} {steps[way].stats.kernels} launches, "
        f"time {min(times[way]) / min(times['early']):.3f} "
        f"({statistics.median(times[way]) / statistics.median(times['early']):.3f}), "
        f"peak {peaks[way] / peaks['early']:.3f}"
        for way in WAYS
    )


def planned(model: nn.Module, args: tuple[torch.Tensor, ...], target: str) -> str:
    """Returns the numbers of the plans for a GPU, over those of early inlining."""
    found = {}
    for way, chosen in WAYS.items():
        step = lazyinline.compile_step(model, target=target, **chosen)
        with contextlib.suppress(lazyinline.PlanError):  # it is not here
            step(*args)
        gpu = step.last_report.gpu
        cost = gpu.prediction.cost
        found[way] = (gpu.prediction.num_launches, cost.moved_bytes, cost.seconds, gpu.arena_bytes)
    _, bytes_, seconds, peak = found["early"]
    return "; ".join(
        f"{way} {found[way][0]} launches, moved {found[way][1] / bytes_:.3f}, predicted "
        f"{found[way][2] / seconds:.3f}, peak {found[way][3] / peak:.3f}"
        for way in WAYS
    )


def compile_ratio(name: str, layers: int, rounds: int = 3) -> float:
    """Returns the CPU seconds of first compiles in processes of their own, fused over kept."""
    least = {"kept": float("inf"), "fused": float("inf")}
    for _ in range(rounds):
        for way in least:
            command = [sys.executable, __file__, "--cold", name, way, "--layers", str(layers)]
            with tempfile.TemporaryDirectory() as folder:
                caches = {"TORCHINDUCTOR_CACHE_DIR": folder, "LAZYINLINE_CACHE_DIR": folder}
                done = subprocess.run(
                    command, capture_output=True, text=True, check=True, env=os.environ | caches
                )
            least[way] = min(least[way], float(done.stdout.split()[-1]))
    return least["fused"] / least["kept"]


def cold_seconds(name: str, way: str, layers: int) -> float:
    """Returns the CPU seconds of one compile."""
    model, args = MODELS[name](layers, hidden=64, num_heads=1, seq=32, batch=1, vocab=1000)
    step = lazyinline.compile_step(model, **WAYS[way])
    step(*args)
    return step.last_report.cpu_s


if __name__ == "__main__":
    main()
