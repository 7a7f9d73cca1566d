"""Rules: of functions of one variable, of softmax and its kin, of products, of what is linear."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .jets import Coefficients, Jet, Lanes, Operands, Rule, results_of
from .polynomials import (
    Coefficient,
    TaylorCoefficients,
    combined,
    exponential,
    logarithm,
    minus,
    plus,
    powers,
    product_term,
    scaled,
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
        # The factors are of the point alone, and shared by all directions.
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


def made_of_lines(lanes: Lanes, target: Any, operands: Operands) -> Any:
    """Differentiates a function made of lines: each coefficient times PyTorch's slope."""
    if len(operands.jets) != 1 or operands.args[0] is not operands.jets[0]:
        return NotImplemented
    jet = operands.jets[0]

    def function(x: Tensor) -> Any:
        return operands.call(target, [x])

    value, slope = torch.func.jvp(function, (jet.primal,), (torch.ones_like(jet.primal),))
    (coefficients,) = lanes.each(lambda t: t * slope, jet)
    return lanes.conformed(value, coefficients)


def softmax(lanes: Lanes, target: Any, operands: Operands) -> Any:
    """Differentiates softmax: what grows is weighed by the value, and its sum divided out."""
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
    """Differentiates the logarithm of softmax."""
    value = operands.call(target)
    weigh = _weighed(torch.exp(value), operands.args[1])

    def push(series: Sequence[Coefficient]) -> list[list[Coefficient]]:
        _, sums = weigh(series)
        logs = logarithm(sums)
        return [[minus(x, log) for x, log in zip(series, logs, strict=True)]]

    return lanes.conformed(value, lanes.along(push, operands.jets[0])[0])


def logsumexp(lanes: Lanes, target: Any, operands: Operands) -> Any:
    """Differentiates the logarithm of a sum of exponentials."""
    (jet,) = operands.jets
    dims, keepdim = operands.args[1], operands.option("keepdim", 2, False)
    value = operands.call(target)
    # By the value, so that no exponential overflows.
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
    """Runs what has no derivative, or a zero one: signs, comparisons, draws, fresh memory."""
    return operands.call(target)


Product = Callable[[Any, Any], Tensor]


# ---- products and quotients --------------------------------------------------------------------


def multiply(lanes: Lanes, target: Any, operands: Operands) -> Any:
    """Differentiates ``a * b``, element by element."""
    a, b = operands.args[:2]
    return lanes.conformed(operands.call(target), _product(lanes, torch.mul, a, b))


def matrices(lanes: Lanes, target: Any, operands: Operands) -> Any:
    """Differentiates a product of matrices, or of batches of them."""
    a, b = operands.args[:2]
    if operands.kwargs or len(operands.args) > 2:
        return NotImplemented
    # Linear in the one that moves: its value and all coefficients are rows of one matrix.
    if not isinstance(b, Jet):
        return lanes.at_once(lambda rows: target(rows, b), a, -2)
    if not isinstance(a, Jet):
        return lanes.at_once(lambda columns: target(a, columns), b, -1)
    return Jet(target(a.primal, b.primal), _product(lanes, target, a, b))


def pairwise(lanes: Lanes, target: Any, operands: Operands) -> Any:
    """Differentiates any other product: linear in each of two operands."""
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
    # A square needs half the products of a general one.
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
    """Differentiates ``a / b``."""
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
    """Differentiates dropout: one mask is drawn, for the value and its coefficients."""
    # Drawn once: a tangent through another mask is one of another function.
    value, mask = operands.call(target)
    p, train = operands.args[1:3]
    if train is False or p == 0:
        return operands.jets[0], mask
    scale = 0.0 if p == 1 else 1 / (1 - p)
    (coefficients,) = lanes.each(lambda t: t * mask * scale, operands.jets[0])
    return lanes.conformed(value, coefficients), mask


# ---- what is linear in its operands: it is applied to each coefficient -------------------------


def first_operand(*constants: int) -> Rule:
    """Returns the rule of an operator that is linear in its first operand, the others constant.

    Args:
        constants: places of constants that are added to it, and are zero for a coefficient.
    """

    def rule(lanes: Lanes, target: Any, operands: Operands) -> Any:
        if len(operands.jets) != 1 or operands.args[0] is not operands.jets[0]:
            return NotImplemented
        coefficients = lanes.each(
            lambda t: operands.call(target, [t], zeros_at=constants), operands.jets[0]
        )
        return results_of(lanes, operands.call(target), coefficients)

    return rule


def jointly(*places: int) -> Rule:
    """Returns the rule of an operator that is linear in some operands at once (``cat``, ``where``).

    Args:
        places: of these operands; where one has a coefficient, those of the others may be zero.
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


def add(lanes: Lanes, target: Any, operands: Operands, *, sign: int) -> Any:
    """Differentiates ``a + sign alpha b``."""
    a, b = operands.args[:2]
    factor = sign * operands.option("alpha", 2, 1)
    return lanes.conformed(operands.call(target), _sum(lanes, a, b, factor))


def _sum(lanes: Lanes, a: Any, b: Any, factor: Any) -> Coefficients:
    if not isinstance(b, Jet):
        return a.coefficients  # type: ignore[no-any-return]

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
