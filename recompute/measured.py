"""Measures operators by running them here, where a budget asks for measured costs."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch
import torch.fx
from torch.fx.node import map_arg

from ..reuse.ir.costs import OperatorCosts, is_free
from ..reuse.ir.types import TensorType


class ValueCosts(Protocol):
    """Tells the seconds to compute a value again, and to save it."""

    def redo_s(self, node: torch.fx.Node) -> float:
        """Seconds to compute a node's value from its operands."""

    def save_s(self, node: torch.fx.Node) -> float:
        """Seconds to write a value and read it back, where it would not have been written."""


class Measured:
    """Runs each operator on random operands, here, and takes the shortest time.

    Args:
        predicted: for operators that do not run on such operands, and for saving.
        num_runs: how often each runs.
    """

    def __init__(self, predicted: OperatorCosts, num_runs: int = 3) -> None:
        self._predicted = predicted
        self._num_runs = num_runs
        self._known: dict[Any, float] = {}

    def redo_s(self, node: torch.fx.Node) -> float:
        """See :class:`ValueCosts`."""
        if is_free(node):
            return 0.0
        # Operators of one kind over operands of one type take the same time: measured once.
        key = (node.target, str(_types(node.args)), str(_types(node.kwargs)))
        if key not in self._known:
            try:
                self._known[key] = _run(node, self._num_runs)
            except (RuntimeError, IndexError, TypeError, ValueError):
                self._known[key] = self._predicted.redo_s(node)
        return self._known[key]

    def save_s(self, node: torch.fx.Node) -> float:
        """See :class:`ValueCosts`."""
        return self._predicted.save_s(node)


def _run(node: torch.fx.Node, num_runs: int) -> float:
    assert callable(node.target)
    best = float("inf")
    with torch.no_grad(), torch.random.fork_rng():
        args, kwargs = _real(node.args), _real(node.kwargs)
        for _ in range(num_runs + 1):  # the first one warms caches up
            start = time.perf_counter()
            node.target(*args, **kwargs)
            best = min(best, time.perf_counter() - start)
    return best


def _types(arguments: Any) -> Any:
    return map_arg(arguments, lambda n: _type(n.meta.get("val")))


def _type(value: Any) -> Any:
    return TensorType.of(value) if isinstance(value, torch.Tensor) else type(value)


def _real(arguments: Any) -> Any:
    def tensor(node: torch.fx.Node) -> Any:
        value = node.meta["val"]
        if not isinstance(value, torch.Tensor):
            raise TypeError("not a tensor")
        type_ = TensorType.of(value)
        empty = torch.empty_strided(
            type_.shape, type_.stride, dtype=type_.dtype, device=type_.device
        )
        return empty.uniform_() if type_.is_differentiable else empty.zero_()

    return map_arg(arguments, tensor)
