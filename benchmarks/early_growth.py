"""What inlining first costs as layers and micro-batches grow, and where that leads.

    python benchmarks/early_growth.py [--layers 8 16 32] [--micro-batches 1 2 4] [--limit-s 900]

The whole training step, micro-batches unrolled, is captured with ``reuse="off"``, differentiated,
lowered and linked as one graph, from no cache. Hidden size, heads and sequence are those of
llama-13b, parameters are on the meta device and nothing is executed. Each cell is a process of its
own. CPU seconds, children included. The growth is fitted over the number of inlined blocks, as a
line and as a parabola, by least squares; what is said about the size that was not compiled is an
extrapolation. Cells that do not fit into ``--limit-s`` are named and left out of the fit.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lazyinline.frontend import models
from lazyinline.frontend.compiler import Batching, Compiler, Options
from lazyinline.frontend.large_models import LARGE_MODELS

PASSES = ("capture", "autodiff", "decompose", "lower", "link", "total")


@dataclass(frozen=True)
class Cell:
    """What one size took.

    Attributes:
        layers, micro_batches: the size.
        nodes: of the inlined step.
        cpu_s: CPU seconds by pass.
    """

    layers: int
    micro_batches: int
    nodes: int
    cpu_s: dict[str, float]

    @property
    def blocks(self) -> int:
        """How many copies of the block the graph holds."""
        return self.layers * self.micro_batches


@dataclass(frozen=True)
class Fit:
    """A curve through measured cells.

    Attributes:
        name: its form.
        text: with its coefficients.
        residual: root of the mean square of (fitted - measured) / measured.
        at: seconds at the size asked for.
    """

    name: str
    text: str
    residual: float
    at: float


class Unrolled(nn.Module):
    """A step of several micro-batches as one graph: the mean of their losses."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        pairs = zip(ids, targets, strict=True)
        return torch.stack([self.model(*pair) for pair in pairs]).mean()


def measure(layers: int, micro_batches: int, backend: str) -> Cell:
    """Compiles one size with inlining first."""
    sizes: dict[str, Any] = dict(LARGE_MODELS["llama-13b"].sizes)
    with torch.device("meta"):
        model, args = models.llama(layers, **sizes)
    batch = tuple(x.new_empty(micro_batches, *x.shape) for x in args)
    compiler = Compiler(Options(reuse="off", backend=backend))
    _, report = compiler.compile_step(Unrolled(model), batch, {}, Batching(1))
    seconds = {record.name: record.cpu_s for record in report.passes}
    seconds["total"] = sum(seconds.values())
    nodes = {record.name: record.num_nodes for record in report.passes}
    return Cell(layers, micro_batches, nodes["decompose"], seconds)


def fits(cells: list[Cell], blocks: int) -> list[Fit]:
    """Fits seconds over blocks by least squares of the relative error: a line, and a parabola."""
    n = np.array([c.blocks for c in cells], float)
    s = np.array([c.cpu_s["total"] for c in cells])
    found = []
    for name, degree in (("line", 1), ("parabola", 2)):
        if len(set(n)) < degree + 2:  # it would go through every point
            continue
        curve = np.polynomial.Polynomial.fit(n, s, degree, w=1 / s).convert()
        residual = float(np.sqrt(np.mean((curve(n) / s - 1) ** 2)))
        terms = (f"{c:.4g} n^{power}" for power, c in enumerate(curve.coef))
        found.append(Fit(name, " + ".join(terms), residual, float(curve(blocks))))
    return found


def in_a_process(layers: int, micro_batches: int, backend: str, left_s: float) -> Cell | None:
    """Measures one size in a new process; None if it takes longer than is left."""
    command = [sys.executable, __file__, "--cell", str(layers), str(micro_batches)]
    command += ["--backend", backend]
    try:
        with tempfile.TemporaryDirectory() as empty:
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": empty}
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=max(left_s, 1.0)
            )
    except subprocess.TimeoutExpired:
        return None
    if done.returncode:
        sys.exit(done.stderr[-4000:])
    return Cell(**json.loads(done.stdout.splitlines()[-1]))


def table(options: argparse.Namespace) -> list[Cell]:
    """Measures all sizes, the small ones first, and prints them."""
    sizes = [(n, y) for n in options.layers for y in options.micro_batches]
    sizes.sort(key=lambda size: (size[0] * size[1], size))
    started = time.monotonic()
    cells = []
    head = "".join(f"{name:>10}" for name in PASSES)
    print(f"{'layers':>6}{'micro-batches':>15}{'nodes':>9}{head}   CPU s", flush=True)
    for layers, micro_batches in sizes:
        left_s = options.limit_s - (time.monotonic() - started)
        cell = in_a_process(layers, micro_batches, options.backend, left_s)
        if cell is None:
            print(
                f"{layers:>6}{micro_batches:>15}   not within {options.limit_s:.0f} s", flush=True
            )
            continue
        cells.append(cell)
        row = "".join(f"{cell.cpu_s.get(name, 0.0):>10.1f}" for name in PASSES)
        print(f"{layers:>6}{micro_batches:>15}{cell.nodes:>9}{row}", flush=True)
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    large = LARGE_MODELS["llama-13b"]
    parser.add_argument("--layers", type=int, nargs="+", default=[8, 16, 32])
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--limit-s", type=float, default=900.0)
    parser.add_argument("--cell", type=int, nargs=2)
    options = parser.parse_args()
    if options.cell:
        torch.set_num_threads(1)
        print(json.dumps(vars(measure(*options.cell, options.backend))))
        return
    cells = table(options)
    if len({c.blocks for c in cells}) < 3:
        sys.exit("Too few sizes were measured for a fit.")
    target = large.layers * large.micro_batches
    nodes, start = np.polyfit([c.blocks for c in cells], [c.nodes for c in cells], 1)
    print(
        f"extrapolated to {large.layers} x {large.micro_batches} = {target} blocks, not measured:"
    )
    print(f"  {start + nodes * target:.0f} nodes ({nodes:.0f} per block)")
    for fit in fits(cells, target):
        print(
            f"  {fit.at:.0f} CPU s by {fit.name} {fit.text} (n blocks), extrapolated; "
            f"residual {fit.residual:.1%} over {len(cells)} sizes"
        )


if __name__ == "__main__":
    main()
