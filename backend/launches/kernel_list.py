"""The kernel launches of one closure, recorded once, on buffers that each call of it replaces.

A kernel writes into memory that it is given; it neither allocates nor checks. If an operator can
only allocate its own result, the result's buffer is *foreign*: outside the memory plan, but counted
and reported.

The native loop (C++) runs launches that are encoded as integers, called words; Python runs the
others. Each operation of the loop gives the bits of PyTorch's kernel: it calls the same BLAS
routine with the same arguments, and adds and copies in the same order. Small matrix products are
our own, and round no more than BLAS does. For other layouts, dtypes or BLAS libraries there are no
words, and PyTorch runs the launch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, NoReturn, TypeAlias

import sympy
import torch

from ...reuse.ir.size_tape import Size
from ...reuse.ir.types import TensorType, is_contiguous, is_dense
from . import torch_native


@dataclass(frozen=True, slots=True)
class View:
    """A tensor on a buffer. ``offset_bytes`` counts from the buffer's start."""

    buffer: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset_bytes: int

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements follow one another in order."""
        return is_contiguous(self.shape, self.stride)

    @property
    def is_dense(self) -> bool:
        """Whether the elements fill one block of memory, in any order."""
        return is_dense(self.shape, self.stride)


ClosureBuffer: TypeAlias = Literal["input", "private", "foreign"]
Returned: TypeAlias = Literal["nothing", "tensor", "tuple"]
OperandForm: TypeAlias = Literal["tensors", "addresses"]


@dataclass(frozen=True, slots=True)
class BufferInfo:
    """One buffer of a closure.

    ``kind`` is ``"input"``, ``"private"`` (placed by the plan) or ``"foreign"`` (allocated by the
    launch that makes it). ``first`` and ``last`` are the launches that first and last use it.
    ``device`` is None if it was not recorded.
    """

    kind: ClosureBuffer
    num_bytes: int
    first: int
    last: int
    device: torch.device | None = None


@dataclass(frozen=True, slots=True)
class NativeOp:
    """A launch for the native loop: its words, with a view in place of each address."""

    operands: tuple[int | View, ...]
    num_operations: int = 1


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel launch. Its operands are views, constants and lists of these.

    ``results`` are the foreign buffers that the function returns, as ``returns`` says. ``operands``
    is ``"addresses"`` for a kernel that takes addresses alone, whatever the shapes are. ``native``
    is the launch as words, if it has some.
    """

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    results: tuple[Any, ...] = ()
    returns: Returned = "nothing"
    operands: OperandForm = "tensors"
    native: NativeOp | None = None

    def views(self) -> Iterator[View]:
        """Yields every view among operands and results."""
        yield from views_in((self.args, [v for _, v in self.kwargs], self.results))


@dataclass(frozen=True)
class KernelList:
    """Launches of one leaf closure, its buffers and what it returns.

    Buffers ``0 .. num_inputs-1`` are the inputs, in order. ``in_place`` pairs a private buffer with
    an input whose memory it may reuse after the input's last use.
    """

    name: str
    num_inputs: int
    buffers: tuple[BufferInfo, ...]
    launches: tuple[Launch, ...]
    outputs: tuple[View, ...]
    output_types: tuple[TensorType, ...]
    in_place: tuple[tuple[int, int], ...] = ()

    @property
    def foreign(self) -> tuple[int, ...]:
        """Buffers that a launch allocates itself."""
        return tuple(i for i, b in enumerate(self.buffers) if b.kind == "foreign")


class SymbolicList(KernelList):
    """Launches whose numbers are expressions of symbols; :meth:`at` gives launches that can run."""

    def at(self, number: Callable[[Any], Any]) -> KernelList:
        """Returns the launches with values; ``number`` evaluates an expression."""

        def of(value: Any) -> Any:
            if isinstance(value, sympy.Basic):
                return number(value)
            if isinstance(value, (list, tuple)):
                return type(value)(map(of, value))
            if isinstance(value, (View, BufferInfo, Launch, TensorType)):
                made: Any = type(value)(*(of(getattr(value, f.name)) for f in fields(value)))
                return with_native(made) if isinstance(made, Launch) else made
            return value

        return KernelList(*(of(getattr(self, field.name)) for field in fields(KernelList)))


def views_in(value: Any) -> Iterator[View]:
    """Yields the views inside nested lists and tuples."""
    if isinstance(value, View):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from views_in(item)


# ---- launches as words ---------------------------------------------------------------------------


aten = torch.ops.aten

