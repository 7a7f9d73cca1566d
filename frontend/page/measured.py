"""The page of measurements: late against early inlining, both against eager."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..compile_record import CompileRecord
from .compile_page import Tile, arena_tile, compile_sections, node_tile, notes, tile
from .sections import depth_section
from .texts import ratio_range, seconds_text, times_less
from .write import PageData

Numbers = Mapping[str, Any]
"""What :meth:`lazyinline.MeasureReport.to_dict` returns."""
_EXACT = 1e-4
"""Relative errors above this are not rounding of 32-bit numbers."""


def measured_page(
    rows: Sequence[tuple[Numbers, Mapping[str, CompileRecord]]], subtitle: str
) -> PageData:
    """Returns the data of a page.

    Args:
        rows: one, or one for each number of layers; the deepest is drawn. Each has the numbers, and
            the compiles late and early.
        subtitle: what was measured.
    """
    found, sides = max(rows, key=lambda row: row[0]["layers"] or 0)
    late, early = sides["late"], sides["early"]
    return {
        "title": f"{found['model']}: late against early inlining",
        "subtitle": subtitle,
        "verdict": {
            "sentence": _sentence(found, late, early),
            "tiles": _tiles(found, late, early),
            "notes": [*found["notes"], *notes(late)],
        },
        **compile_sections(late, sides),
        "depth": depth_section([(row["layers"] or 0, records) for row, records in rows]),
        "steps": _steps(found) if found["step_ms"] else None,
    }


def _steps(found: Numbers) -> dict[str, Any]:
    """Returns the time of a step, and how far it is from eager."""
    times = ("step_min_ms", "step_ms", "step_max_ms")
    errors = ("max_abs_error", "max_rel_grad_error")
    return {
        "rows": [
            [n, *(found[time][n] for time in times), found["rounds"][n]] for n in found["step_ms"]
        ],
        "errors": [
            [n, *(_error(found[kind][n]) for kind in errors), found["worst_gradient"][n]]
            for n in found["max_abs_error"]
        ],
        "noise": found["noise"],
    }


def _sentence(found: Numbers, late: CompileRecord, early: CompileRecord) -> str:
    text = (
        f"Inlining late, the compiler spent {times_less(late.cpu_s, early.cpu_s)} CPU time than "
        f"inlining early ({late.cpu_s:.1f} against {early.cpu_s:.1f} s)"
    ).replace("equal CPU time than", "the same CPU time as")
    if late.num_nodes < late.num_nodes_if_inlined:
        text += f", and held {late.num_nodes:,} graph nodes of {late.num_nodes_if_inlined:,}"
    if not found["step_ms"]:
        return f"{text}."
    end = " on a busy machine, which is not to be trusted." if found["noise"] else "."
    return f"{text}. A step takes {ratio_range(_against_eager(found))} the time of eager{end}"


def _against_eager(found: Numbers) -> list[float]:
    """Late over eager, by the fastest step and by the median."""
    return [found[time]["late"] / found[time]["eager"] for time in ("step_min_ms", "step_ms")]


def _tiles(found: Numbers, late: CompileRecord, early: CompileRecord) -> list[Tile]:
    """Returns the figures that matter most, each with what it is compared with."""
    cpu_s = f"{late.cpu_s:.2f} s late, {early.cpu_s:.2f} s early"
    operators = f"{late.num_operators:,} late, {early.num_operators:,} early"
    less, fewer = late.cpu_s < early.cpu_s, late.num_operators < early.num_operators
    tiles = [
        tile("Compile, CPU time", times_less(late.cpu_s, early.cpu_s), cpu_s, good=less),
        node_tile(late),
        tile(
            "Operators compiled",
            times_less(late.num_operators, early.num_operators),
            operators,
            good=fewer,
        ),
        arena_tile(late),
        *(_run_tiles(found) if found["step_ms"] else ()),
    ]
    return [one for one in tiles if one is not None]


def _run_tiles(found: Numbers) -> list[Tile]:
    ratios, noisy = _against_eager(found), found["noise"]
    late, eager = (seconds_text(found["step_ms"][name] / 1e3) for name in ("late", "eager"))
    kind = "max_rel_grad_error" if found["train"] else "max_abs_error"
    error, worst = found[kind]["late"], found["worst_gradient"]["late"]
    what = f"relative, of a gradient: {worst}" if found["train"] else "absolute, of an output"
    exact = float(error) <= _EXACT if found["train"] else error != "inf"
    return [
        tile(
            "Step time against eager's",
            ratio_range(ratios),
            f"{'noisy: ' if noisy else ''}{late} late, {eager} eager (medians)",
            good=max(ratios) <= 1 and not noisy,
            otherwise="warn" if noisy else "plain",
        ),
        tile("Largest difference from eager", _error(error), what, good=exact, otherwise="warn"),
    ]


def _error(error: float | str | None) -> str:
    return "-" if error is None else "0" if error == 0 else f"{float(error):.1e}"
