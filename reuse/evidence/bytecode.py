"""What the compiled code of a function names: globals, modules that it imports, texts."""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Iterable, Iterator
from typing import Any

# In a class body's scope of annotations, since Python 3.12, a global has an instruction of its own.
_LOADS = frozenset(["LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"])
_STORES = frozenset(["STORE_GLOBAL"])


@functools.lru_cache(maxsize=4096)
def globals_read(code: types.CodeType) -> tuple[str, ...]:
    """Returns the names that a function looks up among its globals or the builtins."""
    return _arguments(code, _LOADS)


@functools.lru_cache(maxsize=4096)
def globals_used(code: types.CodeType) -> tuple[str, ...]:
    """Returns the names that a function reads or sets among its globals."""
    return _arguments(code, _LOADS | _STORES)


@functools.lru_cache(maxsize=4096)
def modules_imported(code: types.CodeType) -> tuple[str, ...]:
    """Returns the names of the modules that a function imports."""
    return _arguments(code, frozenset(["IMPORT_NAME"]))


def texts_of(code: types.CodeType) -> list[str]:
    """Returns the texts in a function: names for ``getattr``, ``globals()[...]`` and the like.

    Which of them stand in tuples (those that a loop runs over, the keys of a dictionary) depends
    on the version of Python.
    """
    return list(_texts_in(code.co_consts))


def _texts_in(constants: Iterable[Any]) -> Iterator[str]:
    for constant in constants:
        if type(constant) is str:
            yield constant
        elif type(constant) in (tuple, frozenset):
            yield from _texts_in(constant)


def _arguments(code: types.CodeType, names: frozenset[str]) -> tuple[str, ...]:
    found = (i.argval for i in dis.get_instructions(code) if i.opname in names)
    return tuple(dict.fromkeys(found))
