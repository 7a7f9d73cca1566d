"""Adapter: users' decomposition rules for operators of theirs, and their use in traces.

PyTorch's operators are one table for the whole process, and so are the rules. The table of rules
keeps no operator alive: if one is defined again (a notebook cell is run again), that is another
operator, without a rule, and the old rule is dropped.

An operator with a derivative of its own keeps it: autograd sees the operator, which is decomposed
below autograd. Any other is decomposed where the model calls it, so that autograd differentiates
the operators of the rule.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch._library.custom_ops import OPDEFS
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, get_proxy_mode

from ...reuse import torch_pytree
from ...reuse.errors import CaptureError
from ...reuse.ir.leaf import without_autocast
from ...reuse.ir.types import TensorType
from ...reuse.torch_names import memory_id, schema_of, version_of

NO_DERIVATIVE = "no autograd formula was registered"
"""Autograd's error for an operator without a derivative."""

DATA_DEPENDENT_ERRORS: tuple[type[Exception], ...] = (
    DataDependentOutputException,
    DynamicOutputShapeException,
)
"""The errors of a fake tensor whose values, or a size computed from them, Python asks for."""

_AUTOGRAD_KEYS = ("Autograd", "AutogradCPU", "AutogradCUDA")
OWN_NAMESPACES = ("aten", "prim", "prims")  # of PyTorch's operators


@dataclass(frozen=True, eq=False)
class Rule:
    """The decomposition rule of an operator, and the user's line, such as ``ops.py:31 square``."""

    function: Callable[..., Any]
    operator: str
    place: str


RULES: weakref.WeakKeyDictionary[Any, Rule] = weakref.WeakKeyDictionary()
"""The rules of this process by operator: global, as PyTorch's own table of operators is."""


def rule_of(target: object) -> Rule | None:
    """Returns the rule of a node's target, or None."""
    return RULES.get(target) if isinstance(target, torch._ops.OpOverload) else None


def rules_in(nodes: Iterable[torch.fx.Node]) -> tuple[Rule, ...]:
    """Returns the rules of the targets of some nodes, in order."""
    found = (rule_of(node.target) for node in nodes)
    return tuple(rule for rule in found if rule is not None)


def operator_of(target: Any) -> Any:
    """Returns the operator of ``custom_op``'s result, or a packet's only one; else None."""
    if isinstance(target, torch.library.CustomOpDef):
        return target._opoverload
    if isinstance(target, torch._ops.OpOverloadPacket):
        names = target.overloads()
        return getattr(target, names[0]) if len(names) == 1 else None
    return target if isinstance(target, torch._ops.OpOverload) else None


def has_own_derivative(operator: Any) -> bool:
    """Returns whether an operator has a derivative (``register_autograd``).

    ``custom_op`` registers an autograd kernel in any case: without a derivative it raises an error.
    """
    made = OPDEFS.get(operator._schema.name)
    if made is not None and made._opoverload is operator:
        return made._backward_fn is not None
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return any(has_kernel(operator.name(), key) for key in _AUTOGRAD_KEYS)


def casts_under_autocast(operator: Any) -> bool:
    """Returns whether autocast casts an operator's operands (``register_autocast``)."""
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
    """Returns the result of an operator's own fake kernel, untraced; None if there is none."""
    try:
        with disable_proxy_modes_tracing(), torch.no_grad():
            return operator(*args, **kwargs)
    except Exception:  # whatever a user's kernel may raise; a rule needs none
        return None


def num_constants() -> int:
    """Returns how many tensors from outside the current trace has as constants."""
    mode = get_proxy_mode()
    return 0 if mode is None else len(mode.tracer.graph.find_nodes(op="get_attr"))


Table = Mapping[Any, Callable[..., Any]]


def rules_beneath_autograd() -> Table:
    """Returns decompositions for operators that have been differentiated already."""
    return {
        operator: _operands_only(rule, _decomposition(operator, rule))
        for operator, rule in list(RULES.items())
    }


def rules_above_autograd() -> Table:
    """Returns decompositions for operators that are differentiated through their rule."""
    return {
        operator: _above_autocast(operator, _decomposition(operator, rule))
        for operator, rule in list(RULES.items())
        if not has_own_derivative(operator)
    }


def _operands_only(rule: Rule, decomposed: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a rule to refuse tensors that are no operands, and reads of a tensor's values."""

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
    """Wraps a rule to keep the operator whole if autocast is on and casts its operands."""
    if not casts_under_autocast(operator):
        return decomposed

    def run(*args: Any, **kwargs: Any) -> Any:
        active = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
        return NotImplemented if active else decomposed(*args, **kwargs)

    return run


def _decomposition(operator: Any, rule: Rule) -> Callable[..., Any]:
    @without_autocast()
    def decomposed(*args: Any, **kwargs: Any) -> Any:
        given, named = arguments_in_full(operator, args, kwargs)
        operands = tensors_in((given, named))
        # A rule must not write an operand, which belongs to the caller: the operator does not.
        before = versions(operands)
        made = rule.function(*given, **named)
        if versions(operands) != before:
            raise CaptureError(
                f"The rule of {rule.operator} ({rule.place}) changes an operand in place, and the "
                "operator does not. Let it work on a copy: x = x.clone()."
            )
        if isinstance(made, list) and len(schema_of(operator).returns) > 1:
            made = tuple(made)
        return _as_operator(operator, rule, made, fake_result(operator, given, named), operands)

    return decomposed


def tensors_in(values: Any) -> list[torch.Tensor]:
    """Returns the tensors in nested arguments or results."""
    return [x for x in torch_pytree.flatten(values)[0] if isinstance(x, torch.Tensor)]


def versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Returns how often each tensor was changed in place; 0 where PyTorch does not count."""
    return [0 if tensor.is_inference() else version_of(tensor) for tensor in tensors]


def _as_operator(
    operator: Any, rule: Rule, made: Any, expected: Any, operands: Sequence[torch.Tensor]
) -> Any:
    """Returns a rule's results as the operator would: in the layout of its own, in new memory."""
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
            # An operator returns new memory; a result that aliases an operand would change with it.
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
    """Returns a tensor made dense, in the order of strides, by differentiable operators."""
    order = sorted(range(value.dim()), key=lambda d: (-strides[d], d))
    dense = value.permute(order).clone(memory_format=torch.contiguous_format)
    return dense.permute([order.index(d) for d in range(value.dim())])


def _is_same_memory(first: torch.Tensor, second: torch.Tensor) -> bool:
    try:
        return memory_id(first) == memory_id(second)
    except NotImplementedError:  # a tensor without a storage: assume the worst
        return True


def _unlike(rule: Rule, found: str, expected: str) -> CaptureError:
    return CaptureError(
        f"The rule of {rule.operator} ({rule.place}) gives {found}, and the operator's fake kernel "
        f"{expected}. Mend the one that is wrong."
    )
