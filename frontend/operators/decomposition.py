"""``@lazyinline.decomposition(operator)``: a rule makes an operator one of PyTorch's, compiled."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from ...autodiff.rules.torch_rules import (
    RULES,
    Rule,
    is_pytorchs,
    operator_of,
    parameters_of,
    schema_text,
)
from ...reuse.errors import DecompositionError
from ...reuse.ir.operators import is_mutable, returns_operand
from .check import Checks, check_rule

Function = TypeVar("Function", bound=Callable[..., Any])
Example = Sequence[Any] | Mapping[str, Any]


def decomposition(
    operator: Any, *, check: bool | Checks = True, examples: Sequence[Example] = ()
) -> Callable[[Function], Function]:
    """Gives an operator of yours a rule: what it does, written in PyTorch's operators.

    Compiled programs run the rule in place of the operator: fused, planned, kept on disk, exported.
    An operator with a derivative of its own (``register_autograd``) keeps it; the rule takes it
    apart afterwards, as do the rules of the operators that its backward calls. An operator without
    one is differentiated through its rule, to any order.

    A program keeps the rule that it was compiled with. The rule may depend on its arguments alone.

    Args:
        operator: what ``torch.library.custom_op`` returned, or ``torch.ops.my.op``.
        check: let ``torch.library.opcheck`` check the operator, run rule and operator on examples
            here and now, and compare values, shapes, types, strides, and the gradients where the
            operator has a derivative. ``"values"`` leaves out
            the gradients: of an operator whose derivative is meant to be another than its rule's.
        examples: arguments for the check, each a tuple, or a dictionary by name. Without any,
            small tensors and numbers are taken.

    Returns:
        A decorator, which returns the function as it is.

    Raises:
        DecompositionError: if the rule is not the operator's: its signature, what it gives, or that
            it changes what it is given; or if the operator has another rule, is PyTorch's, or
            changes its operands.

    Example:
        >>> @lazyinline.decomposition(torch.ops.my.square)
        ... def square(x: torch.Tensor) -> torch.Tensor:
        ...     return x * x
    """
    found = _checked_operator(operator)
    if check not in (True, False, "values"):
        raise DecompositionError(f"check={check!r} is unknown; there are True, False and 'values'.")

    def register(function: Function) -> Function:
        rule = Rule(function, str(found), _place_of(function))
        _check_signature(found, rule)
        _check_is_first(found, rule)
        if check:
            check_rule(found, rule, examples, "values" if check == "values" else "all")
        RULES.put(found, rule)
        return function

    return register


def _checked_operator(target: Any) -> Any:
    found = operator_of(target)
    if found is None:
        names: list[str] = getattr(target, "overloads", list)()
        which = f"{target} has {len(names)} overloads ({', '.join(names)}): name one, as in "
        raise DecompositionError(
            f"{which}{target}.{names[0]}."
            if names
            else f"{_told(target)} is no operator. A rule is for what torch.library.custom_op "
            "returned, or for torch.ops.<namespace>.<name>."
        )
    if is_pytorchs(found):
        raise DecompositionError(f"{found} is PyTorch's, and compiled programs know it already.")
    if is_mutable(found) or returns_operand(found):
        raise DecompositionError(
            f"{found} changes what it is given or hands it out ({schema_text(found)}). A rule is "
            "for an operator that only makes new tensors."
        )
    return found


def _told(target: Any) -> str:
    name = getattr(target, "__qualname__", None) or type(target).__name__
    return f"{name!r}"


def _place_of(function: Callable[..., Any]) -> str:
    code = getattr(inspect.unwrap(function), "__code__", None)
    name = getattr(function, "__qualname__", type(function).__name__)
    if code is None:
        return name
    return f"{os.path.basename(code.co_filename)}:{code.co_firstlineno} {name}"


def _check_signature(operator: Any, rule: Rule) -> None:
    parameters = parameters_of(operator)
    expected = [p.name for p in parameters if not p.is_keyword]
    by_name = {p.name for p in parameters if p.is_keyword}
    own = inspect.signature(rule.function).parameters.values()
    positional = [p.name for p in own if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    keywords = {p.name for p in own if p.kind is p.KEYWORD_ONLY}
    packed = any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in own)
    if positional != expected or keywords != by_name or packed:
        raise DecompositionError(
            f"The rule {rule.place}{inspect.signature(rule.function)} does not take what "
            f"{operator} takes: {schema_text(operator)}. Give it the same parameters, in the same "
            "order."
        )


def _check_is_first(operator: Any, rule: Rule) -> None:
    """Refuses a second rule, but for the first defined anew: a notebook's cell, a reload."""
    present = RULES.of(operator)
    if present is not None and not _is_defined_anew(present.function, rule.function):
        raise DecompositionError(
            f"{operator} has a rule already ({present.place}); {rule.place} would be a second."
        )


def _is_defined_anew(old: Callable[..., Any], new: Callable[..., Any]) -> bool:
    names = [
        (getattr(f, "__module__", ""), getattr(f, "__qualname__", "<lambda>")) for f in (old, new)
    ]
    return names[0] == names[1] and not names[0][1].endswith("<lambda>")
