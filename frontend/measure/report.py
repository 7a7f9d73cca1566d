"""What :func:`lazyinline.measure` found, as a table, JSON and a page."""

from __future__ import annotations

import json
import math
import os
import pathlib
from dataclasses import dataclass
from typing import Any

from ...reuse.folding import folded
from ..page.write import write_page
from ..report import CompileReport
from .measure_page import measure_page
from .measurement import Measurement, error_text

COMPILED = (
    *("reuse", "num_nodes", "num_nodes_if_inlined", "num_closures", "num_block_calls"),
    *("peak_bytes", "lower_bound_bytes", "held_bytes", "unplanned", "ran_eagerly"),
)
"""What is saved of a compile besides what has a place of its own."""


@dataclass(frozen=True)
class MeasureReport(Measurement):
    """Late against early inlining of one model, both against eager; see :class:`Measurement`."""

    def to_dict(self) -> dict[str, Any]:
        """Returns the numbers as plain values; None where something was not measured."""
        sides = self.sides
        errors = {name: side.errors for name, side in sides.items()}
        steps = {"eager": self.eager} | {name: side.step for name, side in sides.items()}
        return {
            "model": self.model,
            "layers": self.layers,
            "micro_batches": self.micro_batches,
            "train": self.train,
            "backend": self.backend,
            "threads": self.threads,
            "nodes_held": self.late.compiled.num_nodes,
            "nodes_if_inlined": self.late.compiled.num_nodes_if_inlined,
            "compile_cpu_s": {name: side.compiled.cpu_s for name, side in sides.items()},
            "compile_wall_s": {name: side.compiled.wall_s for name, side in sides.items()},
            "compile_child_cpu_s": {name: side.child_cpu_s for name, side in sides.items()},
            "passes": {name: _pass_rows(side.compiled) for name, side in sides.items()},
            "operators": {name: side.compiled.num_operators for name, side in sides.items()},
            "launches": {name: side.compiled.num_launches for name, side in sides.items()},
            "compiled": {name: _compiled(side.compiled) for name, side in sides.items()},
            "step_ms": {name: step and step.median_ms for name, step in steps.items()},
            "step_min_ms": {name: step and step.minimum_ms for name, step in steps.items()},
            "step_max_ms": {name: step and step.maximum_ms for name, step in steps.items()},
            "rounds": self.eager and self.eager.rounds,
            "others_share": self.others_share,
            "noise": self.noise,
            "peak_bytes": self.peak_bytes,
            "lower_bound_bytes": self.lower_bound_bytes,
            "held_bytes": {"eager": self.eager_held_bytes}
            | {name: side.held_bytes for name, side in sides.items()},
            "max_abs_error": {n: _json_number(e.max_abs_error) for n, e in errors.items()},
            "max_rel_grad_error": {
                n: _json_number(e.max_rel_grad_error) for n, e in errors.items()
            },
            "worst_gradient": {name: error.worst_gradient for name, error in errors.items()},
            "warm_up": {"cpu_s": self.warm_up.cpu_s, "wall_s": self.warm_up.wall_s},
            "notes": self.notes(),
        }

    def to_json(self) -> str:
        """Returns :meth:`to_dict` as JSON; an infinite error is the string ``"inf"``."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)

    def save_html(self, path: str | os.PathLike[str]) -> None:
        """Writes a page that needs nothing else: verdict, program, passes, steps, the arena.

        Args:
            path: the file to write.
        """
        pathlib.Path(path).write_text(write_page(measure_page([self])), encoding="utf-8")

    def __str__(self) -> str:
        lines = [self.title(), "", *self._size_lines(), "", *self._pass_lines()]
        if self.eager is not None:
            lines += ["", *self._step_lines()]
        lines += ["", *self.notes()]
        return folded("\n".join(lines))

    def _size_lines(self) -> list[str]:
        lines = [f"{'':<24}{'late':>18}{'early':>18}"]
        lines += [f"{name:<24}{late:>18}{early:>18}" for name, late, early in self.size_rows()]
        return lines

    def _pass_lines(self) -> list[str]:
        late, early = self.late.compiled, self.early.compiled
        lines = [f"{'CPU s (wall s)':<24}{'late':>18}{'early':>18}"]
        for a, b in zip(late.passes, early.passes, strict=True):
            lines.append(f"  {a.name:<22}{_pair(a.cpu_s, a.wall_s)}{_pair(b.cpu_s, b.wall_s)}")
        total = f"{_pair(late.cpu_s, late.wall_s)}{_pair(early.cpu_s, early.wall_s)}"
        return [*lines, f"  {'all':<22}{total}"]

    def _step_lines(self) -> list[str]:
        assert self.eager and self.late.step and self.early.step
        steps = (self.eager, self.late.step, self.early.step)
        lines = [f"{'one step, ms':<24}{'eager':>18}{'late':>18}{'early':>18}"]
        for label, values in (
            (f"  median of {steps[0].rounds}", [s.median_ms for s in steps]),
            ("  minimum", [s.minimum_ms for s in steps]),
            ("  maximum", [s.maximum_ms for s in steps]),
        ):
            lines.append(f"{label:<24}" + "".join(f"{v:>18.2f}" for v in values))
        spreads = "".join(f"{f'{s.spread:.2f} x':>18}" for s in steps)
        lines.append(f"{'  median over minimum':<24}{spreads}")
        held = (self.eager_held_bytes, self.late.held_bytes, self.early.held_bytes)
        shown = "".join(f"{'not measured' if n is None else n:>18}" for n in held)
        lines.append(f"{'memory held, bytes':<24}{shown}")
        errors = (self.late.errors, self.early.errors)
        lines += ["", f"{'largest error':<24}{'':>18}{'late':>18}{'early':>18}"]
        outputs = "".join(f"{error_text(e.max_abs_error):>18}" for e in errors)
        lines.append(f"{'  output, absolute':<24}{'':>18}{outputs}")
        if self.train:
            gradients = "".join(f"{error_text(e.max_rel_grad_error):>18}" for e in errors)
            lines.append(f"{'  gradient, relative':<24}{'':>18}{gradients}")
            if errors[0].max_rel_grad_error:
                lines.append(f"  late's largest is the gradient of {errors[0].worst_gradient}")
        return lines


def _pair(cpu_s: float, wall_s: float) -> str:
    return f"{cpu_s:>9.2f} ({wall_s:>6.2f})"


def _pass_rows(report: CompileReport) -> list[dict[str, Any]]:
    return [
        {"name": p.name, "cpu_s": p.cpu_s, "wall_s": p.wall_s, "nodes": p.num_nodes}
        for p in report.passes
    ]


def _compiled(report: CompileReport) -> dict[str, Any]:
    return {name: getattr(report, name) for name in COMPILED}


def _json_number(value: float | None) -> float | str | None:
    return value if value is None or math.isfinite(value) else str(value)
