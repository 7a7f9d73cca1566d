"""`create_graph=True`: gradients of a compiled forward that have a backward themselves.

What is known at a first backward is kept in a node of autograd. The gradients are made a program of
their own, and compiled, only where that node is differentiated: who never asks pays nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..compiled import CompiledGradients, CompiledProgram, GradientRequest
from .torch_engine import cotangent_like

Run = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]


class Gradients:
    """Compiles the gradients of one program, for each request once.

    Args:
        compiled: the program.
        differentiably: runs a compiled program as a node of autograd.
    """

    def __init__(
        self, compiled: CompiledProgram, differentiably: Callable[[CompiledProgram], Run]
    ) -> None:
        self._compiled = compiled
        self._differentiably = differentiably
        self._made: dict[GradientRequest, tuple[CompiledGradients, Run | None]] = {}

    @property
    def were_differentiated(self) -> bool:
        """Returns whether an earlier call's were, so that this call's likely will be."""
        return bool(self._made)

    def of(self, request: GradientRequest) -> tuple[CompiledGradients, Run | None]:
        """Returns the program of gradients, and what runs it with a backward.

        Raises:
            PlanError: if there is none.
        """
        assert self._compiled.gradients is not None
        # Which cotangents move is part of the request: a constant one needs no gradient of its own.
        if request not in self._made:
            made = self._compiled.gradients(request)
            run = None
            if made.compiled.derivative is not None:
                run = self._differentiably(made.compiled)
            self._made[request] = made, run
        return self._made[request]


@dataclass(frozen=True)
class FirstBackward:
    """Holds a backward that ran under ``create_graph=True``.

    Attributes:
        gradients: of the program.
        outputs: those that had a cotangent.
        drawn_from: the state of the random generator where the forward began, if it drew.
    """

    gradients: Gradients
    outputs: tuple[int, ...]
    drawn_from: torch.Tensor | None

    def run(
        self, inputs: Sequence[torch.Tensor], cotangents: Sequence[torch.Tensor]
    ) -> Mapping[int, torch.Tensor] | None:
        """Returns the gradient of each input that has one, as functions of what they are made of.

        Runs the program of gradients, which is made where it is not there. None if its results are
        functions of nothing that wants a gradient.
        """
        moving = tuple(o for o, c in zip(self.outputs, cotangents, strict=True) if c.requires_grad)
        made, run = self.gradients.of(GradientRequest(self.outputs, moving))
        if run is None:
            return None
        program = made.gradients
        types = made.compiled.captured.program.inputs[len(inputs) :]
        seeded = zip(self.outputs, cotangents, strict=True)
        used = [cotangent for output, cotangent in seeded if output in program.outputs]
        with torch.enable_grad(), _drawing_from(self.drawn_from):
            laid = [cotangent_like(v.type, c) for v, c in zip(types, used, strict=True)]
            results = run([*inputs, *laid])
        return dict(zip(program.inputs, results, strict=True))

    def differentiable(
        self,
        results: Mapping[int, torch.Tensor],
        inputs: Sequence[torch.Tensor],
        cotangents: Sequence[torch.Tensor],
    ) -> tuple[torch.Tensor, ...]:
        """Returns gradients, which are there for some inputs, as functions of the operands."""
        marked: tuple[torch.Tensor, ...] = _Gradients.apply(
            self, results, len(inputs), *inputs, *cotangents
        )
        return marked

    def differentiated(
        self,
        inputs: Sequence[torch.Tensor],
        cotangents: Sequence[torch.Tensor],
        seeds: Mapping[int, torch.Tensor | None],
    ) -> list[torch.Tensor | None]:
        """Returns gradients of the gradients, for each input and each cotangent.

        Args:
            inputs: of the program.
            cotangents: of its outputs.
            seeds: a cotangent for the gradient of each input that has one.
        """
        with torch.enable_grad():
            # Names of their own: a cotangent may be a function of an input, and what is wanted
            # here is the derivative with respect to each alone.
            operands = [x.view_as(x) if x.requires_grad else x for x in (*inputs, *cotangents)]
        gradients = self.run(operands[: len(inputs)], operands[len(inputs) :]) or {}
        flowing = [
            (gradients[index], seed)
            for index, seed in seeds.items()
            if seed is not None and index in gradients and gradients[index].requires_grad
        ]
        sources = [x for x in operands if x.requires_grad]
        if not flowing or not sources:
            return [None] * len(operands)
        found = iter(
            torch.autograd.grad(
                [result for result, _ in flowing],
                sources,
                [seed for _, seed in flowing],
                create_graph=torch.is_grad_enabled(),
                allow_unused=True,
            )
        )
        return [next(found) if x.requires_grad else None for x in operands]


@contextlib.contextmanager
def _drawing_from(state: torch.Tensor | None) -> Iterator[None]:
    """Has the random numbers of a forward be drawn once more, and the next ones be as without."""
    if state is None:
        yield
        return
    before = torch.get_rng_state()
    torch.set_rng_state(state)
    try:
        yield
    finally:
        torch.set_rng_state(before)


class _Gradients(torch.autograd.Function):
    """Gradients that were computed already, with their own backward behind them."""

    @staticmethod
    def forward(
        ctx: Any,
        first: FirstBackward,
        results: Mapping[int, torch.Tensor],
        num_inputs: int,
        *operands: torch.Tensor,
    ) -> Any:
        ctx.first, ctx.num_inputs, ctx.wanted = first, num_inputs, tuple(results)
        ctx.save_for_backward(*operands)
        ctx.set_materialize_grads(False)
        return tuple(result.view_as(result) for result in results.values())

    @staticmethod
    def backward(ctx: Any, *seeds: torch.Tensor | None) -> Any:
        operands = ctx.saved_tensors
        inputs, cotangents = operands[: ctx.num_inputs], operands[ctx.num_inputs :]
        wanted = dict(zip(ctx.wanted, seeds, strict=True))
        return (None, None, None, *ctx.first.differentiated(inputs, cotangents, wanted))
