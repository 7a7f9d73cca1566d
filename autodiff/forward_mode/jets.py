"""Values with their series, operands that hold them, how operators act on them, and power series.

An active value ``x`` has *Taylor coefficients*: along direction ``k`` the value is ``x(t) = x +
x_1[k] t + x_2[k] t^2 + ...``, so the n-th derivative at 0 is ``n!`` times the n-th coefficient. The
coefficients of one order are one tensor, with a row per direction; those of the top order may be
*collapsed* into their sum over all directions (Dangel et al., arXiv 2505.13644: the forward
Laplacian is twice the collapsed second coefficient).

A *lane* is the part that is computed at once: one direction if there are few, or all of them, as a
leading dimension, if there are many. A rule is written for one direction; ``torch.vmap`` applies it
to many. A series is linear in its top coefficient. So, if that is collapsed, the rule is applied to
each lane without it and the top results are summed, and once more to the sum of the operands' top
coefficients, as a tangent.

Along one direction a series is a list of coefficients; None is zero, and nothing is computed with
it. One *without a constant* begins at order 1. The Taylor coefficients of functions of one variable
come last, ``f(x + h) = f_0 + f_1 h + f_2 h^2 + ...``: each takes a point, the function's value
there and an order, and returns the coefficients up to that order, mostly from the differential
equation that the function solves.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ...reuse.ir.types import TensorType, contiguous_stride

Coefficient: TypeAlias = Any  # a tensor, a number, or None for zero
Orders: TypeAlias = tuple[int, ...]
"""The orders whose coefficients a value has; the others are zero. () is inactive."""


@dataclass(frozen=True)
class Series:
    """Says which coefficients each active value has."""

    order: int  # of the highest derivative; 1 is a tangent, as of ``jvp``
    directions: int  # how many directions there are at once
    # Whether the top coefficient (of an order above 1) is kept only as its sum over the directions.
    collapsed: bool = False

    @property
    def orders(self) -> Orders:
        """Returns every order there is."""
        return tuple(range(1, self.order + 1))

    @property
    def num_coefficients(self) -> int:
        """Returns how many tensors of a value's shape its coefficients are."""
        lower = (self.order - 1) * self.directions
        return lower + (1 if self.collapsed else self.directions)

    def is_sum(self, order: int) -> bool:
        """Returns whether this order is kept only as its sum over the directions."""
        return self.collapsed and order == self.order

    def coefficient_type(self, type_: TensorType, order: int) -> TensorType:
        """Returns the type of the coefficients of an order of a value of a type."""
        like = type_.cotangent()
        if self.is_sum(order):
            return like
        step = contiguous_stride((2, *like.shape))[0]  # elements of one direction, in any layout
        return TensorType(
            like.dtype, (self.directions, *like.shape), (step, *like.stride), like.device
        )


UNROLLED = 4  # up to so many directions are computed one by one, so that they fuse with the value

Coefficients: TypeAlias = Mapping[int, tuple[Tensor, ...]]
"""For each order a tensor for each lane, or the sum of all. Missing orders are zero."""

Push: TypeAlias = Callable[..., Sequence[Sequence[Coefficient]]]
"""From the coefficients of each operand, from order 1 on, to those of each result."""


@dataclass(frozen=True, eq=False)
class Jet:
    """A value and its coefficients."""

    primal: Tensor
    coefficients: Coefficients


