"""The results of a compile: a captured program or step, and its runtime."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias

from ..autodiff.derivative import Derivative
from ..autodiff.flows import Flows
from ..autodiff.missing_cotangents import MissingCotangents
from ..autodiff.training_program import GradientProgram, StepProgram
from ..backend.launches.torch_native import Hold
from ..backend.run.planned import PlannedProgram, Runtime
from ..reuse.ir.torch_symbols import Values
from ..reuse.ir.types import Type
from .capture.regions import CapturedModel
from .report import CompileReport


@dataclass(frozen=True)
class GradientRequest:
    """Which gradients are to be differentiated.

    Attributes:
        outputs: of the program, those that have a cotangent.
        moving: of these, those whose cotangent wants a gradient itself.
    """

    outputs: tuple[int, ...]
    moving: tuple[int, ...]


@dataclass(frozen=True)
class CompiledProgram:
    """A captured program and its runtime.

    ``derivative`` is there when training: what the forward saves and hands over, and what the
    backward takes. ``watched_inputs`` share memory with what is saved, so that they must not change
    in between. ``without`` makes the same program with a backward for some outputs unused, of which
    ``unused_outputs`` finds the graphs. ``trained_inputs`` are those to which a gradient of each
    output may come back. ``gradients`` compiles its gradients as a program of their own, with a
    backward, for ``create_graph=True``. ``linker`` links it for another shape, where sizes are
    symbols.
    """

    captured: CapturedModel
    runtime: Runtime
    derivative: Derivative | None = None
    watched_inputs: tuple[int, ...] = ()
    unused_outputs: Callable[[], MissingCotangents | None] = lambda: None
    trained_inputs: Callable[[], Flows] = list
    without: Callable[[CompiledProgram, Sequence[int]], CompiledProgram | None] | None = None
    gradients: Callable[[GradientRequest], CompiledGradients] | None = None
    linker: Relinking | None = None

    @property
    def hold(self) -> Hold | None:
        """C++ helper by which the guard compares identities; None if the extension is not built."""
        return self.runtime.hold

    def without_tensors(self) -> CompiledProgram:
        """Returns the same for one who has the model's tensors from elsewhere."""
        return replace(self, captured=self.captured.without_tensors())


@dataclass(frozen=True)
class CompiledGradients:
    """The gradients of a program, compiled; where its inputs and results belong; their types."""

    compiled: CompiledProgram
    gradients: GradientProgram
    input_types: tuple[Type, ...]


@dataclass(frozen=True)
class CompiledStep:
    """A training step and its runtime; a micro-batch's forward saves so many bytes."""

    captured: CapturedModel
    step: StepProgram
    runner: PlannedProgram
    saved_bytes: Callable[[], int]
    linker: Relinking | None = None

    @property
    def hold(self) -> Hold | None:
        """C++ helper by which the guard compares identities; None if the extension is not built."""
        native = self.runner.native
        return native.hold if native else None

    def without_tensors(self) -> CompiledStep:
        """Returns the same for one who has the model's tensors from elsewhere."""
        step = step_without_tensors(self.step)
        return replace(self, captured=self.captured.without_tensors(), step=step)


def step_without_tensors(step: StepProgram) -> StepProgram:
    """Returns the same step, which does not keep the model's tensors alive."""
    return replace(step, model=tuple(tensor.forgotten() for tensor in step.model))


Compiled: TypeAlias = CompiledProgram | CompiledStep


class Relinking(Protocol):
    """Links a program of symbolic sizes for further shapes."""

    @property
    def sizes(self) -> Any:
        """The symbols, and what the compile took for granted of them."""

    def relink(self, values: Values) -> tuple[Compiled, CompileReport]:
        """Links it for numbers that its conditions hold for.

        Raises:
            PlanError: if it cannot be right for them after all.
        """
