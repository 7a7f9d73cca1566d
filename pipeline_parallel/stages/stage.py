"""One stage's forward and backward as programs, and the steps that run them on tensors.

Backward comes whole, or in two halves (gradients that travel, then gradients of parameters). All
stages of a model share one :class:`Differentiator` and one :class:`Splitter`, so each different
closure is differentiated and split once, whatever the number of stages, layers and micro-batches.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from ...autodiff.derivative import Derivative, Differentiator, Request, active_values
from ...reuse.ir.leaf import flat_types
from ...reuse.ir.program import Composite, ModelTensor, Program
from ...reuse.ir.transfer import Wire
from ...reuse.ir.types import TensorType
from ...reuse.own_storage import in_own_storage
from ..schedule.actions import BACKWARD, FORWARD
from ..split.cut import Stage
from .split_backward import Halves, Splitter

Run = Callable[[list[Tensor]], list[Tensor]]
"""Runs a program on flat inputs; may empty the list."""


Chosen = Callable[[Stage, Request], Request]
"""Gives the request for a stage's backward a choice."""


class StageRuntime(Protocol):
    """Runs a stage's forward, and the whole backward of the same flight."""

    def forward(self, inputs: list[Tensor]) -> tuple[list[Tensor], Any]:
        """Returns the stage program's outputs, and what the backward needs besides."""

    def backward(self, flight: Any, operands: Sequence[Tensor], graph: str) -> list[Tensor]:
        """Returns the gradients; ``operands`` are kept inputs and outputs, then cotangents."""


@dataclass(frozen=True, eq=False)
class StageDerivative:
    """A stage and its backward.

    Attributes:
        stage: the stage.
        derivative: None if no gradient flows through it.
        request: what was asked for, and the choice of what is saved.
        halves: the backward split; None unless asked for.
        gradients_sent: positions, among what it received, of the values whose gradients it sends
            back.
        gradients_received: positions, among what it sent (or its results), of the values whose
            gradients come back.
    """

    stage: Stage
    derivative: Derivative | None
    request: Request
    halves: Halves | None
    gradients_sent: tuple[int, ...]
    gradients_received: tuple[int, ...]

    @property
    def forward(self) -> Program:
        """What a forward step runs."""
        if self.derivative is None:
            return self.stage.program
        return _body(self.derivative.forward)

    @property
    def backward(self) -> tuple[Program | None, ...]:
        """What backward steps run: the whole backward, or its early and its late half."""
        if self.derivative is None:
            return ()
        if self.halves is None:
            return (_body(self.derivative.backward),)
        return tuple(None if h is None else _body(h) for h in (self.halves.early, self.halves.late))

    @property
    def cotangent_types(self) -> tuple[TensorType, ...]:
        """Types of the gradients that come back, in order."""
        outputs = flat_types(v.type for v in self.stage.program.outputs)
        return tuple(outputs[i].cotangent() for i in self.gradients_received)

    @property
    def gradient_types(self) -> tuple[TensorType, ...]:
        """Types of the gradients it sends back, in order."""
        return tuple(self.stage.received_types[i].cotangent() for i in self.gradients_sent)

    @property
    def trained(self) -> tuple[ModelTensor, ...]:
        """The parameters that get a gradient here."""
        if self.derivative is None:
            return ()
        first = self.stage.num_received
        sources = [
            self.stage.sources[i - first] for i in self.derivative.gradient_inputs if i >= first
        ]
        assert all(isinstance(s, ModelTensor) for s in sources)
        return tuple(sources)  # type: ignore[arg-type]

    @property
    def trained_types(self) -> list[tuple[ModelTensor, TensorType]]:
        """Those parameters with the types of their gradients."""
        found = []
        for source in self.trained:
            type_ = TensorType.of(source.tensor)
            found.append((source, type_.cotangent()))
        return found

    @property
    def saved_bytes(self) -> int:
        """What one micro-batch keeps between forward and backward (handed-over values aside)."""
        return 0 if self.derivative is None else self.derivative.saved_type.num_bytes


def _body(closure: object) -> Program:
    assert isinstance(closure, Composite)
    return closure.program


