"""Adapter: the indices of Inductor's kernels. Its private names live here.

To choose tiles it asks of each index how far it moves with a variable, and ``sympy.simplify`` tries
a dozen ways on it, which took a fifth of the time of writing kernels. Most indices are sums of
products of numbers and variables, and for the difference of two of those expanding is enough.

And where a kernel that several threads run adds to memory from tiles of two axes, it moves the
index to the place within the tile twice before torch 2.15 (pytorch/pytorch#191837): it adds to
other memory, also past the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


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
