"""A pipeline's plan, which shows itself as text and as a page."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ...pipeline_parallel.mesh.plan import MeshPlan
from ...pipeline_parallel.plan import PipelinePlan
from ...reuse.ir.printer import bytes_text, seconds_text
from ..compile_record import CompileRecord
from .page import compile_sections, notes, program_tiles, tile
from .sections import (
    Measured,
    mesh_section,
    pipeline_section,
    plan_rows,
    predicted_section,
    recompute_rows,
)
from .write import PageData, about, count_text, write_page

if TYPE_CHECKING:  # importing DTensor takes as long as importing all of lazyinline
    from ...pipeline_parallel.mesh.traffic import Collective

_LEAD = (
    "Measured is the mean of all steps so far; step and bubble put these times into the schedule. "
    "Memory held is the arena, and what launches allocate themselves."
)
_OF_A_RANK = (
    "Passes and memory are those of rank {}. The arena is in the order of its schedule; parameters "
    "and the sums of their gradients lie outside of it."
)


@dataclass(frozen=True)
class ShownPlan(PipelinePlan):
    """A pipeline before it runs. ``print(plan)`` shows it; ``save_html`` draws it.

    Attributes:
        compiled: what this rank's compile did; None for a plan alone.
        rank: which one it is; None for a plan alone.
        layouts: what lies where, of a pipeline over a mesh.
        traffic: there, what one rank of each stage moves in a step over the other dimensions.
    """

    compiled: CompileRecord | None = None
    rank: int | None = None
    layouts: MeshPlan | None = None
    traffic: Mapping[int, tuple[Collective, ...]] = field(default_factory=dict)

    @staticmethod
    def of(plan: PipelinePlan, compiled: CompileRecord | None = None, **more: Any) -> ShownPlan:
        """Returns the same plan, able to show itself."""
        return ShownPlan(plan.table, plan.stages, plan.timeline, compiled, **more)

    def __str__(self) -> str:
        return f"{super().__str__()}\n{self.moved_text}".rstrip()

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
        """Writes a page with the schedule in time, the memory of each rank, and the program.

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
    table, record = plan.table, plan.compiled
    step, bubble = seconds_text(plan.step_s), f"{plan.bubble:.1%}"
    peaks = [plan.peak_bytes(rank) for rank in range(len(table.ranks))]
    fullest, emptiest = bytes_text(max(peaks)), bytes_text(min(peaks))
    ranks, stages = count_text(len(table.ranks), "rank"), count_text(table.num_stages, "stage")
    tiles = [
        tile("Step, predicted", step, f"{table.num_micro_batches} micro-batches"),
        tile("Bubble, predicted", bubble, "of all ranks' time they wait"),
        tile("Fullest rank", fullest, f"the emptiest has {emptiest}"),
    ]
    rows, said, sections = [*plan_rows(plan, measured_s)], list[str](), dict[str, Any]()
    if record is not None:
        tiles += program_tiles(record)
        held = f"memory held by a step of rank {plan.rank}"
        rows += [(held, "bytes", record.held_bytes, None), *recompute_rows(record)]
        said = [_OF_A_RANK.format(plan.rank), *notes(record)]
        sections = compile_sections(record, {f"rank {plan.rank}": record})
    # A rank has several stages in some schedules, so each is named in its rows.
    traffic = {f"stage {number}": moved for number, moved in plan.traffic.items()}
    sentence = (
        f"A step is predicted to take {step}; ranks wait for {bubble} of it. The fullest rank "
        f"holds {fullest}."
    )
    return {
        "title": f"Pipeline: {table.schedule}",
        "subtitle": f"{stages} on {ranks}, {table.num_micro_batches} micro-batches",
        "verdict": {"sentence": sentence, "tiles": tiles, "notes": said},
        "about": about(),
        **sections,
        "pipeline": pipeline_section(plan),
        "mesh": plan.layouts and mesh_section(plan.layouts, traffic),
        "predicted": predicted_section(rows, _LEAD),
    }
