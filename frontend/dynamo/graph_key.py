"""What two regions of a flat graph are compared by: operators, constants and wiring, in full."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.fx

from ...reuse.freeze import Identity
from ...reuse.ir.leaf import FullKey, frozen_operands


def region_key(
    root: torch.nn.Module,
    nodes: Sequence[torch.fx.Node],
    inputs: Sequence[torch.fx.Node],
    outputs: Sequence[torch.fx.Node],
) -> FullKey:
    """Returns a value that is equal for two regions only if they compute the same.

    Args:
        root: what holds the graphs that nodes of the region refer to.
        nodes: the region, in order.
        inputs: what it takes from outside, in order.
        outputs: what is used outside, in order.
    """
    number = {node: index for index, node in enumerate((*inputs, *nodes))}
    rows = _rows(root, nodes, number)
    return FullKey((len(inputs), *rows, tuple(number[node] for node in outputs)))


def held(root: torch.nn.Module, node: torch.fx.Node) -> Any:
    """Returns what a ``get_attr`` or ``call_module`` node refers to."""
    found: Any = root
    for name in str(node.target).split("."):
        found = getattr(found, name)
    return found


def _rows(
    root: torch.nn.Module, nodes: Sequence[torch.fx.Node], number: Mapping[torch.fx.Node, int]
) -> list[Any]:
    return [
        (node.op, _target(root, node), frozen_operands((node.args, node.kwargs), number))
        for node in nodes
    ]


def _target(root: torch.nn.Module, node: torch.fx.Node) -> Any:
    """Returns what a node applies: operators by identity, graphs by what they hold."""
    if node.op in ("placeholder", "output"):  # names do not count
        return None
    if node.op not in ("get_attr", "call_module"):
        return node.target
    value = held(root, node)
    if not isinstance(value, torch.fx.GraphModule):
        return Identity(value)
    nodes = list(value.graph.nodes)
    return tuple(_rows(value, nodes, {node: index for index, node in enumerate(nodes)}))
