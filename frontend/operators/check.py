"""A rule against its operator: both run on the same inputs, and what they give is compared."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch

from ...autodiff.rules.in_traces import tensors_in, versions
from ...autodiff.rules.torch_rules import (
    Parameter,
    Rule,
    has_own_derivative,
    parameters_of,
    schema_text,
)
from ...reuse import torch_pytree
from ...reuse.errors import DecompositionError
from ...reuse.ir.types import TensorType, strides_that_matter
from .made_inputs import Arguments, MadeInputs, described, made_inputs

Checks: TypeAlias = Literal["all", "values"]
"""What is compared: the gradients as well, or values alone (with shapes, types and strides)."""

_LOOSE = (torch.bfloat16, torch.float16)  # each rounding shows: their layouts alone are compared


def check_rule(
    operator: Any,
    rule: Rule,
    examples: Sequence[Sequence[Any] | Mapping[str, Any]],
    checks: Checks,
) -> None:
    """Compares a rule with its operator.

    Args:
        operator: the operator.
        rule: what shall be its rule.
        examples: arguments; none makes them from the schema.
        checks: what is compared.

    Raises:
        DecompositionError: if they differ, or there is nothing to compare them on.
    """
    with torch.random.fork_rng(devices=[]):
        for case in _cases(operator, rule, examples):
            _Comparison(operator, rule, case).run(checks)


def _cases(
    operator: Any, rule: Rule, examples: Sequence[Sequence[Any] | Mapping[str, Any]]
) -> Iterator[MadeInputs]:
    parameters = parameters_of(operator)
    if examples:
        yield from (_given(operator, parameters, example) for example in examples)
        return
    errors: list[Exception] = []

    def takes(arguments: Arguments) -> bool:
        try:
            _run(operator, _copied(arguments))
        except Exception as error:  # whatever an operator of a user's may raise
            errors.append(error)
            return False
        return True

    found = 0
    try:
        for case in made_inputs(parameters, takes):
            found += 1
            yield case
    except TypeError as error:
        raise _needs_examples(operator, rule, str(error)) from None
    if not found:
        reason = str(errors[0]).splitlines()[0] if errors else "none could be made"
        raise _needs_examples(operator, rule, f"it raised on all that were made: {reason}")


def _needs_examples(operator: Any, rule: Rule, reason: str) -> DecompositionError:
    return DecompositionError(
        f"The rule {rule.place} cannot be checked on inputs made from the schema of "
        f"{schema_text(operator)}: {reason}. Give some: examples=[(x, ...)], or check=False."
    )


def _given(
    operator: Any, parameters: Sequence[Parameter], example: Sequence[Any] | Mapping[str, Any]
) -> MadeInputs:
    """Reads an example of the user's."""
    if isinstance(example, Mapping):
        named = dict(example)
        given = [named.pop(p.name) for p in parameters if not p.is_keyword and p.name in named]
        return MadeInputs((given, named), described(example))
    if not isinstance(example, (tuple, list)):
        raise DecompositionError(
            f"examples= takes tuples of arguments for {operator}, or dictionaries of them by name; "
            f"one is a {type(example).__name__}. Of a single tensor: examples=[(x,)]."
        )
    told = described(dict(zip((p.name for p in parameters), example, strict=False)))
    return MadeInputs((list(example), {}), told)


def _run(function: Callable[..., Any], arguments: Arguments) -> Any:
    torch.manual_seed(0)
    args, kwargs = arguments
    return function(*args, **kwargs)


def _copied(arguments: Arguments, wants_gradient: Sequence[int] = ()) -> Arguments:
    """Copies the tensors, each with its strides; those at some places want a gradient."""
    leaves, tree = torch_pytree.flatten(arguments)
    copies = [_copy(x) if isinstance(x, torch.Tensor) else x for x in leaves]
    for place in wants_gradient:
        copies[place].requires_grad_()
    copied: Arguments = torch_pytree.unflatten(copies, tree)
    return copied


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    made = torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )
    return made.copy_(tensor.detach())


