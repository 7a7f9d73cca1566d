"""Adapter: what around a call sees or changes every operator, which a compiled program hides."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._device import DeviceContext


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
    return ""


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
