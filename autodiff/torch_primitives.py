"""Adapter: programs reduced to primitives, to be looked at, checked and counted.

Rules are PyTorch's decompositions to core ATen (``default_decompositions``), and a few more.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
import torch.fx
from torch._decomp import get_decompositions
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..reuse.ir.leaf import Stamp, flat_types, without_autocast
from ..reuse.ir.operators import is_draw, is_primitive, may_draw, mutated_args
from ..reuse.ir.program import Leaf, Program
from ..reuse.ir.rewrite import map_leaves
from ..reuse.once import once
from .derivative import Derivative, Differentiator, Recipe, Request
from .traces.joint_trace import draw_mask, trace_forward, with_traced_layout
from .traces.torch_interpreters import origin_of
from .traces.torch_make_fx import Decompositions

_ATEN = torch.ops.aten
# PyTorch can decompose these to core ATen, but its default decompositions leave them out.
_FURTHER = ("addmv", "dist", "native_batch_norm", "polar", "unfold")


class Reducer:
    """Reduces programs; each different closure is differentiated and reduced once.

    Operators keep their own derivative: a program is differentiated first, and reduced then.
    Rules of users (``decomposition``) count like those that PyTorch has.
    """

    def __init__(self) -> None:
        self._differentiator = Differentiator(lambda leaf: Recipe())

    def derivative(self, request: Request) -> Derivative | None:
        """Returns a derivative whose halves can be reduced; None if no gradient flows."""
        with _attention_as_products():
            return self._differentiator.of(request)

    def of(self, program: Program) -> Program:
        """Returns a program with every leaf reduced, as far as rules are known."""
        return map_leaves(program, self._of_leaf)

    @once
    def _of_leaf(self, leaf: Leaf) -> Leaf:
        return _as_primitives(leaf, _rules())


def _attention_as_products() -> AbstractContextManager[None]:
    """Traces attention as two products and a softmax: no fused kernel is a primitive."""
    return sdpa_kernel(SDPBackend.MATH)


@functools.cache
def _rules() -> Decompositions:
    """Returns the known decompositions of operators that are not primitives.

    Random operators stay whole: another way to draw would give other numbers under one seed.
    """
    known = torch.export.default_decompositions().items()
    apart = {op: rule for op, rule in known if not (is_primitive(op) or may_draw(op))}
    return {**apart, **_RULES}


@without_autocast()
def _as_primitives(leaf: Leaf, table: Decompositions) -> Leaf:
    """Reduces a leaf: the same results in the same layouts, by primitives.

    An operator without a rule stays, and a verifier names it. Each operator is stamped with the
    user's line that it comes from.
    """
    types = flat_types(leaf.input_types)
    module = leaf.module
    # Attention has to be taken apart before PyTorch picks a fused kernel for it.
    if leaf.level == "composite":
        with _attention_as_products():
            module = trace_forward(module, types, {})
    reduced = trace_forward(module, types, table, with_traced_layout)
    # Unused nodes go, also memory that only gave a layout; draws and writes stay.
    for node in reversed(reduced.graph.nodes):
        if node.op == "call_function" and not (node.users or is_draw(node) or mutated_args(node)):
            reduced.graph.erase_node(node)
    for node in reduced.graph.nodes:
        origin = origin_of(node)
        if origin is not None:
            node.meta["stamp"] = Stamp(source=origin.source)
    reduced.recompile()
    return replace(leaf, module=reduced, level="aten")


# ---- rules that PyTorch lacks ---------------------------------------------------------------


def _angle(x: torch.Tensor) -> Any:
    if x.is_complex():
        real, imaginary = torch.view_as_real(x).unbind(-1)
        return torch.atan2(imaginary, real)
    if not x.is_floating_point():
        return NotImplemented
    negative = torch.where(x < 0, torch.full_like(x, math.pi), torch.zeros_like(x))
    return torch.where(x.isnan(), x, negative)


def _var_mean(x: torch.Tensor, dims: Any = None, **options: Any) -> Any:
    keeps = {"keepdim": options.get("keepdim", False)}
    every = list(range(x.dim())) if dims is None else dims
    return _ATEN.var.correction(x, dims, **options), _ATEN.mean.dim(x, every, **keeps)


def _put(x: torch.Tensor, index: torch.Tensor, values: torch.Tensor, add: bool = False) -> Any:
    places = (index.reshape(-1),)
    return x.reshape(-1).index_put(places, values.reshape(-1), add).reshape(x.shape)


def _weight_norm_backward(
    grad: torch.Tensor, v: torch.Tensor, g: torch.Tensor, norms: torch.Tensor, dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    norms = norms.to(v.dtype)
    along = (grad * v).sum([d for d in range(v.dim()) if d != dim], keepdim=True) / norms
    return (grad - v * along / norms) * (g / norms), along


def _grouped_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    offsets: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: Any = None,
) -> Any:
    """Multiplies each group of rows with its own matrix, as products of all rows with each.

    An element of another group is never computed with: it may be infinite.
    """
    if bias is not None or out_dtype not in (None, a.dtype):
        return NotImplemented
    if offsets is None:
        return torch.bmm(a, b)
    groups = range(offsets.shape[0])
    if (a.dim(), b.dim()) == (2, 2):
        masks = [_in_group(offsets, g, a.shape[1]) for g in groups]
        return torch.stack(
            [torch.where(m, a, 0) @ torch.where(m.unsqueeze(1), b, 0) for m in masks]
        )
    rows = (a.dim(), b.dim()) == (2, 3)
    found = a.new_zeros((a.shape[-2], b.shape[-1]))
    for group in groups:
        inside = _in_group(offsets, group, found.shape[0 if rows else 1])
        product = a @ b[group] if rows else a[group] @ b
        found = torch.where(inside.unsqueeze(1) if rows else inside, product, found)
    return found


def _in_group(offsets: torch.Tensor, group: int, length: int) -> torch.Tensor:
    """Returns a mask of the places that are in a group; offsets are the ends of the groups."""
    places = torch.arange(length, device=offsets.device)
    before = places < offsets[group]
    return before & (places >= offsets[group - 1]) if group else before


def _where_there_is(name: str, rule: Callable[..., Any]) -> Mapping[Any, Callable[..., Any]]:
    """Returns a rule for an operator that only some versions of PyTorch have."""
    operator = getattr(_ATEN, name, None)
    return {} if operator is None else {operator.default: rule}


_RULES: Mapping[Any, Callable[..., Any]] = {
    **get_decompositions([getattr(_ATEN, name) for name in _FURTHER]),
    **_where_there_is("_grouped_mm", _grouped_mm),
    **_where_there_is("_weight_norm_interface_backward", _weight_norm_backward),
    _ATEN.bernoulli.p: draw_mask,
    _ATEN.angle.default: _angle,
    _ATEN.var_mean.correction: _var_mean,
    _ATEN.exp2.default: lambda x: _ATEN.pow.Scalar(2.0, x),
    _ATEN.lift_fresh_copy.default: torch.clone,
    _ATEN.put.default: _put,
}
"""Rules besides PyTorch's: for more operators, and for draws that keep their numbers."""
