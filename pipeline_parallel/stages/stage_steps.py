"""What a schedule asks of a stage: steps for one micro-batch, values that travel, and counts."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

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
