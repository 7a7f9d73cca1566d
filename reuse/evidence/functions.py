"""The functions that ran: what their code names, what they captured, how they tell objects apart.

A running frame shows only its code object, which several functions may share, each with variables
of its own. After it returns, ``gc.get_referents(frame)`` shows the function (Python 3.11 and
later), so frames are held until then. On 3.10 functions are searched for by their code. A function
that is gone when the run ends, such as a comprehension, does not matter: nobody can call it again.

``id``, ``hash``, a weak reference or a function that caches its results gives another result for
each object, even for equal ones, so no comparison of contents can stand for it. A forward that uses
one runs eagerly.
"""

from __future__ import annotations

import builtins
import ctypes
import dis
import functools
import gc
import pickle
import types
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from ..errors import CaptureError

# In a class body's scope of annotations, since Python 3.12, a global has an instruction of its own.
_LOADS = frozenset(["LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"])
_STORES = frozenset(["STORE_GLOBAL"])
_ATTRIBUTE_STORES = frozenset(["STORE_ATTR", "DELETE_ATTR"])
_CAPTURED_STORES = frozenset(["STORE_DEREF", "DELETE_DEREF"])


def globals_read(code: types.CodeType) -> tuple[str, ...]:
    """Returns the names that a function looks up among its globals or the builtins."""
    return _arguments(code, _LOADS)


def globals_used(code: types.CodeType) -> tuple[str, ...]:
    """Returns the names that a function reads or sets among its globals."""
    used = _arguments(code, _LOADS | _STORES)
    return tuple(name for name in used if name[0] != "@")  # pytest adds such to an ``assert``


def modules_imported(code: types.CodeType) -> tuple[str, ...]:
    """Returns the names of the modules that a function imports."""
    return _arguments(code, frozenset(["IMPORT_NAME"]))


@functools.lru_cache(maxsize=4096)
def captured_set(code: types.CodeType) -> frozenset[str]:
    """Returns the captured variables that a function, or one that it makes, sets (``nonlocal``).

    An assignment to ``cell_contents`` may set those of any function.
    """
    names = set(_arguments(code, _CAPTURED_STORES))
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            names |= captured_set(inner)
    by_cell = {"cell_contents"}.intersection(_arguments(code, _ATTRIBUTE_STORES))
    return frozenset(by_cell | names.intersection((*code.co_freevars, "cell_contents")))


def texts_of(code: types.CodeType) -> list[str]:
    """Returns the strings in a function: names for ``getattr``, ``globals()[...]`` and the like."""
    return list(_texts_in(code.co_consts))


def _texts_in(constants: Iterable[Any]) -> Iterator[str]:
    for constant in constants:
        if type(constant) is str:
            yield constant
        # Versions of Python differ in which strings they put into tuples: of a loop, say, or the
        # keys of a dictionary.
        elif type(constant) in (tuple, frozenset):
            yield from _texts_in(constant)


@functools.lru_cache(maxsize=8192)
def _arguments(code: types.CodeType, names: frozenset[str]) -> tuple[str, ...]:
    found = (i.argval for i in dis.get_instructions(code) if i.opname in names)
    return tuple(dict.fromkeys(found))


# Builtins that tell equal objects apart, or show attributes without reading them one by one.
_BUILTINS = ("id", "hash", "dir")
# ``type`` under any name, or a module that has it: it shows the class of a traced tensor.
_LEAKS = {
    **dict.fromkeys((id(type), id(builtins)), "type() under another name, or builtins"),
    **{id(getattr(builtins, name)): f"{name}()" for name in _BUILTINS},
    **{id(module): module.__name__ for module in (ctypes, gc, pickle)},
}
_METHODS = frozenset(
    ("__dir__", "__getattribute__", "__getstate__", "__hash__", "__reduce__", "__reduce_ex__")
)
_LOOKUPS = frozenset(("__getattribute__", "__getattr__", "__setattr__", "__delattr__"))
_WEAK = ("weakref", "_weakrefset")
_DISPATCH = functools.singledispatch(len).dispatch.__code__
_LRU_CACHE = type(functools.lru_cache(len))


def leaks_by_call(frame: types.FrameType) -> bool:
    """Whether a function tells objects apart only for some callers and arguments."""
    return frame.f_globals.get("__name__") in (*_WEAK, "copy")


