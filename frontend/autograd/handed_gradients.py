"""The gradients that parameters of a compiled step have: where they are, and whether still."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch

from ...reuse.own_storage import in_own_storage
from ..checks.torch_state import TensorLayouts
from .torch_hooks import as_graph, have_hooks, pass_through_autograd

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
