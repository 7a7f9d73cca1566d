"""The compile of one pipeline rank: its state, the cut into stages, and all stages as one program.

The stages of a rank share one arena, planned in the order of the schedule.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, TypeAlias

from torch import nn

from ...autodiff.training_program import StepProgram
from ...backend.launches.kernel_list import KernelList
from ...backend.link.link import FlatProgram
from ...backend.link.placement import Place, Tools, place
from ...backend.link.unit_layout import PartSpec, Source, UnitLayout, UnitResults
from ...backend.run.rank_program import RankPlan, RankProgram, Run, Schedule
from ...pipeline_parallel import coloring
from ...pipeline_parallel.actions import (
    ACTION_TEXT,
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    ActionTable,
)
from ...pipeline_parallel.cut import Colors, Stage
from ...pipeline_parallel.plan import PipelinePlan, RankOrder
from ...pipeline_parallel.stage_derivative import StageDerivative
from ...reuse.errors import PipelineError, check_choice
from ...reuse.ir.costs import OperatorCosts, ProgramCosts, Rates
from ...reuse.ir.leaf import flat_types
from ...reuse.ir.program import Leaf, ModelTensor, Program
from ...reuse.ir.types import TensorType, Wire
from ..marks import STAGE_MARK
from ..tracing.frames import WHOLE, user_path
from .context import Context
from .link import devices_of, launches
from .state import Compilation, Goal, OnMesh, Subject

Split: TypeAlias = Literal["auto", "even", "marked"]


@dataclass(frozen=True)
class Splitting:
    """How to split a model into stages."""

    split: Split
    memory_bytes_per_rank: int | None = None

    def __post_init__(self) -> None:
        check_choice(PipelineError, Split, split=self.split)


def colors_of(
    model: nn.Module,
    program: Program,
    splitting: Splitting,
    table: ActionTable,
    costs: coloring.CallCosts,
    pieces: coloring.Pieces | None = None,
) -> tuple[Colors, float | None]:
    """Returns the stage of each call: by marks if there are any, else as ``splitting`` says.

    The second result is the predicted seconds of a step, if the stages are balanced by time.
    """
    marks = _marks(model, program)
    if marks:
        return coloring.color_by_marks(program, marks, table.num_stages), None
    if splitting.split == "marked":
        raise PipelineError('split="marked", and no module is marked with lazyinline.stage.')
    if splitting.split == "even":
        return coloring.color_evenly(program, table.num_stages), None
    return coloring.color_balanced(program, costs, table, splitting.memory_bytes_per_rank, pieces)


def _marks(model: nn.Module, program: Program) -> dict[str, int]:
    """Returns the stage of each marked module, keyed by path as in calls."""
    modules = dict(model.named_modules())
    marks = {p: m.__dict__[STAGE_MARK] for p, m in modules.items() if STAGE_MARK in m.__dict__}
    # If the whole model is one block, the paths of its calls keep the prefix of that block.
    if f"{WHOLE}.{WHOLE}" not in modules and any(call.path == WHOLE for call in program.calls):
        return marks
    return {"" if p == WHOLE else user_path(model, p): stage for p, stage in marks.items()}


UPDATE = "U"  # the kind of a part that updates parameters


@dataclass(frozen=True)
class RankUpdate:
    """An optimizer update that a rank runs."""

    unit: int  # its number among the rank's units, after those of the stages
    # The stage whose last action it follows; None if it runs at the end of the step, once gradients
    # are reduced.
    after: int | None
    step: StepProgram  # the update as a program, whose inputs are the gradients of a whole step

    @property
    def parameters(self) -> list[ModelTensor]:
        """The parameters that it updates."""
        return [self.step.model[i] for i in self.step.updates.parameters]

    @property
    def more(self) -> list[tuple[int, int]]:
        """A key for each input after the parameters: optimizer state and numbers."""
        return [(self.unit, i) for i in range(len(self.parameters), len(self.step.model))]


@dataclass(frozen=True, kw_only=True)
class RankCompilation(Compilation):
    """The state of one rank's compile. It has the stages of all ranks, to predict the pipeline."""

    table: ActionTable
    rank: int
    splitting: Splitting
    costs: coloring.CallCosts  # predicts the time and memory of calls
    rates: Rates
    # Subtracted from the memory bound, after a plan that exceeded it by so much.
    withheld_bytes: int = 0
    colors: Colors | None = None  # the stage of each call, if known before ``split``
    stages: tuple[Stage, ...] = ()  # the stages of all ranks, in order
    plain: tuple[StageDerivative, ...] = ()  # their derivatives without recompute
    derived: tuple[StageDerivative, ...] = ()  # their derivatives as they will run
    has_replicas: bool = False  # whether gradients are averaged over other pipelines
    updates: tuple[RankUpdate, ...] = ()  # the optimizer updates of this rank
    # The actions of this rank, and by which of them sends and receives are done.
    ordered: RankOrder | None = None
    predicted: PipelinePlan | None = None  # the predicted time and memory of the pipeline

    @property
    def own(self) -> list[StageDerivative]:
        """The stages of this rank."""
        return [self.derived[stage] for stage in self.table.stages_of(self.rank)]

    @property
    def planned(self) -> RankProgram | None:
        """The linked rank, if its memory is planned."""
        return self.runs if isinstance(self.runs, RankProgram) and not self.unplanned else None

    @property
    def order(self) -> RankOrder:
        """The actions of this rank in order, once it is linked."""
        assert self.ordered is not None
        return self.ordered

    @property
    def plan(self) -> PipelinePlan:
        """The predicted time and memory of the pipeline, once the pass ``predict`` has run."""
        assert self.predicted is not None
        return self.predicted

    @property
    def memory_bytes_per_rank(self) -> int | None:
        """The memory bound of a rank, if recompute must keep it (with ``split="auto"``)."""
        splitting = self.splitting
        return splitting.memory_bytes_per_rank if splitting.split == "auto" else None


