"""The compiler: one list of passes, from a model to a program that runs.

A pass is a function from one immutable state of a compile to the next (``passes/state.py``). The
goal of the compile (a module to call, a training step, a file) selects the passes. One runner times
each pass, verifies its result where asked, and calls observers. Every pass before link visits each
different closure once. ``lazyinline inspect --passes`` prints the passes of each goal; ``lazyinline
inspect TARGET --after PASS --diff`` shows what one did.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from torch import nn

from ..autodiff.derivative import Derivative
from ..autodiff.flows import saved_inputs
from ..backend.run.planned import PlannedProgram, Runtime
from ..backend.run.rank_program import RankPlan, RankProgram
from ..reuse.errors import LazyInlineError, NotDifferentiatedError, PipelineError, PlanError
from ..reuse.ir.program import Closure, Composite, Leaf, Program, walk_closures
from ..reuse.ir.torch_symbols import Values, type_at
from .capture.regions import CapturedModel, Sizes
from .capture.surroundings import one_at_a_time, other_threads_waiting
from .compile_record import Made, Memory
from .compiled import (
    Compiled,
    CompiledGradients,
    CompiledProgram,
    CompiledStep,
    Facts,
    GradientRequest,
    step_without_tensors,
)
from .effects.effects import OnContents
from .options import Options
from .passes import programs, stages
from .passes.context import Context
from .passes.link import ManyShapes, describe_gpu, link_program, linked
from .passes.mesh import plan_mesh, plan_stages, shard, shard_stages
from .passes.numbers import results_at
from .passes.rank import RankCompilation
from .passes.stages import choose_recompute
from .passes.state import (
    Compilation,
    Goal,
    GoalKind,
    Pass,
    Subject,
    Unplanned,
    Watch,
    between,
    of_goal,
    run,
)
from .report import CompileReport

PASSES = (
    programs.capture,
    programs.tell_masks,
    programs.derive,
    programs.require_data,
    programs.fuse_boundaries,
    plan_mesh,
    plan_stages,
    stages.split,
    programs.take_gradients,
    programs.differentiate,
    stages.differentiate_stages,
    programs.add_gradients,
    choose_recompute,
    stages.choose_stage_recompute,
    programs.repeat_micro_batches,
    programs.update_parameters,
    stages.update_stages,
    programs.reduce_to_primitives,
    programs.decompose,
    shard,
    shard_stages,
    programs.lower,
    link_program,
    stages.link_rank,
    describe_gpu,
    stages.predict,
)
"""All passes, in order. A compile runs those that are for its goal."""

CONTENTS: dict[GoalKind, OnContents] = {"module": "keep", "step": "drop"}
"""The treatment of a forward's changes to lists and dicts; goals not named here refuse them."""

GOALS: dict[GoalKind, str] = {
    "module": "a module that is called (lazyinline.compile)",
    "step": "a training step of all micro-batches (lazyinline.compile_step)",
    "rank": "the stages of one rank (lazyinline.pipeline, over a mesh lazyinline.parallelize)",
    "gradients": "the gradients of a module, to be differentiated (create_graph=True)",
    "file": "an ONNX file (lazyinline.export_onnx)",
    "primitives": "a model as primitives, to be looked at: nothing runs it",
}
"""A description of each kind of goal, as the command line prints it."""

# A backward for fewer outputs starts at decompose; a further shape starts at link.
_DECOMPOSE = between(PASSES, "decompose", "decompose")
_LOWER = between(PASSES, "lower", "lower")
_LINK = between(PASSES, "link", "link")

_ATTEMPTS = 6  # how often to save less before giving up on a bound


def passes_for(kind: GoalKind) -> Sequence[Pass]:
    """Returns the passes of one kind of goal, in order."""
    return of_goal(PASSES, kind)


