"""Types of program values, tensors with a layout and structs of them; how a tensor is sent.

A type says everything a kernel was compiled for, so equal types mean that a kernel compiled
for one value may be launched on another.

Only contiguous memory can be sent to another process. A dense tensor with permuted dimensions is
sent as it lies in memory, an expanded dimension (stride 0) once. A tensor on part of a larger
storage gets a storage of that part alone.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Union

import torch
from torch.utils.dlpack import from_dlpack, to_dlpack

_DTYPE_NAMES = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.complex64: "c64",
    torch.complex128: "c128",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "bool",
}


def dtype_name(dtype: torch.dtype) -> str:
    """Returns the short name of a dtype, such as ``f32``."""
    return _DTYPE_NAMES.get(dtype, str(dtype).removeprefix("torch."))


DTYPES = {dtype_name(d): d for d in vars(torch).values() if isinstance(d, torch.dtype)}
"""Every dtype by its short name."""


def strides_that_matter(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """Returns the strides of dimensions larger than 1; none if the tensor is empty."""
    if 0 in shape:
        return ()
    return tuple(st for st, size in zip(stride, shape, strict=True) if size != 1)


def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the strides of a contiguous tensor of this shape."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1) if isinstance(size, int) else size  # a symbol is at least 2
    return tuple(reversed(strides))


def reach(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Returns how many elements of memory a tensor reaches over, from its first to its last."""
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def is_contiguous(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether the elements follow one another in order, whatever strides size 1 has."""
    axes = zip(shape, stride, contiguous_stride(shape), strict=True)
    return all(size == 1 or step == expected for size, step, expected in axes)


def is_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether the elements fill one block of memory without overlap, in any order."""
    return dense_order(shape, stride) is not None


def dense_order(shape: Sequence[int], stride: Sequence[int]) -> list[int] | None:
    """Returns the dimensions of one block of memory, outermost first, those of size 1 before all.

    None if the elements have gaps between them, or overlap.
    """
    expected, order = 1, list[int]()
    axes = [axis for axis, size in enumerate(shape) if size != 1]
    while axes:  # by equality alone: symbolic strides cannot be sorted
        innermost = next((axis for axis in axes if stride[axis] == expected), None)
        if innermost is None:
            return None
        axes.remove(innermost)
        order.append(innermost)
        expected *= shape[innermost]
    return [*(axis for axis, size in enumerate(shape) if size == 1), *reversed(order)]


_NUMBERS = frozenset({int})


@dataclass(frozen=True, slots=True)
class TensorType:
    """Dtype, shape, strides and device of a tensor.

    In a program captured with dynamic shapes a size may be a sympy expression.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorType:
        """Returns the type of a tensor (real or fake)."""
        shape, stride = tuple(tensor.shape), tuple(tensor.stride())
        for size in (*shape, *stride):  # one may be a SymInt
            if type(size) is not int:
                shape, stride = tuple(map(_plain, shape)), tuple(map(_plain, stride))
                return cls(tensor.dtype, shape, stride, tensor.device)
        return _one_of(tensor.dtype, shape, stride, tensor.device)

    @property
    def is_symbolic(self) -> bool:
        """Whether a size or a stride is an expression."""
        return not _NUMBERS.issuperset(map(type, (*self.shape, *self.stride)))

    @property
    def num_bytes(self) -> int:
        """Bytes of the elements, counting a broadcast element once per place."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def is_dense(self) -> bool:
        """Whether the elements fill one block of memory without overlap, in any order."""
        return is_dense(self.shape, self.stride)

    @property
    def is_differentiable(self) -> bool:
        """Whether values of this type can carry a gradient."""
        return self.dtype.is_floating_point or self.dtype.is_complex

    def cotangent(self) -> TensorType:
        """Returns the type of this value's cotangent: its own layout, or contiguous."""
        if is_dense(self.shape, self.stride):
            return self
        return TensorType(self.dtype, self.shape, contiguous_stride(self.shape), self.device)

    def empty(self, device: torch.device | str | None = None) -> torch.Tensor:
        """Returns a tensor of this type over new memory; on another device, if one is given."""
        device = self.device if device is None else device
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)

    def __str__(self) -> str:
        return f"{dtype_name(self.dtype)}[{','.join(map(str, self.shape))}]"


def _plain(size: Any) -> Any:
    """Returns a size as an int, or as a sympy expression if it is symbolic."""
    if type(size) is int:
        return size
    expression = size.node.expr
    return int(expression) if expression.is_number else expression


# One object for equal types: they are made and compared for every tensor.
_one_of = functools.lru_cache(maxsize=4096)(TensorType)

HOST = torch.device("cpu", 1)
"""Host memory, as the device of offloaded tensors in a GPU program.

The index tells it from the ``cpu`` that the program's other tensors may have; PyTorch ignores it.
"""


@dataclass(frozen=True, slots=True)
class StructType:
    """A tuple of values passed as one, such as what a call saves for its backward."""

    fields: tuple[Type, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors inside."""
        return sum(field.num_bytes for field in self.fields)

    def __str__(self) -> str:
        return f"struct<{sum(1 for _ in flatten_type(self))}>"


Type = Union[TensorType, StructType]  # noqa: UP007  (a forward reference inside StructType)


def flatten_type(type_: Type) -> Iterator[TensorType]:
    """Yields the tensor types inside a type, depth first."""
    if isinstance(type_, TensorType):
        yield type_
        return
    for field in type_.fields:
        yield from flatten_type(field)


def map_type(type_: Type, change: Callable[[TensorType], TensorType]) -> Type:
    """Returns a type with every tensor type in it changed."""
    if isinstance(type_, TensorType):
        return change(type_)
    return StructType(tuple(map_type(field, change) for field in type_.fields))


# ---- how a tensor is sent ------------------------------------------------------------------------


class Wire:
    """The form in which values of one type are sent, with expanded dimensions (stride 0) ``once``.

    Whether it ``needs_no_copy`` says that the memory of a value is sent as it is.
    """

    def __init__(self, type_: TensorType) -> None:
        self.type = type_
        pairs = zip(type_.shape, type_.stride, strict=True)
        self.once = tuple(1 if stride == 0 else size for size, stride in pairs)
        core = TensorType(type_.dtype, self.once, type_.stride, type_.device)
        self.needs_no_copy = core.is_dense
        self._num_elements = math.prod(self.once)

    @property
    def num_bytes(self) -> int:
        """Bytes that are sent."""
        return self._num_elements * self.type.dtype.itemsize


def in_own_storage(tensor: torch.Tensor) -> torch.Tensor:
    """Returns an alias of a tensor whose storage holds this tensor's bytes only."""
    # ``torch.save``, ``deepcopy`` and sending to another process copy the whole storage, here just
    # these bytes. The alias keeps the original storage alive and cannot be resized.
    num_elements = reach(tensor.shape, tensor.stride()) if tensor.numel() else 0
    num_bytes = num_elements * tensor.element_size()
    start = tensor.storage_offset() * tensor.element_size()
    with torch.inference_mode(False), torch.no_grad():
        whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        whole.set_(tensor.untyped_storage())  # type: ignore[call-overload]
        # A capsule: ``from_dlpack`` would ask the tensor for its device, maybe a custom one.
        part = from_dlpack(to_dlpack(whole[start : start + num_bytes])).view(tensor.dtype)
        return part.as_strided(tensor.shape, tensor.stride()).detach()
