"""Which Python floats among the arguments of a module varied from call to call."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...reuse import torch_pytree
from .kept_programs import Inputs

_MAX_TREES = 32


@dataclass
class _Seen:
    """The floats of the calls of one structure: those that came first, and which varied."""

    tree: torch_pytree.TreeSpec
    first: dict[int, float]
    varied: frozenset[int] = frozenset()
    closed: set[frozenset[int]] = field(default_factory=set)


class VaryingFloats:
    """Which Python floats among a module's arguments varied so far."""

    def __init__(self) -> None:
        self._seen: list[_Seen] = []

    def varied(self, inputs: Inputs) -> frozenset[int]:
        """Returns the places of floats that may be inputs, for a call to be compiled."""
        floats = {i: x for i, x in enumerate(inputs.leaves) if type(x) is float}
        if not floats:
            return frozenset()
        seen = next((s for s in self._seen if s.tree == inputs.tree), None)
        if seen is None:
            self._seen = [*self._seen, _Seen(inputs.tree, floats)][-_MAX_TREES:]
            return frozenset()
        seen.varied |= {i for i, x in floats.items() if seen.first.get(i, x) != x}
        places = seen.varied & frozenset(floats)
        return frozenset() if places in seen.closed else places

    def close(self, inputs: Inputs, places: frozenset[int]) -> None:
        """Notes that these floats decide something, so that each value gets a program."""
        for seen in self._seen:
            if seen.tree == inputs.tree:
                seen.closed.add(places)
