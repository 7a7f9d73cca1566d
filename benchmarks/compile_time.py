"""What it costs to compile a training step, in lazyinline and in PyTorch's own ways, side by side.

Every number comes from a process of its own. See README.md beside this file.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version

from measurement import MODELS, MODES, Measurement, kept_environment
from tqdm import tqdm

HERE = pathlib.Path(__file__).resolve().parent
OBJECT_CACHE = HERE.parent / "build" / "benchmark_objects"
MAX_WARM_UPS = 3

NOTES = """\
cpu s: CPU-seconds, C++ compiler included, of compiling and the first training step. net s: the
same without one step. Lazy imports of Dynamo and Inductor count on every side, lazyinline's own
import counts on its side, import torch counts on none. per-part compiles each block, and the head
with the loss; per-block leaves the head eager: it does less. Errors are relative, against eager
in the same process. ratio: lazyinline's {unit} over this row's."""


@dataclass(frozen=True)
class Plan:
    """What to measure."""

    model: str
    layers: Sequence[int]
    modes: Sequence[str]
    repeat: int
    cold: bool
    timeout_s: float
    micro_batches: int = 1

    def runs(self) -> list[tuple[int, str]]:
        """Returns layers and mode of every counted run; modes take turns."""
        once = list(itertools.product(self.layers, self.modes))
        return once * self.repeat


def run_once(plan: Plan, mode: str, layers: int) -> Measurement:
    """Measures in a fresh process; a run that had to build objects is a warm-up and is repeated."""
    for _ in range(MAX_WARM_UPS):
        with cache_directory(plan.cold) as directory:
            result = run_process(plan, mode, layers, environment(directory, plan.cold))
        if plan.cold or result.failure or not result.objects_built:
            return result
    return result


def run_process(plan: Plan, mode: str, layers: int, env: dict[str, str]) -> Measurement:
    """Runs ``compile_once.py``; a failure becomes a measurement that says why."""
    script = str(HERE / "compile_once.py")
    command = [sys.executable, script, mode, "--model", plan.model, "--layers", str(layers)]
    command += ["--micro-batches", str(plan.micro_batches)]
    try:
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=plan.timeout_s
        )
    except subprocess.TimeoutExpired:
        return Measurement(mode, layers, failure=f"no result after {plan.timeout_s:.0f} s")
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        errors = [line for line in lines if "Error" in line.split(":")[0]]
        return Measurement(mode, layers, failure=(errors or lines)[-1])
    return Measurement.from_json(done.stdout.strip().splitlines()[-1])


@contextlib.contextmanager
def cache_directory(cold: bool) -> Iterator[pathlib.Path]:
    """Yields Inductor's cache directory: empty and temporary, or the one kept under build/."""
    if cold:
        with tempfile.TemporaryDirectory(prefix="compile_time_") as directory:
            yield pathlib.Path(directory)
    else:
        OBJECT_CACHE.mkdir(parents=True, exist_ok=True)
        yield OBJECT_CACHE


def environment(directory: pathlib.Path, cold: bool) -> dict[str, str]:
    """Returns the environment of a measuring process: one thread, and only objects cached."""
    settings = {
        "TORCHINDUCTOR_CACHE_DIR": str(directory),
        "LAZYINLINE_CACHE_DIR": str(directory / "lazyinline"),
        "TORCH_DYNAMO_AUTOMATIC_DYNAMIC_LOCAL_PGO": "0",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "passive",
        "HF_HUB_OFFLINE": "1",
    }
    if not cold:
        settings["LAZYINLINE_CACHE"] = "0"
        settings["TORCHINDUCTOR_FX_GRAPH_CACHE"] = "0"
        settings["TORCHINDUCTOR_AUTOGRAD_CACHE"] = "0"
    return kept_environment() | settings


def measure_all(plan: Plan) -> list[Measurement]:
    """Runs the plan, after one uncounted run per mode unless the cache is to be cold."""
    if not plan.cold:
        for mode in tqdm(plan.modes, desc="warm-up", disable=None, leave=False):
            run_once(plan, mode, plan.layers[0])
    runs = tqdm(plan.runs(), desc="measuring", disable=None, leave=False)
    return [run_once(plan, mode, layers) for layers, mode in runs]


def headline(measurement: Measurement, cold: bool) -> float:
    """Returns the seconds that count: of the CPU, or of the wall when the caches were empty."""
    return measurement.wall_s if cold else measurement.cpu_s


def medians(measurements: Sequence[Measurement], cold: bool) -> list[Measurement]:
    """Returns one measurement per layers and mode, in the order they were first measured."""
    groups: dict[tuple[int, str], list[Measurement]] = {}
    for measurement in measurements:
        groups.setdefault((measurement.layers, measurement.mode), []).append(measurement)
    return [median(group, cold) for group in groups.values()]


