"""Operators that torch.onnx cannot write, as operators that ONNX has.

ONNX has no backward of a convolution: its gradients are convolutions as well. And it has no grouped
product of experts: each group is a product of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from onnxscript import FLOAT, INT32, ir
from onnxscript.onnx_opset import opset18 as op
from torch import Tensor

_convolution = torch.ops.aten.convolution.default


def convolution_backward(
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[Any, Any, Any]:
    """Decomposes ``aten.convolution_backward``; the arguments are that operator's."""
    dims = weight.dim() - 2
    stride, padding, dilation = (_per_dim(x, dims) for x in (stride, padding, dilation))
    grad_input = grad_weight = grad_bias = None
    if output_mask[0]:
        # A stride may not reach the last elements of the input: they get zeros.
        missing = [0] * dims
        if not transposed:
            reached = [
                (grad_output.shape[2 + d] - 1) * stride[d]
                - 2 * padding[d]
                + dilation[d] * (weight.shape[2 + d] - 1)
                + 1
                for d in range(dims)
            ]
            missing = [input.shape[2 + d] - reached[d] for d in range(dims)]
        grad_input = _convolution(
            grad_output, weight, None, stride, padding, dilation, not transposed, missing, groups
        )
        grad_input = _cropped(grad_input, input)
    if output_mask[1]:
        pair = (grad_output, input) if transposed else (input, grad_output)
        grad_weight = _correlation(*pair, weight, stride, padding, dilation, groups)
    if output_mask[2]:
        grad_bias = grad_output.sum([0, *range(2, 2 + dims)])
    return grad_input, grad_weight, grad_bias


def _correlation(
    image: Tensor,
    kernel: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """Returns a weight's gradient: one batch as the image, the other as a kernel over it.

    Stride and dilation change places, channels and batch too; groups stay groups.
    """
    channels_first = _channels_as_batch(image, groups)
    batch, size = image.shape[0], image.shape[1] // groups
    image = channels_first.transpose(0, 1).flatten(1, 2)  # [channels of a group, groups * batch]
    slides = _channels_as_batch(kernel, groups).flatten(0, 1)  # [groups * channels, batch]
    assert image.shape[:2] == (size, groups * batch)
    found = _convolution(
        image, slides, None, dilation, padding, stride, False, [0] * len(stride), groups
    )
    return _cropped(found, weight).transpose(0, 1).contiguous()


def _cropped(tensor: Tensor, like: Tensor) -> Tensor:
    """Leaves out what lies beyond another tensor's size, behind the channels."""
    for dim, length in enumerate(like.shape[2:], 2):
        if tensor.shape[dim] != length:
            tensor = tensor.narrow(dim, 0, length)
    return tensor


def _channels_as_batch(tensor: Tensor, groups: int) -> Tensor:
    """Returns ``[groups, channels of a group, batch, ...]``."""
    return tensor.unflatten(1, (groups, -1)).movedim(0, 2)


def _per_dim(numbers: Sequence[int], dims: int) -> list[int]:
    return list(numbers) * dims if len(numbers) == 1 else list(numbers)


_END = 2**31 - 1


def grouped_mm(
    self: FLOAT,
    mat2: FLOAT,
    offs: INT32 | None = None,
    bias: FLOAT | None = None,
    out_dtype: int = -1,
) -> FLOAT:
    """Translates ``aten._grouped_mm``; the arguments are that operator's.

    Args:
        self: ``[rows, k]`` with the groups along its rows, ``[m, k]`` with the groups along ``k``,
            or one matrix per group.
        mat2: ``[groups, k, n]``, or ``[k, n]`` with the groups along ``k`` or along its columns.
        offs: ``[groups]``, where each group ends.
        bias: added to every row.
        out_dtype: ONNX's number of the result's dtype, or -1.
    """
    product = op.MatMul(self, mat2) if offs is None else _ragged(self, mat2, offs)
    if bias is not None:
        product = op.Add(product, bias)
    return op.Cast(product, to=out_dtype) if out_dtype not in (None, -1) else product


def _ragged(left: Any, right: Any, offs: Any) -> Any:
    num_groups = offs.shape[0]
    starts = [op.Constant(value_ints=[0])] + [_end(offs, g) for g in range(num_groups)]
    spans = list(itertools.pairwise(starts))

    def part(value: Any, group: int, axis: int) -> Any:
        start, end = spans[group]
        return op.Slice(value, start, end, op.Constant(value_ints=[axis]))

    def matrix(value: Any, group: int) -> Any:
        return op.Gather(value, op.Constant(value_int=group), axis=0)

    cases: dict[tuple[int, int], tuple[Callable[[int], Any], int | None]] = {
        (2, 3): (lambda g: op.MatMul(part(left, g, 0), matrix(right, g)), 0),
        (3, 2): (lambda g: op.MatMul(matrix(left, g), part(right, g, 1)), 1),
        (2, 2): (lambda g: op.MatMul(part(left, g, 1), part(right, g, 0)), None),
    }
    of_group, axis = cases[len(left.shape), len(right.shape)]
    products = [of_group(group) for group in range(num_groups)]
    if axis is None:
        zero = op.Constant(value_ints=[0])
        return op.Concat(*[op.Unsqueeze(p, zero) for p in products], axis=0)
    return op.Concat(*products, _rest(left, right, starts[-1], axis), axis=axis)


def _end(offs: Any, group: int) -> Any:
    bounds = (op.Constant(value_ints=[i]) for i in (group, group + 1, 0))
    return op.Cast(op.Slice(offs, *bounds), to=ir.DataType.INT64.value)


def _rest(left: Any, right: Any, start: Any, axis: int) -> Any:
    """Returns zeros for the rows behind the last group, which no matrix belongs to."""
    # PyTorch leaves these rows undefined; without them the result would be shorter than PyTorch's.
    ragged, whole = (left, right) if axis == 0 else (right, left)
    end, along = op.Constant(value_ints=[_END]), op.Constant(value_ints=[axis])
    length = op.Shape(op.Slice(ragged, start, end, along), start=axis, end=axis + 1)
    other = op.Shape(whole, start=2, end=3) if axis == 0 else op.Shape(whole, start=1, end=2)
    shape = op.Concat(*((length, other) if axis == 0 else (other, length)), axis=0)
    return op.CastLike(op.Expand(op.Constant(value_float=0.0), shape), left)
