"""Derivatives in Taylor or forward mode, in reverse mode, or in both for the compiler to choose.

Both give the same numbers. Taylor mode passes through the function once, with all coefficients of
all directions, and forward mode is the first order of it; reverse mode differentiates once more for
each order. Only a capture can follow the first two; where PyTorch itself runs it is the last.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from ...autodiff.forward_mode.series import Series
from ...autodiff.higher_order.derivation import Alternatives
from ...autodiff.higher_order.modes import Way
from ...reuse.errors import PlanError
from ..tracing.torch_tracing import follower

TaylorMode = Literal["auto", "taylor", "reverse"]
ForwardMode = Literal["auto", "forward", "reverse"]
Mode = TaylorMode | ForwardMode

_MOST_PASSES = 32
"""Reverse mode with more passes than these is not weighed where the other has fewer."""


@dataclass(frozen=True)
class Ways:
    """Derivatives in either mode.

    Attributes:
        what: they are, in words.
        order: of them.
        along: the way along lines: its mode, and how often it runs the linear maps of what is
            differentiated.
        back: the same of reverse mode.
        in_along: computes them along lines; only a capture can follow.
        in_back: computes them in reverse mode.
    """

    what: str
    order: int
    along: Way
    back: Way
    in_along: Callable[[], list[torch.Tensor]]
    in_back: Callable[[], list[torch.Tensor]]

    def taken(
        self, mode: Mode, results: Sequence[torch.Tensor], points: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Computes them: in a mode, or in both for the compiler to choose.

        Args:
            mode: which one.
            results: what is differentiated.
            points: by what.

        Raises:
            PlanError: if there is no such mode.
        """
        known = "auto", self.along.mode, self.back.mode
        if mode not in known:
            raise PlanError(f"{self.what}: mode {mode!r} is none of {', '.join(known)}.")
        watcher: Any = follower()
        if not may_follow(mode):
            return self.in_back()
        is_one_type = len({x.dtype for x in (*results, *points)}) == 1
        if mode == self.along.mode or not is_one_type or self._back_is_much_more:
            return self.in_along()  # of several types each mode computes in another
        for result in results:
            watcher.apart(result)
        one = self.in_along()
        for tensor in one:
            watcher.apart(tensor)
        pairs = [_of_one_layout(*pair) for pair in zip(one, self.in_back(), strict=True)]
        alternatives = Alternatives(self.what, self.order, (self.along, self.back))
        found: list[torch.Tensor] = watcher.cheapest(alternatives, list(zip(*pairs, strict=True)))
        return found

    @property
    def _back_is_much_more(self) -> bool:
        return self.back.passes > max(_MOST_PASSES, self.along.passes)


def _of_one_layout(one: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if one.stride() == other.stride():
        return one, other
    return one.contiguous(), other.contiguous()


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
