"""The pages of a compile, a measurement and a pipeline: reports as text, and what a picture shows.

The plan of a pipeline shows itself as text and as a page.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from ...pipeline_parallel.actions import ACTION_TEXT, BACKWARD, FORWARD
from ...pipeline_parallel.mesh.plan import MeshPlan
from ...pipeline_parallel.plan import PipelinePlan
from ...reuse.ir.printer import bytes_text, flops_text, seconds_text
from ..compile_record import CompileRecord
from . import sections
from .write import PageData, about, write_page

if TYPE_CHECKING:  # importing DTensor takes as long as importing all of lazyinline
    from ...pipeline_parallel.mesh.traffic import Collective, RankMemory

Measured: TypeAlias = Mapping[tuple[int, str], float]
"""Seconds of (stage, kind of action), as ``pipe.measured_s()`` returns them."""


def compile_page(record: CompileRecord, title: str = "", texts: Sequence[str] = ()) -> PageData:
    """Returns the data of a compile's page.

    Args:
        record: what the compile did.
        title: names what was compiled.
        texts: what stands before its own report.
    """
    kind = "training" if record.train else "inference"
    made = record.made  # None where the model ran eagerly
    memory = made.memory if made is not None else None
    return {
        "title": title or record.model or "Compiled model",
        "subtitle": f"{kind}, backend {record.backend}, reuse {record.reuse}",
        "texts": [*texts, str(record), *filter(None, [recompute_text(record)])],
        "program": sections.program_section(made) if made is not None else None,
        "arena": sections.arena_section(memory) if memory is not None else None,
        "about": about(),
    }


def recompute_text(record: CompileRecord) -> str:
    """Says what is saved and computed again, and what else one call of a closure could save."""
    if not any(r.saved_bytes or r.recomputed_flops for r in record.recompute):
        return ""
    lines = ["saved for the backward, and computed again in it, per closure:"]
    lines += map(str, record.recompute)
    for frontier in record.made.frontiers() if record.made is not None else ():
        lines.append(f"one call of {frontier['closure']} could save")
        lines += [
            f"  {bytes_text(p['saved_bytes']):>10}, and compute {flops_text(p['extra_flops'])} "
            f"again, predicted to take {seconds_text(p['extra_s'])}"
            for p in frontier["points"]
        ]
    return "\n".join(lines)


# ---- a pipeline's plan ---------------------------------------------------------------------------


@dataclass(frozen=True)
class ShownPlan(PipelinePlan):
    """A pipeline before it runs. ``print(plan)`` shows it; ``save_html`` draws it.

    Attributes:
        compiled: what this rank's compile did; None for a plan alone.
        rank: which one it is; None for a plan alone.
        layouts: what lies where, of a pipeline over a mesh.
        traffic: there, what one rank of each stage moves in a step over the other dimensions.
        memory: there, what this rank holds, where its memory is planned.
    """

    compiled: CompileRecord | None = None
    rank: int | None = None
    layouts: MeshPlan | None = None
    traffic: Mapping[int, tuple[Collective, ...]] = field(default_factory=dict)
    memory: RankMemory | None = None

    @staticmethod
    def of(plan: PipelinePlan, compiled: CompileRecord | None = None, **more: Any) -> ShownPlan:
        """Returns the same plan, able to show itself."""
        return ShownPlan(plan.table, plan.stages, plan.timeline, compiled, **more)

    def __str__(self) -> str:
        held = "" if self.memory is None else f"rank {self.rank}: {self.memory}"
        return "\n".join(filter(None, (super().__str__(), self.moved_text, held)))

    @property
    def moved_text(self) -> str:
        """Returns what lies where, and what each stage moves; empty without a mesh."""
        if self.layouts is None:
            return ""
        # Imported late: DTensor takes as long to import as all of lazyinline.
        from ...pipeline_parallel.mesh.traffic import traffic_text

        moved = [f"stage {n}, {traffic_text(one)}" for n, one in self.traffic.items()]
        return "\n".join([str(self.layouts), *moved])

    def save_html(self, path: str | os.PathLike[str], measured_s: Measured | None = None) -> None:
        """Writes a page with the schedule in time, the plan, and this rank's program and memory.

        Args:
            path: the file to write.
            measured_s: what actions took, to be shown next to what was predicted: the result of
                ``pipe.measured_s()``, which every rank calls.

        Example:
            >>> pipe.plan.save_html("pipeline.html", pipe.measured_s())
        """
        pathlib.Path(path).write_text(write_page(plan_page(self, measured_s)), encoding="utf-8")


def plan_page(plan: ShownPlan, measured_s: Measured | None = None) -> PageData:
    """Returns the data of a pipeline's page."""
    table, title = plan.table, f"Pipeline: {plan.table.schedule}"
    texts = [str(plan), *measured_lines(plan, measured_s)]
    page: PageData = {"title": title, "texts": texts, "about": about()}
    if plan.compiled is not None:
        page = compile_page(plan.compiled, title, texts)
    ranks = f"{table.num_stages} stages on {len(table.ranks)} ranks"
    subtitle = f"{ranks}, {table.num_micro_batches} micro-batches"
    if plan.rank is not None:
        subtitle += f"; the program and the arena are those of rank {plan.rank}"
    return page | {"subtitle": subtitle, "pipeline": sections.pipeline_section(plan)}


def measured_lines(plan: PipelinePlan, measured_s: Measured | None) -> Iterator[str]:
    """Yields what actions and the step that they make took, beside what was predicted."""
    if not measured_s:
        return
    rows = [f"{'':<32}{'predicted':>12}{'measured':>12}"]
    for (stage, kind), seconds in sorted(measured_s.items()):
        own = plan.stages[stage]
        whole = {FORWARD: own.forward_s, BACKWARD: own.backward_s}
        predicted_s = whole.get(kind, own.backward_s / 2)
        what = f"stage {stage}, {ACTION_TEXT[kind]}"
        rows.append(f"{what:<32}{seconds_text(predicted_s):>12}{seconds_text(seconds):>12}")
    found = plan.simulated(dict(measured_s))
    rows.append(f"{'step':<32}{seconds_text(plan.step_s):>12}{seconds_text(found.step_s):>12}")
    rows.append(f"{'bubble':<32}{plan.bubble:>12.1%}{found.bubble:>12.1%}")
    yield "\n".join(rows)
