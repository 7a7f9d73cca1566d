"""Adapter: rules that compute operators on series, and a table of them by PyTorch's names.

Rules are for functions of one variable, softmax and its kin, products, and linear operators.

The table has names, not attributes of ``torch.ops``: some releases of PyTorch lack an operator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...reuse.ir.operators import READ_NO_VALUES
from .jets import (
    BY_NAME,
    Coefficient,
    Coefficients,
    Jet,
    Lanes,
    Operands,
    Rule,
    TaylorCoefficients,
    combined,
    exponential,
    logarithm,
    minus,
    plus,
    powers,
    product_term,
    results_of,
    scaled,
    times,
)


def elementwise(taylor: TaylorCoefficients) -> Rule:
    """Returns the rule of a function that acts on each element by itself.

    ``taylor`` takes a point, the value there, an order, and the operator's further operands.
    """

    def rule(lanes: Lanes, target: Any, operands: Operands) -> Any:
        if len(operands.jets) != 1 or operands.args[0] is not operands.jets[0]:
            return NotImplemented
        jet = operands.jets[0]
        if jet.primal.is_complex() or not jet.primal.is_floating_point():
            return NotImplemented
        value = operands.call(target)
        # The factors depend on the point alone, so all directions share them.
        factors = taylor(jet.primal, value, lanes.order, *operands.args[1:], **operands.kwargs)
        highest = max((k for k, factor in enumerate(factors) if factor is not None), default=1)
        parts = lanes.propagated(lambda series: powers(series, max(highest, 1)), jet)
        coefficients = {}
        for order in lanes.series.orders:
            rows = [part.get(order) for part in parts]
            count = max((len(row) for row in rows if row is not None), default=0)
            found = []
            for lane in range(count):
                column = [[None if row is None else row[lane]] for row in rows]
                (total,) = combined(factors, column)
                found.append(total)
            if found and found[0] is not None:
                coefficients[order] = tuple(found)
        return lanes.with_series(value, coefficients)

    return rule


def piecewise_linear(lanes: Lanes, target: Any, operands: Operands) -> Any:
    """Differentiates a piecewise linear function: each coefficient times PyTorch's slope."""
    if len(operands.jets) != 1 or operands.args[0] is not operands.jets[0]:
        return NotImplemented
    jet = operands.jets[0]

    def function(x: Tensor) -> Any:
        return operands.call(target, [x])

    value, slope = torch.func.jvp(function, (jet.primal,), (torch.ones_like(jet.primal),))
    (coefficients,) = lanes.each_coefficient(lambda t: t * slope, jet)
    return lanes.with_series(value, coefficients)


def softmax(lanes: Lanes, target: Any, operands: Operands) -> Any:
    """Differentiates softmax: weighs the series' exponential by the value, divides by its sum."""
    value = operands.call(target)
    weigh = _weighed(value, operands.args[1])

    def push(series: Sequence[Coefficient]) -> list[list[Coefficient]]:
        grown, sums = weigh(series)
        found: list[Coefficient] = [value]
        for k in range(1, len(series) + 1):
            falls = product_term([*found], [None, *sums], k)
            found.append(minus(grown[k - 1], falls))
        return [found[1:]]

    return lanes.with_series(value, lanes.propagated(push, operands.jets[0])[0])


def log_softmax(lanes: Lanes, target: Any, operands: Operands) -> Any:
    """Differentiates the logarithm of softmax."""
    value = operands.call(target)
    weigh = _weighed(torch.exp(value), operands.args[1])

    def push(series: Sequence[Coefficient]) -> list[list[Coefficient]]:
        _, sums = weigh(series)
        logs = logarithm(sums)
        return [[minus(x, log) for x, log in zip(series, logs, strict=True)]]

    return lanes.with_series(value, lanes.propagated(push, operands.jets[0])[0])


def logsumexp(lanes: Lanes, target: Any, operands: Operands) -> Any:
    """Differentiates the logarithm of a sum of exponentials."""
    (jet,) = operands.jets
    dims, keepdim = operands.args[1], operands.option("keepdim", 2, False)
    value = operands.call(target)
    # By the value, so that no exponential overflows.
    kept = value if keepdim else torch.logsumexp(jet.primal, dims, keepdim=True)
    weigh = _weighed(torch.exp(jet.primal - kept), dims, keepdim=keepdim)

    def push(series: Sequence[Coefficient]) -> list[list[Coefficient]]:
        return [logarithm(weigh(series)[1])]

    return lanes.with_series(value, lanes.propagated(push, jet)[0])


Weighed = Callable[[Sequence[Coefficient]], tuple[list[Coefficient], list[Coefficient]]]


def _weighed(weights: Tensor, dims: Any, *, keepdim: bool = True) -> Weighed:
    """Returns a function that weighs the exponential of a series, and sums it over dimensions."""

    def weigh(series: Sequence[Coefficient]) -> tuple[list[Coefficient], list[Coefficient]]:
        grown = [times(weights, e) for e in exponential(series)[1:]]
        sums = [None if g is None else g.sum(dims, keepdim=keepdim) for g in grown]
        return grown, sums

    return weigh


