"""The page of measurements: late against early inlining, both against eager."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import cycle
from typing import Any

from ..page.compile_page import (
    Tile,
    arena_tile,
    compile_page,
    compile_sections,
    gpu_tiles,
    node_tile,
    notes,
)
from ..page.sections import (
    Row,
    depth_section,
    passes_section,
    predicted_section,
    recompute_rows,
)
from ..page.texts import ratio_range, seconds_text, times_less
from ..page.write import PageData
from ..pipeline.shown_plan import ShownPlan, plan_page
from .large_models import LargeReport
from .measurement import Measurement, error_text
from .rank_bench import RankReport
from .timing import StepTime

_WAYS = ("recompute nothing", "recompute each block")
_EXACT = 1e-4
"""Relative errors above this are not rounding of 32-bit numbers."""


def measure_page(reports: Sequence[Measurement], title: str = "") -> PageData:
    """Returns the data of a page.

    Args:
        reports: one, or one for each number of layers; the deepest is drawn.
        title: what was measured, if the report's own title is not enough.
    """
    deepest = max(reports, key=lambda r: r.layers or 0)
    sides = {name: side.compiled for name, side in deepest.sides.items()}
    sections = compile_sections(deepest.late.compiled, sides)
    rows = [
        (r.layers or 0, {name: side.compiled for name, side in r.sides.items()}) for r in reports
    ]
    return {
        "title": f"{deepest.model}: late against early inlining",
        "subtitle": title or deepest.title(),
        "verdict": {
            "sentence": sentence(deepest),
            "tiles": tiles(deepest),
            "notes": [*deepest.notes(), *notes(deepest.late.compiled)],
        },
        "program": sections.pop("program"),
        "reuse": sections.pop("reuse"),
        "passes": sections.pop("passes"),
        "depth": depth_section(rows),
        "steps": steps_section(deepest),
        **sections,
        "predicted": predicted_section(_memory_rows(deepest)),
    }


def large_page(reports: Sequence[LargeReport]) -> PageData:
    """Returns the data of a page on a large model's step, compiled and not run.

    Args:
        reports: the step without and with recompute; the first is drawn.
    """
    first, second = reports
    on_gpu = second.compiled.gpu is not None
    ways = (_WAYS[0], "recompute what does not fit") if on_gpu else _WAYS
    sides = {way: report.compiled for way, report in zip(ways, reports, strict=True)}
    page = compile_page(first.compiled, _large_title(first))
    page["verdict"]["tiles"] += gpu_tiles(second.compiled.gpu, ways[1])
    return page | {"passes": passes_section(sides)}


def rank_page(reports: Sequence[RankReport]) -> PageData:
    """Returns the data of a page on ranks of a large pipeline, compiled and not run.

    Args:
        reports: of each rank, without and with recompute; the first is drawn.
    """
    first = reports[0]
    sides = {
        f"rank {report.rank}, {way}": report.compiled
        for report, way in zip(reports, cycle(_WAYS), strict=False)
    }
    page = plan_page(ShownPlan.of(first.plan, first.compiled, first.rank))
    return page | {"title": _large_title(first), "passes": passes_section(sides)}


def _large_title(report: LargeReport | RankReport) -> str:
    return f"{report.name}: {report.num_parameters / 1e9:.1f}e9 parameters"


def sentence(report: Measurement) -> str:
    """Says what came out, in one sentence or two."""
    late, early = report.late.compiled, report.early.compiled
    text = (
        f"Inlining late, the compiler spent {times_less(late.cpu_s, early.cpu_s)} CPU time than "
        f"inlining early ({late.cpu_s:.1f} against {early.cpu_s:.1f} s)"
    ).replace("equal CPU time than", "the same CPU time as")
    if late.num_nodes < late.num_nodes_if_inlined:
        text += f", and held {late.num_nodes:,} graph nodes of {late.num_nodes_if_inlined:,}"
    text += "."
    ratios = _against_eager(report)
    if ratios:
        text += f" A step takes {ratio_range(ratios)} the time of eager"
        text += " on a busy machine, which is not to be trusted." if report.noise else "."
    return text


def tiles(report: Measurement) -> list[Tile]:
    """Returns the figures that matter most, each with what it is compared with."""
    late, early = report.late.compiled, report.early.compiled
    found: list[Tile | None] = [
        {
            "label": "Compile, CPU time",
            "value": times_less(late.cpu_s, early.cpu_s),
            "note": f"{late.cpu_s:.2f} s late, {early.cpu_s:.2f} s early",
            "state": "good" if late.cpu_s < early.cpu_s else "plain",
        },
        node_tile(late),
        {
            "label": "Operators compiled",
            "value": times_less(late.num_operators, early.num_operators),
            "note": f"{late.num_operators:,} late, {early.num_operators:,} early",
            "state": "good" if late.num_operators < early.num_operators else "plain",
        },
        _step_tile(report),
        arena_tile(late),
        _error_tile(report),
    ]
    return [tile for tile in found if tile is not None]


def steps_section(report: Measurement) -> dict[str, Any] | None:
    """Returns the time of a step, and how far it is from eager; None if nothing was run."""
    steps = {"eager": report.eager} | {name: side.step for name, side in report.sides.items()}
    timed = {name: step for name, step in steps.items() if step is not None}
    if not timed:
        return None
    return {
        "rows": [
            [name, s.minimum_ms, s.median_ms, s.maximum_ms, s.rounds] for name, s in timed.items()
        ],
        "errors": [
            [
                name,
                error_text(side.errors.max_abs_error),
                error_text(side.errors.max_rel_grad_error),
                side.errors.worst_gradient,
            ]
            for name, side in report.sides.items()
        ],
        "noise": report.noise,
    }


def _memory_rows(report: Measurement) -> list[Row]:
    """What steps were predicted to hold, and what they held."""
    what = "memory held by a step"
    rows: list[Row] = [
        (f"{what}, {name}", "bytes", side.compiled.held_bytes, side.held_bytes)
        for name, side in report.sides.items()
    ]
    eager: Row = (f"{what}, eager", "bytes", None, report.eager_held_bytes)
    return [*rows, eager, *recompute_rows(report.late.compiled)]


def _against_eager(report: Measurement) -> list[float]:
    """Late over eager, by minimum and by median."""
    eager, late = report.eager, report.late.step
    if eager is None or late is None or not eager.minimum_ms:
        return []
    return [late.minimum_ms / eager.minimum_ms, late.median_ms / eager.median_ms]


def _step_tile(report: Measurement) -> Tile | None:
    ratios, eager, late = _against_eager(report), report.eager, report.late.step
    if not ratios or eager is None or late is None:
        return None
    noisy, worst = bool(report.noise), max(late.spread, eager.spread)
    note = f"{_median(late)} late, {_median(eager)} eager (medians of {late.rounds})"
    if noisy:
        note = f"noisy, a median is {worst:.2f}\u00d7 its minimum: {note}"
    return {
        "label": "Step time against eager's",
        "value": ratio_range(ratios),
        "note": note,
        "state": "warn" if noisy else "good" if max(ratios) <= 1 else "plain",
    }


def _median(step: StepTime) -> str:
    return seconds_text(step.median_ms / 1e3)


def _error_tile(report: Measurement) -> Tile | None:
    errors = report.late.errors
    error = errors.max_rel_grad_error if report.train else errors.max_abs_error
    if error is None:
        return None
    what = "relative, of a gradient" if report.train else "absolute, of an output"
    wrong = not math.isfinite(error) or (report.train and error > _EXACT)
    return {
        "label": "Largest difference from eager",
        "value": error_text(error),
        "note": what + (f": {errors.worst_gradient}" if errors.worst_gradient and error else ""),
        "state": "warn" if wrong else "good",
    }
