"""Adapter: one check in C++ that tensors are laid out as before (Dynamo's tensor guards)."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch._C._dynamo.guards import TensorGuards

from ...reuse.torch_names import is_lazy

_requires_grad = operator.attrgetter("requires_grad")
_address_of = torch.Tensor.data_ptr


class TensorLayouts:
    """The classes, types, sizes, strides, devices, lazy bits and wishes that some tensors had.

    ``.data = ...`` changes them on the very same tensor, and not always its address.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._facts = _facts(tensors)
        self._wants_grad = list(map(_requires_grad, tensors))
        self._grad_mode = torch.is_grad_enabled()
        self._are_strided = all(t.layout is torch.strided for t in tensors)
        self._guards: Any = None
        if tensors:
            no_dims: Any = {"dynamic_dims_sizes": None, "dynamic_dims_strides": None}
            self._guards = TensorGuards(*tensors, **no_dims)

    def addresses(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        """Returns where the numbers of tensors with these layouts lie; 0 for sparse ones."""
        if self._are_strided:
            return list(map(_address_of, tensors))
        return [t.data_ptr() if t.layout is torch.strided else 0 for t in tensors]

    def surely_same(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether so many tensors have the same layouts and classes; False where that is not known.

        Under the same grad mode, which the caller compares.
        """
        if self._guards is None or not self._guards.check(*tensors):
            return False
        # Without grad mode the check in C++ does not look at requires_grad.
        return self._grad_mode or list(map(_requires_grad, tensors)) == self._wants_grad

    def same(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether these tensors, in the same order, have the same layouts."""
        if self._grad_mode == torch.is_grad_enabled() and self.surely_same(tensors):
            return True
        # A False is not conclusive: the C++ guard also reacts to the caller's modes (autocast,
        # inference). So compare exactly.
        return bool(_facts(tensors) == self._facts)


def _facts(tensors: Sequence[torch.Tensor]) -> Any:
    return (
        [t.dtype for t in tensors],
        [t.shape for t in tensors],
        [t.stride() for t in tensors],
        [t.requires_grad for t in tensors],
        [t.device for t in tensors],
        list(map(is_lazy, tensors)),
        list(map(type, tensors)),
    )
