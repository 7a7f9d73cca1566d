"""``lazyinline plan-memory``: the static memory planner on a problem from a file."""

from __future__ import annotations

import argparse
import time

from ...backend.arena.arena import plan
from ...backend.arena.problem_csv import read_problem_csv, write_offsets_csv
from ...backend.arena.proof import check_no_overlap


def run_plan_memory(options: argparse.Namespace) -> None:
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
