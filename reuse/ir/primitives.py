"""The set of operators that every program can be reduced to: core ATen, and what it lacks.

Core ATen is what PyTorch tags as such (``torch.Tag.core``). It has no random draws but two, no
derivatives of half of its own operators, no linear algebra and few complex numbers; these are named
here.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ..torch_names import OPERATOR_TYPES, operators_tagged

CORE = "core ATen"


@dataclass(frozen=True, slots=True)
class Primitive:
    """One operator of the set.

    Attributes:
        name: as PyTorch's, with the overload: ``torch.ops.`` before it gives the operator.
        group: what it belongs to; ``"core ATen"`` for most.
    """

    name: str
    group: str

    def __str__(self) -> str:
        return self.name


_BESIDE: Mapping[str, str] = {
    "random draws": """
        bernoulli exponential multinomial normal_functional rand_like randint.low randn_like uniform
    """,
    "derivatives": """
        _adaptive_avg_pool3d_backward _cdist_backward _pdist_backward adaptive_max_pool2d_backward
        avg_pool3d_backward grid_sampler_2d_backward max_pool3d_with_indices_backward
        replication_pad1d_backward replication_pad2d_backward replication_pad3d_backward
        upsample_bicubic2d_backward upsample_bilinear2d_backward upsample_linear1d_backward
        upsample_nearest1d_backward upsample_nearest2d_backward upsample_nearest3d_backward
        upsample_trilinear3d_backward
    """,
    "linear algebra": """
        _linalg_det _linalg_eigh _linalg_slogdet _linalg_solve_ex _linalg_svd linalg_cholesky_ex
        linalg_eig linalg_householder_product linalg_inv_ex linalg_lu_factor_ex linalg_lu_solve
        linalg_matrix_exp linalg_qr linalg_solve_triangular
    """,
    "complex numbers and spectra": """
        _conj_physical _fft_c2c complex view_as_complex view_as_real
    """,
    "further functions": """
        adaptive_max_pool2d as_strided_scatter cummax cummin cumprod diagonal_scatter digamma
        empty_permuted erfc erfinv histc hypot lgamma logcumsumexp new_empty_strided polygamma
        upsample_bicubic2d upsample_bilinear2d upsample_trilinear3d
    """,
}
_NAMED = {
    f"aten.{name}" if "." in name else f"aten.{name}.default": group
    for group, names in _BESIDE.items()
    for name in names.split()
}


def primitives() -> tuple[Primitive, ...]:
    """Returns the operators that programs reduce to: core ATen of this PyTorch, then the others.

    Example:
        >>> [p.name for p in lazyinline.primitives() if p.group == "random draws"]
    """
    core = sorted(map(str, operators_tagged(torch.Tag.core)))
    further = [Primitive(name, group) for name, group in _NAMED.items()]
    return (*(Primitive(name, CORE) for name in core), *further)


def is_primitive(target: object) -> bool:
    """Whether what a node calls is of the set; so is taking one of several results."""
    if takes_one_of_several(target):
        return True
    is_core = isinstance(target, OPERATOR_TYPES) and torch.Tag.core in getattr(target, "tags", ())
    return is_core or str(target) in _NAMED


def takes_one_of_several(target: object) -> bool:
    """Whether a node computes nothing: it takes one result of an operator that has several."""
    return target is operator.getitem