def without_derivative(lanes: Lanes, target: Any, operands: Operands) -> Any:
    """Runs an operator with no or a zero derivative: signs, comparisons, draws, fresh memory."""
    return operands.call(target)


Product = Callable[[Any, Any], Tensor]


# ---- products and quotients --------------------------------------------------------------------


def multiply(lanes: Lanes, target: Any, operands: Operands) -> Any:
    """Differentiates ``a * b``, element by element."""
    a, b = operands.args[:2]
    return lanes.with_series(operands.call(target), _product(lanes, torch.mul, a, b))


def matrices(lanes: Lanes, target: Any, operands: Operands) -> Any:
    """Differentiates a product of matrices, or of batches of them."""
    a, b = operands.args[:2]
    if operands.kwargs or len(operands.args) > 2:
        return NotImplemented
    # Linear in the only operand with a series: value and coefficients are rows of one matrix.
    if not isinstance(b, Jet):
        return lanes.in_one_product(lambda rows: target(rows, b), a, -2)
    if not isinstance(a, Jet):
        return lanes.in_one_product(lambda columns: target(a, columns), b, -1)
    return Jet(target(a.primal, b.primal), _product(lanes, target, a, b))


def pairwise(lanes: Lanes, target: Any, operands: Operands) -> Any:
    """Differentiates any other product: linear in each of two operands."""
    a, b = operands.args[:2]

    def product(x: Any, y: Any) -> Tensor:
        found: Tensor = target(x, y, *operands.args[2:], **operands.kwargs)
        return found

    return lanes.with_series(operands.call(target), _product(lanes, product, a, b))


def _product(lanes: Lanes, product: Product, a: Any, b: Any) -> Coefficients:
    if not isinstance(b, Jet):
        return lanes.each_coefficient(lambda t: product(t, b), a)[0]
    if not isinstance(a, Jet):
        return lanes.each_coefficient(lambda t: product(a, t), b)[0]
    # A square needs half the products of a general one.
    if a is b and product is torch.mul:
        return lanes.propagated(partial(_square, a.primal), a)[0]
    return lanes.propagated(partial(_cauchy, product, a.primal, b.primal), a, b)[0]


def _square(a: Tensor, series: Sequence[Coefficient]) -> list[list[Coefficient]]:
    _, square = powers(series, 2)
    return [[plus(times(x, 2 * a), y) for x, y in zip(series, square, strict=True)]]


def _cauchy(
    product: Product,
    a: Tensor,
    b: Tensor,
    first: Sequence[Coefficient],
    second: Sequence[Coefficient],
) -> list[list[Coefficient]]:
    one, other = [a, *first], [b, *second]
    found = []
    for k in range(1, len(one)):
        total = None
        for i in range(k + 1):
            if one[i] is not None and other[k - i] is not None:
                total = plus(total, product(one[i], other[k - i]))
        found.append(total)
    return [found]


def divide(lanes: Lanes, target: Any, operands: Operands) -> Any:
    """Differentiates ``a / b``."""
    a, b = operands.args[:2]
    if operands.kwargs.get("rounding_mode") is not None:
        return NotImplemented
    value = operands.call(target)
    if not isinstance(b, Jet):
        return lanes.with_series(value, lanes.each_coefficient(lambda t: t / b, a)[0])
    divisor = b.primal

    def push(above: Sequence[Coefficient], below: Sequence[Coefficient]) -> list[list[Coefficient]]:
        found: list[Coefficient] = [value]
        for k in range(1, len(below) + 1):
            total = above[k - 1]
            for j in range(1, k + 1):
                total = minus(total, times(below[j - 1], found[k - j]))
            found.append(None if total is None else total / divisor)
        return [found[1:]]

    above = a if isinstance(a, Jet) else value
    return lanes.with_series(value, lanes.propagated(push, above, b)[0])


def dropout(lanes: Lanes, target: Any, operands: Operands) -> Any:
    """Differentiates dropout: one mask is drawn, for the value and its coefficients."""
    # Drawn once: a tangent through another mask would be that of another function.
    value, mask = operands.call(target)
    p, train = operands.args[1:3]
    if train is False or p == 0:
        return operands.jets[0], mask
    scale = 0.0 if p == 1 else 1 / (1 - p)
    (coefficients,) = lanes.each_coefficient(lambda t: t * mask * scale, operands.jets[0])
    return lanes.with_series(value, coefficients), mask


# ---- what is linear in its operands: it is applied to each coefficient -------------------------