class Lanes:
    """Computes the coefficients of a series: direction by direction, or all in one batch."""

    def __init__(self, series: Series) -> None:
        self.series = series
        self.are_batched = series.directions > UNROLLED
        self.count = 1 if self.are_batched else series.directions

    @property
    def order(self) -> int:
        """Returns the highest order."""
        return self.series.order

    def _has_rows(self, order: int) -> bool:
        """Returns whether a tensor of this order has a row for each direction."""
        return self.are_batched and not self.series.is_sum(order)

    # ---- from and to the boundary --------------------------------------------------------

    def jet(self, primal: Tensor, given: Mapping[int, Tensor]) -> Tensor | Jet:
        """Returns a value with the coefficients that a closure takes for it."""
        if not given:
            return primal
        return Jet(primal, {order: self._split(t, order) for order, t in given.items()})

    def _is_one(self, order: int) -> bool:
        return self.are_batched or self.series.is_sum(order)

    def _split(self, tensor: Tensor, order: int) -> tuple[Tensor, ...]:
        return (tensor,) if self._is_one(order) else tensor.unbind(0)

    def stacked(self, jet: Jet, order: int) -> Tensor:
        """Returns the coefficients of an order as a closure returns them."""
        lanes = jet.coefficients[order]
        return lanes[0] if self._is_one(order) else torch.stack(lanes)

    # ---- how operators act ---------------------------------------------------------------

    def propagated(self, push: Push, *jets: Jet | Tensor) -> list[Coefficients]:
        """Returns the coefficients of each result of an operator.

        Args:
            push: computes them for one direction; linear in the highest.
            jets: the operands; one that is a tensor has no coefficients.
        """
        pushed = [self._pushed(push, [self._of(j, n) for j in jets]) for n in range(self.count)]
        found = [self._gathered([lane[i] for lane in pushed]) for i in range(len(pushed[0]))]
        sums = [self._sum_of(jet) for jet in jets]
        # Linear in the top coefficient: its sum over directions is pushed once, as a tangent.
        if self.series.collapsed and any(s is not None for s in sums):
            for coefficients, (top,) in zip(found, push(*([s] for s in sums)), strict=True):
                before = coefficients.get(self.order)
                total = plus(None if before is None else before[0], top)
                if total is not None:
                    coefficients[self.order] = (total,)
        return [*found]

    def _of(self, jet: Jet | Tensor, lane: int) -> list[Coefficient]:
        if isinstance(jet, Tensor):
            return [None] * self.order
        return [
            jet.coefficients[k][lane]
            if k in jet.coefficients and not self.series.is_sum(k)
            else None
            for k in self.series.orders
        ]

    def _sum_of(self, jet: Jet | Tensor) -> Coefficient:
        if isinstance(jet, Tensor) or not self.series.collapsed:
            return None
        return jet.coefficients.get(self.order, (None,))[0]

    def _gathered(self, lanes: list[Sequence[Coefficient]]) -> dict[int, tuple[Tensor, ...]]:
        found = {}
        for order in self.series.orders:
            tensors = tuple(lane[order - 1] for lane in lanes)
            if tensors[0] is None:
                continue
            if self.series.is_sum(order):
                many = self.are_batched
                tensors = (tensors[0].sum(0) if many else functools.reduce(operator.add, tensors),)
            found[order] = tensors
        return found

    def _pushed(
        self, push: Push, operands: list[list[Coefficient]]
    ) -> Sequence[Sequence[Coefficient]]:
        # vmap takes tensors alone, so zeros stay outside and keep costing nothing.
        given = [t for series in operands for t in series if t is not None]
        if not self.are_batched or not given:
            return push(*operands)
        pattern: list[list[bool]] = []

        def for_one(*tensors: Tensor) -> tuple[Tensor, ...]:
            rest = iter(tensors)
            filled = [[None if t is None else next(rest) for t in s] for s in operands]
            results = push(*filled)
            pattern[:] = [[t is not None for t in series] for series in results]
            return tuple(t for series in results for t in series if t is not None)

        rest = iter(torch.vmap(for_one)(*given))
        return [[next(rest) if there else None for there in series] for series in pattern]

    def each_coefficient(self, function: Callable[[Tensor], Any], jet: Jet) -> list[Coefficients]:
        """Returns the coefficients of each result of a function that is linear: one by one."""
        found: list[dict[int, tuple[Tensor, ...]]] = []
        for order, lanes in jet.coefficients.items():
            apply = torch.vmap(function) if self._has_rows(order) else function
            results = [apply(t) for t in lanes]
            rows = [r if isinstance(r, (tuple, list)) else (r,) for r in results]
            for place, lane in enumerate(zip(*rows, strict=True)):
                if place == len(found):
                    found.append({})
                found[place][order] = lane
        return [*found]

    def in_one_product(self, function: Callable[[Tensor], Tensor], jet: Jet, dim: int) -> Jet:
        """Applies a linear function to a value and all its coefficients, laid end to end.

        It treats each place along ``dim`` (-1 or -2) by itself, and keeps their order.
        """
        # One product of a tall matrix in place of several: it reads the constant operand once.
        rows, many = [jet.primal], []
        for order, lanes in sorted(jet.coefficients.items()):
            is_many = self._has_rows(order)
            rows += [t.movedim(0, dim - 1).flatten(dim - 1, dim) if is_many else t for t in lanes]
            many += [is_many] * len(lanes)
        sizes = [row.shape[dim] for row in rows]
        primal, *parts = function(torch.cat(rows, dim)).split(sizes, dim)
        size = (self.series.directions, sizes[0])
        rest = (
            part.unflatten(dim, size).movedim(dim - 1, 0) if is_many else part
            for part, is_many in zip(parts, many, strict=True)
        )
        orders = sorted(jet.coefficients.items())
        return Jet(primal, {order: tuple(next(rest) for _ in lanes) for order, lanes in orders})

    def with_series(self, primal: Tensor, coefficients: Coefficients) -> Tensor | Jet:
        """Returns a value with its coefficients, which get its shape and dtype."""
        found = {}
        for order, lanes in coefficients.items():
            many = self._has_rows(order)
            shape = (self.series.directions, *primal.shape) if many else tuple(primal.shape)
            found[order] = tuple(_with_shape(t, shape, primal.dtype, many) for t in lanes)
        return Jet(primal, found) if found else primal


