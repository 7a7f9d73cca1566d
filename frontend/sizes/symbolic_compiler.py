"""Programs and training steps of symbolic sizes: compiled once, linked for each shape."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.fx
from torch import nn

from ...autodiff.derivative import Derivative, Request
from ...autodiff.flows import saved_inputs
from ...autodiff.missing_cotangents import MissingCotangents
from ...autodiff.traces.torch_make_fx import fake_tensor, new_fake_mode
from ...autodiff.training_program import StepProgram
from ...backend.link.link import FlatProgram
from ...backend.run.runtime import ClosureRuntime, PlannedRuntime
from ...recompute.sizes_at import SizesAt
from ...reuse.errors import PlanError
from ...reuse.ir.leaf import ModalInterpreter, flat_types, without_autocast
from ...reuse.ir.program import Call, Closure, Composite, Leaf, Program, Value, walk_closures
from ...reuse.ir.torch_symbols import SIZE_TYPES, Values, expression_of, value_of
from ..capture.regions import CapturedModel
from ..capture.surroundings import one_at_a_time
from ..compiled import CompiledGradients, CompiledProgram, CompiledStep, GradientRequest
from ..compiler import (
    SHAPE,
    SIZES,
    SIZES_BACKWARD,
    STEP_SHAPE,
    STEP_SIZES,
    Compiler,
    compiled_step,
    note_recompute_at,
    unplanned_of,
    without_outputs,
)
from ..options import Batching, Options
from ..passes.context import Context
from ..passes.memory import linked, module_bytes, step_bytes
from ..passes.programs import PARTS, StepCompilation, programs_of
from ..passes.sizes import ShapeCompilation, StepShapeCompilation, check_budget
from ..passes.state import Compilation, Subject, run
from ..report import CompileReport

if TYPE_CHECKING:
    from .torch_input_sizes import InputSizes


class AtNumbers:
    """Puts numbers in place of sizes, once per closure.

    Args:
        values: of the symbols.
    """

    def __init__(self, values: Values) -> None:
        self._sizes = SizesAt(values)
        self._closures: dict[Closure, Closure] = {}

    def program(self, program: Program) -> Program:
        """Returns the program for these sizes; as captured, not differentiated."""
        new: dict[Value, Value] = {}

        def of(values: tuple[Value, ...]) -> tuple[Value, ...]:
            for value in values:
                if value not in new:
                    new[value] = Value(self._sizes.type(value.type), value.hint)
            return tuple(new[value] for value in values)

        inputs = of(program.inputs)
        calls = tuple(
            Call(self._closure(c.closure), of(c.args), of(c.results), c.path, c.recompute)
            for c in program.calls
        )
        return replace(program, inputs=inputs, calls=calls, outputs=of(program.outputs))

    def _closure(self, closure: Closure) -> Closure:
        if closure not in self._closures:
            if isinstance(closure, Composite):
                made: Closure = replace(closure, program=self.program(closure.program))
            else:
                assert isinstance(closure, Leaf)
                made = self._leaf(closure)
            self._closures[closure] = made
        return self._closures[closure]

    @without_autocast
    def _leaf(self, leaf: Leaf) -> Leaf:
        made = self._sizes.leaf(leaf)
        if made is not leaf:
            mode = new_fake_mode()
            inputs = [fake_tensor(mode, t) for t in flat_types(made.input_types)]
            with mode, torch.no_grad():
                _Refreshing(made.module).run_flat(inputs)
        return made


class _Refreshing(ModalInterpreter):
    """Notes on each operator what it gives, so that views share the memory they are of."""

    def run_node(self, n: torch.fx.Node) -> Any:
        result = super().run_node(n)
        if n.op != "output":
            n.meta["val"] = result
        return result


@dataclass(frozen=True)
class SymbolicProgram:
    """A compiled program whose sizes are symbols. Not run itself.

    Attributes:
        request: the derivative that was asked for, with what was chosen.
        settled: which symbols had turned out to be others, or numbers, when it was compiled.
    """

    captured: CapturedModel
    sizes: InputSizes
    flats: Mapping[str, FlatProgram]
    request: Request | None
    derivative: Derivative | None
    watched_inputs: tuple[int, ...]
    unused_outputs: MissingCotangents | None
    settled: tuple[Any, ...]

    def without_tensors(self) -> SymbolicProgram:
        """Returns the same for one who has the model's tensors from elsewhere."""
        return replace(self, captured=self.captured.without_tensors())


