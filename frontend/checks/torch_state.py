"""Adapter: what a compiled program relies on and does not see: modes, classes, memory, layouts.

Modes around a call, and classes of tensors, see or change every operator, which a program hides.

Guards in C++ ask a tensor without strided memory of its own for its strides, which ends the
process, and kernels would be handed the address 0. The dispatcher's keys say it: what may be in
them is listed here, not what may not.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch._C._dynamo.guards import GlobalStateGuard, TensorGuards
from torch.fx._symbolic_trace import is_fx_symbolic_tracing
from torch.utils._device import DeviceContext

from ...reuse.errors import LazyInlineError, PlanError
from ...reuse.ir.leaf import current_autocast
from ...reuse.torch_names import is_lazy, matmul_precision, own_device_type


def mode_around() -> str:
    """Returns what around a call sees each operator, or an empty text."""
    if torch._C._len_torch_dispatch_stack():
        return "a TorchDispatchMode"
    # The default device is such a mode as well, but only a setting.
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
    return ""


def autograd_mode_around() -> str:
    """Returns what around a call sees each operator's backward, or an empty text."""
    if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
        return "a pair of hooks on saved tensors"
    if torch.is_anomaly_enabled():
        return "anomaly detection"
    return ""


def refuse_mode(mode: str, error: type[LazyInlineError] = PlanError) -> None:
    """Raises an error for a mode, if one is named, around what runs kernels alone."""
    if mode:
        raise error(
            f"{mode} is active, and the kernels of a compiled step bypass it. Call the model "
            "itself inside, or the step outside."
        )


def why_watched(values: Iterable[Any]) -> str:
    """Says what a tensor among some values is whose class sees each operator on it, if one is."""
    # Such a class may compute anything, or give results a class of its own (as a plain subclass
    # does, too); kernels are handed its memory, which may hold something else or be none.
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
    """Returns a cotangent as autograd's own formulas see it: they ask no ``__torch_function__``.

    Raises:
        PlanError: if its class sees what autograd computes.
    """
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
    """The modes and settings, as they are now, that decide what operators compute."""

    def __init__(self, readings: Mapping[Callable[[], Any], Any]) -> None:
        self._readings = tuple(readings.items())
        self._state = GlobalStateGuard()
        self.captured = modes_now()

    def hold(self) -> bool:
        """Whether they are now as they were."""
        for ask, answer in self._readings:
            if ask() != answer:
                return False
        if self._state.check():
            return _other_modes() == self.captured[1]
        # A False is not conclusive: the C++ guard also reacts to the thread count and to settings
        # that are not in use. So compare exactly.
        if modes_now() != self.captured:
            return False
        self._state = GlobalStateGuard()
        return True


def modes_now() -> tuple[Any, ...]:
    """Returns the modes that operators run under: what ``GlobalStateGuard`` compares, and more."""
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
    """Returns the device that was set for new tensors, if one was."""
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

# Devices whose tensors have addresses; the keys that autograd, autocast and Python classes add; and
# lazy bits, which are written out before a kernel reads the memory.
_DEVICES = ("CPU", "CUDA", "XPU", "MPS", "PrivateUse1")
_ALLOWED = (
    *(kind + device for kind in ("", "Autograd", "Autocast") for device in _DEVICES),
    "ADInplaceOrView",
    *("Python", "PythonTLSSnapshot", "PythonDispatcher"),
    *("Conjugate", "Negative", "ZeroTensor"),
)


def _bits_of(names: Iterable[str]) -> int:
    key, keys = torch._C.DispatchKey, torch._C.DispatchKeySet
    sets = (keys(getattr(key, name)).raw_repr() for name in names if hasattr(key, name))
    return functools.reduce(operator.or_, sets)


_ALLOWED_BITS = _bits_of(_ALLOWED)


def have_own_memory(values: Iterable[Any]) -> bool:
    """Whether all tensors among some values have memory of their own, or no elements."""
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    try:
        # A fake of the user's, by class or on meta, may warn where it is asked for an address.
        is_plain = all(type(t) in _PLAIN for t in tensors) and not any(map(_is_meta, tensors))
        if is_plain and all(map(_address_of, tensors)) and not any(map(_is_nested, tensors)):
            return True
    except (RuntimeError, ValueError):  # no storage; a parameter that is not initialized
        return False
    return not any(map(why_no_memory, tensors))


def why_no_memory(tensor: torch.Tensor) -> str:
    """Says what a tensor is that has no memory of its own; nothing of one that has some."""
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
    """The classes, types, sizes, strides, devices, lazy bits and wishes that some tensors had.

    ``.data = ...`` changes them on the same tensor, and not always its address.
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
        """Returns where the numbers of tensors with these layouts lie; 0 if nowhere, or sparse."""
        if self._have_addresses:
            return list(map(_address_of, tensors))
        return [t.data_ptr() if _has_address(t) else 0 for t in tensors]

    def fast_same(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether so many tensors have the same layouts and classes; False where that is not known.

        Under the same grad mode, which the caller compares.
        """
        if self._guards is None or not self._guards.check(*tensors):
            return False
        # Without grad mode the check in C++ does not look at requires_grad.
        return self._grad_mode or list(map(_requires_grad, tensors)) == self._wants_grad

    def same(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether these tensors, in the same order, have the same layouts."""
        if self._grad_mode == torch.is_grad_enabled() and self.fast_same(tensors):
            return True
        # A False is not conclusive: the C++ guard also reacts to the caller's modes (autocast,
        # inference). So compare exactly.
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
