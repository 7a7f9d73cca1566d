"""What a program costs in one run: FLOPs, bytes and seconds, counted once per different closure.

Without fusion each operator reads its operands and writes its result. With it, what is computed
element by element is written only where something else reads it, and read once by all elementwise
operators of a closure together.

Where gradients will come back through it the backward counts too, by a rule, for it is not there
yet. For each operand that carries a gradient an operator runs once more (a product once: that is
exact; a derivative's own elementwise formula twice). With fusion each value that is in memory is
read once more, and its gradient written and read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

import torch
import torch.fx

from ..autodiff.higher_order.modes import Cost
from ..reuse.ir.leaf import carries_gradient, flat_types
from ..reuse.ir.program import Call, Closure, Composite, Leaf, Program, Value
from ..reuse.ir.types import Type
from .operator_costs import Roofline, flops, is_elementwise, is_free, is_heavy, value_bytes
from .sizes_at import SizesAt

Active = tuple[bool, ...]
"""Which operands or results carry a gradient."""

Carries = Callable[[object], bool]

_PLACED = ("cat", "stack", "clone", "copy", "full", "ones", "zeros", "new_", "_to_copy", "_scatter")
_OF_VIEWS = ("select_backward", "slice_backward", "constant_pad")


class ProgramCosts:
    """Counts; looks at each closure once.

    Args:
        costs: of operators.
        sizes: numbers for symbols.
    """

    def __init__(self, costs: Roofline, sizes: SizesAt) -> None:
        self._costs = costs
        self._sizes = sizes
        self._closures: dict[tuple[Closure, Active], tuple[Cost, Active]] = {}

    def added(
        self, program: Program, before: Collection[Call] = (), active: Collection[Value] = ()
    ) -> Cost:
        """Returns the cost of a program.

        Args:
            program: of plain operators.
            before: calls of it that are not counted.
            active: inputs to which gradients will come back: it is trained.
        """
        cost, _ = self._program(program, set(before), set(active))
        return cost

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
            return self._leaf(self._sizes.leaf(closure), flags)
        return Cost(), (any(flags),) * len(closure.output_types)

    def _leaf(self, leaf: Leaf, flags: Active) -> tuple[Cost, Active]:
        carries = carries_gradient(leaf, _flat(leaf.input_types, flags))
        total = Cost()
        for node in leaf.nodes:
            if not is_free(node) and not (self._costs.fused and _is_fused(node)):
                total += self._operator(node).times(1 + _runs_again(node, carries))
        if self._costs.fused:
            total += self._moved(sum(_fused_bytes(leaf, carries)))
        rest = iter([carries(n) for n in _results(leaf)])
        found = [any([next(rest) for _ in flat_types([t])]) for t in leaf.output_types]
        return total, tuple(found)

    def _operator(self, node: torch.fx.Node) -> Cost:
        moved = sum(map(value_bytes, (node, *node.all_input_nodes)))
        return Cost(flops(node), moved, self._costs.redo_s(node))

    def _moved(self, num_bytes: int) -> Cost:
        return Cost(0, num_bytes, num_bytes / self._costs.bytes_per_s)


def _fused_bytes(leaf: Leaf, carries: Carries) -> Iterator[int]:
    """Yields what fused operators move: each value that is in memory is written and read once."""
    results = {_memory(n) for n in _results(leaf) if isinstance(n, torch.fx.Node)}
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
        return sum(_num_dims(n) > 1 for n in operands)
    return len(operands) * (2 if "_backward" in str(node.target) else 1)


def _num_dims(node: torch.fx.Node) -> int:
    value = node.meta.get("val")
    return value.dim() if isinstance(value, torch.Tensor) else 0


def _flat(types: Sequence[Type], flags: Active) -> list[bool]:
    pairs = zip(types, flags, strict=True)
    return [flag for type_, flag in pairs for _ in flat_types([type_])]


def _results(leaf: Leaf) -> list[object]:
    (output,) = (n for n in leaf.module.graph.nodes if n.op == "output")
    return list(output.args[0])  # type: ignore[arg-type]
