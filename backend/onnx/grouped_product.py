"""The grouped product of experts (``aten._grouped_mm``) in ONNX, which has no operator of its own.

torchlib translates it without offsets only. Here each group becomes one ``Slice`` between its
offsets and one ``MatMul``: the same work as in PyTorch, whatever the router decides at run time.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from onnxscript import FLOAT, INT32, ir
from onnxscript.onnx_opset import opset18 as op

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
    """What lies behind the last group, which no matrix belongs to: zeros.

    PyTorch leaves it undefined; without it the result would be shorter than PyTorch's.
    """
    ragged, whole = (left, right) if axis == 0 else (right, left)
    end, along = op.Constant(value_ints=[_END]), op.Constant(value_ints=[axis])
    length = op.Shape(op.Slice(ragged, start, end, along), start=axis, end=axis + 1)
    other = op.Shape(whole, start=2, end=3) if axis == 0 else op.Shape(whole, start=1, end=2)
    shape = op.Concat(*((length, other) if axis == 0 else (other, length)), axis=0)
    return op.CastLike(op.Expand(op.Constant(value_float=0.0), shape), left)
