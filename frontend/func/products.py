"""What a Jacobian at one point is computed by: its products with directions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from ...autodiff.forward_mode.series import Series
from .arguments import Function, chosen, renamed, with_chosen
from .lines import ForwardMode, may_follow, taylor
from .transforms import along_gradients, gradients, scalar, tangents_of

LinearMap = Callable[[torch.Tensor], torch.Tensor]
"""Takes directions to their product with a derivative."""


@dataclass(frozen=True)
class Given:
    """The arguments at one point."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def to(self, function: Callable[..., torch.Tensor]) -> LinearMap:
        """Returns a function of what comes before them."""
        return lambda first: function(first, *self.args, **self.kwargs)


class AtOnce:
    """A function of several directions: one program for each number of them."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        self._make = make
        self._made: dict[int, nn.Module] = {}

    def __call__(self, directions: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Runs the program for as many directions, which it makes the first time."""
        num = len(directions)
        if num not in self._made:
            self._made[num] = self._make()
        found: torch.Tensor = self._made[num](directions, *args, **kwargs)
        return found


@dataclass(frozen=True)
class Products:
    """What a Jacobian at one point is computed by.

    Attributes:
        row: a cotangent times it.
        along: it times a tangent.
        rows: several cotangents times it, ``[K, *result]`` to ``[K, *input]``, if they can pass
            at once.
        columns: it times several tangents, ``[K, *input]`` to ``[K, *result]``.
        curvatures: of a Hessian the second derivatives along directions, ``[K, *input]`` to
            ``[K]``.
    """

    row: LinearMap
    along: LinearMap
    rows: LinearMap | None = None
    columns: LinearMap | None = None
    curvatures: LinearMap | None = None


@dataclass(frozen=True)
class Computed:
    """A function's result, and the point that it was computed at.

    Attributes:
        result: with a graph that leads to the point.
        point: what is differentiated with respect to.
        goes_on: whether derivatives can be differentiated in their turn.
    """

    result: torch.Tensor
    point: torch.Tensor
    goes_on: bool

    @cached_property
    def gradient(self) -> torch.Tensor:
        """That of a result which is a scalar, to be differentiated on."""
        value = scalar(self.result, "hessian")
        (found,) = gradients([value], [self.point], None, goes_on=True)
        return found

    def to(self, derive: Derive) -> LinearMap:
        """Returns a product with what was computed; it can be differentiated if this can."""

        def product(directions: torch.Tensor) -> torch.Tensor:
            with torch.enable_grad():
                found = derive(self, directions)
            return found if self.goes_on else found.detach()

        return product


Derive = Callable[[Computed, torch.Tensor], torch.Tensor]
"""Computes a product from a function's result and directions."""


def computed(
    func: Function, argnums: int, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Computed:
    """Runs a function, to be differentiated with respect to one of its arguments."""
    goes_on = torch.is_grad_enabled()
    with torch.enable_grad():
        given, (point,) = renamed(chosen(args, argnums))
        return Computed(func(*with_chosen(args, argnums, given), **kwargs), point, goes_on)


class Product(nn.Module):
    """A product with the Jacobian of a function, which it runs.

    Args:
        func: the function.
        argnums: with respect to which of its arguments.
        derive: computes the product.
        prepare: makes what that takes of the directions before the function runs: see
            :func:`tangents_of`.
    """

    def __init__(
        self,
        func: Function,
        argnums: int,
        derive: Derive,
        prepare: Callable[[torch.Tensor], torch.Tensor] = torch.clone,
    ) -> None:
        super().__init__()
        self.func = func
        self._argnums = argnums
        self._derive = derive
        self._prepare = prepare

    def forward(self, directions: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Returns the product."""
        given = self._prepare(directions)
        return computed(self.func, self._argnums, args, kwargs).to(self._derive)(given)


def cotangent_product(at: Computed, cotangent: torch.Tensor) -> torch.Tensor:
    """Returns a cotangent times the Jacobian, in the input's shape."""
    (found,) = gradients([at.result], [at.point], [cotangent], goes_on=at.goes_on)
    return found


def tangent_products(at: Computed, tangents: torch.Tensor) -> torch.Tensor:
    """Returns the Jacobian times tangents: ``[K, *result]`` of ``[K, *input]``."""
    (found,) = tangents_of([at.result], [at.point], [tangents])
    return found


def hessian_products(at: Computed, tangents: torch.Tensor) -> torch.Tensor:
    """Returns the Hessian times tangents: ``[K, *input]`` of as much."""
    (found,) = tangents_of([at.gradient], [at.point], [tangents])
    return found


def hessian_product(at: Computed, tangent: torch.Tensor, *, mode: ForwardMode) -> torch.Tensor:
    """Returns the Hessian times a tangent: ``[*input]`` of ``[1, *input]``."""
    (found,) = along_gradients([at.gradient], [at.point], [tangent], mode, goes_on=at.goes_on)
    return found.squeeze(0)


def curvatures(at: Computed, directions: torch.Tensor) -> torch.Tensor:
    """Returns the second derivatives of a scalar along lines: ``[K]`` of ``[K, *input]``."""
    value = scalar(at.result, "hessian").reshape(())
    if may_follow("auto"):
        return taylor(value, at.point, directions, Series(2, len(directions)))
    return torch.stack([_curvature(at, direction) for direction in directions])


def _curvature(at: Computed, direction: torch.Tensor) -> torch.Tensor:
    (second,) = gradients([at.gradient], [at.point], [direction], goes_on=True)
    return (second * direction).sum()


class SameDraws:
    """Makes all products at one point draw the same random numbers: they are of one function.

    The first that runs draws what comes next. The others begin where it began, and leave the
    generators as they found them.

    Args:
        device: where the function runs; random numbers may be drawn there and on the CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.devices = [device] if device.type == "cuda" else []
        self._start: list[torch.Tensor] | None = None
        self._has_drawn = False

    def among(self, product: LinearMap) -> LinearMap:
        """Returns a product that draws as the others do."""
        return lambda directions: self._run(product, directions)

    def _run(self, product: LinearMap, directions: torch.Tensor) -> torch.Tensor:
        if self._start is None:
            before = self._states()
            found = product(directions)
            pairs = zip(before, self._states(), strict=True)
            self._has_drawn = not all(torch.equal(one, other) for one, other in pairs)
            self._start = before
            return found
        if not self._has_drawn:
            return product(directions)
        with torch.random.fork_rng(self.devices):
            torch.set_rng_state(self._start[0])
            for device, state in zip(self.devices, self._start[1:], strict=True):
                torch.cuda.set_rng_state(state, device)
            return product(directions)

    def _states(self) -> list[torch.Tensor]:
        return [torch.get_rng_state(), *map(torch.cuda.get_rng_state, self.devices)]
