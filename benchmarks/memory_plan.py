"""How tight and how fast the memory planner is: on given problems, and on training steps.

Each plan is checked for overlaps, outside the measured time.
"""

from __future__ import annotations

import argparse
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from arena_proof import check_no_overlap
from problem_csv import read_problem_csv, write_offsets_csv
from training_buffers import RECOMPUTED, SAVED, training_step

from lazyinline.backend.arena import ArenaPlan, Buffers, plan
from lazyinline.backend.launches.torch_native import exact_search, first_fit, native_library

BLOCKS = {"recomputed": RECOMPUTED, "saved": SAVED}


@dataclass(frozen=True)
class Row:
    """One line of the table; sizes in bytes."""

    problem: str
    buffers: int
    lower_bound: int
    peak: int
    seconds: float
    method: str


def main(argv: Sequence[str] | None = None) -> None:
    options = _options(argv)
    native_library()  # built before anything is timed
    print(f"{'problem':<36}{'buffers':>9}{'bound MiB':>12}{'peak MiB':>12}{'ratio':>9}{'CPU s':>8}")
    for row in _rows(options):
        print(
            f"{row.problem:<36}{row.buffers:>9}{row.lower_bound / 2**20:>12.1f}"
            f"{row.peak / 2**20:>12.1f}{row.peak / max(row.lower_bound, 1):>9.5f}"
            f"{row.seconds:>8.2f}  {row.method}",
            flush=True,
        )


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("files", type=pathlib.Path, nargs="*", metavar="FILE.csv", help="id,lower,upper,size")
    add("--offsets", type=pathlib.Path, metavar="OUT.csv", help="write the plan of the one file")
    add("--effort", type=float, default=1.0, help="of each plan, in nominal seconds (default 1)")
    add("--alignment", type=int, default=64, help="bytes (default 64)")
    add("--layers", type=int, default=96)
    add("--micro-batches", type=int, default=64)
    add("--in-flight", type=int, default=16, help="forwards before the first backward")
    options = parser.parse_args(argv)
    if options.offsets is not None and len(options.files) != 1:
        parser.error("--offsets goes with one file")
    return options


def _rows(options: argparse.Namespace) -> Iterator[Row]:
    for path in options.files:
        problem = read_problem_csv(path)
        row, found = _measure(path.stem, problem.buffers, options)
        if options.offsets is not None:
            write_offsets_csv(options.offsets, problem, found.offsets)
        yield row
    if options.offsets is not None:
        return
    layers, micro_batches = options.layers, options.micro_batches
    for name, block in BLOCKS.items():
        step = training_step(
            block, layers=layers, micro_batches=micro_batches, in_flight=options.in_flight
        )
        yield _measure(f"{name} {layers} x {micro_batches}", step, options)[0]


def _measure(name: str, buffers: Buffers, options: argparse.Namespace) -> tuple[Row, ArenaPlan]:
    def work() -> ArenaPlan:
        return plan(
            buffers,
            alignment=options.alignment,
            effort_s=options.effort,
            fit=first_fit,
            exact=exact_search,
        )

    found, seconds = _timed(work)
    check_no_overlap(buffers.birth, buffers.death, found.offsets, buffers.size)
    bound, peak = found.lower_bound_bytes, found.peak_bytes
    return Row(name, len(buffers), bound, peak, seconds, found.method), found


def _timed(work: Callable[[], ArenaPlan]) -> tuple[ArenaPlan, float]:
    start = time.process_time()
    found = work()
    return found, time.process_time() - start


if __name__ == "__main__":
    main()