@dataclass(frozen=True)
class _Comparison:
    operator: Any
    rule: Rule
    case: MadeInputs

    def run(self, checks: Checks) -> None:
        """Compares values, and gradients where the operator has a derivative."""
        with torch.no_grad():
            expected = self._of_operator(_copied(self.case.arguments))
            made = self._of_rule(_copied(self.case.arguments))
        kinds = [_kind_of(result) for result in (made, expected)]
        if kinds[0] != kinds[1]:
            raise self._error(f"gives {kinds[0]}, the operator {kinds[1]}")
        self._compare_all("result", tensors_in(made), tensors_in(expected))
        self._compare_others(made, expected)
        if checks == "all" and has_own_derivative(self.operator):
            self._compare_gradients()

    def _of_operator(self, arguments: Arguments) -> Any:
        try:
            return _run(self.operator, arguments)
        except Exception as error:
            raise DecompositionError(
                f"{self.operator} raises {type(error).__name__} on the example {self.case.told}: "
                f"{error}"
            ) from error

    def _of_rule(self, arguments: Arguments) -> Any:
        before = versions(tensors_in(arguments))
        try:
            made = _run(self.rule.function, arguments)
        except Exception as error:
            raise self._error(f"raises {type(error).__name__} ({error})") from error
        if versions(tensors_in(arguments)) != before:
            raise self._error("changes an operand in place. Let it work on a copy: x = x.clone()")
        return made

    def _compare_all(
        self, what: str, made: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]
    ) -> None:
        if len(made) != len(expected):
            raise self._error(f"gives {len(made)} tensors, the operator {len(expected)}")
        for index, (own, other) in enumerate(zip(made, expected, strict=True)):
            self._compare(f"{what} {index}" if len(made) > 1 else what, own, other)

    def _compare(self, what: str, made: torch.Tensor, expected: torch.Tensor) -> None:
        found, wanted = TensorType.of(made), TensorType.of(expected)
        if (found.dtype, found.shape, found.device) != (wanted.dtype, wanted.shape, wanted.device):
            raise self._error(f"gives a {what} {found}, the operator {wanted}")
        strides = [strides_that_matter(t.shape, t.stride) for t in (found, wanted)]
        if not what.startswith("gradient") and strides[0] != strides[1]:
            raise self._error(
                f"gives a {what} with strides {found.stride}, the operator with {wanted.stride}"
            )
        if wanted.dtype in _LOOSE:
            return
        try:
            torch.testing.assert_close(made, expected, equal_nan=True)
        except AssertionError as error:
            raise self._error(f"gives another {what}: {_numbers(error)}") from None

    def _compare_others(self, made: Any, expected: Any) -> None:
        """Compares what is no tensor."""
        found, wanted = (
            [x for x in torch_pytree.flatten(r)[0] if not isinstance(x, torch.Tensor)]
            for r in (made, expected)
        )
        if found != wanted:
            raise self._error(f"gives {found}, the operator {wanted}")

    def _compare_gradients(self) -> None:
        leaves = torch_pytree.flatten(self.case.arguments)[0]
        wanted = [
            i
            for i, x in enumerate(leaves)
            if isinstance(x, torch.Tensor) and TensorType.of(x).is_differentiable
        ]
        try:
            expected = _gradients(self.operator, _copied(self.case.arguments, wanted), wanted)
        except Exception as error:  # whatever a user's derivative may raise
            raise DecompositionError(
                f"The derivative of {self.operator} raises {type(error).__name__} ({error}), given "
                f"{self.case.told}."
            ) from error
        try:
            made = _gradients(self.rule.function, _copied(self.case.arguments, wanted), wanted)
        except RuntimeError:  # the rule need have no derivative
            return
        for index, own, other in zip(wanted, made, expected, strict=True):
            if own is None or other is None:  # nothing flows: as good as zeros
                own, other = (leaves[index] * 0 if g is None else g for g in (own, other))
            try:
                self._compare(f"gradient of operand {index}", own, other)
            except DecompositionError as error:
                raise DecompositionError(
                    f"{error} If the operator's derivative is meant to be another than its rule's, "
                    "say check='values'."
                ) from None

    def _error(self, what: str) -> DecompositionError:
        return DecompositionError(
            f"The rule of {self.operator} ({self.rule.place}) {what}; given {self.case.told}."
        )


def _kind_of(result: Any) -> str:
    if isinstance(result, (tuple, list)):
        return "several results"
    return "a tensor" if isinstance(result, torch.Tensor) else f"a {type(result).__name__}"


def _gradients(
    function: Callable[..., Any], arguments: Arguments, wanted: Iterable[int]
) -> Sequence[torch.Tensor | None]:
    leaves = torch_pytree.flatten(arguments)[0]
    with torch.enable_grad():
        results = [t for t in tensors_in(_run(function, arguments)) if t.requires_grad]
        operands = [leaves[i] for i in wanted]
        if not results:
            return [None for _ in operands]
        generator = torch.Generator().manual_seed(1)
        seeds = [_seed(result, generator) for result in results]
        return torch.autograd.grad(results, operands, seeds, allow_unused=True)


def _seed(like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    numbers = torch.randn(like.shape, generator=generator, dtype=torch.float64, device="cpu")
    return numbers.to(like.device, like.dtype)


def _numbers(error: AssertionError) -> str:
    """Returns how far two tensors are apart, in one line."""
    lines = [line.strip() for line in str(error).splitlines()]
    return ", ".join(line for line in lines if line and not line.startswith("Tensor-likes"))
