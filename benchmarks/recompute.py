"""Recompute policies side by side: peak, saved bytes, extra FLOPs, time of a training step.

    python benchmarks/recompute.py                                    # own decoder, N=4, hidden 128
    python benchmarks/recompute.py --layers 24 --hidden 512 --seq 512 --batch 4      # slow
    python benchmarks/recompute.py --model hf-llama
    python benchmarks/recompute.py --model gpt --dropout 0.1          # gradients under dropout
    python benchmarks/recompute.py --sweep 8                          # budgets, measured peaks

Each way runs in a process of its own (``recompute_way.py``), one thread each, at most two of them
at a time: the two step in turns, so that their times can be compared. Peaks are measured by the
profiler. Gradients are compared with eager's under the same seed.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from recompute_way import LAYERS, Examined, Sizes, WaySpec

HERE = pathlib.Path(__file__).resolve().parent
MIB = 2**20
TORCH_WAYS = (
    WaySpec("checkpoint"),
    WaySpec("compile"),
    WaySpec("compile-checkpoint"),
    WaySpec("compile", fraction=0.5),
    WaySpec("compile", fraction=0.25),
)
OUR_WAYS = (
    WaySpec("lazyinline"),
    WaySpec("lazyinline", policy="selective"),
    WaySpec("lazyinline", policy="full"),
    *(WaySpec("lazyinline", fraction=f) for f in (0.75, 0.5, 0.25, 0.0)),
)


class RefusedError(Exception):
    """A way said that it cannot run."""


class Process:
    """A way in a process of its own, until the ``with`` block ends."""

    def __init__(self, sizes: Sizes, spec: WaySpec, gradients_file: str) -> None:
        self.spec = spec
        self._file = gradients_file
        command = [sys.executable, str(HERE / "recompute_way.py")]
        command += [json.dumps(asdict(sizes)), json.dumps(asdict(spec))]
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by __exit__
        self._child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"},
        )

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *error: object) -> None:
        self._child.communicate()
        self._said.close()

    def examine(self) -> Examined:
        """Compiles and measures; what a way of lazyinline cannot do raises
        :class:`RefusedError`."""
        return Examined(**self._ask(f"examine {self._file}"))

    def step_ms(self) -> tuple[float, float]:
        """Runs a step; returns milliseconds of the CPU and of the wall."""
        answer = self._ask("step")
        return answer["cpu_ms"], answer["wall_ms"]

    def _ask(self, command: str) -> dict[str, Any]:
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._child.stdin.write(command + "\n")
        self._child.stdin.flush()
        line = self._child.stdout.readline()
        if not line:
            self._child.wait()
            self._said.seek(0)
            raise RuntimeError(f"{self.spec.name} ended: {self._said.read()[-2000:]}")
        answer = json.loads(line)
        if "failure" in answer:
            raise RefusedError(answer["failure"])
        return answer


@dataclass(frozen=True)
class Row:
    """A way, measured.

    Attributes:
        extra_flops: what a step launches beyond eager's.
        times: milliseconds of each round, of the CPU and of the wall.
        others: the same of the way that stepped in turn with it.
    """

    spec: WaySpec
    found: Examined
    extra_flops: int
    times: tuple[tuple[float, float], ...] = ()
    others: tuple[tuple[float, float], ...] = ()

    def ratio(self, clock: int) -> float:
        """Median over the rounds of its time by that of the other; by CPU (0) or wall (1)."""
        pairs = zip(self.times, self.others, strict=True)
        return statistics.median(mine[clock] / other[clock] for mine, other in pairs)

    def best_ms(self) -> float:
        return min(cpu for cpu, _ in self.times)

    def median_ms(self) -> float:
        return statistics.median(cpu for cpu, _ in self.times)


def in_turns(
    one: Process, other: Process, rounds: int
) -> list[tuple[tuple[float, float], tuple[float, float]]]:
    """Steps both in turn."""
    return [(one.step_ms(), other.step_ms()) for _ in range(rounds)]


HEAD = (
    f"{'':<37}{'peak MiB':>9}{'reported':>9}{'saved':>8}{'extra GFLOP':>12}{'step ms':>9}"
    f"{'median':>9}{'ratio':>7}{'wall':>6}{'grad error':>11}"
)


def line(row: Row) -> str:
    """Formats a row; ``ratio`` and ``wall`` are its time by that of what it took turns with."""
    found = row.found
    reported = f"{found.reported_bytes / MIB:.1f}" if found.reported_bytes else "-"
    text = (
        f"{row.spec.name:<37}{found.peak_bytes / MIB:>9.1f}{reported:>9}"
        f"{found.saved_bytes / MIB:>8.1f}{row.extra_flops / 1e9:>12.2f}"
    )
    if row.times:
        text += (
            f"{row.best_ms():>9.1f}{row.median_ms():>9.1f}{row.ratio(0):>7.3f}{row.ratio(1):>6.2f}"
        )
    else:
        text += " " * 31
    return f"{text}{found.error:>11.1e}"


class Comparison:
    """All ways on one model."""

    def __init__(self, sizes: Sizes, rounds: int, gradients_file: str) -> None:
        self._sizes = sizes
        self._rounds = rounds
        self._file = gradients_file
        self._plain_flops = 0
        self.most_process_bytes = 0

    def start(self, spec: WaySpec) -> Process:
        return Process(self._sizes, spec, self._file)

    def examine(self, process: Process) -> Row:
        """Measures a way; the first one is eager, whose FLOPs are not extra."""
        found = process.examine()
        self._plain_flops = self._plain_flops or found.flops
        self.most_process_bytes = max(self.most_process_bytes, found.process_bytes)
        return Row(process.spec, found, found.flops - self._plain_flops)

    def eager(self) -> Row:
        with self.start(WaySpec("eager")) as process:
            return self.examine(process)

    def policies(self) -> list[Row]:
        """Each policy of ours, by turns with the one without recompute."""
        rows = []
        plain, *others = OUR_WAYS
        with self.start(plain) as reference:
            rows.append(self.examine(reference))
            print(line(rows[0]), flush=True)
            for spec in (*others, WaySpec("eager")):
                with self.start(spec) as process:
                    rows.append(self._timed(self.examine(process), process, reference))
                print(line(rows[-1]), flush=True)
        return rows

    def matched(self, spec: WaySpec) -> tuple[Row, Row | str]:
        """One of PyTorch's ways, by turns with ours in the peak that it needs."""
        with self.start(spec) as process:
            theirs = self.examine(process)
            budget = WaySpec("lazyinline", saved_bytes=theirs.found.peak_bytes)
            try:
                with self.start(budget) as own:
                    ours = self._timed(self.examine(own), own, process)
            except RefusedError as refused:
                return theirs, str(refused)
        return replace(theirs, times=ours.others, others=ours.others), ours

    def _timed(self, row: Row, process: Process, other: Process) -> Row:
        mine, others = zip(*in_turns(process, other, self._rounds), strict=True)
        return replace(row, times=mine, others=others)


