"""Types of program values: tensors with a layout, and structs of them.

A type says everything a kernel was compiled for, so equal types mean that a kernel compiled
for one value may be launched on another.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Union

import torch

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
    """Returns the strides along which there is a second element; none if there is no element."""
    if 0 in shape:
        return ()
    return tuple(st for st, size in zip(stride, shape, strict=True) if size != 1)


def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the strides of a contiguous tensor of this shape."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1) if type(size) is int else size  # a symbol is at least 2
    return tuple(reversed(strides))


def is_contiguous(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether the elements follow one another in order; a dimension of one needs no stride."""
    axes = zip(shape, stride, contiguous_stride(shape), strict=True)
    return all(size == 1 or step == expected for size, step, expected in axes)


def is_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether the elements fill one block of memory without overlap, in any order."""
    expected = 1
    axes = [(st, sz) for st, sz in zip(stride, shape, strict=True) if sz != 1]
    while axes:  # by equality alone: expressions have no order
        innermost = next((axis for axis in axes if axis[0] == expected), None)
        if innermost is None:
            return False
        axes.remove(innermost)
        expected *= innermost[1]
    return True


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
        for size in (*shape, *stride):  # one position of a row, in a batch of unknown length
            if type(size) is not int:
                shape, stride = tuple(map(_plain, shape)), tuple(map(_plain, stride))
                return cls(tensor.dtype, shape, stride, tensor.device)
        return _one_of(tensor.dtype, shape, stride, tensor.device)

    @property
    def is_symbolic(self) -> bool:
        """Whether a size or a stride is an expression."""
        return any(type(size) is not int for size in (*self.shape, *self.stride))

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

    def __str__(self) -> str:
        return f"{dtype_name(self.dtype)}[{','.join(map(str, self.shape))}]"


def _plain(size: Any) -> Any:
    """Returns a size as a number, or as an expression if it is none."""
    if type(size) is int:
        return size
    expression = size.node.expr
    return int(expression) if expression.is_number else expression


@functools.lru_cache(maxsize=4096)
def _one_of(*facts: Any) -> TensorType:
    """Returns one object for equal types, which are made and compared for every tensor."""
    return TensorType(*facts)


HOST = torch.device("cpu", 1)
"""The host's memory in the types of a program for a GPU, whose own tensors may be typed ``cpu``.

To PyTorch it is the one CPU that there is.
"""


@dataclass(frozen=True, slots=True)
class StructType:
    """A tuple of values that travels as one, such as what a call saves for its backward."""

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
