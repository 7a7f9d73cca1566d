"""What a pipeline's stages hold, and what they compute again so that it fits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from ...autodiff.derivative import Request
from ...backend.link.part_layout import least
from ...pipeline_parallel.schedule.actions import ActionTable
from ...pipeline_parallel.schedule.rank_memory import StageMemory, bytes_beside
from ...pipeline_parallel.split.cut import Stage
from ...pipeline_parallel.stages.split_backward import Splitter
from ...pipeline_parallel.stages.stage import StageDerivative
from ...recompute.policy import Budget, Policy
from ...reuse.errors import PipelineError, PlanError
from ...reuse.ir.program import Program
from ...reuse.ir.types import TensorType
from ..compiler import Compiler, Linked
from ..recomputing import ProgramPeaks
from ..report import CompileReport
from .rank_compile import parts_of, unit_of


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
        self._withheld_bytes = 0

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

    @property
    def limit_bytes(self) -> int | None:
        """What a step may hold on this rank; None if there is no such bound."""
        return self._limit_bytes([self._plain[s] for s in self._table.stages_of(self._rank)])

    def tighten(self, num_bytes: int) -> None:
        """Leaves so much less room, after a plan that did not fit."""
        self._withheld_bytes += num_bytes

    def _limit_bytes(self, own: Sequence[StageDerivative]) -> int | None:
        policy = self._compiler.options.recompute
        limits = []
        if isinstance(policy, Budget) and policy.saved_bytes is not None:
            limits.append(policy.saved_bytes)
        if self._memory_bytes_per_rank is not None and not isinstance(policy, str):
            limits.append(self._memory_bytes_per_rank - owned_bytes(own))
        return min(limits, default=None)

    def _policy(self, index: int) -> Policy:
        """The compiler's policy; a bound on a rank becomes one on a micro-batch of a stage."""
        policy = self._compiler.options.recompute
        own = [self._plain[s] for s in self._table.stages_of(self._table.rank_of[index])]
        limit = self._limit_bytes(own)
        if limit is None:
            return policy
        beside = 0 if self._is_planned else self._beside(own, index)
        room = max(limit - self._withheld_bytes - beside, 0)
        costs = policy.costs if isinstance(policy, Budget) else "estimated"
        return Budget(saved_bytes=self._share(own, index, room), costs=costs)

    def _beside(self, own: Sequence[StageDerivative], index: int) -> int:
        beside = {d.stage.index: stage_memory(d) for d in own}
        return bytes_beside(self._table, self._table.rank_of[index], beside)

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
        guessed = partial(self._flight_bytes, stage, self._compiler.guessed)
        if self._table.rank_of[stage.index] != self._rank:
            return ProgramPeaks(guessed, guessed)
        made = partial(self._compiler.linked, report=CompileReport(True, "", ""))
        return ProgramPeaks(partial(self._flight_bytes, stage, made), guessed)

    def _flight_bytes(
        self, stage: Stage, link: Callable[[list[Program]], Linked], request: Request
    ) -> int:
        """What one micro-batch of a stage holds, with its share of the scratch, if it is planned.

        Otherwise what its forward saves.
        """
        derivative = self._compiler.differentiator.of(request)
        if derivative is None:
            return 0
        plain = self._plain[stage.index]
        halves = None
        if self._table.splits_backward:
            halves = Splitter().split(derivative.backward, range(len(plain.gradients_sent)))
        derived = replace(plain, derivative=derivative, request=request, halves=halves)
        programs = parts_of(derived)
        linked = link(list(programs.values()))
        if not linked.kernel_lists:
            return derivative.saved_type.num_bytes
        flats = dict(zip(programs, linked.flats, strict=True))
        unit = unit_of(derived, flats, linked, least)
        return unit.bytes_per_flight(self._table.in_flight()[stage.index])

    @property
    def _is_planned(self) -> bool:
        return self._compiler.options.backend == "inductor"


def owned_bytes(stages: Sequence[StageDerivative]) -> int:
    """Bytes of the model's tensors that stages use, and of the sums of their gradients."""
    tensors = {id(s.tensor): s.tensor for d in stages for s in d.stage.model_tensors}
    sums = {s.name: t for d in stages for s, t in d.trained_types}
    held = sum(t.numel() * t.element_size() for t in tensors.values())
    return held + _total(list(sums.values()))


def stage_memory(derived: StageDerivative) -> StageMemory:
    """Returns what a stage holds beside what its micro-batches keep."""
    return StageMemory(
        _total(derived.stage.received_types),
        _total(derived.stage.sent_types),
        _total(derived.cotangent_types) if derived.stage.num_sent else 0,
        _total(derived.gradient_types),
        _total([t for _, t in derived.trained_types]),
    )


def _total(types: Sequence[TensorType]) -> int:
    return sum(t.num_bytes for t in types)
