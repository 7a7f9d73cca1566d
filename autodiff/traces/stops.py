"""Where the user's code lets no gradient through, kept for a derivative of the derivative.

Below autograd ``detach`` is the identity, and a trace is full of those that autograd makes of what
it saves. Where gradients are differentiated in their turn the user's own have to stay.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx

from ...reuse.ir.leaf import stamp_of
from .origins import NotingInterpreter

_STOP = "stops a gradient"


def is_stop(node: torch.fx.Node) -> bool:
    """Whether a detach in a joint graph is one that the user's code asked for."""
    return _STOP in node.meta


class StoppingInterpreter(NotingInterpreter):
    """Leaves a detach that stays behind each result that the user's code gives no gradient."""

    def run_node(self, n: torch.fx.Node) -> Any:
        """Runs a node; what ``detach`` or ``no_grad`` keeps apart is detached once more."""
        result = super().run_node(n)
        if n.op != "call_function":
            return result
        if n.target is torch.ops.aten.detach.default or not stamp_of(n).grad_enabled:
            return stopped(result, self._graph)
        return result


def stopped(result: Any, graph: torch.fx.Graph) -> Any:
    """Detaches what an operator returned, and marks that in the graph that grows."""
    if isinstance(result, (tuple, list)):
        return type(result)(stopped(part, graph) for part in result)
    if not isinstance(result, torch.Tensor):
        return result
    detached = result.detach()
    next(iter(reversed(graph.nodes))).meta[_STOP] = True
    return detached
