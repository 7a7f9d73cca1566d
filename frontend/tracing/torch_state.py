"""Adapter: states that a compiled program depends on: modes, tensor classes, memory, layouts.

Modes and tensor subclasses intercept operators, but the kernels of a program bypass the dispatcher.

PyTorch's C++ guards read the strides of a tensor, which crashes if it has no strided storage, and
kernels would get address 0. Such tensors are recognized by their dispatch keys: a tensor with any
key that is not in the list of allowed keys is refused.

PyTorch's settings are found by a rule, so that those of later versions are found too. A setting has
a getter without arguments and a setter whose name has the same words, in C
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
import operator
import re
import sys
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch._C._dynamo.guards import GlobalStateGuard, TensorGuards
from torch.distributions import Distribution
from torch.fx._symbolic_trace import is_fx_symbolic_tracing
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext

from ...reuse.errors import LazyInlineError, PlanError
from ...reuse.freeze import Identity
from ...reuse.ir.leaf import current_autocast
from ...reuse.kinds import ABSENT
from ...reuse.torch_names import is_lazy, matmul_precision, own_device_type


def mode_around() -> str:
    """Returns the mode around a call that intercepts operators, or an empty text."""
    if torch._C._len_torch_dispatch_stack():
        return "a TorchDispatchMode"
    # PyTorch implements the default device as such a mode, but a guard compares it as a setting.
    if torch._C._len_torch_function_stack() and not all(_is_device(m) for m in _function_modes()):
        return "a TorchFunctionMode"
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "a transform of torch.func"
    if torch.autograd.forward_ad._current_level >= 0:
        return "forward-mode differentiation"
    if torch._C._get_tracing_state() is not None:
        return "torch.jit.trace"
    if is_fx_symbolic_tracing():
        return "torch.fx.symbolic_trace"
    if torch.nn.utils.parametrize._cache_enabled:  # values that calls hand on to each other
        return "torch.nn.utils.parametrize.cached()"
    return ""


def autograd_mode_around() -> str:
    """Returns the mode around a call that intercepts autograd's backward, or an empty text."""
    if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
        return "a pair of hooks on saved tensors"
    if torch.is_anomaly_enabled():
        return "anomaly detection"
    return ""


