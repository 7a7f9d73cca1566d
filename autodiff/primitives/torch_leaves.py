"""Adapter: PyTorch's decomposition tables, to reduce a leaf to the stated set of primitives."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
import torch.fx
from torch._decomp import core_aten_decompositions, decomposition_table
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel

from ...reuse.ir.leaf import Stamp, flat_types, mutated_args, without_autocast
from ...reuse.ir.primitives import is_primitive
from ...reuse.ir.program import Leaf
from ..rules.in_traces import rules_beneath_autograd
from ..traces.forwards import trace_forward
from ..traces.joint_cut import is_draw
from ..traces.layouts import laid_out_as, lying_as_traced
from ..traces.origins import NotingInterpreter, origin_of
from ..traces.pure_memory import of_pure_memory
from ..traces.torch_fake_inputs import fake_tensor, new_fake_mode
from ..traces.torch_make_fx import Decompositions, growing_graph
from .torch_rules import BACKWARDS, RULES


def attention_as_products() -> AbstractContextManager[None]:
    """Attention inside is traced as two products and a softmax: no fused kernel is a primitive."""
    return sdpa_kernel(SDPBackend.MATH)


def primitive_decompositions() -> Decompositions:
    """Returns how each operator that is no primitive is made of others, where a rule is known.

    Random operators stay whole: another way to draw would give other numbers under one seed.
    """
    known = {**decomposition_table, **core_aten_decompositions()}
    table = {op: rule for op, rule in known.items() if _is_taken_apart(op)}
    return {**table, **RULES}


def _is_taken_apart(operator: Any) -> bool:
    tags = getattr(operator, "tags", ())
    return not is_primitive(operator) and torch.Tag.nondeterministic_seeded not in tags


@without_autocast
def as_primitives(leaf: Leaf, table: Decompositions) -> Leaf:
    """Reduces a leaf: the same results in the same layouts, by operators of the stated set.

    What no rule takes apart stays, for a verifier to name. Each operator is stamped with the user's
    line that it comes from.
    """
    table = {**table, **rules_beneath_autograd()}
    types = flat_types(leaf.input_types)
    results = flat_types(leaf.output_types)
    module = leaf.module
    if leaf.level == "composite":
        with attention_as_products():
            module = trace_forward(module, types, {})
    mode = new_fake_mode(module)
    inputs = [fake_tensor(mode, t) for t in types]

    def run(*flat: torch.Tensor) -> tuple[Any, ...]:
        interpreter = _Reducing(module, growing_graph(), lying_as_traced)
        found = interpreter.run_flat(flat)
        interpreter.write()
        return tuple(laid_out_as(r, t) for r, t in zip(found, results, strict=True))

    with mode, torch.no_grad():
        reduced = make_fx(run, decomposition_table=table)(*inputs)
        reduced = of_pure_memory(reduced, inputs, table, ())  # some rules write in place
    _drop_unused(reduced.graph)
    for node in reduced.graph.nodes:
        origin = origin_of(node)
        if origin is not None:
            node.meta["stamp"] = Stamp(source=origin.source)
    reduced.recompile()
    return replace(leaf, module=reduced, level="aten")


class _Reducing(NotingInterpreter):
    """Runs a leaf body whose operators are taken apart as they are called."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Calls an operator, or what it is made of where autograd says that."""
        return super().call_function(BACKWARDS.get(target, target), args, kwargs)


def _drop_unused(graph: torch.fx.Graph) -> None:
    """Removes what nobody reads: also memory that only gave a layout. Draws and writes stay."""
    for node in reversed(graph.nodes):
        if node.op == "call_function" and not (node.users or is_draw(node) or mutated_args(node)):
            graph.erase_node(node)
