"""Adapter: which rule an operator has, by the name that PyTorch gives it.

Names, not attributes: a release of PyTorch that lacks an operator has no graph that holds it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import polynomials, rules
from .jets import Rule


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_MADE_OF_LINES = _names("abs clamp clamp_max clamp_min hardtanh leaky_relu relu")

_LINEAR_IN_THE_FIRST = _names("""
    _conj _conj_physical _neg_view _reshape_alias _to_copy _unsafe_view alias chunk clone contiguous
    cumsum detach_copy diagonal expand expand_copy flip gather imag index.Tensor index_select
    lift_fresh mean movedim narrow neg permute permute_copy positive real repeat reshape roll
    select.int select_copy slice.Tensor slice_copy split split_with_sizes squeeze squeeze_copy sum t
    t_copy trace transpose transpose_copy tril triu unbind unsafe_split unsafe_split_with_sizes
    unsqueeze unsqueeze_copy view view_as_complex view_as_real view_copy
    _fft_c2c _fft_r2c _fft_c2r avg_pool1d _adaptive_avg_pool2d avg_pool2d upsample_nearest2d
    embedding
""")

_LINEAR_TOGETHER: Mapping[str, tuple[int, ...]] = {
    "cat": (0,),
    "complex": (0, 1),
    "copy": (0, 1),
    "diagonal_scatter": (0, 1),
    "index_add": (0, 3),
    "index_put": (0, 2),
    "scatter.src": (0, 3),
    "scatter_add": (0, 3),
    "select_scatter": (0, 1),
    "slice_scatter": (0, 1),
    "stack": (0,),
    "where.ScalarOther": (1, 2),
    "where.ScalarSelf": (1, 2),
    "where.self": (1, 2),
}

_CONSTANT = _names("""
    argmax argmin bernoulli bitwise_not ceil empty_like eq.Scalar eq.Tensor floor full_like
    ge.Scalar ge.Tensor gt.Scalar gt.Tensor heaviside isfinite isinf isnan le.Scalar le.Tensor
    logical_and logical_not logical_or lt.Scalar lt.Tensor ne.Scalar ne.Tensor new_empty
    new_empty_strided new_full new_ones new_zeros ones_like rand_like randint_like randn_like round
    sign signbit sgn trunc zeros_like is_same_size
""")

RULES: Mapping[str, Rule] = {
    **{name: rules.of_one_variable(taylor) for name, taylor in polynomials.BY_NAME.items()},
    **dict.fromkeys(_MADE_OF_LINES, rules.made_of_lines),
    **dict.fromkeys(_LINEAR_IN_THE_FIRST, rules.first_operand()),
    **{name: rules.jointly(*places) for name, places in _LINEAR_TOGETHER.items()},
    **dict.fromkeys(_CONSTANT, rules.of_constant),
    "_log_softmax": rules.log_softmax,
    "_safe_softmax": rules.softmax,
    "_softmax": rules.softmax,
    "add": partial(rules.add, sign=1),
    "bmm": rules.matrices,
    "constant_pad_nd": rules.first_operand(2),
    "div": rules.divide,
    "dot": rules.pairwise,
    "logsumexp": rules.logsumexp,
    "masked_fill.Scalar": rules.first_operand(2),
    "mm": rules.matrices,
    "mul": rules.multiply,
    "mv": rules.pairwise,
    "native_dropout": rules.dropout,
    "sub": partial(rules.add, sign=-1),
}
"""By the name of an operator, or of one overload of it."""

_TAKEN_APART = _names("""
    _batch_norm_with_update_functional _native_batch_norm_legit
    _native_batch_norm_legit_functional _native_batch_norm_legit_no_training
    addcdiv addcmul addmv binary_cross_entropy elu elu_backward gelu_backward glu
    hardsigmoid hardswish hardtanh_backward huber_loss leaky_relu_backward lerp
    log_sigmoid_forward mish mse_loss native_batch_norm native_dropout_backward native_group_norm
    native_layer_norm nll_loss_forward rsub sigmoid_backward silu_backward
    smooth_l1_loss softplus_backward tanh_backward threshold threshold_backward
    _softmax_backward_data _log_softmax_backward_data
""")


_WRONG_NESTED = _names("cholesky_inverse linalg_householder_product")


def is_wrong_nested(target: Any) -> bool:
    """Returns whether nested forward mode of an operator gives wrong numbers in PyTorch."""
    return str(target).removeprefix("aten.").partition(".")[0] in _WRONG_NESTED


def rule_of(target: Any) -> Rule | None:
    """Returns the rule of an operator."""
    namespace, _, name = str(target).partition(".")
    # An operator of the user's may bear a name of PyTorch's.
    if namespace != "aten":
        return None
    return RULES.get(name) or RULES.get(name.partition(".")[0])


def _variance(x: Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Any:
    return _variance_and_mean(x, dim, correction=correction, keepdim=keepdim)[0]


def _variance_and_mean(
    x: Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False
) -> Any:
    if x.is_complex():
        return NotImplemented
    dims = dim or [*range(x.dim())]
    count = math.prod(x.shape[d] for d in dims)
    mean = x.mean(dims, keepdim=True)
    # Squares of differences: the difference of squares would cancel.
    rest = x - mean
    free = max(count - (1 if correction is None else correction), 0)
    variance = (rest * rest).sum(dims, keepdim=keepdim) / free
    return variance, mean if keepdim else x.mean(dims)


def _product_plus(c: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    # Nothing is multiplied by one: it would be a kernel of its own for value and coefficients.
    product = a @ b if alpha == 1 else (a @ b) * alpha
    return product + (c if beta == 1 else c * beta)


def taken_apart() -> dict[Any, Callable[..., Any]]:
    """Returns how operators are made of those that have rules, with the same derivatives."""
    table = torch._decomp.decomposition_table
    aten = torch.ops.aten
    found: dict[Any, Callable[..., Any]] = {
        aten.addmm.default: _product_plus,
        aten.baddbmm.default: _product_plus,
        aten.var.correction: _variance,
        aten.var_mean.correction: _variance_and_mean,
    }
    for name in _TAKEN_APART:
        packet = getattr(torch.ops.aten, name, None)
        for overload in () if packet is None else packet.overloads():
            operator = getattr(packet, overload)
            if operator in table:
                found[operator] = table[operator]
    return found
