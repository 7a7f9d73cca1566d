"""From which inputs of a program something flows to its values; each closure is looked at once.

What flows is the caller's question: memory (:mod:`.aliasing`), numbers
(:mod:`.higher_order.used_inputs`). It is asked of each operator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch.fx

from ..reuse.ir.program import Closure, Composite, Leaf, Program, Value, walk_closures
from ..reuse.ir.types import Type, flatten_type

Inputs = frozenset[int]
Through = Callable[[torch.fx.Node], Iterable[torch.fx.Node]]
"""Of an operator the operands from which something flows to its result."""


def flows(program: Program, through: Through) -> list[Inputs]:
    """Returns the positions of inputs from which something flows to each output."""
    found: dict[Closure, list[Inputs]] = {}
    for closure in walk_closures(program):
        if isinstance(closure, Leaf):
            found[closure] = _of_leaf(closure, through)
        elif isinstance(closure, Composite):
            found[closure] = _of_program(closure.program, found)
        else:
            everything = frozenset(range(len(closure.input_types)))
            found[closure] = [everything] * len(closure.output_types)
    return _of_program(program, found)


def _of_program(program: Program, closures: Mapping[Closure, list[Inputs]]) -> list[Inputs]:
    values: dict[Value, Inputs] = {v: frozenset([i]) for i, v in enumerate(program.inputs)}
    for call in program.calls:
        for result, operands in zip(call.results, closures[call.closure], strict=True):
            values[result] = _union(values[call.args[i]] for i in operands)
    return [values[value] for value in program.outputs]


def _of_leaf(leaf: Leaf, through: Through) -> list[Inputs]:
    owner = iter(i for i, type_ in enumerate(leaf.input_types) for _ in flatten_type(type_))
    nodes: dict[torch.fx.Node, Inputs] = {}
    for node in leaf.module.graph.nodes:
        if node.op == "placeholder":
            nodes[node] = frozenset([next(owner)])
        elif node.op != "output":
            nodes[node] = _union(nodes[n] for n in through(node))
    flat = leaf.module.graph.output_node().args[0]
    assert isinstance(flat, (tuple, list))
    rest = iter(flat)

    def of(type_: Type) -> Inputs:
        parts = [next(rest) for _ in flatten_type(type_)]
        return _union(nodes[p] for p in parts if isinstance(p, torch.fx.Node))

    return [of(type_) for type_ in leaf.output_types]


def _union(parts: Iterable[Inputs]) -> Inputs:
    return frozenset().union(*parts)
