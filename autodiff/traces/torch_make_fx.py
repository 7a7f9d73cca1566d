"""Adapter: a function of tensors traced into a graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
import torch.fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx

from ...reuse.ir.torch_symbols import sizes_as_literals
from .stops import stopped
from .torch_lazy import PLAIN_ZEROS

Decompositions: TypeAlias = Mapping[Any, Callable[..., Any]]
"""What stands for an operator where it is called in a trace."""


def traced(
    function: Callable[..., Any],
    inputs: Sequence[Any],
    sizes: Sequence[Any],
    decompositions: Decompositions,
) -> torch.fx.GraphModule:
    """Traces a function into a graph that takes its tensors as positional arguments, one each.

    Args:
        function: takes the inputs.
        inputs: tensors, or lists of them.
        sizes: symbols that become literals in the graph; without them it computes its sizes.
        decompositions: of operators, as they are called.
    """
    table = {**decompositions, **PLAIN_ZEROS}
    run = make_fx(lambda *groups: function(*groups[:-1]), decomposition_table=table)
    module = run(*inputs, list(sizes))
    if sizes:
        sizes_as_literals(module.graph)
    module.graph.set_codegen(torch.fx.graph.CodeGen())
    module.recompile()
    return module


def growing_graph() -> torch.fx.Graph:
    """Returns the graph of the trace that is under way."""
    proxy_mode = get_proxy_mode()
    assert proxy_mode is not None
    graph: torch.fx.Graph = proxy_mode.tracer.graph
    return graph


def stop_in_trace(tensor: torch.Tensor) -> torch.Tensor:
    """Detaches a tensor while it is traced, for good."""
    return stopped(tensor, growing_graph())
