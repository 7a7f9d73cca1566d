"""The kernel list of one closure: launches over named buffers, recorded once, relocated per call.

A kernel writes into memory it is given; it neither allocates nor checks. Where an operator can only
allocate its own result, its buffer is *foreign*: counted, shown, and outside the memory plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch

from ...reuse.ir.types import TensorType, is_contiguous, is_dense


@dataclass(frozen=True, slots=True)
class View:
    """A tensor over a buffer. ``offset_bytes`` counts from the buffer's start."""

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
        """Whether the elements fill one stretch of memory, in whatever order."""
        return is_dense(self.shape, self.stride)


ClosureBuffer: TypeAlias = Literal["input", "private", "foreign"]
Returned: TypeAlias = Literal["nothing", "tensor", "tuple"]
OperandForm: TypeAlias = Literal["tensors", "addresses"]
Stream: TypeAlias = Literal["main", "second"]
"""Launches of one stream follow one another; those of two run in parallel if none waits."""
ENTRY = -1
"""Stands for all that ran before a closure, among the launches that one of its launches waits for.
"""


@dataclass(frozen=True, slots=True)
class BufferInfo:
    """One buffer of a closure.

    ``kind`` is ``"input"``, ``"private"`` (placed by the plan) or ``"foreign"`` (allocated by the
    launch that makes it). ``first`` and ``last`` are launch numbers. ``device`` is where it is, if
    the closure was recorded on it.
    """

    kind: ClosureBuffer
    num_bytes: int
    first: int
    last: int
    device: torch.device | None = None


@dataclass(frozen=True, slots=True)
class NativeOp:
    """A launch for the native loop: words, and views where an address goes."""

    operands: tuple[int | View, ...]
    num_operations: int = 1


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel launch. Operands are :class:`View` or constants, lists of them included.

    ``results`` are what the function returns if it makes foreign buffers; ``returns`` says
    whether that is a ``"tensor"`` or a ``"tuple"``. ``operands`` is ``"addresses"`` for a
    kernel that only takes the operands' first addresses, so that their shapes do not matter.
    ``native`` is the same launch for the native loop, where it has a form for it. ``waits_for`` are
    launches of the closure on the other stream, by number, that end before this one begins.
    """

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    results: tuple[Any, ...] = ()
    returns: Returned = "nothing"
    operands: OperandForm = "tensors"
    native: NativeOp | None = None
    stream: Stream = "main"
    waits_for: tuple[int, ...] = ()

    def views(self) -> Iterator[View]:
        """Yields every view among operands and results."""
        yield from views_in((self.args, [v for _, v in self.kwargs], self.results))


@dataclass(frozen=True)
class KernelList:
    """Launches of one leaf closure, its buffers and what it returns.

    Buffers ``0 .. num_inputs-1`` are the inputs, in order. ``in_place`` pairs a private buffer with
    an input whose memory it may take over, if nobody needs that input any more. Where launches are
    on two streams, ``first`` and ``last`` of a buffer say from when till when it is in use on the
    main one, and what runs on the second ends with the closure.
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


def views_in(value: Any) -> Iterator[View]:
    """Yields the views inside nested lists and tuples."""
    if isinstance(value, View):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from views_in(item)
