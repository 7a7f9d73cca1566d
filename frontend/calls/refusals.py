"""Which calls run a module itself, since no program could be captured for one like them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...reuse import torch_pytree
from ...reuse.ir.leaf import current_autocast

_MAX_KINDS = 32
MAX_FLOATS = 32
"""Values of Python floats that one kind of call is compiled for; with others the module runs."""
_TOLD_APART = (bool, str, type(None))  # such an argument may decide which way a forward takes


@dataclass(frozen=True)
class CallKind:
    """What tells calls apart that may take different ways through a forward."""

    tree: torch_pytree.TreeSpec
    leaves: tuple[Any, ...]
    modes: tuple[Any, ...]

    @classmethod
    def of(cls, leaves: Sequence[Any], tree: torch_pytree.TreeSpec, *, training: bool) -> CallKind:
        """Returns the kind of a call with these flat arguments."""
        kinds = tuple(x if isinstance(x, _TOLD_APART) else type(x) for x in leaves)
        return cls(tree, kinds, (training, torch.is_grad_enabled(), current_autocast(("cpu",))))


class Accepted:
    """What a model's Python raised in captures and not in eager; shared by all parts of a model."""

    def __init__(self) -> None:
        self._known: dict[str, None] = {}

    def __contains__(self, raised: str) -> bool:
        return raised in self._known

    def note(self, raised: str) -> None:
        """Remembers that eager took a call where a capture raised this, at this line."""
        self._known = {**dict.fromkeys([*self._known][1 - _MAX_KINDS :]), raised: None}


class Refusals:
    """Why kinds of calls run a module itself; shared by modules that are alike.

    To run a module itself is always right, so nothing has to be compared exactly. The second call
    of a kind is tried again: the first may have made something that the module keeps.
    """

    def __init__(self) -> None:
        self._known: dict[CallKind, tuple[str, int]] = {}
        self._floats: dict[CallKind, set[tuple[str, ...]]] = {}

    def why_itself(self, call: CallKind) -> str:
        """Returns why a call runs the module itself; "" if that is not known."""
        reason, count = self._known.get(call, ("", 0))
        return reason if count > 1 else ""

    def note(self, call: CallKind, reason: str, *, is_lasting: bool = False) -> None:
        """Remembers that a call could not be captured; ``is_lasting`` if no other try will help."""
        count = 2 if is_lasting else self._known.pop(call, ("", 0))[1] + 1
        self._known = {**dict([*self._known.items()][1 - _MAX_KINDS :]), call: (reason, count)}

    def note_floats(self, call: CallKind, leaves: Sequence[Any]) -> None:
        """Remembers the Python floats of a call that was compiled: a program has them in it.

        A schedule passes another value at each call, and a compile for each would never pay.
        """
        values = tuple(x.hex() for x in leaves if type(x) is float)
        known = self._floats.pop(call, set())
        if values:
            known.add(values)
            self._floats = {**dict([*self._floats.items()][1 - _MAX_KINDS :]), call: known}
        if len(known) >= MAX_FLOATS:
            reason = (
                f"Python floats among the arguments had {MAX_FLOATS} values, each of which took a "
                "compile. Pass what varies as a 0-d tensor"
            )
            self.note(call, reason, is_lasting=True)
