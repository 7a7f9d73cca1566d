"""Whether parameters still have the gradients that a step handed out."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import numpy as np
import torch

from .tensor_words import gradients_of, object_of
from .watch import SameWords

_grad_of = operator.attrgetter("grad")


class HandedGradients:
    """The gradients that a step writes anew each time, and the parameters that they belong to.

    Args:
        parameters: in the order of ``gradients``.
        gradients: the same tensors after each step.
        same_words: compares words of memory, where those of the parameters' tensors are watched.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
        same_words: SameWords | None,
    ) -> None:
        self._parameters, self._gradients = list(parameters), list(gradients)
        places = gradients_of(parameters) if same_words and len(parameters) else None
        self._same_words = same_words if places else None
        self._places = np.array(places or [0], np.int64)
        self._expected = np.array([object_of(g) for g in gradients], np.int64)
        self._words = (self._places.ctypes.data, self._expected.ctypes.data, len(gradients), 0)

    def hand_out(self) -> None:
        """Sets ``.grad`` of every parameter that has another one."""
        if not self._are_there():
            for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
                parameter.grad = gradient

    def _are_there(self) -> bool:
        if self._same_words is not None:
            return bool(self._same_words(*self._words))
        return all(map(operator.is_, map(_grad_of, self._parameters), self._gradients))
