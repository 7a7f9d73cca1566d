"""What a schedule asks of a stage: steps for one micro-batch, values that travel, and counts.

They run on tensors that PyTorch allocates, or in an arena planned for a rank's whole schedule.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from ..reuse.errors import PipelineError
from ..reuse.ir.program import ModelTensor
from ..reuse.ir.transfer import Wire
from .actions import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Action
from .process_groups import GradientSums
from .rank_order import RankOrder
from .stage_derivative import StageDerivative


class StageSteps(Protocol):
    """A stage's steps for one micro-batch at a time, and the values that travel between stages.

    Those have a ``way``: ``"F"`` for activations, ``"B"`` for their gradients.
    """

    derived: StageDerivative
    counts: StageCounts

    def inbox(self, way: str, micro_batch: int) -> Sequence[Tensor]:
        """Returns memory to receive the values of another rank into."""

    def drop_inbox(self, way: str, micro_batch: int) -> None:
        """Takes that memory back: nothing was received."""

    def outbox(self, way: str, micro_batch: int) -> Sequence[Tensor]:
        """Returns the values for another rank, as they travel."""

    def take(self, way: str, micro_batch: int, values: Sequence[Tensor]) -> None:
        """Takes the values of a neighbour on this rank."""

    def hand_over(self, way: str, micro_batch: int) -> Sequence[Tensor]:
        """Returns the values for a neighbour on this rank."""

    def forward(self, micro_batch: int, user: Sequence[Tensor]) -> Sequence[Tensor]:
        """Runs the forward; returns the results, on the last stage."""

    def backward(self, micro_batch: int) -> None:
        """Runs the whole backward."""

    def backward_input(self, micro_batch: int) -> None:
        """Runs its early half: gradients that travel."""

    def backward_weight(self, micro_batch: int) -> None:
        """Runs its late half, after the early one: gradients of parameters."""

    def clear(self) -> None:
        """Begins again, without micro-batches in flight."""


@dataclass
class StageCounts:
    """How often each step ran, and the seconds of each kind of action; for reports and tests."""

    forward: int = 0
    backward: int = 0
    backward_input: int = 0
    backward_weight: int = 0
    seconds: dict[str, tuple[int, float]] = field(default_factory=dict)

    def reset(self) -> None:
        """Counts from nothing again."""
        self.forward = self.backward = self.backward_input = self.backward_weight = 0
        self.seconds = {}

    @contextmanager
    def timed(self, kind: str) -> Iterator[None]:
        """Adds the time inside to a kind of action: how many, and how long together."""
        start = time.perf_counter()
        yield
        number, total = self.seconds.get(kind, (0, 0.0))
        self.seconds[kind] = (number + 1, total + time.perf_counter() - start)


RunStage = Callable[[list[Tensor]], list[Tensor]]
"""Runs a program on flat inputs; may empty the list."""


class StageRuntime(Protocol):
    """Runs a stage's forward, and the whole backward of the same flight."""

    def forward(self, inputs: list[Tensor]) -> tuple[list[Tensor], Any]:
        """Returns the stage program's outputs, and what the backward needs besides."""

    def backward(
        self, flight: Any, operands: Sequence[Tensor], graph: Literal["keep", "free"]
    ) -> list[Tensor]:
        """Returns the gradients; ``operands`` are kept inputs and outputs, then cotangents."""


@dataclass
class _Flight:
    """What one micro-batch keeps between its forward and its backward."""

    saved: Any
    kept: list[Tensor]