class SymbolicCompiler:
    """Compiles for any sizes. One compiler for one capture: symbols of two are not the same.

    Nothing is taken from disk: an entry would not bring the questions that were asked of sizes.
    """

    def __init__(self, options: Options) -> None:
        self._context = Context(replace(options, cache="off"))
        self._variants: dict[Closure, SymbolicProgram] = {}

    def report(self) -> CompileReport:
        """Returns the report of a compile or a link that is about to begin."""
        return self._context.report(train=torch.is_grad_enabled())

    @one_at_a_time
    def compile_symbolic(
        self,
        model: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        sizes: Callable[[], InputSizes],
        report: CompileReport,
    ) -> SymbolicProgram:
        """Runs the passes up to link.

        Raises:
            CaptureError: if the model cannot be captured with symbolic sizes.
            PlanError: if an option needs numbers.
        """
        subject = Subject(model, args, kwargs, report.train, sizes=sizes)
        state = Compilation(context=self._context, report=report, subject=subject)
        state = linked(run(SIZES, state))
        captured, derivative = state.captured, state.derivative
        return SymbolicProgram(
            captured,
            captured.sizes,
            state.flats,
            state.request,
            derivative,
            saved_inputs(state.programs[PARTS[0]]) if derivative is not None else (),
            MissingCotangents(derivative) if derivative is not None else None,
            captured.sizes.settled,
        )

    @one_at_a_time
    def at(
        self, symbolic: SymbolicProgram, values: Values, report: CompileReport
    ) -> CompiledProgram:
        """Links the program for numbers that its conditions hold for.

        Raises:
            OverBudgetError: if what was chosen for other sizes holds more than the budget at these.
            PlanError: if a kernel lays a result out in another way than the program says, or what
                was compiled later settled sizes that this program has open.
        """
        if symbolic.sizes.settled != symbolic.settled:
            raise PlanError("a backward without some outputs' cotangents settled sizes")
        state = ShapeCompilation(
            context=self._context,
            report=report,
            seen=symbolic.captured,
            request=symbolic.request,
            derivative=symbolic.derivative,
            flats=symbolic.flats,
            unplanned=unplanned_of(report),
            values=values,
        )
        state = run(SHAPE, state)
        check_budget(state, module_bytes)
        note_recompute_at(state)
        report.describe(symbolic.captured)
        assert isinstance(state.runs, PlannedRuntime | ClosureRuntime)
        captured = symbolic.captured
        captured = replace(captured, program=_program_at(captured.program, values))
        relinked = partial(self._relinked_at, symbolic, values)
        without = partial(without_outputs, relinked=relinked, report=report)
        watched, unused = symbolic.watched_inputs, symbolic.unused_outputs
        gradients = partial(self._gradients_at, symbolic.captured.without_tensors(), values, report)
        return CompiledProgram(
            captured, state.runs, state.derivative, watched, unused, without, gradients
        )

    def _gradients_at(
        self,
        captured: CapturedModel,
        values: Values,
        counted: CompileReport,
        request: GradientRequest,
    ) -> CompiledGradients:
        """Compiles gradients that are differentiated, for these sizes alone."""
        program = AtNumbers(values).program(captured.program)
        options = replace(self._context.options, cache="off")
        return Compiler(options).compile_gradients(
            replace(captured, program=program), counted, request
        )

    def _relinked_at(
        self,
        symbolic: SymbolicProgram,
        values: Values,
        compiled: CompiledProgram,
        derivative: Derivative,
        report: CompileReport,
    ) -> CompiledProgram | None:
        """Returns the program with another derivative, which is compiled once for all shapes.

        None if that is not right for these sizes.
        """
        key = derivative.backward
        try:
            if key not in self._variants:
                self._variants[key] = self._variant(symbolic, derivative, report)
            if _is_compiled(key) and not symbolic.sizes.are_right(values):
                return None
            return self.at(self._variants[key], values, report)
        except Exception:  # whatever cannot be had with symbols
            return None

    def _variant(
        self, symbolic: SymbolicProgram, derivative: Derivative, report: CompileReport
    ) -> SymbolicProgram:
        programs = programs_of(derivative)
        state = Compilation(context=self._context, report=report, programs=programs)
        flats = linked(run(SIZES_BACKWARD, state)).flats
        return replace(symbolic, flats=flats, request=None, derivative=derivative)


