"""Runtimes: how a compiled forward, and the backward of the same flight, are run.

* :class:`ReplayRuntime` calls one function per closure and lets PyTorch allocate. It runs anything.
* :class:`PlannedRuntime` replays single launches in a planned arena.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from .executable import Executable
from .planned import Lease, PlannedProgram


class Runtime(Protocol):
    """Runs a program. A *flight* is what a forward keeps for its backward."""

    num_launches: int

    def forward(self, inputs: list[torch.Tensor]) -> tuple[list[torch.Tensor], Any]:
        """Returns what the user receives, and the flight."""

    def backward(
        self, flight: Any, operands: Sequence[torch.Tensor], graph: str
    ) -> list[torch.Tensor]:
        """Returns the gradients.

        Args:
            flight: from the forward.
            operands: kept inputs, kept outputs and cotangents.
            graph: ``"keep"`` if the backward may run again, else ``"free"``.
        """


class ReplayRuntime:
    """A function per closure, values freed after their last use."""

    def __init__(self, forward: Executable, backward: Executable | None, num_results: int) -> None:
        self._forward = forward
        self._backward = backward
        self._num_results = num_results
        self.num_launches = forward.num_launches + (backward.num_launches if backward else 0)

    def forward(self, inputs: list[torch.Tensor]) -> tuple[list[torch.Tensor], Any]:
        """See :class:`Runtime`."""
        results = self._forward.run(list(inputs))
        return results[: self._num_results], results[self._num_results :]

    def backward(
        self, flight: Any, operands: Sequence[torch.Tensor], graph: str
    ) -> list[torch.Tensor]:
        """See :class:`Runtime`."""
        assert self._backward is not None
        boxed = [*flight, *operands]
        if graph == "free":
            flight.clear()
        return self._backward.run(boxed)


@dataclass
class _Flight:
    lease: Lease
    foreign: list[torch.Tensor]


class PlannedRuntime:
    """Flat replay of launches in an arena.

    Args:
        program: the planned forward, or forward and backward.
        num_results: how many leading outputs of the forward the user receives.
        num_saved: how many outputs of the forward the arena keeps for the backward.
    """

    def __init__(self, program: PlannedProgram, num_results: int, num_saved: int) -> None:
        self.program = program
        self.num_launches = program.num_launches
        self._num_results = num_results
        self._model = list(program.model_instances)
        self._given = program.inputs_of(0)
        self._has_backward = len(program.layout.parts) > 1
        self._operands = [i - num_saved for i in program.inputs_of(1)] if self._has_backward else []

    def forward(self, inputs: list[torch.Tensor]) -> tuple[list[torch.Tensor], Any]:
        """See :class:`Runtime`."""
        lease = self.program.lease([inputs[i] for i in self._model])
        outputs = lease.runners[0]([inputs[i] for i in self._given])
        flight = None
        if self._has_backward:
            flight = _Flight(lease, outputs[self._num_results :])
        else:
            lease.release()
        return outputs[: self._num_results], flight

    def backward(
        self, flight: Any, operands: Sequence[torch.Tensor], graph: str
    ) -> list[torch.Tensor]:
        """See :class:`Runtime`."""
        lease, foreign = flight.lease, flight.foreign
        if graph == "keep":  # the backward works in the arena, so it gets one of its own
            lease = self.program.copy_of(lease)
        gradients = lease.runners[1]([*(operands[i] for i in self._operands), *foreign])
        lease.release()
        return gradients
