"""What to differentiate of a captured program, and with respect to what."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from ..autodiff.derivative import Request
from ..reuse.ir.program import Composite, ModelTensor, Program


def differentiable_inputs(program: Program) -> list[int]:
    """Positions of the inputs that want a gradient: parameters and user inputs that ask for one."""
    wanted = []
    for index, source in enumerate(program.sources):
        if isinstance(source, ModelTensor):
            if source.tensor.requires_grad:
                wanted.append(index)
        elif source.requires_grad:
            wanted.append(index)
    return wanted


def differentiation(program: Program) -> Request:
    """Asks for the derivative of a captured model, with respect to all that wants one."""
    written = {output for output, _ in program.writes}
    outputs = tuple(i for i in range(len(program.outputs)) if i not in written)
    inputs = tuple(differentiable_inputs(program))
    return Request(_unbound("main", program), inputs, outputs)


def loss_differentiation(program: Program) -> Request:
    """Asks for the derivative of a micro-batch's loss with respect to the model's tensors."""
    wanted = [
        i for i in differentiable_inputs(program) if isinstance(program.sources[i], ModelTensor)
    ]
    return Request(_unbound("micro_batch", program), tuple(wanted), (0,))


def model_name(name: str) -> str:
    """Returns a tensor's or module's own name in the model: what computes the loss is around it."""
    return name.removeprefix("model.")


def class_name_of(model: nn.Module) -> str:
    """Returns the name of a model's own class: what computes the loss is around it."""
    is_around = getattr(type(model), "is_around_a_model", False)
    return type(model.model if is_around else model).__name__


def _unbound(name: str, program: Program) -> Composite:
    """Returns a program as a closure, which does not hold the model's tensors."""
    return Composite(name, replace(program, sources=()))
