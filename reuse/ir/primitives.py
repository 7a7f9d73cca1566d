"""The stated set of operators that every program can be reduced to, as data.

It is core ATen without the operators that others of the list make up, and with what derivatives and
random draws need besides. The list is frozen: it is written here, not asked of an installed
PyTorch, and a test says which name a new PyTorch has moved.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, TypeAlias

PrimitiveGroup: TypeAlias = Literal[
    "element by element",
    "comparisons and logic",
    "reductions",
    "products and convolutions",
    "linear algebra",
    "pooling",
    "shapes and views",
    "reading and writing at indices",
    "new tensors",
    "random draws",
    "complex numbers and spectra",
]


@dataclass(frozen=True, slots=True)
class Primitive:
    """One operator of the stated set.

    Attributes:
        name: as PyTorch's, with the overload: ``torch.ops.`` before it gives the operator.
        group: what it belongs to.
        what: what it computes, in one line.
    """

    name: str
    group: PrimitiveGroup
    what: str

    def __str__(self) -> str:
        return f"{self.name}: {self.what}"


_LIST: Mapping[PrimitiveGroup, Mapping[str, str]] = {
    "element by element": {
        "abs.default": "Absolute value.",
        "acos.default": "Inverse cosine.",
        "acosh.default": "Inverse hyperbolic cosine.",
        "add.Scalar": "Sum with a number.",
        "add.Tensor": "Sum; the second operand may be scaled by a number.",
        "asin.default": "Inverse sine.",
        "asinh.default": "Inverse hyperbolic sine.",
        "atan.default": "Inverse tangent.",
        "atan2.default": "Angle of the point (x, y).",
        "atanh.default": "Inverse hyperbolic tangent.",
        "ceil.default": "Smallest integer that is not less.",
        "clamp.Tensor": "Limits to a range given by tensors.",
        "clamp.default": "Limits to a range given by numbers.",
        "cos.default": "Cosine.",
        "cosh.default": "Hyperbolic cosine.",
        "digamma.default": "Slope of the logarithm of the gamma function.",
        "div.Scalar": "Quotient by a number.",
        "div.Scalar_mode": "Quotient by a number, rounded down or towards zero.",
        "div.Tensor": "Quotient.",
        "div.Tensor_mode": "Quotient, rounded down or towards zero.",
        "erf.default": "Error function.",
        "erfc.default": "One minus the error function, exact where that is near one.",
        "erfinv.default": "Inverse of the error function.",
        "exp.default": "Exponential.",
        "expm1.default": "Exponential minus one, exact near zero.",
        "floor.default": "Largest integer that is not greater.",
        "fmod.Scalar": "Remainder of a division by a number, with the dividend's sign.",
        "fmod.Tensor": "Remainder of a division, with the dividend's sign.",
        "hypot.default": "Length of the vector (x, y), without overflow on the way.",
        "lgamma.default": "Logarithm of the gamma function.",
        "log.default": "Natural logarithm.",
        "log10.default": "Logarithm to base 10.",
        "log1p.default": "Logarithm of one plus the operand, exact near zero.",
        "log2.default": "Logarithm to base 2.",
        "maximum.default": "The greater of two.",
        "minimum.default": "The lesser of two.",
        "mul.Scalar": "Product with a number.",
        "mul.Tensor": "Product.",
        "neg.default": "Negative.",
        "polygamma.default": "Derivative of the digamma function, of any order.",
        "pow.Scalar": "A number to the power of a tensor.",
        "pow.Tensor_Scalar": "Power with a number as exponent.",
        "pow.Tensor_Tensor": "Power.",
        "reciprocal.default": "One divided by the operand.",
        "relu.default": "The operand where it is positive, else zero.",
        "remainder.Scalar": "Remainder of a division by a number, with the divisor's sign.",
        "remainder.Tensor": "Remainder of a division, with the divisor's sign.",
        "round.default": "Nearest integer, ties to even.",
        "rsqrt.default": "One divided by the square root.",
        "sigmoid.default": "Logistic function.",
        "sign.default": "Sign: -1, 0 or 1.",
        "sin.default": "Sine.",
        "sinh.default": "Hyperbolic sine.",
        "sqrt.default": "Square root.",
        "sub.Scalar": "Difference to a number.",
        "sub.Tensor": "Difference; the second operand may be scaled by a number.",
        "tan.default": "Tangent.",
        "tanh.default": "Hyperbolic tangent.",
        "trunc.default": "Integer part.",
    },
    "comparisons and logic": {
        "bitwise_and.Scalar": "Bits that an integer and a number have both.",
        "bitwise_and.Tensor": "Bits that both have; for booleans, and.",
        "bitwise_not.default": "Every bit the other way; for booleans, not.",
        "bitwise_or.Scalar": "Bits that an integer or a number has.",
        "bitwise_or.Tensor": "Bits that one has; for booleans, or.",
        "bitwise_xor.Scalar": "Bits in which an integer and a number differ.",
        "bitwise_xor.Tensor": "Bits in which both differ.",
        "eq.Scalar": "Whether elements equal a number.",
        "eq.Tensor": "Whether elements are equal.",
        "ge.Scalar": "Whether elements are at least a number.",
        "ge.Tensor": "Whether elements are at least those of another.",
        "gt.Scalar": "Whether elements are greater than a number.",
        "gt.Tensor": "Whether elements are greater than those of another.",
        "isinf.default": "Whether elements are infinite.",
        "isnan.default": "Whether elements are no number.",
        "le.Scalar": "Whether elements are at most a number.",
        "le.Tensor": "Whether elements are at most those of another.",
        "logical_and.default": "Whether both are other than zero.",
        "logical_not.default": "Whether elements are zero.",
        "logical_or.default": "Whether one is other than zero.",
        "logical_xor.default": "Whether exactly one is other than zero.",
        "lt.Scalar": "Whether elements are less than a number.",
        "lt.Tensor": "Whether elements are less than those of another.",
        "ne.Scalar": "Whether elements differ from a number.",
        "ne.Tensor": "Whether elements differ.",
        "where.self": "Elements of one tensor where a condition holds, of another elsewhere.",
    },
    "reductions": {
        "amax.default": "Largest element along dimensions.",
        "amin.default": "Smallest element along dimensions.",
        "any.default": "Whether any element is other than zero.",
        "any.dim": "Whether any element along a dimension is other than zero.",
        "any.dims": "Whether any element along dimensions is other than zero.",
        "argmax.default": "Where the largest element is.",
        "argmin.default": "Where the smallest element is.",
        "cummax.default": "Largest of all elements up to each one, and where it is.",
        "cummin.default": "Smallest of all elements up to each one, and where it is.",
        "cumprod.default": "Products of all elements up to each one, along a dimension.",
        "cumsum.default": "Sums of all elements up to each one, along a dimension.",
        "histc.default": "How many elements fall into each of so many equal ranges.",
        "logcumsumexp.default": "Logarithm of the cumulated sums of exponentials.",
        "max.dim": "Largest element along a dimension, and where it is.",
        "min.dim": "Smallest element along a dimension, and where it is.",
        "nonzero.default": "Where the elements are that are other than zero.",
        "prod.default": "Product of all elements.",
        "prod.dim_int": "Product of the elements along a dimension.",
        "sort.default": "Elements in order along a dimension, and where they were.",
        "sum.dim_IntList": "Sum of the elements along dimensions.",
        "topk.default": "The k largest or smallest elements along a dimension, and where they are.",
        "var.correction": "Variance of the elements along dimensions.",
    },
    "products and convolutions": {
        "_cdist_backward.default": "Gradient of the distances between all pairs.",
        "_cdist_forward.default": "Distances between all pairs of rows of two matrices.",
        "_pdist_backward.default": "Gradient of the distances between rows of a matrix.",
        "_pdist_forward.default": "Distances between all pairs of rows of a matrix.",
        "bmm.default": "Product of each of a batch of matrices with its partner.",
        "convolution.default": "Convolution in any number of dimensions, or its transpose.",
        "convolution_backward.default": "Gradients of a convolution.",
        "mm.default": "Product of two matrices.",
    },
    "linear algebra": {
        "_linalg_det.default": "Determinant, and the factors it was found by.",
        "_linalg_eigh.default": "Eigenvalues and eigenvectors of a Hermitian matrix.",
        "_linalg_slogdet.default": "Sign and logarithm of a determinant, and its factors.",
        "_linalg_solve_ex.default": "Solution of linear equations, and their factors.",
        "_linalg_svd.default": "Singular values and vectors.",
        "linalg_cholesky_ex.default": "Cholesky factor of a positive definite matrix.",
        "linalg_eig.default": "Eigenvalues and eigenvectors of a square matrix.",
        "linalg_householder_product.default": "Product of Householder matrices.",
        "linalg_inv_ex.default": "Inverse of a matrix.",
        "linalg_lu_factor_ex.default": "Factors L and U of a matrix, and its pivots.",
        "linalg_lu_solve.default": "Solution of linear equations from L, U and pivots.",
        "linalg_matrix_exp.default": "Exponential of a matrix.",
        "linalg_qr.default": "Factors Q and R of a matrix.",
        "linalg_solve_triangular.default": "Solution of triangular equations.",
    },
    "pooling": {
        "_adaptive_avg_pool2d.default": "Means over windows that give an image of this size.",
        "_adaptive_avg_pool2d_backward.default": "Gradient of that.",
        "_adaptive_avg_pool3d.default": "Means over windows that give a volume of this size.",
        "_adaptive_avg_pool3d_backward.default": "Gradient of that.",
        "adaptive_max_pool2d.default": "Largest in windows that give an image of this size.",
        "adaptive_max_pool2d_backward.default": "Gradient of that.",
        "avg_pool2d.default": "Means over windows of an image.",
        "avg_pool2d_backward.default": "Gradient of that.",
        "avg_pool3d.default": "Means over windows of a volume.",
        "avg_pool3d_backward.default": "Gradient of that.",
        "max_pool2d_with_indices.default": "Largest in each window of an image, and where it is.",
        "max_pool2d_with_indices_backward.default": "Gradient of that.",
        "max_pool3d_with_indices.default": "Largest in each window of a volume, and where it is.",
        "max_pool3d_with_indices_backward.default": "Gradient of that.",
    },
    "shapes and views": {
        "_to_copy.default": "A copy of another dtype, device or layout.",
        "alias.default": "The same memory under another name.",
        "as_strided.default": "A view of memory by sizes, strides and an offset.",
        "cat.default": "Tensors joined along a dimension.",
        "clone.default": "A copy.",
        "constant_pad_nd.default": "A border of one number around a tensor.",
        "diagonal.default": "A view of a diagonal.",
        "expand.default": "A view that repeats dimensions of size one.",
        "flip.default": "Elements in reverse order along dimensions.",
        "permute.default": "A view with the dimensions in another order.",
        "repeat.default": "A tensor repeated along dimensions.",
        "select.int": "A view of one index of a dimension, which goes.",
        "slice.Tensor": "A view of a range of a dimension.",
        "squeeze.dims": "A view without some dimensions of size one.",
        "unsqueeze.default": "A view with a dimension of size one more.",
        "view.default": "A view of the same elements as another shape.",
    },
    "reading and writing at indices": {
        "_embedding_bag.default": "Sums, means or maxima of bags of rows of a table.",
        "as_strided_scatter.default": "A copy with a view of its memory replaced.",
        "diagonal_scatter.default": "A copy with a diagonal replaced.",
        "gather.default": "Elements at given places along a dimension.",
        "index.Tensor": "Elements at places given by index tensors.",
        "index_put.default": "A copy with values written, or added, at places by index tensors.",
        "masked_scatter.default": "A copy with values written, in order, where a mask holds.",
        "scatter.src": "A copy with values written at given places along a dimension.",
        "scatter.value": "A copy with a number written at given places along a dimension.",
        "scatter_add.default": "A copy with values added at given places along a dimension.",
        "scatter_reduce.two": "A copy with values reduced into given places along a dimension.",
        "slice_scatter.default": "A copy with a range of a dimension replaced.",
    },
    "new tensors": {
        "arange.start_step": "Numbers of a range, evenly apart.",
        "full.default": "A tensor of one number.",
        "full_like.default": "A tensor of one number, laid out like another.",
        "scalar_tensor.default": "A number as a tensor without dimensions.",
    },
    "random draws": {
        "bernoulli.default": "One with the probability that an element gives, else zero.",
        "exponential.default": "Exponentially distributed numbers, laid out like another tensor.",
        "multinomial.default": "Places drawn with the probabilities that a row gives.",
        "native_dropout.default": "Elements kept at random and scaled, and which were kept.",
        "normal_functional.default": "Normal numbers, laid out like another tensor.",
        "rand.default": "Uniform numbers from 0 to 1.",
        "rand_like.default": "Uniform numbers from 0 to 1, laid out like another tensor.",
        "randint.low": "Uniform integers of a range.",
        "randn.default": "Normal numbers.",
        "randn_like.default": "Normal numbers, laid out like another tensor.",
        "randperm.default": "The integers up to a number, in random order.",
        "uniform.default": "Uniform numbers of a range, laid out like another tensor.",
    },
    "complex numbers and spectra": {
        "_conj_physical.default": "The conjugate.",
        "_fft_c2c.default": "Fourier transform of complex numbers.",
        "_fft_c2r.default": "Inverse Fourier transform to real numbers.",
        "_fft_r2c.default": "Fourier transform of real numbers.",
        "complex.default": "Complex numbers of real and imaginary parts.",
        "view_as_complex.default": "A view of pairs of real numbers as complex ones.",
        "view_as_real.default": "A view of complex numbers as pairs of real ones.",
    },
}

_NAMESPACE = "aten."
_PRIMITIVES = tuple(
    Primitive(_NAMESPACE + name, group, what)
    for group, operators in _LIST.items()
    for name, what in operators.items()
)
_BY_NAME: Mapping[str, Primitive] = MappingProxyType({p.name: p for p in _PRIMITIVES})


def primitives() -> tuple[Primitive, ...]:
    """Returns the stated set of operators that programs reduce to, by group and name.

    The list is fixed: it does not depend on the PyTorch that is installed.

    Example:
        >>> [p.name for p in lazyinline.primitives() if p.group == "random draws"]
    """
    return _PRIMITIVES


def is_primitive(target: object) -> bool:
    """Whether what a node calls is of the stated set; so is taking one of several results."""
    return takes_one_of_several(target) or str(target) in _BY_NAME


def takes_one_of_several(target: object) -> bool:
    """Whether a node computes nothing: it takes one result of an operator that has several."""
    return target is operator.getitem
