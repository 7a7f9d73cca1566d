"""What a Jacobian at one point is computed by: its products with directions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...autodiff.forward_mode.series import Series
from .arguments import Function, chosen, renamed, with_chosen
from .lines import ForwardMode, may_follow, taylor
from .transforms import gradients, hvp, scalar, tangents_of


@dataclass(frozen=True)
class Given:
    """The arguments at one point."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def to(self, function: Callable[..., torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
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

    row: Callable[[torch.Tensor], torch.Tensor]
    along: Callable[[torch.Tensor], torch.Tensor]
    rows: Callable[[torch.Tensor], torch.Tensor] | None = None
    columns: Callable[[torch.Tensor], torch.Tensor] | None = None
    curvatures: Callable[[torch.Tensor], torch.Tensor] | None = None


class _OfFunction(nn.Module):
    """What is computed of a function, with respect to one of its arguments."""

    def __init__(self, func: Function, argnums: int) -> None:
        super().__init__()
        self.func = func
        self._argnums = argnums


class CotangentProduct(_OfFunction):
    """A cotangent times the Jacobian."""

    def forward(self, cotangent: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Returns it, in the input's shape."""
        goes_on = torch.is_grad_enabled()
        with torch.enable_grad():
            given, inputs = renamed(chosen(args, self._argnums))
            result = self.func(*with_chosen(args, self._argnums, given), **kwargs)
            (found,) = gradients([result], inputs, [cotangent], goes_on=goes_on)
        return found


class TangentProducts(_OfFunction):
    """The Jacobian times tangents."""

    def forward(self, tangents: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Returns it, ``[K, *result]`` of ``[K, *input]``."""
        goes_on = torch.is_grad_enabled()
        with torch.enable_grad():
            rows = tangents.clone()  # before what is differentiated runs: see `tangents_of`
            given, inputs = renamed(chosen(args, self._argnums))
            result = self.func(*with_chosen(args, self._argnums, given), **kwargs)
            (found,) = tangents_of([result], inputs, [rows])
        return found if goes_on else found.detach()


class HessianProduct(_OfFunction):
    """The Hessian of a function with a scalar result, times a vector."""

    def __init__(self, func: Function, argnums: int, mode: ForwardMode) -> None:
        super().__init__(func, argnums)
        self._mode: ForwardMode = mode

    def forward(self, vector: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Returns it, in the input's shape."""

        def of_one(x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.func(*with_chosen(args, self._argnums, [x]), **kwargs)
            return result

        (point,) = chosen(args, self._argnums)
        found: torch.Tensor = hvp(of_one, point, vector, mode=self._mode)[1]
        return found


class Curvatures(_OfFunction):
    """The second derivatives of a function with a scalar result, along lines."""

    def forward(self, directions: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Returns them, ``[K]`` of ``[K, *input]``."""
        goes_on = torch.is_grad_enabled()
        with torch.enable_grad():
            rows = directions.clone()  # before what is differentiated runs: see `tangents_of`
            given, (point,) = renamed(chosen(args, self._argnums))
            result = self.func(*with_chosen(args, self._argnums, given), **kwargs)
            value, series = scalar(result, "hessian").reshape(()), Series(2, len(rows))
            if may_follow("auto"):
                found = taylor(value, point, rows, series)
            else:
                found = torch.stack([_curvature(value, point, row) for row in rows])
        return found if goes_on else found.detach()


def _curvature(value: torch.Tensor, point: torch.Tensor, direction: torch.Tensor) -> torch.Tensor:
    (first,) = gradients([value], [point], None, goes_on=True)
    (second,) = gradients([first], [point], [direction], goes_on=True)
    return (second * direction).sum()
