"""``lazyinline plan-memory``: the static memory planner on a problem from a file."""

from __future__ import annotations

import argparse
import pathlib
import time

from ..backend.arena.arena import ALIGNMENT, plan
from ..backend.arena.problem_csv import read_problem_csv, write_offsets_csv
from ..backend.arena.proof import check_no_overlap

EFFORT_S = 5.0


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the subcommand ``plan-memory`` to a parser."""
    parser = subparsers.add_parser("plan-memory", help="plan the arena of a problem from a file")
    parser.description = (
        "Gives each buffer of a file an offset in one arena. The file is CSV with the columns id, "
        "lower, upper, size: a buffer of `size` bytes lives in [lower, upper). Prints the size of "
        "the arena (peak), the largest sum of live bytes (lower bound), their ratio and seconds."
    )
    add = parser.add_argument
    add("file", type=pathlib.Path, metavar="FILE.csv")
    add("--offsets", type=pathlib.Path, metavar="OUT.csv", help="write the plan")
    alignment_help = f"offsets and sizes are multiples of this, default {ALIGNMENT}"
    add("--alignment", type=int, default=ALIGNMENT, metavar="BYTES", help=alignment_help)
    effort_help = f"at most about this long, default {EFFORT_S:g}; stops at ratio 1"
    add("--effort", type=float, default=EFFORT_S, metavar="SECONDS", help=effort_help)


def run(options: argparse.Namespace) -> None:
    """Runs ``plan-memory``.

    Raises:
        PlanError: the problem cannot be read, or the offsets cannot be written.
    """
    problem = read_problem_csv(options.file)
    buffers = problem.buffers
    start = time.perf_counter()
    found = plan(buffers, alignment=options.alignment, effort_s=options.effort)
    seconds = time.perf_counter() - start
    check_no_overlap(buffers.birth, buffers.death, found.offsets, buffers.size)
    print(f"buffers      {len(buffers)}")
    print(f"peak         {found.peak_bytes} bytes")
    print(f"lower bound  {found.lower_bound_bytes} bytes")
    print(f"ratio        {found.ratio:.6f}")
    print(f"seconds      {seconds:.3f}")
    print(f"method       {found.method}")
    if options.offsets is not None:
        write_offsets_csv(options.offsets, problem, found.offsets)
