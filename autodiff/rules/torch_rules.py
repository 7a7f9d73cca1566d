"""Adapter: which operators have a rule, and which a derivative of their own.

A rule belongs to an operator, and PyTorch's operators are one table for the whole process; so
rules are as well. They are in one object, which holds no operator: one that is defined anew (the
cell of a notebook run again) is another operator, without a rule, and the old rule goes with it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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

NO_DERIVATIVE = "no autograd formula was registered"
"""What PyTorch's autograd says of an operator without a derivative."""

DATA_DEPENDENT_ERRORS: tuple[type[Exception], ...] = (
    DataDependentOutputException,
    DynamicOutputShapeException,
)
"""What a fake tensor raises where Python asks for what it does not have."""

_AUTOGRAD_KEYS = ("Autograd", "AutogradCPU", "AutogradCUDA")
_PYTORCHS = ("aten", "prim", "prims")


@dataclass(frozen=True, eq=False)
class Rule:
    """How an operator is taken apart.

    Attributes:
        function: takes what the operator takes.
        operator: the operator's name.
        place: the user's line, such as ``ops.py:31 square``.
    """

    function: Callable[..., Any]
    operator: str
    place: str


class Rules:
    """Operators that have a rule."""

    def __init__(self) -> None:
        self._rules: weakref.WeakKeyDictionary[Any, Rule] = weakref.WeakKeyDictionary()

    def of(self, target: object) -> Rule | None:
        """Returns the rule of what a node calls, or None."""
        return self._rules.get(target) if isinstance(target, torch._ops.OpOverload) else None

    def put(self, operator: Any, rule: Rule) -> None:
        """Gives an operator a rule in place of the one it may have."""
        self._rules[operator] = rule

    def __iter__(self) -> Iterator[tuple[Any, Rule]]:
        return iter(list(self._rules.items()))


RULES = Rules()
"""The rules of this process, beside PyTorch's own table of operators."""


def rules_in(nodes: Iterable[torch.fx.Node]) -> tuple[Rule, ...]:
    """Returns the rules of what some nodes call, in their order."""
    found = (RULES.of(node.target) for node in nodes)
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
    """Whether an operator is one of PyTorch's."""
    return operator.namespace in _PYTORCHS


def has_own_derivative(operator: Any) -> bool:
    """Whether somebody gave an operator a derivative (``register_autograd``).

    What ``custom_op`` makes is known to autograd without one: a gradient is then an error.
    """
    made = OPDEFS.get(operator._schema.name)
    if made is not None and made._opoverload is operator:
        return made._backward_fn is not None
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return any(has_kernel(operator.name(), key) for key in _AUTOGRAD_KEYS)


def casts_under_autocast(operator: Any) -> bool:
    """Whether autocast has an operator cast its operands (``register_autocast``)."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return any(has_kernel(operator.name(), key) for key in ("AutocastCPU", "AutocastCUDA"))


@dataclass(frozen=True)
class Parameter:
    """One of an operator's parameters, as its schema says.

    Attributes:
        name: of the parameter.
        type: such as ``Tensor?`` or ``int[]``.
        default: what it is if it is not given; None also if it must be.
        is_required: whether it must be given.
        is_keyword: whether it is given by name.
    """

    name: str
    type: str
    default: Any
    is_required: bool
    is_keyword: bool


def parameters_of(operator: Any) -> tuple[Parameter, ...]:
    """Returns an operator's parameters."""
    return tuple(
        Parameter(a.name, str(a.type), a.default_value, not a.has_default_value(), a.kwarg_only)
        for a in operator._schema.arguments
    )


def schema_text(operator: Any) -> str:
    """Returns an operator's schema as text."""
    return str(operator._schema)


def num_results(operator: Any) -> int:
    """Returns how many results an operator has; a list counts as one."""
    return len(operator._schema.returns)


def arguments_in_full(
    operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Returns a call's arguments with the defaults that the dispatcher leaves out."""
    given: list[Any] = list(args)
    named: dict[str, Any] = dict(kwargs)
    for index, parameter in enumerate(parameters_of(operator)):
        if parameter.is_keyword:
            named.setdefault(parameter.name, parameter.default)
        elif index >= len(given):
            given.append(named.pop(parameter.name, parameter.default))
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
