"""Adapter: random operators of a graph are drawn in its order. Inductor's names for it are here.

Inductor orders kernels by what they read, and draws that read nothing of each other may change
places: each would then get the numbers that eager gives to another one. From torch 2.13 on a pass
of its own chains them; before, we do.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.fx


@contextmanager
def drawn_in_order() -> Iterator[None]:
    """Lets every draw, within this context, wait for the one before it in its graph."""
    from torch._inductor.fx_passes import post_grad

    with nullcontext() if hasattr(post_grad, "_chain_random_ops_for_ordering") else chained():
        yield


@contextmanager
def chained() -> Iterator[None]:
    """Does :func:`drawn_in_order` where Inductor does not."""
    from torch._inductor.graph import GraphLowering

    run_node = GraphLowering.run_node
    last: Any = (None, "")

    def ordered(self: Any, node: torch.fx.Node) -> Any:
        nonlocal last
        num_known = len(self.operations)
        result = run_node(self, node)
        made = self.operations[num_known:]
        if made and draws(node):
            graph, buffer = last
            if graph is self:
                graph.additional_buffer_deps[made[0].get_operation_name()].add(buffer)
            last = self, made[0].get_name()
        return result

    GraphLowering.run_node = ordered  # type: ignore[method-assign]
    try:
        yield
    finally:
        GraphLowering.run_node = run_node  # type: ignore[method-assign]


def draws(node: torch.fx.Node) -> bool:
    """Whether a node calls a random operator."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
