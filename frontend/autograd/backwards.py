"""The backwards of one compiled forward: one for each set of outputs that a loss used."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ...autodiff.derivative import Derivative
from ...backend.run.runtime import Graph
from ...reuse.torch_names import memory_id
from ..compiled import CompiledProgram

_MAX_BACKWARDS = 8  # the last used


class Backward:
    """One way back.

    Args:
        compiled: a program with a derivative.
        full: the derivative with a cotangent for every output.

    Attributes:
        outputs: which outputs it takes cotangents of, of these ``types``.
        places: which of all gradients it returns.
    """

    def __init__(self, compiled: CompiledProgram, full: Derivative) -> None:
        derivative = compiled.derivative
        assert derivative is not None
        self.runtime = compiled.runtime
        self.outputs = derivative.cotangent_outputs
        self.types: Sequence[Any] = derivative.backward.input_types[-len(self.outputs) :]
        self.places = [full.gradient_inputs.index(i) for i in derivative.gradient_inputs]
        self._copied: tuple[int, ...] | None = None

    def gradients(
        self,
        flight: Any,
        kept: Sequence[torch.Tensor],
        cotangents: Sequence[torch.Tensor],
        graph: Graph,
    ) -> list[torch.Tensor]:
        """Runs it. Receivers add to gradients in place, so that each gets memory of its own."""
        operands = [*kept, *cotangents]
        gradients = self.runtime.backward(flight, operands, graph)
        if self._copied is None:
            self._copied = _shared(operands, gradients)
        for index in self._copied:
            gradients[index] = gradients[index].clone()
        return gradients


def _shared(operands: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Returns the gradients that share memory with an operand or an earlier gradient.

    The same in every run, so that the first one tells.
    """
    seen, shared = {memory_id(t) for t in operands}, []
    for index, gradient in enumerate(gradients):
        memory = memory_id(gradient)
        if memory in seen:
            shared.append(index)
        seen.add(memory)
    return tuple(shared)


class Backwards:
    """All of them, each made when a loss first asks for it.

    Attributes:
        expected: the one that a next forward prepares for: the last that ran.
    """

    def __init__(self, compiled: CompiledProgram) -> None:
        assert compiled.derivative is not None
        self._compiled = compiled
        self._full = self.expected = Backward(compiled, compiled.derivative)
        self._made: dict[tuple[int, ...], Backward] = {}

    def of(self, unused: tuple[int, ...]) -> Backward:
        """Returns the one for a loss that left these outputs unused.

        Where there is none (see ``FewerCotangents``), it is the one for all outputs, which then
        gets zeros.
        """
        made = self._full
        if unused:
            found = self._made.pop(unused, None)
            self._made[unused] = made = found or self._new(unused)
            if len(self._made) > _MAX_BACKWARDS:
                del self._made[next(iter(self._made))]
        if made is not self.expected:
            self.expected.runtime.rest()
            self.expected = made
        return made

    def rest(self) -> None:
        """Gives back the memory that is held while nothing runs."""
        self.expected.runtime.rest()

    def are_apart(self, some: Iterable[int], others: Iterable[int]) -> bool:
        """Whether nothing that is saved for some outputs is needed for others, too.

        Autograd then lets one follow the other without ``retain_graph``.
        """
        known = self._compiled.unused_outputs
        if known is None:
            return False
        needed = [frozenset().union(*map(known.reads, group)) for group in (some, others)]
        return needed[0].isdisjoint(needed[1])

    def _new(self, unused: tuple[int, ...]) -> Backward:
        full = self._compiled.derivative
        assert full is not None
        make = self._compiled.without
        found = make(self._compiled, unused) if make is not None else None
        return Backward(found, full) if found is not None else self._full
