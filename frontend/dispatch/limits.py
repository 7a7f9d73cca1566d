"""Remembers the kinds of calls that run eagerly: not to be captured, or compiled too often.

What a forward reads besides tensors is a constant of its program, so that a value which differs at
each call, as a scheduled one does, takes a compile at each, which would never pay. Every such thing
has one rule: calls of a kind are compiled for at most so many values of it, then they run eagerly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import torch
from torch import nn

from ...reuse import torch_pytree
from ...reuse.evidence.module_state import own_hooks
from ...reuse.freeze import Identity
from ...reuse.ir.leaf import current_autocast
from ...reuse.ir.types import contiguous_stride, is_dense
from ..guard import Guard

MAX_KINDS = 32
"""The most kinds of calls that are remembered."""
MAX_VALUES = 32
"""The most values of Python float arguments, or of attributes, that a kind is compiled for."""
_BRANCHES_ON = (bool, str, type(None))  # arguments by which a forward may branch


@dataclass(frozen=True)
class CallKind:
    """The arguments, modes and hooks by which a forward may branch.

    Whether a call can be captured is remembered per kind.
    """

    tree: torch_pytree.TreeSpec
    leaves: tuple[Any, ...]
    modes: tuple[Any, ...]
    hooks: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, leaves: Sequence[Any], tree: torch_pytree.TreeSpec, *, training: bool) -> CallKind:
        """Returns the kind of a call with these flat arguments."""
        # Numbers count only by type: a scheduled number would be a new kind at each call.
        kinds = (x if isinstance(x, _BRANCHES_ON) else (type(x), _is_slice(x)) for x in leaves)
        return cls(
            tree, tuple(kinds), (training, torch.is_grad_enabled(), current_autocast(("cpu",)))
        )

    def with_hooks(self, model: nn.Module) -> CallKind:
        """Returns the kind of the same call with the hooks that the model's modules have now."""
        # The number of hooks, because a hook that is added for each call would be a new kind.
        counts = [len(own_hooks(module, "forward")) for module in model.modules()]
        return replace(self, hooks=tuple((i, n) for i, n in enumerate(counts) if n))


_Row: TypeAlias = tuple[str, tuple[Any, ...], tuple[Any, ...], int, str]


def _constants(leaves: Sequence[Any], guard: Guard, module: int) -> Iterator[_Row]:
    """Yields the constants of a call's program: what, for what they are counted, and their value.

    Then how many values of it a kind of call may have, and what to pass in their place.
    """
    floats = tuple(x.hex() for x in leaves if type(x) is float)
    yield "Python floats among the arguments", (), floats, MAX_VALUES, "as a 0-d tensor"
    yield "numbers that the forward reads from its inputs", (), guard.answers, 4, "as a size"
    objects = tuple(Identity(x) for x in leaves if _holds_tensors(x))
    kinds = " and ".join(sorted({type(one.target).__qualname__ for one in objects}))
    registered = "in tensors, lists and dictionaries, or in a dataclass that is registered with "
    registered += "torch.export.register_dataclass"
    yield f"arguments that hold tensors ({kinds})", (), objects, 3, registered
    slices = tuple((x.shape, x.stride()) for x in leaves if _is_slice(x))
    copied = "as x.clone(memory_format=torch.contiguous_format)"
    yield "layouts of slices of larger tensors", (), slices, 8, copied
    # Whatever else a forward read is known to its guard alone: each program is another value.
    others = "what a forward reads besides tensors (numbers, attributes), for equal sizes,"
    sizes = (module, *(x.shape for x in leaves if isinstance(x, torch.Tensor)))
    yield others, sizes, (object(),), MAX_VALUES, "as a 0-d tensor, or keep it in a buffer"


Tries: TypeAlias = Literal["once more", "doubling", "never"]
"""When to capture again after a failed capture."""


class Refusals:
    """Remembers which kinds of calls run eagerly, and why; modules that are alike share it."""

    def __init__(self) -> None:
        # By kind: to run a call eagerly that could be compiled is slower, but right.
        self._known: dict[CallKind, tuple[str, int, Tries]] = {}
        self._values: dict[Any, set[tuple[Any, ...]]] = {}  # by kind and what varies

    def why_eager(self, call: CallKind) -> str:
        """Returns why a call runs eagerly, or "" if a capture should be tried; counts the call."""
        reason, count, tries = self._known.get(call, ("", 0, "never"))
        # Tried once more at the second call, because the first may have created state in a module.
        if tries == "never" or (tries == "once more" and count > 1):
            return reason
        self._known = {**self._known, call: (reason, count + 1, tries)}
        # After a side effect, tried at the 2nd, 4th, 8th ... call: filling a cache, for example,
        # happens only once.
        return reason if (count + 1).bit_count() > 1 else ""

    def note(self, call: CallKind, reason: str, tries: Tries = "once more") -> None:
        """Remembers that a call could not be captured."""
        count = self._known.pop(call, ("", 1, tries))[1]
        # A new dict, because other threads may be reading the old one.
        rest = dict([*self._known.items()][1 - MAX_KINDS :])
        self._known = {**rest, call: (reason, count, tries)}

    def forget(self, call: CallKind) -> None:
        """Forgets why a call ran eagerly, after a capture that succeeded."""
        if call in self._known:
            self._known = {known: why for known, why in self._known.items() if known != call}

    def note_compiled(
        self, call: CallKind, leaves: Sequence[Any], guard: Guard, module: int
    ) -> None:
        """Remembers the constants of a call's program; after the last one calls run eagerly."""
        for what, apart, value, most, advice in _constants(leaves, guard, module):
            if not value:
                continue
            key = (call, what, apart)
            known = {*self._values.pop(key, ()), value}
            self._values = {**dict([*self._values.items()][1 - MAX_KINDS :]), key: known}
            if len(known) >= most:
                reason = f"{what} had {most} values, each of which took a compile. Pass what varies"
                self.note(call, f"{reason} {advice}", "never")


def _is_slice(leaf: Any) -> bool:
    """Whether a tensor has gaps in its memory, or is one row of one; kernels are made for these."""
    is_plain = type(leaf) in (torch.Tensor, nn.Parameter) and leaf.layout is torch.strided
    if not is_plain or leaf.is_nested or leaf.stride() == contiguous_stride(leaf.shape):
        return False
    return leaf.is_contiguous() or not is_dense(leaf.shape, leaf.stride())


def _holds_tensors(value: Any, depth: int = 4) -> bool:
    """Whether an object that is not a registered pytree container holds tensors."""
    if depth == 0 or isinstance(value, (torch.Tensor, nn.Module, type)):
        return False
    table = getattr(value, "__dict__", None)
    inside = [*table.values()] if isinstance(table, dict) else []
    inside += value.values() if type(value) is dict else value if type(value) is list else ()
    return any(isinstance(x, torch.Tensor) or _holds_tensors(x, depth - 1) for x in inside)
