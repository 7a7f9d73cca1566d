"""A user's ``torch.autograd.Function`` as one operator of a captured graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from ...reuse.freeze import Freezer, Identity

TENSOR = object()  # stands for a tensor operand in a layout


class CustomFunction:
    """A ``torch.autograd.Function`` as one operator, which keeps its own derivative.

    Its Python may read anything, so only those of one capture are equal: a guard that no longer
    holds leads to another capture, whose closures have to be made anew.
    """

    def __init__(self, function: type, layout: tuple[Any, ...], capture: object) -> None:
        self._function = function
        self._layout = layout
        self._capture = Identity(capture)
        self.__name__ = function.__name__

    def __call__(self, *tensors: Any) -> Any:
        """Applies the function; autograd sees its own backward."""
        rest = iter(tensors)
        args = [next(rest) if part is TENSOR else part for part in self._layout]
        return self._function.apply(*args)  # type: ignore[attr-defined]

    def _key(self) -> Any:
        constants = tuple(Freezer().freeze(p) for p in self._layout if p is not TENSOR)
        places = tuple(p is TENSOR for p in self._layout)
        return (Identity(self._function), self._capture, places, constants)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CustomFunction) and other._key() == self._key()

    def __hash__(self) -> int:
        return hash(self._function)


def run_both_ways(apply: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Applies a function and runs its backward once, for who watches what its Python does.

    Returns:
        The function's result.
    """
    wanted = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]
    edges = [get_gradient_edge(a) for a in wanted]  # before: it may change an argument in place
    result = apply(*args)
    results = result if isinstance(result, (tuple, list)) else [result]
    made = [r for r in results if isinstance(r, torch.Tensor) and r.requires_grad]
    if made and edges:
        seeds = [torch.zeros_like(r) for r in made]
        with torch.autograd.set_multithreading_enabled(False):
            torch.autograd.grad(made, edges, seeds, retain_graph=True, allow_unused=True)
    return result
