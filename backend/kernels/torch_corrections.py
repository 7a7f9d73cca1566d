"""Adapter: what Inductor would write otherwise than eager runs, corrected while it writes kernels.

Each correction is a context; outside of it Inductor is as it was.

* Integers divided by zero. From torch 2.13 on its C++ kernels notice that, but for a quotient that
  is rounded towards zero: there the processor ends the process, where eager raises.
* Draws out of order. Inductor orders kernels by what they read, and draws that read nothing of each
  other may change places: each would then get the numbers that eager gives to another one. From
  torch 2.13 on a pass of its own chains them, but a dropout may still come before a draw that
  nobody reads; ours takes its place on every version.
* Indices that are slow to simplify. To choose tiles it asks of each index how far it moves with a
  variable, and ``sympy.simplify`` tries a dozen ways on it, which took a fifth of the time of
  writing kernels. Most indices are sums of products of numbers and variables, and for the
  difference of two of those expanding is enough.
* Tiles added elsewhere. Where a kernel that several threads run adds to memory from tiles of two
  axes, it moves the index to the place within the tile twice before torch 2.15
  (pytorch/pytorch#191837): it adds to other memory, also past the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.fx

from ...reuse.ir.operators import may_draw

_CHAIN = "_chain_random_ops_for_ordering"  # not before torch 2.13
_MESSAGE = '"ZeroDivisionError"'
_ONE = f"[](auto divisor) {{ TORCH_CHECK(divisor != 0, {_MESSAGE}); return divisor; }}"
_MANY = (
    "[](auto divisor) { std::array<typename decltype(divisor)::value_type, "
    "decltype(divisor)::size()> each; divisor.store(each.data()); "
    f"for (auto one : each) TORCH_CHECK(one != 0, {_MESSAGE}); return divisor; }}"
)


@contextmanager
def quotients_checked() -> Iterator[None]:
    """Lets kernels that are written within this context throw instead."""
    from torch._inductor.codegen.cpp import CppOverrides, CppVecOverrides

    kinds: list[tuple[Any, str]] = [(CppOverrides, _ONE), (CppVecOverrides, _MANY)]
    originals = [(kind, kind.__dict__["truncdiv"]) for kind, _ in kinds]
    for kind, check in kinds:
        kind.truncdiv = staticmethod(_checked(kind.truncdiv, check))
    try:
        yield
    finally:
        for kind, original in originals:
            kind.truncdiv = original


def _checked(quotient: Callable[[Any, Any], str], check: str) -> Callable[[Any, Any], str]:
    def truncdiv(a: Any, b: Any) -> str:
        dividend, divisor = quotient(a, b).split(" / ", 1)
        return f"{dividend} / {check}({divisor})"

    return truncdiv


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
        if made and may_draw(node.target):
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


def home_of_strides() -> Any:
    """Returns the module of Inductor that asks how far an index moves."""
    from torch._inductor import sizevars
    from torch._inductor.codegen import cpp

    return sizevars if hasattr(sizevars, "stride_at_vec_range") else cpp  # before torch 2.13


@contextmanager
def polynomials_expanded() -> Iterator[None]:
    """Lets Inductor expand polynomials, within this context, where it simplifies an index."""
    home = home_of_strides()
    original = home.sympy
    home.sympy = _Sympy(original)
    try:
        yield
    finally:
        home.sympy = original


@contextmanager
def offsets_added_once() -> Iterator[None]:
    """Lets kernels that are written within this context add where they are told to."""
    from torch._inductor import config
    from torch._inductor.codegen.cpp import CppTile2DKernel, CppVecKernel

    original = CppTile2DKernel.store

    def store(self: Any, name: str, index: Any, value: Any, mode: Any = None) -> None:
        by_threads = self.num_threads > 1 or config.cpp.dynamic_threads
        if mode != "atomic_add" or not by_threads or self.need_vec_transpose(index):
            return original(self, name, index, value, mode)
        CppVecKernel.store(self, name, index, value, mode)  # it finds the place within the tile

    CppTile2DKernel.store = store  # type: ignore[method-assign]
    try:
        yield
    finally:
        CppTile2DKernel.store = original  # type: ignore[method-assign]


class _Sympy:
    """The module ``sympy``, with another ``simplify``."""

    def __init__(self, original: Any) -> None:
        self._original = original

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def simplify(self, expression: Any) -> Any:
        """Returns a simpler form of an expression."""
        if is_polynomial(expression):
            return expression.expand()
        return self._original.simplify(expression)


def is_polynomial(expression: Any) -> bool:
    """Whether a sympy expression is a number, a variable, or made of sums and products of those."""
    if expression.is_Add or expression.is_Mul:
        return all(map(is_polynomial, expression.args))
    if expression.is_Pow:  # the square of a size that is a symbol
        base, exponent = expression.args
        return bool(exponent.is_Integer and exponent > 0) and is_polynomial(base)
    return bool(expression.is_Symbol or expression.is_Integer)
