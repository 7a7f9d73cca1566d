"""Values with their series, operands that hold them, and how operators act on them.

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
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ...reuse.ir.types import TensorType, contiguous_stride
from .polynomials import Coefficient, plus

Orders: TypeAlias = tuple[int, ...]
"""The orders whose coefficients a value has; the others are zero. () is inactive."""


@dataclass(frozen=True)
class Series:
    """Says which coefficients each active value has."""

    order: int  # of the highest derivative; 1 is a tangent, as of ``jvp``
    directions: int  # how many directions there are at once
    # Whether the top coefficient is kept only as its sum over the directions.
    collapsed: bool = False

    def __post_init__(self) -> None:
        if self.order < 1 or self.directions < 1:
            raise ValueError(f"{self}: order and directions are at least 1")
        if self.collapsed and self.order == 1:
            raise ValueError(f"{self}: tangents are not collapsed; their sum is one tangent")

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

    def _split(self, tensor: Tensor, order: int) -> tuple[Tensor, ...]:
        if self.series.is_sum(order) or self.are_batched:
            return (tensor,)
        return tensor.unbind(0)

    def stacked(self, jet: Jet, order: int) -> Tensor:
        """Returns the coefficients of an order as a closure returns them."""
        lanes = jet.coefficients[order]
        is_one = self.series.is_sum(order) or self.are_batched
        return lanes[0] if is_one else torch.stack(lanes)

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
        parts = [
            part.unflatten(dim, size).movedim(dim - 1, 0) if is_many else part
            for part, is_many in zip(parts, many, strict=True)
        ]
        return Jet(primal, as_coefficients(jet.coefficients, parts))

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


def as_coefficients(
    coefficients: Coefficients, tensors: Sequence[Tensor]
) -> dict[int, tuple[Tensor, ...]]:
    """Returns tensors, lane by lane from the lowest order on, as coefficients."""
    rest = iter(tensors)
    return {
        order: tuple(next(rest) for _ in lanes) for order, lanes in sorted(coefficients.items())
    }


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
