"""Adapter: operators in graphs whose gradients are differentiated in their turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

import torch

from .origins import StoppingInterpreter
from .torch_make_fx import Decompositions
from .torch_user_rules import dense_as

Gradients: TypeAlias = Literal["final", "differentiated"]
"""Whether gradients are the last derivative, or are differentiated in their turn."""


def copied(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> Any:
    """Decomposes ``copy``, which has no derivative, into operators that lay out as it does."""
    return dense_as(source.to(target.dtype).expand(target.shape), target.stride())


DIFFERENTIABLE: Decompositions = {torch.ops.aten.copy.default: copied}
"""Operators that have no derivative, made of those that have one."""


def _determinant(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Computes a determinant by its logarithm.

    PyTorch chooses the derivative of ``det`` by the numbers in the matrix. A trace has none and
    takes the one for singular matrices, whose own derivative is no number where singular values are
    equal (from 2.15 it takes both, and picks). By the logarithm a singular matrix is an error.
    """
    # Factors and pivots too, since captured graphs hold the operator with all its results.
    sign, logarithm, factors, pivots = torch.ops.aten._linalg_slogdet.default(matrix)
    return sign * logarithm.exp(), factors, pivots


def _random_relu(
    x: torch.Tensor,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    generator: Any = None,
) -> torch.Tensor:
    """Computes ``rrelu`` as a product with the slopes that it draws.

    A trace holds its functional variant, whose derivative reads the memory that the slopes would
    have been written to, and not the slopes: what it gives is no number that anybody computed.
    """
    if not training:
        return torch.ops.aten.leaky_relu.default(x, (lower + upper) / 2)
    _, slopes = torch.ops.aten.rrelu_with_noise_functional.default(
        x, torch.ones_like(x), lower, upper, training, generator
    )
    return x * slopes


_FORMS: Mapping[Any, Callable[..., Any]] = {
    torch.ops.aten._linalg_det.default: _determinant,
    torch.ops.aten.linalg_det.default: lambda matrix: _determinant(matrix)[0],
    torch.ops.aten.det.default: lambda matrix: _determinant(matrix)[0],
    torch.ops.aten.rrelu.default: _random_relu,
    torch.ops.aten.rrelu_.default: lambda x, *more: x.copy_(_random_relu(x, *more)),
}
"""Operators whose traced derivative has a wrong one, made of others."""


class DifferentiableInterpreter(StoppingInterpreter):
    """Runs a leaf body by operators whose derivatives can be differentiated."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Calls an operator, or what it is made of."""
        return super().call_function(_FORMS.get(target, target), args, kwargs)
