"""Notes where operators of a joint graph come from: what the user called, and on which line."""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.fx

from ...reuse.ir.leaf import LaidOut, ModalInterpreter, as_it_is, stamp_of


@dataclass(frozen=True, slots=True)
class Origin:
    """Names the operator of the user's code that an operator was traced for.

    Attributes:
        operator: what the user's code called.
        source: the user's line; empty if unknown.
        is_backward: whether it belongs to the derivative of that operator.
    """

    operator: str
    source: str
    is_backward: bool

    def __str__(self) -> str:
        return f"the backward of {self.operator}" if self.is_backward else self.operator


def origin_of(node: torch.fx.Node) -> Origin | None:
    """Returns where an operator of a joint graph, or of one of its halves, comes from."""
    origin = node.meta.get("origin")
    return origin if isinstance(origin, Origin) else None


class NotingInterpreter(ModalInterpreter):
    """Runs a leaf body while it is traced, and notes for what each operator is traced.

    Args:
        module: the leaf's body.
        graph: the graph that grows.
        laid_out: as of ModalInterpreter.
    """

    def __init__(
        self,
        module: torch.fx.GraphModule,
        graph: torch.fx.Graph,
        laid_out: LaidOut = as_it_is,
    ) -> None:
        super().__init__(module, laid_out)
        self._graph = graph
        self._marks: list[tuple[int, Origin]] = []
        self._functions: set[Any] = set()

    def run_node(self, n: torch.fx.Node) -> Any:
        """Notes which operators a node is traced as; autograd will note those of its backward."""
        if n.op != "call_function":
            return super().run_node(n)
        stamp = stamp_of(n)
        # One that was traced before is still what it was traced for then.
        origin = origin_of(n) or Origin(str(n.target), stamp.source, is_backward=False)
        self._mark(origin)
        result = super().run_node(n)
        if not stamp.grad_enabled:  # no backward; asking a view for its function may be an error
            return result
        results = result if isinstance(result, (tuple, list)) else (result,)
        functions = (r.grad_fn for r in results if isinstance(r, torch.Tensor))
        self._watch(functions, replace(origin, is_backward=True))
        return result

    def _mark(self, origin: Origin) -> None:
        self._marks.append((len(self._graph.nodes), origin))

    def _watch(self, functions: Iterable[Any], origin: Origin) -> None:
        """Lets the autograd functions that are new say when they run."""
        todo = list(functions)
        while todo:
            function = todo.pop()
            if function is None or function in self._functions:
                continue
            self._functions.add(function)
            if hasattr(function, "variable"):  # sums a gradient up; nothing is traced
                continue
            # The engine runs a node's prehooks right before it: what is traced next belongs to it.
            function.register_prehook(lambda _, origin=origin: self._mark(origin))
            todo += [f for f, _ in function.next_functions]

    def write(self) -> None:
        """Writes what was noted on the graph's operators."""
        starts = [start for start, _ in self._marks]
        for index, node in enumerate(self._graph.nodes):
            place = bisect.bisect_right(starts, index)
            if node.op == "call_function" and place:
                node.meta["origin"] = self._marks[place - 1][1]
