"""``laplacian`` and ``derivative``: by the coordinates of points.

Points are a tensor whose last dimension holds coordinates; all others count points. Along a
coordinate all points move together: where each result depends on its own point alone, as in a
network that is given a batch, that is the partial derivative at each point.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from ...autodiff.forward_mode.jets import Series
from ...reuse.errors import PlanError, door
from ..tracing.gradients import Function, gradients, renamed
from .transforms import TaylorMode, compiled, may_follow, mode_taken, taylor


@door
def laplacian(func: Function, *, mode: TaylorMode = "auto") -> nn.Module:
    """Returns a function that computes the Laplacian of one of points.

    Args:
        func: a function or a module; it takes points ``[..., d]`` and returns ``[..., m]``, or one
            number for each point, ``[...]``. A result may depend on its own point only.
        mode: ``"taylor"`` passes once, with the collapsed Taylor series along all coordinates
            (Dangel et al., arXiv 2505.13644); ``"reverse"`` differentiates twice. ``"auto"`` is
            the one with fewer passes through the function; the report says which.
            Where the function runs eagerly, it is always reverse mode.

    Returns:
        A module that takes points and returns the sum of the second derivatives by each
        coordinate, in the shape of what ``func`` returns. It is compiled at its first call; inside
        a model it becomes a part of that.

    Example:
        >>> class Residual(nn.Module):
        ...     def forward(self, points):
        ...         return laplacian(self.net)(points).square().mean()
    """
    return compiled(_Laplacian(func, mode))


class _Laplacian(nn.Module):
    def __init__(self, func: Function, mode: TaylorMode) -> None:
        super().__init__()
        self.func = func
        self._mode: TaylorMode = mode

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        """Returns the sum of the second derivatives."""
        terms = [(place, place) for place in range(points.shape[-1])]
        return _sum_of_partials("laplacian", terms, self.func, points, self._mode)


@door
def derivative(
    func: Function,
    points: torch.Tensor,
    by: str,
    *,
    coordinates: str = "xyzt",
    mode: TaylorMode = "auto",
) -> torch.Tensor:
    """Returns a partial derivative of a function of points, of any order.

    It runs at once: inside a model that is compiled it becomes a part of that. In Taylor mode a
    mixed derivative is a weighted sum of those along some directions: ``"xy"`` of those along
    ``x + y`` and ``x - y``.

    Args:
        func: as :func:`laplacian` takes it.
        points: ``[..., d]``.
        by: a letter for each derivative: ``"xxy"`` is the third, twice by x and once by y.
        coordinates: the names of the d coordinates, in their order.
        mode: as for :func:`laplacian`.

    Returns:
        It, in the shape of what ``func`` returns.

    Raises:
        PlanError: if a letter names no coordinate.

    Example:
        >>> class Beam(nn.Module):
        ...     def forward(self, x):
        ...         return derivative(self.net, x, "xxxx").square().mean()
    """
    places = _places(by, coordinates, points.shape[-1])
    return _sum_of_partials(f"derivative by {by!r}", [places], func, points, mode)


Term = tuple[int, ...]
"""A partial derivative: the place of a coordinate for each order."""


def _sum_of_partials(
    what: str, terms: Sequence[Term], func: Function, points: torch.Tensor, mode: TaylorMode
) -> torch.Tensor:
    """Returns the sum of partial derivatives of one order, in the shape of a function's result."""
    goes_on, order = torch.is_grad_enabled(), len(terms[0])
    weights: dict[tuple[float, ...], float] = {}
    for term in terms:
        for along, weight in _polarized(term, points.shape[-1]).items():
            weights[along] = weights.get(along, 0.0) + weight / math.factorial(order)
    factors = [*weights.values()]
    # With equal weights only the sum over the directions has to flow, as for a Laplacian.
    is_sum = order > 1 and len(factors) > 1 and len({*factors}) == 1
    series = Series(order, len(factors), collapsed=is_sum)
    with torch.enable_grad():
        # Made before what is differentiated runs: the series then take its place.
        lines = _everywhere([*weights], points) if may_follow(mode) else points
        (given,), _ = renamed((points,))
        result = _result_of(func, given)
        num_columns = math.prod(result.shape[given.dim() - 1 :])
        passes, passes_back = 1 + series.num_coefficients, 1 + num_columns * _passes_back(terms)
        if mode_taken(what, mode, "taylor", passes=passes, passes_back=passes_back) == "taylor":
            highest = taylor(result, given, lines, series)
            if is_sum:
                found = highest if factors[0] == 1 else highest * factors[0]
            else:
                parts = [highest[k] * factor for k, factor in enumerate(factors)]
                found = torch.stack(parts).sum(0)
        else:
            columns = _columns(result, given)
            parts = [_in_reverse(column, given, terms, goes_on=goes_on) for column in columns]
            found = torch.stack(parts, -1).reshape(result.shape)
    return found if goes_on else found.detach()


