"""The goal and the state of a compile, what a pass is, and the runner of passes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, TypeAlias, TypeVar, get_args

from ...autodiff.derivative import Derivative, Request
from ...autodiff.training_program import GradientProgram, StepProgram, UpdateGroup
from ...backend.arena.arena import ArenaPlan
from ...backend.link.link import FlatProgram, check_flat
from ...backend.run.planned import PlannedProgram, Runtime
from ...backend.run.rank_program import RankProgram
from ...pipeline_parallel.mesh.plan import MeshPlan
from ...recompute.planner import Policy, PolicyName
from ...reuse.ir.costs import OperatorCosts
from ...reuse.ir.program import Composite, Program, RecomputeMark
from ...reuse.ir.torch_symbols import Values
from ...reuse.ir.verify import ProgramLevel, verify
from ...reuse.torch_names import lazy_modules
from ..capture.capture import Subject
from ..capture.regions import CapturedModel
from ..capture.surroundings import one_at_a_time
from ..compiled import GradientRequest
from ..options import Batching
from ..report import CompileReport, PassRecord, cpu_seconds
from .context import Context
from .recompute_choice import has_marks

VERIFY_VARIABLE = "LAZYINLINE_VERIFY"
"""The environment variable that has every program verified after each pass."""

GoalKind = Literal["module", "step", "rank", "gradients", "file", "primitives"]
GOAL_KINDS: tuple[GoalKind, ...] = get_args(GoalKind)


Judge: TypeAlias = Callable[[MeshPlan, RecomputeMark, float], float]
"""Says what a step in stages takes by a plan and a policy, or what is handed in: without any."""
Planner: TypeAlias = Callable[[Callable[[RecomputeMark], StepProgram], Judge], MeshPlan]
"""Says what lies where in a step; what it is given first makes that, decomposed and of global
shapes, for a policy of recompute (``""`` is the user's)."""


@dataclass(frozen=True)
class OnMesh:
    """Where a step runs, if on a mesh.

    Attributes:
        mesh: a ``DeviceMesh``.
        planner: says what lies where.
        memory_bytes_per_rank: with stages, what those of a rank may hold.
        costs: with stages, of operators and collectives.
        whole: with stages, the mesh of all ranks, of which this one is a part.
    """

    mesh: Any
    planner: Planner
    memory_bytes_per_rank: int | None = None
    costs: OperatorCosts | None = None
    whole: Any = None


@dataclass(frozen=True)
class Goal:
    """Says what programs are compiled for. Passes ask it, so that there is one list of them.

    Attributes:
        kind: ``"module"`` is called, and has a backward in training; ``"step"`` runs forward and
            backward of the loss of all micro-batches; ``"rank"`` is a rank's part of such a step;
            ``"gradients"`` are those of a module, to be differentiated; ``"file"`` is written, and
            ``"primitives"`` are looked at.
        train: whether gradients are wanted.
        batching: of a step.
        gradients: those that are to be differentiated.
        opset: version of the operators in a file.
        updates: of a step, how groups of parameters are updated in it.
        on_mesh: of a step or a rank's stages, the mesh that they are split over.
        late_backward: whether the backend's kernels of a backward wait for a loss that needs them,
            as training on forces needs none: until then it has PyTorch's own.
    """

    kind: GoalKind = "module"
    train: bool = False
    batching: Batching = field(default_factory=Batching)
    gradients: GradientRequest | None = None
    opset: int = 0
    updates: tuple[UpdateGroup, ...] = ()
    on_mesh: OnMesh | None = None
    late_backward: bool = False


def step_goal(batching: Batching, updates: tuple[UpdateGroup, ...] = ()) -> Goal:
    """Returns the goal of a training step."""
    return Goal("step", train=True, batching=batching, updates=updates)


State = TypeVar("State", bound="Compilation")


@dataclass(frozen=True)
class Unplanned:
    """Why the memory of a program is not planned."""

    reason: str


class Shapes(Protocol):
    """Links for many shapes at once."""

    def at(self, state: State, values: Values) -> State | None:
        """Returns the state that a link for one shape ends in, or None if it must be linked."""

    def known(self, state: State, values: Values) -> State | None:
        """Returns the same by a program that is there, for which nothing is compiled."""


@dataclass(frozen=True, kw_only=True)
class Compilation:
    """The state of one compile between two passes. Passes replace it and never change it.

    Attributes:
        context: what was made per closure, in this compile and earlier ones.
        report: gets what passes did.
        goal: what it is for.
        subject: what is compiled; None where a pass after capture is the first.
        seen: what capture saw.
        request: the derivative that is asked for; None without gradients.
        derivative: the derivative; None without gradients, or where none flows.
        gradients: the program of gradients that are to be differentiated.
        programs: what will run, part by part.
        composed: of a step, where its inputs and results belong.
        kernels: whether the parts' kernels are there, or only estimated.
        flats: the parts, linked.
        values: the number of each symbol, where sizes are symbols and the program is for one shape.
        symbolic: the same before numbers took the place of symbols: a further shape begins here.
        shapes: links what has symbols once for many shapes.
        unplanned: why memory is not planned, if that is known.
        runs: what runs the parts.
        mesh_plan: what lies where, of a step over a mesh.
        sharder: makes closures of this rank's shapes over that, if it is there already.
        fitting: the policy of recompute that a plan over a mesh needs to fit, if it needs one.
        known: facts of the program that a file says, by their names in :class:`..compiled.Facts`.
        plans: where a file says that buffers are, in the order in which link asks.
        backwards: those of a file for losses that leave outputs unused, each with such plans.
    """

    context: Context
    report: CompileReport
    goal: Goal
    subject: Subject | None = None
    seen: CapturedModel | None = None
    request: Request | None = None
    derivative: Derivative | None = None
    gradients: GradientProgram | None = None
    programs: Mapping[str, Program] = field(default_factory=dict)
    composed: StepProgram | None = None
    kernels: Literal["made", "estimated"] = "made"
    flats: Mapping[str, FlatProgram] = field(default_factory=dict)
    values: Values | None = None
    symbolic: Compilation | None = None
    shapes: Shapes | None = None
    unplanned: Unplanned | None = None
    runs: PlannedProgram | Runtime | RankProgram | None = None
    mesh_plan: MeshPlan | None = None
    sharder: Any = None
    fitting: PolicyName | None = None
    known: Mapping[str, Any] = field(default_factory=dict)
    plans: Sequence[ArenaPlan] = ()
    backwards: Sequence[tuple[Derivative, Sequence[ArenaPlan]]] = ()

    @property
    def policy(self) -> Policy:
        """The policy of recompute: the user's, or else what a plan over a mesh needs."""
        return self.context.options.recompute or self.fitting

    @property
    def captured(self) -> CapturedModel:
        """Returns the captured model, once capture has run."""
        assert self.seen is not None, "a pass before capture asks for what it saw"
        return self.seen

    @property
    def step(self) -> StepProgram:
        """The step, once it is put together."""
        assert self.composed is not None
        return self.composed

    @property
    def wants_recompute(self) -> bool:
        """Whether a policy or a mark wants something computed again."""
        if self.request is None or self.derivative is None:
            return False
        assert isinstance(self.request.closure, Composite)
        return self.policy is not None or has_marks(self.request.closure)

    @property
    def size(self) -> int:
        """Graph nodes held; launches, once what runs is there."""
        if self.runs is not None:
            return self.runs.num_launches
        return sum(program.num_nodes() for program in self.programs.values())

    @property
    def linked(self) -> list[FlatProgram]:
        """The linked parts, in order."""
        return list(self.flats.values())


def _always(state: Any) -> bool:
    return True


@dataclass(frozen=True)
class Pass:
    """One pass.

    Attributes:
        name: its row in a report.
        function: returns the state after it; the state before stays as it is.
        level: the rules that programs keep after it.
        goals: the kinds of goals that it is for.
        wanted: whether something asks for it in this compile.
        verified: ``"always"``, or only when every pass is.
    """

    name: str
    function: Callable[[Any], Any]
    level: ProgramLevel = "shared"
    goals: Sequence[GoalKind] = GOAL_KINDS
    wanted: Callable[[Any], bool] = _always
    verified: Literal["always", "on request"] = "on request"

    @property
    def summary(self) -> str:
        """Returns the first line of the pass's docstring."""
        return (self.function.__doc__ or "").partition("\n")[0]


def compile_pass(
    name: str,
    level: ProgramLevel = "shared",
    *,
    goals: Sequence[GoalKind] = GOAL_KINDS,
    wanted: Callable[[Any], bool] = _always,
    verified: Literal["always", "on request"] = "on request",
) -> Callable[[Callable[[State], State]], Pass]:
    """Makes a pass of a function; its docstring's first line is what lists of passes show."""
    return lambda function: Pass(name, function, level, goals, wanted, verified)


Watch = Callable[[Pass, Compilation, Compilation], None]
"""Sees each pass that ran, with the state before and after it."""


def run(passes: Sequence[Pass], state: State, watch: Watch | None = None) -> State:
    """Runs passes in order: times each, and verifies what it made where that is asked for.

    Raises:
        VerifyError: if a pass broke a rule of its level.
    """
    everything = os.environ.get(VERIFY_VARIABLE, "0") not in ("", "0")
    passes = of_goal(passes, state.goal.kind)
    # Asked with all names at once: a bar has to know how many there will be.
    progress = state.context.progress.passes([one.name for one in passes])
    # To write a graph as Python and compile that takes as long as to make it: only what runs is.
    with one_at_a_time(), lazy_modules(), progress as followed:
        for one in passes:
            if not one.wanted(state):
                continue
            before, cpu, wall = state, cpu_seconds(), time.perf_counter()
            with followed(one.name):
                state = one.function(state)
                if everything or one.verified == "always":
                    check(state, one.level)
            seconds = (cpu_seconds() - cpu, time.perf_counter() - wall)
            state.report.passes.append(PassRecord(one.name, *seconds, state.size))
            if watch is not None:
                watch(one, before, state)
    return state


def apply(passes: Sequence[Pass], state: State) -> State:
    """Runs passes for a trial: nothing is timed, the report stays as it is."""
    report = state.report
    # A trial's kernels are kept, but it is not the user's compile: its rows go to a copy.
    trial = replace(report, passes=[])
    state = replace(state, report=trial)
    for one in of_goal(passes, state.goal.kind):
        if one.wanted(state):
            state = one.function(state)
    return replace(state, report=report)


def of_goal(passes: Sequence[Pass], kind: GoalKind) -> Sequence[Pass]:
    """Returns the passes that are for one kind of goal, in order."""
    return [one for one in passes if kind in one.goals]


def check(state: Compilation, level: ProgramLevel) -> None:
    """Raises VerifyError if a program breaks a rule of a level, or what is linked is not flat."""
    # What is linked has no closures any more, so no rule of programs applies to it.
    if level == "flat":
        for flat in state.flats.values():
            check_flat(flat)
        return
    for program in state.programs.values():
        verify(program, level)


def between(passes: Sequence[Pass], first: str = "", last: str = "") -> Sequence[Pass]:
    """Returns the passes from the first of one name to the last of another, with both.

    The names belong to steps of the list, which more than one pass may be for: each for some goals.
    """
    names = [one.name for one in passes]
    begin = names.index(first) if first else 0
    # Passes of other goals may follow under the same name: the last of them counts.
    end = len(names) - names[::-1].index(last) if last else len(names)
    return passes[begin:end]
