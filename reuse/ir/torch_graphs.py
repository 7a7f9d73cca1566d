"""Adapter: what PyTorch's tracers and graph modules do that is not needed here.

The Python code of a graph module is written when somebody runs it, which few need. Passes make and
change dozens of graphs for each one that runs, and to write a graph as Python and compile that
takes as long as to make it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
import torch.fx
from torch.fx._lazy_graph_module import _LazyGraphModule, _use_lazy_graph_module
from torch.fx._symbolic_trace import _wrapped_fns_to_patch


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


@contextmanager
def wrapped_globals_left() -> Iterator[Callable[[], None]]:
    """A tracer that starts within it leaves the globals that ``torch.fx.wrap`` marks.

    It would exchange them while it runs, so that the traced Python finds others than a later run.

    Yields:
        What is called once it has started: a trace that the traced Python makes exchanges them.
    """
    table = _wrapped_fns_to_patch
    held = dict(table)
    table.clear()

    def started() -> None:
        table.update(held)
        held.clear()

    try:
        yield started
    finally:
        started()
