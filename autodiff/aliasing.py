"""Which inputs of a program its saved values share memory with.

Autograd refuses a backward whose saved tensors were changed since the forward. It can do that for
what lazyinline saves only if it is told which inputs are inside.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable

import torch.fx

from ..reuse.ir.operators import is_view, mutated_args
from ..reuse.ir.program import Program
from .flows import flows


def saved_inputs(forward: Program) -> tuple[int, ...]:
    """Returns the inputs that share memory with the last output (the saved struct)."""
    return tuple(sorted(flows(forward, _shares_with)[-1]))


def _shares_with(node: torch.fx.Node) -> Iterable[torch.fx.Node]:
    is_shared = is_view(node) or mutated_args(node) or node.target is operator.getitem
    return node.all_input_nodes if is_shared else ()
