"""Rules of products and quotients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .jets import Coefficients, Jet, Lanes
from .linear_rules import sum_of
from .operands import Operands
from .polynomials import Coefficient, minus, plus, powers, times

Product = Callable[[Any, Any], Tensor]


def multiply(lanes: Lanes, target: Any, operands: Operands) -> Any:
    """Of ``a * b``, element by element."""
    a, b = operands.args[:2]
    return lanes.conformed(operands.call(target), _product(lanes, torch.mul, a, b))


def matrices(lanes: Lanes, target: Any, operands: Operands) -> Any:
    """Of a matrix product: where one operand is constant, one product for all coefficients."""
    a, b = operands.args[:2]
    if operands.kwargs or len(operands.args) > 2:
        return NotImplemented
    return matrix_product(lanes, target, a, b)


def matrix_product(lanes: Lanes, product: Product, a: Any, b: Any) -> Any:
    """Returns the product of two matrices, or two batches of them, of which one has a series."""
    if not isinstance(b, Jet):
        return lanes.at_once(lambda rows: product(rows, b), a, -2)
    if not isinstance(a, Jet):
        return lanes.at_once(lambda columns: product(a, columns), b, -1)
    return Jet(product(a.primal, b.primal), _product(lanes, product, a, b))


def matrices_plus(lanes: Lanes, target: Any, operands: Operands) -> Any:
    """Of ``beta c + alpha a @ b``."""
    c, a, b = operands.args[:3]
    alpha, beta = operands.kwargs.get("alpha", 1), operands.kwargs.get("beta", 1)
    product: Any = torch.bmm if _rank(a) == 3 else torch.mm
    if not isinstance(a, Jet) and not isinstance(b, Jet):
        (coefficients,) = lanes.each(lambda t: t * beta, c)
        return lanes.conformed(operands.call(target), coefficients)
    found = matrix_product(lanes, product, a, b)
    if alpha != 1:
        found = Jet(found.primal * alpha, lanes.each(lambda t: t * alpha, found)[0])
    c = c if beta == 1 else _multiple(lanes, c, beta)
    value = found.primal + (c.primal if isinstance(c, Jet) else c)
    return lanes.conformed(value, sum_of(lanes, found, c))


def _multiple(lanes: Lanes, value: Any, factor: float) -> Any:
    if not isinstance(value, Jet):
        return value * factor
    return Jet(value.primal * factor, lanes.each(lambda t: t * factor, value)[0])


def _rank(value: Any) -> int:
    return (value.primal if isinstance(value, Jet) else value).dim()


def pairwise(lanes: Lanes, target: Any, operands: Operands) -> Any:
    """Of any other product: linear in each of two operands."""
    a, b = operands.args[:2]

    def product(x: Any, y: Any) -> Tensor:
        found: Tensor = target(x, y, *operands.args[2:], **operands.kwargs)
        return found

    return lanes.conformed(operands.call(target), _product(lanes, product, a, b))


def _product(lanes: Lanes, product: Product, a: Any, b: Any) -> Coefficients:
    if not isinstance(b, Jet):
        return lanes.each(lambda t: product(t, b), a)[0]
    if not isinstance(a, Jet):
        return lanes.each(lambda t: product(a, t), b)[0]
    if a is b and product is torch.mul:
        return lanes.along(partial(_square, a.primal), a)[0]
    return lanes.along(partial(_cauchy, product, a.primal, b.primal), a, b)[0]


def _square(a: Tensor, series: Sequence[Coefficient]) -> list[list[Coefficient]]:
    _, square = powers(series, 2)
    return [[plus(times(x, 2 * a), y) for x, y in zip(series, square, strict=True)]]


def _cauchy(
    product: Product,
    a: Tensor,
    b: Tensor,
    first: Sequence[Coefficient],
    second: Sequence[Coefficient],
) -> list[list[Coefficient]]:
    one, other = [a, *first], [b, *second]
    found = []
    for k in range(1, len(one)):
        total = None
        for i in range(k + 1):
            if one[i] is not None and other[k - i] is not None:
                total = plus(total, product(one[i], other[k - i]))
        found.append(total)
    return [found]


def divide(lanes: Lanes, target: Any, operands: Operands) -> Any:
    """Of ``a / b``."""
    a, b = operands.args[:2]
    if operands.kwargs.get("rounding_mode") is not None:
        return NotImplemented
    value = operands.call(target)
    if not isinstance(b, Jet):
        return lanes.conformed(value, lanes.each(lambda t: t / b, a)[0])
    divisor = b.primal

    def push(above: Sequence[Coefficient], below: Sequence[Coefficient]) -> list[list[Coefficient]]:
        found: list[Coefficient] = [value]
        for k in range(1, len(below) + 1):
            total = above[k - 1]
            for j in range(1, k + 1):
                total = minus(total, times(below[j - 1], found[k - j]))
            found.append(None if total is None else total / divisor)
        return [found[1:]]

    above = a if isinstance(a, Jet) else value
    return lanes.conformed(value, lanes.along(push, above, b)[0])


def dropout(lanes: Lanes, target: Any, operands: Operands) -> Any:
    """Of dropout: one mask is drawn, for the value and its coefficients."""
    value, mask = operands.call(target)
    p, train = operands.args[1:3]
    if train is False or p == 0:
        return operands.jets[0], mask
    scale = 0.0 if p == 1 else 1 / (1 - p)
    (coefficients,) = lanes.each(lambda t: t * mask * scale, operands.jets[0])
    return lanes.conformed(value, coefficients), mask
