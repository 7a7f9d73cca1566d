"""Inputs whose memory does not hold their numbers, and inputs that are more than numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ...reuse import torch_pytree
from ...reuse.torch_names import is_lazy
from .runnable import check_runnable
from .torch_modes import watching_class
from .torch_own_memory import why_no_memory


def written_out(leaves: Sequence[Any]) -> list[Any] | None:
    """Returns the inputs with lazy ones (``x.conj()``) written out; None if there are none.

    The gradient of what is written out flows on to what it was.
    """
    lazy = [isinstance(x, torch.Tensor) and not why_no_memory(x) and is_lazy(x) for x in leaves]
    if not any(lazy):
        return None
    return [x.clone() if flag else x for x, flag in zip(leaves, lazy, strict=True)]


def watching_tensor(model: nn.Module, leaves: Sequence[Any]) -> str:
    """Says which tensor of a call no program can take as it is, or returns nothing.

    It is of a class that sees each operator, has no memory of its own, or a cache holds it that
    cannot be taken apart.
    """
    kind = watching_class(leaves)
    if kind is not None:
        return f"an input is a {kind.__name__}, whose class sees each operator"
    for leaf in leaves:
        why = why_no_memory(leaf) if isinstance(leaf, torch.Tensor) else ""
        if why and leaf.is_meta:
            check_runnable(model)  # a model without data is refused, as with inputs that have some
        if why:
            return f"an input is {why}, whose numbers lie in no memory that a kernel could read"
    formless = torch_pytree.formless(leaves)
    if formless:
        return f"an input is a {formless}, whose state is more than tensors and numbers"
    for name, tensor in _tensors_of(model):
        kind = watching_class((tensor,))
        if kind is not None:
            return f"{name} is a {kind.__name__}, whose class sees each operator"
        if tensor.is_nested:
            return f"{name} is a nested tensor, which says no sizes"
    return ""


def _tensors_of(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()