def median(group: Sequence[Measurement], cold: bool) -> Measurement:
    """Returns the run with the median seconds, with the worst errors of all runs."""
    failed = [m for m in group if m.failure]
    if failed:
        return failed[0]
    middle = statistics.median_low(headline(m, cold) for m in group)
    return dataclasses.replace(
        next(m for m in group if headline(m, cold) == middle),
        loss_error=max(m.loss_error for m in group),
        grad_error=max(m.grad_error for m in group),
    )


def compile_table(results: Sequence[Measurement], cold: bool) -> str:
    """Formats one row per layers and mode."""
    ours = {
        m.layers: headline(m, cold) for m in results if m.mode == "lazyinline" and not m.failure
    }
    lines = [
        f"{'layers':>6} {'mode':<11}{'cpu s':>8}{'net s':>8}{'wall s':>8}{'child s':>8}"
        f"{'step s':>8}{'loss':>10}{'loss err':>10}{'grad err':>10}{'ratio':>8}"
    ]
    for m in results:
        start = f"{m.layers:>6} {m.mode:<11}"
        if m.failure:
            lines.append(f"{start} failed: {m.failure}")
            continue
        ratio = f"{ours[m.layers] / headline(m, cold):>8.3f}" if m.layers in ours else f"{'-':>8}"
        lines.append(
            f"{start}{m.cpu_s:>8.2f}{m.net_cpu_s:>8.2f}{m.wall_s:>8.2f}{m.child_cpu_s:>8.2f}"
            f"{m.step_cpu_s:>8.2f}{m.loss:>10.5f}{m.loss_error:>10.1e}{m.grad_error:>10.1e}{ratio}"
        )
    return "\n".join(lines)


def pass_table(results: Sequence[Measurement]) -> str:
    """Formats what lazyinline's own report says, one row per layers."""
    ours = [m for m in results if m.passes]
    if not ours:
        return ""
    names = [p.name for p in ours[0].passes]
    lines = [
        "lazyinline, CPU-seconds per pass (all: those before link)",
        f"{'layers':>6} {'import':>10}"
        + "".join(f"{name:>10}" for name in names)
        + f"{'all':>10}{'growth':>8}{'nodes':>8}{'inlined':>9}",
    ]
    for m in ours:
        growth = m.compile_cpu_s / ours[0].compile_cpu_s
        lines.append(
            f"{m.layers:>6} {m.import_cpu_s:>10.3f}"
            + "".join(f"{p.cpu_s:>10.3f}" for p in m.passes)
            + f"{m.compile_cpu_s:>10.3f}{growth:>8.2f}{m.nodes_held:>8}{m.nodes_if_inlined:>9}"
        )
    return "\n".join(lines)


def heading(plan: Plan) -> str:
    """Says what was measured, and where."""
    caches = "all caches empty" if plan.cold else "C++ objects warm, graph caches off"
    runs = f"median of {plan.repeat} runs" if plan.repeat > 1 else "one run"
    batches = f", {plan.micro_batches} micro-batches" if plan.micro_batches > 1 else ""
    return (
        f"{plan.model}{batches}, compile + first training step, {caches}, {runs} each; "
        f"torch {version('torch')}, Python {platform.python_version()}, 1 thread, "
        f"{os.cpu_count()} cores"
    )


def to_json(plan: Plan, runs: Sequence[Measurement]) -> str:
    """Returns the plan, every run and the medians."""
    content = {
        "about": heading(plan),
        "plan": dataclasses.asdict(plan),
        "runs": [m.to_dict() for m in runs],
        "medians": [m.to_dict() for m in medians(runs, plan.cold)],
    }
    return json.dumps(content, indent=2)


def parse_arguments(arguments: Sequence[str] | None = None) -> tuple[Plan, pathlib.Path | None]:
    """Returns the plan and the JSON file of a command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="own")
    parser.add_argument("--layers", type=positive, nargs="+", default=[4, 8, 32, 48], metavar="N")
    parser.add_argument("--modes", choices=MODES, nargs="+", default=MODES, metavar="MODE")
    parser.add_argument("--micro-batches", type=positive, default=1, metavar="Y")
    parser.add_argument("--repeat", type=positive, default=1, help="runs of each, interleaved")
    parser.add_argument("--cold", action="store_true", help="an empty cache for each run")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds for one process")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the numbers")
    options = parser.parse_args(arguments)
    plan = Plan(
        model=options.model,
        layers=options.layers,
        modes=options.modes,
        repeat=options.repeat,
        cold=options.cold,
        timeout_s=options.timeout,
        micro_batches=options.micro_batches,
    )
    return plan, options.json


def positive(text: str) -> int:
    """Reads a number of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return number


def main() -> None:
    """Measures and prints the tables."""
    plan, json_file = parse_arguments()
    runs = measure_all(plan)
    results = medians(runs, plan.cold)
    notes = NOTES.format(unit="wall s" if plan.cold else "cpu s")
    parts = [heading(plan), compile_table(results, plan.cold), pass_table(results), notes]
    print("\n\n".join(part for part in parts if part))
    if json_file is not None:
        json_file.write_text(to_json(plan, runs))


if __name__ == "__main__":
    main()
