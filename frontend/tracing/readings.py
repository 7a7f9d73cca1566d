"""What a forward was told and can be asked again at each call: the guard compares the answers."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Reading = Callable[[], Any]

_MAX_HELD = 32


@dataclass(frozen=True)
class IsSubclass:
    """Whether a class counts as derived from an abstract one; ``register`` may change that."""

    kind: type
    base: type

    def __call__(self) -> bool:
        """Asks again."""
        return issubclass(self.kind, self.base)


@dataclass(frozen=True)
class CacheState:
    """What a function cache keeps: what is found there runs no body, so nothing is read."""

    cache: Any

    def __call__(self) -> tuple[Any, ...]:
        """Returns how much was computed and, of a small cache, the very results."""
        info = self.cache.cache_info()
        held = gc.get_referents(self.cache) if info.currsize <= _MAX_HELD else []
        for table in [x for x in held if type(x) is dict]:
            held += table.values()
        order = sorted(held, key=id)
        return (info.misses, info.currsize, tuple(map(_Same, order)))


class _Same:
    """Compares an object by identity, and keeps it so that no other gets its number."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other._value is self._value

    def __hash__(self) -> int:
        return id(self._value)
