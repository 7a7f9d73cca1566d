"""One rank's pipeline program of a large model compiled, and nothing executed.

The parameters are on the meta device. A rank of a pipeline captures the whole model, splits it,
differentiates every stage, and lowers, links and plans its own; so does this, without the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any

import decoders
import torch
from large_models import GIB, WAYS, LargeModel, title_of, with_and_without_recompute

from lazyinline.backend.kernels.lower import BackendName
from lazyinline.backend.run.rank_program import RankProgram
from lazyinline.frontend.compiler import PASSES, made_by
from lazyinline.frontend.marks import lazy_inline
from lazyinline.frontend.options import LossModel, Options
from lazyinline.frontend.page.page import PageData, ShownPlan, plan_page
from lazyinline.frontend.page.sections import passes_section
from lazyinline.frontend.passes.context import Context
from lazyinline.frontend.passes.rank import RankCompilation, Splitting, started
from lazyinline.frontend.passes.stages import owned_bytes
from lazyinline.frontend.passes.state import Pass, Subject, run
from lazyinline.frontend.report import CompileReport
from lazyinline.pipeline_parallel.actions import ActionTable
from lazyinline.pipeline_parallel.plan import PipelinePlan
from lazyinline.pipeline_parallel.stage_derivative import StageDerivative
from lazyinline.pipeline_parallel.torch_pipelining import action_table
from lazyinline.recompute.planner import Policy
from lazyinline.reuse.errors import LazyInlineError, PlanError
from lazyinline.reuse.ir.costs import CPU

RANKS = ("first", "middle", "last")


@dataclass(frozen=True)
class RankModel(LargeModel):
    """A published size, and the pipeline that trains it.

    Attributes:
        num_stages: one per rank.
        schedule: of the pipeline.
    """

    num_stages: int = 1
    schedule: str = "1F1B"


RANK_MODELS = {
    "175b": RankModel(
        layers=96,
        num_stages=16,
        micro_batches=64,
        sizes={"hidden": 12288, "num_heads": 96, "vocab": 51200, "seq": 2048, "batch": 1},
    ),
}


@dataclass(frozen=True)
class RankReport:
    """What compiling one rank's program took, and what it would need to run.

    Attributes:
        name: of the model.
        num_parameters: numbers the whole model learns.
        rank, num_ranks: which rank of how many.
        schedule: of the pipeline.
        micro_batches: how many one step accumulates.
        num_nodes: graph nodes held of this rank's forward and backward.
        num_nodes_if_inlined: what they would be if every call of every micro-batch were inlined.
        num_pipeline_nodes_if_inlined: the same for all ranks together.
        num_launches: kernel launches of one step of this rank.
        arena_bytes: what its step holds, from one plan over all its actions.
        lower_bound_bytes: largest sum of live bytes.
        owned_bytes: parameters, and the sums of their gradients.
        bubble: predicted part of all ranks' time in which they wait.
        compiled: seconds and nodes pass by pass.
        plan: the stages of all ranks, and the predicted step.
    """

    name: str
    num_parameters: int
    rank: int
    num_ranks: int
    schedule: str
    micro_batches: int
    num_nodes: int
    num_nodes_if_inlined: int
    num_pipeline_nodes_if_inlined: int
    num_launches: int
    arena_bytes: int
    lower_bound_bytes: int
    owned_bytes: int
    bubble: float
    compiled: CompileReport
    plan: PipelinePlan

    @property
    def peak_bytes(self) -> int:
        """All that the rank holds at its fullest."""
        return self.owned_bytes + self.arena_bytes

    def __str__(self) -> str:
        lines = [
            f"{self.name}: {self.num_parameters / 1e9:.1f}e9 parameters; rank {self.rank} of "
            f"{self.num_ranks}, {self.schedule}, {self.micro_batches} micro-batches; nothing "
            "executed",
            f"  {self.num_nodes} nodes held, {self.num_nodes_if_inlined} if inlined "
            f"({self.num_pipeline_nodes_if_inlined} on all ranks); {self.num_launches} launches",
            f"  peak {self.peak_bytes / GIB:.1f} GiB: parameters and gradients "
            f"{self.owned_bytes / GIB:.1f}, arena {self.arena_bytes / GIB:.1f} "
            f"({self.arena_bytes / self.lower_bound_bytes:.4f} of the lower bound)",
            f"  predicted bubble {self.bubble:.1%}",
        ]
        return "\n".join([*lines, self.compiled.details()])


def compile_rank(
    name: str,
    *,
    options: Options,
    rank: int | str = "middle",
    layers: int | None = None,
    micro_batches: int | None = None,
    num_stages: int | None = None,
    sizes: dict[str, Any] | None = None,
    passes: Sequence[Pass] = PASSES,
) -> RankReport:
    """Compiles what one rank of a pipeline runs in a step, from capture to the planned program.

    Args:
        name: one of ``RANK_MODELS``.
        options: the backend makes kernels, which are never run.
        rank: a number, or ``"first"``, ``"middle"`` or ``"last"``.
        layers: instead of the model's own number.
        micro_batches: instead of the model's own number.
        num_stages: instead of the model's own number.
        sizes: instead of the model's own.
        passes: instead of a pipeline's own.

    Raises:
        LazyInlineError: if there is no such rank.
        PlanError: if the backend's memory is not planned.
    """
    large = RANK_MODELS[name]
    lazy_inline(decoders.GptBlock)
    with torch.device("meta"):
        model, args = decoders.gpt(layers or large.layers, **(sizes or large.sizes))
    stages = num_stages or large.num_stages
    table = action_table(large.schedule, stages, stages, micro_batches or large.micro_batches)
    number = rank_number(rank, stages)
    context = Context(options)
    subject = Subject(LossModel(model, None), args, {})
    state = started(context, subject, table, number, Splitting("auto", None), CPU)
    with context.cached(state.report):
        state = run(passes, state)
    num_parameters = sum(p.numel() for p in model.parameters())
    return _report(name, num_parameters, state)


def rank_number(rank: int | str, num_ranks: int) -> int:
    """Returns the number of a rank.

    Raises:
        LazyInlineError: if there is no such rank.
    """
    named = dict(zip(RANKS, (0, num_ranks // 2, num_ranks - 1), strict=True))
    if isinstance(rank, str) and rank.isdecimal():
        rank = int(rank)
    found = named.get(rank, -1) if isinstance(rank, str) else rank
    if not 0 <= found < num_ranks:
        raise LazyInlineError(
            f"There is no rank {rank!r}: give {', '.join(RANKS)}, or 0 to {num_ranks - 1}."
        )
    return found


def _report(name: str, num_parameters: int, state: RankCompilation) -> RankReport:
    table, made = state.table, state.runs
    if not isinstance(made, RankProgram):
        raise PlanError(f"The memory of this rank is not planned: {state.report.unplanned}.")
    state.report.made = made_by(state)
    return RankReport(
        name,
        num_parameters,
        state.rank,
        len(table.ranks),
        table.schedule,
        table.num_micro_batches,
        sum(p.num_nodes() for one in state.own for p in one.parts.values()),
        _inlined_nodes(state.own, table),
        _inlined_nodes(state.derived, table),
        made.num_launches,
        made.plan.held_bytes,
        made.plan.lower_bound_bytes,
        owned_bytes(state.own),
        state.plan.bubble,
        state.report,
        state.plan,
    )


def _inlined_nodes(derived: Sequence[StageDerivative], table: ActionTable) -> int:
    programs = [p for one in derived for p in one.parts.values()]
    return table.num_micro_batches * sum(p.num_nodes_if_inlined() for p in programs)


def bench_rank(
    name: str,
    say: Callable[[str], None],
    *,
    ranks: Sequence[str] = ("middle",),
    backend: BackendName = "inductor",
    **sizes: Any,
) -> list[RankReport]:
    """Compiles ranks of a large pipeline, keeping everything and recomputing everything."""

    def compile_with(rank: str, recompute: Policy) -> RankReport:
        options = Options(backend=backend, recompute=recompute)
        return compile_rank(name, options=options, rank=rank, **sizes)

    return [
        report
        for rank in ranks
        for report in with_and_without_recompute(
            f"{name}, rank {rank},", say, partial(compile_with, rank)
        )
    ]


def rank_page(reports: Sequence[RankReport]) -> PageData:
    """Returns the data of a page on ranks of a large pipeline, compiled and not run.

    Args:
        reports: of each rank, without and with recompute; the first is drawn.
    """
    first = reports[0]
    sides = {
        f"rank {report.rank}, {way}": report.compiled
        for report, way in zip(reports, cycle(WAYS), strict=False)
    }
    page = plan_page(ShownPlan.of(first.plan, first.compiled, rank=first.rank))
    return page | {"title": title_of(first), "passes": passes_section(sides)}
