"""Questions that a forward asked and that the guard asks again at each call."""

from __future__ import annotations

import abc
import gc
import logging
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import CodeType
from typing import Any

from ...reuse.freeze import Identity

Reading = Callable[[], Any]
ONCE = ("default", "module", "once")
"""The actions of filters that show a warning once."""

_MAX_HELD = 32


@dataclass(frozen=True)
class Asked:
    """A call of a function of the standard library, whose result the guard compares."""

    function: Callable[..., Any]
    args: tuple[Any, ...]

    def __call__(self) -> Any:
        """Asks again."""
        return self.function(*self.args)


@dataclass(frozen=True, eq=False)
class _Registry:
    """Holds the warnings that a module's lines have given."""

    table: dict[Any, Any]


@dataclass(frozen=True)
class IsWarned:
    """Whether a warning would be shown: mostly only the first time, at each line."""

    text: str
    category: type[Warning]
    module: str
    file: str
    line: int
    registry: _Registry

    def give(self, message: Any) -> None:
        """Gives the warning, as its line would."""
        place = (self.category, self.file, self.line, self.module, self.registry.table)
        warnings.warn_explicit(message, *place)

    def action(self) -> str:
        """Returns what the filters say of it: shown always, once, never, or raised."""
        for action, message, category, module, line in warnings.filters:
            if (
                (message is None or message.match(self.text))
                and issubclass(self.category, category)
                and (module is None or module.match(self.module))
                and line in (0, self.line)
            ):
                return action
        return warnings.defaultaction  # type: ignore[attr-defined,no-any-return]

    def __call__(self) -> bool:
        """Asks again."""
        action, text = self.action(), (self.text, self.category)
        once = warnings.onceregistry  # type: ignore[attr-defined]
        known = (*text, self.line) in self.registry.table or (*text, 0) in self.registry.table
        return action != "ignore" and not (
            action in ONCE and (known or (action == "once" and text in once))
        )


def warned_at(frame: Any, level: int, text: str, category: type[Warning]) -> IsWarned:
    """Returns whether a warning is shown for a line of code: of a frame's caller, from level 2."""
    while level > 1 and frame is not None:
        frame, level = frame.f_back, level - 1
    scope = vars(sys) if frame is None else frame.f_globals
    file, line = ("sys", 1) if frame is None else (frame.f_code.co_filename, frame.f_lineno)
    registry = _Registry(scope.setdefault("__warningregistry__", {}))
    return IsWarned(text, category, str(scope.get("__name__") or "<string>"), file, line, registry)


@dataclass(frozen=True)
class CacheState:
    """The results that a function cache keeps: a hit runs no body, so nothing is read."""

    cache: Any

    def __call__(self) -> tuple[Any, ...]:
        """Returns how much was computed and, of a small cache, the results."""
        info = self.cache.cache_info()
        held = gc.get_referents(self.cache) if info.currsize <= _MAX_HELD else []
        for table in [x for x in held if type(x) is dict]:
            held += table.values()
        order = sorted(held, key=id)
        return (info.misses, info.currsize, tuple(map(Identity, order)))


_is_logged = logging.Logger.isEnabledFor
ASKED_IN_PYTHON: Mapping[CodeType, Callable[..., Reading]] = {
    # Whether a class counts as derived from an abstract one: ``register`` may change that.
    abc.ABCMeta.__instancecheck__.__code__: lambda cls, instance: _derives(type(instance), cls),
    abc.ABCMeta.__subclasscheck__.__code__: lambda cls, subclass: _derives(subclass, cls),
    _is_logged.__code__: lambda self, level: Asked(_is_logged, (self, level)),
}
"""Functions of Python's own that tell something, and what asks it again, given their arguments."""


def _derives(kind: type, base: type) -> Reading:
    return Asked(issubclass, (kind, base))
