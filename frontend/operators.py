"""``@lazyinline.decomposition(operator)``: a rule that decomposes a custom operator.

A rule is checked against its operator: both run on the same inputs, and their results are compared.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar

import torch

from ..autodiff.traces import torch_user_rules as rules
from ..reuse import torch_pytree
from ..reuse.errors import DecompositionError
from ..reuse.ir.operators import is_mutable, returns_operand
from ..reuse.ir.types import TensorType, strides_that_matter
from ..reuse.torch_names import schema_of

Checks: TypeAlias = Literal["all", "values"]
"""The compared results: ``"values"`` (with shapes, types, strides), or ``"all"``: gradients too."""

Arguments: TypeAlias = dict[str, Any]  # by name
Example: TypeAlias = Sequence[Any] | Mapping[str, Any]

_SHAPES = ((4, 4), (2, 3, 4), (2, 3, 4, 5), (5,))
_NUMBERS = {"int": 1, "SymInt": 1, "float": 1.75, "number": 1.75, "Scalar": 1.75, "bool": True}


def check_rule(
    operator: Any, rule: rules.Rule, examples: Sequence[Example], checks: Checks
) -> None:
    """Raises DecompositionError if a rule differs from its operator, or ``opcheck`` fails."""
    parameters = schema_of(operator).arguments
    with torch.random.fork_rng(devices=[]):
        cases = [_named(operator, parameters, example) for example in examples]
        for arguments in cases or _made(operator, rule, parameters):
            try:
                _check(_Pair(operator, rule, parameters, arguments), checks)
            except DecompositionError as error:
                given = ", ".join(f"{name}={_value_text(x)}" for name, x in arguments.items())
                raise DecompositionError(f"{error} Given {given}.") from error.__cause__


@dataclass(frozen=True)
class _Pair:
    """An operator and its rule, to run on the same arguments."""

    operator: Any
    rule: rules.Rule
    parameters: Sequence[Any]
    arguments: Arguments

    def inputs(self, *, differentiable: bool = False) -> tuple[list[Any], Arguments]:
        """Returns a copy of the arguments, each tensor with its strides."""
        leaves, tree = torch_pytree.flatten(self.arguments)
        copies = [_copy(x, differentiable) if isinstance(x, torch.Tensor) else x for x in leaves]
        named = torch_pytree.unflatten(copies, tree)
        keywords = {p.name for p in self.parameters if p.kwarg_only}
        given = [value for name, value in named.items() if name not in keywords]
        return given, {name: value for name, value in named.items() if name in keywords}

    def wrong(self, what: str) -> DecompositionError:
        """Returns an error that says what is wrong with the rule."""
        return DecompositionError(f"The rule of {self.operator} ({self.rule.place}) {what}.")


def _check(pair: _Pair, checks: Checks) -> None:
    operator, rule = pair.operator, pair.rule.function
    try:
        with torch.no_grad():
            expected = _run(operator, *pair.inputs())
        _check_operator(operator, *pair.inputs())
    except Exception as error:  # a user's operator may raise any
        raise DecompositionError(f"{operator} itself: {type(error).__name__}: {error}.") from error
    args, kwargs = pair.inputs()
    before = rules.versions(rules.tensors_in((args, kwargs)))
    try:
        with torch.no_grad():
            made = _run(rule, args, kwargs)
    except Exception as error:
        raise pair.wrong(f"raises {type(error).__name__} ({error})") from error
    # Versions, not values: a rule may write the values that an operand already has.
    if rules.versions(rules.tensors_in((args, kwargs))) != before:
        raise pair.wrong("changes an operand in place. Let it work on a copy: x = x.clone()")
    _compare(pair, "another result", made, expected)
    if _strides(made) != _strides(expected):
        raise pair.wrong(f"gives strides {_strides(made)}, the operator {_strides(expected)}")
    if checks == "all" and rules.has_own_derivative(operator):
        own = _gradients(operator, *pair.inputs(differentiable=True))
        try:
            gradients = _gradients(rule, *pair.inputs(differentiable=True))
        except RuntimeError:  # the rule need have no derivative
            return
        what = "another gradient (is that meant? say check='values')"
        _compare(pair, what, gradients, own)


def _check_operator(operator: Any, args: Sequence[Any], kwargs: Arguments) -> None:
    """Runs ``opcheck`` and raises its first error; a fake kernel is not required."""
    found = torch.library.opcheck(
        operator,
        tuple(args),
        kwargs,
        test_utils=("test_schema", "test_faketensor"),
        raise_exception=False,
    )
    for result in found.values():
        if isinstance(result, Exception) and "no fake impl registered" not in str(result):
            raise result


def _compare(pair: _Pair, what: str, made: Any, expected: Any) -> None:
    try:
        torch.testing.assert_close(made, expected, equal_nan=True)
    except (AssertionError, TypeError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        lines = [line for line in lines if not line.startswith("Tensor-likes are not close")]
        raise pair.wrong(f"gives {what}: {' '.join(lines)}") from None


def _run(function: Callable[..., Any], args: Sequence[Any], kwargs: Arguments) -> Any:
    torch.manual_seed(0)  # operator and rule draw the same random numbers
    return function(*args, **kwargs)


def _gradients(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Arguments
) -> list[torch.Tensor]:
    """Returns the gradient of each operand, from fixed cotangents."""
    with torch.enable_grad():
        results = [t for t in rules.tensors_in(_run(function, args, kwargs)) if t.requires_grad]
    operands = [t for t in rules.tensors_in((args, kwargs)) if t.requires_grad]
    if not results:
        return [torch.zeros_like(operand) for operand in operands]
    torch.manual_seed(1)
    cotangents = [torch.randn_like(result) for result in results]
    return list(torch.autograd.grad(results, operands, cotangents, materialize_grads=True))


def _strides(result: Any) -> list[tuple[int, ...]]:
    return [tuple(strides_that_matter(t.shape, t.stride())) for t in rules.tensors_in(result)]


def _copy(tensor: torch.Tensor, differentiable: bool) -> torch.Tensor:
    type_ = TensorType.of(tensor)
    wanted = differentiable and type_.is_differentiable
    return type_.empty().copy_(tensor.detach()).requires_grad_(wanted)


def _named(operator: Any, parameters: Sequence[Any], example: Example) -> Arguments:
    """Returns a user's example by parameter names, in their order."""
    if isinstance(example, Mapping):
        return {p.name: example[p.name] for p in parameters if p.name in example}
    if not isinstance(example, (tuple, list)):
        raise DecompositionError(
            f"examples= takes tuples of arguments for {operator}, or dictionaries of them by name; "
            f"one is a {type(example).__name__}. Of a single tensor: examples=[(x,)]."
        )
    return dict(zip((p.name for p in parameters), example, strict=False))


