"""Taylor coefficients of functions of one variable: ``f(x + h) = f_0 + f_1 h + f_2 h^2 + ...``.

Each function here is given a point, the function's value there and an order, and returns the
coefficients up to that order, by the differential equation that the function solves. None is zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch
from torch import Tensor

from .polynomials import Coefficient, composed, plus, scaled, square_term, times

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
    """Returns the coefficients from order 1 on of what has these for its derivative."""
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
    """Expands a power, by products with ``1 / x``: no further root."""
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
