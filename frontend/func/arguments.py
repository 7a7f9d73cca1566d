"""What is differentiated, under names of its own, in arguments of any nesting."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...reuse import torch_pytree
from ...reuse.errors import PlanError

Function = Callable[..., Any]
Argnums = int | tuple[int, ...]


def renamed(tree: Any) -> tuple[Any, list[torch.Tensor]]:
    """Returns arguments with a new name for each tensor that can have a gradient, and these.

    What a function reads elsewhere, under the old name, is not differentiated with respect to.
    """
    leaves, spec = torch_pytree.flatten(tree)
    new = [_own_name(leaf) for leaf in leaves]
    found = [x for x in new if isinstance(x, torch.Tensor) and x.requires_grad]
    return torch_pytree.unflatten(new, spec), found


def _own_name(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if not (leaf.is_floating_point() or leaf.is_complex()):
        return leaf.view_as(leaf)
    with torch.enable_grad():
        return leaf.view_as(leaf).requires_grad_()


def chosen(args: Sequence[Any], argnums: Argnums) -> tuple[Any, ...]:
    """Returns the arguments at some positions.

    Raises:
        PlanError: if there is no such argument.
    """
    places = argnums if isinstance(argnums, tuple) else (argnums,)
    for place in places:
        if not -len(args) <= place < len(args):
            raise PlanError(f"argnums={argnums} names argument {place} of {len(args)}.")
    return tuple(args[place] for place in places)


def with_chosen(args: Sequence[Any], argnums: Argnums, new: Sequence[Any]) -> list[Any]:
    """Returns all arguments, with new ones at some positions."""
    places = argnums if isinstance(argnums, tuple) else (argnums,)
    result = list(args)
    for place, value in zip(places, new, strict=True):
        result[place] = value
    return result


def tensors_in(tree: Any, what: str) -> list[torch.Tensor]:
    """Returns the leaves of a tree that holds tensors alone.

    Raises:
        PlanError: if it holds anything else.
    """
    leaves, _ = torch_pytree.flatten(tree)
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            raise PlanError(f"{what} has to be made of tensors, and holds a {type(leaf).__name__}.")
    return leaves


def like(tree: Any, leaves: Sequence[Any]) -> Any:
    """Returns a tree of the same nesting with other leaves."""
    _, spec = torch_pytree.flatten(tree)
    return torch_pytree.unflatten(list(leaves), spec)
