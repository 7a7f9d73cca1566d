"""Adapter: random operators of a graph are drawn in its order. Inductor's names for it are here.

Inductor orders kernels by what they read, and draws that read nothing of each other may change
places: each would then get the numbers that eager gives to another one. From torch 2.13 on a pass
of its own chains them, but a dropout may still come before a draw that nobody reads; ours takes its
place on every version.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.fx

_CHAIN = "_chain_random_ops_for_ordering"  # not before torch 2.13


@contextmanager
def drawn_in_order() -> Iterator[None]:
    """Lets every draw, within this context, wait for the one before it in its graph."""
    import torch._inductor.fx_passes.post_grad as post_grad
    from torch._inductor.graph import GraphLowering

    run_node = GraphLowering.run_node
    last: Any = (None, "")

    def ordered(self: Any, node: torch.fx.Node) -> Any:
        nonlocal last
        num_known = len(self.operations)
        result = run_node(self, node)
        made = self.operations[num_known:]
        if made and draws(node):
            draw = _of_the_draw(made)
            graph, buffer = last
            if graph is self:
                graph.additional_buffer_deps[draw.get_operation_name()].add(buffer)
            last = self, draw.get_name()
        return result

    inductors_own = getattr(post_grad, "_chain_random_ops_for_ordering", None)
    GraphLowering.run_node = ordered  # type: ignore[method-assign]
    setattr(post_grad, _CHAIN, lambda graph: None)
    try:
        yield
    finally:
        GraphLowering.run_node = run_node  # type: ignore[method-assign]
        if inductors_own is None:
            delattr(post_grad, _CHAIN)
        else:
            setattr(post_grad, _CHAIN, inductors_own)


def _of_the_draw(made: Sequence[Any]) -> Any:
    """Picks the operation that draws among those a node was lowered to: its operands come first."""
    from torch._inductor.ir import FallbackKernel

    return next((operation for operation in made if isinstance(operation, FallbackKernel)), made[0])


def draws(node: torch.fx.Node) -> bool:
    """Whether a node calls a random operator."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
