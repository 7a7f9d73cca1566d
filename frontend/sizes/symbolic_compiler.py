"""Programs of symbolic sizes: compiled once, linked for each shape."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ...autodiff.derivative import Derivative, Request
from ...autodiff.flows import saved_inputs
from ...backend.link.link import FlatProgram
from ...backend.run.runtime import ClosureRuntime, PlannedRuntime
from ...reuse.errors import PlanError
from ...reuse.ir.program import Closure, Composite, Leaf, Program, walk_closures
from ...reuse.ir.torch_symbols import SIZE_TYPES, Values, expression_of, value_of
from ..capture.regions import CapturedModel
from ..capture.surroundings import one_at_a_time
from ..compiled import CompiledGradients, CompiledProgram, GradientRequest
from ..compiler import (
    SHAPE,
    SIZES,
    SIZES_BACKWARD,
    Compiler,
    note_recompute_at,
    unplanned_of,
    without_outputs,
)
from ..options import Options
from ..passes.context import Context
from ..passes.memory import linked, module_bytes
from ..passes.programs import PARTS, programs_of
from ..passes.sizes import ShapeCompilation, check_budget
from ..passes.state import Compilation, Subject, run
from ..report import CompileReport
from ..unused_outputs import UnusedOutputs
from .at_numbers import AtNumbers

if TYPE_CHECKING:
    from .torch_input_sizes import InputSizes


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
    unused_outputs: UnusedOutputs | None
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
            UnusedOutputs(derivative) if derivative is not None else None,
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
