"""What a training step of 13 billion parameters needs, found on a laptop, without the weights.

    python examples/plan_13b.py

On the meta device tensors have sizes and no data. A model of your own is captured like any other;
`benchmarks/large_models.py` compiles Llama-13B's step to the last address. What it prints:

    layers  parameters  nodes held  if inlined  seconds
        10       3.5 B          38         188      3.3
        40      12.9 B          68         728      0.6
    Llama-13B, a step of 16 micro-batches of 1 x 2048 tokens in float32:
      everything saved: arena 475.6 GiB, 1.000 of the lower bound, 21,669 launches, 30.1 s
      each block again: arena 125.4 GiB, 1.016 of the lower bound, 26,789 launches, 20.3 s
"""

from __future__ import annotations

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
import time

import torch
from decoder import Decoder

import lazyinline

GIB = 2**30


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--capture-only", action="store_true", help="leave out the arena")
    parser.add_argument("--layers", type=int, default=40, help="of the step that is planned")
    parser.add_argument("--micro-batches", type=int, default=16, help="of that step")
    parser.add_argument("--backend", default="inductor", help="inductor or eager")
    options = parser.parse_args()

    print(f"{'layers':>6}{'parameters':>12}{'nodes held':>12}{'if inlined':>12}{'seconds':>9}")
    for layers in (10, 40):
        start = time.perf_counter()
        with torch.device("meta"):
            model = Decoder(layers, hidden=5120, heads=40, vocab=32000, most=2048)
            ids = torch.zeros(1, 2048, dtype=torch.long)
        program = lazyinline.capture(model, (ids, ids), train=True)
        seconds = time.perf_counter() - start
        count = sum(parameter.numel() for parameter in model.parameters()) / 1e9
        held, inlined = program.num_nodes(), program.num_nodes_if_inlined()
        print(f"{layers:>6}{count:>10.1f} B{held:>12}{inlined:>12}{seconds:>9.1f}")
    if options.capture_only:
        return

    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "rows.json")
        script = pathlib.Path(__file__).parents[1] / "benchmarks" / "large_models.py"
        command = [str(script), "llama-13b", "--json", str(path)]
        for name in ("layers", "micro_batches", "backend"):
            command += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
        subprocess.run([sys.executable, *command], check=True, stdout=subprocess.DEVNULL)
        rows = json.loads(path.read_text())["rows"]
    count = options.micro_batches
    print(f"Llama-13B, a step of {count} micro-batches of 1 x 2048 tokens in float32:")
    for row, what in zip(rows, ("everything saved", "each block again"), strict=True):
        seconds = sum(one["wall_s"] for one in row["compiled"]["passes"])
        arena = f"arena {row['peak_bytes'] / GIB:.1f} GiB"
        bound = f"{row['peak_bytes'] / row['lower_bound_bytes']:.3f} of the lower bound"
        print(f"  {what}: {arena}, {bound}, {row['num_launches']:,} launches, {seconds:.1f} s")


if __name__ == "__main__":
    main()
