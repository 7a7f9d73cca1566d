"""Adapter: the C functions that a forward may call, in groups with a reason for each.

Capture watches Python code, but cannot see what C functions do. One that is not listed here may
read state that changes between calls, or have side effects, so the model runs eagerly. The list has
what transformers, diffusers and timm call, by whole modules and classes if these are pure.
"""

from __future__ import annotations

import random
import types
from collections.abc import Callable
from typing import Any

from ...reuse.evidence.functions import leaks_by_call
from ..tracing.torch_state import is_reading, setting_of

_SHARED = getattr(random.random, "__self__", None)
_OF_RECORDS = frozenset({"logging", "warnings"})
_FOR_RECORDS = _OF_RECORDS | {"threading", "weakref", "traceback", "linecache"}


class Group:
    """Functions of some homes that may be called for one reason: by name, or all ``but`` some.

    Homes are modules and classes; ``"numpy."`` stands for all classes of a module.
    """

    def __init__(self, reason: str, homes: str, names: str = "", but: str = "") -> None:
        self.reason = reason
        self.homes, self.names = frozenset(homes.split()), frozenset(names.split())
        self._but = frozenset(but.split())

    def has(self, home: str, name: str) -> bool:
        """Whether a function belongs to the group."""
        is_named = name in self.names if self.names else name not in self._but
        return is_named and home in self.homes


ALLOWED = (
    Group(
        "computes with tensors: the trace sees each operator",
        "torch torch._C._nn torch._C._fft torch._C._linalg torch._C._special torch._C._sparse "
        "torch._C._nested torch._C.TensorBase",
        but="from_file",
    ),
    Group(
        "return facts of a layout, which the guard compares, or of a dtype",
        "torch.Size torch.dtype torch.device torch.finfo torch.iinfo",
    ),
    Group(
        "tells or sets a mode: each operator of a trace knows its own, and the guard compares them",
        "torch._C",
        "is_grad_enabled _set_grad_enabled is_inference_mode_enabled is_autocast_enabled "
        "is_autocast_cpu_enabled get_autocast_dtype get_autocast_gpu_dtype get_autocast_cpu_dtype "
        "set_autocast_enabled set_autocast_dtype set_autocast_cache_enabled get_default_dtype "
        "autocast_increment_nesting autocast_decrement_nesting clear_autocast_cache "
        "_is_any_autocast_enabled _is_autocast_available",
    ),
    Group(
        "asks for modes under which a model runs eagerly, or for the installation",
        "torch._C",
        "_get_tracing_state _is_tracing _is_torch_function_enabled _log_api_usage_once "
        "_is_flash_attention_available _cuda_isCurrentStreamCapturing",
    ),
    Group(
        "computes with numbers, texts and containers: contents that last are compared and put back",
        "math cmath _operator itertools itertools. _functools functools. _bisect _heapq array. "
        "_collections collections. _struct _struct. _string _sre re. _json unicodedata binascii",
        but="__setstate__ cache_clear cache_info tofile fromfile",
    ),
    Group(
        "is Python itself, and runs what is followed",
        "builtins builtins. _abc types. typing.",
        but="breakpoint input open print send throw asend athrow id hash dir",
    ),
    Group(
        "reads what a snapshot knows (context variables), or who still lives",
        "_contextvars.ContextVar _contextvars.Token _weakref _weakref. weakref.",
    ),
    Group("warns, for a person, to whom once is as good", "_warnings", "warn warn_explicit"),
    Group("asks Python about the run", "sys", "_getframe exc_info intern getsizeof"),
    Group(
        "makes one text of another",
        "posix nt",
        "fspath _path_normpath _path_splitroot_ex _path_splitroot",
    ),
    Group(
        "computes with arrays, whose contents are compared and put back",
        "numpy. numpy.linalg._umath_linalg numpy._core._multiarray_umath._array_converter",
        but="tofile dump dumps setflags __setstate__",
    ),
    Group(
        "makes an array of others",
        "numpy numpy._core._multiarray_umath numpy.core._multiarray_umath",
        "arange array asanyarray asarray ascontiguousarray asfortranarray bincount broadcast "
        "c_einsum can_cast concatenate copyto correlate count_nonzero digitize dot empty "
        "empty_like frombuffer fromiter fromstring inner interp lexsort matmul min_scalar_type "
        "promote_types normalize_axis_index packbits putmask ravel_multi_index result_type "
        "searchsorted unpackbits unravel_index vdot where zeros _array_converter _place",
    ),
    Group(
        "draws numpy's random numbers: whether any were drawn is seen after the run",
        "numpy.random.mtrand. numpy.random._generator. numpy.random.bit_generator. "
        "numpy.random._pcg64. numpy.random._mt19937.",
    ),
)
"""The C functions that a forward may call."""


def reach_of(function: Any, frame: types.FrameType) -> str:
    """Says what a C function may do that a trace would not show, or returns an empty text."""
    owner = function.__self__
    if isinstance(owner, random.Random):  # changes of a generator of the user's are found later
        return "draws from Python's random" if owner is _SHARED else ""
    sets = setting_of(function)
    if sets:
        return f"sets {sets}"
    if is_reading(function) or is_allowed(function) or _makes_a_record(frame):
        return ""
    if function is id and leaks_by_call(frame):  # ``copy`` uses it to find what was copied already
        return ""
    home = homes_of(function)[0]
    return f"calls {home}.{function.__name__}, which may do more than compute,"


def is_allowed(function: Callable[..., Any]) -> bool:
    """Whether a C function is listed."""
    name, homes = function.__name__, homes_of(function)
    return any(group.has(home, name) for group in ALLOWED for home in homes)


def homes_of(function: Any) -> list[str]:
    """Returns the names under which a C function is listed: its module, or its class."""
    owner, name = function.__self__, function.__name__
    if isinstance(owner, types.ModuleType):
        return [owner.__name__]
    if function.__module__ is not None or owner is None:
        return [str(function.__module__)]
    kinds: tuple[type, ...] = owner.__mro__ if isinstance(owner, type) else ()
    found: Any = (vars(kind).get(name) for kind in (*kinds, *type(owner).__mro__))
    home = next((f.__objclass__ for f in found if hasattr(f, "__objclass__")), type(owner))
    return [f"{home.__module__}.{home.__qualname__}", f"{home.__module__}."]


def _makes_a_record(frame: types.FrameType | None) -> bool:
    """Whether a frame makes a log record or warning, whose time and thread no model uses."""
    while frame is not None:
        module = str(frame.f_globals.get("__name__")).partition(".")[0]
        if module not in _FOR_RECORDS:
            return False
        if module in _OF_RECORDS:
            return True
        frame = frame.f_back
    return False
