"""Adapter: graph modules whose Python code is written when somebody runs it, which few need.

Passes make and change dozens of graphs for each one that runs, and to write a graph as Python and
compile that takes as long as to make it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
import torch.fx
from torch.fx._lazy_graph_module import _LazyGraphModule, _use_lazy_graph_module


def module_of(graph: torch.fx.Graph, root: torch.nn.Module | None = None) -> torch.fx.GraphModule:
    """Wraps a graph.

    Args:
        graph: what it runs.
        root: holds the attributes that the graph reads, if it reads any.
    """
    return _LazyGraphModule(torch.nn.Module() if root is None else root, graph)


def lazy_modules() -> AbstractContextManager[None]:
    """Within it what PyTorch traces is lazy, too, as it is where PyTorch compiles."""
    return _use_lazy_graph_module(True)
