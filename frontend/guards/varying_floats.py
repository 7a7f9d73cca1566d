"""Which Python floats among the arguments of a module varied from call to call."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from ...reuse import torch_pytree
from ..capture.blocks import Reuse
from ..capture.float_inputs import OpenCapture, capture_open
from .kept_programs import Inputs

_MAX_TREES = 32
_MAX_TRIED_ALONE = 8


@dataclass
class _Seen:
    """The floats of the calls of one structure.

    Attributes:
        tree: the structure.
        first: the floats that came first.
        varied: which of them varied.
        closed: which of them decide something, so that each value gets a program.
    """

    tree: torch_pytree.TreeSpec
    first: dict[int, float]
    varied: set[int] = field(default_factory=set)
    closed: set[int] = field(default_factory=set)


class VaryingFloats:
    """Which Python floats among a module's arguments varied so far, and may be inputs.

    Args:
        for_gpu: whether programs are for a GPU that is not here, and run with no value at all.
    """

    def __init__(self, *, for_gpu: bool) -> None:
        self._for_gpu = for_gpu
        self._seen: list[_Seen] = []

    def opened(self, model: nn.Module, inputs: Inputs, *, reuse: Reuse, train: bool) -> OpenCapture:
        """Captures a model with the floats that varied as inputs, as far as they may be.

        Where they may not be all at once, each is tried alone.
        """

        def tried(places: frozenset[int]) -> OpenCapture:
            try:
                return capture_open(
                    model, inputs.leaves, inputs.tree, places, reuse=reuse, train=train
                )
            except Exception:  # the call can be compiled for its numbers
                return OpenCapture()

        places = frozenset[int]() if self._for_gpu else self._varied(inputs)
        found = tried(places) if places else OpenCapture()
        if found.places or not places:
            return found
        if 1 < len(places) <= _MAX_TRIED_ALONE:
            alone = [tried(frozenset([place])) for place in sorted(places)]
            able = frozenset[int]().union(*(one.places for one in alone))
            if len(able) == 1:
                found = next(one for one in alone if one.places)
            elif able:
                found = tried(able)
        self.close(inputs, places - found.places)
        return found

    def close(self, inputs: Inputs, places: frozenset[int]) -> None:
        """Notes that these floats decide something, so that each value gets a program."""
        for seen in self._seen:
            if seen.tree == inputs.tree:
                seen.closed |= places

    def _varied(self, inputs: Inputs) -> frozenset[int]:
        """Returns the places of floats that varied and may be inputs, for a call to be compiled."""
        floats = {i: x for i, x in enumerate(inputs.leaves) if type(x) is float}
        if not floats:
            return frozenset()
        seen = next((s for s in self._seen if s.tree == inputs.tree), None)
        if seen is None:
            self._seen = [*self._seen, _Seen(inputs.tree, floats)][-_MAX_TREES:]
            return frozenset()
        seen.varied |= {i for i, x in floats.items() if seen.first.get(i, x) != x}
        return frozenset(seen.varied & floats.keys()) - seen.closed
