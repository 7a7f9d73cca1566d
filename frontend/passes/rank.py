"""The compile of one rank of a pipeline, between two passes; where a model is cut into stages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from torch import nn

from ...autodiff.training_program import StepProgram
from ...pipeline_parallel.actions import ActionTable
from ...pipeline_parallel.call_costs import CallCosts
from ...pipeline_parallel.coloring import color_balanced, color_by_marks, color_evenly
from ...pipeline_parallel.cut import Colors, Stage
from ...pipeline_parallel.plan import PipelinePlan
from ...pipeline_parallel.rank_order import RankOrder
from ...pipeline_parallel.stage_derivative import StageDerivative
from ...reuse.errors import PipelineError
from ...reuse.ir.costs import OperatorCosts, ProgramCosts, Rates
from ...reuse.ir.program import ModelTensor, Program
from ..marks import STAGE_MARK
from ..tracing.capture_errors import WHOLE, user_path
from .context import Context
from .state import Compilation, Goal, Subject

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


UPDATE = "U"
"""The part of a rank that updates parameters."""


@dataclass(frozen=True)
class RankUpdate:
    """An update of parameters by a rank.

    Attributes:
        unit: its number among the rank's units, after those of the stages.
        after: the stage after whose last action it runs; None if it waits until gradients were
            reduced, after all of them.
        step: takes the gradients of a whole step; its tensors.
    """

    unit: int
    after: int | None
    step: StepProgram

    @property
    def parameters(self) -> list[ModelTensor]:
        """The parameters that it updates."""
        return [self.step.model[i] for i in self.step.updates.parameters]

    @property
    def more(self) -> list[tuple[int, int]]:
        """Returns a key for each tensor of state and numbers that follows the parameters."""
        return [(self.unit, i) for i in range(len(self.parameters), len(self.step.model))]


@dataclass(frozen=True, kw_only=True)
class RankCompilation(Compilation):
    """One rank's compile. Other ranks' stages are cut and differentiated too, for the plan.

    Attributes:
        table: what each rank does.
        rank: which one this is.
        splitting: how the program is cut into stages.
        costs: predicts what calls take.
        rates: of the device.
        withheld_bytes: what a plan that did not fit was short of.
        stages: all of them, in order.
        plain: their derivatives, before it is chosen what they save.
        derived: their derivatives.
        has_replicas: whether gradients are averaged over other pipelines.
        updates: of parameters, by this rank.
        ordered: what this rank does, and when what travels comes and goes.
        predicted: what the pipeline will take.
    """

    table: ActionTable
    rank: int
    splitting: Splitting
    costs: CallCosts
    rates: Rates
    withheld_bytes: int = 0
    stages: tuple[Stage, ...] = ()
    plain: tuple[StageDerivative, ...] = ()
    derived: tuple[StageDerivative, ...] = ()
    has_replicas: bool = False
    updates: tuple[RankUpdate, ...] = ()
    ordered: RankOrder | None = None
    predicted: PipelinePlan | None = None

    @property
    def own(self) -> list[StageDerivative]:
        """The stages of this rank."""
        return [self.derived[stage] for stage in self.table.stages_of(self.rank)]

    @property
    def order(self) -> RankOrder:
        """Returns the actions of this rank in order, once it is linked."""
        assert self.ordered is not None
        return self.ordered

    @property
    def plan(self) -> PipelinePlan:
        """Returns the predicted times and bytes of the pipeline, once they are there."""
        assert self.predicted is not None
        return self.predicted

    @property
    def memory_bytes_per_rank(self) -> int | None:
        """Returns the budget of a rank in bytes, if it decides what is computed again."""
        splitting = self.splitting
        return splitting.memory_bytes_per_rank if splitting.split == "auto" else None


def started(
    context: Context,
    subject: Subject,
    table: ActionTable,
    rank: int,
    splitting: Splitting,
    rates: Rates,
) -> RankCompilation:
    """Returns what is known of a rank before the first pass; its subject is a micro-batch."""
    bounded = splitting.memory_bytes_per_rank is not None
    trade_offs = context.recompute.trade_offs if bounded else None
    # Each operator counts by itself, also where the backend fuses: that is nearer to the time of a
    # layer compared with the head (measured on five decoders), and a cut needs only that ratio.
    costs = ProgramCosts(OperatorCosts(rates, fused=False))
    return RankCompilation(
        context=context,
        report=context.report(train=True),
        goal=Goal("rank", train=True),
        subject=subject,
        table=table,
        rank=rank,
        splitting=splitting,
        costs=CallCosts(context.differentiator, costs, trade_offs),
        rates=rates,
    )
