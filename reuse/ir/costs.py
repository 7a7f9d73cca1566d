"""Costs of operators and programs: FLOPs, bytes and seconds. A device is a row of rates.

An operator takes the longer of two times (the roofline): that of its FLOPs at the rate of the
device's matrix products, and that of the bytes that it reads and writes at the rate of its memory.
Only the ratios of such seconds are relied on: to choose what is recomputed, and where a model is
cut into stages. FLOPs are those of matrix products, convolutions and attention, by PyTorch's own
table; for causal attention, those that a fused kernel computes.

Source: Williams, Waterman, Patterson: Roofline, CACM 52(4), 2009.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch.fx.node import map_arg

from ..once import once
from ..torch_names import matmul_precision, operator_schema, schema_of
from .operators import is_elementwise, is_mutable, is_view
from .program import Closure, Composite, Leaf, Program
from .types import TensorType


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


_COMPOSITE = torch.DispatchKey.CompositeImplicitAutograd


def flops_of(operator: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Returns the FLOPs of an operator on tensors of any kind (fake, meta): 0 if it has none."""
    from torch.utils.flop_counter import FlopCounterMode, flop_registry  # it imports Triton

    packet = getattr(operator, "overloadpacket", None)
    if packet and _is_attention(packet):
        return _flops_of_attention(operator, args, kwargs)
    formula = flop_registry.get(packet or operator)
    if formula is not None:
        return int(formula(*args, **kwargs, out_val=result))
    if not packet or is_mutable(operator) or not operator.has_kernel_for_dispatch_key(_COMPOSITE):
        return 0
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        operator(*args, **kwargs)  # linear, einsum: counts the operators that it decomposes into
    return int(counter.get_total_flops())


def _flops_of_attention(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Returns the FLOPs of two products for each pair of a query and a key; backward, of five."""
    # PyTorch's table lacks the CPU's kernel, and knows neither causal masks nor, in older versions,
    # keys that several heads share.
    names = [argument.name for argument in schema_of(operator).arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    *heads, num_queries, width = map(int, given["query"].shape)
    num_keys, value_width = int(given["key"].shape[-2]), int(given["value"].shape[-1])
    pairs = num_queries * num_keys
    if given.get("is_causal"):  # about half
        triangle = min(num_queries, num_keys)
        pairs = triangle * (triangle + 1) // 2 + (num_queries - triangle) * num_keys
    is_backward = "backward" in str(operator)
    widths = 3 * width + 2 * value_width if is_backward else width + value_width
    return 2 * math.prod(heads) * pairs * widths


def _is_attention(operator: Any) -> bool:
    return "scaled_dot_product" in str(operator)


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

    @once
    def closure(self, closure: Closure) -> Cost:
        """Returns the cost of one call of a closure."""
        if isinstance(closure, Composite):
            return self.program(closure.program)
        if isinstance(closure, Leaf):
            nodes = (node for node in closure.nodes if not is_free(node))
            return sum(map(self._costs.of, nodes), Cost())
        return Cost()

    def program(self, program: Program) -> Cost:
        """Returns the cost of one run of a program."""
        return sum((self.closure(call.closure) for call in program.calls), Cost())