class Compiler:
    """Runs the passes; keeps the results of each closure for the next program it compiles."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.context = Context(options)

    def started(self, subject: Subject, goal: Goal) -> Compilation:
        """Returns the state before the first pass."""
        report = self.context.report(train=goal.train)
        return Compilation(context=self.context, report=report, goal=goal, subject=subject)

    def compile(
        self,
        model: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        goal: Goal,
        *,
        sizes: Callable[[], Sizes] | None = None,
        watch: Watch | None = None,
    ) -> tuple[Compiled, CompileReport]:
        """Compiles a model for inputs of these layouts; for a step, those of one micro-batch.

        ``sizes`` creates the symbolic sizes, if any; ``watch`` is called after each pass.
        """
        # .item() of a whole batch gives another number than .item() of one micro-batch.
        is_whole = goal.batching.micro_batches == 1 and goal.on_mesh is None
        may_ask = is_whole and goal.kind in ("module", "step")
        contents = CONTENTS.get(goal.kind, "refuse")
        subject = Subject(model, args, kwargs, sizes=sizes, may_ask=may_ask, contents=contents)
        state = self.started(subject, goal)
        with self.context.cached(state.report):
            state = run(PASSES, state, watch)
        note_recompute(state)
        # A report page draws programs of fixed sizes; a symbolic one is linked for each shape.
        if state.symbolic is None:
            state.report.made = made_by(state)
        return Linker.of(self, state).result(state), state.report

    def compile_gradients(
        self, captured: CapturedModel, request: GradientRequest, values: Values | None
    ) -> tuple[Linker, Compilation]:
        """Compiles the gradients of a captured program as a program that has a backward itself."""
        state = Compilation(
            context=self.context,
            report=self.context.report(train=request.is_differentiated),
            goal=Goal("gradients", train=request.is_differentiated, gradients=request),
            seen=captured,
            values=values,
        )
        with self.context.cached(state.report):
            state = run(PASSES, state)
        return Linker.of(self, state), state


@dataclass(frozen=True)
class Linker:
    """Links one lowered program for further shapes, and with further backwards."""

    compiler: Compiler
    lowered: Compilation  # the state of the compile before link, without the model's tensors
    # What each symbol had become when the program was compiled: itself, another, or a number.
    replacements: tuple[Any, ...]
    watched_inputs: tuple[int, ...]  # see :class:`CompiledProgram`
    # With symbolic sizes, the linkers of its gradient programs.
    gradients: dict[GradientRequest, Linker] = field(default_factory=dict)
    # Requests for gradients that cannot be compiled; autograd serves them by running the program
    # operator by operator.
    refused: set[GradientRequest] = field(default_factory=set)

    @property
    def sizes(self) -> Any:
        """The symbolic sizes, with the guards that the compile put on them."""
        return self.lowered.captured.sizes

    @cached_property
    def facts(self) -> Facts:
        """The facts of the program, which its shapes share."""
        found = Facts(self.lowered.captured.program, self.lowered.derivative)
        vars(found).update(self.lowered.known)
        for derivative, plans in self.lowered.backwards:
            assert found.unused_outputs is not None
            found.unused_outputs.take(derivative)
            started = self._started(derivative, self.lowered.report)
            found.backwards[derivative.backward] = replace(started, plans=plans)
        return found

    @cached_property
    def _described(self) -> CompileReport:
        """A report that describes the captured model and has no passes yet."""
        report = self.lowered.context.report(train=self.lowered.goal.train)
        report.describe(self.lowered.captured)
        return report

    @classmethod
    def of(cls, compiler: Compiler, state: Compilation) -> Linker:
        """Returns the linker for the program of a finished compile."""
        sizes, composed = state.captured.sizes, state.composed
        # Linked calls take much memory. Without symbols they are needed again only if a loss leaves
        # outputs unused, so they are dropped.
        lowered = state.symbolic or replace(state, flats={}, request=None)
        watched: tuple[int, ...] = ()
        if lowered.derivative is not None and state.goal.kind != "step":
            known = lowered.known.get("watched_inputs")
            watched = saved_inputs(lowered.programs[programs.PARTS[0]]) if known is None else known
        lowered = replace(
            lowered,
            subject=None,
            seen=state.captured.without_tensors(),
            composed=composed and step_without_tensors(composed),
            programs={name: _bare(program) for name, program in lowered.programs.items()},
            runs=None,
            shapes=ManyShapes() if state.symbolic else None,
            plans=(),
        )
        replacements = sizes.replacements if sizes is not None else ()
        return cls(compiler, lowered, replacements, watched)

    def result(self, state: Compilation) -> Compiled:
        """Returns the compiled program or step of a finished compile or link."""
        captured, derivative = state.captured, state.derivative
        linker = None if state.values is None else self
        if state.values is not None:
            captured = replace(captured, program=results_at(captured.program, state.values))
        if state.goal.kind == "step":
            assert isinstance(state.runs, PlannedProgram)
            assert derivative is not None
            saved = partial(type_at, derivative.saved_type, state.values or Values())
            step, saved_bytes = state.step, lambda: saved().num_bytes
            return CompiledStep(captured, step, state.runs, saved_bytes, linker, self.lowered)
        assert isinstance(state.runs, Runtime)
        return CompiledProgram(
            captured,
            state.runs,
            self.facts,
            derivative,
            self.watched_inputs,
            partial(self.without_outputs, state.values, state.report),
            partial(self.compile_gradients, state.values, state.report),
            linker,
            self.lowered if state.goal.late_backward else self.whole,
            state.values,
        )

    def relink(self, values: Values) -> tuple[Compiled, CompileReport]:
        """Links the program for sizes that satisfy its guards.

        It raises PlanError if that shows that it is not right for them, or exceeds the budget.
        """
        if self.sizes.replacements != self.replacements:
            raise PlanError(
                "Compiling a backward for fewer outputs fixed a size that varies, so this program "
                "is right for no further sizes."
            )
        report = copy.copy(self._described)
        report.passes = []
        state = _linked(replace(self.whole, values=values, report=report))
        note_recompute(state)
        return self.result(state), report

    def finish_backward(self) -> None:
        """Compiles the backend's kernels of the backward now, if they were deferred."""
        derivative, report = self.lowered.derivative, replace(self._described, passes=[])
        if derivative is not None and self.whole.goal.late_backward:
            with one_at_a_time():
                self._other_backward(derivative, self.sizes.example, report)

    @property
    def whole(self) -> Compilation:
        """The lowered state; if the backward was deferred, with the backend's kernels once made."""
        derivative, known = self.lowered.derivative, self.lowered
        if known.goal.late_backward and derivative is not None:
            return self.facts.backwards.get(derivative.backward, known)  # type: ignore[no-any-return]
        return known

    def without_outputs(
        self,
        values: Values | None,
        report: CompileReport,
        compiled: CompiledProgram,
        unused: Sequence[int],
    ) -> CompiledProgram | None:
        """Compiles a backward for a loss that leaves outputs unused; None if that is not possible.

        The forward stays as it is. If the backend's kernels do not fit it, PyTorch's are used.
        """
        with one_at_a_time():
            for kernels in ("backend", "eager"):
                known = self.facts.unused_outputs
                derivative = known.without(unused, kernels) if known is not None else None
                if derivative is None:
                    break
                key = derivative.backward
                runtime, derivative = self._other_backward(derivative, values, report)
                if type(runtime) is type(compiled.runtime):
                    report.num_backwards += bool(unused)
                    made = replace(compiled, runtime=runtime, derivative=derivative)
                    return made if unused else replace(made, lowered=self.facts.backwards[key])
            return None

    def _other_backward(
        self, derivative: Derivative, values: Values | None, report: CompileReport
    ) -> tuple[Any, Derivative | None]:
        """Returns runtime and derivative with another backward; None if these sizes violate guards.

        With symbolic sizes it is compiled once for all shapes. One from a file is only linked.
        """
        context, key = self.lowered.context, derivative.backward
        passes = CompileReport(True, report.backend, report.reuse)
        backwards = self.facts.backwards
        lowered = backwards.get(key)
        try:
            with context.cached(passes):
                if lowered is None:
                    lowered = run(_DECOMPOSE, self._started(derivative, passes))
                if not lowered.flats:
                    lowered = linked(run(_LOWER, replace(lowered, report=passes)))
                    lowered = replace(lowered, shapes=ManyShapes())
                if values is not None:
                    backwards[key] = lowered
                    if _is_compiled(key) and not self.sizes.are_right(values):
                        return None, None
                # Without a memory plan the forward saves tensors, so its backward must take them.
                unplanned = Unplanned(report.unplanned) if report.unplanned else None
                lowered = replace(lowered, values=values, report=passes, unplanned=unplanned)
                state = _linked(lowered)
        except Exception:
            if values is None:
                raise
            return None, None  # the caller then compiles for these sizes without symbols
        if values is None and isinstance(state.runs, Runtime):  # keep plans, not many linked calls
            backwards[key] = replace(lowered, flats={}, plans=state.runs.program.plans)
        if self.lowered.derivative is not None and key is self.lowered.derivative.backward:
            _note_whole(report, state)
        return state.runs, state.derivative

    def _started(self, derivative: Derivative, report: CompileReport) -> Compilation:
        """Returns the state from which the passes compile another backward."""
        return replace(
            self.lowered,
            report=report,
            goal=replace(self.lowered.goal, late_backward=False),
            request=None,
            derivative=derivative,
            programs=programs.programs_of(derivative),
            flats={},
            backwards=(),
        )

    def compile_gradients(
        self, values: Values | None, counted: CompileReport, request: GradientRequest
    ) -> CompiledGradients | None:
        """Compiles gradients that are differentiated; with symbolic sizes, once for all shapes.

        Returns None if autograd must run the program operator by operator for them.
        """
        with other_threads_waiting():
            if request in self.refused:
                return None
            try:
                if values is not None and request in self.gradients:
                    return self._relinked_gradients(self.gradients[request], values, counted)
                sizes = self.sizes
                keeping = nullcontext() if sizes is None else sizes.keeping_symbolic()
                with one_at_a_time(), keeping:
                    captured, compiler = self.lowered.captured, self.compiler
                    # If this specializes a size, results kept per closure would be wrong for other
                    # sizes: a symbolic program gets a compiler of its own.
                    compiler = compiler if values is None else Compiler(compiler.options)
                    linker, state = compiler.compile_gradients(captured, request, values)
            except Exception as error:
                # A symbolic program must work for all shapes: any failure falls back to autograd.
                may_be = isinstance(error, NotDifferentiatedError) or values is not None
                is_none = isinstance(error, programs.NoGradientsError)
                strict = self.compiler.options.fallback == "error"
                if is_none or not may_be or strict or not request.is_differentiated:
                    raise
                self.refused.add(request)
                counted.eager_kernels.append(f"the gradient that is differentiated: {error}")
                said = f"A gradient is differentiated operator by operator. {error}"
                warnings.warn(said, stacklevel=2)
                return None
            if values is not None:
                self.gradients[request] = linker
            counted.num_gradients += 1
            return linker.gradients_of(linker.result(state), values, counted)

    def _relinked_gradients(
        self, known: Linker, values: Values, counted: CompileReport
    ) -> CompiledGradients | None:
        """Links gradients for one shape; None if it violates a guard on sizes."""
        if not known.sizes.are_right(values):
            return None
        try:
            return known.gradients_of(known.relink(values)[0], values, counted)
        except LazyInlineError:
            return None

    def gradients_of(
        self, compiled: Compiled, values: Values | None, counted: CompileReport
    ) -> CompiledGradients:
        """Returns compiled gradients that can be differentiated again."""
        program = self.lowered.gradients
        assert program is not None
        assert isinstance(compiled, CompiledProgram)
        further = partial(self.compile_gradients, values, counted)
        cotangents = self.lowered.captured.program.inputs[-len(program.outputs) :]
        types_ = tuple(type_at(one.type, values or Values()) for one in cotangents)
        return CompiledGradients(replace(compiled, gradients=further), program, types_)


