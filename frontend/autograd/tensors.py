"""Tensors that others may have changed: cotangents, saved tensors, gradients handed out."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch

from ...reuse.errors import PlanError
from ...reuse.ir.transfer import in_own_storage
from ...reuse.ir.types import TensorType, Type
from ...reuse.torch_names import is_lazy
from ..checks.torch_state import TensorLayouts, plain_cotangent, watching_class
from .torch_engine import as_graph, have_hooks, pass_through_autograd


def cotangent_like(type_: Type, gradient: torch.Tensor | None = None) -> torch.Tensor:
    """Returns a cotangent in the layout of a type, differentiably; zeros if there is none."""
    assert isinstance(type_, TensorType)
    if gradient is None:
        return torch.empty_strided(
            type_.shape, type_.stride, dtype=type_.dtype, device=type_.device
        ).zero_()
    gradient = plain_cotangent(gradient)
    same = gradient.stride() == type_.stride and gradient.dtype == type_.dtype
    if same and not is_lazy(gradient):
        return gradient
    target = torch.empty_strided(type_.shape, type_.stride, dtype=type_.dtype, device=type_.device)
    return target.copy_(gradient)


class SavedTensors:
    """Gives saved tensors the layouts that a backward was compiled for.

    Args:
        types: what it was compiled for.
    """

    def __init__(self, types: Sequence[TensorType]) -> None:
        self._types = types
        self._known: TensorLayouts | None = None

    def as_saved(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Returns the tensors, those that are laid out in another way copied.

        Raises:
            PlanError: for one of another shape, type, device, or of a class that sees operators.
        """
        if self._known is not None and self._known.same(tensors):
            return tensors
        found = [_as_saved(t, type_) for t, type_ in zip(tensors, self._types, strict=True)]
        if all(map(operator.is_, found, tensors)):
            self._known = TensorLayouts(tensors)
        return found


def _as_saved(tensor: torch.Tensor, type_: TensorType) -> torch.Tensor:
    watching = watching_class((tensor,))
    same = (tensor.dtype, tensor.shape, tensor.device) == (type_.dtype, type_.shape, type_.device)
    if watching is not None or not same:
        given = f"a {watching.__name__}" if watching else f"{TensorType.of(tensor)}"
        raise PlanError(
            f"A hook on saved tensors gave back {given} on {tensor.device} for a saved {type_} on "
            f"{type_.device}, and a compiled backward reads memory as it was saved. Let unpack "
            "restore shape, type and device."
        )
    if tensor.stride() == type_.stride and not is_lazy(tensor):
        return tensor
    made = torch.empty_strided(type_.shape, type_.stride, dtype=type_.dtype, device=type_.device)
    return made.copy_(tensor)


_grad_of = operator.attrgetter("grad")


class HandedGradients:
    """Tensors of the user's own on the memory that a step writes its gradients to.

    Each has a storage of its own, so that nothing reaches the rest of the arena through it. What
    the user does to them (``p.grad.data = ...``) must not reach the step, and is noticed.
    While a parameter has hooks, gradients come to all of them by PyTorch's engine, which runs them.

    Args:
        parameters: in the order of ``gradients``, which is that of their first use.
        gradients: the step's own tensors.
    """

    def __init__(
        self, parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]
    ) -> None:
        self._parameters = list(parameters)
        self._handed = list(map(in_own_storage, gradients))
        self._layouts = TensorLayouts(self._handed)
        self._addresses = self._layouts.addresses(self._handed)
        self._given: list[torch.Tensor | None] = []  # what the engine set ``.grad`` to

    def are_as_left(self) -> bool:
        """Whether each lies there still and is its parameter's ``.grad``, and no hooks are due."""
        return self._are_held() and self.lie_there_still() and not have_hooks(self._parameters)

    def lie_there_still(self) -> bool:
        """Whether each is laid out on the memory that it was made on."""
        return (
            self._layouts.same(self._handed)
            and self._layouts.addresses(self._handed) == self._addresses
        )

    def hand_out(self) -> None:
        """Sets ``.grad`` of every parameter that has another one, and has hooks run."""
        self._given = []
        if have_hooks(self._parameters):
            pass_through_autograd(self._parameters, self._handed)
            self._given = list(map(_grad_of, self._parameters))
        elif not self._are_held():
            for parameter, gradient in zip(self._parameters, self._handed, strict=True):
                parameter.grad = gradient

    def as_graph_of(self, loss: torch.Tensor) -> torch.Tensor:
        """Returns a loss whose backward hands the gradients out, for who waits for one."""
        self._given = []
        return as_graph(loss, self._parameters, self._handed)

    def take_back(self, still_trained: Sequence[torch.Tensor]) -> None:
        """Sets to None what these gradients are the ``.grad`` of, but for some parameters."""
        kept = set(map(id, still_trained))
        given = self._given or self._handed
        for parameter, gradient in zip(self._parameters, given, strict=True):
            if id(parameter) not in kept and parameter.grad is gradient:
                parameter.grad = None

    def _are_held(self) -> bool:
        return all(map(operator.is_, map(_grad_of, self._parameters), self._handed))
