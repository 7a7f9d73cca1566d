"""Gradients of functions by ``torch.autograd.grad``, which a capture can record.

The function gets views of the tensors to differentiate by. If it reads one of these tensors from
elsewhere, that is a constant to the derivative, as in ``torch.func``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ...reuse import torch_pytree
from ...reuse.errors import PlanError

Function = Callable[..., Any]
Argnums = int | tuple[int, ...]


def renamed(tree: Any) -> tuple[Any, list[torch.Tensor]]:
    """Returns arguments with a view in place of each tensor, and the views that require grad."""
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
    """Returns the arguments at some positions."""
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
    """Returns the leaves of a tree of tensors; raises PlanError for any other leaf."""
    leaves, _ = torch_pytree.flatten(tree)
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            raise PlanError(f"{what} has to be made of tensors, and holds a {type(leaf).__name__}.")
    return leaves


def like(tree: Any, leaves: Sequence[Any]) -> Any:
    """Returns a tree of the same structure with other leaves."""
    _, spec = torch_pytree.flatten(tree)
    return torch_pytree.unflatten(list(leaves), spec)


def scalar(value: Any, taker: str) -> torch.Tensor:
    """Returns the result of a function; raises PlanError if it is no scalar."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value
    shape = f"{tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value)
    raise PlanError(f"{taker} takes a function that returns a scalar, not {shape}.")


def gradients(
    outputs: list[torch.Tensor],
    inputs: list[torch.Tensor],
    seeds: list[torch.Tensor] | None,
    *,
    goes_on: bool,
) -> list[torch.Tensor]:
    """Returns the gradient of each input, zeros for one that no output depends on.

    ``seeds`` has a cotangent for each output, and is None for a scalar; ``goes_on`` says whether
    the gradients can themselves be differentiated.
    """
    given: list[torch.Tensor | None] = [None] * len(outputs)
    given = given if seeds is None else list(seeds)
    pairs = zip(outputs, given, strict=True)
    flowing = [(y, seed) for y, seed in pairs if y.requires_grad]
    # torch.autograd.grad raises for a result without a graph; here its gradient is zero.
    if not flowing:
        return [torch.zeros_like(x) for x in inputs]
    return list(
        torch.autograd.grad(
            [y for y, _ in flowing],
            inputs,
            [seed for _, seed in flowing],
            create_graph=goes_on,
            retain_graph=True,
            allow_unused=True,
            materialize_grads=True,
        )
    )


def in_place_of(tree: Any, inputs: list[torch.Tensor], found: list[torch.Tensor]) -> Any:
    """Returns gradients in the structure of the arguments; zeros for integer tensors."""
    # By id: a tensor that is passed twice has two views, and a gradient for each.
    made = {id(x): g for x, g in zip(inputs, found, strict=True)}
    leaves = tensors_in(tree, "what is differentiated")
    return like(tree, [made[id(x)] if id(x) in made else torch.zeros_like(x) for x in leaves])


def gradient_and_result(
    func: Function,
    argnums: Argnums,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    value_of: Callable[[Any], torch.Tensor],
) -> tuple[Any, Any]:
    """Returns the gradient of a function, in the structure of the arguments, and its result."""
    goes_on = torch.is_grad_enabled()
    with torch.enable_grad():
        given, inputs = renamed(chosen(args, argnums))
        result = func(*with_chosen(args, argnums, given), **kwargs)
        found = gradients([value_of(result)], inputs, None, goes_on=goes_on)
    if not goes_on:
        leaves, spec = torch_pytree.flatten(result)
        leaves = [x.detach() if isinstance(x, torch.Tensor) else x for x in leaves]
        result = torch_pytree.unflatten(leaves, spec)
    whole = in_place_of(given, inputs, found)
    return whole if isinstance(argnums, tuple) else whole[0], result
