"""Truncated power series whose zeros are known: nothing is computed with them.

A series is a list of coefficients; None is zero. One *without a constant* begins at order 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

Coefficient: TypeAlias = Any
"""A tensor, a number, or None for zero."""


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
        # Even powers are squares of half of them, which cost half the products.
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
    """Returns the coefficients from order 1 on of ``outer(inner)``.

    Args:
        outer: a series with a constant, in its variable less the constant of ``inner``.
        inner: a series without a constant.
    """
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
    """Returns from order 1 on the logarithm of 1 plus a series without a constant."""
    found: list[Coefficient] = []
    for k in range(1, len(series) + 1):
        total = None
        for j in range(1, k):
            total = plus(total, scaled(times(found[j - 1], series[k - j - 1]), j / k))
        found.append(minus(series[k - 1], total))
    return found
