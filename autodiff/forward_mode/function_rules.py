"""Rules of functions of one variable, of softmax and its kin."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .analytic import TaylorCoefficients
from .jets import Lanes
from .operands import Operands, Rule
from .polynomials import (
    Coefficient,
    combined,
    exponential,
    logarithm,
    minus,
    powers,
    product_term,
    times,
)


def of_one_variable(taylor: TaylorCoefficients) -> Rule:
    """Returns the rule of a function that acts on each element by itself.

    Args:
        taylor: of a point, the value there, an order, and what else the operator is given.
    """

    def rule(lanes: Lanes, target: Any, operands: Operands) -> Any:
        if len(operands.jets) != 1 or operands.args[0] is not operands.jets[0]:
            return NotImplemented
        jet = operands.jets[0]
        if jet.primal.is_complex() or not jet.primal.is_floating_point():
            return NotImplemented
        value = operands.call(target)
        factors = taylor(jet.primal, value, lanes.order, *operands.args[1:], **operands.kwargs)
        highest = max((k for k, factor in enumerate(factors) if factor is not None), default=1)
        parts = lanes.along(lambda series: powers(series, max(highest, 1)), jet)
        coefficients = {}
        for order in lanes.series.orders:
            rows = [part.get(order) for part in parts]
            count = max((len(row) for row in rows if row is not None), default=0)
            found = []
            for lane in range(count):
                column = [[None if row is None else row[lane]] for row in rows]
                (total,) = combined(factors, column)
                found.append(total)
            if found and found[0] is not None:
                coefficients[order] = tuple(found)
        return lanes.conformed(value, coefficients)

    return rule


def softmax(lanes: Lanes, target: Any, operands: Operands) -> Any:
    """Of softmax: what grows is weighed by the value, and its sum divided out."""
    value = operands.call(target)
    weigh = _weighed(value, operands.args[1])

    def push(series: Sequence[Coefficient]) -> list[list[Coefficient]]:
        grown, sums = weigh(series)
        found: list[Coefficient] = [value]
        for k in range(1, len(series) + 1):
            falls = product_term([*found], [None, *sums], k)
            found.append(minus(grown[k - 1], falls))
        return [found[1:]]

    return lanes.conformed(value, lanes.along(push, operands.jets[0])[0])


def log_softmax(lanes: Lanes, target: Any, operands: Operands) -> Any:
    """Of the logarithm of softmax."""
    value = operands.call(target)
    weigh = _weighed(torch.exp(value), operands.args[1])

    def push(series: Sequence[Coefficient]) -> list[list[Coefficient]]:
        _, sums = weigh(series)
        logs = logarithm(sums)
        return [[minus(x, log) for x, log in zip(series, logs, strict=True)]]

    return lanes.conformed(value, lanes.along(push, operands.jets[0])[0])


def logsumexp(lanes: Lanes, target: Any, operands: Operands) -> Any:
    """Of the logarithm of a sum of exponentials."""
    (jet,) = operands.jets
    dims, keepdim = operands.args[1], operands.option("keepdim", 2, False)
    value = operands.call(target)
    kept = value if keepdim else torch.logsumexp(jet.primal, dims, keepdim=True)
    weigh = _weighed(torch.exp(jet.primal - kept), dims, keepdim=keepdim)

    def push(series: Sequence[Coefficient]) -> list[list[Coefficient]]:
        return [logarithm(weigh(series)[1])]

    return lanes.conformed(value, lanes.along(push, jet)[0])


Weighed = Callable[[Sequence[Coefficient]], tuple[list[Coefficient], list[Coefficient]]]


def _weighed(weights: Tensor, dims: Any, *, keepdim: bool = True) -> Weighed:
    """Returns what weighs the exponential of a series, and sums it over some dimensions."""

    def weigh(series: Sequence[Coefficient]) -> tuple[list[Coefficient], list[Coefficient]]:
        grown = [times(weights, e) for e in exponential(series)[1:]]
        sums = [None if g is None else g.sum(dims, keepdim=keepdim) for g in grown]
        return grown, sums

    return weigh


def of_constant(lanes: Lanes, target: Any, operands: Operands) -> Any:
    """Of what has no derivative, or that of a constant: signs, comparisons, draws, fresh memory."""
    return operands.call(target)
