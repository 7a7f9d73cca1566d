"""The compiler: for each way in, the list of passes in order, from a model to something that runs.

A pass takes one compile to its next state (``passes/state.py``), which is never changed. One
runner times each pass, verifies what it made where asked, and lets others look on. Everything
before link costs one visit per different closure. ``lazyinline inspect --passes`` prints these
lists; ``lazyinline inspect TARGET --after PASS --diff`` shows what one did.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from ..autodiff.derivative import Derivative, Differentiator
from ..autodiff.flows import saved_inputs
from ..autodiff.missing_cotangents import MissingCotangents
from ..backend.run.planned import PlannedProgram
from ..backend.run.runtime import ClosureRuntime, PlannedRuntime
from ..backend.run.unplanned import UnplannedStep
from .capture.regions import CapturedModel
from .capture.surroundings import one_at_a_time
from .compiled import CompiledGradients, CompiledProgram, CompiledStep, GradientRequest
from .options import Batching, Options
from .passes.context import Context
from .passes.gradients import (
    GradientCompilation,
    add_gradients,
    differentiate_gradients,
    require_data,
    take_gradients,
)
from .passes.made import made_by
from .passes.memory import (
    choose_recompute,
    choose_step_recompute,
    describe_gpu,
    is_asked_for,
    link_module,
    link_step,
)
from .passes.programs import (
    PARTS,
    StepCompilation,
    capture,
    decompose,
    derive,
    differentiate,
    differentiate_loss,
    differentiate_whole,
    lower,
    programs_of,
    reduce_to_primitives,
    repeat_micro_batches,
)
from .passes.sizes import (
    ShapeCompilation,
    capture_sizes,
    choose_recompute_sizes,
    choose_step_recompute_sizes,
    link_shape,
    link_step_shape,
)
from .passes.stages import (
    choose_stage_recompute,
    differentiate_stages,
    link_rank,
    predict,
    split,
)
from .passes.state import Compilation, Pass, Subject, Unplanned, Watch, no_watch, run
from .report import CompileReport

# ---- the lists -------------------------------------------------------------------------------

# lazyinline.compile: a module that is called, in training with its backward.
MODULE = (
    capture,
    derive,
    differentiate,
    choose_recompute,
    decompose,
    lower,
    link_module,
    describe_gpu,
)

# lazyinline.compile_step: forward and backward of all micro-batches as one program.
STEP = (
    capture,
    derive,
    differentiate_loss,
    choose_step_recompute,
    repeat_micro_batches,
    decompose,
    lower,
    link_step,
    describe_gpu,
)

# lazyinline.pipeline: one rank's stages. After capture the ranks compare what they saw; what
# follows the cut is run again, with less to save, until the plan fits the rank's memory.
RANK_CUT = (split, differentiate_stages)
RANK_FIT = (choose_stage_recompute, decompose, lower, link_rank)
RANK = (capture, derive, *RANK_CUT, *RANK_FIT, predict)

# lazyinline.compile with sizes that vary: kernels once, for symbols; a link for each shape.
SIZES = (capture_sizes, derive, differentiate, choose_recompute_sizes, decompose, lower)
SHAPE = (link_shape,)

# lazyinline.compile_step with sizes that vary.
STEP_SIZES = (
    capture_sizes,
    derive,
    differentiate_loss,
    choose_step_recompute_sizes,
    repeat_micro_batches,
    decompose,
    lower,
)
STEP_SHAPE = (link_step_shape,)

# Another backward of a compiled module, for a loss that leaves outputs unused.
BACKWARD = (decompose, lower, link_module)
SIZES_BACKWARD = (decompose, lower)

# create_graph=True: the gradients of a compiled module as a program, with a backward.
GRADIENTS = (take_gradients, differentiate_gradients, decompose, lower, link_module)

# lazyinline.export_onnx: what is translated, leaf by leaf.
EXPORT = (capture, derive, require_data, add_gradients)

# lazyinline inspect --level primitive: what is looked at, checked and counted; nothing runs it.
PRIMITIVES = (capture, derive, differentiate_whole, reduce_to_primitives)

WAYS: dict[str, tuple[str, Sequence[Pass]]] = {
    "compile": ("a module that is called", MODULE),
    "step": ("a training step of all micro-batches", STEP),
    "rank": ("the stages of one rank of a pipeline", RANK),
    "sizes": ("a module whose sizes vary", (*SIZES, *SHAPE)),
    "step sizes": ("a training step whose sizes vary", (*STEP_SIZES, *STEP_SHAPE)),
    "backward": ("a backward for fewer outputs", BACKWARD),
    "gradients": ("the gradients of a module, to be differentiated", GRADIENTS),
    "export": ("an ONNX file", EXPORT),
    "primitives": ("a model as primitives, to be looked at", PRIMITIVES),
}
"""Every way in, for people: what it makes, and its passes."""


# ---- who runs them ---------------------------------------------------------------------------


class Compiler:
    """Runs the passes; keeps what it made per closure for the next program it compiles."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.context = Context(options)

    @property
    def differentiator(self) -> Differentiator:
        """Makes derivatives as the backend wants them, each once."""
        return self.context.differentiator

    def started(self, subject: Subject) -> Compilation:
        """Returns what is known before the first pass."""
        return Compilation(
            context=self.context, report=self.context.report(train=subject.train), subject=subject
        )

    def step_started(self, subject: Subject, batching: Batching) -> StepCompilation:
        """Returns what is known of a step before the first pass; its subject is a micro-batch."""
        return StepCompilation(
            context=self.context,
            report=self.context.report(train=True),
            subject=subject,
            batching=batching,
        )

    @one_at_a_time
    def compile(
        self,
        model: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        train: bool,
        watch: Watch = no_watch,
    ) -> tuple[CompiledProgram, CompileReport]:
        """Compiles a model for inputs of these layouts.

        Raises:
            CaptureError: if the model cannot be captured.
            PlanError: if it cannot be run (parameters on the meta device).
        """
        state = self.started(Subject(model, args, kwargs, train))
        with self.context.cached(state.report):
            state = run(MODULE, state, watch)
        note_recompute(state)
        state.report.made = made_by(state)
        return self._with_gradients(state, state.report), state.report

    @one_at_a_time
    def compile_step(
        self,
        model: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        batching: Batching,
    ) -> tuple[CompiledStep, CompileReport]:
        """Compiles a training step; ``args`` and ``kwargs`` are those of one micro-batch.

        Raises:
            CaptureError: if the model cannot be captured.
            PlanError: if its result is not a scalar loss that depends on a parameter.
        """
        state = self.step_started(Subject(model, args, kwargs, train=True), batching)
        with self.context.cached(state.report):
            state = run(STEP, state)
        note_recompute(state)
        state.report.made = made_by(state)
        return compiled_step(state), state.report

    @one_at_a_time
    def compile_gradients(
        self, captured: CapturedModel, counted: CompileReport, request: GradientRequest
    ) -> CompiledGradients:
        """Compiles the gradients of a captured program as a program, with a backward.

        ``counted`` is the report of the model that they belong to.

        Raises:
            PlanError: if they have none.
        """
        state = GradientCompilation(
            context=self.context,
            report=self.context.report(train=True),
            seen=captured,
            outputs=request.outputs,
            moving=request.moving,
        )
        with self.context.cached(state.report):
            state = run(GRADIENTS, state)
        assert state.gradients is not None
        counted.num_gradients += 1
        return CompiledGradients(self._with_gradients(state, counted), state.gradients)

    def _with_gradients(self, state: Compilation, counted: CompileReport) -> CompiledProgram:
        made = compiled_program(state, self._relinked)
        seen = made.captured.without_tensors()
        return replace(made, gradients=partial(self.compile_gradients, seen, counted))

    def _relinked(
        self, compiled: CompiledProgram, derivative: Derivative, report: CompileReport
    ) -> CompiledProgram:
        """Compiles the same program with another derivative."""
        state = Compilation(
            context=self.context,
            report=report,
            seen=compiled.captured,
            derivative=derivative,
            programs=programs_of(derivative),
            unplanned=unplanned_of(report),
        )
        with self.context.cached(report):
            state = run(BACKWARD, state)
        assert isinstance(state.runs, PlannedRuntime | ClosureRuntime)
        return replace(compiled, runtime=state.runs, derivative=derivative)


