"""Training steps of symbolic sizes: compiled once, linked for each shape of a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import nn

from ...autodiff.derivative import Derivative, Request
from ...autodiff.training_program import StepProgram
from ...backend.link.link import FlatProgram
from ...reuse.ir.torch_symbols import Values
from ..capture.regions import CapturedModel
from ..capture.surroundings import one_at_a_time
from ..compiled import CompiledStep
from ..compiler import STEP_SHAPE, STEP_SIZES, compiled_step, note_recompute_at
from ..options import Batching, Options
from ..passes.context import Context
from ..passes.memory import linked, step_bytes
from ..passes.programs import StepCompilation
from ..passes.sizes import StepShapeCompilation, check_budget
from ..passes.state import Subject, run
from ..report import CompileReport

if TYPE_CHECKING:
    from .torch_input_sizes import InputSizes


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