def linear_in_first(*constants: int) -> Rule:
    """Returns the rule of an operator that is linear in its first operand, the others constant.

    ``constants`` are places of those that are added to it; they are zero for a coefficient.
    """

    def rule(lanes: Lanes, target: Any, operands: Operands) -> Any:
        if len(operands.jets) != 1 or operands.args[0] is not operands.jets[0]:
            return NotImplemented
        coefficients = lanes.each_coefficient(
            lambda t: operands.call(target, [t], zeros_at=constants), operands.jets[0]
        )
        return results_of(lanes, operands.call(target), coefficients)

    return rule


def jointly_linear(*places: int) -> Rule:
    """Returns the rule of an operator that is linear in some operands at once (``cat``, ``where``).

    A coefficient that only some have is zero in others.
    """

    def rule(lanes: Lanes, target: Any, operands: Operands) -> Any:
        linear = [operands.args[place] for place in places if place < len(operands.args)]
        if not operands.all_in(linear):
            return NotImplemented

        def push(*series: Sequence[Coefficient]) -> list[list[Coefficient]]:
            found: list[Coefficient] = []
            for column in zip(*series, strict=True):
                if all(c is None for c in column):
                    found.append(None)
                    continue
                filled = [
                    torch.zeros_like(jet.primal) if c is None else c
                    for c, jet in zip(column, operands.jets, strict=True)
                ]
                found.append(operands.call(target, filled, zeros_at=places))
            return [found]

        return results_of(lanes, operands.call(target), lanes.propagated(push, *operands.jets))

    return rule


def add(lanes: Lanes, target: Any, operands: Operands, *, sign: int) -> Any:
    """Differentiates ``a + sign alpha b``."""
    a, b = operands.args[:2]
    factor = sign * operands.option("alpha", 2, 1)
    return lanes.with_series(operands.call(target), _sum(lanes, a, b, factor))


def _sum(lanes: Lanes, a: Any, b: Any, factor: Any) -> Coefficients:
    if not isinstance(b, Jet):
        return a.coefficients  # type: ignore[no-any-return]

    def push(
        first: Sequence[Coefficient], second: Sequence[Coefficient]
    ) -> list[list[Coefficient]]:
        pairs = zip(first, second, strict=True)
        return [[plus(x, scaled(y, factor)) for x, y in pairs]]

    if not isinstance(a, Jet):
        return {order: tuple(scaled(t, factor) for t in ts) for order, ts in b.coefficients.items()}
    return lanes.propagated(push, a, b)[0]


# ---- which rule an operator has ------------------------------------------------------------------


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_PIECEWISE_LINEAR = _names("abs clamp clamp_max clamp_min hardtanh leaky_relu relu")

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

_WITHOUT_DERIVATIVE = _names("""
    argmax argmin bernoulli bitwise_not ceil eq.Scalar eq.Tensor floor ge.Scalar ge.Tensor
    gt.Scalar gt.Tensor heaviside isfinite isinf isnan le.Scalar le.Tensor logical_and logical_not
    logical_or lt.Scalar lt.Tensor ne.Scalar ne.Tensor round sign signbit sgn trunc is_same_size
""")

RULES: Mapping[str, Rule] = {
    **{name: elementwise(taylor) for name, taylor in BY_NAME.items()},
    **dict.fromkeys(_PIECEWISE_LINEAR, piecewise_linear),
    **dict.fromkeys(_LINEAR_IN_THE_FIRST, linear_in_first()),
    **{name: jointly_linear(*places) for name, places in _LINEAR_TOGETHER.items()},
    **dict.fromkeys((*READ_NO_VALUES, *_WITHOUT_DERIVATIVE), without_derivative),
    "_log_softmax": log_softmax,
    "_safe_softmax": softmax,
    "_softmax": softmax,
    "add": partial(add, sign=1),
    "bmm": matrices,
    "constant_pad_nd": linear_in_first(2),
    "div": divide,
    "dot": pairwise,
    "logsumexp": logsumexp,
    "masked_fill.Scalar": linear_in_first(2),
    "mm": matrices,
    "mul": multiply,
    "mv": pairwise,
    "native_dropout": dropout,
    "sub": partial(add, sign=-1),
}
"""By the name of an operator, or of one overload of it."""

_DECOMPOSED = _names("""
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
    # No product with one: it would be one more kernel for the value and the coefficients.
    product = a @ b if alpha == 1 else (a @ b) * alpha
    return product + (c if beta == 1 else c * beta)


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Returns decompositions into operators that have rules, with the same derivatives."""
    table = torch._decomp.decomposition_table
    aten = torch.ops.aten
    found: dict[Any, Callable[..., Any]] = {
        aten.addmm.default: _product_plus,
        aten.baddbmm.default: _product_plus,
        aten.var.correction: lambda *args, **more: _variance_and_mean(*args, **more)[0],
        aten.var_mean.correction: _variance_and_mean,
    }
    for name in _DECOMPOSED:
        packet = getattr(torch.ops.aten, name, None)
        for overload in () if packet is None else packet.overloads():
            operator = getattr(packet, overload)
            if operator in table:
                found[operator] = table[operator]
    return found
