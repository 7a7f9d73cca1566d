"""Derivatives along lines: Taylor mode where a capture follows, reverse mode where PyTorch runs.

Both give the same numbers. Taylor mode passes through the function once, with all coefficients of
all directions; reverse mode differentiates once more for each order.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch

from ...autodiff.forward_mode.series import Series
from ..tracing.torch_tracing import follower

Mode = Literal["auto", "taylor", "reverse"]


def is_taylor(mode: Mode) -> bool:
    """Whether derivatives are to be taken along lines: only a capture can follow them."""
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
