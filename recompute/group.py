"""Calls of one closure with the variants that each may take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Group:
    """Calls of one closure, and the variants each may take.

    Attributes:
        num_calls: how many.
        num_bytes: per variant, what one call saves; growing.
        extra_s: per variant, the seconds one call computes again; falling.
        compiled: positions of variants that are compiled whether used or not.
        max_variants: how many may be compiled.
    """

    num_calls: int
    num_bytes: tuple[int, ...]
    extra_s: tuple[float, ...]
    compiled: frozenset[int] = frozenset()
    max_variants: int = 3

    def only(self, places: Sequence[int]) -> Group:
        """The same calls with some of the variants."""
        return Group(
            self.num_calls,
            tuple(self.num_bytes[i] for i in places),
            tuple(self.extra_s[i] for i in places),
            frozenset(places.index(i) for i in self.compiled),
            self.max_variants,
        )

    def steps(self) -> list[tuple[int, float, float]]:
        """From hull point to hull point: bytes added, seconds saved, seconds per byte."""
        found, here, last = [], 0, len(self.num_bytes) - 1
        while here < last:
            slopes = [
                (
                    (self.extra_s[here] - self.extra_s[i])
                    / (self.num_bytes[i] - self.num_bytes[here]),
                    i,
                )
                for i in range(here + 1, last + 1)
            ]
            slope, there = max(slopes)
            added = self.num_bytes[there] - self.num_bytes[here]
            found.append((added, self.extra_s[here] - self.extra_s[there], slope))
            here = there
        return found
