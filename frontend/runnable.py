"""What must hold before a captured model can be run."""

from __future__ import annotations

import torch
from torch import nn

from ..reuse.errors import CaptureError, PlanError
from ..reuse.program import ModelTensor, Program, UserInput


def check_runnable(model: nn.Module) -> None:
    """Raises PlanError if a parameter or buffer has no data, or other data than its memory."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise PlanError(
                f"{name} is on the meta device and has no data, so the model can be captured but "
                "not run. Materialize it first: model.to_empty(device=...) and load a state_dict."
            )
        if tensor.is_neg() or tensor.is_conj():
            kind, resolve = (
                ("negated", "resolve_neg") if tensor.is_neg() else ("conjugated", "resolve_conj")
            )
            raise PlanError(
                f"{name} is a lazily {kind} view, whose memory holds other numbers than it does, "
                f"and kernels read memory. Write the numbers: {name}.data = "
                f"{name}.data.{resolve}()."
            )


def check_writes(program: Program) -> None:
    """Raises CaptureError if the model changes, in place, an input that wants a gradient."""
    for _, target in program.writes:
        source = program.sources[target]
        tensor_wants = isinstance(source, ModelTensor) and source.tensor.requires_grad
        input_wants = isinstance(source, UserInput) and source.requires_grad
        if torch.is_grad_enabled() and (tensor_wants or input_wants):
            raise CaptureError(
                f"The model's forward changes {source.name} in place, and it requires grad. "
                "PyTorch forbids that for a leaf; use the out-of-place operator."
            )