def _by_first(terms: Sequence[Term]) -> Mapping[int, Sequence[Term]]:
    """Returns, by the first coordinate of some terms, what is left of them."""
    found: dict[int, list[Term]] = {}
    for first, *rest in terms:
        found.setdefault(first, []).append(tuple(rest))
    return found


def _passes_back(terms: Sequence[Term]) -> int:
    """Returns how often reverse mode runs the linear maps of what is differentiated.

    A gradient runs them once more, and a gradient of a gradient also those of the first.
    """
    return 1 + 2 * sum(_passes_back(rest) for rest in _by_first(terms).values() if rest[0])


def _in_reverse(
    column: torch.Tensor, points: torch.Tensor, terms: Sequence[Term], *, goes_on: bool
) -> torch.Tensor:
    """Returns the sum of partial derivatives of one number at each point."""
    is_last = len(terms[0]) == 1
    (slope,) = gradients([column.sum()], [points], None, goes_on=goes_on or not is_last)
    found = [
        slope[..., place]
        if is_last
        else _in_reverse(slope[..., place], points, rest, goes_on=goes_on)
        for place, rest in _by_first(terms).items()
    ]
    return found[0] if len(found) == 1 else torch.stack(found).sum(0)


def _polarized(places: Sequence[int], num: int) -> Mapping[tuple[float, ...], float]:
    """Returns directions and their weights: a mixed derivative as a sum of those along lines.

    With ``n`` derivatives, ``a_i`` of them by coordinate i, it is the sum over all ``b <= a`` of
    ``(-1)^|b| prod C(a_i, b_i) / (2^n n!)`` times the n-th derivative along ``a - 2 b``: the
    polarization identity, centred. Directions on one line are one.
    """
    wanted = Counter(places)
    found: dict[tuple[float, ...], float] = {}
    for below in itertools.product(*(range(n + 1) for n in wanted.values())):
        steps = [n - 2 * b for n, b in zip(wanted.values(), below, strict=True)]
        longest = math.gcd(*steps)
        if not longest or next(step for step in steps if step) < 0:
            continue  # the opposite direction gives the same
        weight = 2.0 * (-1) ** sum(below) * (longest / 2) ** len(places)
        for b, order in zip(below, wanted.values(), strict=True):
            weight *= math.comb(order, b)
        along = dict(zip(wanted, steps, strict=True))
        direction = tuple(float(along.get(i, 0) // longest) for i in range(num))
        found[direction] = found.get(direction, 0.0) + weight
    return found


def _everywhere(directions: Sequence[Sequence[float]], points: torch.Tensor) -> torch.Tensor:
    """Returns the same directions at every point, ``[K, *points.shape]``."""
    rows = torch.tensor(directions, dtype=points.dtype, device=points.device)
    num, size = rows.shape
    # Written out, as the types of coefficients say that they lie.
    whole = rows.reshape(num, *[1] * (points.dim() - 1), size)
    return whole.expand(num, *points.shape).contiguous()


def _places(by: str, coordinates: str, num: int) -> Term:
    known = coordinates[:num]
    unknown = [letter for letter in by if letter not in known]
    if unknown or not by:
        raise PlanError(
            f"derivative by {by!r}: the {num} coordinates of these points are named "
            f'{", ".join(known)}. Pass coordinates=, such as "xt", to name others.'
        )
    return tuple(known.index(letter) for letter in by)


def _result_of(func: Function, points: torch.Tensor) -> torch.Tensor:
    result = func(points)
    per_point = points.shape[:-1]
    if not isinstance(result, torch.Tensor) or result.shape[: len(per_point)] != per_point:
        shape = f"{tuple(result.shape)}" if isinstance(result, torch.Tensor) else type(result)
        raise PlanError(
            f"A function of points {tuple(points.shape)} has to return numbers for each of them, "
            f"[{', '.join(map(str, (*per_point, '...')))}], not {shape}."
        )
    return result


def _columns(result: torch.Tensor, points: torch.Tensor) -> Sequence[torch.Tensor]:
    """Returns the results one number of each point at a time."""
    per_point = points.shape[:-1]
    return result.reshape(*per_point, -1).unbind(-1)