def identity_leak_of(frame: types.FrameType, owner: Any) -> str:
    """Names what a function starting on ``owner`` uses that tells equal objects apart, or ""."""
    code, scope = frame.f_code, frame.f_globals
    if scope.get("__name__") == "copy":  # it uses addresses only as keys of what it has copied
        is_whole = any(isinstance(value, nn.Module) for value in frame.f_locals.values())
        return "a copy of a module" if is_whole else ""
    if leaks_by_call(frame) and code.co_varnames[:1] == ("self",):
        # Neither the callback of a dead reference, which runs at any time, nor singledispatch,
        # which finds a function by a class.
        is_dispatch = frame.f_back is not None and frame.f_back.f_code is _DISPATCH
        return "" if is_dispatch else "weak references"
    names = _leaks_in(code)
    if code.co_name in _LOOKUPS and not isinstance(owner, nn.Module):
        names = ()  # an object's own lookup: what it holds is compared
    return next((f"{name}()" for name in names if name not in scope), "")


def identity_leak_through(value: Any) -> str:
    """Does the same for a value that a function found outside the model."""
    if isinstance(value, _LRU_CACHE) and _remembers_models(value):
        return f"{value.__name__}(), which remembers its results"
    return _LEAKS.get(id(value), "")


@functools.lru_cache(maxsize=4096)
def _leaks_in(code: types.CodeType) -> tuple[str, ...]:
    """Returns the builtin functions, and the methods, that a function names."""
    found, used = globals_read(code), {*code.co_names, *texts_of(code)}
    return (*(name for name in _BUILTINS if name in found), *sorted(_METHODS & used))


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


# A frame keeps its variables alive, tensors among them, so only so many are held.
_MAX_FRAMES = 64


class Closures:
    """Finds the functions that frames ran, without keeping the frames."""

    def __init__(self) -> None:
        self._frames: list[types.FrameType] = []
        self._codes: dict[int, types.CodeType] = {}
        self._found: dict[int, weakref.ref[types.FunctionType]] = {}

    def ran(self, frame: types.FrameType) -> None:
        """Notes a frame that has just begun."""
        self._frames.append(frame)
        if len(self._frames) > _MAX_FRAMES:
            self.release()
        if len(self._frames) > _MAX_FRAMES:  # all still run: keep their code instead
            self._codes.update(_codes_of(self._frames))
            self._frames = []

    def functions(self) -> list[types.FunctionType]:
        """Returns the functions of all frames noted; CaptureError if ``gc.freeze`` hides one."""
        self.release()
        wanted = {**self._codes, **_codes_of(self._frames)}
        if wanted:
            self._find_by_code(wanted)
        return [function for found in self._found.values() if (function := found()) is not None]

    def absorb(self, later: Closures) -> None:
        """Adds what another record noted later."""
        later.release()
        self._frames += later._frames
        self._codes.update(later._codes)
        self._found.update(later._found)
        self.release()

    def release(self) -> None:
        """Drops the frames that have ended, which keep their variables alive."""
        running = []
        for frame in self._frames:
            function = _function_of(frame)
            if function is None:
                running.append(frame)
            else:
                self._found[id(function)] = weakref.ref(function)
        self._frames = running

    def _find_by_code(self, wanted: dict[int, types.CodeType]) -> None:
        """Finds functions by their code, for frames that still run, as those of generators."""
        # This searches every object of the process: once for all codes, and only for these frames.
        for function in gc.get_referrers(*wanted.values()):
            if isinstance(function, types.FunctionType) and id(function.__code__) in wanted:
                self._found[id(function)] = weakref.ref(function)
        alive = [function for found in self._found.values() if (function := found()) is not None]
        known = {id(function.__code__) for function in alive}
        lost = [code for number, code in wanted.items() if number not in known]
        if lost and gc.get_freeze_count():
            raise CaptureError(
                f"The captured variables of {lost[0].co_name} ({lost[0].co_filename}:"
                f"{lost[0].co_firstlineno}) cannot be watched: gc.freeze() hides the function. "
                "Call gc.unfreeze() before the model is compiled."
            )


def _codes_of(frames: Iterable[types.FrameType]) -> dict[int, types.CodeType]:
    return {id(frame.f_code): frame.f_code for frame in frames}


def _function_of(frame: types.FrameType) -> types.FunctionType | None:
    """Returns the function that an ended frame ran: the frame may refer to others, too."""
    for found in gc.get_referents(frame):
        if isinstance(found, types.FunctionType) and found.__code__ is frame.f_code:
            return found
    return None