@dataclass
class UnplannedSteps:
    """Steps whose tensors PyTorch allocates; see :class:`.steps.StageSteps`.

    Args:
        derived: the stage and its backward.
        runtime: runs the forward, and the whole backward.
        halves: run the early and the late half, where the backward is split; the runtime's flights
            are then lists of the saved tensors.
        tensors: the model's tensors, in the order of ``stage.model_tensors``; called anew in every
            step, so that a replaced tensor is found.
        sums: where gradients of parameters go.
        seed: the gradient of one micro-batch's loss.
    """

    derived: StageDerivative
    runtime: StageRuntime
    halves: Sequence[RunStage | None]
    tensors: Callable[[], Sequence[Tensor]]
    sums: GradientSums
    seed: float
    counts: StageCounts = field(default_factory=StageCounts)

    def __post_init__(self) -> None:
        self._flights: dict[int, _Flight] = {}
        self._waiting: dict[int, list[Tensor]] = {}
        self._inboxes: dict[tuple[str, int], list[Tensor]] = {}
        self._taken: dict[tuple[str, int], Sequence[Tensor]] = {}
        self._made: dict[tuple[str, int], Sequence[Tensor]] = {}
        stage, derivative = self.derived.stage, self.derived.derivative
        self._received_wires = {
            FORWARD: list(map(Wire, stage.received_types)),
            BACKWARD: list(map(Wire, self.derived.cotangent_types if stage.num_sent else ())),
        }
        self._sent_wires = {
            FORWARD: list(map(Wire, stage.sent_types)),
            BACKWARD: list(map(Wire, self.derived.gradient_types)),
        }
        first = stage.num_received
        self._written = {first + i for _, i in stage.writes}
        if derivative is not None:
            self._trained = [s.name for s in self.derived.trained]
            places = {o: k for k, o in enumerate(self.derived.gradients_received)}
            self._used_cotangents = [places[o] for o in derivative.cotangent_outputs]
            for source, type_ in self.derived.trained_types:
                self.sums.add_parameter(source.name, type_)

    # ---- transfers -----------------------------------------------------------------------

    def inbox(self, way: str, micro_batch: int) -> Sequence[Tensor]:
        """Returns memory to receive the values of another rank into."""
        buffers = [wire.buffer() for wire in self._received_wires[way]]
        self._inboxes[way, micro_batch] = buffers
        return buffers

    def drop_inbox(self, way: str, micro_batch: int) -> None:
        """Takes that memory back: nothing was received."""
        self._inboxes.pop((way, micro_batch), None)

    def outbox(self, way: str, micro_batch: int) -> Sequence[Tensor]:
        """Returns the values for another rank, as they travel."""
        values = self.hand_over(way, micro_batch)
        wires = self._sent_wires[way]
        return [wire.pack(value) for wire, value in zip(wires, values, strict=True)]

    def take(self, way: str, micro_batch: int, values: Sequence[Tensor]) -> None:
        """Takes the values of a neighbour on this rank."""
        self._taken[way, micro_batch] = values

    def hand_over(self, way: str, micro_batch: int) -> Sequence[Tensor]:
        """Returns the values for a neighbour on this rank."""
        return self._made.pop((way, micro_batch), ())

    def _arrived(self, way: str, micro_batch: int) -> Sequence[Tensor]:
        """What arrived, from a stage of this rank or from another rank."""
        key = (way, micro_batch)
        if key in self._taken:
            return self._taken.pop(key)
        buffers = self._inboxes.pop(key, ())
        wires = self._received_wires[way]
        return [wire.unpack(buffer) for wire, buffer in zip(wires, buffers, strict=True)]

    # ---- forward -------------------------------------------------------------------------

    def forward(self, micro_batch: int, user: Sequence[Tensor]) -> Sequence[Tensor]:
        """Runs the forward; returns the results, on the last stage."""
        self.counts.forward += 1
        stage, derivative = self.derived.stage, self.derived.derivative
        inputs = [*self._arrived(FORWARD, micro_batch), *self._own_inputs(user)]
        outputs, flight = self.runtime.forward(list(inputs))
        if derivative is not None:
            kept = [self._snapshot(i, inputs[i]) for i in derivative.kept_inputs]
            kept += [outputs[i] for i in derivative.kept_outputs]
            self._flights[micro_batch] = _Flight(flight, kept)
        for output, target in stage.writes:
            inputs[stage.num_received + target].copy_(outputs[output])
        results = tuple(outputs[: len(outputs) - len(stage.writes)])
        if not stage.num_sent:
            return results
        self._made[FORWARD, micro_batch] = results
        return ()

    def _own_inputs(self, user: Sequence[Tensor]) -> list[Tensor]:
        tensors = iter(self.tensors())
        return [
            next(tensors) if isinstance(s, ModelTensor) else user[s.index]
            for s in self.derived.stage.sources
        ]

    def _snapshot(self, index: int, tensor: Tensor) -> Tensor:
        """A buffer that later micro-batches change is kept as it is now."""
        return tensor.clone() if index in self._written else tensor

    # ---- backward ------------------------------------------------------------------------

    def backward(self, micro_batch: int) -> None:
        """Runs the whole backward."""
        if self.derived.halves is not None:
            self.backward_input(micro_batch)
            self.backward_weight(micro_batch)
            return
        if self.derived.derivative is None:
            return
        self.counts.backward += 1
        flight = self._flights.pop(micro_batch)
        operands = [*flight.kept, *self._cotangents(micro_batch)]
        gradients = self.runtime.backward(flight.saved, operands, "free")
        self._accumulate(self._kept_back(micro_batch, gradients))

    def backward_input(self, micro_batch: int) -> None:
        """Runs its early half: gradients that travel."""
        halves = self.derived.halves
        if halves is None:
            return
        self.counts.backward_input += 1
        flight = self._flights.pop(micro_batch)
        rest = [*flight.kept, *self._cotangents(micro_batch)]
        operands = [flight.saved, *([tensor] for tensor in rest)]
        late = [t for i in halves.late_inputs for t in operands[i]]
        if halves.early is None:
            self._waiting[micro_batch] = late
            return
        run = self.halves[0]
        assert run is not None
        results = run([t for i in halves.early_inputs for t in operands[i]])
        self._waiting[micro_batch] = [*self._kept_back(micro_batch, results), *late]

    def backward_weight(self, micro_batch: int) -> None:
        """Runs its late half, after the early one: gradients of parameters."""
        halves = self.derived.halves
        if halves is None:
            return
        self.counts.backward_weight += 1
        operands = self._waiting.pop(micro_batch)
        run = self.halves[1]
        if run is not None:
            self._accumulate(run(operands))

    def _kept_back(self, micro_batch: int, gradients: Sequence[Tensor]) -> Sequence[Tensor]:
        """Puts aside the gradients to send back, which come first; returns the others."""
        num_sent = len(self.derived.gradients_sent)
        self._made[BACKWARD, micro_batch] = gradients[:num_sent]
        return gradients[num_sent:]

    def _cotangents(self, micro_batch: int) -> list[Tensor]:
        """Those that the backward takes; on the last stage the seed of the loss."""
        arrived = self._arrived(BACKWARD, micro_batch)
        if self.derived.stage.num_sent == 0:
            type_ = self.derived.cotangent_types[0]
            seed = torch.full(type_.shape, self.seed, dtype=type_.dtype, device=type_.device)
            return [seed]
        return [arrived[k] for k in self._used_cotangents]

    def _accumulate(self, gradients: Sequence[Tensor]) -> None:
        for name, gradient in zip(self._trained, gradients, strict=True):
            self.sums.add(name, gradient)

    def clear(self) -> None:
        """Begins again, without micro-batches in flight."""
        for table in (self._flights, self._waiting, self._inboxes, self._taken, self._made):
            table.clear()


