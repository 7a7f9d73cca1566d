"""The gradients that parameters of a compiled step have: where they are, and whether still."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from ...reuse.evidence.python_words import read_word
from ...reuse.evidence.watch import SameWords
from ...reuse.own_storage import in_own_storage
from ..guards.tensor_words import gradients_of, hooks_of, object_of, words_of
from ..guards.torch_guards import TensorLayouts
from .torch_hooks import had_hooks, have_hooks, pass_through_autograd

_grad_of = operator.attrgetter("grad")
_address_of = operator.methodcaller("data_ptr")


class HandedGradients:
    """Tensors of the user's own on the memory that a step writes its gradients to.

    Each has a storage of its own, so that nothing reaches the rest of the arena through it. What
    the user does to them (``p.grad.data = ...``) must not reach the step, and is noticed.
    While a parameter has hooks, gradients come to all of them by PyTorch's engine, which runs them.

    Args:
        parameters: in the order of ``gradients``, which is that of their first use.
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
        self._handed = list(map(in_own_storage, gradients))
        self._addresses = list(map(_address_of, self._handed))
        self._layouts = TensorLayouts(self._handed)
        self._same_words = same_words
        words, places = words_of(self._handed), gradients_of(parameters)
        if words is None or places is None:
            self._same_words = None
        held = dict(zip(places or (), map(object_of, self._handed), strict=False))
        lying = {a: read_word(a) for a in words.addresses} if words else {}
        self._lying, self._held, self._all = _Words(lying), _Words(held), _NO_WORDS
        self._hooks = _NO_WORDS
        self._words = {**lying, **held}
        self._given: list[torch.Tensor | None] = []  # what the engine set ``.grad`` to
        self._have_no_hooks = False  # nor can have got any without a word that changed

    def belong_to(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether they were handed to these very parameters."""
        return all(map(operator.is_, self._parameters, parameters))

    def are_as_left(self) -> bool:
        """Whether each lies there still and is its parameter's ``.grad``, and no hooks are due."""
        if self._same_words is None or not self._have_no_hooks:
            return False
        return self._all.are_same(self._same_words)

    def lie_there_still(self) -> bool:
        """Whether each is laid out on the memory that it was made on."""
        if self._same_words is not None:
            return self._lying.are_same(self._same_words)
        return list(map(_address_of, self._handed)) == self._addresses and self._layouts.same(
            self._handed
        )

    def hand_out(self) -> None:
        """Sets ``.grad`` of every parameter that has another one, and has hooks run."""
        self._given = []
        if self._find_hooks():
            pass_through_autograd(self._parameters, self._handed)
            self._given = list(map(_grad_of, self._parameters))
        elif not self._are_held():
            for parameter, gradient in zip(self._parameters, self._handed, strict=True):
                parameter.grad = gradient

    def take_back(self, still_trained: Sequence[torch.Tensor]) -> None:
        """Sets to None what these gradients are the ``.grad`` of, but for some parameters."""
        kept = set(map(id, still_trained))
        given = self._given or self._handed
        for parameter, gradient in zip(self._parameters, given, strict=True):
            if id(parameter) not in kept and parameter.grad is gradient:
                parameter.grad = None

    def _find_hooks(self) -> bool:
        """Whether parameters have hooks; learns which words say that they have none."""
        compare = self._same_words
        if compare is not None and self._have_no_hooks and self._hooks.are_same(compare):
            return False
        self._have_no_hooks = False
        if have_hooks(self._parameters):
            return True
        words = hooks_of(self._parameters) if self._same_words is not None else None
        if words is not None and not had_hooks(self._parameters):
            self._hooks, self._all = _Words(words), _Words({**self._words, **words})
            self._have_no_hooks = True
        return False

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


_NO_WORDS = _Words({})
