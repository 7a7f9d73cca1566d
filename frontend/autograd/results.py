"""Results of a compiled program that others are computed from: gradients come to each as in eager.

A compiled program is one node of PyTorch's graph, so nothing would come to a hidden state through a
loss that is returned beside it. Each result gets a node of its own, which hands earlier results
what comes to them through it, where somebody looks. The backward of the program computes all
gradients of its inputs anyway, so a result's node takes off again what it was handed.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from .torch_engine import are_batched, current_backward, is_asked, is_watched, one_by_one, renamed

Again = Callable[[Any], Sequence[torch.Tensor]]
"""Runs a forward operator by operator, given the node of PyTorch's graph that it was."""


class ResultLinks:
    """Gives the results of a program nodes of their own.

    Args:
        order: of the results that have a gradient, as they are computed.
        name: returns the name of results, for a warning.
    """

    def __init__(self, order: Sequence[int], name: Callable[[Iterable[int]], str]) -> None:
        self._order, self.name = order, name
        # Every backward comes to it, but one for the gradients of certain tensors.
        self.end = torch.zeros((), device="cpu", requires_grad=True)
        self._has_warned = False

    def warn(self, text: str) -> None:
        """Warns, but once for each program."""
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(text, stacklevel=3)

    def over(
        self, results: Sequence[torch.Tensor], again: Again, views: Iterable[int] = ()
    ) -> Sequence[torch.Tensor]:
        """Returns the results with nodes of their own, where there are several.

        Args:
            results: of a run.
            again: runs it again.
            views: of other results, which stay as they are.
        """
        order = [i for i in self._order if i not in views]
        if len(order) < 2:
            return results
        linked, call = list(results), _Call(self, again)
        for number, place in enumerate(order):
            earlier = [linked[i] for i in order[:number]]
            made = _Result.apply(call, order[: number + 1], self.end, results[place], *earlier)
            linked[place] = made
            call.results[place] = weakref.ref(made)
        return linked


class _Call:
    """Holds the results of one run, and what a running backward hands on between them."""

    def __init__(self, links: ResultLinks, again: Again) -> None:
        self.links, self._again = links, again
        self.results: dict[int, weakref.ref[torch.Tensor]] = {}
        self._backward = -1
        self._handed: dict[int, torch.Tensor] = {}
        self._passed_by: set[int] = set()

    def own(self, place: int, cotangent: torch.Tensor) -> torch.Tensor | None:
        """Returns what a loss does with a result itself, without what came through others."""
        self._begin()
        if place in self._passed_by:
            self.links.warn(
                f"If the gradient of {self.links.name([place])} was asked for together with those "
                "of inputs or parameters, it lacks what comes through other results of the "
                "compiled module. Ask for it alone, or by retain_grad()."
            )
        handed = self._handed.pop(place, None)
        if handed is None:
            return cotangent
        return None if cotangent is handed else cotangent - handed

    def through(
        self, place: int, cotangent: torch.Tensor, earlier: Sequence[int], node: Any
    ) -> dict[int, torch.Tensor]:
        """Returns what comes to earlier results through one, for those that somebody looks at."""
        self._begin()
        (end, _), (origin, _) = node.next_functions[:2]
        are_asked = not is_asked(end)
        is_for_results = are_asked and not any(is_asked(n) for n, _ in origin.next_functions)
        there = {i: tensor for i in earlier if (tensor := self.results[i]()) is not None}
        seen = [i for i, tensor in there.items() if is_for_results or is_watched(tensor)]
        if are_asked:
            self._passed_by.update(there.keys() - seen)
        if not seen:
            return {}
        if torch.is_grad_enabled() and not is_for_results:
            self.links.warn(
                f"What comes to {self.links.name(seen)} of a compiled module through gradients "
                "that were asked for with create_graph=True is not added to its own gradient."
            )
        find = partial(self._derivatives, origin, place, seen)
        found = one_by_one(find, [cotangent]) if are_batched([cotangent]) else find([cotangent], 0)
        handed = {i: one for i, one in zip(seen, found, strict=True) if one is not None}
        for i, one in handed.items():
            self._handed[i] = self._handed[i] + one if i in self._handed else one
        return handed

    def _derivatives(
        self,
        origin: Any,
        place: int,
        seen: Sequence[int],
        cotangents: Sequence[torch.Tensor | None],
        following: int,
    ) -> list[torch.Tensor | None]:
        """Returns the derivatives of a result by earlier ones, of another run of the forward."""
        with torch.enable_grad():
            again = self._again(origin)
        known = [i for i in seen if again[i].requires_grad and again[place].requires_grad]
        if not known:
            return [None] * len(seen)
        found = torch.autograd.grad(
            again[place],
            [again[i] for i in known],
            cotangents[0],
            create_graph=torch.is_grad_enabled(),
            allow_unused=True,
        )
        return list(map(dict(zip(known, found, strict=True)).get, seen))

    def _begin(self) -> None:
        """Forgets what another backward handed on: it may have ended at a result."""
        if self._backward != (running := current_backward()):
            self._backward = running
            self._handed, self._passed_by = {}, set()


class _Result(torch.autograd.Function):
    """Returns a result of a program, behind the results that are computed before it."""

    @staticmethod
    def forward(
        ctx: Any,
        call: _Call,
        places: Sequence[int],
        end: torch.Tensor,
        result: torch.Tensor,
        *earlier: torch.Tensor,
    ) -> torch.Tensor:
        ctx.call, ctx.places = call, places
        ctx.set_materialize_grads(False)
        return renamed(result)

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor | None) -> Any:
        places = ctx.places
        if cotangent is None:  # most results of most steps, as keys and values that are cached
            return (None,) * (len(places) + 3)
        *earlier, place = places
        own = ctx.call.own(place, cotangent)
        handed = ctx.call.through(place, own, earlier, ctx) if own is not None else {}
        return None, None, None, own, *map(handed.get, earlier)
