"""Where a model is cut into stages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from torch import nn

from ...pipeline_parallel.schedule.actions import ActionTable
from ...pipeline_parallel.split.balance import color_balanced
from ...pipeline_parallel.split.call_costs import CallCosts
from ...pipeline_parallel.split.coloring import color_by_marks, color_evenly
from ...pipeline_parallel.split.cut import Colors
from ...reuse.errors import PipelineError
from ...reuse.ir.program import Program
from ..marks import STAGE_MARK
from ..tracing.capture_errors import WHOLE, user_path

Split: TypeAlias = Literal["auto", "even", "marked"]
SPLITS: tuple[Split, ...] = get_args(Split)


@dataclass(frozen=True)
class Splitting:
    """How a model is split into stages."""

    split: Split
    memory_bytes_per_rank: int | None = None


def colors_of(
    model: nn.Module,
    program: Program,
    splitting: Splitting,
    table: ActionTable,
    costs: CallCosts,
) -> Colors:
    """Returns the stage of each call: by marks if there are any, else as asked."""
    marks = _marks(model, program)
    if marks:
        return color_by_marks(program, marks, table.num_stages)
    if splitting.split == "marked":
        raise PipelineError('split="marked", and no module is marked with lazyinline.stage.')
    if splitting.split == "even":
        return color_evenly(program, table.num_stages)
    return color_balanced(program, costs, table, splitting.memory_bytes_per_rank)


def _marks(model: nn.Module, program: Program) -> dict[str, int]:
    """Returns the user's marks by the paths that calls have."""
    modules = dict(model.named_modules())
    marks = {p: m.__dict__[STAGE_MARK] for p, m in modules.items() if STAGE_MARK in m.__dict__}
    # Where the whole model is one block, its calls are inside of that block's path.
    if f"{WHOLE}.{WHOLE}" not in modules and any(call.path == WHOLE for call in program.calls):
        return marks
    return {"" if p == WHOLE else user_path(model, p): stage for p, stage in marks.items()}
