"""Inputs for an operator, made from its schema: small, of several shapes, types and layouts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...autodiff.rules.torch_rules import Parameter

Arguments = tuple[list[Any], dict[str, Any]]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class MadeInputs:
    """Arguments for an operator.

    Attributes:
        arguments: positional ones, and those by name.
        told: what they are, for a message.
    """

    arguments: Arguments
    told: str


@dataclass(frozen=True)
class _Form:
    """What the tensors of one call are like, and its numbers."""

    first: Shape
    rest: Shape
    dtype: torch.dtype = torch.float32
    layout: str = "contiguous"
    numbers: int = 0


_SHAPES: tuple[tuple[Shape, Shape], ...] = (
    ((3, 4), (3, 4)),
    ((3, 4), (4,)),
    ((2, 3, 4), (2, 3, 4)),
    ((2, 3, 4), (4,)),
    ((4, 4), (4, 4)),
    ((5,), (5,)),
    ((), ()),
    ((2, 3, 4, 5), (2, 3, 4, 5)),
    ((2, 3, 4, 5), (3,)),
    ((0, 4), (0, 4)),
)
_VARIED = 2  # so many of the shapes that an operator takes are tried in other types and layouts
_NUMBERS: dict[str, tuple[Any, ...]] = {
    "int": (1, 2, 0, -1),
    "SymInt": (1, 2, 0, -1),
    "float": (0.5, 1.75, -0.25),
    "number": (0.5, 2, -1),
    "Scalar": (0.5, 2, -1),
    "bool": (False, True),
}


def made_inputs(
    parameters: Sequence[Parameter], takes: Callable[[Arguments], bool]
) -> Iterator[MadeInputs]:
    """Yields arguments of different forms that an operator takes.

    Args:
        parameters: of the operator.
        takes: whether the operator runs on some arguments.

    Raises:
        TypeError: if a parameter that has to be given is of a type that nothing is made for.
    """
    generator = torch.Generator().manual_seed(0)

    def taken(forms: Iterable[_Form]) -> Iterator[tuple[_Form, MadeInputs]]:
        for form in forms:
            made = _made(parameters, form, generator)
            if takes(made.arguments):
                yield form, made

    for found, (form, made) in enumerate(taken(_Form(*shapes) for shapes in _SHAPES)):
        yield made
        if found < _VARIED:
            yield from (other for _, other in taken(_variations(form)))


def _variations(form: _Form) -> Iterator[_Form]:
    first, rest = form.first, form.rest
    for dtype in (torch.float64, torch.bfloat16, torch.int64):
        yield _Form(first, rest, dtype, form.layout, form.numbers)
    for layout in ("transposed", "with gaps", "positive"):
        yield _Form(first, rest, form.dtype, layout, form.numbers)
    for numbers in range(1, 1 + max(map(len, _NUMBERS.values()))):
        yield _Form(first, rest, form.dtype, form.layout, numbers)


def _made(parameters: Sequence[Parameter], form: _Form, generator: torch.Generator) -> MadeInputs:
    shapes = itertools.chain([form.first], itertools.repeat(form.rest))
    values = [_value(parameter, form, shapes, generator) for parameter in parameters]
    pairs = list(zip(parameters, values, strict=True))
    given = [value for parameter, value in pairs if not parameter.is_keyword]
    named = {parameter.name: value for parameter, value in pairs if parameter.is_keyword}
    told = described({p.name: value for p, value in pairs})
    return MadeInputs((given, named), told)


def _value(
    parameter: Parameter, form: _Form, shapes: Iterator[Shape], generator: torch.Generator
) -> Any:
    inner = parameter.type.removeprefix("Optional[")
    is_optional = inner != parameter.type
    type_ = inner.removesuffix("]") if is_optional else inner
    if is_optional and form.numbers % 2:
        return None
    if type_ == "Tensor":
        return _tensor(next(shapes), form, generator)
    if type_ == "List[Tensor]":
        return [_tensor(next(shapes), form, generator) for _ in range(2)]
    known = _NUMBERS.get(type_)
    if not parameter.is_required and (form.numbers == 0 or known is None):
        return parameter.default
    if known is None:
        raise TypeError(f"nothing is made for {parameter.name} ({parameter.type})")
    return known[form.numbers % len(known)]


def _tensor(shape: Shape, form: _Form, generator: torch.Generator) -> torch.Tensor:
    if form.dtype is torch.int64:
        return torch.randint(0, 3, shape, generator=generator, device="cpu")
    tensor = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
    if form.layout == "positive":
        tensor = tensor.sigmoid() * 0.8 + 0.1
    tensor = tensor.to(form.dtype)
    if form.layout == "transposed" and len(shape) > 1:
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)
    if form.layout == "with gaps" and shape:
        wide = tensor.new_zeros((*shape[:-1], 2 * shape[-1]))
        wide[..., ::2] = tensor
        return wide[..., ::2]
    return tensor


def described(arguments: Mapping[str, Any]) -> str:
    """Says which arguments an operator is given."""
    return ", ".join(f"{name}={_told(value)}" for name, value in arguments.items())


def _told(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        stride = "" if value.is_contiguous() else f" strides {tuple(value.stride())}"
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}{stride}"
    if isinstance(value, list):
        return f"[{', '.join(map(_told, value))}]"
    return repr(value)
