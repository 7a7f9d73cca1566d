"""Kinds of operators (view, in place, random, primitive), and what operators and programs cost.

Kinds are by PyTorch's schema and tags, and nothing else asks for these. Operators whose schema or
tags hide something are listed here by name.

Primitives are the operators that every program can be reduced to: core ATen, which PyTorch tags
(``torch.Tag.core``), and what core ATen lacks: all random draws but two, derivatives of half of its
own operators, linear algebra and most of complex numbers. Those are named here.

Costs are FLOPs, bytes and seconds; a device is a row of rates. An operator takes the longer of two
times (the roofline): that of its FLOPs at the rate of the device's matrix products, and that of the
bytes that it reads and writes at the rate of its memory. Only the ratios of such seconds are relied
on: to choose what is recomputed, and where a model is cut into stages. FLOPs are those of matrix
products, convolutions and attention, by PyTorch's own table; for causal attention, those that a
fused kernel computes. Source: Williams, Waterman, Patterson: Roofline, CACM 52(4), 2009.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch.fx.node import map_arg

from ..torch_names import (
    OPERATOR_TYPES,
    matmul_precision,
    memory_id,
    operator_schema,
    operators_tagged,
    schema_of,
)
from .program import Closure, Composite, Leaf, Program
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


def connected(node: torch.fx.Node) -> list[torch.fx.Node]:
    """Returns the operands that autograd connects the results of an operator to."""
    schema = schema_of(node.target)
    name = "" if schema is None else schema.name.removeprefix("aten::")
    if name in READ_NO_VALUES or name.startswith(_WITHOUT_HISTORY):
        return []
    # Of the second operand of these, too, the size is read alone.
    return node.all_input_nodes[:1] if name in _LIKE_ANOTHER else node.all_input_nodes


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


# ---- costs ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rates:
    """Rates that a device sustains: one row for each device."""

    flops_per_s: float  # of matrix products
    bytes_per_s: float  # of memory traffic
    half_flops_per_s: float = 0.0  # of matrix products in half precision, if they are faster
    tf32_flops_per_s: float = 0.0  # of matrix products in float32, if the user allows TF32
    transfer_bytes_per_s: float = 5e10  # between two ranks
    transfer_latency_s: float = 1e-5  # of one transfer
    # Between the device and pinned memory of its host, one way; 0 without one.
    host_bytes_per_s: float = 0.0

    def seconds(self, flops: int, num_bytes: int, dtype: torch.dtype = torch.float32) -> float:
        """Returns the longer of the times for FLOPs and for memory traffic, which overlap."""
        faster = self.half_flops_per_s if dtype in (torch.float16, torch.bfloat16) else 0.0
        if dtype is torch.float32 and matmul_precision()[0] == "tf32":
            faster = self.tf32_flops_per_s
        return max(flops / max(self.flops_per_s, faster), num_bytes / self.bytes_per_s)


CPU = Rates(4e10, 8e9, transfer_bytes_per_s=2e9, transfer_latency_s=1e-4)
"""About one core: what matters is that a byte costs as much as five FLOPs."""
CUDA = Rates(3e14, 2e12)
"""A GPU that is not in the table of targets, with products in half precision."""


@dataclass(frozen=True)
class Cost:
    """The FLOPs of an operator or a program, the bytes that it moves, and the seconds it takes."""

    flops: int = 0
    moved_bytes: int = 0
    seconds: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.flops + other.flops,
            self.moved_bytes + other.moved_bytes,
            self.seconds + other.seconds,
        )

    def times(self, factor: float) -> Cost:
        """Returns the cost of several runs."""
        flops, moved = round(self.flops * factor), round(self.moved_bytes * factor)
        return Cost(flops, moved, self.seconds * factor)


_ATTENTION_NAMES = ("scaled_dot_product", "flash_attention", "efficient_attention")
_COMPOSITE = torch.DispatchKey.CompositeImplicitAutograd


def flops_of(operator: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Returns the FLOPs of an operator on tensors of any kind (fake, meta): 0 if it has none."""
    from torch.utils.flop_counter import FlopCounterMode, flop_registry  # it imports Triton

    packet = getattr(operator, "overloadpacket", None)
    share = 1.0
    if packet and _is_attention(packet):
        share, args = _share_of_pairs(operator, args, kwargs), _of_all_heads(operator, args)
    formula = flop_registry.get(packet or operator)
    if formula is None and packet and _is_attention(packet):
        # PyTorch's table lacks the CPU's attention, which has the same products as the GPU's.
        is_backward = "backward" in str(packet)
        like = "dot_product_flash_attention" + ("_backward" if is_backward else "")
        formula = next(f for op, f in flop_registry.items() if str(op).endswith(like))
        args, kwargs = args[: 3 + is_backward], {}
    if formula is not None:
        return round(int(formula(*args, **kwargs, out_val=result)) * share)
    if not packet or is_mutable(operator) or not operator.has_kernel_for_dispatch_key(_COMPOSITE):
        return 0
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        operator(*args, **kwargs)  # linear, einsum: counts the operators that it decomposes into
    return int(counter.get_total_flops())


