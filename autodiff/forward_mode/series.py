"""Describes the series of a forward derivative, and the types of its coefficients.

Beside an active value ``x`` flow *Taylor coefficients*: along direction ``k`` the value is
``x(t) = x + x_1[k] t + x_2[k] t^2 + ...``, so the n-th derivative at 0 is ``n!`` times the n-th
coefficient. The coefficients of one order are one tensor, one row per direction; those of the top
order may be kept as their sum over all directions alone (Dangel et al., arXiv 2505.13644: the
forward Laplacian is twice the collapsed second coefficient).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from ...reuse.ir.types import TensorType, contiguous_stride

Orders: TypeAlias = tuple[int, ...]
"""The orders whose coefficients flow with a value; the others are zero. () is inactive."""


@dataclass(frozen=True)
class Series:
    """Says which coefficients flow with each active value.

    Attributes:
        order: of the highest derivative; 1 is a tangent, as of ``jvp``.
        directions: how many directions there are at once.
        collapsed: whether only the sum over the directions is kept of the top coefficient.
    """

    order: int
    directions: int
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
        """Returns how many tensors of its shape flow with a value."""
        lower = (self.order - 1) * self.directions
        return lower + (1 if self.collapsed else self.directions)

    def is_sum(self, order: int) -> bool:
        """Returns whether of this order only the sum over the directions is kept."""
        return self.collapsed and order == self.order

    def coefficient_type(self, type_: TensorType, order: int) -> TensorType:
        """Returns the type of the coefficients of an order of a value of a type."""
        like = type_.cotangent()
        if self.is_sum(order):
            return like
        step = contiguous_stride((2, *like.shape))[0]  # of one direction, however it lies
        return TensorType(
            like.dtype, (self.directions, *like.shape), (step, *like.stride), like.device
        )