def policies(sizes: Sizes, options: argparse.Namespace) -> None:
    """Each policy; then, for each of PyTorch's ways, ours within the peak that it needs."""
    with tempfile.TemporaryDirectory() as directory:
        comparison = Comparison(sizes, options.rounds, f"{directory}/gradients.pt")
        print(HEAD)
        eager = comparison.eager()
        rows = [] if options.only == "torch" else comparison.policies()
        print("ratio: by lazyinline, None\n" if rows else line(eager), flush=True)
        wanted = [TORCH_WAYS[i - 1] for i in options.ways]
        for spec in () if options.only == "policies" else wanted:
            theirs, ours = comparison.matched(spec)
            print(line(theirs))
            if isinstance(ours, str):
                print(f"  {ours}", flush=True)
                continue
            rows.append(ours)
            print(line(ours))
            print(verdict(theirs, ours, [r for r in rows if r.spec.kind == "lazyinline"]))
        print(f"most memory of one process: {comparison.most_process_bytes / MIB:.0f} MiB")
        assert eager.extra_flops == 0


def verdict(theirs: Row, ours: Row, all_of_ours: Sequence[Row]) -> str:
    """At equal peak: time against time. At equal extra FLOPs: the least memory of what we ran."""
    no_more_work = [r for r in all_of_ours if r.extra_flops <= theirs.extra_flops]
    least = min((r.found.peak_bytes for r in no_more_work), default=0) / theirs.found.peak_bytes
    return (
        f"  in its peak: {ours.ratio(0):.3f} of its CPU time, {ours.ratio(1):.3f} of its wall "
        f"time; with no more FLOPs: {least:.2f} of its memory"
    )


def sweep(sizes: Sizes, options: argparse.Namespace) -> None:
    """Budgets between the smallest and the plain peak; each reported peak is measured."""
    with tempfile.TemporaryDirectory() as directory:
        comparison = Comparison(sizes, 0, f"{directory}/gradients.pt")
        comparison.eager()
        low = _row(comparison, WaySpec("lazyinline", fraction=0.0)).found.reported_bytes
        high = _row(comparison, WaySpec("lazyinline")).found.reported_bytes
        print(
            f"{'budget MiB':>10}{'reported':>10}{'measured':>10}{'saved':>9}{'extra GFLOP':>13}"
            f"{'grad error':>12}  holds"
        )
        work, holding = [], []
        for index in range(options.sweep):
            limit = low + (high - low) * index // max(options.sweep - 1, 1)
            row = _row(comparison, WaySpec("lazyinline", saved_bytes=limit))
            found = row.found
            work.append(row.extra_flops)
            holding.append(found.peak_bytes <= found.reported_bytes <= limit)
            print(
                f"{limit / MIB:>10.2f}{found.reported_bytes / MIB:>10.2f}"
                f"{found.peak_bytes / MIB:>10.2f}{found.saved_bytes / MIB:>9.2f}"
                f"{row.extra_flops / 1e9:>13.3f}{found.error:>12.1e}  {holding[-1]}",
                flush=True,
            )
    monotone = work == sorted(work, reverse=True)
    print(f"extra FLOPs fall monotonically: {monotone}; every peak holds: {all(holding)}")
    if not (monotone and all(holding)):
        raise SystemExit(1)


def _row(comparison: Comparison, spec: WaySpec) -> Row:
    with comparison.start(spec) as process:
        return comparison.examine(process)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("--model", choices=tuple(LAYERS), default="llama")
    for name, default in (("layers", 4), ("hidden", 128), ("seq", 128), ("batch", 4)):
        add(f"--{name}", type=int, default=default)
    add("--dropout", type=float, default=0.0)
    add("--rounds", type=int, default=5)
    add("--only", choices=("policies", "torch"), help="one of the two tables")
    numbers = range(1, len(TORCH_WAYS) + 1)
    listed = "; ".join(f"{i} {way.name}" for i, way in zip(numbers, TORCH_WAYS, strict=True))
    add("--ways", type=int, nargs="+", choices=numbers, default=numbers, help=listed)
    add("--sweep", type=int, metavar="K", help="K budgets instead of the policies")
    options = parser.parse_args()
    sizes = Sizes(**{f.name: getattr(options, f.name) for f in fields(Sizes)})
    (sweep if options.sweep else policies)(sizes, options)


if __name__ == "__main__":
    main()
