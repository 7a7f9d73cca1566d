"""What a pipeline's stages hold, and what they compute again so that it fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..autodiff.derivative import Request
from ..backend.planned import PlannedProgram
from ..pipeline_parallel.actions import ActionTable
from ..pipeline_parallel.cut import Stage
from ..pipeline_parallel.memory import StageMemory, step_peak_bytes
from ..pipeline_parallel.stage import StageDerivative
from ..recompute.policy import Budget, Policy
from ..reuse.errors import PipelineError, PlanError
from ..reuse.types import TensorType
from .compiler import Compiler
from .recomputing import ProgramPeaks
from .report import CompileReport


class StageRecompute:
    """Picks what each stage saves: by policy, or so that its rank's memory suffices.

    What this rank's stages hold is linked; what those of other ranks hold is guessed, for the plan
    to show.

    Args:
        compiler: whose policy counts.
        report: gets what is saved and computed again.
        table: what each rank does.
        rank: this one.
        plain: all stages, without any choice.
        memory_bytes_per_rank: what a rank may hold, parameters and gradients included.
    """

    def __init__(
        self,
        compiler: Compiler,
        report: CompileReport,
        table: ActionTable,
        rank: int,
        plain: Sequence[StageDerivative],
        memory_bytes_per_rank: int | None = None,
    ) -> None:
        self._compiler = compiler
        self._report = report
        self._table = table
        self._rank = rank
        self._plain = plain
        self._memory_bytes_per_rank = memory_bytes_per_rank

    def chosen(self, stage: Stage, request: Request) -> Request:
        """Returns the request for a stage's backward with a choice.

        Raises:
            PipelineError: if the stage cannot fit.
        """
        try:
            return self._compiler.recompute.chosen(
                request, self._report, self._peaks(stage), self._policy(stage.index)
            )
        except PlanError as error:
            raise PipelineError(
                f"Stage {stage.index} ({stage.paths[0]} to {stage.paths[-1]}) holds "
                f"{self._table.in_flight()[stage.index]} micro-batches at once; of one: {error}"
            ) from error

    def _policy(self, index: int) -> Policy:
        """The compiler's policy; a bound on a rank becomes one on a micro-batch of a stage."""
        policy = self._compiler.options.recompute
        rank = self._table.rank_of[index]
        own = [self._plain[s] for s in self._table.stages_of(rank)]
        limits = []
        if isinstance(policy, Budget) and policy.saved_bytes is not None:
            limits.append(policy.saved_bytes)
        if self._memory_bytes_per_rank is not None and not isinstance(policy, str):
            limits.append(self._memory_bytes_per_rank - owned_bytes(own))
        if not limits:
            return policy
        beside = {d.stage.index: stage_memory(d, None) for d in own}
        room = max(min(limits) - step_peak_bytes(self._table, rank, beside), 0)
        costs = policy.costs if isinstance(policy, Budget) else "estimated"
        return Budget(saved_bytes=self._share(own, index, room), costs=costs)

    def _share(self, own: Sequence[StageDerivative], index: int, room: int) -> int:
        """What one micro-batch of a stage may hold, if all hold the same part of what they want."""
        depth = self._table.in_flight()
        wanted = {
            d.stage.index: self._peaks(d.stage).guessed(d.request)
            for d in own
            if d.derivative is not None
        }
        total = sum(depth[stage] * num_bytes for stage, num_bytes in wanted.items())
        return room * wanted[index] // max(total, 1)

    def _peaks(self, stage: Stage) -> ProgramPeaks:
        if self._table.splits_backward:  # halves have no planned arena
            return ProgramPeaks(self._saved_bytes, self._saved_bytes)
        peaks = self._compiler.peaks(stage.sourced_program)
        if self._table.rank_of[stage.index] != self._rank:
            return replace(peaks, linked=peaks.guessed)
        return peaks

    def _saved_bytes(self, request: Request) -> int:
        derivative = self._compiler.differentiator.of(request)
        return 0 if derivative is None else derivative.saved_type.num_bytes


def owned_bytes(stages: Sequence[StageDerivative]) -> int:
    """Bytes of the model's tensors that stages use, and of the sums of their gradients."""
    tensors = {id(s.tensor): s.tensor for d in stages for s in d.stage.model_tensors}
    sums = {s.name: t for d in stages for s, t in d.trained_types}
    held = sum(t.numel() * t.element_size() for t in tensors.values())
    return held + _total(list(sums.values()))


def stage_memory(derived: StageDerivative, planned: PlannedProgram | None) -> StageMemory:
    """Returns what a stage holds; without a plan, what it holds beside its arenas."""
    return StageMemory(
        0 if planned is None else planned.plan.peak_bytes,
        0 if planned is None else planned.handed_on_bytes,
        _total(derived.stage.received_types),
        _total(derived.stage.sent_types),
        _total(derived.cotangent_types) if derived.stage.num_sent else 0,
        _total(derived.gradient_types),
        _total([t for _, t in derived.trained_types]),
        0 if planned is None else planned.foreign_peak_bytes,
    )


def _total(types: Sequence[TensorType]) -> int:
    return sum(t.num_bytes for t in types)
