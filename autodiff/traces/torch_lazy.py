"""Adapter: operators whose result is a mark on memory, and what they are in a program.

``x.conj()`` makes no memory: PyTorch sets a bit on a view, and whoever reads the view minds it (so
``_neg_view``; an efficient zero tensor has no memory at all). A kernel that is given an address
minds no bit. Below capture there are therefore none: each such operator is the one that writes
the numbers. The alternative, bits that travel with every view, saves one pass over operands of
matrix products, and every kernel, cache entry, transfer and saved value would have to mind them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.fx

from ...reuse.ir.operators import is_view


def _written(write: Any, of_number: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns what applies an operator to numbers; those that are one in memory stay one."""

    def written(tensor: Any) -> Any:
        if not isinstance(tensor, torch.Tensor):  # the 2j of `x * 2j`, which autograd conjugates
            return of_number(tensor)
        shape, repeated = tensor.shape, tensor
        # Expanded dimensions are written once: `x.expand(1000, n).conj()` is n numbers.
        for dim, (size, step) in enumerate(zip(shape, tensor.stride(), strict=True)):
            if step == 0 and size > 1:
                repeated = repeated.narrow(dim, 0, 1)
        result: torch.Tensor = write(repeated)
        return result if repeated is tensor else result.expand(shape)

    return written


WRITTEN: Mapping[Any, Callable[..., Any]] = {
    torch.ops.aten._conj.default: _written(
        torch.ops.aten._conj_physical.default, lambda number: number.conjugate()
    ),
    torch.ops.aten._neg_view.default: _written(torch.ops.aten.neg.default, operator.neg),
}
"""Operators that only mark memory, and the operator that writes out the numbers."""

PLAIN_ZEROS: Mapping[Any, Callable[..., torch.Tensor]] = {
    torch.ops.aten._efficientzerotensor.default: torch.zeros
}
"""Not left for later: an operator on fake lazy zeros makes its result on the meta device."""

_WRITERS = (torch.ops.aten._conj_physical.default, torch.ops.aten.neg.default)


_STRIDED = torch.ops.aten.as_strided.default


def is_lazy(node: torch.fx.Node) -> bool:
    """Returns whether an operator's result is a mark on memory."""
    return node.target in WRITTEN


def drop_pairs(module: torch.fx.GraphModule) -> None:
    """Removes marks that undo each other: both are views, so it is the same tensor."""
    for node in module.graph.nodes:
        before = node.args[0] if is_lazy(node) else None
        if isinstance(before, torch.fx.Node) and before.target is node.target:
            node.replace_all_uses_with(before.args[0])
    module.graph.eliminate_dead_code()


def mark_after_strided(module: torch.fx.GraphModule) -> None:
    """Makes ``as_strided`` address memory that is not marked yet, and marks what it finds.

    It counts elements from the beginning of a memory, and what a mark writes has one of its own.
    """
    for node in module.graph.find_nodes(op="call_function", target=_STRIDED):
        beneath, marks = _beneath_marks(node.args[0])
        if not marks:
            continue
        offset = node.meta["val"].storage_offset()
        with module.graph.inserting_before(node):
            found = module.graph.call_function(_STRIDED, (beneath, *node.args[1:3], offset))
            found.meta.update(node.meta)
            for mark in reversed(marks):
                found = module.graph.call_function(mark, (found,))
                found.meta.update(node.meta)
        node.replace_all_uses_with(found)
        module.graph.erase_node(node)


def _beneath_marks(node: Any) -> tuple[Any, list[Any]]:
    """Returns what the lowest of the marks on a view of memory marks, and all of them."""
    beneath, marks = node, []
    while isinstance(node, torch.fx.Node) and is_view(node):
        if node.target in WRITTEN:
            beneath = node.args[0]
            marks.append(node.target)
        node = node.args[0]
    return beneath, marks


def drop_copies(module: torch.fx.GraphModule) -> None:
    """Removes copies of written numbers, which PyTorch made to write them.

    In a graph without in-place operators nobody can tell, unless both are returned.
    """
    graph = module.graph
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default):
        source = node.args[0]
        if not isinstance(source, torch.fx.Node) or source.target not in _WRITERS:
            continue
        if graph.output_node() in node.users:
            continue
        if source.meta["val"].stride() == node.meta["val"].stride():
            node.replace_all_uses_with(source)
            graph.erase_node(node)
