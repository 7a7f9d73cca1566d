"""What operators and programs cost: FLOPs, bytes and seconds. A device is a row of rates.

An operator takes the longer of two times (the roofline): that of its FLOPs at the rate of the
device's matrix products, and that of the bytes that it reads and writes at the rate of its memory.
Only the ratios of such seconds are relied on: to choose what is computed again, where a model is
cut into stages, which mode a derivative takes. FLOPs are those of matrix products, convolutions and
attention, by PyTorch's own table.

Source: Williams, Waterman, Patterson: Roofline, CACM 52(4), 2009.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch.fx.node import map_arg

from ..torch_names import matmul_precision, operator_schema
from .leaf import carries_gradient, flat_types
from .operators import is_elementwise, is_mutable, is_view
from .program import Call, Closure, Composite, Leaf, Program, Value, outputs_of
from .types import TensorType


@dataclass(frozen=True)
class Rates:
    """What a device sustains: one row for each device.

    Attributes:
        flops_per_s: of matrix products.
        bytes_per_s: of memory traffic.
        half_flops_per_s: of matrix products in half precision, where they are faster.
        tf32_flops_per_s: of those in float32 where the user allows TF32.
        transfer_bytes_per_s: between two ranks.
        transfer_latency_s: of one transfer.
    """

    flops_per_s: float
    bytes_per_s: float
    half_flops_per_s: float = 0.0
    tf32_flops_per_s: float = 0.0
    transfer_bytes_per_s: float = 5e10
    transfer_latency_s: float = 1e-5

    def seconds(self, flops: int, num_bytes: int, dtype: torch.dtype = torch.float32) -> float:
        """Returns how long it takes to compute so much, and to move so many bytes meanwhile."""
        return max(flops / self._products_per_s(dtype), num_bytes / self.bytes_per_s)

    def _products_per_s(self, dtype: torch.dtype) -> float:
        if dtype in (torch.float16, torch.bfloat16):
            return max(self.flops_per_s, self.half_flops_per_s)
        allows_tf32 = dtype is torch.float32 and matmul_precision()[0] == "tf32"
        return max(self.flops_per_s, self.tf32_flops_per_s if allows_tf32 else 0.0)


CPU = Rates(4e10, 8e9, transfer_bytes_per_s=2e9, transfer_latency_s=1e-4)
"""One core, about: what matters is that a byte costs as much as five FLOPs."""
CUDA = Rates(3e14, 2e12)
"""A GPU of which nothing else is known, with products in half precision."""


@dataclass(frozen=True)
class Cost:
    """What an operator or a program does in one run; if it is trained, with its backward.

    Attributes:
        flops: of products, convolutions and attention.
        moved_bytes: that its operators read and write.
        seconds: that this takes by a row of rates.
    """

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
        """Returns that of a multiple."""
        flops, moved = round(self.flops * factor), round(self.moved_bytes * factor)
        return Cost(flops, moved, self.seconds * factor)


_ATTENTION_NAMES = ("scaled_dot_product", "flash_attention", "efficient_attention")
_PLACED = ("cat", "stack", "clone", "copy", "full", "ones", "zeros", "new_", "_to_copy", "_scatter")
_COMPOSITE = torch.DispatchKey.CompositeImplicitAutograd
_OF_VIEWS = ("select_backward", "slice_backward", "constant_pad")


def flops_of(operator: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Returns the FLOPs of an operator on tensors of any kind (fake, meta): 0 if it has none."""
    from torch.utils.flop_counter import FlopCounterMode, flop_registry  # it imports Triton

    packet = getattr(operator, "overloadpacket", None)
    formula = flop_registry.get(packet or operator)
    if formula is None and packet and _is_attention(packet):
        # PyTorch's table lacks the attention of a CPU, which multiplies what a GPU's does.
        is_backward = "backward" in str(packet)
        like = "dot_product_flash_attention" + ("_backward" if is_backward else "")
        formula = next(f for op, f in flop_registry.items() if str(op).endswith(like))
        args, kwargs = args[: 3 + is_backward], {}
    if formula is not None:
        return int(formula(*args, **kwargs, out_val=result))
    if not packet or is_mutable(operator) or not operator.has_kernel_for_dispatch_key(_COMPOSITE):
        return 0
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        operator(*args, **kwargs)  # linear, einsum: what it consists of is counted
    return int(counter.get_total_flops())


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
    """Whether a node computes nothing: views, and picks of results."""
    return node.op != "call_function" or is_view(node) or operator_schema(node) is None


def value_bytes(node: torch.fx.Node) -> int:
    """Returns the bytes of a node's value (of all its results)."""
    return sum(TensorType.of(v).num_bytes for v in _tensors(node))


def _tensors(node: torch.fx.Node) -> list[torch.Tensor]:
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else (value,)
    return [v for v in values if isinstance(v, torch.Tensor)]


@dataclass(frozen=True)
class OperatorCosts:
    """What operators cost on one device.

    Attributes:
        rates: of the device.
        fused: whether elementwise operators are fused into what reads them, and then move no
            bytes of their own.
    """

    rates: Rates = CPU
    fused: bool = True

    def of(self, node: torch.fx.Node) -> Cost:
        """Returns what an operator costs by itself: it reads its operands and writes its result."""
        moved = sum(map(value_bytes, (node, *node.all_input_nodes)))
        done = flops(node)
        dtype = next((t.dtype for t in _tensors(node)), torch.float32)
        return Cost(done, moved, self.rates.seconds(done, moved, dtype))

    def redo_s(self, node: torch.fx.Node) -> float:
        """Returns the seconds to compute a node's value again, in a kernel that reads it."""
        if is_free(node):
            return 0.0
        if self.fused and is_elementwise(node):
            return value_bytes(node) / self.rates.bytes_per_s / 4
        return self.of(node).seconds

    def save_s(self, node: torch.fx.Node) -> float:
        """Returns the seconds to write a value and read it back, where it would not be written."""
        if self.fused and is_elementwise(node):
            return 2 * value_bytes(node) / self.rates.bytes_per_s
        return 0.0


