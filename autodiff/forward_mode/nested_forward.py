"""An operator without a rule of its own: forward mode inside forward mode.

Wasteful: the value and its lower derivatives are computed again at each order. And not done where
it would be wrong without a word: PyTorch's formula of a tangent may read what the operator returns
beside its result (factors of a matrix, statistics of a norm), which to PyTorch are constants, so
that the formula's own tangent lacks a part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ...reuse.errors import PlanError
from .jets import Lanes
from .operands import Operands, results_of
from .polynomials import Coefficient, scaled
from .torch_rules import is_wrong_nested

Place: TypeAlias = tuple[int, int]
"""An order, and which operand."""


def by_nesting(lanes: Lanes, target: Any, operands: Operands) -> Any:
    """Returns the results of any operator that has forward mode, with their series.

    Raises:
        PlanError: with the reason, if PyTorch has none, or a wrong one.
    """
    results = operands.call(target)
    flat = _listed(results)
    moving = _differentiable(target, operands)
    _refuse_wrong(target, flat, moving, lanes.order)
    if not moving:
        return results

    def values(*tensors: Tensor) -> tuple[Tensor, ...]:
        found = _listed(operands.call(target, tensors))
        return tuple(found[i] for i in moving)

    def push(*series: Sequence[Coefficient]) -> list[list[Coefficient]]:
        given = _derivatives_of(operands, series)
        _, *orders = _derivatives(values, given, len(series), len(series[0]))
        return [
            [
                None if row is None else scaled(row[i], 1 / math.factorial(k))
                for k, row in enumerate(orders, start=1)
            ]
            for i in range(len(moving))
        ]

    found: list[Mapping[int, tuple[Tensor, ...]]] = [{} for _ in flat]
    for place, coefficients in zip(moving, lanes.along(push, *operands.jets), strict=True):
        found[place] = coefficients
    return results_of(lanes, results, found)


def _refuse_wrong(target: Any, results: list[Any], moving: Sequence[int], order: int) -> None:
    real = {i for i, result in enumerate(results) if _is_real(result)}
    if real and not moving:
        raise PlanError("PyTorch knows no derivative of it.")
    if moving and order > 1 and not real <= set(moving):
        raise PlanError("Its tangent is made of results that are constants to PyTorch.")
    if moving and is_wrong_nested(target):
        raise PlanError("PyTorch's own, nested, is wrong.")


def _listed(results: Any) -> list[Any]:
    return list(results) if isinstance(results, (list, tuple)) else [results]


def _derivatives_of(
    operands: Operands, series: Sequence[Sequence[Coefficient]]
) -> dict[Place, Tensor]:
    """Returns the operands and their derivatives, those that are not zero."""
    given: dict[Place, Tensor] = {}
    for operand, coefficients in enumerate(series):
        given[0, operand] = operands.jets[operand].primal
        for k, coefficient in enumerate(coefficients, start=1):
            if coefficient is not None:
                # With a memory of its own: PyTorch wants a tangent to lie as its value does.
                given[k, operand] = coefficient * math.factorial(k)
    return given


def _is_real(result: Any) -> bool:
    return isinstance(result, Tensor) and (result.is_floating_point() or result.is_complex())


def _differentiable(target: Any, operands: Operands) -> list[int]:
    """Returns which results PyTorch gives a derivative; where it knows none, a tangent is lost."""
    with torch.enable_grad():
        watched = [jet.primal.detach().requires_grad_() for jet in operands.jets]
        results = _listed(operands.call(target, watched))
    return [i for i, r in enumerate(results) if isinstance(r, Tensor) and r.requires_grad]


def _derivatives(
    values: Callable[..., tuple[Tensor, ...]],
    given: Mapping[Place, Tensor],
    width: int,
    order: int,
) -> list[tuple[Tensor, ...] | None]:
    """Returns the results and their derivatives up to an order; None is zero.

    Args:
        values: the operator, of its operands alone.
        given: the operands and their derivatives.
        width: how many operands there are.
        order: of the highest derivative.
    """
    if order == 0:
        return [values(*(given[0, operand] for operand in range(width)))]
    moving = [(k, i) for k, i in given if k < order and (k + 1, i) in given]
    if not moving:
        return [*_derivatives(values, given, width, order - 1), None]
    there: list[bool] = []

    def lower(*tensors: Tensor) -> tuple[Tensor, ...]:
        moved = {**given, **dict(zip(moving, tensors, strict=True))}
        rows = _derivatives(values, moved, width, order - 1)
        there[:] = [row is not None for row in rows]
        return tuple(t for row in rows if row is not None for t in row)

    at = tuple(given[place] for place in moving)
    along = tuple(given[k + 1, i] for k, i in moving)
    primal, tangent = torch.func.jvp(lower, at, along)
    size = len(primal) // sum(there)
    rest = iter(primal[i : i + size] for i in range(0, len(primal), size))
    found = [next(rest) if row else None for row in there]
    # The derivative of the highest derivative that there is; one that is zero stays so.
    return [*found, tangent[-size:] if there[-1] else None]