# The numbers are those of native_loop.cpp.
_KERNEL, _GEMM, _BATCHED_GEMM, _COPY, _COPY_ROW, _ADD, _GATHER_ROWS, _ADD_ROWS = range(8)
CHOOSE, REPEAT, REPEAT_WHILE = range(8, 11)
_INDEX, _ZERO_DIVISION = 1, 2
_MAX_KERNEL_ARGS = 64
_TYPES = {torch.float32: 0, torch.float64: 1}
_BLAS_LETTERS = {torch.float32: "s", torch.float64: "d"}
_MAX_BLAS_INTEGER = 2**31 - 1
# Below this many multiplications PyTorch uses loops of its own for a batch of products.
_MIN_BATCHED_WORK = 400


def with_native(launch: Launch) -> Launch:
    """Returns the launch with its native form, if it has one."""
    return replace(launch, native=native_op(launch))


def native_op(launch: Launch) -> NativeOp | None:
    """Returns the native operations of a launch, or None if PyTorch must run it."""
    if launch.operands == "addresses":
        return _kernel(launch)
    rule = _RULES.get(_key(launch.function))
    if rule is None:
        return None
    return rule(launch.args, dict(launch.kwargs))


def _key(function: Any) -> Any:
    """Returns a function's key in the rules: Inductor launches ``torch.mm`` as ``mm.out``."""
    names = {torch.mm: aten.mm.out, torch.addmm: aten.addmm.out, torch.bmm: aten.bmm.out}
    try:
        return names.get(function, function)
    except TypeError:
        return None


def _kernel(launch: Launch) -> NativeOp | None:
    address = torch_native.kernel_address(launch.function)
    num_addresses = sum(isinstance(a, View) for a in launch.args)
    sizes = launch.args[num_addresses:]  # Inductor passes sizes after all tensors
    plain = all(type(size) in (int, Size) for size in sizes) and not launch.kwargs
    # The loop keeps the arguments of a call in an array of that size.
    if address is None or not plain or len(launch.args) > _MAX_KERNEL_ARGS:
        return None
    return NativeOp((_KERNEL, address, num_addresses, len(sizes), *launch.args))


def _mm(args: Sequence[Any], kwargs: dict[str, Any]) -> NativeOp | None:
    a, b = args
    out = kwargs.pop("out")
    words = None if kwargs else _gemm(a, b, out, beta=0)
    return None if words is None else NativeOp(words)


def _addmm(args: Sequence[Any], kwargs: dict[str, Any]) -> NativeOp | None:
    bias, a, b = args
    out = kwargs.pop("out")
    if any(kwargs.pop(name, 1) != 1 for name in ("alpha", "beta")) or kwargs:
        return None
    words = _gemm(a, b, out, beta=1)
    if words is None or bias.dtype != out.dtype or not out.is_contiguous:
        return None
    # BLAS accumulates into the result, so the bias is first copied into each row.
    rows, width = out.shape
    if bias.stride[-1:] != (1,) or tuple(bias.shape) != (width,):
        return None
    return NativeOp((_COPY_ROW, rows, width * out.dtype.itemsize, out, bias, *words), 2)


def _bmm(args: Sequence[Any], kwargs: dict[str, Any]) -> NativeOp | None:
    a, b = args
    out = kwargs.pop("out")
    batch, rows, inner = a.shape
    work = rows * inner * b.shape[2]
    # PyTorch's own loops add up in another order, and bits would differ.
    if kwargs or work < _MIN_BATCHED_WORK or not out.is_contiguous:
        return None
    steps = [v.stride[0] for v in (b, a, out)]
    matrices = [
        View(v.buffer, v.dtype, v.shape[1:], v.stride[1:], v.offset_bytes) for v in (a, b, out)
    ]
    routine = f"cblas_{_BLAS_LETTERS.get(out.dtype)}gemm_batch"
    words = _gemm(*matrices, beta=0, routine=routine)
    if words is None:
        return None
    (_, *shape), addresses = words[:-3], words[-3:]
    return NativeOp((_BATCHED_GEMM, *shape, batch, *steps, *addresses))


