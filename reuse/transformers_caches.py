"""What transformers names its caches of keys and values. This module alone says those names.

A cache (``DynamicCache``, ``StaticCache``, ``EncoderDecoderCache``) is a plain Python object that
holds tensors, and that a model changes in place. It is known by its class, once the user's code has
imported transformers; nothing is imported or registered here.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

_MODULE = "transformers.cache_utils"
_GROWING = ("DynamicLayer", {"keys": -2, "values": -2, "cumulative_length": -1})
_BASES = ("Cache", "CacheLayerMixin", "LinearAttentionCacheLayerMixin", "DummyLayer")
_COUNTS = ("cumulative_length", "cumulative_length_int")


def cache_classes() -> tuple[type, ...]:
    """Returns what caches and their layers derive from; nothing before transformers is there."""
    module = sys.modules.get(_MODULE)
    return () if module is None else _classes_of(module)


@lru_cache(maxsize=1)
def _classes_of(module: Any) -> tuple[type, ...]:
    found = (getattr(module, name, None) for name in _BASES)
    return tuple(cls for cls in found if isinstance(cls, type))


def growing_dims(kind: type) -> Mapping[str, int]:
    """Returns the attributes of a container that grow from call to call: tensors, and where.

    A whole number, as layers with a window count what came so far, is one dimension.
    """
    module = sys.modules.get(_MODULE)
    name, dims = _GROWING
    base = None if module is None else getattr(module, name, None)
    return dims if isinstance(base, type) and issubclass(kind, base) else {}


def is_count(kind: type, name: Any) -> bool:
    """Whether an attribute of a container counts what came so far, if it is a whole number.

    What transformers does with it is known: arithmetic and comparisons.
    """
    return name in _COUNTS and issubclass(kind, cache_classes())