def _made(operator: Any, rule: rules.Rule, parameters: Sequence[Any]) -> Iterator[Arguments]:
    """Yields small examples of the first shape that the operator accepts, and transposed ones."""
    why = ""
    for shape in _SHAPES:
        try:
            torch.manual_seed(0)
            found = {p.name: _value(p, shape) for p in parameters}
            _run(operator, *_Pair(operator, rule, parameters, found).inputs())
        except Exception as error:  # a user's operator may raise any
            why = why or str(error).partition("\n")[0]
            continue
        yield found
        yield {
            n: x.mT if isinstance(x, torch.Tensor) and x.dim() > 1 else x for n, x in found.items()
        }
        return
    raise DecompositionError(
        f"The rule {rule.place} cannot be checked on small tensors and numbers, as "
        f"{schema_of(operator)} is understood: {why}. Give some: examples=[(x, ...)], or "
        "check=False."
    )


def _value(parameter: Any, shape: tuple[int, ...]) -> Any:
    type_ = str(parameter.type)
    kind = type_.removeprefix("Optional[").removesuffix("]")
    if type_ == "Tensor":
        return torch.randn(shape, device="cpu")
    if type_ == "List[Tensor]":
        return [torch.randn(shape, device="cpu") for _ in range(2)]
    if kind in _NUMBERS:  # not the default: a rule may forget the parameter
        return _NUMBERS[kind]
    if not parameter.has_default_value():
        raise TypeError(f"nothing is made for {parameter.name} ({type_})")
    return parameter.default_value