def compiled_step(state: StepCompilation) -> CompiledStep:
    """Returns what a finished compile of a training step made."""
    assert isinstance(state.runs, PlannedProgram | UnplannedStep)
    assert state.derivative is not None
    saved_bytes = state.derivative.saved_type.num_bytes
    return CompiledStep(state.captured, state.step, state.runs, saved_bytes)


Relinked = Callable[[CompiledProgram, Derivative, CompileReport], CompiledProgram | None]
"""Gives a compiled program another derivative; None where that cannot be had."""


def compiled_program(state: Compilation, relinked: Relinked) -> CompiledProgram:
    """Returns what a finished compile of a module made, and the way to other backwards of it."""
    derivative = state.derivative
    assert isinstance(state.runs, PlannedRuntime | ClosureRuntime)
    if derivative is None:
        return CompiledProgram(state.captured, state.runs)
    watched = saved_inputs(state.programs[PARTS[0]])
    without = partial(without_outputs, relinked=relinked, report=state.report)
    unused = MissingCotangents(derivative)
    return CompiledProgram(state.captured, state.runs, derivative, watched, unused, without)


@one_at_a_time
def without_outputs(
    compiled: CompiledProgram, unused: Sequence[int], relinked: Relinked, report: CompileReport
) -> CompiledProgram | None:
    """Compiles another backward for the same forward; None where it cannot be had.

    Where the backend's kernels do not go with the forward as it is, it gets PyTorch's.
    """
    known = compiled.unused_outputs
    for kernels in ("backend", "eager"):
        derivative = known.without(unused, kernels) if known is not None else None
        if derivative is None:
            break
        passes = CompileReport(True, report.backend, report.reuse, unplanned=report.unplanned)
        made = relinked(compiled, derivative, passes)
        if made is not None and type(made.runtime) is type(compiled.runtime):
            report.num_backwards += 1
            return made
    return None


def note_recompute(state: Compilation) -> None:
    """Says in the report what is saved and what is computed again, where there is a backward."""
    if state.request is not None and state.derivative is not None:
        state.context.recompute.note([state.request], state.report)


def note_recompute_at(state: ShapeCompilation) -> None:
    """The same for numbers in place of symbols, and for which it was chosen (where asked for)."""
    if state.request is not None and is_asked_for(state):
        state.context.recompute.at(state.values).note([state.request], state.report)
        state.report.recompute_chosen_for = state.captured.sizes.shapes


def unplanned_of(report: CompileReport) -> Unplanned | None:
    """Returns what a report says of why memory is not planned: what follows is not either."""
    return Unplanned(report.unplanned) if report.unplanned else None