def _share_of_pairs(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> float:
    """Returns the share of query-key pairs that attention computes: causal, about half."""
    names = [argument.name for argument in schema_of(operator).arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if not given.get("is_causal"):
        return 1.0
    num_queries, num_keys = (int(given[name].shape[-2]) for name in ("query", "key"))
    triangle = min(num_queries, num_keys)
    pairs = triangle * (triangle + 1) / 2 + (num_queries - triangle) * num_keys
    return pairs / max(num_queries * num_keys, 1)


def _of_all_heads(operator: Any, args: Sequence[Any]) -> Sequence[Any]:
    """Returns operands with keys and values repeated for each head, as older tables need them."""
    names = [argument.name for argument in schema_of(operator).arguments]
    query = args[names.index("query")]

    def shown(name: str, value: Any) -> Any:
        is_shared = name in ("key", "value") and value.shape[:-2] != query.shape[:-2]
        if not is_shared or value.dim() < 4 or query.shape[1] % value.shape[1]:
            return value
        return value.repeat_interleave(query.shape[1] // value.shape[1], 1)

    return [shown(name, value) for name, value in zip(names, args, strict=False)]


def _is_attention(operator: Any) -> bool:
    return any(part in str(operator) for part in _ATTENTION_NAMES)


def flops(node: torch.fx.Node) -> int:
    """Returns the FLOPs of a node."""
    args, kwargs, result = map_arg((node.args, node.kwargs, node), lambda n: n.meta.get("val"))
    return flops_of(node.target, args, kwargs, result)


def is_heavy(node: torch.fx.Node) -> bool:
    """Whether an operator's work grows faster than its operands: products and attention."""
    return _is_attention(node.target) or flops(node) > 0


def is_free(node: torch.fx.Node) -> bool:
    """Whether a node computes nothing: a view, or a getitem of an operator's results."""
    return node.op != "call_function" or is_view(node) or operator_schema(node) is None


def value_bytes(node: torch.fx.Node) -> int:
    """Returns the bytes of a node's value (of all its results)."""
    return sum(TensorType.of(v).num_bytes for v in tensors_of(node))


def tensors_of(node: torch.fx.Node) -> list[torch.Tensor]:
    """Returns a node's results, as far as they are tensors."""
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else (value,)
    return [v for v in values if isinstance(v, torch.Tensor)]


@dataclass(frozen=True)
class OperatorCosts:
    """Costs on one device; fused elementwise operators move no bytes of their own."""

    rates: Rates = CPU
    fused: bool = True

    def of(self, node: torch.fx.Node) -> Cost:
        """Returns the cost of an operator by itself: it reads operands and writes its result."""
        moved = sum(map(value_bytes, (node, *node.all_input_nodes)))
        done = flops(node)
        dtype = next((t.dtype for t in tensors_of(node)), torch.float32)
        return Cost(done, moved, self.rates.seconds(done, moved, dtype))

    def redo_s(self, node: torch.fx.Node) -> float:
        """Returns the seconds to recompute a node's value, if fused in the kernel that reads it."""
        if is_free(node):
            return 0.0
        if self.fused and is_elementwise(node):
            return value_bytes(node) / self.rates.bytes_per_s / 4
        return self.of(node).seconds

    def offload_s(self, node: torch.fx.Node) -> float:
        """Returns the seconds to copy a value to the host and back; infinite without a host."""
        rate = self.rates.host_bytes_per_s
        return 2 * value_bytes(node) / rate if rate else math.inf

    def save_s(self, node: torch.fx.Node) -> float:
        """Returns the seconds to write and read back a value that fusion would not write."""
        if self.fused and is_elementwise(node):
            return 2 * value_bytes(node) / self.rates.bytes_per_s
        return 0.0


class ProgramCosts:
    """Computes the costs of programs, each different closure once."""

    def __init__(self, costs: OperatorCosts) -> None:
        self._costs = costs
        self._closures: dict[Closure, Cost] = {}

    def closure(self, closure: Closure) -> Cost:
        """Returns the cost of one call of a closure."""
        if closure not in self._closures:
            self._closures[closure] = self._measured(closure)
        return self._closures[closure]

    def program(self, program: Program) -> Cost:
        """Returns the cost of one run of a program."""
        return sum((self.closure(call.closure) for call in program.calls), Cost())

    def _measured(self, closure: Closure) -> Cost:
        if isinstance(closure, Composite):
            return self.program(closure.program)
        if isinstance(closure, Leaf):
            nodes = (node for node in closure.nodes if not is_free(node))
            return sum(map(self._costs.of, nodes), Cost())
        return Cost()