def started(
    context: Context,
    subject: Subject,
    table: ActionTable,
    rank: int,
    splitting: Splitting,
    rates: Rates,
    on_mesh: OnMesh | None = None,
) -> RankCompilation:
    """Returns the state before the first pass; the inputs of its subject are one micro-batch."""
    bounded = splitting.memory_bytes_per_rank is not None
    trade_offs = context.recompute.trade_offs if bounded else None
    # Operators are costed unfused even if the backend fuses them: measured on five decoders, this
    # predicts better the time of a layer relative to the head, and a cut needs only that ratio.
    of_mesh = None if on_mesh is None else on_mesh.costs
    costs = ProgramCosts(of_mesh or OperatorCosts(rates, fused=False))
    return RankCompilation(
        context=context,
        report=context.report(train=True),
        goal=Goal("rank", train=True, on_mesh=on_mesh),
        subject=subject,
        table=table,
        rank=rank,
        splitting=splitting,
        costs=coloring.CallCosts(context.differentiator, costs, trade_offs),
        rates=rates,
    )


# Numbers of phases per part to try: few suit large scratch, many suit large slabs.
_PHASES = (1, 2, 4, 8, 16)
# The most phases of all actions together: the time of planning grows with their number.
_MAX_PHASES = 2048


def plan_rank(state: RankCompilation) -> RankProgram:
    """Plans all that a linked rank runs in one arena; if unplanned, only what is sent."""
    schedule = _schedule(state, sorted(one.stage.index for one in state.own))
    kernel_lists, tools = _launches_and_tools(state)
    plan_regions = partial(place, tools=tools)
    results: UnitResults = "planned" if state.unplanned is None else "allocated"
    made = partial(UnitLayout, kernel_lists=kernel_lists, plan=plan_regions, results=results)

    def planned(num_phases: int) -> RankPlan:
        units = {one.stage.index: unit_of(one, state.flats, made, num_phases) for one in state.own}
        for one in state.updates:
            flat = state.flats[update_name(one)]
            types = [flat.slot_types[slot] for slot in flat.inputs]
            spec = PartSpec(UPDATE, UPDATE, flat, [Source("model", i) for i in range(len(types))])
            units[one.unit] = made([spec], tensor_types=types, given_types=[])
        return RankPlan(units, schedule, plan_regions, places, list(held_sums(state).values()))

    places, most = tensor_places(state), _MAX_PHASES if state.unplanned is None else 0
    tried = [n for n in _PHASES if n == 1 or n * len(state.order.actions) <= most]
    best = min(map(planned, tried), key=lambda plan: plan.held_bytes)
    return RankProgram(best, tools)


def _launches_and_tools(state: RankCompilation) -> tuple[Mapping[Leaf, KernelList], Tools]:
    """Returns the kernel list of each leaf (unplanned, one that allocates), and its tools."""
    if state.unplanned is None:
        return launches(state), state.context.tools
    device = devices_of(state.linked)[0]
    for one in state.own:
        for type_ in (*one.stage.received_types, *one.stage.sent_types):
            if type_.device != device:
                raise PipelineError(
                    f"Stage {one.stage.index} works on {device}, and a neighbour hands it, or gets "
                    f"from it, a tensor on {type_.device}. Move that to {device} in the forward."
                )
    tools = replace(state.context.tools, place=Place(device=device))
    return state.context.closures_of(state.linked), tools


