"""Adapter: what around a call sees or changes every operator, which a compiled program hides."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch._C._dynamo.guards import GlobalStateGuard
from torch.fx._symbolic_trace import is_fx_symbolic_tracing
from torch.utils._device import DeviceContext

from ...reuse.errors import PlanError
from ...reuse.ir.leaf import current_autocast
from ...reuse.torch_names import matmul_precision


def mode_around() -> str:
    """Returns what around a call sees each operator, or an empty text.

    The default device is none of that: it is a setting.
    """
    if torch._C._len_torch_dispatch_stack():
        return "a TorchDispatchMode"
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


def watching_class(values: Iterable[Any]) -> type | None:
    """Returns a class of tensors among some values that sees each operator on it, or None.

    It may compute anything, or give results a class of its own (as a plain subclass does, too);
    kernels are handed its memory, which may hold something else or be none.
    """
    kinds = {type(value) for value in values if isinstance(value, torch.Tensor)}
    return next((kind for kind in kinds if kind is not torch.Tensor and _watches(kind)), None)


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
            "operator, and kernels read memory past it. Pass plain tensors to backward()."
        )
    with torch._C.DisableTorchFunctionSubclass():
        return gradient.as_subclass(torch.Tensor)


class Modes:
    """The modes and settings, as they are now, that decide what operators compute.

    Args:
        readings: others that a forward asked for, and what it was told.
    """

    def __init__(self, readings: Mapping[Callable[[], Any], Any]) -> None:
        self._readings = tuple(readings.items())
        self._state = GlobalStateGuard()
        self._others = _other_modes()
        self._all = (_modes_of_state(), self._others)

    def hold(self) -> bool:
        """Whether they are now as they were."""
        for ask, answer in self._readings:
            if ask() != answer:
                return False
        if self._state.check():
            return _other_modes() == self._others
        # A False is not conclusive: the C++ guard also reacts to the thread count and to settings
        # that are not in use. So compare exactly.
        if (_modes_of_state(), _other_modes()) != self._all:
            return False
        self._state = GlobalStateGuard()
        return True


def _modes_of_state() -> tuple[Any, ...]:
    """What ``GlobalStateGuard`` compares too, in one call."""
    devices = ("cpu", "cuda") if torch.cuda.is_initialized() else ("cpu",)
    return (
        torch.is_grad_enabled(),
        current_autocast(devices),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
    )


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
