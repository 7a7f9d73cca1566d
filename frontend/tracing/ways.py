"""Finds what a tensor of a trace was computed from: in the trace, and in autograd's graph."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
import torch.fx
from torch.autograd.graph import get_gradient_edge

from ...reuse.ir.leaf import memory_of, stamp_of
from ...reuse.ir.operators import mutated_args

WRITES = "writes"
"""Key in ``meta`` of the operands that a node of ours writes to; others have a schema."""


def made_of(
    *nodes: torch.fx.Node,
    operands: Callable[[torch.fx.Node], Sequence[torch.fx.Node]] | None = None,
) -> Collection[torch.fx.Node]:
    """Returns some nodes and all that they were made of: by all operands, or by some."""
    found = dict.fromkeys(nodes)
    memory = set(map(memory_of, nodes))
    for node in reversed(nodes[0].graph.nodes) if nodes else ():
        # Memory is also made of whatever was written into it before, through whichever view.
        if node in found or not memory.isdisjoint(map(memory_of, written_by(node))):
            given = operands(node) if operands else node.all_input_nodes
            found.update(dict.fromkeys((node, *given)))
            memory.update(map(memory_of, given))
    return found


def differentiated(node: torch.fx.Node) -> Sequence[torch.fx.Node]:
    """Returns the operands that gradients of a node may flow back to."""
    # A write without grad leaves the history of the memory as it was.
    return node.all_input_nodes if stamp_of(node).grad_enabled else written_by(node)


def written_by(node: torch.fx.Node) -> Sequence[torch.fx.Node]:
    """Returns the operands that a node changes in place."""
    found: Sequence[torch.fx.Node] = node.meta.get(WRITES) or mutated_args(node)
    return found


def leads_to(outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> bool:
    """Whether autograd's own graph leads from some tensors back to another one."""
    pending: list[Any] = [tuple(get_gradient_edge(y)) for y in outputs]
    sought, seen = tuple(get_gradient_edge(tensor))[:2], set()
    while pending:
        edge = pending.pop()[:2]
        if edge == sought:
            return True
        if edge in seen or edge[0] is None:
            continue
        seen.add(edge)
        pending += edge[0].next_functions
    return False
