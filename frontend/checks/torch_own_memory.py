"""Adapter: whether a tensor's numbers lie, strided, in memory of its own.

Guards in C++ ask any other for its strides, which ends the process, and kernels would be handed the
address 0. The dispatcher's keys say it: what may be in them is listed here, not what may not.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable
from typing import Any

import torch

_address_of = torch.Tensor.data_ptr
_is_nested = operator.attrgetter("is_nested")
_is_meta = operator.attrgetter("is_meta")
_PLAIN = (torch.Tensor, torch.nn.Parameter)

# Devices whose tensors have addresses; the keys that autograd, autocast and Python classes add; and
# lazy bits, which are written out before a kernel reads the memory.
_ALLOWED = (
    *("CPU", "CUDA", "XPU", "MPS"),
    *("ADInplaceOrView", "AutogradCPU", "AutogradCUDA", "AutogradXPU", "AutogradMPS"),
    *("AutocastCPU", "AutocastCUDA", "AutocastXPU", "AutocastMPS"),
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
