"""Passes that fit programs to memory by trial compiles, and those of one pipeline rank.

A rank cuts the model into stages, differentiates them, fits them to memory, and links them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter

from ...autodiff.derivative import Request
from ...autodiff.traces.torch_make_fx import SizesAt
from ...autodiff.training_program import NotUpdatedError, step_of_sums, with_updates
from ...backend.link.unit_layout import UnitLayout, least
from ...pipeline_parallel.cut import Stage, cut_program
from ...pipeline_parallel.plan import make_plan, rank_order
from ...pipeline_parallel.process_groups import users_of
from ...pipeline_parallel.stage_derivative import Splitter, StageDerivative
from ...pipeline_parallel.stage_derivative import differentiate_stages as derivatives_of
from ...recompute.planner import Budget, Policy
from ...reuse.errors import PipelineError, PlanError
from ...reuse.ir.program import Leaf, ModelTensor
from ...reuse.ir.torch_symbols import Values
from .context import ProgramPeaks, leaves_of
from .link import held_bytes, hindrance, launches, linked
from .numbers import forget_numbers, kernel_at_numbers, with_numbers
from .programs import PARTS, decompose, estimate, lower, repeat_micro_batches, with_derivative
from .rank import (
    RankCompilation,
    RankUpdate,
    colors_of,
    held_sums,
    named_parts,
    plan_rank,
    unit_of,
    update_name,
)
from .state import Compilation, Pass, State, apply, compile_pass


class StageRecompute:
    """Chooses what each stage saves: by policy, or so that its rank's memory suffices.

    The memory of this rank's stages is measured on a linked program. That of other ranks' stages,
    which only the printed plan shows, is estimated.
    """

    def __init__(self, state: RankCompilation) -> None:
        self._state = state
        self._table = state.table
        self._recompute = state.context.recompute

    def chosen(self, stage: Stage, request: Request) -> Request:
        """Returns the request for a stage's backward, with the choice of what it saves."""
        try:
            return self._recompute.chosen(request, self._peaks(stage), self._policy(stage.index))
        except PlanError as error:
            raise PipelineError(
                f"Stage {stage.index} ({stage.paths[0]} to {stage.paths[-1]}) holds "
                f"{self._table.in_flight()[stage.index]} micro-batches at once; of one: {error}"
            ) from error

    def _policy(self, index: int) -> Policy:
        """Returns the policy; a memory bound of a rank becomes one of a stage's micro-batch."""
        policy = self._state.policy
        rank = self._table.rank_of[index]
        limit = limit_bytes(self._state, rank)
        if limit is None:
            return policy
        own = _stages_of(self._state, rank)
        room = max(limit - self._state.withheld_bytes, 0)
        return Budget(saved_bytes=self._share(own, index, room))

    def _share(self, own: Sequence[StageDerivative], index: int, room: int) -> int:
        """Returns the bytes that one micro-batch of a stage may hold, its share of ``room``.

        Each stage gets the same fraction of what it would hold without recompute.
        """
        depth = self._table.in_flight()
        # Estimates suffice for a proportion; to link every stage would compile each twice.
        wanted = {
            d.stage.index: self._peaks(d.stage).guessed(d.request)
            for d in own
            if d.derivative is not None
        }
        total = sum(depth[stage] * num_bytes for stage, num_bytes in wanted.items())
        return room * wanted[index] // max(total, 1)

    def _peaks(self, stage: Stage) -> ProgramPeaks:
        guessed = partial(self._flight_bytes, stage, estimate)
        if self._table.rank_of[stage.index] != self._state.rank:
            return ProgramPeaks(guessed, guessed)
        return ProgramPeaks(partial(self._flight_bytes, stage, lower), guessed)

    def _flight_bytes(self, stage: Stage, kernels: Pass, request: Request) -> int:
        """Returns the bytes that one micro-batch of a stage holds, with its share of the scratch.

        If memory is not planned, these are the bytes that its forward saves.
        """
        derivative = self._state.context.differentiator.of(request)
        if derivative is None:
            return 0
        plain = self._state.plain[stage.index]
        halves = None
        if self._table.splits_backward:
            halves = Splitter().split(
                derivative.backward, frozenset(range(len(plain.gradients_sent)))
            )
        derived = replace(plain, derivative=derivative, request=request, halves=halves)
        # Linked as the rank will run it: what a micro-batch holds depends on where halves end.
        state = replace(self._state, programs=named_parts([derived]))
        state = linked(apply((decompose, kernels), state))
        if hindrance(state) is not None:
            return derivative.saved_type.num_bytes
        unit = unit_of(
            derived, state.flats, partial(UnitLayout, kernel_lists=launches(state), plan=least)
        )
        return unit.bytes_per_flight(self._table.in_flight()[stage.index])


