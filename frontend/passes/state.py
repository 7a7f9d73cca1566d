"""The goal of a compile, its state between passes, the pass type, and the runner of passes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, TypeAlias, TypeVar, get_args

from ...autodiff.derivative import Derivative, Request
from ...autodiff.training_program import GradientProgram, StepProgram, UpdateGroup
from ...backend.arena import ArenaPlan
from ...backend.link.link import FlatProgram, check_flat
from ...backend.run.planned import PlannedProgram, Runtime
from ...backend.run.rank_program import RankProgram
from ...pipeline_parallel.mesh.plan import MeshPlan
from ...recompute.planner import Policy, PolicyName
from ...reuse.errors import OURS, CaptureError, is_debugging
from ...reuse.ir.costs import OperatorCosts
from ...reuse.ir.program import Composite, Program, RecomputeMark
from ...reuse.ir.torch_symbols import Values
from ...reuse.ir.verify import ProgramLevel, verify
from ...reuse.process import with_room
from ...reuse.torch_names import lazy_modules
from ..capture.capture import Subject
from ..capture.regions import CapturedModel
from ..capture.surroundings import one_at_a_time
from ..compile_record import PassRecord
from ..compiled import GradientRequest
from ..options import Batching
from ..report import CompileReport, cpu_seconds
from .context import Context, has_marks

VERIFY_VARIABLE = "LAZYINLINE_VERIFY"
"""The environment variable that turns on verification after every pass."""

GoalKind = Literal["module", "step", "rank", "gradients", "file", "primitives"]
GOAL_KINDS: tuple[GoalKind, ...] = get_args(GoalKind)


Judge: TypeAlias = Callable[[MeshPlan, RecomputeMark, float], float]
"""Returns the seconds of a step under a mesh plan and a recompute policy. Its last argument is the
planner's own estimate, which it returns where the model is not cut into stages."""
Planner: TypeAlias = Callable[[Callable[[RecomputeMark], StepProgram], Judge], MeshPlan]
"""Chooses the placements of a step on a mesh. Its first argument makes the step for a recompute
policy (``""`` is the user's), decomposed and in global shapes."""


@dataclass(frozen=True)
class OnMesh:
    """The device mesh that a step runs on."""

    mesh: Any  # a ``DeviceMesh``
    planner: Planner  # chooses the placements
    memory_bytes_per_rank: int | None = None  # for a pipeline, the bytes that a rank may hold
    costs: OperatorCosts | None = None  # for a pipeline, the costs of operators and collectives
    whole: Any = None  # for a pipeline, the mesh of all ranks; ``mesh`` is a part of it


@dataclass(frozen=True)
class Goal:
    """The purpose of a compile. One list of passes serves all goals."""

    # ``"module"``: a module that is called, with a backward in training; ``"step"``: forward and
    # backward of the loss over all micro-batches; ``"rank"``: one pipeline rank's part of such a
    # step; ``"gradients"``: gradients of a module that are differentiated again; ``"file"``: an
    # ONNX file; ``"primitives"``: a program to inspect.
    kind: GoalKind = "module"
    train: bool = False  # whether gradients are wanted
    batching: Batching = field(default_factory=Batching)  # the micro-batches of a step
    gradients: GradientRequest | None = None  # the request, if ``kind`` is ``"gradients"``
    opset: int = 0  # the ONNX operator set of a file
    updates: tuple[UpdateGroup, ...] = ()  # the optimizer updates that are part of a step
    on_mesh: OnMesh | None = None  # the mesh that a step, or the stages of a rank, are sharded over
    # Whether the backend compiles the backward, and the forward of a single result, only when a
    # loss needs it (training on forces never does); until then they run with PyTorch's kernels.
    late_backward: bool = False


def step_goal(batching: Batching, updates: tuple[UpdateGroup, ...] = ()) -> Goal:
    """Returns the goal of a training step."""
    return Goal("step", train=True, batching=batching, updates=updates)


State = TypeVar("State", bound="Compilation")


