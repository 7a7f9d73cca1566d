"""The gradients that parameters of a compiled step have: where they are, and whether still."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from .python_words import read_word
from .tensor_layouts import TensorLayouts
from .tensor_words import gradients_of, object_of, words_of
from .watch import SameWords

_grad_of = operator.attrgetter("grad")
_address_of = operator.methodcaller("data_ptr")


class HandedGradients:
    """Tensors of the user's own on the memory that a step writes its gradients to.

    What the user does to them (``p.grad.data = ...``) must not reach the step, and is noticed.

    Args:
        parameters: in the order of ``gradients``.
        gradients: the step's own tensors.
        same_words: compares words of memory, where those of the parameters' tensors are watched.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
        same_words: SameWords | None,
    ) -> None:
        self._parameters = list(parameters)
        self._handed = [gradient.detach() for gradient in gradients]
        self._addresses = list(map(_address_of, self._handed))
        self._layouts = TensorLayouts(self._handed)
        self._same_words = same_words
        words, places = words_of(self._handed), gradients_of(parameters)
        if words is None or places is None:
            self._same_words = None
        held = dict(zip(places or (), map(object_of, self._handed), strict=False))
        lying = {a: read_word(a) for a in words.addresses} if words else {}
        self._lying, self._held, self._all = _Words(lying), _Words(held), _Words({**lying, **held})

    def belong_to(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether they were handed to these very parameters."""
        return all(map(operator.is_, self._parameters, parameters))

    def are_as_left(self) -> bool:
        """Whether each lies there still, and is the ``.grad`` of its parameter."""
        if self._same_words is not None:
            return self._all.are_same(self._same_words)
        return self.lie_there_still() and self._are_held()

    def lie_there_still(self) -> bool:
        """Whether each is laid out on the memory that it was made on."""
        if self._same_words is not None:
            return self._lying.are_same(self._same_words)
        return list(map(_address_of, self._handed)) == self._addresses and self._layouts.same(
            self._handed
        )

    def hand_out(self) -> None:
        """Sets ``.grad`` of every parameter that has another one."""
        if not self._are_held():
            for parameter, gradient in zip(self._parameters, self._handed, strict=True):
                parameter.grad = gradient

    def _are_held(self) -> bool:
        if self._same_words is not None:
            return self._held.are_same(self._same_words)
        return all(map(operator.is_, map(_grad_of, self._parameters), self._handed))


class _Words:
    """Words of memory, by address, and what they should be."""

    def __init__(self, words: Mapping[int, int]) -> None:
        # One more, so that there is an address where there are no words.
        self._kept = [np.array([*column, 0], np.int64) for column in (words, words.values())]
        self._arguments = (*(column.ctypes.data for column in self._kept), len(words), 0)

    def are_same(self, same_words: SameWords) -> bool:
        return bool(same_words(*self._arguments))
