"""Rules of what is linear in its operands: it is applied to each coefficient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .jets import Jet, Lanes
from .operands import Operands, Rule, results_of
from .polynomials import Coefficient, plus, scaled


def first_operand(lanes: Lanes, target: Any, operands: Operands) -> Any:
    """Of an operator that is linear in its first operand, the others being constant."""
    (jet,) = operands.jets[:1]
    if len(operands.jets) != 1 or operands.args[0] is not jet:
        return NotImplemented
    coefficients = lanes.each(lambda t: operands.call(target, [t]), jet)
    return results_of(lanes, operands.call(target), coefficients)


def jointly(*places: int) -> Rule:
    """Returns the rule of an operator that is linear in some operands at once (``cat``, ``where``).

    Args:
        places: of these operands; beside a coefficient of one those of the others may be zero.
    """

    def rule(lanes: Lanes, target: Any, operands: Operands) -> Any:
        linear = [operands.args[place] for place in places if place < len(operands.args)]
        if not operands.all_in(linear):
            return NotImplemented

        def push(*series: Sequence[Coefficient]) -> list[list[Coefficient]]:
            found: list[Coefficient] = []
            for column in zip(*series, strict=True):
                if all(c is None for c in column):
                    found.append(None)
                    continue
                filled = [
                    torch.zeros_like(jet.primal) if c is None else c
                    for c, jet in zip(column, operands.jets, strict=True)
                ]
                found.append(operands.call(target, filled, zeros_at=places))
            return [found]

        return results_of(lanes, operands.call(target), lanes.along(push, *operands.jets))

    return rule


def add(lanes: Lanes, target: Any, operands: Operands) -> Any:
    """Of ``a + alpha b``."""
    return _sum(lanes, target, operands, 1)


def subtract(lanes: Lanes, target: Any, operands: Operands) -> Any:
    """Of ``a - alpha b``."""
    return _sum(lanes, target, operands, -1)


def _sum(lanes: Lanes, target: Any, operands: Operands, sign: int) -> Any:
    a, b = operands.args[:2]
    factor = sign * operands.option("alpha", 2, 1)
    return lanes.conformed(operands.call(target), sum_of(lanes, a, b, factor))


def sum_of(lanes: Lanes, a: Any, b: Any, factor: Any = 1) -> Any:
    """Returns the coefficients of ``a + factor b``."""
    if not isinstance(b, Jet):
        return a.coefficients

    def push(
        first: Sequence[Coefficient], second: Sequence[Coefficient]
    ) -> list[list[Coefficient]]:
        pairs = zip(first, second, strict=True)
        return [[plus(x, scaled(y, factor)) for x, y in pairs]]

    if not isinstance(a, Jet):
        return {order: tuple(scaled(t, factor) for t in ts) for order, ts in b.coefficients.items()}
    if lanes.are_batched and a.primal.dim() == b.primal.dim():
        return _by_order(a, b, factor)  # no need to go through vmap
    return lanes.along(push, a, b)[0]


def _by_order(a: Jet, b: Jet, factor: Any) -> dict[int, tuple[Tensor, ...]]:
    found: dict[int, tuple[Tensor, ...]] = {}
    for order in sorted({*a.coefficients, *b.coefficients}):
        one, other = a.coefficients.get(order, (None,))[0], b.coefficients.get(order, (None,))[0]
        found[order] = (plus(one, scaled(other, factor)),)
    return found


def masked_fill(lanes: Lanes, target: Any, operands: Operands) -> Any:
    """Of filling in a number where a mask says so."""
    if len(operands.jets) != 1 or operands.args[0] is not operands.jets[0]:
        return NotImplemented
    mask = operands.args[1]
    coefficients = lanes.each(lambda t: t.masked_fill(mask, 0), operands.jets[0])
    return results_of(lanes, operands.call(target), coefficients)


def padded(lanes: Lanes, target: Any, operands: Operands) -> Any:
    """Of padding with a number: coefficients are padded with zeros."""
    (jet,) = operands.jets
    coefficients = lanes.each(lambda t: target(t, operands.args[1]), jet)
    return results_of(lanes, operands.call(target), coefficients)
