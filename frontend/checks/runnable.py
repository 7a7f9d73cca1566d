"""What must hold before a captured model can be run."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from ...reuse.errors import CaptureError, PlanError
from ...reuse.ir.program import ModelTensor, Program, UserInput
from ...reuse.torch_names import is_lazy
from .torch_modes import watching_class


def check_runnable(model: nn.Module) -> None:
    """Raises PlanError if a parameter or buffer has no data."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise PlanError(
                f"{name} is on the meta device and has no data, so the model can be captured but "
                "not run. Materialize it first: model.to_empty(device=...) and load a state_dict."
            )


def check_memory(program: Program) -> None:
    """Raises CaptureError if a tensor of the model is more or other than what its memory holds.

    Found by what the forward used: parameters and buffers, and what lies in attributes and globals.
    """
    for source in program.sources:
        if not isinstance(source, ModelTensor):
            continue
        name, tensor = source.name, source.tensor
        kind = watching_class((tensor,))
        if kind is not None:
            raise CaptureError(
                f"{name} is a {kind.__name__}, whose class sees each operator, and kernels read "
                "memory past it. Use a plain tensor, or call the model itself."
            )
        if is_lazy(tensor):
            raise CaptureError(
                f"{name} is a lazily {_lazy_kind(tensor)}, whose memory holds other numbers than "
                f"it does, and kernels read memory. Write the numbers: {name}.data = "
                f"{name}.data.{_RESOLVE[_lazy_kind(tensor)]}()."
            )


def check_leaves(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raises PlanError if what a step gives gradients to was computed from something else."""
    for name, tensor in tensors:
        if tensor.requires_grad and tensor.grad_fn is not None:
            raise PlanError(
                f"{name} is computed outside of the forward ({tensor.grad_fn.name()}), and a step "
                "gives gradients to leaves alone: what it is computed from would get none. Compute "
                "it in the forward, as torch.nn.utils.parametrize does, or use lazyinline.compile."
            )


_RESOLVE = {"negated view": "resolve_neg", "conjugated view": "resolve_conj", "zero": "clone"}


def _lazy_kind(tensor: torch.Tensor) -> str:
    if tensor.is_neg():
        return "negated view"
    return "conjugated view" if tensor.is_conj() else "zero"


def check_writes(program: Program) -> None:
    """Raises CaptureError if the model changes, in place, an input that wants a gradient."""
    for _, target in program.writes:
        source = program.sources[target]
        tensor_wants = isinstance(source, ModelTensor) and source.tensor.requires_grad
        input_wants = isinstance(source, UserInput) and source.requires_grad
        if torch.is_grad_enabled() and (tensor_wants or input_wants):
            raise CaptureError(
                f"The model's forward changes {source.name} in place, and it requires grad. "
                "Outside no_grad PyTorch forbids that for a leaf; use the out-of-place operator, "
                "or change it outside the model."
            )


def check_batch_is_kept(program: Program) -> None:
    """Raises PlanError if the model changes its batch in place: a step works on a copy."""
    for _, target in program.writes:
        source = program.sources[target]
        if isinstance(source, UserInput):
            raise PlanError(
                f"The model's forward changes its argument {source.name} in place, and a compiled "
                "step works on copies of the batch. Use the out-of-place operator, or clone it "
                "first."
            )
