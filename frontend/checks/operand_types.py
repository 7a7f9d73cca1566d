"""Products of tensors of unequal types: found in the program, where the user's line is known.

PyTorch's rules for fake tensors do not look at these types; its kernels do, in the middle of a step
and without saying which layer they work for.
"""

from __future__ import annotations

import torch
import torch.fx

from ...reuse.ir.leaf import stamp_of
from ...reuse.ir.program import Leaf, Program, walk_closures
from .refusals import WrongCallError

_aten = torch.ops.aten
_PRODUCTS = frozenset({_aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm, _aten.linear, _aten.matmul})


def check_operand_types(program: Program, model: str) -> None:
    """Looks at the products of each different closure once.

    Raises:
        WrongCallError: if one multiplies tensors of different types; it has the line.
    """
    for closure in walk_closures(program):
        if isinstance(closure, Leaf):
            for node in closure.nodes:
                _check(node, model)


def _check(node: torch.fx.Node, model: str) -> None:
    if getattr(node.target, "overloadpacket", None) not in _PRODUCTS or stamp_of(node).autocast:
        return
    values = [n.meta.get("val") for n in node.all_input_nodes]
    types = dict.fromkeys(v.dtype for v in values if isinstance(v, torch.Tensor))
    if len(types) > 1:
        shown = " and ".join(str(t).removeprefix("torch.") for t in types)
        raise WrongCallError(
            f"{model} cannot be captured: {node.target} at {stamp_of(node).source} multiplies "
            f"{shown} tensors, and PyTorch multiplies equal types only. Convert one with "
            "x.to(w.dtype), or run the model under torch.autocast."
        )
