"""The results of a compile: a captured program or step, and its runtime."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

import torch

from ..autodiff.derivative import Derivative
from ..autodiff.flows import Draws, Flows, output_order, trained_inputs, used_inputs, view_roots
from ..autodiff.missing_cotangents import MissingCotangents
from ..autodiff.training_program import GradientProgram, StepProgram
from ..backend.launches.torch_native import Hold
from ..backend.run.planned import PlannedProgram, Runtime
from ..reuse.ir.leaf import interpret
from ..reuse.ir.program import Closure, ModelTensor, Program
from ..reuse.ir.torch_symbols import Values, type_at
from ..reuse.ir.types import Type
from .capture.regions import CapturedModel
from .capture.surroundings import one_at_a_time


@dataclass(frozen=True)
class GradientRequest:
    """Which gradients to compile as a program of their own."""

    outputs: tuple[int, ...]  # the outputs of the program that have a cotangent
    moving: tuple[int, ...]  # those of them whose cotangent itself requires grad
    inputs: tuple[int, ...]  # the inputs whose gradients are wanted
    is_differentiated: bool = True  # whether the gradients are themselves differentiated


_MAX_OPEN = 8  # forwards in a row that computed gradients which no backward used


@dataclass
class Habit:
    """Predicts which gradients the next loss will ask for, so that the forward computes them too.

    All shapes of a program share it.
    """

    expected: GradientRequest | None = None  # the request of the last two losses, if they agreed
    _last: GradientRequest | None = None
    _num_open: int = 0

    def note(self, request: GradientRequest | None) -> None:
        """Records the request of a loss; None if it cannot be predicted."""
        # Only after two equal requests: a compile for a single unusual loss would be wasted.
        self.expected = request if request == self._last else None
        self._last = request

    def begin(self) -> None:
        """Counts a forward that computed the gradients."""
        self._num_open += 1
        # Evaluation uses no gradients, so its forwards should stop computing them.
        if self._num_open > _MAX_OPEN:
            self.miss()

    def hit(self) -> None:
        """Records that a backward used the gradients."""
        self._num_open = 0

    def miss(self) -> None:
        """Records that a backward wanted other gradients, or that none ran."""
        self.expected, self._last, self._num_open = None, None, 0


class Facts:
    """Facts about a program that hold for all its shapes; each is computed on first use.

    The program is the captured one, because autograd's rules apply to what the user wrote; the
    derivative has a cotangent for every output.
    """

    def __init__(self, program: Program, derivative: Derivative | None) -> None:
        self._program, self._derivative = program, derivative
        self.habit = Habit()  # predicts the gradients that the next loss asks for
        # For each backward that was compiled later, the state of its compile before link.
        self.backwards: dict[Closure, Any] = {}
        # Cached, because every backward that leaves results unused looks these up.
        self.apart: dict[tuple[frozenset[int], frozenset[int]], bool] = {}  # cache of ``are_apart``
        self.absent: dict[tuple[int, ...], tuple[int, ...]] = {}  # cache of ``absent_gradients``
        self.num_late = 0  # how often deferred kernels were PyTorch's in a run

    def are_apart(self, some: Iterable[int], others: Iterable[int]) -> bool:
        """Returns whether the backwards of two groups of outputs share no saved tensor.

        Autograd then allows one after the other without ``retain_graph``.
        """
        groups = frozenset(some), frozenset(others)
        if groups not in self.apart:
            with one_at_a_time():
                known = self.unused_outputs
                needed = (
                    [frozenset().union(*map(known.reads, g)) for g in groups] if known else None
                )
                self.apart[groups] = needed is not None and needed[0].isdisjoint(needed[1])
        return self.apart[groups]

    def absent_gradients(self, unused: tuple[int, ...]) -> tuple[int, ...]:
        """Returns which gradients are None instead of zero: no used output depends on the input."""
        if unused not in self.absent:
            reach, derivative = self.trained_inputs, self._derivative
            assert derivative is not None
            outputs = set(derivative.cotangent_outputs).difference(unused)
            used = frozenset().union(*(reach[output] for output in outputs))
            inputs = enumerate(derivative.gradient_inputs)
            self.absent[unused] = tuple(i for i, index in inputs if index not in used)
        return self.absent[unused]

    @cached_property
    def unused_outputs(self) -> MissingCotangents | None:
        """Makes backwards for losses that leave outputs unused."""
        return None if self._derivative is None else MissingCotangents(self._derivative)

    @cached_property
    def trained_inputs(self) -> Flows:
        """For each output, the inputs that may get a gradient from it."""
        return trained_inputs(self._program)

    @cached_property
    def view_roots(self) -> list[object]:
        """For each output, what it is a view of."""
        return view_roots(self._program)

    @cached_property
    def read_inputs(self) -> frozenset[int]:
        """The inputs that results are computed from; a new value of a buffer is no result."""
        new_values = {output for output, _ in self._program.writes}
        results = [v for i, v in enumerate(self._program.outputs) if i not in new_values]
        return used_inputs(replace(self._program, outputs=tuple(results), writes=()))

    @cached_property
    def output_order(self) -> list[int]:
        """The outputs in the order in which they are computed."""
        return output_order(self._program)

    @cached_property
    def first_trained(self) -> int | None:
        """The position of the first gradient of a model tensor; None if there is none."""
        sources = self._program.sources
        inputs = self._derivative.gradient_inputs if self._derivative is not None else ()
        # Molecular dynamics wants none of these; a caller tests the first in place of all.
        own = (i for i, k in enumerate(inputs) if isinstance(sources[k], ModelTensor))
        return next(own, None)

    @cached_property
    def draws(self) -> bool:
        """Whether the program draws random numbers."""
        return bool(Draws().of(self._program.calls))


@dataclass(frozen=True)
class CompiledProgram:
    """A captured program and its runtime."""

    captured: CapturedModel
    runtime: Runtime
    facts: Facts  # those that hold for all shapes of the program
    # In training, what the forward saves and what the backward takes.
    derivative: Derivative | None = None
    # Inputs whose storage is saved for backward, so they must not be changed in-place before it
    # runs.
    watched_inputs: tuple[int, ...] = ()
    # Returns the program with a backward for a loss that leaves some outputs unused.
    without: Callable[[CompiledProgram, Sequence[int]], CompiledProgram | None] | None = None
    # Compiles its gradients as a program, for ``create_graph=True`` and to compute them along with
    # the forward; returns None if autograd must run the program for them.
    gradients: Callable[[GradientRequest], CompiledGradients | None] | None = None
    linker: Any = None  # with symbolic sizes, the :class:`.compiler.Linker` for other shapes
    lowered: Any = None  # the state of the compile before link, from which a file is written
    values: Values | None = None  # the numbers that its symbols have here

    @property
    def hold(self) -> Hold | None:
        """C++ helper by which the guard compares identities; None if the extension is not built."""
        return self.runtime.hold

    def interpret(self, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Runs the program operator by operator, so that autograd records each one."""
        return interpret(self.captured.program, inputs, self.values)

    def with_numbers(self, types: Sequence[Type]) -> list[Type]:
        """Returns types of its derivative with the numbers that its symbols have here."""
        return [type_at(t, self.values or Values()) for t in types]

    @property
    def has_late_backward(self) -> bool:
        """Whether the backend's kernels of its backward are deferred, so that PyTorch's run."""
        return self.derivative is not None and self.lowered.goal.late_backward  # type: ignore[no-any-return]

    @property
    def has_late_forward(self) -> bool:
        """Whether the kernels of its forward are deferred with those of the backward."""
        one = self.derivative
        return one is not None and one.has_one_cotangent and self.has_late_backward

    def whole(self) -> CompiledProgram:
        """Returns the program with the backend's kernels in its backward, compiled if need be."""
        if not self.has_late_backward or self.without is None:
            return self
        return self.without(self, ()) or self

    def without_tensors(self) -> CompiledProgram:
        """Returns the program without the model's tensors, for a holder that has them elsewhere."""
        return replace(self, captured=self.captured.without_tensors())


@dataclass(frozen=True)
class CompiledGradients:
    """The compiled gradients of a program, meaning of inputs and results, types of cotangents."""

    compiled: CompiledProgram
    gradients: GradientProgram
    cotangent_types: tuple[Type, ...]


@dataclass(frozen=True)
class CompiledStep:
    """A training step and its runtime; ``saved_bytes`` is what one micro-batch's forward saves."""

    captured: CapturedModel
    step: StepProgram
    runner: PlannedProgram
    saved_bytes: Callable[[], int]
    linker: Any = None
    lowered: Any = None

    @property
    def hold(self) -> Hold | None:
        """C++ helper by which the guard compares identities; None if the extension is not built."""
        native = self.runner.native
        return native.hold if native else None

    def without_tensors(self) -> CompiledStep:
        """Returns the step without the model's tensors, for a holder that has them elsewhere."""
        step = step_without_tensors(self.step)
        return replace(self, captured=self.captured.without_tensors(), step=step)


def step_without_tensors(step: StepProgram) -> StepProgram:
    """Returns the step without references to the model's tensors."""
    return replace(step, model=tuple(tensor.forgotten() for tensor in step.model))


Compiled: TypeAlias = CompiledProgram | CompiledStep
