"""What stands for an operator with a rule while a graph is traced.

An operator that has a derivative of its own keeps it: autograd sees the operator, and what it ran
is taken apart beneath autograd. Any other is taken apart where the model calls it, so that autograd
sees what the rule is made of.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ...reuse import torch_pytree
from ...reuse.errors import CaptureError
from ...reuse.ir.leaf import without_autocast
from ...reuse.ir.types import TensorType
from ...reuse.torch_names import memory_id, version_of
from .torch_rules import (
    DATA_DEPENDENT_ERRORS,
    RULES,
    Rule,
    arguments_in_full,
    casts_under_autocast,
    fake_result,
    has_own_derivative,
    num_constants,
    num_results,
)

Table = Mapping[Any, Callable[..., Any]]


def rules_beneath_autograd() -> Table:
    """Returns what takes operators apart once they have been differentiated."""
    return {
        operator: _of_operands_alone(rule, _standing_for(operator, rule))
        for operator, rule in RULES
    }


def rules_above_autograd() -> Table:
    """Returns what takes operators apart that are differentiated through their rule."""
    return {
        operator: _above_autocast(operator, _standing_for(operator, rule))
        for operator, rule in RULES
        if not has_own_derivative(operator)
    }


def _of_operands_alone(rule: Rule, decomposed: Callable[..., Any]) -> Callable[..., Any]:
    """Refuses what only a capture can take in: tensors from elsewhere, and their values."""

    def run(*args: Any, **kwargs: Any) -> Any:
        before = num_constants()
        try:
            made = decomposed(*args, **kwargs)
        except DATA_DEPENDENT_ERRORS as error:
            raise CaptureError(
                f"The rule of {rule.operator} ({rule.place}) needs the value of a tensor (.item(), "
                "if and int() do), and a program has no values yet. Decide with torch.where."
            ) from error
        if num_constants() > before:
            raise CaptureError(
                f"The rule of {rule.operator} ({rule.place}) makes a tensor of Python numbers or "
                "reads one that is no operand. Compute with numbers, or with x.new_full(...)."
            )
        return made

    return run


def _above_autocast(operator: Any, decomposed: Callable[..., Any]) -> Callable[..., Any]:
    """Leaves an operator whole whose operands autocast casts: a rule would be given others."""
    if not casts_under_autocast(operator):
        return decomposed

    def run(*args: Any, **kwargs: Any) -> Any:
        active = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
        return NotImplemented if active else decomposed(*args, **kwargs)

    return run


def _standing_for(operator: Any, rule: Rule) -> Callable[..., Any]:
    @without_autocast
    def decomposed(*args: Any, **kwargs: Any) -> Any:
        given, named = arguments_in_full(operator, args, kwargs)
        operands = tensors_in((given, named))
        before = versions(operands)
        made = rule.function(*given, **named)
        if versions(operands) != before:
            raise CaptureError(
                f"The rule of {rule.operator} ({rule.place}) changes an operand in place, and the "
                "operator does not. Let it work on a copy: x = x.clone()."
            )
        if isinstance(made, list) and num_results(operator) > 1:
            made = tuple(made)
        return _as_of(operator, rule, made, fake_result(operator, given, named), operands)

    return decomposed


def tensors_in(values: Any) -> list[torch.Tensor]:
    """Returns the tensors in nested arguments or results."""
    return [x for x in torch_pytree.flatten(values)[0] if isinstance(x, torch.Tensor)]


def versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Returns how often each tensor was changed; 0 where PyTorch does not count."""
    return [0 if tensor.is_inference() else version_of(tensor) for tensor in tensors]


def _as_of(
    operator: Any, rule: Rule, made: Any, expected: Any, operands: Sequence[torch.Tensor]
) -> Any:
    """Returns a rule's results as the operator hands out its own: laid out so, in new memory."""
    leaves, tree = torch_pytree.flatten(made)
    types = [TensorType.of(t) for t in tensors_in(expected)]
    if expected is not None and len(types) != len(tensors_in(made)):
        raise _unlike(rule, f"{len(tensors_in(made))} tensors", f"{len(types)}")
    taken = list(operands)
    results: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            if types:
                leaf = _laid_out(rule, leaf, types.pop(0))
            if any(_is_same_memory(leaf, other) for other in taken):
                leaf = leaf.clone()
            taken.append(leaf)
        results.append(leaf)
    return torch_pytree.unflatten(results, tree)


def _laid_out(rule: Rule, made: torch.Tensor, type_: TensorType) -> torch.Tensor:
    found = TensorType.of(made)
    if type_.is_symbolic or found.is_symbolic:
        return made
    if (found.dtype, found.shape, found.device) != (type_.dtype, type_.shape, type_.device):
        raise _unlike(rule, str(found), str(type_))
    if found.stride == type_.stride or not type_.is_dense:
        return made
    return dense_as(made, type_.stride)


def dense_as(value: torch.Tensor, strides: Sequence[Any]) -> torch.Tensor:
    """Returns a tensor laid out densely, in the order of strides, by differentiable operators."""
    order = sorted(range(value.dim()), key=lambda d: (-strides[d], d))
    dense = value.permute(order).clone(memory_format=torch.contiguous_format)
    return dense.permute([order.index(d) for d in range(value.dim())])


def _is_same_memory(first: torch.Tensor, second: torch.Tensor) -> bool:
    try:
        return memory_id(first) == memory_id(second)
    except NotImplementedError:  # a tensor that has no memory: it may be any
        return True


def _unlike(rule: Rule, found: str, expected: str) -> CaptureError:
    return CaptureError(
        f"The rule of {rule.operator} ({rule.place}) gives {found}, and the operator's fake kernel "
        f"{expected}. Mend the one that is wrong."
    )
