"""Ways of Python to tell two instances apart that no comparison of what they hold can see.

An address, a hash, a weak reference or a function that remembers its results gives another answer
for each object. A block whose code goes such a way is not shared.
"""

from __future__ import annotations

import builtins
import ctypes
import functools
import gc
import pickle
import types
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from .bytecode import globals_read, texts_of

_BUILTINS = ("id", "hash", "dir")
_FUNCTIONS = {id(getattr(builtins, name)): name for name in _BUILTINS}
_MODULES = {id(module): module.__name__ for module in (ctypes, gc, pickle)}
_METHODS = frozenset(
    ("__dir__", "__getattribute__", "__getstate__", "__hash__", "__reduce__", "__reduce_ex__")
)
_WEAK = ("weakref", "_weakrefset")
_LRU_CACHE = type(functools.lru_cache(len))


def way_of(code: types.CodeType, scope: dict[str, Any], owner: Any) -> str:
    """Returns the way by which a function may tell objects apart, or an empty text.

    Args:
        code: the function's.
        scope: its globals.
        owner: its first argument.
    """
    if scope.get("__name__") in _WEAK and code.co_varnames[:1] == ("self",):
        return "weak references"  # no callback of one that died, which runs anywhere
    names, methods = _ways_in(code)
    if not isinstance(owner, nn.Module):  # an object's own lookup: what it holds is compared
        methods = tuple(name for name in methods if name != code.co_name)
    return next((f"{name}()" for name in (*names, *methods) if name not in scope), "")


def way_through(value: Any) -> str:
    """The same for something that a function found outside the model."""
    if id(value) in _FUNCTIONS:
        return f"{_FUNCTIONS[id(value)]}()"
    if id(value) in _MODULES:
        return _MODULES[id(value)]
    if isinstance(value, _LRU_CACHE) and _remembers_models(value):
        return f"{value.__name__}(), which remembers its results"
    return ""


@functools.lru_cache(maxsize=4096)
def _ways_in(code: types.CodeType) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The builtin functions, and the methods, that a function names."""
    found = globals_read(code)
    used = {*code.co_names, *texts_of(code)}
    return tuple(n for n in _BUILTINS if n in found), tuple(sorted(_METHODS & used))


def _remembers_models(function: Any) -> bool:
    """Whether a function that remembers its results was called with a module or a tensor."""
    tables = [found for found in gc.get_referents(function) if type(found) is dict]
    return any(_leads_to_model(table) for table in tables if table is not vars(function))


def _leads_to_model(keys: Iterable[Any]) -> bool:
    return any(
        _leads_to_model(key)
        if isinstance(key, tuple)
        else isinstance(key, (nn.Module, torch.Tensor))
        for key in keys
    )
