"""Adapter: PyTorch's own settings, found by a rule, so that those of later versions are found too.

A setting has a getter without arguments and a setter whose name has the same words, in C
(``_get_cudnn_benchmark``, ``_set_cudnn_benchmark``) or in the Python of ``torch.backends``.
"""

from __future__ import annotations

import abc
import contextlib
import enum
import functools
import gc
import inspect
import logging
import re
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from ...reuse.freeze import Identity
from ...reuse.kinds import ABSENT
from ..checks.torch_state import default_device

_GETTER, _SETTER = re.compile(r"_?(get|is|are)_"), re.compile(r"_?set_")
_NO_WORDS = frozenset({"get", "set", "is", "are", "use", "enabled", "preferred"})
_PYTHONS = ("torch.backends.", "torch.__future__")
_PLAIN = (bool, int, float, str, tuple, list, torch.dtype, torch.device, enum.Enum, type(None))
_IS_BUILTIN = types.BuiltinFunctionType
# Facts about the installation, and states that differ inside a tracer or compiler.
_FIXED = re.compile(r"_?is_(\w*available|built|\w*compiling|\w*exporting|in_bad_fork)$")
_NO_SETTINGS = ("torch._", "torch.fx", "torch.jit", "torch.compiler", "torch.utils", "torch.export")
_VARIABLE = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS
# Settings that a forward may change, as by ``torch.no_grad()``, autocast and sdpa_kernel: each node
# of a trace records them, or they only choose among equivalent kernels.
_FOLLOWED = re.compile(r"_?set_((grad|multithreading)_enabled|autocast_\w+|sdp_\w+)$")
# Set by the tracer, or off while a model is captured: a forward that reads one runs eagerly.
_OURS = frozenset({"_get_torch_function_state", "_get_tracing_state", "_get_graph_exec_group"}) | {
    "is_anomaly_enabled",
    "is_anomaly_check_nan_enabled",
    "is_autocast_cache_enabled",
}


@contextmanager
def plain_autograd() -> Iterator[None]:
    """Turns off anomaly mode and saved-tensor hooks inside."""
    with contextlib.ExitStack() as stack:
        if torch.is_anomaly_enabled():
            stack.enter_context(torch.autograd.set_detect_anomaly(False))
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)
            stack.enter_context(hooks)  # the innermost hooks count
        yield


class Settings(NamedTuple):
    """The settings of PyTorch."""

    getters: frozenset[str]  # names of the getters in C
    setters: frozenset[str]  # names of the setters in C whose effect a trace would not record
    names: frozenset[str]  # all these names, and those of a random generator's methods
    # Name, getter, and (if known) setter of each setting.
    all: tuple[tuple[str, Callable[[], Any], Callable[[Any], Any] | None], ...]


@functools.cache
def settings() -> Settings:
    """Returns PyTorch's settings, searched for once."""
    own: Any = torch._C
    setters = [n for n in dir(own) if _SETTER.match(n) and isinstance(getattr(own, n), _IS_BUILTIN)]
    found: list[tuple[str, Callable[[], Any], Callable[[Any], Any] | None]] = []
    for name in filter(_GETTER.match, dir(own)):
        is_cast = "autocast" in name and "cache" not in name  # guards compare these per device
        named = [s for s in setters if _words(s) and _words(s) <= _words(name)]
        if named and not is_cast and name not in _OURS and _answers(getattr(own, name)):
            same = [getattr(own, s) for s in named if _words(s) == _words(name)]
            found.append((name, getattr(own, name), same[0] if same else None))
    getters = frozenset(name for name, *_ in found)
    found += [("the default device", default_device, torch.set_default_device), *_of_python()]
    hidden = frozenset(s for s in setters if not _FOLLOWED.match(s))
    of_generators = {name for name in vars(torch.Generator) if name[0] != "_"} - {"device"}
    return Settings(getters, hidden, getters | hidden | of_generators, tuple(found))


def _words(name: str) -> frozenset[str]:
    return frozenset(name.strip("_").split("_")) - _NO_WORDS


def _answers(getter: Any) -> bool:
    """Whether a function takes no arguments and returns plain data."""
    try:
        with warnings.catch_warnings():
            # A getter that warns is excluded: the guard would make it warn at each call.
            warnings.simplefilter("error")
            return isinstance(getter, _IS_BUILTIN) and isinstance(getter(), _PLAIN)
    except (TypeError, RuntimeError, Warning):
        return False