def _with_shape(tensor: Tensor, shape: tuple[Any, ...], dtype: torch.dtype, many: bool) -> Tensor:
    tensor = tensor.to(dtype) if tensor.dtype != dtype else tensor
    if tuple(tensor.shape) == shape:
        return tensor
    missing = len(shape) - tensor.dim()
    # The direction leads; dimensions that broadcasting would add belong behind it.
    if many and missing:
        tensor = tensor.reshape(tensor.shape[0], *[1] * missing, *tensor.shape[1:])
    return tensor.expand(shape)


@dataclass(frozen=True, eq=False)
class Operands:
    """Holds the operands of one operator; ``jets`` are those with a series, in order."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    jets: tuple[Jet, ...]

    @classmethod
    def of(cls, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Operands:
        """Finds the jets among what an operator is given."""
        found: list[Jet] = []
        _mapped([*args, *kwargs.values()], lambda jet: found.append(jet))
        return cls(tuple(args), dict(kwargs), tuple(found))

    def option(self, name: str, place: int, default: Any) -> Any:
        """Returns an operand by its name, or by its place if it was given so."""
        return self.args[place] if place < len(self.args) else self.kwargs.get(name, default)

    def all_in(self, operands: Sequence[Any]) -> bool:
        """Returns whether there are no jets but among these."""
        found: list[Jet] = []
        _mapped(operands, lambda jet: found.append(jet))
        return len(found) == len(self.jets)

    def call(
        self, target: Any, tensors: Sequence[Any] | None = None, zeros_at: Sequence[int] = ()
    ) -> Any:
        """Calls an operator; ``tensors`` replace the jets, in order, instead of their values.

        ``zeros_at`` are places where a constant counts as zero.
        """
        rest = iter([jet.primal for jet in self.jets] if tensors is None else tensors)
        args = [
            _mapped(_zero(a) if place in zeros_at else a, lambda _: next(rest))
            for place, a in enumerate(self.args)
        ]
        kwargs = {name: _mapped(a, lambda _: next(rest)) for name, a in self.kwargs.items()}
        return target(*args, **kwargs)


def _zero(operand: Any) -> Any:
    if isinstance(operand, (list, tuple)):
        return [_zero(part) for part in operand]
    if isinstance(operand, Tensor):
        return torch.zeros_like(operand)
    return operand if operand is None or isinstance(operand, Jet) else 0


def _mapped(operand: Any, of_jet: Callable[[Jet], Any]) -> Any:
    if isinstance(operand, Jet):
        return of_jet(operand)
    if isinstance(operand, (list, tuple)):
        return [_mapped(part, of_jet) for part in operand]
    return operand


def results_of(lanes: Lanes, results: Any, coefficients: Sequence[Coefficients]) -> Any:
    """Puts the results of an operator together with the coefficients of each."""
    if not isinstance(results, (list, tuple)):
        return lanes.with_series(results, coefficients[0]) if coefficients else results
    pairs = zip(results, coefficients, strict=True)
    return tuple(lanes.with_series(result, found) for result, found in pairs)


Rule: TypeAlias = Callable[[Lanes, Any, Operands], Any]
"""Returns an operator's results with their series, or NotImplemented for such operands."""


# ---- power series with known zeros ---------------------------------------------------------------


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
    whole = combined(outer, powers(slopes, len(slopes)))
    return [0.5 * (1 + outer[0]), *(scaled(c, 0.5) for c in whole)]


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
