"""Random numbers of stages: drawn in the order in which one process draws them.

A generator only goes forward. So at the start of a step each rank draws, and drops, what all stages
draw for all micro-batches, and keeps the generator's state before each forward of a stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..reuse.errors import PlanError
from ..reuse.ir.operators import is_draw
from ..reuse.ir.program import Composite, Leaf, Program

# How many numbers it draws depends on the sizes of its operand alone.
_DROPOUT = torch.ops.aten.native_dropout.default


class StageDraws:
    """The draws of the forwards of a pipeline's stages, in order; of this rank's local programs."""

    def __init__(self, forwards: Iterable[Program] = ()) -> None:
        self._drawing = [list(_drawing_nodes(program)) for program in forwards]
        self._states: dict[tuple[int, int], Tensor] = {}

    def __bool__(self) -> bool:
        return any(self._drawing)

    @contextmanager
    def step(self, num_micro_batches: int) -> Iterator[None]:
        """Within it forwards may begin; afterwards the generator is where a step leaves it."""
        for micro_batch in range(num_micro_batches if self else 0):
            for stage, nodes in enumerate(self._drawing):
                self._states[stage, micro_batch] = torch.get_rng_state()
                for node in nodes:
                    like = node.args[0].meta["val"]
                    x = torch.empty_strided(
                        like.shape, like.stride(), dtype=like.dtype, device=like.device
                    )
                    _DROPOUT(x, *node.args[1:])
        after = torch.get_rng_state() if self else None
        try:
            yield
        finally:
            if after is not None:
                torch.set_rng_state(after)

    def begin(self, stage: int, micro_batch: int) -> None:
        """Puts the generator where the forward of a stage finds it in one process."""
        if self:
            torch.set_rng_state(self._states[stage, micro_batch])


def check_draws(forwards: Iterable[Program], backwards: Iterable[Program], device: str) -> None:
    """Raises PlanError if stages draw what :class:`StageDraws` does not draw."""
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