def is_in_checkpoint() -> bool:
    """Whether a non-reentrant checkpoint runs, for the first time or again in the backward."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks is not None and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"


def refuse_mode(mode: str, error: type[LazyInlineError] = PlanError) -> None:
    """Raises an error if ``mode`` names a mode, for code that can only run kernels."""
    if mode:
        raise error(
            f"{mode} is active, and the kernels of a compiled step bypass it. Call the model "
            "itself inside, or the step outside."
        )


def why_watched(values: Iterable[Any]) -> str:
    """Describes a tensor among values whose class intercepts operators, or returns ""."""
    # Such a class may compute anything and return results of its own class. Kernels would read its
    # storage, which may be empty or hold something else.
    kinds = {type(value) for value in values if isinstance(value, torch.Tensor)}
    watching = [kind for kind in kinds if kind is not torch.Tensor and _watches(kind)]
    return f"a {watching[0].__name__}, whose class intercepts operators" if watching else ""


def _watches(kind: type[torch.Tensor]) -> bool:
    plain_function: Any = torch._C._disabled_torch_function_impl
    return kind.__torch_function__ is not plain_function or _sees_below_autograd(kind)


def _sees_below_autograd(kind: type[torch.Tensor]) -> bool:
    plain_dispatch: Any = torch._C._disabled_torch_dispatch_impl
    return kind.__torch_dispatch__ is not plain_dispatch


def plain_cotangent(gradient: torch.Tensor) -> torch.Tensor:
    """Returns a cotangent as a plain tensor, as autograd skips ``__torch_function__`` too."""
    kind = type(gradient)
    if kind is torch.Tensor or not _watches(kind):
        return gradient
    if _sees_below_autograd(kind):
        raise PlanError(
            f"A compiled module was given a {kind.__name__} as a cotangent, whose class sees each "
            "operator, and kernels bypass it. Pass plain tensors to backward()."
        )
    with torch._C.DisableTorchFunctionSubclass():
        return gradient.as_subclass(torch.Tensor)


class Modes:
    """The present modes and settings that affect what operators compute."""

    def __init__(self, readings: Mapping[Callable[[], Any], Any]) -> None:
        self._readings = tuple(readings.items())
        self._state = GlobalStateGuard()
        self.captured = modes_now()

    def hold(self) -> bool:
        """Whether the modes and settings are unchanged."""
        for ask, answer in self._readings:
            if ask() != answer:
                return False
        if self._state.check():
            return _other_modes() == self.captured[1]
        # The C++ guard also fails for changes that do not matter, such as the thread count: then
        # compare in Python.
        if modes_now() != self.captured:
            return False
        self._state = GlobalStateGuard()
        return True


def modes_now() -> tuple[Any, ...]:
    """Returns the modes that ``GlobalStateGuard`` compares, and others."""
    of_state = (
        torch.is_grad_enabled(),
        current_autocast(("cpu", "cuda", own_device_type())),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
    )
    return of_state, _other_modes()


def _other_modes() -> tuple[Any, ...]:
    return torch.is_inference_mode_enabled(), matmul_precision(), default_device()


def default_device() -> torch.device | None:
    """Returns the default device of new tensors, if one was set."""
    if not torch._C._len_torch_function_stack():
        return None
    devices = [mode.device for mode in _function_modes() if _is_device(mode)]
    return devices[-1] if devices else None


def _function_modes() -> list[Any]:
    count = torch._C._len_torch_function_stack()
    return [torch._C._get_function_stack_at(i) for i in range(count)]


def _is_device(mode: Any) -> bool:
    return type(mode) is DeviceContext


_address_of = torch.Tensor.data_ptr
_is_nested = operator.attrgetter("is_nested")
_is_meta = operator.attrgetter("is_meta")
_PLAIN = (torch.Tensor, torch.nn.Parameter)

# Dispatch keys of devices whose tensors have addresses, with those of autograd, autocast and Python
# subclasses; and the lazy bits, which are resolved before a kernel reads the memory.
_DEVICES = ("CPU", "CUDA", "XPU", "MPS", "PrivateUse1")
_ALLOWED = (
    *(kind + device for kind in ("", "Autograd", "Autocast") for device in _DEVICES),
    "ADInplaceOrView",
    *("Python", "PythonTLSSnapshot", "PythonDispatcher"),
    *("Conjugate", "Negative", "ZeroTensor"),
)


_KEYS = [getattr(torch._C.DispatchKey, name, None) for name in _ALLOWED]
_ALLOWED_BITS = functools.reduce(
    operator.or_, (torch._C.DispatchKeySet(key).raw_repr() for key in _KEYS if key is not None)
)


def have_own_memory(values: Iterable[Any]) -> bool:
    """Whether all tensors among some values have strided storage of their own, or no elements."""
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    try:
        # Reading the address of a user's fake tensor, or of one on meta, may warn.
        is_plain = all(type(t) in _PLAIN for t in tensors) and not any(map(_is_meta, tensors))
        if is_plain and all(map(_address_of, tensors)) and not any(map(_is_nested, tensors)):
            return True
    except (RuntimeError, ValueError):  # no storage; a parameter that is not initialized
        return False
    return not any(map(why_no_memory, tensors))


def why_no_memory(tensor: torch.Tensor) -> str:
    """Describes a tensor that has no storage of its own; returns "" for one that has."""
    keys = torch._C._dispatch_keys(tensor)
    if torch.nn.parameter.is_lazy(tensor):
        return "a parameter that is not initialized"
    if not keys.raw_repr() & ~_ALLOWED_BITS:
        return ""
    if tensor.is_nested:
        return "a nested tensor"
    if tensor.is_quantized:
        return "a quantized tensor"
    if tensor.layout is not torch.strided:
        return f"a tensor of layout {str(tensor.layout).removeprefix('torch.')}"
    if tensor.is_meta:
        return "a tensor on the meta device"
    is_of_transform = "FuncTorch" in str(keys)
    return "a tensor inside a transform of torch.func" if is_of_transform else f"a tensor of {keys}"


_requires_grad = operator.attrgetter("requires_grad")


class TensorLayouts:
    """The classes, dtypes, sizes, strides, devices, lazy bits and ``requires_grad`` of tensors.

    ``.data = ...`` changes these for the same tensor object, not always with its address.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._facts = _facts(tensors)
        self._wants_grad = list(map(_requires_grad, tensors))
        self._grad_mode = torch.is_grad_enabled()
        self._have_addresses = all(map(_has_address, tensors))
        self._guards: Any = None
        if tensors:
            no_dims: Any = {"dynamic_dims_sizes": None, "dynamic_dims_strides": None}
            self._guards = TensorGuards(*tensors, **no_dims)

    def addresses(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        """Returns the addresses of tensors with these layouts; 0 for sparse and meta tensors."""
        if self._have_addresses:
            return list(map(_address_of, tensors))
        return [t.data_ptr() if _has_address(t) else 0 for t in tensors]

    def fast_same(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether as many tensors have these layouts, by a fast check that may wrongly say False.

        The caller must check that the grad mode is the same.
        """
        if self._guards is None or not self._guards.check(*tensors):
            return False
        # Without grad mode, the C++ check ignores requires_grad.
        return self._grad_mode or list(map(_requires_grad, tensors)) == self._wants_grad

    def same(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether these tensors, in the same order, have the same layouts."""
        if self._grad_mode == torch.is_grad_enabled() and self.fast_same(tensors):
            return True
        # The C++ guard also fails if the caller's autocast or inference mode changed: then compare
        # in Python.
        return bool(_facts(tensors) == self._facts)


def _has_address(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_meta


def _facts(tensors: Sequence[torch.Tensor]) -> Any:
    return (
        [t.dtype for t in tensors],
        [t.shape for t in tensors],
        [t.stride() for t in tensors],
        [t.requires_grad for t in tensors],
        [t.device for t in tensors],
        list(map(is_lazy, tensors)),
        list(map(type, tensors)),
    )


_GETTER, _SETTER = re.compile(r"_?(get|is|are)_"), re.compile(r"_?set_")
_NO_WORDS = frozenset({"get", "set", "is", "are", "use", "enabled", "preferred"})
_PYTHONS = ("torch.backends.", "torch.__future__")
_SETTING_KINDS = (
    bool,
    int,
    float,
    str,
    tuple,
    list,
    torch.dtype,
    torch.device,
    enum.Enum,
    type(None),
)
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
            return isinstance(getter, _IS_BUILTIN) and isinstance(getter(), _SETTING_KINDS)
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


def distributions_check() -> bool:
    """Whether distributions check what they are given; the first use of Dynamo ends that."""
    return bool(Distribution._validate_args)


def asks_if_distributions_check(frame: types.FrameType) -> bool:
    """Whether a frame runs code of ``torch.distributions``, or a user's that reads the setting."""
    name = str(frame.f_globals.get("__name__"))
    return name.startswith("torch.distributions.") or "_validate_args" in frame.f_code.co_names


def python_getter(frame: types.FrameType) -> Callable[[], Any] | None:
    """Returns the function that reads the setting which a frame of PyTorch's asks for, if any.

    It is the frame's own, if that only returns a setting.
    """
    if asks_if_distributions_check(frame):
        return distributions_check
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
    return found if isinstance(found, _SETTING_KINDS) and not has_modes else ABSENT


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
