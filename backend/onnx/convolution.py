"""The gradients of a convolution as convolutions, for ONNX, which has no backward of one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
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
    """The gradient of a weight: one batch as the image, the other as a kernel that slides over it.

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