def _linked(lowered: Compilation) -> Compilation:
    """Links a lowered program; a shape may reuse a linked program with other numbers in it."""
    known = None
    if lowered.shapes is not None and lowered.values is not None:
        known = lowered.shapes.known(lowered, lowered.values)
    return run(_LINK, lowered) if known is None else known


def fitted(state: RankCompilation) -> RankCompilation:
    """Runs the passes from recompute to link, with less memory each time until the plan fits."""
    for attempt in range(_ATTEMPTS):
        made = run(between(PASSES, "recompute", "link"), state)
        limit = stages.limit_bytes(made, state.rank)
        held = made.planned.plan.held_bytes if made.planned is not None else 0
        if limit is None or held <= limit:
            return made
        # Increasing steps, because more recompute needs more scratch.
        more = (attempt + 1) * (held - limit)
        state = replace(state, withheld_bytes=state.withheld_bytes + more)
    raise PipelineError(
        f"A step of rank {state.rank} needs {held} bytes, and may hold {limit}. Allow more, or use "
        "more ranks or smaller micro-batches."
    )


def note_recompute(state: Compilation) -> None:
    """Notes in the report what is saved and what is recomputed, if there is a backward."""
    recompute, report = state.context.recompute, state.report
    if state.request is None or state.derivative is None:
        return
    if state.values is not None:
        if not state.wants_recompute:
            return
        recompute = recompute.at(state.values)
        report.recompute_chosen_for = state.captured.sizes.shapes
    recompute.note([state.request], report)


