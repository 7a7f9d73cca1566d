"""Programs reduced to the stated set of primitives: to be looked at, checked and counted."""

from __future__ import annotations

from ...reuse.ir.program import Leaf, Program
from ...reuse.ir.rewrite import map_leaves
from ..derivative import Derivative, Differentiator, Recipe, Request
from ..traces.torch_make_fx import Decompositions
from .torch_leaves import as_primitives, attention_as_products, primitive_decompositions


class Reducer:
    """Reduces programs; each different closure is differentiated and reduced once.

    Operators keep their own derivative: a program is differentiated first, and reduced then.
    Rules of users (``decomposition``) count like those that PyTorch has.
    """

    def __init__(self) -> None:
        self._table: Decompositions | None = None
        self._differentiator = Differentiator(lambda leaf: Recipe())
        self._reduced: dict[Leaf, Leaf] = {}

    def derivative(self, request: Request) -> Derivative | None:
        """Returns a derivative whose halves can be reduced; None if no gradient flows."""
        with attention_as_products():
            return self._differentiator.of(request)

    def of(self, program: Program) -> Program:
        """Returns a program with every leaf reduced, as far as rules are known."""
        return map_leaves(program, self._of_leaf)

    def _of_leaf(self, leaf: Leaf) -> Leaf:
        if leaf not in self._reduced:
            if self._table is None:
                self._table = primitive_decompositions()
            self._reduced[leaf] = as_primitives(leaf, self._table)
        return self._reduced[leaf]
