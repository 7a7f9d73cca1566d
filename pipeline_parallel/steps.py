"""The runner of a stage's steps, checks of their order, and their random numbers.

Stages get the same random numbers as in one process. A generator only goes forward, so at the start
of a step each rank draws and discards all numbers of all stages and micro-batches, and keeps the
generator's state before each forward of a stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from ..reuse.errors import PipelineError, PlanError
from ..reuse.ir.operators import is_draw
from ..reuse.ir.program import Composite, Leaf, Program
from ..reuse.ir.types import TensorType
from .actions import Action
from .plan import RankOrder

# The number of its random numbers depends only on the sizes of its operand.
_DROPOUT = torch.ops.aten.native_dropout.default


class StageDraws:
    """The random draws of the forwards of stages, in order, by this rank's local programs."""

    def __init__(self, forwards: Iterable[Program] = ()) -> None:
        self._drawing = [list(_drawing_nodes(program)) for program in forwards]
        self._states: dict[tuple[int, int], Tensor] = {}

    def __bool__(self) -> bool:
        return any(self._drawing)

    @contextmanager
    def step(self, num_micro_batches: int) -> Iterator[None]:
        """Keeps the generator's state before each forward; leaves it as after a step."""
        for micro_batch in range(num_micro_batches if self else 0):
            for stage, nodes in enumerate(self._drawing):
                self._states[stage, micro_batch] = torch.get_rng_state()
                for node in nodes:
                    x = TensorType.of(node.args[0].meta["val"]).empty()
                    _DROPOUT(x, *node.args[1:])
        after = torch.get_rng_state() if self else None
        try:
            yield
        finally:
            if after is not None:
                torch.set_rng_state(after)

    def begin(self, stage: int, micro_batch: int) -> None:
        """Sets the generator to its state before this forward in a single process."""
        if self:
            torch.set_rng_state(self._states[stage, micro_batch])


def check_draws(forwards: Iterable[Program], backwards: Iterable[Program], device: str) -> None:
    """Raises PlanError if stages draw random numbers that :class:`StageDraws` cannot repeat."""
    late = [node for program in backwards for node in _drawing_nodes(program)]
    for node in (*late, *(n for program in forwards for n in _drawing_nodes(program))):
        if late or device != "cpu" or node.target is not _DROPOUT:
            raise PlanError(
                f"The model draws random numbers by {node.target}, and stages over a mesh draw for "
                "dropout alone, on a CPU and in a forward, as one process does. Switch that off, "
                "or use a mesh without a pipeline."
            )


def _drawing_nodes(program: Program) -> Iterator[Any]:
    for call in program.calls:
        if isinstance(call.closure, Composite):
            yield from _drawing_nodes(call.closure.program)
        elif isinstance(call.closure, Leaf):
            yield from filter(is_draw, call.closure.nodes)


# ---- steps ---------------------------------------------------------------------------------------


class RankRunner(Protocol):
    """Runs the parts of a rank's stages, and holds the values that stages send and receive.

    A ``way`` is ``"F"`` for activations, ``"B"`` for their gradients. Implemented in ``backend``.
    """

    def run(self, unit: int, part: str, flight: int, given: Sequence[Tensor]) -> list[Tensor]:
        """Runs a part of a stage for a micro-batch; later runs may overwrite what it returns."""

    def inbox(self, unit: int, way: str, flight: int) -> list[Tensor]:
        """Returns memory to receive the values of another rank into."""

    def outbox(self, unit: int, way: str, flight: int) -> list[Tensor]:
        """Returns the values for another rank, in the form in which they are sent."""

    def forget(self) -> None:
        """Drops all micro-batches in flight."""


class Progress:
    """Checks that a rank's actions run in the planned order, for which alone memory was planned."""

    def __init__(self, order: RankOrder) -> None:
        self._order = order
        self._num_done = 0

    def start(self) -> None:
        """Begins a step."""
        self._num_done = 0

    def begin(self, action: Action) -> None:
        """Checks that the action that runs now is the planned one."""
        planned = self._order.actions[self._num_done : self._num_done + 1]
        if planned != (action,):
            self._refuse(f"runs {action}", f"{planned[0] if planned else 'the end'}")
        self._num_done += 1

    def check_receive(self, action: Action) -> None:
        """Checks that the memory to receive into is free."""
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
