"""What the deferred inline costs: seconds of link by layers and micro-batches, and per call.

    python benchmarks/link_time.py
    python benchmarks/link_time.py --sizes 8,4 32,16 --repeat 5 --json build/link_time.json

Each size is one training step of the own decoder, compiled with ``compile_step`` in this process,
one thread. Link is the pass that lays the calls out, plans the arena and makes the flat program;
binding it to an arena is done by the first run, and counts here too. See README.md.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from decoders import DecoderBlock, llama

import lazyinline

DEFAULT_SIZES = ((8, 4), (32, 4), (32, 16))
HIDDEN, SEQ, BATCH = 32, 8, 2  # link does not see how large the tensors are


@dataclass(frozen=True)
class Row:
    """Link of one training step.

    Attributes:
        block_calls: calls of the layer in the program: forward and backward, of each micro-batch.
        launches: kernel launches in a step.
        link_s: CPU-seconds of the pass.
        link_wall_s: wall seconds of the same.
        bind_s: CPU-seconds of the first run beyond those of a later one.
    """

    layers: int
    micro_batches: int
    block_calls: int
    launches: int
    link_s: float
    link_wall_s: float
    bind_s: float
    peak_bytes: int
    lower_bound_bytes: int

    @property
    def total_s(self) -> float:
        """CPU-seconds from a lowered program to one that runs."""
        return self.link_s + self.bind_s

    @property
    def us_per_call(self) -> float:
        """Microseconds per call of the layer."""
        return 1e6 * self.total_s / self.block_calls


def measure(layers: int, micro_batches: int) -> Row:
    """Compiles one training step and takes the numbers of its link."""
    sizes = {"hidden": HIDDEN, "seq": SEQ, "vocab": 64, "batch": BATCH * micro_batches}
    model, args = llama(num_layers=layers, **sizes)
    step = lazyinline.compile_step(model, micro_batches=micro_batches)
    gc.collect()
    first_s = timed(lambda: step(*args))
    later_s = min(timed(lambda: step(*args)) for _ in range(3))
    report, stats = step.last_report, step.stats
    link = next(p for p in report.passes if p.name == "link")
    return Row(
        layers,
        micro_batches,
        2 * layers * micro_batches,
        stats.kernels,
        link.cpu_s,
        link.wall_s,
        max(first_s - report.cpu_s - later_s, 0.0),
        stats.peak_bytes,
        stats.lower_bound_bytes,
    )


def timed(run: object) -> float:
    """Returns the CPU-seconds of a call, child processes included."""
    assert callable(run)
    before = cpu_s()
    run()
    return cpu_s() - before


def cpu_s() -> float:
    """CPU-seconds of this process and its children."""
    usages = (resource.getrusage(w) for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def growth_us(rows: Sequence[Row]) -> float:
    """Microseconds that one further call costs, by least squares over the rows."""
    calls = torch.tensor([[row.block_calls, 1.0] for row in rows], dtype=torch.float64)
    seconds = torch.tensor([row.total_s for row in rows], dtype=torch.float64)
    slope = torch.linalg.lstsq(calls, seconds.unsqueeze(1)).solution[0, 0]
    return 1e6 * slope.item()


def table(rows: Sequence[Row]) -> str:
    """Formats one line per size."""
    lines = [
        f"{'layers':>6}{'parts':>7}{'calls':>7}{'launches':>10}{'link s':>8}{'wall s':>8}"
        f"{'bind s':>8}{'all s':>8}{'us/call':>9}{'ratio':>8}"
    ]
    for row in rows:
        ratio = row.peak_bytes / row.lower_bound_bytes
        lines.append(
            f"{row.layers:>6}{row.micro_batches:>7}{row.block_calls:>7}{row.launches:>10}"
            f"{row.link_s:>8.3f}{row.link_wall_s:>8.3f}{row.bind_s:>8.3f}{row.total_s:>8.3f}"
            f"{row.us_per_call:>9.0f}{ratio:>8.4f}"
        )
    if len({row.block_calls for row in rows}) > 1:
        lines.append(f"each further call of the layer: {growth_us(rows):.0f} us")
    return "\n".join(lines)


def fastest(rows: Sequence[Row]) -> list[Row]:
    """Returns the run with the least seconds for each size: noise only ever adds."""
    best: dict[tuple[int, int], Row] = {}
    for row in rows:
        size = (row.layers, row.micro_batches)
        if size not in best or row.total_s < best[size].total_s:
            best[size] = row
    return list(best.values())


def size(text: str) -> tuple[int, int]:
    """Reads ``layers,micro_batches``."""
    layers, micro_batches = map(int, text.split(","))
    if min(layers, micro_batches) < 1:
        raise argparse.ArgumentTypeError(f"{text}: both are at least 1")
    return layers, micro_batches


def main() -> None:
    """Measures and prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", type=size, nargs="+", default=DEFAULT_SIZES, metavar="N,Y")
    parser.add_argument("--repeat", type=int, default=1, help="compiles of each, interleaved")
    parser.add_argument("--json", metavar="FILE", help="write the numbers of all runs")
    options = parser.parse_args()
    os.environ["LAZYINLINE_CACHE"] = "0"  # or a plan of an earlier run is taken from disk
    torch.set_num_threads(1)
    lazyinline.lazy_inline(DecoderBlock)
    measure(1, 2)  # imports, C++ kernels built
    runs = [measure(*size) for _ in range(options.repeat) for size in options.sizes]
    print(table(fastest(runs)))
    if options.json:
        with open(options.json, "w") as file:
            json.dump([asdict(row) for row in runs], file, indent=1)


if __name__ == "__main__":
    main()