def tensor_places(state: RankCompilation) -> dict[int, list[int]]:
    """Returns for each unit the positions of its model tensors and sums in the rank's list.

    That list has all tensors of the model, then the sums of :func:`sum_names`, then the state and
    the numbers of each update, then the sums in the arena.
    """
    keys: list[object] = [*model_places(state.captured.program), *sum_names(state)]
    keys += [key for one in state.updates for key in one.more]
    places = {key: place for place, key in enumerate((*keys, *held_sums(state)))}
    tensors: dict[int, list[object]] = {
        d.stage.index: [*map(id, d.stage.model_tensors), *(s.name for s in d.trained)]
        for d in state.own
    }
    for one in state.updates:
        own = one.parameters
        tensors[one.unit] = [*(s.name for s in own), *map(id, own), *one.more]
    return {unit: [places[key] for key in found] for unit, found in tensors.items()}


def held_sums(state: RankCompilation) -> dict[str, TensorType]:
    """Returns the types of the gradient sums that lie in the arena, by parameter name.

    They are those that an update within the schedule consumes, so that their memory is reused.
    """
    held = {s.name for one in state.updates if one.after is not None for s in one.parameters}
    return {s.name: t for d in state.own for s, t in d.trained_types if s.name in held}


def model_places(program: Program) -> dict[int, int]:
    """Returns the position of each model tensor of a program among its model tensors."""
    own = [s for s in program.sources if isinstance(s, ModelTensor)]
    return {id(source): place for place, source in enumerate(own)}


def sum_names(state: RankCompilation) -> list[str]:
    """Returns the names of the parameters whose gradients a rank sums outside the arena."""
    names = dict.fromkeys(s.name for d in state.own for s in d.trained)
    names |= dict.fromkeys(s.name for one in state.updates for s in one.parameters)
    held = held_sums(state)
    return [name for name in names if name not in held]


def update_name(update: RankUpdate) -> str:
    """Names an update among the programs of a rank."""
    where = "the reduction" if update.after is None else f"stage {update.after}"
    return f"update after {where}"


def part_name(derived: StageDerivative, kind: str) -> str:
    """Names a part of a stage among the programs of a rank."""
    return f"stage {derived.stage.index}, {ACTION_TEXT[kind]}"


def named_parts(stages: Iterable[StageDerivative]) -> dict[str, Program]:
    """Returns the programs of stages, under their names among those of the rank."""
    return {part_name(one, kind): p for one in stages for kind, p in one.parts.items()}


def _schedule(state: RankCompilation, stages: Sequence[int]) -> Schedule:
    order, runs, due = state.order, list[Run](), dict[Run, list[Run]]()
    last = {action.stage: number for number, action in enumerate(order.actions)}
    # Per action, the number of its run; per n, the number of runs once n actions have run.
    places, ends = list[int](), [0]
    for number, action in enumerate(order.actions):
        places.append(len(runs))
        runs.append(Run(action.stage, action.kind, action.micro_batch))
        ends.append(len(runs))
        is_last = number == last[action.stage]
        behind = [u.unit for u in state.updates if is_last and u.after == action.stage]
        due[runs[-1]] = [Run(unit, UPDATE, 0) for unit in behind]
        runs += due[runs[-1]]
    places.append(len(runs))
    runs += [Run(one.unit, UPDATE, 0) for one in state.updates if one.after is None]
    ways = {FORWARD: FORWARD, BACKWARD: BACKWARD, BACKWARD_INPUT: BACKWARD}
    posted, arriving, delivered = {}, {}, {}
    for number, action in enumerate(order.actions):
        if action.kind in ways:
            key = (action.stage, ways[action.kind], action.micro_batch)
            arriving[key] = places[number]
            # A receive is posted before an update that is due: PyTorch's runtime does not wait.
            if action in order.posted:
                posted[key] = ends[order.posted[action]]
            if action in order.delivered:
                delivered[key] = places[order.delivered[action]]
    # Neighbouring stages on one rank share a buffer instead of sending.
    pairs = [(stage, stage + 1) for stage in stages if stage + 1 in stages]
    handed = [hand for a, b in pairs for hand in ((a, FORWARD, b), (b, BACKWARD, a))]
    return Schedule(runs, posted, arriving, delivered, handed, due)


# ---- one stage -------------------------------------------------------------------------------


