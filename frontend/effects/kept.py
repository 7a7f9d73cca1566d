"""Leaves in arguments and modules, at each call, the contents that the forward leaves there.

Potentials fill the dictionary that they are given, and return it; models keep what they computed in
an attribute, for who looks at it later. Such contents are results of the program like others. Each
has a place, and a call puts it there. A place that the forward reads before it writes is state, and
no such place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from torch import nn

from ...reuse import torch_pytree
from ...reuse.kinds import put_entries

OnContents = Literal["refuse", "keep", "drop"]
"""Refuses a forward that leaves something, has each call leave it, or leaves it out (of a step)."""

Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments, as they are passed."""


@dataclass(frozen=True)
class ArgumentPlace:
    """A dictionary or list among the arguments: the keys and positions that lead to it."""

    path: tuple[Any, ...]

    def __str__(self) -> str:
        return "a dictionary or list among the arguments"

    def find(self, call: Arguments) -> Any:
        """Returns the caller's own."""
        found: Any = call
        for step in self.path:
            found = found[step]
        return found

    def put(self, call: Arguments, content: Any) -> None:
        """Makes the caller's own hold what the forward's would."""
        # In place: the caller goes on with the very object that it passed.
        found = self.find(call)
        if type(found) is list:
            found[:] = content
        else:
            put_entries(found, content)


@dataclass(frozen=True, eq=False)
class AttributePlace:
    """An attribute of a module."""

    module: nn.Module
    name: str

    def __str__(self) -> str:
        return f"attribute {self.name!r} of {type(self.module).__name__}"

    def put(self, call: Arguments, content: Any) -> None:
        """Sets it."""
        # Past ``__setattr__``: what a module's own does beside it, it did in the capture.
        vars(self.module)[self.name] = content


Place: TypeAlias = ArgumentPlace | AttributePlace
"""Where contents are left."""


@dataclass(frozen=True)
class Kept:
    """Holds the places that a call fills besides returning a result.

    Attributes:
        places: where contents are left, in their order.
        returned: the argument that is the result, if it is one.
    """

    places: tuple[Place, ...] = ()
    returned: ArgumentPlace | None = None

    def __bool__(self) -> bool:
        return bool(self.places) or self.returned is not None

    @property
    def has_arguments(self) -> bool:
        """Whether it is about something that a call is given."""
        return any(isinstance(p, ArgumentPlace) for p in (*self.places, self.returned))

    def why_not(self, call: Arguments, is_held: Callable[[Any], bool]) -> str:
        """Returns why a call's arguments are more than its own; "" if they are not."""
        parts = torch_pytree.changeable_parts(call) if self.has_arguments else []
        if len(set(map(id, parts))) < len(parts) or any(map(is_held, parts)):
            return "it fills a dictionary or list that is given twice, or that the model holds"
        return ""


NOTHING_KEPT = Kept()


class GivenContainers:
    """The dictionaries and lists that a forward is given, as they were before it ran."""

    def __init__(self, call: Arguments) -> None:
        self._before = [(path, held, _shallow(held)) for path, held in _containers(call)]

    def put_back(self) -> list[tuple[ArgumentPlace, Any]]:
        """Undoes what the forward has changed; returns it."""
        changed = []
        for path, held, before in self._before:
            content = _shallow(held)
            if not _is_same(content, before):
                changed.append((ArgumentPlace(path), content))
                ArgumentPlace(()).put(held, before)
        return changed

    def place_of(self, result: Any) -> ArgumentPlace | None:
        """Returns the place of the one that the forward returns, if it does."""
        found = (ArgumentPlace(path) for path, held, _ in self._before if held is result)
        return next(found, None)


def _containers(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yields plain dictionaries and lists in a structure, but for that of keyword arguments."""
    if type(value) not in (dict, list, tuple):
        return
    if type(value) is not tuple and path != (1,):
        yield path, value
    pairs = value.items() if type(value) is dict else enumerate(value)
    for step, inner in pairs:
        yield from _containers(inner, (*path, step))


def _shallow(container: Any) -> Any:
    return list(container) if type(container) is list else dict(container)


def _is_same(now: Any, before: Any) -> bool:
    """Whether the entries are the same objects, in their order."""
    if type(now) is dict and [*now] != [*before]:
        return False
    held: Sequence[Any] = [*now.values()] if type(now) is dict else now
    was: Sequence[Any] = [*before.values()] if type(before) is dict else before
    return len(held) == len(was) and all(a is b for a, b in zip(held, was, strict=True))
