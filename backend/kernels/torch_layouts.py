"""Adapter: the layouts of a graph, kept through Inductor's passes.

The passes take a product with one, a sum with zero and their like for the operand if shape and
dtype agree, whatever the strides, and note the strides of the one for the other. Who reads it was
traced with the strides of before: the types of the graph's results are fixed by then, and so is the
meaning of ``as_strided``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx
from torch.fx.node import map_arg

from ...reuse.ir.types import TensorType, strides_that_matter

aten = torch.ops.aten


class Layouts:
    """How the values of a graph are laid out before passes run over it."""

    def __init__(self, graph: torch.fx.Graph) -> None:
        self._values = {node: node.meta.get("val") for node in graph.nodes}
        self._read = {node: [_type(x) for x in _operands(node)] for node in graph.nodes}

    def restore(self, graph: torch.fx.Graph) -> None:
        """Copies what nodes read into the layouts that they read before, where these differ now."""
        for node in graph.nodes:  # a pass also hands the value of a node that goes to its operand
            if node in self._values and "val" in node.meta:
                node.meta["val"] = self._values[node]
        copies: dict[tuple[torch.fx.Node, TensorType], torch.fx.Node] = {}
        for node in list(graph.nodes):
            for operand, wanted in self._moved(node):
                if (operand, wanted) not in copies:
                    with graph.inserting_before(node):
                        copies[operand, wanted] = _copy(graph, operand, wanted)
                node.replace_input_with(operand, copies[operand, wanted])

    def _moved(self, node: torch.fx.Node) -> list[tuple[torch.fx.Node, TensorType]]:
        """Returns the operands that lie in other layouts than the node read before, and these."""
        operands, types = _operands(node), self._read.get(node, [])
        if len(operands) != len(types):
            return []  # a pass gave it other operands
        pairs = zip(operands, types, strict=True)
        return [(x, wanted) for x, wanted in pairs if wanted and _differs_in_strides(x, wanted)]


def _operands(node: torch.fx.Node) -> list[torch.fx.Node]:
    operands: list[torch.fx.Node] = []
    map_arg((node.args, node.kwargs), operands.append)
    return operands


def _type(operand: torch.fx.Node) -> TensorType | None:
    value = operand.meta.get("val")
    return TensorType.of(value) if isinstance(value, torch.Tensor) else None


def _differs_in_strides(operand: torch.fx.Node, wanted: TensorType) -> bool:
    found = _type(operand)
    if found is None or (found.shape, found.dtype) != (wanted.shape, wanted.dtype):
        return False
    strides = [strides_that_matter(t.shape, t.stride) for t in (found, wanted)]
    return wanted.is_dense and strides[0] != strides[1]


def _copy(graph: torch.fx.Graph, operand: torch.fx.Node, wanted: TensorType) -> torch.fx.Node:
    """Adds a copy of an operand in a dense layout: contiguous once its axes are in that order."""
    order = _order(wanted)
    back = sorted(range(len(order)), key=order.__getitem__)
    made = operand
    contiguous: dict[str, Any] = {"memory_format": torch.contiguous_format}
    steps: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
        (aten.permute.default, (order,), {}),
        (aten.clone.default, (), contiguous),
        (aten.permute.default, (back,), {}),
    ]
    for target, args, kwargs in steps:
        given = made.meta["val"]
        made = graph.call_function(target, (made, *args), kwargs)
        made.meta.update(operand.meta)
        made.meta["val"] = target(given, *args, **kwargs)
    return made


def _order(type_: TensorType) -> list[int]:
    """Returns the axes of a dense type, outermost first."""
    axes = [axis for axis, size in enumerate(type_.shape) if size != 1]
    order: list[int] = []
    expected = 1
    while axes:
        innermost = next(axis for axis in axes if type_.stride[axis] == expected)
        axes.remove(innermost)
        order.insert(0, innermost)
        expected *= type_.shape[innermost]
    return [axis for axis, size in enumerate(type_.shape) if size == 1] + order
