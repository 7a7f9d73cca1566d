"""Which inputs of a program its saved values share memory with.

Autograd refuses a backward whose saved tensors were changed since the forward. It can do that for
what lazyinline saves only if it is told which inputs are inside.
"""

from __future__ import annotations

import operator

import torch.fx

from ..reuse.ir.leaf import is_view, mutated_args
from ..reuse.ir.program import Closure, Composite, Leaf, Program, Value, walk_closures
from ..reuse.ir.types import flatten_type

Inputs = frozenset[int]
_NONE: Inputs = frozenset()


def saved_inputs(forward: Program) -> tuple[int, ...]:
    """Returns the inputs that share memory with the last output (the saved struct)."""
    return tuple(sorted(_values(forward, _by_closure(forward))[forward.outputs[-1]]))


def _by_closure(program: Program) -> dict[Closure, tuple[Inputs, ...]]:
    """For each closure, for each output, the operands it may share memory with."""
    found: dict[Closure, tuple[Inputs, ...]] = {}
    for closure in walk_closures(program):
        if isinstance(closure, Leaf):
            found[closure] = _of_leaf(closure)
        elif isinstance(closure, Composite):
            values = _values(closure.program, found)
            found[closure] = tuple(values[v] for v in closure.program.outputs)
        else:
            everything = frozenset(range(len(closure.input_types)))
            found[closure] = (everything,) * len(closure.output_types)
    return found


def _values(program: Program, closures: dict[Closure, tuple[Inputs, ...]]) -> dict[Value, Inputs]:
    values: dict[Value, Inputs] = {v: frozenset([i]) for i, v in enumerate(program.inputs)}
    for call in program.calls:
        for result, operands in zip(call.results, closures[call.closure], strict=True):
            values[result] = frozenset().union(*(values[call.args[i]] for i in operands))
    return values


def _of_leaf(leaf: Leaf) -> tuple[Inputs, ...]:
    owner = [i for i, type_ in enumerate(leaf.input_types) for _ in flatten_type(type_)]
    nodes: dict[torch.fx.Node, Inputs] = {}
    place = 0
    for node in leaf.module.graph.nodes:
        if node.op == "placeholder":
            nodes[node] = frozenset([owner[place]])
            place += 1
        elif is_view(node) or mutated_args(node) or node.target is operator.getitem:
            nodes[node] = frozenset().union(*(nodes[n] for n in node.all_input_nodes))
        else:
            nodes[node] = _NONE
    flat = leaf.module.graph.output_node().args[0]
    assert isinstance(flat, (tuple, list))
    rest = iter(flat)
    groups = []
    for type_ in leaf.output_types:
        parts = [next(rest) for _ in flatten_type(type_)]
        groups.append(frozenset().union(*(nodes[p] for p in parts if isinstance(p, torch.fx.Node))))
    return tuple(groups)