def unit_of(
    derived: StageDerivative,
    flats: Mapping[str, FlatProgram],
    made: Callable[..., UnitLayout],
    num_phases: int = 1,
) -> UnitLayout:
    """Lays out the parts of a stage."""
    stage = derived.stage
    sums = [type_ for _, type_ in derived.trained_types]
    seed = [] if stage.num_sent else [derived.cotangent_types[0]]
    parts = part_specs(derived, flats)
    given = [*_given_types(derived), *seed]
    types = [*stage.model_types, *sums]
    return made(parts, tensor_types=types, given_types=given, num_phases=num_phases)


def part_specs(derived: StageDerivative, flats: Mapping[str, FlatProgram]) -> list[PartSpec]:
    """Describes the parts of a stage, in the order in which a micro-batch runs them."""
    named = {kind: flats[part_name(derived, kind)] for kind in derived.parts}
    parts = [_forward(derived, named[FORWARD])]
    if derived.derivative is not None:
        seed = Source("given", len(_given_types(derived)))
        parts += _backwards(derived, named, seed, len(derived.stage.model_tensors))
    return parts


def _given_types(derived: StageDerivative) -> list[TensorType]:
    stage = derived.stage
    own = zip(stage.sources, stage.program.inputs[stage.num_received :], strict=True)
    return flat_types([v.type for source, v in own if not isinstance(source, ModelTensor)])


def _forward(derived: StageDerivative, flat: FlatProgram) -> PartSpec:
    stage = derived.stage
    sources = [Source("inbox", i) for i in range(stage.num_received)]
    models, given = itertools.count(), itertools.count()
    for source in stage.sources:
        is_model = isinstance(source, ModelTensor)
        sources.append(Source("model", next(models)) if is_model else Source("given", next(given)))
    return PartSpec(
        FORWARD,
        FORWARD,
        flat,
        sources,
        [Wire(t) for t in stage.received_types],
        list(enumerate(map(Wire, stage.sent_types))),
        range(stage.num_sent, len(stage.program.outputs)),
        written=stage.written_tensors,
    )


def _backwards(
    derived: StageDerivative, flats: Mapping[str, FlatProgram], seed: Source, num_models: int
) -> list[PartSpec]:
    """Describes a stage's backward, whole or in halves, which adds gradients to their sums."""
    operands = _operands(derived, seed)
    inboxes = [] if derived.stage.num_sent == 0 else [Wire(t) for t in derived.cotangent_types]
    sent = list(enumerate(map(Wire, derived.gradient_types)))
    trained = range(len(derived.trained))
    halves = derived.halves
    if halves is None:
        sources = [s for group in operands for s in group]
        sums = {len(sent) + i: num_models + i for i in trained}
        flat = flats[BACKWARD]
        return [PartSpec(BACKWARD, BACKWARD, flat, sources, inboxes, sent, sums=sums)]
    parts = []
    carried: list[Source] = []
    way = BACKWARD_WEIGHT
    if halves.early is None:  # then the late half receives the cotangents
        way, late_inboxes = BACKWARD, inboxes
    else:
        late_inboxes = []
        flat = flats[BACKWARD_INPUT]
        sources = [s for i in halves.early_inputs for s in operands[i]]
        parts.append(PartSpec(BACKWARD_INPUT, BACKWARD, flat, sources, inboxes, sent))
        after = range(len(sent), len(flat.outputs))
        carried = [Source("output", i, BACKWARD_INPUT) for i in after]
    if halves.late is not None:
        flat = flats[BACKWARD_WEIGHT]
        sources = [*carried, *(s for i in halves.late_inputs for s in operands[i])]
        sums = {i: num_models + i for i in trained}
        parts.append(PartSpec(BACKWARD_WEIGHT, way, flat, sources, late_inboxes, sums=sums))
    return parts


def _operands(derived: StageDerivative, seed: Source) -> list[list[Source]]:
    """Returns the sources of each input of the whole backward; a struct has several."""
    derivative, stage = derived.derivative, derived.stage
    assert derivative is not None
    first = len(stage.program.outputs)
    num_saved = len(flat_types([derivative.saved_type]))
    saved = [Source("output", first + i, FORWARD) for i in range(num_saved)]
    groups = [saved, *([Source("input", i, FORWARD)] for i in derivative.kept_inputs)]
    groups += [[Source("output", i, FORWARD)] for i in derivative.kept_outputs]
    if stage.num_sent == 0:
        return [*groups, [seed]]
    places = {o: k for k, o in enumerate(derived.gradients_received)}
    used = [places[o] for o in derivative.cotangent_outputs]
    return [*groups, *([Source("inbox", k, BACKWARD)] for k in used)]
