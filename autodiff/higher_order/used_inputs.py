"""Which inputs the numbers in a program's outputs are computed from.

An operator uses all of its operands, but batch norm in training mode: it takes running statistics
to update them, and neither its result nor its gradients are computed from what they were.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch.fx

from ...reuse.ir.operators import is_mutable
from ...reuse.ir.program import Leaf, Program, walk_closures
from ...reuse.torch_names import operator_schema
from ..flows import Inputs, flows

_STATISTICS = ("running_mean", "running_var")
_TRAINING = ("training", "train")


def used_inputs(program: Program) -> Inputs:
    """Returns the positions of inputs that some output is computed from.

    All, where an operator changes a value in place: that may be seen under other names.
    """
    leaves = (closure for closure in walk_closures(program) if isinstance(closure, Leaf))
    if any(is_mutable(node.target) for leaf in leaves for node in leaf.nodes):
        return frozenset(range(len(program.inputs)))
    return frozenset().union(*flows(program, _computed_from))


def _computed_from(node: torch.fx.Node) -> Iterable[torch.fx.Node]:
    schema = operator_schema(node)
    names = [argument.name for argument in schema.arguments] if schema is not None else []
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    if not any(given.get(name) is True for name in _TRAINING):
        return node.all_input_nodes
    unused = [given.get(name) for name in _STATISTICS]
    others = [value for name, value in given.items() if name not in _STATISTICS]
    return [n for n in node.all_input_nodes if n not in unused or n in others]
