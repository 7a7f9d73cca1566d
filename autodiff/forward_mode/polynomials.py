"""Truncated power series with known zeros, with which nothing is computed.

A series is a list of coefficients; None is zero. One *without a constant* begins at order 1. The
Taylor coefficients of functions of one variable follow, ``f(x + h) = f_0 + f_1 h + f_2 h^2 + ...``:
each takes a point, the function's value there and an order, and returns the coefficients up to that
order, mostly from the differential equation that the function solves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

Coefficient: TypeAlias = Any  # a tensor, a number, or None for zero


def times(a: Coefficient, b: Coefficient) -> Coefficient:
    """Returns a product."""
    if a is None or b is None:
        return None
    if isinstance(a, (int, float)):
        return scaled(b, a)
    return scaled(a, b) if isinstance(b, (int, float)) else a * b


def plus(a: Coefficient, b: Coefficient) -> Coefficient:
    """Returns a sum."""
    if a is None or b is None:
        return b if a is None else a
    return a + b


def minus(a: Coefficient, b: Coefficient) -> Coefficient:
    """Returns a difference."""
    if a is None or b is None:
        return a if b is None else -b
    return a - b


def scaled(a: Coefficient, factor: float) -> Coefficient:
    """Returns a multiple by a number."""
    if a is None or factor == 1:
        return a
    if factor == 0:
        return None
    return -a if factor == -1 else a * factor


def product_term(a: Sequence[Coefficient], b: Sequence[Coefficient], order: int) -> Coefficient:
    """Returns one coefficient of a product of series with constants."""
    total = None
    for i in range(order + 1):
        if i < len(a) and order - i < len(b):
            total = plus(total, times(a[i], b[order - i]))
    return total


def square_term(a: Sequence[Coefficient], order: int) -> Coefficient:
    """Returns one coefficient of the square of a series with a constant."""
    total = None
    for i in range((order + 1) // 2):
        if order - i < len(a):
            total = plus(total, times(a[i], a[order - i]))
    total = scaled(total, 2)
    half = order // 2
    return plus(total, times(a[half], a[half])) if order % 2 == 0 and half < len(a) else total


def powers(series: Sequence[Coefficient], highest: int) -> list[list[Coefficient]]:
    """Returns the powers 1 to ``highest`` of a series without a constant, as such series."""
    plain = [None, *series]
    found = [plain]
    for exponent in range(2, highest + 1):
        # An even power is the square of a lower one, which takes half the products.
        half = found[exponent // 2 - 1]
        one = half if exponent % 2 == 0 else found[exponent - 2]
        found.append(
            [
                square_term(one, k) if exponent % 2 == 0 else product_term(one, plain, k)
                for k in range(len(plain))
            ]
        )
    return [power[1:] for power in found]


def composed(outer: Sequence[Coefficient], inner: Sequence[Coefficient]) -> list[Coefficient]:
    """Returns ``outer(inner)`` from order 1 on; ``outer`` is expanded at ``inner``'s constant."""
    return combined(outer, powers(inner, len(inner)))


def combined(outer: Sequence[Coefficient], parts: list[list[Coefficient]]) -> list[Coefficient]:
    """Returns the sum of the powers of a series, each times its coefficient in ``outer``."""
    found = []
    for k in range(len(parts[0])):
        total = None
        for factor, part in zip(outer[1:], parts, strict=False):
            total = plus(total, times(factor, part[k]))
        found.append(total)
    return found


def exponential(series: Sequence[Coefficient]) -> list[Coefficient]:
    """Returns the exponential of a series without a constant, its constant (1) included."""
    found: list[Coefficient] = [1.0]
    for k in range(1, len(series) + 1):
        total = None
        for j in range(1, k + 1):
            total = plus(total, scaled(times(series[j - 1], found[k - j]), j / k))
        found.append(total)
    return found


def logarithm(series: Sequence[Coefficient]) -> list[Coefficient]:
    """Returns the logarithm of 1 plus a series without a constant, from order 1 on."""
    found: list[Coefficient] = []
    for k in range(1, len(series) + 1):
        total = None
        for j in range(1, k):
            total = plus(total, scaled(times(found[j - 1], series[k - j - 1]), j / k))
        found.append(minus(series[k - 1], total))
    return found


TaylorCoefficients: TypeAlias = Callable[..., list[Coefficient]]


def tanh(x: Tensor, y: Tensor, order: int) -> list[Coefficient]:
    """Solves ``y' = 1 - y^2``."""
    return _quadratic(y, 1 - y * y, order, 0, -1)


def sigmoid(x: Tensor, y: Tensor, order: int) -> list[Coefficient]:
    """Solves ``y' = y - y^2``."""
    return _quadratic(y, y * (1 - y), order, 1, -1)


def _quadratic(
    y: Tensor, slope: Tensor, order: int, linear: float, square: float
) -> list[Coefficient]:
    """Solves ``y' = constant + linear y + square y^2``, given ``y`` and ``y'`` at the point."""
    found: list[Coefficient] = [y, slope]
    while len(found) <= order:
        k = len(found) - 1
        grown = plus(scaled(found[k], linear), scaled(square_term(found, k), square))
        found.append(scaled(grown, 1 / (k + 1)))
    return found[: order + 1]


def silu(x: Tensor, y: Tensor, order: int) -> list[Coefficient]:
    """Expands ``x sigmoid(x)``."""
    gate = sigmoid(x, torch.sigmoid(x), order)
    return [y, *(x * gate[k] + gate[k - 1] for k in range(1, order + 1))]


def exp(x: Tensor, y: Tensor, order: int) -> list[Coefficient]:
    """Solves ``y' = y``."""
    return [y, *(scaled(y, 1 / math.factorial(k)) for k in range(1, order + 1))]


