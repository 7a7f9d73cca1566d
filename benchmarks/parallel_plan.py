"""The plan of a large decoder over a mesh: how long it takes to find, and what it is.

    python benchmarks/parallel_plan.py                 # Llama-8B on 8 x 8, 8 and 64 layers
    python benchmarks/parallel_plan.py --mesh 8,8 --memory-gib 12 --table
    python benchmarks/parallel_plan.py --layers 32 --batch 64 --seq 4096

Nothing of the model has memory. Seconds are of the CPU, so that a machine under load says the same.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from decoders import Decoder, DecoderConfig

from lazyinline.autodiff.training_program import StepProgram
from lazyinline.frontend.compiler import PASSES, Compiler
from lazyinline.frontend.options import Batching, Options
from lazyinline.frontend.passes.state import Subject, between, run, step_goal
from lazyinline.pipeline_parallel.mesh.layouts import LINKS, Axis
from lazyinline.pipeline_parallel.mesh.planner import FoundPlan, find_plan
from lazyinline.reuse.ir.costs import Rates

LLAMA_8B = {"hidden": 4096, "num_heads": 32, "ffn": 14336, "vocab": 128256}
H100 = Rates(flops_per_s=4e14, bytes_per_s=2.5e12, half_flops_per_s=4e14)
GIB = 2**30


@dataclass(frozen=True)
class Row:
    """One model, planned.

    Attributes:
        layers: of the model.
        capture_s: CPU seconds from the model to the decomposed step.
        plan_s: CPU seconds from there to the plan.
        found: the plan.
    """

    layers: int
    capture_s: float
    plan_s: float
    found: FoundPlan

    def __str__(self) -> str:
        found, taken = self.found, self.found.taken
        kinds = Counter(s.kind for name, s, _ in taken.collectives() if "Block.forward" in name)
        return (
            f"{self.layers:3d} layers: planned in {self.plan_s:.2f} s, captured in "
            f"{self.capture_s:.2f} s; step {found.seconds * 1e3:.1f} ms, "
            f"{taken.solution.bound_s / found.seconds:.2%} of it certain; "
            f"{found.plan.held_bytes / GIB:.2f} GiB held; forward of a block: "
            + ", ".join(f"{number} {kind}" for kind, number in sorted(kinds.items()))
        )


def captured(layers: int, *, batch: int, seq: int) -> StepProgram:
    """Returns the decomposed step of a decoder in bfloat16 that has no memory."""
    config = DecoderConfig(layers, batch=batch, seq=seq, **LLAMA_8B)
    with torch.device("meta"):
        model = Decoder(config).to(torch.bfloat16)
        ids = torch.zeros(batch, seq, dtype=torch.long)
    compiler = Compiler(Options(cache="off"))
    state = compiler.started(Subject(model, (ids, ids), {}), step_goal(Batching()))
    state = run(between(PASSES, "capture", "decompose"), state)
    return replace(state.step, program=state.programs["step"])


def planned(layers: int, axes: Sequence[Axis], *, batch: int, seq: int, memory: int | None) -> Row:
    """Captures and plans a model."""
    start = time.process_time()
    step = captured(layers, batch=batch, seq=seq)
    middle = time.process_time()
    found = find_plan(step, axes, H100, memory_bytes_per_rank=memory)
    return Row(layers, middle - start, time.process_time() - middle, found)


def main(arguments: Sequence[str] | None = None) -> list[Row]:
    """Runs the benchmark; returns its rows."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mesh", default="8,8", help="ranks between hosts, and within one")
    parser.add_argument("--layers", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq", type=int, default=8192)
    parser.add_argument("--memory-gib", type=float, help="that a rank may hold")
    parser.add_argument("--table", action="store_true", help="print the plan")
    options = parser.parse_args(arguments)
    outer, inner = map(int, options.mesh.split(","))
    links = (LINKS["h100-network"], LINKS["h100-nvlink"])
    axes = [Axis("data", outer, links[0]), Axis("tensor", inner, links[1])]
    memory = None if options.memory_gib is None else int(options.memory_gib * GIB)
    rows = []
    for layers in options.layers:
        rows.append(planned(layers, axes, batch=options.batch, seq=options.seq, memory=memory))
        print(rows[-1])
    if options.table:
        print(rows[-1].found.plan, rows[-1].found.plan.table, sep="\n\n")
    return rows


if __name__ == "__main__":
    main()
