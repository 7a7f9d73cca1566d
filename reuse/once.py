"""Results that an object computes once for equal arguments, and keeps as long as it lives."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

Method = TypeVar("Method", bound=Callable[..., Any])


def once(method: Method) -> Method:
    """Makes a method compute each result once; its object keeps it, by the other arguments."""
    table = f"_{method.__name__}_once"

    @wraps(method)
    def kept(self: Any, *args: Any, **named: Any) -> Any:
        known = vars(self).setdefault(table, {})
        key = (args, *named.items()) if named else args
        if key not in known:
            known[key] = method(self, *args, **named)
        return known[key]

    return cast("Method", kept)