def _turning(y: Tensor, slope: Tensor, order: int, sign: int) -> list[Coefficient]:
    """Solves ``y'' = sign y``."""
    signs = (1, 1, sign, sign)
    return [scaled((y, slope)[k % 2], signs[k % 4] / math.factorial(k)) for k in range(order + 1)]


def log(x: Tensor, y: Tensor, order: int) -> list[Coefficient]:
    """Expands the natural logarithm."""
    return [y, *_integrated(reciprocal(x, torch.reciprocal(x), order - 1))]


def _integrated(slopes: list[Coefficient]) -> list[Coefficient]:
    """Returns the coefficients of an integral, from order 1 on, given those of the derivative."""
    return [scaled(slope, 1 / (k + 1)) for k, slope in enumerate(slopes)]


def reciprocal(x: Tensor, y: Tensor, order: int) -> list[Coefficient]:
    """Expands ``1 / x``."""
    found: list[Coefficient] = [y]
    for _ in range(order):
        found.append(-(found[-1] * y))
    return found


def power(x: Tensor, y: Tensor, order: int, exponent: float) -> list[Coefficient]:
    """Expands ``x ** exponent``."""
    found: list[Coefficient] = [y]
    factor = 1.0
    for k in range(1, order + 1):
        factor *= (exponent - k + 1) / k
        left = exponent - k
        if factor == 0:
            found.append(None)
        elif left == 0:
            found.append(factor)
        else:
            found.append(scaled(x if left == 1 else x**left, factor))
    return found


def _root(x: Tensor, y: Tensor, order: int, exponent: float) -> list[Coefficient]:
    """Expands a power by products with ``1 / x``, which need no further root."""
    inverse = torch.reciprocal(x)
    found: list[Coefficient] = [y]
    for k in range(1, order + 1):
        found.append(scaled(found[-1] * inverse, (exponent - k + 1) / k))
    return found


def erf(x: Tensor, y: Tensor, order: int) -> list[Coefficient]:
    """Expands the error function."""
    bell = torch.exp(-x * x) * (2 / math.sqrt(math.pi))
    return [y, *_integrated(_bell(x, bell, order - 1, 2))]


def _bell(x: Tensor, bell: Tensor, order: int, rate: float) -> list[Coefficient]:
    """Expands a function with ``f' = -rate x f``."""
    found: list[Coefficient] = [bell]
    for k in range(order):
        before = found[k - 1] if k else None
        found.append(scaled(plus(x * found[k], before), -rate / (k + 1)))
    return found


def gelu(x: Tensor, y: Tensor, order: int, *, approximate: str = "none") -> list[Coefficient]:
    """Expands both forms of GELU: ``x`` times a step that is an error function, or a tanh."""
    step = _error_step(x, order) if approximate == "none" else _tanh_step(x, order)
    return [y, *(plus(times(step[k], x), step[k - 1]) for k in range(1, order + 1))]


def _error_step(x: Tensor, order: int) -> list[Coefficient]:
    value = 0.5 * (1 + torch.erf(x * math.sqrt(0.5)))
    bell = torch.exp(-0.5 * x * x) * (1 / math.sqrt(2 * math.pi))
    return [value, *_integrated(_bell(x, bell, order - 1, 1))]


def _tanh_step(x: Tensor, order: int) -> list[Coefficient]:
    rate, cubic = math.sqrt(2 / math.pi), 0.044715 * math.sqrt(2 / math.pi)
    squared = x * x
    inner = x * (rate + cubic * squared)
    slopes = [rate + 3 * cubic * squared, 3 * cubic * x, cubic]
    slopes = [*slopes[:order], *[None] * (order - 3)]
    outer = tanh(inner, torch.tanh(inner), order)
    return [0.5 * (1 + outer[0]), *(scaled(c, 0.5) for c in composed(outer, slopes))]


def softplus(
    x: Tensor, y: Tensor, order: int, beta: float = 1, threshold: float = 20
) -> list[Coefficient]:
    """Expands ``log(1 + exp(beta x)) / beta``, and ``x`` itself beyond the threshold."""
    steep = scaled(x, beta)
    beyond = steep > threshold
    # By the sigmoid, which stays finite where exp(beta x) does not.
    gate = sigmoid(steep, torch.sigmoid(steep), order - 1)
    inside = [scaled(c, beta**k / (k + 1)) for k, c in enumerate(gate)]
    return [y, *(torch.where(beyond, 1.0 if k == 0 else 0.0, c) for k, c in enumerate(inside))]


BY_NAME: Mapping[str, TaylorCoefficients] = {
    "cos": lambda x, y, order: _turning(y, -torch.sin(x), order, -1),
    "cosh": lambda x, y, order: _turning(y, torch.sinh(x), order, 1),
    "erf": erf,
    "exp": exp,
    "expm1": lambda x, y, order: [y, *exp(x, y + 1, order)[1:]],
    "gelu": gelu,
    "log": log,
    "log1p": lambda x, y, order: log(1 + x, y, order),
    "pow.Tensor_Scalar": power,
    "reciprocal": reciprocal,
    "rsqrt": lambda x, y, order: _root(x, y, order, -0.5),
    "sigmoid": sigmoid,
    "silu": silu,
    "sin": lambda x, y, order: _turning(y, torch.cos(x), order, -1),
    "sinh": lambda x, y, order: _turning(y, torch.cosh(x), order, 1),
    "softplus": softplus,
    "sqrt": lambda x, y, order: _root(x, y, order, 0.5),
    "square": lambda x, y, order: power(x, y, order, 2),
    "tan": lambda x, y, order: _quadratic(y, 1 + y * y, order, 0, 1),  # y' = 1 + y^2
    "tanh": tanh,
}
"""By the name of an operator."""