Active = tuple[bool, ...]  # which operands or results carry a gradient
Carries = Callable[[object], bool]


class ProgramCosts:
    """Counts what programs cost; looks at each different closure once.

    With fusion a value that is computed element by element is written only where something else
    reads it, and read once by all elementwise operators of a closure together.

    Where gradients will come back the backward counts too, by a rule, for it is not there yet. For
    each operand that carries a gradient an operator runs once more (a product once: that is exact;
    a derivative's own elementwise formula twice). With fusion each value that is in memory is read
    once more, and its gradient written and read.

    Args:
        costs: of operators.
        at: gives a leaf numbers for sizes that are symbols.
    """

    def __init__(
        self, costs: OperatorCosts, at: Callable[[Leaf], Leaf] = lambda leaf: leaf
    ) -> None:
        self._costs = costs
        self._at = at
        self._closures: dict[tuple[Closure, Active], tuple[Cost, Active]] = {}

    def closure(self, closure: Closure) -> Cost:
        """Returns the cost of one call of a closure, without a backward."""
        return self._closure(closure, (False,) * len(closure.input_types))[0]

    def program(
        self, program: Program, before: Collection[Call] = (), active: Collection[Value] = ()
    ) -> Cost:
        """Returns the cost of a program.

        Args:
            program: that is counted.
            before: calls of it that are not.
            active: inputs to which gradients will come back: it is trained.
        """
        return self._program(program, set(before), set(active))[0]

    def _program(
        self, program: Program, before: set[Call], active: set[Value]
    ) -> tuple[Cost, Active]:
        total = Cost()
        for call in program.calls:
            flags = tuple(v in active for v in call.args)
            cost, results = self._closure(call.closure, flags)
            active.update(v for v, flag in zip(call.results, results, strict=True) if flag)
            total += Cost() if call in before else cost
        return total, tuple(v in active for v in program.outputs)

    def _closure(self, closure: Closure, flags: Active) -> tuple[Cost, Active]:
        if (closure, flags) not in self._closures:
            self._closures[closure, flags] = self._measured(closure, flags)
        return self._closures[closure, flags]

    def _measured(self, closure: Closure, flags: Active) -> tuple[Cost, Active]:
        if isinstance(closure, Composite):
            inputs = closure.program.inputs
            active = {v for v, flag in zip(inputs, flags, strict=True) if flag}
            return self._program(closure.program, set(), active)
        if isinstance(closure, Leaf):
            return self._leaf(self._at(closure), flags)
        return Cost(), (any(flags),) * len(closure.output_types)

    def _leaf(self, leaf: Leaf, flags: Active) -> tuple[Cost, Active]:
        pairs = zip(leaf.input_types, flags, strict=True)
        carries = carries_gradient(leaf, [flag for t, flag in pairs for _ in flat_types([t])])
        total = Cost()
        for node in leaf.nodes:
            if not is_free(node) and not (self._costs.fused and _is_fused(node)):
                total += self._costs.of(node).times(1 + _runs_again(node, carries))
        if self._costs.fused:
            moved = sum(_fused_bytes(leaf, carries))
            total += Cost(0, moved, self._costs.rates.seconds(0, moved))
        rest = iter([carries(n) for n in outputs_of(leaf.module)])
        found = [any([next(rest) for _ in flat_types([t])]) for t in leaf.output_types]
        return total, tuple(found)


def _fused_bytes(leaf: Leaf, carries: Carries) -> Iterator[int]:
    """Yields what fused operators move: each value that is in memory is written and read once."""
    results = {_memory(n) for n in outputs_of(leaf.module) if isinstance(n, torch.fx.Node)}
    readers: dict[torch.fx.Node, list[torch.fx.Node]] = {}
    for node in leaf.nodes:
        if not is_free(node):
            for operand in {_memory(n) for n in node.all_input_nodes}:
                readers.setdefault(operand, []).append(node)
    for node in (*leaf.entries, *leaf.nodes):
        if node.op == "call_function" and is_free(node):
            continue
        fused = [_is_fused(reader) for reader in readers.get(node, ())]
        is_made_so = node.op == "call_function" and _is_fused(node)
        is_in_memory = not is_made_so or node in results or not all(fused)
        size = value_bytes(node)
        if is_in_memory and is_made_so:
            yield size * (2 if carries(node) else 1)
        if is_in_memory and any(fused):
            yield size * (3 if carries(node) else 1)


def _memory(node: torch.fx.Node) -> torch.fx.Node:
    """Returns what made the memory that a node's value lies in."""
    while node.op == "call_function" and is_free(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _is_fused(node: torch.fx.Node) -> bool:
    """Whether a node is computed in one kernel with what reads it, or with its operands."""
    name = str(node.target).partition("aten.")[2]
    return is_elementwise(node) or name.startswith(_PLACED) or any(p in name for p in _OF_VIEWS)


def _runs_again(node: torch.fx.Node, carries: Carries) -> int:
    """Returns how often an operator runs again in a backward: for each operand with a gradient.

    The bias of a product is none of these.
    """
    operands = [n for n in node.all_input_nodes if carries(n)] if carries(node) else []
    if is_heavy(node):
        return sum(t.dim() > 1 for n in operands for t in _tensors(n))
    return len(operands) * (2 if "_backward" in str(node.target) else 1)
