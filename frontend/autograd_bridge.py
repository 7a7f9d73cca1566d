"""A compiled forward and backward as one node of PyTorch's autograd graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ..autodiff.torch_autograd import graph_is_kept
from ..reuse.types import TensorType
from .compiler import CompiledProgram


@dataclass
class Step:
    """One forward in flight: its inputs, and after it ran, what its backward needs."""

    compiled: CompiledProgram
    inputs: list[torch.Tensor]
    written: frozenset[int]
    flight: Any = None


def run_differentiable(step: Step) -> Sequence[torch.Tensor]:
    """Runs a forward so that autograd can come back through its backward."""
    derivative = step.compiled.derivative
    assert derivative is not None
    wanted = [step.inputs[i] for i in derivative.gradient_inputs]
    outputs: Sequence[torch.Tensor] = _CompiledFunction.apply(step, *wanted)
    return outputs


class _CompiledFunction(torch.autograd.Function):
    """Replays the linked forward, and the linked backward when autograd asks."""

    @staticmethod
    def forward(ctx: Any, step: Step, *wanted: torch.Tensor) -> tuple[torch.Tensor, ...]:
        derivative = step.compiled.derivative
        assert derivative is not None
        outputs, step.flight = step.compiled.runtime.forward(step.inputs)
        kept = []
        for index in derivative.kept_inputs:
            tensor = step.inputs[index]
            # A buffer that this forward will overwrite is kept as it was.
            kept.append(tensor.clone() if index in step.written else tensor)
        kept += [outputs[i] for i in derivative.kept_outputs]
        ctx.save_for_backward(*kept)
        ctx.step = step
        step.inputs = []
        differentiable = set(derivative.cotangent_outputs)
        ctx.mark_non_differentiable(*(o for i, o in enumerate(outputs) if i not in differentiable))
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> tuple[Any, ...]:
        step: Step = ctx.step
        derivative = step.compiled.derivative
        assert derivative is not None
        kept = ctx.saved_tensors
        flight, graph = step.flight, "keep" if graph_is_kept() else "free"
        if flight is None:
            raise RuntimeError(
                "Trying to backward through the graph a second time, but the saved tensors have "
                "already been freed. Specify retain_graph=True at the first backward."
            )
        if graph == "free":
            step.flight = None
        types = derivative.backward.input_types[-len(derivative.cotangent_outputs) :]
        seeds = [
            _cotangent(cotangents[i], t)  # type: ignore[arg-type]
            for i, t in zip(derivative.cotangent_outputs, types, strict=True)
        ]
        gradients = step.compiled.runtime.backward(flight, [*kept, *seeds], graph)
        return (None, *gradients)


def _cotangent(gradient: torch.Tensor | None, type_: TensorType) -> torch.Tensor:
    """Gives a cotangent the layout the backward was compiled for."""
    if gradient is None:
        return torch.empty_strided(
            type_.shape, type_.stride, dtype=type_.dtype, device=type_.device
        ).zero_()
    if gradient.stride() == type_.stride and gradient.dtype == type_.dtype:
        return gradient
    target = torch.empty_strided(type_.shape, type_.stride, dtype=type_.dtype, device=type_.device)
    return target.copy_(gradient)
