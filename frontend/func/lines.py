"""Derivatives in Taylor mode, in reverse mode, or in both for the compiler to choose.

Both give the same numbers. Taylor mode passes through the function once, with all coefficients of
all directions; reverse mode differentiates once more for each order. Only a capture can follow the
first; where PyTorch itself runs it is the second.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from ...autodiff.forward_mode.series import Series
from ...autodiff.higher_order.derivation import Alternatives
from ...autodiff.higher_order.modes import Way
from ..tracing.torch_tracing import follower

Mode = Literal["auto", "taylor", "reverse"]

_MOST_PASSES = 32
"""Reverse mode with more passes than these is not weighed where Taylor mode has fewer."""


@dataclass(frozen=True)
class Ways:
    """A derivative in either mode.

    Attributes:
        what: it is, in words.
        order: of it.
        passes: of Taylor mode: how often the linear maps of what is differentiated run.
        reverse_passes: the same of reverse mode.
        taylor: computes it so; only a capture can follow.
        reverse: computes it so.
    """

    what: str
    order: int
    passes: int
    reverse_passes: int
    taylor: Callable[[], torch.Tensor]
    reverse: Callable[[], torch.Tensor]

    def taken(self, mode: Mode, result: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
        """Computes it: in a mode, or in both for the compiler to choose.

        Args:
            mode: which one.
            result: what is differentiated.
            points: by what.
        """
        watcher: Any = follower()
        if not may_follow(mode):
            return self.reverse()
        is_one_type = result.dtype == points.dtype  # else each mode computes in another
        if mode == "taylor" or not is_one_type or self._reverse_is_much_more:
            return self.taylor()
        watcher.apart(result)
        one = self.taylor()
        watcher.apart(one)
        other = self.reverse()
        if one.stride() != other.stride():
            one, other = one.contiguous(), other.contiguous()
        found: torch.Tensor = watcher.cheapest(self._alternatives, [one, other])
        return found

    @property
    def _reverse_is_much_more(self) -> bool:
        return self.reverse_passes > max(_MOST_PASSES, self.passes)

    @property
    def _alternatives(self) -> Alternatives:
        ways = Way("taylor", self.passes), Way("reverse", self.reverse_passes)
        return Alternatives(self.what, self.order, ways)


def may_follow(mode: Mode) -> bool:
    """Whether a derivative may be taken along lines: only a capture can follow them."""
    return mode != "reverse" and follower() is not None


def taylor(
    result: torch.Tensor, points: torch.Tensor, directions: torch.Tensor, series: Series
) -> torch.Tensor:
    """Returns the highest derivatives of what was computed from points that move along lines.

    Args:
        result: computed from ``points``, in a capture.
        points: where the lines begin.
        directions: ``[K, *points.shape]``.
        series: of K directions.

    Returns:
        The derivative of the series' order along each direction, ``[K, *result.shape]``, or their
        sum, ``[*result.shape]``, where the series is collapsed.
    """
    watcher: Any = follower()
    ((*_, highest),) = watcher.series([result], [points], [directions], series)
    found: torch.Tensor = highest * math.factorial(series.order)
    return found
