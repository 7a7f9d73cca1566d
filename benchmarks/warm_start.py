"""How long a new process takes from ``compile`` to its first training step done, caches warm.

lazyinline and ``torch.compile`` of the whole model take turns, each in fresh processes over a cache
directory of its own that one uncounted run has filled. See README.md beside this file.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import Any

from measurement import Stopwatch, kept_environment
from tqdm import tqdm

MODES = ("lazyinline", "torch.compile")


@dataclass(frozen=True)
class Start:
    """One start of one process.

    Attributes:
        wall_s: from ``compile`` to the end of the first step.
        cpu_s: the same in CPU-seconds, children included; a shared machine disturbs it less.
        import_s: wall seconds of ``import lazyinline`` before it.
        step_s: wall seconds of a later step, which the first one contains once.
        grad_error: largest relative error of a gradient of that first step against eager.
        from_cache: what lazyinline took from its cache, and made.
    """

    mode: str
    wall_s: float
    cpu_s: float
    import_s: float
    step_s: float
    grad_error: float
    from_cache: str = ""


def once(mode: str, layers: int, optimizer: str) -> Start:
    """Starts in this process: forward, backward and optimizer step."""
    import torch
    from compile_once import relative_error, train
    from subjects import family

    torch.set_num_threads(1)
    models = family("own")
    subject = models.build(layers, 1)
    parameters = dict(subject.model.named_parameters())
    _, expected = train(lambda: subject.loss(subject.model), parameters)
    steps: Any = None
    if optimizer == "first":  # as training loops do; PyTorch imports Dynamo for it
        steps = torch.optim.SGD(parameters.values(), lr=0.1)
    imported = time.perf_counter()
    compiler: Any = torch
    if mode == "lazyinline":
        compiler = importlib.import_module("lazyinline")
        compiler.lazy_inline(models.block_class())
    imported = time.perf_counter() - imported
    first, later = Stopwatch(), Stopwatch()
    with first.running():
        compiled = compiler.compile(subject.model)
        subject.loss(compiled).backward()  # type: ignore[no-untyped-call]
        if steps is not None:
            steps.step()
    error = max(relative_error(p.grad, expected[name]) for name, p in parameters.items())
    with later.running():
        subject.loss(compiled).backward()  # type: ignore[no-untyped-call]
    cache = str(compiled.last_report.cache) if mode == "lazyinline" else ""
    return Start(mode, first.wall_s, first.cpu_s, imported, later.wall_s, error, cache)


def start(mode: str, directory: str, options: argparse.Namespace) -> Start:
    """Measures in a process of its own."""
    command = [sys.executable, __file__, "--once", mode, "--layers", str(options.layers)]
    command += ["--optimizer", options.optimizer]
    settings = {
        "TORCHINDUCTOR_CACHE_DIR": f"{directory}/{mode}",
        "LAZYINLINE_CACHE_DIR": f"{directory}/own",
        "LAZYINLINE_CACHE": "1",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }
    done = subprocess.run(
        command, env=kept_environment() | settings, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    return Start(**json.loads(done.stdout.strip().splitlines()[-1]))


def table(starts: list[Start]) -> str:
    """Formats the median and the best of each mode, and lazyinline over torch.compile."""
    lines = [
        f"{'':<14}{'wall s':>8}{'best':>8}{'cpu s':>8}{'best':>8}{'import':>8}{'step s':>8}"
        f"{'grad err':>10}"
    ]
    medians = {}
    for mode in MODES:
        runs = [s for s in starts if s.mode == mode]
        wall, cpu = [s.wall_s for s in runs], [s.cpu_s for s in runs]
        medians[mode] = statistics.median(wall), statistics.median(cpu)
        lines.append(
            f"{mode:<14}{medians[mode][0]:>8.2f}{min(wall):>8.2f}{medians[mode][1]:>8.2f}"
            f"{min(cpu):>8.2f}{statistics.median(s.import_s for s in runs):>8.2f}"
            f"{statistics.median(s.step_s for s in runs):>8.2f}"
            f"{max(s.grad_error for s in runs):>10.1e}"
        )
    wall, cpu = (medians[MODES[0]][i] / medians[MODES[1]][i] for i in range(2))
    lines.append(
        f"lazyinline over torch.compile: {wall:.3f} of the wall, {cpu:.3f} of the CPU time"
    )
    lines += sorted({s.from_cache.partition(" from ")[0] for s in starts if s.from_cache})
    return "\n".join(lines)


def main() -> None:
    """Measures what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--once", choices=MODES, help="measure in this process")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--optimizer", choices=("first", "none"), default="first")
    options = parser.parse_args()
    if options.once:
        measured = once(options.once, options.layers, options.optimizer)
        print(json.dumps(dataclasses.asdict(measured)))
        return
    starts = []
    with tempfile.TemporaryDirectory(prefix="warm_start_") as directory:
        for mode in MODES:
            start(mode, directory, options)
        for _ in tqdm(range(options.repeat), desc="measuring", disable=None, leave=False):
            starts += [start(mode, directory, options) for mode in MODES]
    print(f"own decoder, {options.layers} layers, training, caches warm, {options.repeat} starts")
    print(table(starts))


if __name__ == "__main__":
    main()
