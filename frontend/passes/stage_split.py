"""Where a model is cut into stages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from torch import nn

from ...pipeline_parallel.schedule.actions import ActionTable
from ...pipeline_parallel.split.balance import color_balanced
from ...pipeline_parallel.split.call_costs import CostModel
from ...pipeline_parallel.split.coloring import color_by_marks, color_evenly
from ...pipeline_parallel.split.cut import Colors
from ...reuse.errors import PipelineError
from ...reuse.ir.program import Program
from ..marks import STAGE_MARK

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
    costs: CostModel,
) -> Colors:
    """Returns the stage of each call: by marks if there are any, else as asked."""
    marks = {
        path: module.__dict__[STAGE_MARK]
        for path, module in model.named_modules()
        if STAGE_MARK in module.__dict__
    }
    if marks:
        return color_by_marks(program, marks, table.num_stages)
    if splitting.split == "marked":
        raise PipelineError('split="marked", and no module is marked with lazyinline.stage.')
    if splitting.split == "even":
        return color_evenly(program, table.num_stages)
    return color_balanced(program, costs, table, splitting.memory_bytes_per_rank)