def differentiate_stages(
    stages: Sequence[Stage],
    differentiator: Differentiator,
    *,
    halves: bool,
    chosen: Chosen = lambda stage, request: request,
) -> list[StageDerivative]:
    """Returns the backward of each stage, from the last one's result 0 (the loss) to the first.

    Args:
        stages: all stages of a program, in order.
        differentiator: makes leaf derivatives.
        halves: whether to split each backward.
        chosen: decides what a stage saves and what it computes again.
    """
    active = _active_received(stages, differentiator)
    splitter = Splitter()
    found: list[StageDerivative] = []
    arriving: tuple[int, ...] = (0,)
    for stage, flags in zip(reversed(stages), reversed(active), strict=True):
        wanted = tuple(i for i, flag in enumerate(flags) if flag)
        request = Request(Composite(f"stage{stage.index}", stage.program), wanted, arriving)
        derivative = differentiator.of(request)
        sent: tuple[int, ...] = ()
        split = None
        if derivative is not None:
            sent = tuple(i for i in derivative.gradient_inputs if i < stage.num_received)
            if stage.paths:
                request = chosen(stage, request)
                derivative = differentiator.of(request)
                assert derivative is not None
            if halves:
                split = splitter.split(derivative.backward, range(len(sent)))
        found.append(StageDerivative(stage, derivative, request, split, sent, arriving))
        arriving = sent
    return found[::-1]


def _active_received(stages: Sequence[Stage], differentiator: Differentiator) -> list[list[bool]]:
    """For each input of each stage: whether a gradient to some parameter leads through it."""
    flags: list[list[bool]] = []
    received: list[bool] = []
    for stage in stages:
        own = [isinstance(s, ModelTensor) and s.tensor.requires_grad for s in stage.sources]
        flags.append([*received, *own])
        values = active_values(differentiator, stage.program, flags[-1])
        received = [v in values for v in stage.program.outputs[: stage.num_sent]]
    return flags


class GradientSums:
    """Sums the gradients of micro-batches, one buffer per parameter.

    Two stages of one rank that use the same parameter share its buffer. The buffers of one dtype
    lie side by side in one tensor, so that replicas sum them in one go.
    """

    def __init__(self) -> None:
        self.buffers: dict[str, Tensor] = {}
        self.flat: list[Tensor] = []
        self._types: dict[str, TensorType] = {}
        self._started: set[str] = set()

    def add_parameter(self, name: str, type_: TensorType) -> None:
        """Makes room for the gradient of a parameter, once."""
        self._types.setdefault(name, type_)

    def allocate(self, num_shards: int = 1) -> None:
        """Makes the buffers, so that those of one kind can be split into equal parts."""
        kinds: dict[tuple[torch.dtype, torch.device], list[str]] = {}
        for name, type_ in self._types.items():
            kinds.setdefault((type_.dtype, type_.device), []).append(name)
        for (dtype, device), names in kinds.items():
            sizes = [math.prod(self._types[n].shape) for n in names]
            rest = -sum(sizes) % num_shards
            flat = torch.zeros(sum(sizes) + rest, dtype=dtype, device=device)
            self.flat.append(flat)
            for name, part in zip(names, flat.split([*sizes, rest]), strict=False):
                type_ = self._types[name]
                buffer = part.as_strided(type_.shape, type_.stride)
                self.buffers[name] = in_own_storage(buffer)

    def start(self) -> None:
        """Begins a new sum."""
        self._started.clear()

    def add(self, name: str, gradient: Tensor) -> None:
        """Adds one gradient."""
        if name in self._started:
            self.buffers[name].add_(gradient)
        else:
            self.buffers[name].copy_(gradient)
            self._started.add(name)

    def zero(self) -> None:
        """Makes all buffers zero, for launches that add to them."""
        for flat in self.flat:
            flat.zero_()
        self._started.update(self.buffers)

    def finish(self) -> None:
        """Makes buffers that got nothing in this step zero."""
        for name, buffer in self.buffers.items():
            if name not in self._started:
                buffer.zero_()

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(b.numel() * b.element_size() for b in self.buffers.values())


@dataclass
class _Flight:
    """What one micro-batch keeps between its forward and its backward."""

    saved: Any
    kept: list[Tensor]


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
class UnplannedSteps:
    """Steps whose tensors PyTorch allocates; see :class:`StageSteps`.

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
    halves: Sequence[Run | None]
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