def _value_text(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return f"[{', '.join(map(_value_text, value))}]" if isinstance(value, list) else repr(value)


Function = TypeVar("Function", bound=Callable[..., Any])


def decomposition(
    operator: Any, *, check: bool | Checks = True, examples: Sequence[Example] = ()
) -> Callable[[Function], Function]:
    """Registers a decomposition of a custom operator into PyTorch's operators, its rule.

    Compiled programs run the rule instead of the operator, so it is fused, planned, cached on disk
    and exported. An operator with ``register_autograd`` keeps its derivative; it is decomposed
    after differentiation, as are the custom operators that its backward calls. An operator without
    one is differentiated through its rule, to any order.

    A program keeps the rule that it was compiled with. A rule may depend on its arguments only.

    Args:
        operator: the result of ``torch.library.custom_op``, or ``torch.ops.my.op``.
        check: check the operator by ``torch.library.opcheck``, run rule and operator on examples
            at once, and compare values, shapes, types, strides, and gradients if the operator has
            a derivative. ``"values"`` skips the gradients, for an operator whose derivative
            differs from that of its rule on purpose.
        examples: arguments for the check, each a tuple, or a dictionary by name. Without any,
            small tensors and numbers are made.

    Returns:
        A decorator, which returns the function unchanged.

    Raises:
        DecompositionError: if the rule differs from the operator in signature or results, or
            changes its operands; or if the operator has another rule, is PyTorch's, or changes or
            returns its operands.

    Example:
        >>> @lazyinline.decomposition(torch.ops.my.square)
        ... def square(x: torch.Tensor) -> torch.Tensor:
        ...     return x * x
    """
    found = _checked_operator(operator)
    if check not in (True, False, "values"):
        raise DecompositionError(f"check={check!r} is unknown; there are True, False and 'values'.")

    def register(function: Function) -> Function:
        rule = rules.Rule(function, str(found), _place_of(function))
        _check_signature(found, rule)
        _check_is_first(found, rule)
        if check:
            check_rule(found, rule, examples, "values" if check == "values" else "all")
        rules.RULES[found] = rule
        return function

    return register


def _checked_operator(target: Any) -> Any:
    found = rules.operator_of(target)
    if found is None:
        names: list[str] = getattr(target, "overloads", list)()
        which = f"{target} has {len(names)} overloads ({', '.join(names)}): name one, as in "
        raise DecompositionError(
            f"{which}{target}.{names[0]}."
            if names
            else f"{_name_of(target)!r} is no operator. A rule is for what torch.library.custom_op "
            "returned, or for torch.ops.<namespace>.<name>."
        )
    if found.namespace in rules.OWN_NAMESPACES:
        raise DecompositionError(f"{found} is PyTorch's, and compiled programs know it already.")
    if is_mutable(found) or returns_operand(found):
        raise DecompositionError(
            f"{found} changes what it is given or hands it out ({schema_of(found)}). A rule is "
            "for an operator that only makes new tensors."
        )
    return found


def _name_of(target: Any) -> str:
    return getattr(target, "__qualname__", None) or type(target).__name__


def _place_of(function: Callable[..., Any]) -> str:
    code = getattr(inspect.unwrap(function), "__code__", None)
    where = f"{os.path.basename(code.co_filename)}:{code.co_firstlineno} " if code else ""
    return where + _name_of(function)


def _check_signature(operator: Any, rule: rules.Rule) -> None:
    parameters = schema_of(operator).arguments
    expected = [p.name for p in parameters if not p.kwarg_only]
    by_name = {p.name for p in parameters if p.kwarg_only}
    own = inspect.signature(rule.function).parameters.values()
    positional = [p.name for p in own if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    keywords = {p.name for p in own if p.kind is p.KEYWORD_ONLY}
    packed = any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in own)
    if positional != expected or keywords != by_name or packed:
        raise DecompositionError(
            f"The rule {rule.place}{inspect.signature(rule.function)} does not take what "
            f"{operator} takes: {schema_of(operator)}. Give it the same parameters, in the same "
            "order."
        )


def _check_is_first(operator: Any, rule: rules.Rule) -> None:
    """Refuses a second rule, except a redefinition of the first (notebook cell, module reload)."""
    present = rules.rule_of(operator)
    if present is None:
        return
    names = [
        (getattr(f, "__module__", ""), getattr(f, "__qualname__", "<lambda>"))
        for f in (present.function, rule.function)
    ]
    if names[0] != names[1] or names[0][1].endswith("<lambda>"):
        raise DecompositionError(
            f"{operator} has a rule already ({present.place}); {rule.place} would be a second."
        )