def _is_compiled(closure: Closure) -> bool:
    """Whether the backend compiles any of it, which asks questions of sizes."""
    assert isinstance(closure, Composite)
    leaves = (c for c in walk_closures(closure.program) if isinstance(c, Leaf))
    return any(leaf.kernels == "backend" for leaf in leaves)


def _program_at(program: Program, values: Values) -> Program:
    """Returns the program with numbers among its results."""
    tree = program.output_tree
    leaves = tuple(
        (kind, value_of(expression_of(value), values) if isinstance(value, SIZE_TYPES) else value)
        for kind, value in tree.leaves
    )
    return replace(program, output_tree=replace(tree, leaves=leaves))


@dataclass(frozen=True)
class SymbolicStep:
    """A compiled training step whose sizes, those of a micro-batch, are symbols. Not run itself."""

    captured: CapturedModel
    sizes: InputSizes
    flats: Mapping[str, FlatProgram]
    request: Request | None
    derivative: Derivative
    step: StepProgram

    def without_tensors(self) -> SymbolicStep:
        """Returns the same for one who has the model's tensors from elsewhere."""
        model = tuple(tensor.forgotten() for tensor in self.step.model)
        step = replace(self.step, model=model)
        return replace(self, captured=self.captured.without_tensors(), step=step)


class SymbolicStepCompiler:
    """Compiles steps for any sizes, as :class:`SymbolicCompiler` does programs.

    Args:
        options: how they are compiled.
        batching: how many micro-batches, in which order.
    """

    def __init__(self, options: Options, batching: Batching) -> None:
        self._context = Context(replace(options, cache="off"))
        self._batching = batching

    def report(self) -> CompileReport:
        """Returns the report of a compile or a link that is about to begin."""
        return self._context.report(train=True)

    @one_at_a_time
    def compile_symbolic(
        self,
        model: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        sizes: Callable[[], InputSizes],
        report: CompileReport,
    ) -> SymbolicStep:
        """Runs the passes up to link; ``args`` and ``kwargs`` are those of one micro-batch.

        Raises:
            CaptureError: if the model cannot be captured with symbolic sizes.
            PlanError: if an option needs numbers.
        """
        state = StepCompilation(
            context=self._context,
            report=report,
            subject=Subject(model, args, kwargs, train=True, sizes=sizes),
            batching=self._batching,
        )
        state = linked(run(STEP_SIZES, state))
        captured, derivative = state.captured, state.derivative
        assert derivative is not None
        flats, request = state.flats, state.request
        return SymbolicStep(captured, captured.sizes, flats, request, derivative, state.step)

    @one_at_a_time
    def at(self, symbolic: SymbolicStep, values: Values, report: CompileReport) -> CompiledStep:
        """Links the step for numbers that its conditions hold for.

        Raises:
            OverBudgetError: if what was chosen for other sizes holds more than the budget at these.
            PlanError: if a kernel lays a result out in another way than the program says.
        """
        state = StepShapeCompilation(
            context=self._context,
            report=report,
            seen=symbolic.captured,
            request=symbolic.request,
            derivative=symbolic.derivative,
            flats=symbolic.flats,
            values=values,
            batching=self._batching,
            composed=symbolic.step,
        )
        state = run(STEP_SHAPE, state)
        check_budget(state, step_bytes)
        note_recompute_at(state)
        report.describe(symbolic.captured)
        return compiled_step(state)