def _is_compiled(closure: Closure) -> bool:
    """Whether the backend compiles a leaf of it, which may add guards on sizes."""
    assert isinstance(closure, Composite)
    leaves = (c for c in walk_closures(closure.program) if isinstance(c, Leaf))
    return any(leaf.kernels == "backend" for leaf in leaves)


def _note_whole(report: CompileReport, state: Compilation) -> None:
    """Updates a report once the backend's kernels of a deferred backward are made."""
    found = state.report
    report.passes += found.passes
    report.num_kernels += found.num_kernels
    report.num_operators += found.num_operators
    for name in ("num_launches", "peak_bytes", "arena_bytes", "held_bytes", "lower_bound_bytes"):
        setattr(report, name, getattr(found, name))
    if report.made is not None:
        report.made = made_by(state)


def made_by(state: Compilation) -> Made:
    """Returns what a finished compile made, without the model's tensors."""
    forward, backward = _programs(state)
    held = {c for program in state.programs.values() for c in walk_closures(program)}
    planned = state.runs.program if isinstance(state.runs, Runtime) else state.runs
    context, request, asked = state.context, state.request, state.wants_recompute
    return Made(
        captured=_bare(state.captured.program),
        forward=_bare(forward),
        backward=None if backward is None else _bare(backward),
        micro_batches=state.goal.batching.micro_batches,
        kernels={leaf: one for leaf, one in context.recorded.items() if leaf in held},
        memory=None if state.unplanned else _memory(planned),
        frontiers=partial(context.recompute.frontiers, request) if asked and request else tuple,
    )


def _programs(state: Compilation) -> tuple[Program, Program | None]:
    """Returns the forward and the backward that run; for a step, those of one micro-batch."""
    if state.goal.kind != "step":
        # The programs of a pipeline's rank are its stages: the report shows the captured model.
        forward = state.programs.get(programs.PARTS[0], state.captured.program)
        return forward, state.programs.get(programs.PARTS[1])
    (step,) = state.programs.values()
    # Its first call is a forward, and the first call of another closure with a path a backward.
    one = step.calls[0].closure
    other = next(c.closure for c in step.calls if c.path and c.closure is not one)
    assert isinstance(one, Composite)
    assert isinstance(other, Composite)
    return one.program, other.program


def _bare(program: Program) -> Program:
    """Returns the program without sources: a report must not keep the model's tensors alive."""
    return replace(program, sources=())


def _memory(planned: object) -> Memory | RankPlan | None:
    if isinstance(planned, RankProgram):
        return planned.plan
    if not isinstance(planned, PlannedProgram) or planned.allocates_all:
        return None
    return Memory(
        planned.layout,
        planned.offsets,
        planned.plan,
        planned.arena_bytes,
        "gradients" if planned.overlay.hosts else "none",
    )
