"""Time of one training step, interleaved in one process: eager, torch.compile, lazyinline.

    python benchmarks/step_time.py                 # overhead-bound and compute-bound decoder
    python benchmarks/step_time.py --rounds 50 --json build/step_time.json

One thread. Each round times every way once, in turn; the minimum and the median of the rounds are
shown. Gradients are set to None before each step, except for ``compile_step``, which fills its own.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import nn

import lazyinline
from lazyinline.frontend.models import Decoder, DecoderBlock, llama

PROBLEMS = {
    "overhead-bound": {"num_layers": 8, "hidden": 32, "seq": 8, "vocab": 64},
    "compute-bound": {"num_layers": 16, "hidden": 256, "seq": 64},
}
Step = Callable[[], object]


@dataclass(frozen=True)
class Row:
    """One way on one problem."""

    problem: str
    way: str
    min_ms: float
    median_ms: float
    peak_bytes: int | None = None
    lower_bound_bytes: int | None = None


def autograd_step(model: nn.Module, run: Callable[..., torch.Tensor], args: tuple) -> Step:
    """Returns a step that runs a forward and backward through autograd."""
    parameters = list(model.parameters())

    def step() -> None:
        for parameter in parameters:
            parameter.grad = None
        run(*args).backward()

    return step


def per_block(model: Decoder) -> Decoder:
    """Compiles each block on its own."""
    for block in model.blocks:
        block.compile(fullgraph=True)
    return model


def ways(sizes: dict[str, int]) -> tuple[dict[str, Step], lazyinline.TrainingStep]:
    """Builds every way of running a step, each on a copy of one model."""
    model, args = llama(**sizes)
    torch.compiler.reset()
    whole, blocks, late, planned = (copy.deepcopy(model) for _ in range(4))
    step = lazyinline.compile_step(planned)
    return {
        "eager": autograd_step(model, model, args),
        "torch.compile": autograd_step(whole, torch.compile(whole, fullgraph=True), args),
        "torch.compile per block": autograd_step(blocks, per_block(blocks), args),
        "lazyinline.compile": autograd_step(late, lazyinline.compile(late), args),
        "lazyinline.compile_step": lambda: step(*args),
    }, step


def measure(problem: str, rounds: int) -> list[Row]:
    """Times all ways on one problem, in turn."""
    steps, planned = ways(PROBLEMS[problem])
    times: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        for _ in range(3):
            step()
    for _ in range(rounds):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            times[name].append(1e3 * (time.perf_counter() - start))
    rows = []
    for name, values in times.items():
        stats = planned.stats if name == "lazyinline.compile_step" else None
        peak = (stats.peak_bytes, stats.lower_bound_bytes) if stats else (None, None)
        rows.append(Row(problem, name, min(values), statistics.median(values), *peak))
    return rows


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--problem", choices=PROBLEMS, nargs="+", default=list(PROBLEMS))
    parser.add_argument("--json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    lazyinline.lazy_inline(DecoderBlock)
    rows = [r for p in options.problem for r in measure(p, options.rounds)]
    print(f"{'problem':<16}{'way':<26}{'min ms':>9}{'median':>9}")
    for row in rows:
        print(f"{row.problem:<16}{row.way:<26}{row.min_ms:>9.3f}{row.median_ms:>9.3f}")
    if options.json:
        with open(options.json, "w") as file:
            json.dump([asdict(r) for r in rows], file, indent=1)


if __name__ == "__main__":
    main()
