"""Time and memory of one training step, in one process: eager, torch.compile, lazyinline.

    python benchmarks/step_time.py                 # overhead-bound and compute-bound decoder
    python benchmarks/step_time.py --rounds 50 --json build/step_time.json
    python benchmarks/step_time.py --clock cpu     # CPU time of the thread: for a busy machine

One thread. Each round times every way once, in turn; the minimum and the median of the rounds are
shown. Gradients are set to None before each step, except for ``compile_step``, which fills its own.
Memory is counted in one more step, by the profiler's memory events (see README.md).
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
from decoders import Decoder, DecoderBlock, llama
from memory_events import MemoryUse, memory_use
from torch import nn

import lazyinline

CLOCKS = {"wall": time.perf_counter, "cpu": time.thread_time}

PROBLEMS = {
    "overhead-bound": {"num_layers": 8, "hidden": 32, "seq": 8, "vocab": 64},
    "compute-bound": {"num_layers": 16, "hidden": 256, "seq": 64},
}
Step = Callable[[], object]


@dataclass(frozen=True)
class Row:
    """One way on one problem.

    Attributes:
        arena_bytes: memory that the way keeps from step to step; activations and gradients of
            ``compile_step``, activations of ``compile``.
        lower_bound_bytes: which no plan of that arena can go below.
        use: what the step allocated itself.
        unplaced_launches: names of launches that allocate their own results.
    """

    problem: str
    way: str
    min_ms: float
    median_ms: float
    use: MemoryUse
    arena_bytes: int = 0
    lower_bound_bytes: int = 0
    unplaced_launches: tuple[str, ...] = ()

    @property
    def peak_bytes(self) -> int:
        """The most memory held at once, besides the model and its inputs."""
        return self.arena_bytes + self.use.peak_bytes


@dataclass(frozen=True)
class Way:
    """One way of running a step; ``plan`` tells its arena once it has run."""

    model: nn.Module
    step: Step
    plan: Callable[[], tuple[int, int, tuple[str, ...]]] = lambda: (0, 0, ())

    def memory(self) -> MemoryUse:
        """Counts what a step allocates that finds no gradients."""
        for parameter in self.model.parameters():
            parameter.grad = None
        return memory_use(self.step)


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


def ways(sizes: dict[str, int]) -> dict[str, Way]:
    """Builds every way of running a step, each on a copy of one model."""
    model, args = llama(**sizes)
    torch.compiler.reset()
    whole, blocks, late, planned = (copy.deepcopy(model) for _ in range(4))
    compiled, step = lazyinline.compile(late), lazyinline.compile_step(planned)

    def arena_of_module() -> tuple[int, int, tuple[str, ...]]:
        report = compiled.last_report
        return report.arena_bytes or 0, report.lower_bound_bytes or 0, ()

    def arena_of_step() -> tuple[int, int, tuple[str, ...]]:
        stats = step.stats
        return stats.peak_bytes, stats.lower_bound_bytes, stats.unplaced_launches

    full = torch.compile(whole, fullgraph=True)
    return {
        "eager": Way(model, autograd_step(model, model, args)),
        "torch.compile": Way(whole, autograd_step(whole, full, args)),
        "torch.compile per block": Way(blocks, autograd_step(blocks, per_block(blocks), args)),
        "lazyinline.compile": Way(late, autograd_step(late, compiled, args), arena_of_module),
        "lazyinline.compile_step": Way(planned, lambda: step(*args), arena_of_step),
    }


def measure(problem: str, rounds: int, clock: Callable[[], float]) -> list[Row]:
    """Times all ways on one problem, in turn; then counts the memory of each."""
    found = ways(PROBLEMS[problem])
    times: dict[str, list[float]] = {name: [] for name in found}
    for way in found.values():
        for _ in range(3):
            way.step()
    for _ in range(rounds):
        for name, way in found.items():
            start = clock()
            way.step()
            times[name].append(1e3 * (clock() - start))
    return [
        Row(problem, n, min(ms), statistics.median(ms), found[n].memory(), *found[n].plan())
        for n, ms in times.items()
    ]


def table(rows: Sequence[Row]) -> str:
    """Formats one line per way, and what a compiled step allocates."""
    lines = [
        f"{'problem':<16}{'way':<26}{'min ms':>9}{'median':>9}"
        f"{'peak MiB':>10}{'arena MiB':>11}{'allocs':>8}"
    ]
    for row in rows:
        lines.append(
            f"{row.problem:<16}{row.way:<26}{row.min_ms:>9.3f}{row.median_ms:>9.3f}"
            f"{row.peak_bytes / 2**20:>10.2f}{row.arena_bytes / 2**20:>11.2f}"
            f"{row.use.num_allocations:>8}"
        )
    for row in rows:
        if row.way == "lazyinline.compile_step":
            made = ", ".join(f"{n} x {name}" for name, n in row.use.allocations.items())
            unplaced = ", ".join(row.unplaced_launches) or "none"
            lines.append(f"{row.problem}: compile_step allocates in {made}; not placed: {unplaced}")
    return "\n".join(lines)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--problem", choices=PROBLEMS, nargs="+", default=list(PROBLEMS))
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    lazyinline.lazy_inline(DecoderBlock)
    clock = CLOCKS[options.clock]
    rows = [r for p in options.problem for r in measure(p, options.rounds, clock)]
    print(table(rows))
    if options.json:
        with open(options.json, "w") as file:
            json.dump([asdict(r) | {"peak_bytes": r.peak_bytes} for r in rows], file, indent=1)


if __name__ == "__main__":
    main()