def _stages_of(state: RankCompilation, rank: int) -> list[StageDerivative]:
    return [state.plain[stage] for stage in state.table.stages_of(rank)]


def limit_bytes(state: RankCompilation, rank: int) -> int | None:
    """Returns the bytes that a step may hold on a rank besides its own tensors; None if unbounded.

    A pipeline's memory per rank includes the model's tensors and gradient sums; a budget does not.
    """
    policy, memory = state.context.options.recompute, state.memory_bytes_per_rank
    limits = []
    if isinstance(policy, Budget) and policy.saved_bytes is not None:
        limits.append(policy.saved_bytes)
    # A named policy determines what is saved, whatever the memory.
    if memory is not None and not isinstance(policy, str):
        held = held_sums(state) if rank == state.rank else ()
        limits.append(memory - owned_bytes(_stages_of(state, rank), held))
    return min(limits, default=None)


def owned_bytes(stages: Sequence[StageDerivative], held: Collection[str] = ()) -> int:
    """Returns the bytes of stages' tensors and gradient sums, less sums ``held`` in the arena."""
    tensors = {id(s.tensor): s.tensor for d in stages for s in d.stage.model_tensors}
    sums = {s.name: t for d in stages for s, t in d.trained_types if s.name not in held}
    own = sum(t.numel() * t.element_size() for t in tensors.values())
    return own + sum(t.num_bytes for t in sums.values())


@compile_pass("split", goals=("rank",))
def split(state: RankCompilation) -> RankCompilation:
    """Colours calls by stage; cuts shared closures where the colours change."""
    program, table = state.programs[PARTS[0]], state.table
    assert state.subject is not None
    model, colors = state.subject.model, state.colors
    if colors is None:
        colors, _ = colors_of(model, program, state.splitting, table, state.costs)
    stages = tuple(cut_program(program, colors, table.num_stages))
    programs = {f"stage {stage.index}": stage.program for stage in stages}
    return replace(state, colors=colors, stages=stages, programs=programs)


@compile_pass("autodiff", goals=("rank",))
def differentiate_stages(state: RankCompilation) -> RankCompilation:
    """Makes a forward and a backward of each stage, from the last stage to the first."""
    plain = tuple(derivatives_of(state.stages, state.context.differentiator, halves=False))
    return replace(state, plain=plain, derived=plain, programs=named_parts(plain))


@compile_pass("recompute", goals=("rank",))
def choose_stage_recompute(state: RankCompilation) -> RankCompilation:
    """Chooses what each stage saves; splits backwards in two if the schedule wants it."""
    derived = derivatives_of(
        state.stages,
        state.context.differentiator,
        halves=state.table.splits_backward,
        chosen=StageRecompute(state).chosen,
    )
    state = replace(state, derived=tuple(derived))
    requests = [one.request for one in state.own if one.derivative is not None]
    state.context.recompute.note(requests, state.report)
    return replace(state, programs=named_parts(state.own))


@compile_pass("update", goals=("rank",), wanted=lambda state: bool(state.goal.updates))
def update_stages(state: RankCompilation) -> RankCompilation:
    """Adds the optimizer's updates, each after the last stage that uses its parameters."""
    members = frozenset[int]().union(*(group.members for group in state.goal.updates))
    users, types = users_of(state.derived, state.table)
    actions = state.table.ranks[state.rank]
    # The schedule's last action of a stage is the last that adds to its gradients.
    ends = {action.stage: number for number, action in enumerate(actions)}
    own = sorted(state.own, key=lambda one: ends[one.stage.index])
    last = {source: one.stage.index for one in own for source in one.stage.model_tensors}
    after: dict[int | None, list[ModelTensor]] = defaultdict(list)
    for source in last:
        if source.name in types and id(source.tensor) in members:
            # Other ranks add to this gradient: the update waits for the reduced sum.
            is_reduced = state.has_replicas or len(users[source.name]) > 1
            after[None if is_reduced else last[source]].append(source)
    updates = []
    for stage, sources in after.items():
        step = step_of_sums([(source, types[source.name]) for source in sources])
        # Units of updates are numbered after those of the stages.
        unit = state.table.num_stages * (2 if stage is None else 1) + (stage or 0)
        updates.append(RankUpdate(unit, stage, with_updates(step, state.goal.updates)))
    programs = {update_name(one): one.step.program for one in updates}
    return replace(state, updates=tuple(updates), programs={**state.programs, **programs})