@dataclass(frozen=True)
class Unplanned:
    """The reason why the memory of a program is not planned."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class Compilation:
    """The state of one compile between two passes. Passes replace it and never change it."""

    context: Context  # results kept per closure, from this compile and earlier ones
    report: CompileReport  # the report that passes write to
    goal: Goal  # what the programs are compiled for
    # The model and its inputs; None if the compile starts after capture.
    subject: Subject | None = None
    seen: CapturedModel | None = None  # the captured model
    request: Request | None = None  # the derivative that is wanted; None without gradients
    derivative: Derivative | None = None  # the derivative; None without gradients, or if none flows
    # For the goal ``"gradients"``, the program of gradients.
    gradients: GradientProgram | None = None
    # The programs that will run, by part (``"forward"``, ``"backward"``, ...).
    programs: Mapping[str, Program] = field(default_factory=dict)
    composed: StepProgram | None = None  # for a step, the meaning of its inputs and results
    # Whether the kernels of the programs are made or only estimated.
    kernels: Literal["made", "estimated"] = "made"
    flats: Mapping[str, FlatProgram] = field(default_factory=dict)  # the linked programs, by part
    # With symbolic sizes, the number of each symbol for the shape being linked.
    values: Values | None = None
    # The state before numbers replaced the symbols; a further shape starts here.
    symbolic: Compilation | None = None
    # Links a symbolic program once for many shapes (:class:`.link.ManyShapes`).
    shapes: Any = None
    unplanned: Unplanned | None = None  # why memory is not planned, once that is known
    runs: PlannedProgram | Runtime | RankProgram | None = None  # the runtime of the linked programs
    mesh_plan: MeshPlan | None = None  # the placements of a step over a mesh
    sharder: Any = None  # makes closures of local shapes by that plan, once it exists
    # The recompute policy that the mesh plan chose to fit memory, if it needed one.
    fitting: PolicyName | None = None
    # Facts loaded from a file, by their names in :class:`..compiled.Facts`.
    known: Mapping[str, Any] = field(default_factory=dict)
    # Memory plans loaded from a file, in the order in which link asks for them.
    plans: Sequence[ArenaPlan] = ()
    # Backwards for fewer outputs loaded from a file, each with its memory plans.
    backwards: Sequence[tuple[Derivative, Sequence[ArenaPlan]]] = ()

    @property
    def policy(self) -> Policy:
        """The recompute policy: the user's, or else the one that the mesh plan chose."""
        return self.context.options.recompute or self.fitting

    @property
    def captured(self) -> CapturedModel:
        """The captured model, once capture has run."""
        assert self.seen is not None, "a pass before capture asks for what it saw"
        return self.seen

    @property
    def step(self) -> StepProgram:
        """The step, once the pass ``repeat`` has run."""
        assert self.composed is not None
        return self.composed

    @property
    def on_mesh(self) -> OnMesh:
        """The mesh that it is sharded over, if it is."""
        assert self.goal.on_mesh is not None
        return self.goal.on_mesh

    @property
    def layouts(self) -> MeshPlan:
        """The placements over the mesh, once the pass ``plan`` has run."""
        assert self.mesh_plan is not None
        return self.mesh_plan

    @property
    def wants_recompute(self) -> bool:
        """Whether a policy or a mark asks for recompute."""
        if self.request is None or self.derivative is None:
            return False
        assert isinstance(self.request.closure, Composite)
        return self.policy is not None or has_marks(self.request.closure)

    @property
    def size(self) -> int:
        """The number of graph nodes; once linked, the number of launches."""
        if self.runs is not None:
            return self.runs.num_launches
        return sum(program.num_nodes() for program in self.programs.values())

    @property
    def linked(self) -> list[FlatProgram]:
        """The linked parts, in order."""
        return list(self.flats.values())


@dataclass(frozen=True)
class Pass:
    """One pass."""

    name: str  # the name of its row in a report
    function: Callable[[Any], Any]  # returns the next state
    level: ProgramLevel = "shared"  # the rules that programs obey after it
    goals: Sequence[GoalKind] = GOAL_KINDS  # the kinds of goals that it is for
    wanted: Callable[[Any], bool] = lambda state: True  # whether this compile needs it
    # ``"always"``, or ``"on request"`` (see ``VERIFY_VARIABLE``).
    verified: Literal["always", "on request"] = "on request"

    @property
    def summary(self) -> str:
        """Returns the first line of the pass's docstring."""
        return (self.function.__doc__ or "").partition("\n")[0]


def compile_pass(
    name: str, level: ProgramLevel = "shared", **options: Any
) -> Callable[[Callable[[State], State]], Pass]:
    """Makes a function a pass; lists of passes show the first line of its docstring."""
    return lambda function: Pass(name, function, level, **options)


Watch = Callable[[Pass, Compilation, Compilation], None]
"""Called with each pass that ran, and the state before and after it."""


def run(passes: Sequence[Pass], state: State, watch: Watch | None = None) -> State:
    """Runs passes in order; times each, and verifies its result where asked."""
    everything = os.environ.get(VERIFY_VARIABLE, "0") not in ("", "0")
    passes = of_goal(passes, state.goal.kind)
    # All names at once: a progress bar needs their number.
    progress = state.context.progress.passes([one.name for one in passes])
    # Generating a graph's Python code takes as long as building the graph: do it only when it runs.
    with one_at_a_time(), lazy_modules(), progress as followed:
        for one in passes:
            if not one.wanted(state):
                continue
            before, cpu, wall = state, cpu_seconds(), time.perf_counter()
            with followed(one.name), _explained_bugs(one.name):
                state = with_room(partial(one.function, state))
                if everything or one.verified == "always":
                    check(state, one.level)
            seconds = (cpu_seconds() - cpu, time.perf_counter() - wall)
            state.report.passes.append(PassRecord(one.name, *seconds, state.size))
            if watch is not None:
                watch(one, before, state)
    return state


@contextmanager
def _explained_bugs(name: str) -> Iterator[None]:
    """Turns an unexpected error of a pass into one after which the model runs eagerly."""
    try:
        yield
    except Exception as error:
        if isinstance(error, OURS) or is_debugging():
            raise
        raise CaptureError(
            f"The pass {name} failed ({type(error).__name__}: {error}). If no operator of your own "
            "raised that, please report it, with the traceback that LAZYINLINE_DEBUG=1 shows."
        ) from error


def apply(passes: Sequence[Pass], state: State) -> State:
    """Runs passes for a trial compile, which does not change the report."""
    report = state.report
    # Kernels that a trial makes are kept; its rows in a report are not.
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
    """Raises VerifyError if a program breaks a rule of a level, or a linked one is not flat."""
    # A linked program has no closures any more, so no rule of programs applies to it.
    if level == "flat":
        for flat in state.flats.values():
            check_flat(flat)
        return
    for program in state.programs.values():
        verify(program, level)


def between(passes: Sequence[Pass], first: str = "", last: str = "") -> Sequence[Pass]:
    """Returns the passes from the first named ``first`` to the last named ``last``, inclusive.

    Several passes may have one name, each for other goals.
    """
    names = [one.name for one in passes]
    begin = names.index(first) if first else 0
    end = len(names) - names[::-1].index(last) if last else len(names)
    return passes[begin:end]
