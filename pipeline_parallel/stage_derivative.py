"""One stage's forward and backward as programs.

Backward comes whole, or in two halves (gradients that travel, then gradients of parameters). All
stages of a model share one :class:`Differentiator` and one :class:`Splitter`, so each different
closure is differentiated and split once, whatever the number of stages, layers and micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..autodiff.derivative import Derivative, Differentiator, Request, active_values
from ..reuse.ir.leaf import flat_types
from ..reuse.ir.program import Composite, ModelTensor, Program
from ..reuse.ir.types import TensorType
from .cut import Stage
from .split_backward import Halves, Splitter

Chosen = Callable[[Stage, Request], Request]
"""Gives the request for a stage's backward a choice."""


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
        """The program of a forward step."""
        if self.derivative is None:
            return self.stage.program
        return _body(self.derivative.forward)

    @property
    def backward(self) -> tuple[Program | None, ...]:
        """The programs of backward steps: the whole backward, or its early and its late half."""
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
        """Bytes that one micro-batch keeps for its backward (handed-over values aside)."""
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
    arriving: tuple[int, ...] = (0,)  # result 0 of the last stage is the loss
    # Backwards: which gradients come back to a stage is known once the next one is derived.
    for stage, flags in zip(reversed(stages), reversed(active), strict=True):
        wanted = tuple(i for i, flag in enumerate(flags) if flag)
        request = Request(Composite(f"stage{stage.index}", stage.program), wanted, arriving)
        derivative = differentiator.of(request)
        sent: tuple[int, ...] = ()
        split = None
        if derivative is not None:
            sent = tuple(i for i in derivative.gradient_inputs if i < stage.num_received)
            if stage.paths:  # a stage of glue alone has no block to choose for
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
