"""Derivatives along lines (Taylor and forward mode), and when they are taken in place of reverse.

All modes give the same numbers. Taylor mode passes through the function once, with all coefficients
of all directions, and forward mode is its first order; reverse mode differentiates once more for
each order. Only a capture can follow the first two; where PyTorch runs the function it is reverse.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch

from ...autodiff.forward_mode.series import Series
from ...reuse.errors import PlanError
from ..tracing.torch_tracing import follower

TaylorMode = Literal["auto", "taylor", "reverse"]
ForwardMode = Literal["auto", "forward", "reverse"]
Mode = TaylorMode | ForwardMode

# A pass along lines is worth a little more than one of reverse mode: the linear maps take all its
# coefficients in one product, and there is less to compile.
_WORTH = 1.2


def mode_taken(
    what: str, mode: Mode, along: Literal["taylor", "forward"], *, passes: int, passes_back: int
) -> str:
    """Returns the mode in which a derivative is computed: the one along lines, or ``"reverse"``.

    Args:
        what: the derivative, in words.
        mode: as the user asked for it; ``"auto"`` takes the one with fewer passes.
        along: the mode along lines that there is for it.
        passes: how often the linear maps of the function run in that mode.
        passes_back: the same of reverse mode.

    Raises:
        PlanError: if there is no such mode.
    """
    if mode not in ("auto", along, "reverse"):
        raise PlanError(f"{what}: mode {mode!r} is none of auto, {along}, reverse.")
    watcher: Any = follower()
    if watcher is None or mode == "reverse":
        return "reverse"
    if mode == along:
        return along
    # By passes alone, known before anything is made: to count both modes, both had to be made.
    is_along = passes <= _WORTH * passes_back
    few, many = (passes, passes_back) if is_along else (passes_back, passes)
    found: str = watcher.open_mode(
        what, along if is_along else "reverse", f"{few} passes against {many}"
    )
    return found


def may_follow(mode: Mode) -> bool:
    """Returns whether a derivative may be taken along lines: only a capture can follow them."""
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
