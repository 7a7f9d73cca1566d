"""The results of a compile: a captured program or step, and its runtime."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol, TypeAlias

import torch

from ..autodiff.derivative import Derivative
from ..autodiff.flows import Draws, Flows, output_order, trained_inputs, view_roots
from ..autodiff.missing_cotangents import MissingCotangents
from ..autodiff.training_program import GradientProgram, StepProgram
from ..backend.launches.torch_native import Hold
from ..backend.run.planned import PlannedProgram, Runtime
from ..reuse.ir.leaf import interpret
from ..reuse.ir.program import Closure, ModelTensor, Program
from ..reuse.ir.torch_symbols import Values
from ..reuse.ir.types import Type
from .capture.regions import CapturedModel
from .capture.surroundings import one_at_a_time
from .report import CompileReport


@dataclass(frozen=True)
class GradientRequest:
    """Which gradients are made a program of their own.

    Attributes:
        outputs: of the program, those that have a cotangent.
        moving: of these, those whose cotangent wants a gradient itself.
        inputs: whose gradients are asked for.
        is_differentiated: whether the gradients are differentiated in their turn.
    """

    outputs: tuple[int, ...]
    moving: tuple[int, ...]
    inputs: tuple[int, ...]
    is_differentiated: bool = True


_MAX_OPEN = 8  # forwards in a row whose gradients nobody asked for


@dataclass
class Habit:
    """Notes the gradients that losses ask of a program, for the next forward; its shapes share it.

    Attributes:
        expected: the gradients that the last two losses asked for, until one asks for others.
    """

    expected: GradientRequest | None = None
    _last: GradientRequest | None = None
    _num_open: int = 0

    def note(self, request: GradientRequest | None) -> None:
        """Takes what a loss asked for; None for what cannot be told ahead."""
        # Twice in a row: one odd loss would cost a compile for nothing.
        self.expected = request if request == self._last else None
        self._last = request

    def begin(self) -> None:
        """Counts a forward that ran with the gradients."""
        self._num_open += 1
        # Evaluation asks for no gradients: its forwards should not go on computing them.
        if self._num_open > _MAX_OPEN:
            self.miss()

    def hit(self) -> None:
        """Notes that the gradients were asked for."""
        self._num_open = 0

    def miss(self) -> None:
        """Notes that others were, or none."""
        self.expected, self._last, self._num_open = None, None, 0


class Facts:
    """Holds what is known of a program at all its shapes, found where it is first asked for.

    Args:
        program: as captured: autograd goes by what the user wrote, not by what runs.
        derivative: with a cotangent for every output, if there is one.

    Attributes:
        habit: what losses lately asked for.
        backwards: compiles up to link of those for losses that leave outputs unused.
        apart: what ``are_apart`` was asked for, and its answers.
        absent: the same of ``absent_gradients``.
        num_late: runs of a backward that has PyTorch's kernels until it is needed.
    """

    def __init__(self, program: Program, derivative: Derivative | None) -> None:
        self._program, self._derivative = program, derivative
        self.habit = Habit()
        self.backwards: dict[Closure, Any] = {}
        # A backward asks this of every result that it leaves unused: each key and value in a cache.
        self.apart: dict[tuple[frozenset[int], frozenset[int]], bool] = {}
        self.absent: dict[tuple[int, ...], tuple[int, ...]] = {}
        self.num_late = 0

    def are_apart(self, some: Iterable[int], others: Iterable[int]) -> bool:
        """Returns whether nothing that is saved for some outputs is needed for others, too.

        Autograd then lets one follow the other without ``retain_graph``.
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
        """Returns positions of gradients that are absent, not zero: no used output leads there."""
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
        """The inputs to which a gradient of each output may come back."""
        return trained_inputs(self._program)

    @cached_property
    def view_roots(self) -> list[object]:
        """Of each output, what it is a view of."""
        return view_roots(self._program)

    @cached_property
    def output_order(self) -> list[int]:
        """The outputs as they are computed."""
        return output_order(self._program)

    @cached_property
    def first_trained(self) -> int | None:
        """Which gradient is the first of a tensor of the model; None if none is."""
        sources = self._program.sources
        inputs = self._derivative.gradient_inputs if self._derivative is not None else ()
        # Molecular dynamics asks for none of these; the first stands for all that come after it.
        own = (i for i, k in enumerate(inputs) if isinstance(sources[k], ModelTensor))
        return next(own, None)

    @cached_property
    def draws(self) -> bool:
        """Whether it draws random numbers."""
        return bool(Draws().of(self._program.calls))


@dataclass(frozen=True)
class CompiledProgram:
    """A captured program and its runtime.

    ``derivative`` is there when training: what the forward saves and hands over, and what the
    backward takes. ``watched_inputs`` share memory with what is saved, so that they must not change
    in between. ``without`` makes the same program with a backward for some outputs unused.
    ``gradients`` compiles its gradients as a program of their own, for ``create_graph=True`` and
    ahead of losses; None where autograd has to run the program. ``linker`` links it for another
    shape, where sizes are symbols. ``lowered`` is the compile up to link, of which a file is made.
    ``values`` are the numbers that its symbols have here.
    """

    captured: CapturedModel
    runtime: Runtime
    facts: Facts
    derivative: Derivative | None = None
    watched_inputs: tuple[int, ...] = ()
    without: Callable[[CompiledProgram, Sequence[int]], CompiledProgram | None] | None = None
    gradients: Callable[[GradientRequest], CompiledGradients | None] | None = None
    linker: Relinking | None = None
    lowered: Any = None
    values: Values | None = None

    @property
    def hold(self) -> Hold | None:
        """C++ helper by which the guard compares identities; None if the extension is not built."""
        return self.runtime.hold

    def interpret(self, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Runs the program operator by operator, so that autograd sees each."""
        return interpret(self.captured.program, inputs, self.values)

    @property
    def has_late_backward(self) -> bool:
        """Whether its backward has PyTorch's kernels, in place of the backend's."""
        return self.derivative is not None and self.lowered.goal.late_backward  # type: ignore[no-any-return]

    def whole(self) -> CompiledProgram:
        """Returns the same with the backend's kernels in its backward, which may be made now."""
        if not self.has_late_backward or self.without is None:
            return self
        return self.without(self, ()) or self

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
    lowered: Any = None

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
