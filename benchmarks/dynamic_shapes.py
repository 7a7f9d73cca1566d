"""What further sequence lengths cost: one training run over 16 of them.

Each mode runs in a process of its own that starts with empty caches: the first and the second step
at each length are timed (forward, backward, an SGD step), and their losses compared with eager's.
What compiling and linking take is the first steps less the second ones.

    python benchmarks/dynamic_shapes.py                       # own decoder, 8 layers, hidden 256
    python benchmarks/dynamic_shapes.py --layers 2 --hidden 64 --modes learned torch

`learned` is `dynamic=None` (the second length makes symbols of sizes), `all` is `dynamic=True`,
`torch` is `torch.compile(dynamic=True)`. One compile is `dynamic=False` at the first length;
"x one" is against that, with all steps or ("net") without any; "x symbolic" is net, against the one
compile of `all`.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

import torch
from torch import nn

from lazyinline.backend.files.torch_store import DIRECTORY_VARIABLE

GOAL = 1.5
LENGTHS = (64, 48, 80, 56, 72, 40, 96, 33, 61, 128, 24, 100, 17, 88, 112, 120)
MODES = ("one", "learned", "all", "torch")


def cpu_s() -> float:
    """Returns CPU-seconds of this process and its children."""
    return sum(os.times()[:4])


def model_and_ids(options: argparse.Namespace) -> tuple[nn.Module, Any]:
    """Returns the decoder and a function that makes ids of a length."""
    import decoders as models

    torch.manual_seed(0)
    model, _ = models.llama(options.layers, hidden=options.hidden, num_heads=4, vocab=1000, seq=128)
    return model, lambda length: torch.randint(1000, (2, length))


def compiled_as(mode: str, model: nn.Module) -> Any:
    """Returns the model compiled in a mode."""
    from decoders import DecoderBlock

    import lazyinline

    if mode == "torch":
        return torch.compile(model, dynamic=True)
    lazyinline.lazy_inline(DecoderBlock)
    return lazyinline.compile(model, dynamic={"one": False, "learned": None, "all": True}[mode])


def run(mode: str, options: argparse.Namespace) -> dict[str, Any]:
    """Trains over the lengths, two steps at each; returns their seconds and the largest error."""
    torch.set_num_threads(1)
    model, ids_of = model_and_ids(options)
    twin = copy.deepcopy(model)
    start = time.perf_counter(), cpu_s()
    compiled = compiled_as(mode, model)
    optimizers = [torch.optim.SGD(m.parameters(), 0.01) for m in (model, twin)]
    rows: list[tuple[float, float]] = []
    error = 0.0
    for length in LENGTHS[:1] if mode == "one" else LENGTHS:
        ids = ids_of(length)
        for _ in range(2):
            loss = train(compiled, ids, optimizers[0])
            rows.append((time.perf_counter() - start[0], cpu_s() - start[1]))
            wanted = train(twin, ids, optimizers[1])
            error = max(error, float((loss - wanted).abs() / wanted.abs()))
            start = time.perf_counter(), cpu_s()
    report = getattr(compiled, "last_report", None)
    counts = (report.num_compiles, report.num_links) if mode != "torch" and report else None
    return {"firsts": rows[::2], "seconds": rows[1::2], "error": error, "counts": counts}


def train(module: nn.Module, ids: Any, optimizer: Any) -> Any:
    """Does one step; returns its loss."""
    optimizer.zero_grad()
    loss = module(ids).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def in_a_process(mode: str) -> dict[str, Any]:
    """Runs a mode in a fresh process with an empty cache."""
    with tempfile.TemporaryDirectory() as folder:
        caches = {
            name: f"{folder}/{name}" for name in ("TORCHINDUCTOR_CACHE_DIR", DIRECTORY_VARIABLE)
        }
        environment = {**os.environ, **caches, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, *sys.argv[1:], "--one", mode]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Prints a row per mode."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--modes", nargs="+", default=["learned", "all", "torch"], choices=MODES)
    parser.add_argument("--one", choices=MODES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(run(options.one, options)))
        return
    found = {mode: in_a_process(mode) for mode in ("one", *options.modes)}
    one = {"with steps": cpu_of(found["one"]), "net": cpu_of(found["one"], net=True)}
    print(
        f"one compile: {found['one']['firsts'][0][0]:.1f} s wall, {one['with steps']:.1f} CPU-s; "
        f"goal: {len(LENGTHS)} lengths in less than {GOAL} times that"
    )
    print(
        f"{'mode':<9}{'compiles':>9}{'links':>6}{'first':>8}{'second':>8}{'a further one':>15}"
        f"{'total':>8}{'CPU-s':>8}{'steps':>7}{'x one':>7}{'net':>6}{'x symbolic':>12}{'error':>10}"
    )
    for mode in options.modes:
        print(line(mode, found, one))


def cpu_of(found: dict[str, Any], *, net: bool = False, num_lengths: int | None = None) -> float:
    """Returns CPU-seconds of the first steps, less those of the second ones if ``net``."""
    firsts, seconds = (sum(c for _, c in found[k][:num_lengths]) for k in ("firsts", "seconds"))
    return firsts - seconds * net


def line(mode: str, found: dict[str, Any], one: dict[str, float]) -> str:
    """Formats a mode."""
    mine = found[mode]
    wall, _ = zip(*mine["firsts"], strict=True)
    compiles, links = mine["counts"] or ("", "")
    further = sorted(wall[2:])[len(wall[2:]) // 2]
    total, net = cpu_of(mine), cpu_of(mine, net=True)
    symbolic = net / cpu_of(found["all"], net=True, num_lengths=1) if "all" in found else 0.0
    return (
        f"{mode:<9}{compiles:>9}{links:>6}{wall[0]:>7.1f}s{wall[1]:>7.1f}s"
        f"{further * 1e3:>12.0f} ms{sum(wall):>7.1f}s{total:>8.1f}{total - net:>7.1f}"
        f"{total / one['with steps']:>7.2f}{net / one['net']:>6.2f}{symbolic:>12.2f}"
        f"{mine['error']:>10.1e}"
    )


if __name__ == "__main__":
    main()