class RankRunner(Protocol):
    """Runs parts of this rank's stages in one arena."""

    def run(self, unit: int, part: str, flight: int, given: Sequence[Tensor]) -> list[Tensor]:
        """Runs a part of a stage for a micro-batch; later runs overwrite what it returns."""

    def inbox(self, unit: int, way: str, flight: int) -> list[Tensor]:
        """Returns where values from another rank go."""

    def outbox(self, unit: int, way: str, flight: int) -> list[Tensor]:
        """Returns values for another rank."""


class Progress:
    """How far a rank is in its order; the plan holds in no other, so a difference is an error.

    Args:
        order: what was planned for.
    """

    def __init__(self, order: RankOrder) -> None:
        self._order = order
        self._num_done = 0

    def start(self) -> None:
        """Begins a step."""
        self._num_done = 0

    def begin(self, action: Action) -> None:
        """Notes that an action runs now."""
        planned = self._order.actions[self._num_done : self._num_done + 1]
        if planned != (action,):
            self._refuse(f"runs {action}", f"{planned[0] if planned else 'the end'}")
        self._num_done += 1

    def check_receive(self, action: Action) -> None:
        """Checks that memory to receive into is free by now."""
        if self._num_done < self._order.posted.get(action, 0):
            self._refuse(
                f"starts to receive for {action} after {self._num_done} actions",
                f"not before {self._order.posted[action]}",
            )

    def _refuse(self, found: str, planned: str) -> None:
        raise PipelineError(
            f"PyTorch's runtime {found}, and memory was planned for {planned}: this version of "
            "PyTorch runs schedules in another order than its action table says."
        )


