"""The report of :func:`lazyinline.measure`: a table, JSON and a page."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch

from ...backend.kernels.lower import BackendName
from ...reuse.ir.printer import folded
from ..page.page import measured_page
from ..page.texts import error_text
from ..page.write import write_page
from ..report import CompileReport

if TYPE_CHECKING:
    from torch.utils.benchmark import Measurement

Step: TypeAlias = tuple[Mapping[str, torch.Tensor | None], Mapping[str, torch.Tensor | None]]
"""The outputs and the gradients of one step, by name."""

_SIZES = {
    "graph nodes held": "num_nodes",
    "graph nodes if inlined": "num_nodes_if_inlined",
    "closures": "num_closures",
    "block calls": "num_block_calls",
    "operators compiled": "num_operators",
    "launches in a step": "num_launches",
    "arena, bytes": "peak_bytes",
}


class Errors(NamedTuple):
    """Holds how far a step is from eager's.

    Attributes:
        output: largest absolute difference of a number.
        gradient: largest of the norm of a difference by the norm of eager's; None without training.
        worst: the parameter or input that it belongs to.
    """

    output: float
    gradient: float | None = None
    worst: str = ""


@dataclass(frozen=True)
class MeasureReport:
    """Holds late against early inlining of one model, both against eager.

    Attributes:
        late: the compile with blocks compiled once, inlined at link.
        early: the compile with everything inlined first (``reuse="off"``).
        steps: the time of a step of eager, late and early by name; empty if nothing was run.
        errors: how far late and early are from eager, by name; empty likewise.
        layers: number of layers, where known.
    """

    model: str
    train: bool
    backend: BackendName
    micro_batches: int
    threads: int
    late: CompileReport
    early: CompileReport
    steps: Mapping[str, Measurement] = field(default_factory=dict)
    errors: Mapping[str, Errors] = field(default_factory=dict)
    layers: int | None = None

    @property
    def sides(self) -> dict[str, CompileReport]:
        """Returns both compiles by name."""
        return {"late": self.late, "early": self.early}

    @property
    def noise(self) -> str:
        """Says why the times of steps are not to be trusted; an empty text where they are."""
        if not any(step.has_warnings for step in self.steps.values()):
            return ""
        widest = max(step.iqr / step.median for step in self.steps.values())
        return f"busy machine, do not trust step times: the middle half varies by {widest:.0%}"

    def title(self) -> str:
        """Says what was measured, in one line."""
        depth = "" if self.layers is None else f", {self.layers} layers"
        kind = "training" if self.train else "inference"
        if self.micro_batches > 1:
            kind += f" of {self.micro_batches} micro-batches"
        threads = f"{self.threads} thread" + ("" if self.threads == 1 else "s")
        return f"{self.model}{depth}: {kind}, backend {self.backend}, {threads}"

    def notes(self) -> list[str]:
        """Says what a reader should know: times that vary, what is not shared and why."""
        notes = [self.noise] if self.noise else []
        if not self.late.num_block_calls:
            notes.append("no block is shared, so late and early are the same")
        for one in (*self.late.not_shared(), *self.late.shared_with_constants()):
            why = one.shares or f"not shared, {one.reason}"
            notes.append(f"{one.path or one.class_name}: {why}")
        return notes

    def to_dict(self) -> dict[str, Any]:
        """Returns the numbers as plain values; what was not measured is empty or None."""
        own = ("model", "layers", "micro_batches", "train", "backend", "threads")
        sides, steps = self.sides.items(), self.steps.items()
        return {name: getattr(self, name) for name in own} | {
            "nodes_held": self.late.num_nodes,
            "nodes_if_inlined": self.late.num_nodes_if_inlined,
            "peak_bytes": self.late.peak_bytes,
            "lower_bound_bytes": self.late.lower_bound_bytes,
            "compile_cpu_s": {name: side.cpu_s for name, side in sides},
            "compile_wall_s": {name: side.wall_s for name, side in sides},
            "passes": {name: [asdict(one) for one in side.passes] for name, side in sides},
            "operators": {name: side.num_operators for name, side in sides},
            "launches": {name: side.num_launches for name, side in sides},
            "step_ms": {name: 1e3 * step.median for name, step in steps},
            "step_min_ms": {name: 1e3 * min(step.times) for name, step in steps},
            "step_max_ms": {name: 1e3 * max(step.times) for name, step in steps},
            "rounds": {name: len(step.times) for name, step in steps},
            # An infinite error is text: JSON has no such number.
            "max_abs_error": {n: _finite(e.output) for n, e in self.errors.items()},
            "max_rel_grad_error": {n: _finite(e.gradient) for n, e in self.errors.items()},
            "worst_gradient": {n: e.worst for n, e in self.errors.items()},
            "noise": self.noise,
            "notes": self.notes(),
        }

    def to_json(self) -> str:
        """Returns :meth:`to_dict` as JSON; an infinite error is the string ``"inf"``."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)

    def save_html(self, path: str | os.PathLike[str]) -> None:
        """Writes a page that needs nothing else: verdict, program, passes, steps, the arena."""
        page = measured_page([(self.to_dict(), self.sides)], self.title())
        pathlib.Path(path).write_text(write_page(page), encoding="utf-8")

    def __str__(self) -> str:
        rows = [f"{name:<24}" + "".join(f"{x:>18}" for x in cells) for name, *cells in self._rows()]
        return folded("\n".join([self.title(), "", *map(str.rstrip, rows), "", *self.notes()]))

    def _rows(self) -> Iterator[tuple[str, ...]]:
        """Yields the printed rows: sizes and seconds late and early, and a step of all three."""
        both = [self.late, self.early]
        yield "", *self.sides
        for label, name in _SIZES.items():
            if getattr(self.late, name) is not None:
                yield label, *(str(getattr(side, name)) for side in both)
        yield from (("",), ("CPU s (wall s)", *self.sides))
        for ones in (*zip(*(side.passes for side in both), strict=True), both):
            name = getattr(ones[0], "name", "all")
            yield f"  {name}", *(f"{one.cpu_s:.2f} ({one.wall_s:>6.2f})" for one in ones)
        if self.steps:
            yield from (("",), ("one step", *self.steps))
            yield "  median, ms", *(f"{1e3 * step.median:.2f}" for step in self.steps.values())
            yield "  fastest, ms", *(f"{1e3 * min(step.times):.2f}" for step in self.steps.values())
            yield "  error of an output", "", *(error_text(e.output) for e in self.errors.values())
        if self.steps and self.train:
            yield "  of a gradient", "", *(error_text(e.gradient) for e in self.errors.values())


def _finite(value: float | None) -> float | str | None:
    return "inf" if value == float("inf") else value
