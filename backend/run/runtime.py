"""Runtimes: how a compiled forward, and the backward of the same flight, are run.

* :class:`ClosureRuntime` calls one function per closure and lets PyTorch allocate: for anything.
* :class:`PlannedRuntime` runs single launches in a planned arena.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

import torch

from ...reuse.ir.leaf import without_autocast
from ...reuse.torch_names import version_of
from ..launches.present_memory import check_addresses
from ..launches.torch_native import Hold
from .planned import Lease, PlannedProgram
from .unplanned import Executable

Graph: TypeAlias = Literal["keep", "free"]
"""Whether saved tensors are kept after a backward, as it may run again, or freed."""


class Runtime(Protocol):
    """Runs a program. A *flight* is what a forward keeps for its backward."""

    num_launches: int

    @property
    def hold(self) -> Hold | None:
        """The native comparison of a guard, if it is at hand."""

    def forward(self, inputs: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Any]:
        """Returns what the user receives, and the flight."""

    def backward(
        self, flight: Any, operands: Sequence[torch.Tensor], graph: Graph
    ) -> list[torch.Tensor]:
        """Returns the gradients.

        Args:
            flight: from the forward.
            operands: kept inputs, kept outputs and cotangents.
            graph: whether saved tensors are kept.
        """

    def rest(self) -> None:
        """Gives back the memory that is held while nothing runs."""

    def taken_over(self, other: Any, flight: Any) -> Any:
        """Returns the flight of another runtime, with the same forward, as one of this.

        The flight stays as it is.
        """


class ClosureRuntime:
    """A function per closure, values freed after their last use."""

    hold = None

    def __init__(self, forward: Executable, backward: Executable | None, num_results: int) -> None:
        self._forward = forward
        self._backward = backward
        self._num_results = num_results
        self.num_launches = forward.num_launches + (backward.num_launches if backward else 0)

    @without_autocast
    def forward(self, inputs: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Any]:
        """See :class:`Runtime`."""
        check_addresses(inputs)
        results = self._forward.run(list(inputs))
        return results[: self._num_results], results[self._num_results :]

    @without_autocast
    def backward(
        self, flight: Any, operands: Sequence[torch.Tensor], graph: Graph
    ) -> list[torch.Tensor]:
        """See :class:`Runtime`."""
        assert self._backward is not None
        boxed = [*flight, *operands]
        check_addresses(boxed)
        if graph == "free":  # so that each saved tensor goes after its last use
            flight.clear()
        return self._backward.run(boxed)

    def rest(self) -> None:
        """Does nothing: nothing is held."""

    def taken_over(self, other: Any, flight: Any) -> Any:
        """See :class:`Runtime`."""
        return list(flight)


@dataclass
class _Flight:
    lease: Lease
    foreign: list[torch.Tensor]  # results of launches, and gradients to be
    borrowed: list[tuple[torch.Tensor, int]]  # user inputs that were saved, and their versions


class PlannedRuntime:
    """Runs launches one after the other in an arena.

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
        needed = program.inputs_of(1) if self._has_backward else []
        self._operands = [i - num_saved for i in needed if i >= num_saved]
        self._borrowed = [_forward_input(program, i) for i in needed if i < num_saved]

    @property
    def hold(self) -> Hold | None:
        """See :class:`Runtime`."""
        native = self.program.native
        return native.hold if native else None

    @without_autocast
    def forward(self, inputs: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Any]:
        """See :class:`Runtime`."""
        lease = self.program.lease([inputs[i] for i in self._model])
        outputs = lease.runners[0]([inputs[i] for i in self._given])
        flight = None
        if self._has_backward:
            borrowed = [(inputs[i], version_of(inputs[i])) for i in self._borrowed]
            flight = _Flight(lease, outputs[self._num_results :], borrowed)
        else:
            lease.release()
        return outputs[: self._num_results], flight

    @without_autocast
    def backward(
        self, flight: Any, operands: Sequence[torch.Tensor], graph: Graph
    ) -> list[torch.Tensor]:
        """See :class:`Runtime`."""
        lease, foreign = self.program.followed(flight.lease), flight.foreign
        flight.lease = lease
        given = [unchanged(tensor, version) for tensor, version in flight.borrowed]
        given += [operands[i] for i in self._operands]
        if graph == "keep":  # the backward works in the arena, so it gets one of its own
            lease, foreign = self.program.copy_of(lease, foreign)
        else:
            flight.foreign = []  # gradients among them: the user's alone from here on
        gradients = lease.runners[1]([*given, *foreign])
        lease.release()
        return gradients

    def rest(self) -> None:
        """See :class:`Runtime`."""
        self.program.rest()

    def taken_over(self, other: Any, flight: Any) -> Any:
        """See :class:`Runtime`."""
        flight.lease = other.program.followed(flight.lease)
        lease, handed = self.program.taken_over(other.program, flight.lease, flight.foreign)
        return _Flight(lease, handed, flight.borrowed)


def _forward_input(program: PlannedProgram, position: int) -> int:
    """Returns which forward input a saved value is, or is a view of."""
    forward, backward = program.layout.parts
    instance = backward.inputs[position].instance
    return [p.instance for p in forward.inputs].index(instance)


def unchanged(tensor: torch.Tensor, version: int) -> torch.Tensor:
    """Returns a tensor.

    Raises:
        RuntimeError: if it was changed in place since it had that version.
    """
    found = version_of(tensor)
    if found != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: an input of shape {tuple(tensor.shape)} is at version {found}; "
            f"expected version {version} instead."
        )
    return tensor