@compile_pass("link", "flat", goals=("rank",))
def link_rank(state: RankCompilation) -> RankCompilation:
    """Lays out and plans all that the rank runs, in the schedule's order: the deferred inline."""
    derived = state.derived
    forward = {d.stage.index for d in derived if d.stage.sent_types}
    back = {d.stage.index for d in derived if d.gradient_types}
    order = rank_order(state.table, state.rank, forward, back)
    state = linked(replace(state, ordered=order))
    why, report = hindrance(state), state.report
    if why is not None and state.goal.updates:
        raise NotUpdatedError(f"memory is not planned: {why.reason}")
    state = replace(state, unplanned=why)
    planned = plan_rank(state)
    state = replace(state, runs=planned)
    if why is not None:
        report.unplanned = why.reason
        return state
    report.num_launches = planned.num_launches
    report.peak_bytes = report.arena_bytes = planned.plan.arena.peak_bytes
    report.lower_bound_bytes = planned.plan.lower_bound_bytes
    report.held_bytes = planned.plan.held_bytes
    return state


@compile_pass("predict", "flat", goals=("rank",))
def predict(state: RankCompilation) -> RankCompilation:
    """Simulates the schedule: the time of a step over all ranks, and its bubble."""
    plan = make_plan(state.derived, state.table, state.costs.program, state.rates)
    return replace(state, predicted=plan)


def of_rank(state: RankCompilation, rank: int) -> RankCompilation:
    """Returns the state for another rank, before its kernels are made."""
    state = replace(state, rank=rank)
    return replace(state, programs=named_parts(state.own))


@compile_pass("recompute", goals=("module", "step"), wanted=attrgetter("wants_recompute"))
def choose_recompute(state: State) -> State:
    """Chooses per call what the forward saves and the backward computes again (where asked for)."""
    assert state.request is not None
    sizes, recompute = state.captured.sizes, state.context.recompute
    if sizes is not None:  # measured at the sizes of the call that is compiled
        recompute = recompute.at(sizes.example)
    trials = Trials(state)
    try:
        request = recompute.chosen(state.request, trials.peaks, state.policy)
        return with_derivative(state, request, state.context.differentiator.of(request))
    finally:
        trials.end()


class Trials:
    """Measures the memory that a program holds under a request, by running the later passes."""

    def __init__(self, state: Compilation) -> None:
        self._state = state
        sizes = state.captured.sizes
        self._values = None if sizes is None else sizes.example
        self._sizes = SizesAt(self._values or Values())
        self._made, self._guessed = dict[Leaf, Leaf](), dict[Leaf, Leaf]()
        self.peaks = ProgramPeaks(lambda r: self._held(r, lower), lambda r: self._held(r, estimate))

    def _held(self, request: Request, kernels: Pass) -> int:
        passes = (repeat_micro_batches, decompose, kernels)
        derivative = self._state.context.differentiator.of(request)
        state = linked(apply(passes, with_derivative(self._state, request, derivative)))
        if self._values is None:
            return held_bytes(state)
        known = self._made if state.kernels == "made" else self._guessed
        for leaf in leaves_of(state.linked):
            if leaf not in known:
                known[leaf] = (
                    kernel_at_numbers(state.context, leaf, self._values)
                    if state.kernels == "made"
                    else self._sizes.leaf(leaf)
                )
        return held_bytes(with_numbers(state, self._values, known))

    def end(self) -> None:
        """Drops the kernels that trials made for numbers."""
        forget_numbers(self._state.context, self._made)