@dataclass
class PlannedSteps:
    """Steps in an arena, where what travels has its place; see :class:`.steps.StageSteps`.

    Args:
        derived: the stage and its backward.
        runner: runs its parts.
        progress: of the rank.
        tensors: the model's tensors, in the order of ``stage.model_tensors``.
        seed: the gradient of one micro-batch's loss.
        splits: whether backwards of this schedule come in two halves.
    """

    derived: StageDerivative
    runner: RankRunner
    progress: Progress
    tensors: Callable[[], Sequence[Tensor]]
    seed: float
    splits: bool
    counts: StageCounts = field(default_factory=StageCounts)

    def __post_init__(self) -> None:
        stage = self.derived.stage
        self._users = [s.index for s in stage.sources if not isinstance(s, ModelTensor)]
        self._given: dict[int, list[Tensor]] = {}
        self._seeds: list[Tensor] = []
        if stage.num_sent == 0:
            type_ = self.derived.cotangent_types[0]
            self._seeds.append(
                torch.full(type_.shape, self.seed, dtype=type_.dtype, device=type_.device)
            )
        models = [i for i, s in enumerate(stage.sources) if isinstance(s, ModelTensor)]
        self._targets = [models.index(target) for _, target in stage.writes]

    def forward(self, micro_batch: int, user: Sequence[Tensor]) -> Sequence[Tensor]:
        """Runs the forward; returns the results, on the last stage."""
        self.counts.forward += 1
        self._given[micro_batch] = [*(user[i] for i in self._users), *self._seeds]
        outputs = self._run(FORWARD, micro_batch)
        present = self.tensors() if self._targets else ()
        first = len(outputs) - len(self._targets)
        for state, target in zip(outputs[first:], self._targets, strict=True):
            present[target].copy_(state)
        return tuple(t.clone() for t in outputs[:first])

    def backward(self, micro_batch: int) -> None:
        """Runs the whole backward."""
        if self.splits:
            self.backward_input(micro_batch)
            self.backward_weight(micro_batch)
            return
        self.counts.backward += self.derived.derivative is not None
        self._run(BACKWARD, micro_batch)
        del self._given[micro_batch]

    def backward_input(self, micro_batch: int) -> None:
        """Runs its early half: gradients that travel."""
        self.counts.backward_input += self.derived.halves is not None
        self._run(BACKWARD_INPUT, micro_batch)

    def backward_weight(self, micro_batch: int) -> None:
        """Runs its late half, after the early one: gradients of parameters."""
        self.counts.backward_weight += self.derived.halves is not None
        self._run(BACKWARD_WEIGHT, micro_batch)
        del self._given[micro_batch]

    def _run(self, kind: str, micro_batch: int) -> list[Tensor]:
        stage = self.derived.stage.index
        self.progress.begin(Action(kind, stage, micro_batch))
        return self.runner.run(stage, kind, micro_batch, self._given[micro_batch])

    def inbox(self, way: str, micro_batch: int) -> Sequence[Tensor]:
        """Returns memory to receive the values of another rank into."""
        stage = self.derived.stage.index
        kind = FORWARD if way == FORWARD else BACKWARD_INPUT if self.splits else BACKWARD
        self.progress.check_receive(Action(kind, stage, micro_batch))
        return self.runner.inbox(stage, way, micro_batch)

    def drop_inbox(self, way: str, micro_batch: int) -> None:
        """Does nothing: the memory is the plan's."""

    def outbox(self, way: str, micro_batch: int) -> Sequence[Tensor]:
        """Returns the values for another rank, as they travel."""
        return self.runner.outbox(self.derived.stage.index, way, micro_batch)

    def take(self, way: str, micro_batch: int, values: Sequence[Tensor]) -> None:
        """Does nothing: the values of a neighbour are where the plan wants them."""

    def hand_over(self, way: str, micro_batch: int) -> Sequence[Tensor]:
        """Returns nothing, for the same reason."""
        return ()

    def clear(self) -> None:
        """Begins again, without micro-batches in flight."""
        self._given.clear()
        self.progress.start()
