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


def _zeros(size: Any, *, device: Any = None, **options: Any) -> torch.Tensor:
    return torch.zeros(size, device=device, **options)


def _written(write: Any, of_number: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns what applies an operator to numbers; those that are one in memory stay one."""

    def written(tensor: Any) -> Any:
        if not isinstance(tensor, torch.Tensor):  # the 2j of `x * 2j`, which autograd conjugates
            return of_number(tensor)
        shape, repeated = tensor.shape, tensor
        for dim, (size, step) in enumerate(zip(shape, tensor.stride(), strict=True)):
            if step == 0 and size > 1:
                repeated = repeated.narrow(dim, 0, 1)
        result: torch.Tensor = write(repeated)
        return result if repeated is tensor else result.expand(shape)

    return written


def _conjugate(number: Any) -> Any:
    return number.conjugate()


WRITTEN: Mapping[Any, Callable[..., Any]] = {
    torch.ops.aten._conj.default: _written(torch.ops.aten._conj_physical.default, _conjugate),
    torch.ops.aten._neg_view.default: _written(torch.ops.aten.neg.default, operator.neg),
}
"""Operators that only mark memory, and what writes the numbers that they stand for."""

PLAIN_ZEROS: Mapping[Any, Callable[..., torch.Tensor]] = {
    torch.ops.aten._efficientzerotensor.default: _zeros
}
"""Not left for later: an operator on fake lazy zeros makes its result on the meta device."""

_TWICE = (torch.ops.aten._conj.default, torch.ops.aten._neg_view.default)
_WRITERS = (torch.ops.aten._conj_physical.default, torch.ops.aten.neg.default)


def is_lazy(node: torch.fx.Node) -> bool:
    """Whether an operator's result is a mark on memory."""
    return node.target in WRITTEN


def drop_pairs(module: torch.fx.GraphModule) -> None:
    """Removes marks that undo each other: both are views, so it is the very same tensor."""
    for node in module.graph.nodes:
        before = node.args[0] if node.target in _TWICE else None
        if isinstance(before, torch.fx.Node) and before.target is node.target:
            node.replace_all_uses_with(before.args[0])
    module.graph.eliminate_dead_code()


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
