"""What a compile takes at several depths: a training step of the own decoder, pass by pass.

    python benchmarks/depth.py                       # 12 24 48 96 layers, 5 rounds, nothing built
    python benchmarks/depth.py --warm --rounds 9     # kernels' objects built before

Every compile is a process of its own; the depths take turns, so that what a busy machine does to
one it does to all; medians are compared, and minima, which a busy machine disturbs least.
CPU-seconds, the C++ compiler's included. Nothing is executed: parameters are on the meta device,
and `compile_step` ends with the memory plan.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from typing import Any

import torch

GOAL = 1.05


def measure(layers: int) -> dict[str, float]:
    """Compiles one depth; returns CPU-seconds by pass."""
    import decoders as models

    import lazyinline
    from lazyinline.frontend.compiler import Compiler
    from lazyinline.frontend.options import Batching, Options
    from lazyinline.frontend.passes.state import step_goal

    torch.set_num_threads(1)
    lazyinline.lazy_inline(models.DecoderBlock)
    with torch.device("meta"):
        model, args = models.llama(layers, hidden=256, num_heads=4, vocab=1000, seq=64)
    before = sum(os.times()[:4])
    _, report = Compiler(Options()).compile(model, args, {}, step_goal(Batching(1)))
    seconds = {record.name: record.cpu_s for record in report.passes}
    return {**seconds, "all": sum(os.times()[:4]) - before}


def in_a_process(layers: int, directory: str) -> dict[str, float]:
    """Measures one depth in a fresh process."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": directory}
    command = [sys.executable, __file__, "--one", str(layers)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-4000:])
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def rounds(options: argparse.Namespace) -> dict[int, list[dict[str, float]]]:
    """Measures every depth in turn, again and again."""
    found: dict[int, list[dict[str, float]]] = {n: [] for n in options.layers}
    with tempfile.TemporaryDirectory() as kept:
        if options.warm:
            in_a_process(options.layers[0], kept)
        for number in range(options.rounds):
            turn = options.layers if number % 2 == 0 else options.layers[::-1]
            for layers in turn:
                with tempfile.TemporaryDirectory() as empty:
                    found[layers].append(in_a_process(layers, kept if options.warm else empty))
    return found


def table(runs: dict[int, list[dict[str, float]]], of: Callable[[Iterable[float]], float]) -> str:
    """Formats a row per depth, each cell one number for all rounds."""
    names = list(next(iter(runs.values()))[0])
    rows = {
        n: {name: of(run[name] for run in found) for name in names} for n, found in runs.items()
    }
    least = min(row["all"] for row in rows.values())
    lines = [
        f"{'layers':>6}" + "".join(f"{name:>10}" for name in names) + f"{'x least':>9}   CPU s"
    ]
    for layers, row in rows.items():
        cells = "".join(f"{row[name]:>10.2f}" for name in names)
        lines.append(f"{layers:>6}{cells}{row['all'] / least:>9.3f}")
    return "\n".join(lines)


def main() -> None:
    """Prints a row per depth, by medians and by minima."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[12, 24, 48, 96])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warm", action="store_true")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options: Any = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one)))
        return
    found = rounds(options)
    print(f"medians\n{table(found, statistics.median)}")
    print(f"minima (each pass by itself)\n{table(found, min)}")
    print(f"goal: at most {GOAL} times the least")


if __name__ == "__main__":
    main()