def _gemm(
    a: View, b: View, out: View, *, beta: int, routine: str = ""
) -> tuple[int | View, ...] | None:
    """Returns the operation of a row-major product: BLAS's transposed column-major one."""
    if not (a.dtype == b.dtype == out.dtype) or out.dtype not in _TYPES:
        return None
    (rows, columns), inner = out.shape, a.shape[1]
    is_dot = (rows, columns) == (1, 1)  # whose strides do not say in which order PyTorch adds
    if 0 in (rows, columns, inner) or is_dot or not torch_native.blas_is_exact():
        return None
    address = torch_native.blas_address(routine or f"{_BLAS_LETTERS[out.dtype]}gemm_")
    left, right = _blas_layout(b), _blas_layout(a)
    if address is None or left is None or right is None or not out.is_contiguous:
        return None
    sizes = (columns, rows, inner, left[1], right[1], columns)
    if any(size > _MAX_BLAS_INTEGER for size in sizes):
        return None
    return (_GEMM, _TYPES[out.dtype], address, beta, left[0], right[0], *sizes, b, a, out)


def _blas_layout(matrix: View) -> tuple[int, int] | None:
    """Returns how column-major BLAS reads a matrix: ``N`` or ``T``, and the leading dimension."""
    (rows, columns), (row_stride, column_stride) = matrix.shape, matrix.stride
    if column_stride == 1 and row_stride >= max(1, columns):
        return ord("N"), row_stride
    if row_stride == 1 and column_stride >= max(1, rows):
        return ord("T"), column_stride
    # Contiguous but for the strides of dimensions of size 1: PyTorch multiplies a copy of it.
    if (columns == 1 or column_stride == 1) and (rows == 1 or row_stride == columns):
        return ord("N"), columns
    return None


def _add(args: Sequence[Any], kwargs: dict[str, Any]) -> NativeOp | None:
    a, b, *rest = args
    out = kwargs.pop("out")
    if kwargs or rest or not all(isinstance(v, View) for v in (a, b)):
        return None
    same = len({(v.dtype, v.shape, v.stride) for v in (a, b, out)}) == 1
    if not same or out.dtype not in _TYPES or not out.is_dense:
        return None
    return NativeOp((_ADD, _TYPES[out.dtype], math.prod(out.shape), a, b, out))


def _copy(args: Sequence[Any], kwargs: dict[str, Any]) -> NativeOp | None:
    to, source, *rest = args
    if rest or kwargs or not isinstance(source, View):
        return None
    same = (to.dtype, to.shape, to.stride) == (source.dtype, source.shape, source.stride)
    if not same or not to.is_dense:
        return None
    return NativeOp((_COPY, math.prod(to.shape) * to.dtype.itemsize, to, source))


def copied(to: View, source: View) -> tuple[int | View, ...]:
    """Returns the words of a copy between tensors of one layout, without gaps."""
    made = _copy((to, source), {})
    assert made is not None, (to, source)
    return made.operands


def _embedding(args: Sequence[Any], kwargs: dict[str, Any]) -> NativeOp | None:
    weight, indices = args[:2]
    out = kwargs["out"]
    plain = weight.is_contiguous and indices.is_contiguous and out.is_contiguous
    if not plain or indices.dtype != torch.int64:
        return None
    rows, width = weight.shape
    count = math.prod(indices.shape)
    row_bytes = width * weight.dtype.itemsize
    return NativeOp((_GATHER_ROWS, count, rows, row_bytes, out, weight, indices))


def _embedding_backward(args: Sequence[Any], kwargs: dict[str, Any]) -> NativeOp | None:
    gradient, indices, num_rows, padding, by_frequency = args
    out = kwargs["out"]
    plain = gradient.is_contiguous and indices.is_contiguous and out.is_contiguous
    types = gradient.dtype == out.dtype and out.dtype in _TYPES and indices.dtype == torch.int64
    if not plain or not types or by_frequency:
        return None
    count, width = math.prod(indices.shape), out.shape[1]
    head = (_ADD_ROWS, _TYPES[out.dtype], count, num_rows, width, padding)
    return NativeOp((*head, out, gradient, indices))


_RULES: dict[Any, Callable[[Sequence[Any], dict[str, Any]], NativeOp | None]] = {
    aten.mm.out: _mm,
    aten.addmm.out: _addmm,
    aten.bmm.out: _bmm,
    aten.add.out: _add,
    aten.copy_.default: _copy,
    torch.Tensor.copy_: _copy,
    aten.embedding.out: _embedding,
    aten.embedding_dense_backward.out: _embedding_backward,
}


def fail(failure: int) -> NoReturn:
    """Raises the error that eager would raise, by the code that the native loop returned."""
    if failure == _INDEX:
        raise IndexError("index out of range in self")
    raise RuntimeError("ZeroDivisionError" if failure == _ZERO_DIVISION else "a kernel failed")
