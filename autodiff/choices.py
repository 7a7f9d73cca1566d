"""Choices: which of a call's forward values are saved, and which its backward computes again.

A choice belongs to one call. Equal choices of one closure give one derivative, compiled once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Union


@dataclass(frozen=True, slots=True)
class Cut:
    """Splits a leaf's joint graph so that just these forward values are saved.

    Attributes:
        saved: names of nodes of the joint graph; the backward computes all else again.
    """

    saved: frozenset[str]


@dataclass(frozen=True, slots=True)
class Whole:
    """Calls the closure again in the backward, whole; only what it drew at random is saved."""


@dataclass(frozen=True, slots=True)
class PerCall:
    """One choice for each call of a composite closure; None saves what the recipe saves."""

    choices: tuple[Choice | None, ...]


Choice = Union[Cut, Whole, PerCall]  # noqa: UP007  (a forward reference inside PerCall)
