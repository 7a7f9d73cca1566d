"""What :func:`lazyinline.measure` found, as a table, JSON and a page."""

from __future__ import annotations

import json
import math
import os
import pathlib
from dataclasses import dataclass, field
from typing import Any

from ...backend.kernels.lower import BackendName
from ..report import CompileReport
from .workload import Errors, StepTime


@dataclass(frozen=True)
class Seconds:
    """CPU-seconds, child processes included, and wall seconds."""

    cpu_s: float = 0.0
    wall_s: float = 0.0


@dataclass(frozen=True)
class Side:
    """One way of compiling the model.

    Attributes:
        compiled: what the compile did, pass by pass.
        child_cpu_s: the part of its CPU-seconds that child processes, the C++ compiler, spent.
        step: time of one step; None if nothing was run.
        errors: against eager.
        compiled_again: a step with the same inputs did not find the program: a bug of ours, and
            the time of a step is then worthless.
    """

    compiled: CompileReport
    child_cpu_s: float
    step: StepTime | None = None
    errors: Errors = field(default_factory=Errors)
    compiled_again: bool = False


@dataclass(frozen=True)
class MeasureReport:
    """Late against early inlining of one model, both against eager.

    Attributes:
        model: the model's class or, in ``lazyinline bench``, its name there.
        layers: number of layers, where known.
        late: blocks compiled once, inlined at link.
        early: everything inlined first (``reuse="off"``).
        eager: time of the model's own step; None if nothing was run.
        warm_up: a small compile before both, which pays for imports; on neither side.
        micro_batches: parts of the batch that a step runs one after another.
        peak_bytes: of the late program, as its report has it; None where memory is not planned.
        lower_bound_bytes: largest sum of live bytes, which no plan can go below; None likewise.
    """

    model: str
    train: bool
    backend: BackendName
    late: Side
    early: Side
    eager: StepTime | None = None
    warm_up: Seconds = Seconds()
    micro_batches: int = 1
    layers: int | None = None
    threads: int = 1
    peak_bytes: int | None = None
    lower_bound_bytes: int | None = None

    @property
    def sides(self) -> dict[str, Side]:
        """Both sides by name."""
        return {"late": self.late, "early": self.early}

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
            "kernels": {name: side.compiled.num_kernels for name, side in sides.items()},
            "launches": {name: side.compiled.num_launches for name, side in sides.items()},
            "step_ms": {name: step and step.median_ms for name, step in steps.items()},
            "step_min_ms": {name: step and step.minimum_ms for name, step in steps.items()},
            "peak_bytes": self.peak_bytes,
            "lower_bound_bytes": self.lower_bound_bytes,
            "max_abs_error": {n: _json_number(e.max_abs_error) for n, e in errors.items()},
            "max_rel_grad_error": {
                n: _json_number(e.max_rel_grad_error) for n, e in errors.items()
            },
            "warm_up": {"cpu_s": self.warm_up.cpu_s, "wall_s": self.warm_up.wall_s},
        }

    def to_json(self) -> str:
        """Returns :meth:`to_dict` as JSON; an infinite error is the string ``"inf"``."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)

    def save_html(self, path: str | os.PathLike[str]) -> None:
        """Writes a page that needs nothing else: table, passes, closures and calls.

        Args:
            path: the file to write.
        """
        from .page import page

        pathlib.Path(path).write_text(page([self]), encoding="utf-8")

    def __str__(self) -> str:
        lines = [self.title(), "", *self._size_lines(), "", *self._pass_lines()]
        if self.eager is not None:
            lines += ["", *self._step_lines()]
        lines += ["", *self.notes()]
        return "\n".join(lines)

    def title(self) -> str:
        """Says what was measured, in one line."""
        depth = f", {self.layers} layers" if self.layers is not None else ""
        kind = "training" if self.train else "inference"
        if self.micro_batches > 1:
            kind += f" of {self.micro_batches} micro-batches"
        threads = f"{self.threads} thread" + ("" if self.threads == 1 else "s")
        return f"{self.model}{depth}: {kind}, backend {self.backend}, {threads}"

    def notes(self) -> list[str]:
        """Says what a reader of the numbers should know: warm-up, C++, and :meth:`warnings`."""
        notes = []
        if self.warm_up.wall_s:
            notes.append(
                f"warm-up, on neither side: {self.warm_up.cpu_s:.1f} CPU s, "
                f"{self.warm_up.wall_s:.1f} wall s (imports and first use)"
            )
        if max(self.late.child_cpu_s, self.early.child_cpu_s) >= 0.05:
            notes.append(
                f"of the CPU s, the C++ compiler: late {self.late.child_cpu_s:.1f}, early "
                f"{self.early.child_cpu_s:.1f} (late comes first; kernels built by then are warm)"
            )
        return notes + self.warnings()

    def warnings(self) -> list[str]:
        """Says what is not as it should be: no mark, a block not shared, a second compile."""
        notes = []
        if not self.late.compiled.num_block_calls:
            notes.append(
                "no block is marked, so late and early are the same: "
                "put lazy_inline on the class of the repeated layer"
            )
        for name, side in self.sides.items():
            if side.compiled_again:
                notes.append(
                    f"{name} was compiled again for the same inputs, so its step time is not one: "
                    "please report this as a bug of lazyinline"
                )
        for decision in self.late.compiled.not_shared():
            notes.append(f"{decision.path or decision.class_name}: not shared, {decision.reason}")
        for decision in self.late.compiled.shared_with_constants():
            notes.append(f"{decision.path or decision.class_name}: {decision.shares}")
        return notes

    def size_rows(self) -> list[tuple[str, int, int]]:
        """What was compiled: name, late, early."""
        late, early = self.late.compiled, self.early.compiled
        rows = [
            ("graph nodes held", late.num_nodes, early.num_nodes),
            ("graph nodes if inlined", late.num_nodes_if_inlined, early.num_nodes_if_inlined),
            ("closures", late.num_closures, early.num_closures),
            ("block calls", late.num_block_calls, early.num_block_calls),
            ("kernels compiled", late.num_kernels, early.num_kernels),
            ("launches in a step", late.num_launches, early.num_launches),
        ]
        if late.peak_bytes is not None and early.peak_bytes is not None:
            rows.append(("arena, bytes", late.peak_bytes, early.peak_bytes))
        return rows

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
        ):
            lines.append(f"{label:<24}" + "".join(f"{v:>18.2f}" for v in values))
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


def error_text(error: float | None) -> str:
    """An error in three digits."""
    return "-" if error is None else "0" if error == 0 else f"{error:.1e}"


def _pair(cpu_s: float, wall_s: float) -> str:
    return f"{cpu_s:>9.2f} ({wall_s:>6.2f})"


def _pass_rows(report: CompileReport) -> list[dict[str, Any]]:
    return [
        {"name": p.name, "cpu_s": p.cpu_s, "wall_s": p.wall_s, "nodes": p.num_nodes}
        for p in report.passes
    ]


def _json_number(value: float | None) -> float | str | None:
    return value if value is None or math.isfinite(value) else str(value)
