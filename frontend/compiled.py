"""What a compile gives: a captured program or step, and what runs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from ..autodiff.derivative import Derivative
from ..autodiff.higher_order.gradient_program import GradientProgram
from ..autodiff.missing_cotangents import MissingCotangents
from ..autodiff.training_program import StepProgram
from ..backend.launches.torch_native import Hold
from ..backend.run.runtime import Runtime
from ..backend.run.unplanned import StepRunner
from .capture.regions import CapturedModel


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
    """A captured program and what runs it.

    ``derivative`` is there when training: what the forward saves and hands over, and what the
    backward takes. ``watched_inputs`` share memory with what is saved, so that they must not change
    in between. ``without`` makes the same program with a backward for some outputs unused, of which
    ``unused_outputs`` knows the graphs. ``gradients`` compiles its gradients as a program of their
    own, with a backward, for ``create_graph=True``.
    """

    captured: CapturedModel
    runtime: Runtime
    derivative: Derivative | None = None
    watched_inputs: tuple[int, ...] = ()
    unused_outputs: MissingCotangents | None = None
    without: Callable[[CompiledProgram, Sequence[int]], CompiledProgram | None] | None = None
    gradients: Callable[[GradientRequest], CompiledGradients] | None = None

    @property
    def hold(self) -> Hold | None:
        """The native comparison of a guard, if it is at hand."""
        return self.runtime.hold

    def without_tensors(self) -> CompiledProgram:
        """Returns the same for one who has the model's tensors from elsewhere."""
        return replace(self, captured=self.captured.without_tensors())


@dataclass(frozen=True)
class CompiledGradients:
    """The gradients of a program, compiled, and where its inputs and results belong."""

    compiled: CompiledProgram
    gradients: GradientProgram


@dataclass(frozen=True)
class CompiledStep:
    """A training step, and what runs it; a micro-batch's forward saves so many bytes."""

    captured: CapturedModel
    step: StepProgram
    runner: StepRunner
    saved_bytes: int

    @property
    def hold(self) -> Hold | None:
        """The native comparison of a guard, if it is at hand."""
        native = self.runner.native
        return native.hold if native else None

    def without_tensors(self) -> CompiledStep:
        """Returns the same for one who has the model's tensors from elsewhere."""
        model = tuple(tensor.forgotten() for tensor in self.step.model)
        step = replace(self.step, model=model)
        return replace(self, captured=self.captured.without_tensors(), step=step)


AnyCompiled = TypeVar("AnyCompiled", bound=CompiledProgram | CompiledStep)
"""What a compile gives, of one kind."""
