"""Kinds of operators, by PyTorch's schema and tags: view, in place, random, primitive.

Nothing else asks for schemas and tags. Operators whose schema or tags hide something are listed
here by name.

Primitives are the operators that every program can be reduced to: core ATen, which PyTorch tags
(``torch.Tag.core``), and what core ATen lacks: all random draws but two, derivatives of half of its
own operators, linear algebra and most of complex numbers. Those are named here.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.fx
from torch.fx.node import map_arg

from ..torch_names import (
    OPERATOR_TYPES,
    memory_id,
    operator_schema,
    operators_tagged,
    schema_of,
)
from .types import TensorType

# In training these change running_mean and running_var (operands 3 and 4); their schemas hide it.
_NORMS = (
    "batch_norm",
    "instance_norm",
    "native_batch_norm",
    "cudnn_batch_norm",
    "miopen_batch_norm",
)
WRITES_STATISTICS = frozenset(getattr(torch.ops.aten, name).default for name in _NORMS)

# Of their results autograd differentiates the first alone.
_LEGIT = "_native_batch_norm_legit"
_BATCH_NORMS = ("native_batch_norm", _LEGIT, f"{_LEGIT}_functional")

# Of tensors these read the size, dtype and device alone.
_LIKE = ("empty", "full", "ones", "rand", "randint", "randn", "zeros")
_NEW = ("empty", "empty_strided", "full", "ones", "zeros")
READ_NO_VALUES = (*(f"{made}_like" for made in _LIKE), *(f"new_{made}" for made in _NEW))
_LIKE_ANOTHER = ("expand_as", "reshape_as", "view_as")
# How names begin of further operators that autograd has no derivative of, and no error for.
_WITHOUT_HISTORY = (
    *("histc", "linspace", "logspace"),
    *(f"special_{name}" for name in ("airy_ai", "bessel_", "chebyshev_", "hermite_", "laguerre_")),
    *(f"special_{name}" for name in ("legendre_", "modified_bessel_", "scaled_modified_bessel_")),
    *(f"special_{name}" for name in ("shifted_chebyshev_", "spherical_bessel_")),
)

_DROPOUTS = frozenset(
    overload
    for name in ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
    for packet in (getattr(torch.ops.aten, name), getattr(torch.ops.aten, f"{name}_"))
    for overload in (getattr(packet, one) for one in packet.overloads())
)


def is_mutable(operator: object) -> bool:
    """Whether an operator changes an operand in place; running statistics do not count."""
    schema = schema_of(operator)
    return schema is not None and bool(schema.is_mutable)


def _name(operator: object) -> str:
    """Returns the name of an operator of ATen, without its overload, or an empty text."""
    schema = schema_of(operator)
    return "" if schema is None else schema.name.removeprefix("aten::")


def connected(node: torch.fx.Node) -> list[torch.fx.Node]:
    """Returns the operands that autograd connects the results of an operator to."""
    source, name = node.all_input_nodes[:1], _name(node.target)
    if node.target is operator.getitem and node.args[1]:
        return [] if _name(source[0].target) in _BATCH_NORMS else source
    if name in READ_NO_VALUES or name.startswith(_WITHOUT_HISTORY):
        return []
    # Of the second operand of these, too, the size is read alone.
    return source if name in _LIKE_ANOTHER else node.all_input_nodes


def returns_operand(operator: object) -> bool:
    """Whether a result of an operator lies in the memory of an operand."""
    schema = schema_of(operator)
    return schema is not None and any(r.alias_info is not None for r in schema.returns)


def mutated_args(node: torch.fx.Node) -> list[torch.fx.Node]:
    """Returns the operands that an operator changes in place."""
    schema = operator_schema(node)
    if schema is None:
        return []
    if node.target in WRITES_STATISTICS and len(node.args) > 5 and node.args[5]:
        return [n for n in node.args[3:5] if isinstance(n, torch.fx.Node)]
    if not schema.is_mutable:
        return []
    found: list[torch.fx.Node] = []
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = node.args[position : position + 1]
            map_arg((*given, node.kwargs.get(argument.name)), found.append)
    return found


def is_view(node: torch.fx.Node) -> bool:
    """Whether an operator returns a view of an operand, and changes nothing."""
    return returns_operand(node.target) and not is_mutable(node.target)


def changed_operand(node: torch.fx.Node) -> torch.fx.Node | None:
    """Returns the operand that an operator changes in place and returns with the same layout."""
    operands = mutated_args(node)
    if len(operands) != 1 or len(operator_schema(node).returns) != 1:
        return None
    result, operand = node.meta.get("val"), operands[0].meta.get("val")
    if not isinstance(result, torch.Tensor) or not isinstance(operand, torch.Tensor):
        return None
    place, own = ((memory_id(t), t.storage_offset(), TensorType.of(t)) for t in (result, operand))
    return operands[0] if place == own else None


def may_draw(operator: object) -> bool:
    """Whether an operator draws random numbers, for some arguments at least."""
    return torch.Tag.nondeterministic_seeded in getattr(operator, "tags", ())


def is_draw(node: torch.fx.Node) -> bool:
    """Whether an operator draws random numbers (attention without dropout does not)."""
    if not may_draw(node.target):
        return False
    schema = operator_schema(node)
    for index, argument in enumerate(schema.arguments if schema is not None else ()):
        given = node.args[index] if index < len(node.args) else argument.default_value
        given = node.kwargs.get(argument.name, given)
        if argument.name == "dropout_p":
            return bool(given != 0.0)
        if argument.name in ("train", "training") and given is False:
            return False
        # Dropping nothing or everything draws no numbers, except in ``native_dropout``.
        if argument.name == "p" and given in (0, 1) and node.target in _DROPOUTS:
            return False
    return True


def is_elementwise(node: torch.fx.Node) -> bool:
    """Whether each element of the result depends on one element of each operand."""
    tags = getattr(node.target, "tags", ())
    return torch.Tag.pointwise in tags or str(node.target).startswith("aten.where")


CORE = "core ATen"


@dataclass(frozen=True, slots=True)
class Primitive:
    """One operator of the set.

    Attributes:
        name: PyTorch's, with the overload; the operator is ``torch.ops.<name>``.
        group: ``"core ATen"`` for most, else the kind of operator that core ATen lacks.
    """

    name: str
    group: str

    def __str__(self) -> str:
        return self.name


_BEYOND_CORE: Mapping[str, str] = {
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
    for group, names in _BEYOND_CORE.items()
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
    """Whether a node's target is a primitive, or takes one of an operator's results."""
    if takes_one_of_several(target):
        return True
    is_core = isinstance(target, OPERATOR_TYPES) and torch.Tag.core in getattr(target, "tags", ())
    return is_core or str(target) in _NAMED


def takes_one_of_several(target: object) -> bool:
    """Whether a node computes nothing: it takes one result of an operator that has several."""
    return target is operator.getitem
