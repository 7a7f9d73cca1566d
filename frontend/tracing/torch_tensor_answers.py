"""Adapter: the attributes of a tensor that a fake answers as a real one; all others are reported.

A tensor method that is an operator is recorded in the trace. Any other attribute or method reads or
changes state of this run's tensor: its storage, gradient, version, hooks. A fake answers those in
:data:`ANSWERS` correctly. All others that ``torch.Tensor`` has, in any version of PyTorch, are
watched while a model is captured.
"""

from __future__ import annotations

import functools
import operator
import types
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from ...reuse.ir.operators import returns_operand
from ...reuse.torch_names import memory_id

_DEVICES = ("cpu", "cuda", "ipu", "maia", "mps", "mtia", "vulkan", "xla", "xpu", "meta", "hip")

ANSWERS: Mapping[str, tuple[str, ...]] = {
    "a layout, which guards compare": (
        *("shape", "size", "stride", "dim", "ndim", "ndimension", "numel", "nelement", "nbytes"),
        *("is_contiguous", "dim_order", "is_same_size", "__len__"),
    ),
    "a dtype, device or kind of memory, which guards compare": (
        *("dtype", "itemsize", "element_size", "is_floating_point", "is_complex", "is_signed"),
        *("device", "get_device", "type", "layout", "is_sparse", "is_sparse_csr", "is_mkldnn"),
        *("is_nested", "is_quantized", "is_conj", "is_neg", *(f"is_{name}" for name in _DEVICES)),
    ),
    "whether gradients flow, which guards compare": ("requires_grad",),
    "numbers: the trace sees the operator that hands them out, and refuses it": (
        *("item", "tolist", "numpy", "equal", "allclose", "is_nonzero"),
        *("__bool__", "__int__", "__float__", "__complex__", "__long__", "__nonzero__"),
        *("__array__", "__array_wrap__", "__dlpack__", "__dlpack_device__"),
    ),
    "text: it shows numbers, and is watched as that": ("__repr__", "__format__"),
    "what Python does with any object, by identity or by operators": (
        *("__hash__", "__iter__", "__reversed__", "__dir__", "__dict__"),
    ),
    "a derivative, which is watched where PyTorch's engine begins": ("backward",),
}
"""Names of ``torch.Tensor`` that are not watched, by reason."""

SWITCHES = ("requires_grad", "requires_grad_")  # names that set whether a tensor requires grad

OPERATORS: Mapping[str, tuple[str, ...]] = {
    "conversions to a dtype": (
        *("bool", "byte", "char", "short", "int", "long", "half", "bfloat16", "float", "double"),
        *("cfloat", "cdouble"),
    ),
    "transposes": ("H", "T"),
    "new tensors like this one": ("new", "new_tensor"),
    "Python around operators": ("unique",),
}
"""Names of ``torch.Tensor`` that run operators of another name, by reason: a fake may try them."""

_OPERATOR_NAMES = frozenset(name.strip("_") for name in dir(operator))
_CALLED = (
    *(types.FunctionType, types.MethodDescriptorType, types.WrapperDescriptorType),
    *(types.GetSetDescriptorType, types.MemberDescriptorType, property),
)


class TensorState(NamedTuple):
    """The state of a tensor besides its values."""

    kind: tuple[Any, ...]  # class, dtype, layout and device
    memory: tuple[Any, ...]  # storage, shape, strides and offset
    gradients: tuple[Any, ...]  # whether it is a leaf that requires grad; ``.grad``; hooks


def state_of(tensor: torch.Tensor) -> TensorState:
    """Returns the present state of a tensor."""
    held: Any = tensor
    hooks = (held._backward_hooks, held._post_accumulate_grad_hooks)
    is_leaf_that_wants = tensor.requires_grad and tensor.grad_fn is None
    has_memory = tensor.layout is torch.strided and not tensor.is_nested
    layout = (tensor.shape, tensor.stride(), tensor.storage_offset()) if has_memory else ()
    return TensorState(
        (type(tensor), tensor.dtype, tensor.layout, tensor.device),
        (memory_id(tensor), *layout) if has_memory else (0,),
        (
            is_leaf_that_wants,
            id(tensor.grad if tensor.is_leaf else None),
            *(hook is None for hook in hooks),
        ),
    )


@functools.cache
def watched_names() -> Mapping[str, Any]:
    """Returns the attributes to watch: no operators, not in :data:`ANSWERS`, or settable ones."""
    answers = {name for names in ANSWERS.values() for name in names}
    found = {}
    for name in dir(torch.Tensor):
        owner = next(kind for kind in torch.Tensor.__mro__ if name in vars(kind))
        value = vars(owner)[name]
        if owner is object or not isinstance(value, _CALLED) or _is_of_python(name):
            continue
        is_asked = name in answers or (callable(value) and _is_operator(name))
        if not is_asked or _is_settable(value):
            found[name] = value
    return found


@functools.cache
def may_compute(name: str) -> bool:
    """Whether a watched method may only run operators, so that it can be tried on a fake tensor."""
    # Others are not tried: some of PyTorch's C++ code crashes on a tensor without storage.
    if changes_layout(name):
        return any(map(returns_operand, _overloads(name[:-1])))  # unlike resize_ and set_
    is_listed = any(name in names for names in OPERATORS.values())
    return is_listed or any(map(_returns_tensors, _overloads(name)))


@functools.cache
def changes_layout(name: str) -> bool:
    """Whether an in-place operator changes the shape or strides of a tensor, not its values."""
    return any(torch.Tag.inplace_view in overload.tags for overload in _overloads(name))


def is_answer(name: str) -> bool:
    """Whether a fake tensor answers an attribute correctly."""
    return any(name in names for names in ANSWERS.values())


def _is_settable(descriptor: Any) -> bool:
    if not isinstance(descriptor, types.GetSetDescriptorType) or descriptor.__name__[0] == "_":
        return False
    tensor = torch.empty(0, device="cpu")
    try:
        descriptor.__set__(tensor, descriptor.__get__(tensor))
    except (AttributeError, TypeError):
        return False
    return True


def _is_of_python(name: str) -> bool:
    """Whether a method implements a Python operator such as ``+``, also reflected or in-place."""
    inner = name.strip("_")
    forms = (inner, inner.removeprefix("r"), inner.removeprefix("i"))
    return name.startswith("__") and not _OPERATOR_NAMES.isdisjoint(forms)


def _is_operator(name: str) -> bool:
    """Whether a method is an ATen operator of the same name, from this tensor to tensors."""
    if changes_layout(name) or not any(map(_makes_tensors, _overloads(name))):
        return False
    # An in-place method without an out-of-place form (``requires_grad_``) is not an operator.
    # One that changes the shape (``resize_``) is checked when it is called.
    return not name.endswith("_") or name.startswith("__") or bool(_overloads(name[:-1]))


def _overloads(name: str) -> list[Any]:
    packet: Any = getattr(torch.ops.aten, name, None)
    return [getattr(packet, o) for o in packet.overloads()] if hasattr(packet, "overloads") else []


def _makes_tensors(overload: Any) -> bool:
    arguments = overload._schema.arguments
    is_method = bool(arguments) and "Tensor" in str(arguments[0].type)
    return is_method and _returns_tensors(overload)


def _returns_tensors(overload: Any) -> bool:
    return any("Tensor" in str(r.type) for r in overload._schema.returns)
