"""Values that a forward leaves in its arguments and in attributes of modules.

Potentials fill a dictionary that they are given; models keep an intermediate result in an
attribute. Such values are results of the program, and each call writes them to their places. A
place that the forward reads before it writes is state, which this does not support.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from torch import nn

from ...reuse import torch_pytree
from ...reuse.kinds import put_entries

OnContents = Literal["refuse", "keep", "drop"]
"""The ways to treat such values: refuse the forward, write them at each call, or drop them."""

Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
"""The positional and keyword arguments of a call."""


@dataclass(frozen=True)
class ArgumentPlace:
    """A dictionary or list in the arguments, by the path of keys and positions to it."""

    path: tuple[Any, ...]

    def __str__(self) -> str:
        return "a dictionary or list among the arguments"

    def find(self, call: Arguments) -> Any:
        """Returns the caller's object."""
        found: Any = call
        for step in self.path:
            found = found[step]
        return found

    def put(self, call: Arguments, content: Any) -> None:
        """Gives the caller's object the content that the forward would leave, in-place."""
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
        """Sets the attribute."""
        # Without ``__setattr__``, which may be the module's own and have other effects.
        vars(self.module)[self.name] = content


Place: TypeAlias = ArgumentPlace | AttributePlace  # where a forward leaves a value


@dataclass(frozen=True)
class Kept:
    """The places that a call writes to; ``returned`` is the argument that it returns, if one."""

    places: tuple[Place, ...] = ()
    returned: ArgumentPlace | None = None

    def __bool__(self) -> bool:
        return bool(self.places) or self.returned is not None

    @property
    def has_arguments(self) -> bool:
        """Whether a place is in the arguments."""
        return any(isinstance(p, ArgumentPlace) for p in (*self.places, self.returned))

    def why_not(self, call: Arguments, is_held: Callable[[Any], bool]) -> str:
        """Returns why a call's arguments cannot be filled: they are shared; "" if they can."""
        parts = torch_pytree.changeable_parts(call) if self.has_arguments else []
        if len(set(map(id, parts))) < len(parts) or any(map(is_held, parts)):
            return "it fills a dictionary or list that is given twice, or that the model holds"
        return ""


NOTHING_KEPT = Kept()


class GivenContainers:
    """The dictionaries and lists in a call's arguments, with their content before the run."""

    def __init__(self, call: Arguments) -> None:
        self._before = [(path, held, held.copy()) for path, held in _containers(call)]

    def put_back(self) -> list[tuple[ArgumentPlace, Any]]:
        """Undoes the forward's changes; returns the changed places with their new content."""
        changed = []
        for path, held, before in self._before:
            content = held.copy()
            if not same_entries(content, before):
                changed.append((ArgumentPlace(path), content))
                ArgumentPlace(()).put(held, before)
        return changed

    def place_of(self, result: Any) -> ArgumentPlace | None:
        """Returns the place of the container that the forward returns, if it returns one."""
        found = (ArgumentPlace(path) for path, held, _ in self._before if held is result)
        return next(found, None)


def _containers(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yields the plain dictionaries and lists in arguments, except that of keyword arguments."""
    if type(value) not in (dict, list, tuple):
        return
    if type(value) is not tuple and path != (1,):
        yield path, value
    pairs = value.items() if type(value) is dict else enumerate(value)
    for step, inner in pairs:
        yield from _containers(inner, (*path, step))


def same_entries(now: Any, before: Any) -> bool:
    """Whether two dictionaries, or two lists, have the same objects as entries, in their order."""
    if len(now) != len(before):
        return False
    if isinstance(now, Mapping):
        return [*now] == [*before] and all(map(operator.is_, now.values(), before.values()))
    return all(map(operator.is_, now, before))