def _of_python() -> Iterator[tuple[str, Callable[[], Any], Callable[[Any], Any]]]:
    for module_name, module in list(sys.modules.items()):
        if not module_name.startswith(_PYTHONS):
            continue
        held = vars(getattr(module, "m", module))  # a module whose settings are attributes
        for name, getter in list(held.items()):
            setter = held.get(name.replace("get_", "set_", 1))
            is_getter = isinstance(getter, types.FunctionType) and _takes_nothing(getter.__code__)
            if is_getter and setter is not getter and callable(setter):
                yield f"{module_name}.{name}", getter, setter


def _takes_nothing(code: types.CodeType) -> bool:
    takes = code.co_argcount + code.co_kwonlyargcount or code.co_flags & _VARIABLE
    return not takes


def may_ask(frame: types.FrameType) -> bool:
    """Whether a frame runs a public PyTorch function, which may use a setting for the model."""
    name = str(frame.f_globals.get("__name__"))
    is_own = name.startswith(_NO_SETTINGS) and name != "torch.__future__"
    return name.partition(".")[0] == "torch" and not is_own


def python_getter(frame: types.FrameType) -> Callable[[], Any] | None:
    """Returns the function that a frame of PyTorch's runs, if it only returns a setting."""
    code = frame.f_code
    is_getter = _GETTER.match(code.co_name) and not _FIXED.match(code.co_name)
    found = frame.f_globals.get(code.co_name) if is_getter and _takes_nothing(code) else None
    return found if getattr(found, "__code__", None) is code else None


def setting_of(function: Any) -> str:
    """Names the setting that a C function changes, or ``""`` if none or if a trace records it."""
    if function.__self__ is not torch._C or function.__name__ not in settings().setters:
        return ""
    return f"PyTorch's {function.__name__.strip('_')[4:].replace('_', ' ')}"


def is_reading(function: Any) -> bool:
    """Whether a C function returns a setting, which the guard can read again."""
    return function.__self__ is torch._C and function.__name__ in settings().getters


def answer(getter: Callable[[], Any]) -> Any:
    """Reads a setting; returns ABSENT if its value cannot be compared."""
    found = getter()
    # Autocast reads the stack of modes, which has those of the tracer on it.
    has_modes = isinstance(found, list) and any(isinstance(x, TorchFunctionMode) for x in found)
    return found if isinstance(found, _PLAIN) and not has_modes else ABSENT


@contextmanager
def settings_restored(refuse: Callable[[str], None]) -> Iterator[None]:
    """Restores settings that are changed inside, and calls ``refuse`` with the name of one."""
    before = [(name, getter, put, _read_setting(getter)) for name, getter, put in settings().all]
    changed = ""
    try:
        yield
    finally:
        for name, getter, put, value in before:
            if _read_setting(getter) != value:
                changed = name
                if put is not None and value is not ABSENT:
                    put(value)
    if changed:
        refuse(changed)


def _read_setting(getter: Callable[[], Any]) -> Any:
    """Reads a setting; ABSENT if PyTorch raises, as an old getter does after a new setter."""
    try:
        return getter()
    except RuntimeError:
        return ABSENT


Reading = Callable[[], Any]

_MAX_HELD = 32


@dataclass(frozen=True)
class Asked:
    """A call of a standard library function, whose result the guard compares."""

    function: Callable[..., Any]
    args: tuple[Any, ...]

    def __call__(self) -> Any:
        """Calls the function again."""
        return self.function(*self.args)


@dataclass(frozen=True)
class CacheState:
    """The state of an ``lru_cache``, because a hit runs no body whose reads could be compared."""

    cache: Any

    def __call__(self) -> tuple[Any, ...]:
        """Returns the counts of misses and entries and, for a small cache, its contents."""
        info = self.cache.cache_info()
        held = gc.get_referents(self.cache) if info.currsize <= _MAX_HELD else []
        for table in [x for x in held if type(x) is dict]:
            held += table.values()
        order = sorted(held, key=id)
        return (info.misses, info.currsize, tuple(map(Identity, order)))


_is_logged = logging.Logger.isEnabledFor
ASKED_IN_PYTHON: Mapping[CodeType, Callable[..., Reading]] = {
    # ``register`` may change whether a class is a subclass of an abstract one.
    abc.ABCMeta.__instancecheck__.__code__: lambda cls, instance: _derives(type(instance), cls),
    abc.ABCMeta.__subclasscheck__.__code__: lambda cls, subclass: _derives(subclass, cls),
    _is_logged.__code__: lambda self, level: Asked(_is_logged, (self, level)),
}
"""By the code of a standard library function: makes the reading that calls it again."""


def _derives(kind: type, base: type) -> Reading:
    return Asked(issubclass, (kind, base))
