"""Adapter: rules of users that take an operator of theirs apart, and their use in traces.

A rule belongs to an operator, and PyTorch's operators are one table for the whole process; so
rules are as well. They are in one object, which holds no operator: one that is defined anew (the
cell of a notebook run again) is another operator, without a rule, and the old rule goes with it.

An operator that has a derivative of its own keeps it: autograd sees the operator, and what it ran
is taken apart beneath autograd. Any other is taken apart where the model calls it, so that autograd
sees what the rule is made of.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch._library.custom_ops import OPDEFS
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, get_proxy_mode

from ...reuse import torch_pytree
from ...reuse.errors import CaptureError
from ...reuse.ir.leaf import without_autocast
from ...reuse.ir.types import TensorType
from ...reuse.torch_names import memory_id, schema_of, version_of

NO_DERIVATIVE = "no autograd formula was registered"
"""The error of PyTorch's autograd at an operator without a derivative."""

DATA_DEPENDENT_ERRORS: tuple[type[Exception], ...] = (
    DataDependentOutputException,
    DynamicOutputShapeException,
)
"""The errors of a fake tensor where Python asks for its numbers, or for a size made of them."""

_AUTOGRAD_KEYS = ("Autograd", "AutogradCPU", "AutogradCUDA")
_PYTORCHS = ("aten", "prim", "prims")


@dataclass(frozen=True, eq=False)
class Rule:
    """Holds the function that takes an operator apart.

    Attributes:
        function: takes what the operator takes.
        operator: the operator's name.
        place: the user's line, such as ``ops.py:31 square``.
    """

    function: Callable[..., Any]
    operator: str
    place: str


RULES: weakref.WeakKeyDictionary[Any, Rule] = weakref.WeakKeyDictionary()
"""The rules of this process by operator, besides PyTorch's own table of operators."""


def rule_of(target: object) -> Rule | None:
    """Returns the rule of what a node calls, or None."""
    return RULES.get(target) if isinstance(target, torch._ops.OpOverload) else None


def rules_in(nodes: Iterable[torch.fx.Node]) -> tuple[Rule, ...]:
    """Returns the rules of what some nodes call, in their order."""
    found = (rule_of(node.target) for node in nodes)
    return tuple(rule for rule in found if rule is not None)


def operator_of(target: Any) -> Any:
    """Returns the one operator that a user means, or None.

    Args:
        target: an operator, its packet if that holds no other, or what ``custom_op`` returned.
    """
    if isinstance(target, torch.library.CustomOpDef):
        return target._opoverload
    if isinstance(target, torch._ops.OpOverloadPacket):
        names = target.overloads()
        return getattr(target, names[0]) if len(names) == 1 else None
    return target if isinstance(target, torch._ops.OpOverload) else None


def is_pytorchs(operator: Any) -> bool:
    """Returns whether an operator is one of PyTorch's."""
    return operator.namespace in _PYTORCHS


def has_own_derivative(operator: Any) -> bool:
    """Returns whether somebody gave an operator a derivative (``register_autograd``).

    What ``custom_op`` makes is known to autograd without one: a gradient is then an error.
    """
    made = OPDEFS.get(operator._schema.name)
    if made is not None and made._opoverload is operator:
        return made._backward_fn is not None
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return any(has_kernel(operator.name(), key) for key in _AUTOGRAD_KEYS)


def casts_under_autocast(operator: Any) -> bool:
    """Returns whether autocast has an operator cast its operands (``register_autocast``)."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return any(has_kernel(operator.name(), key) for key in ("AutocastCPU", "AutocastCUDA"))


def arguments_in_full(
    operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Returns a call's arguments with the defaults that the dispatcher leaves out."""
    given: list[Any] = list(args)
    named: dict[str, Any] = dict(kwargs)
    for index, parameter in enumerate(schema_of(operator).arguments):
        if parameter.kwarg_only:
            named.setdefault(parameter.name, parameter.default_value)
        elif index >= len(given):
            given.append(named.pop(parameter.name, parameter.default_value))
    return given, named


def fake_result(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Returns what an operator's own fake kernel says; None if there is none that can say it.

    Nothing is traced meanwhile.
    """
    try:
        with disable_proxy_modes_tracing(), torch.no_grad():
            return operator(*args, **kwargs)
    except Exception:  # whatever a user's kernel may raise; a rule needs none
        return None


def num_constants() -> int:
    """Returns how many tensors from outside the trace that is under way has taken in."""
    mode = get_proxy_mode()
    return 0 if mode is None else len(mode.tracer.graph.find_nodes(op="get_attr"))


Table = Mapping[Any, Callable[..., Any]]


def rules_beneath_autograd() -> Table:
    """Returns what takes operators apart once they have been differentiated."""
    return {
        operator: _of_operands_alone(rule, _standing_for(operator, rule))
        for operator, rule in list(RULES.items())
    }


def rules_above_autograd() -> Table:
    """Returns what takes operators apart that are differentiated through their rule."""
    return {
        operator: _above_autocast(operator, _standing_for(operator, rule))
        for operator, rule in list(RULES.items())
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
    @without_autocast()
    def decomposed(*args: Any, **kwargs: Any) -> Any:
        given, named = arguments_in_full(operator, args, kwargs)
        operands = tensors_in((given, named))
        # A rule that writes an operand would change what the caller holds; the operator does not.
        before = versions(operands)
        made = rule.function(*given, **named)
        if versions(operands) != before:
            raise CaptureError(
                f"The rule of {rule.operator} ({rule.place}) changes an operand in place, and the "
                "operator does not. Let it work on a copy: x = x.clone()."
            )
        if isinstance(made, list) and len(schema_of(operator).returns) > 1:
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
            # An operator returns new memory; a result that is an operand would change with it.
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
