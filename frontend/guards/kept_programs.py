"""Keeps the compiled programs of a module, and lets some of them keep memory while idle."""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from torch import nn

from ...reuse import torch_pytree
from ..capture.regions import argument_names, shapes_of
from ..checks.torch_state import have_own_memory
from ..tracing.frames import user_frame
from .guard import Difference, Guard

MAX_PROGRAMS = 32
"""Programs of one module that are kept; others are compiled again when they are needed."""
MAX_LINKED = 256
"""Linked shapes of symbolic programs that are kept: each costs a link only."""
MAX_WITH_ARENAS = 8
"""Of all these, how many keep arenas while idle; others allocate and bind one again."""
SMALL_ARENA = 256 * 1024
"""Bytes of an arena that any may keep while idle, such as those of the lengths of a text."""
MANY_COMPILES = 8
"""From so many compiles of one module on, what keeps changing is worth a word."""

_MAX_NAMED = 3


@dataclass(frozen=True)
class Inputs:
    """Holds the arguments of one call, nested and flat.

    Attributes:
        args, kwargs: what is passed, or of a training step its first micro-batch.
        leaves: the same flat.
        tree: their structure.
        given: what is passed, flat; only of a step another than ``leaves``.
    """

    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    leaves: list[Any]
    tree: torch_pytree.TreeSpec
    given: list[Any]

    @classmethod
    def of(
        cls, leaves: list[Any], tree: torch_pytree.TreeSpec, given: list[Any] | None = None
    ) -> Inputs:
        """Returns the call that has these flat arguments; ``given`` are those of a whole batch."""
        args, kwargs = torch_pytree.unflatten(leaves, tree)
        return cls(args, kwargs, leaves, tree, leaves if given is None else given)


class CompiledRepeatedlyWarning(UserWarning):
    """A module was compiled many times, since something differs from call to call."""


class Entry(Protocol):
    """Holds one program and its guard."""

    guard: Guard
    can_be_linked_again: bool

    @property
    def is_small(self) -> bool:
        """Whether it holds next to no memory while idle."""

    def rest(self) -> None:
        """Gives back the memory that it holds while idle."""


AnyEntry = TypeVar("AnyEntry", bound=Entry)


class KeptPrograms(Generic[AnyEntry]):
    """The programs of one module, the last used first."""

    def __init__(self) -> None:
        self._entries: tuple[AnyEntry, ...] = ()
        self._by_shapes: Mapping[Any, tuple[AnyEntry, ...]] = {}
        self._token: object = None
        self._num_compiles = self._num_dropped = 0
        self._differences: list[Difference] = []

    def __iter__(self) -> Iterator[AnyEntry]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def first(self) -> AnyEntry | None:
        """The program used last, if there is one."""
        return self._entries[0] if self._entries else None

    def fitting(self, leaves: Sequence[Any], tree: torch_pytree.TreeSpec) -> AnyEntry | None:
        """Returns the program that fits a call, and puts it first."""
        entries = self._entries
        if not have_own_memory(leaves):
            return None
        if len(entries) > 1:  # of several, the shapes tell which to ask
            entries = self._by_shapes.get(shapes_of(leaves), ())
        for entry in entries:
            if entry.guard.accepts(leaves, tree):
                if entry is not self.first or entry.guard.token is not self._token:
                    self._put_first(entry)
                return entry
        return None

    def add(self, entry: AnyEntry) -> bool:
        """Puts a new program first; drops those not used for longest.

        Returns:
            Whether as many were dropped as are kept, so that most of what was kept to compile
            further ones has no user any more.
        """
        self._put_first(entry)
        linked = [e for e in self._entries if e.can_be_linked_again]
        others = [e for e in self._entries if not e.can_be_linked_again]
        surplus = {*map(id, linked[MAX_LINKED:]), *map(id, others[MAX_PROGRAMS:])}
        if surplus:
            self._entries = tuple(e for e in self._entries if id(e) not in surplus)
            by_shapes: dict[Any, tuple[AnyEntry, ...]] = {}
            for kept in self._entries:
                shapes = kept.guard.shapes
                by_shapes[shapes] = (*by_shapes.get(shapes, ()), kept)
            self._by_shapes = by_shapes
        self._num_dropped += len(surplus)
        if self._num_dropped < MAX_PROGRAMS:
            return False
        self._num_dropped = 0
        return True

    def warn_if_many(self, model: nn.Module, inputs: Inputs) -> None:
        """Says once, at a further compile, what keeps changing from call to call."""
        self._num_compiles += 1
        if self._num_compiles > MANY_COMPILES:
            return
        if self._entries:
            names = argument_names(model, inputs.args, inputs.kwargs)
            self._differences += self._entries[0].guard.differences(inputs.leaves, names)
        if self._num_compiles == MANY_COMPILES:
            frame = user_frame(sys._getframe(1))
            warnings.warn_explicit(
                f"{type(model).__name__} was compiled {MANY_COMPILES} times, since its calls "
                f"differ: {_summary(self._differences)}. The {MAX_PROGRAMS} programs used last "
                "are kept. Pass a number that keeps changing as a 0-d tensor, keep anything else "
                "the same, or pad sizes to a few.",
                CompiledRepeatedlyWarning,
                *((frame.f_code.co_filename, frame.f_lineno) if frame else ("", 0)),
            )

    def _put_first(self, entry: AnyEntry) -> None:
        rest = [other for other in self._entries if other is not entry]
        shapes = entry.guard.shapes
        alike = (other for other in self._by_shapes.get(shapes, ()) if other is not entry)
        # Replaced, never changed: other threads may be looking through them.
        self._by_shapes = {**self._by_shapes, shapes: (entry, *alike)}
        self._entries, self._token = (entry, *rest), entry.guard.token
        for other in rest[MAX_WITH_ARENAS - 1 : MAX_WITH_ARENAS]:
            if not other.is_small:
                other.rest()
        for other in rest:
            guard = other.guard  # with the token of what fits now, it has those very tensors
            if guard.token is entry.guard.token or guard.is_bound_to_present():
                break  # what was used before it was looked at when it was used
            other.guard.release()
            other.rest()


def _summary(differences: Sequence[Difference]) -> str:
    """Names what differed, most often first, with the values it had."""
    values: dict[str, dict[str, None]] = {}
    for difference in differences:
        shown = values.setdefault(difference.what, {})
        shown.update(dict.fromkeys(filter(None, (difference.before, difference.now))))
    counts = Counter(difference.what for difference in differences)
    texts = []
    for what, _ in counts.most_common(_MAX_NAMED):
        shown_values = ", ".join(values[what])
        texts.append(f"{what} ({shown_values})" if shown_values else what)
    return "; ".join(texts)
