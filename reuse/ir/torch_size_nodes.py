"""Adapter: sizes computed by the nodes of a graph, operator by operator as Python does."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch.fx
from torch.fx.proxy import GraphAppendingTracer
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis


def computing_node(
    expression: Any, nodes: Mapping[Any, torch.fx.Node], graph: torch.fx.Graph
) -> torch.fx.Node:
    """Adds the nodes that compute an expression, where the graph inserts; returns its node.

    Args:
        expression: of symbols, and not a number.
        nodes: the node of each symbol.
        graph: theirs.
    """
    tracer = GraphAppendingTracer(graph)
    proxies = {symbol: torch.fx.Proxy(node, tracer) for symbol, node in nodes.items()}
    node: torch.fx.Node = sympy_interp(_ByNodes, proxies, expression).node
    return node


def _call(function: Callable[..., Any], x: Any) -> Any:
    if not isinstance(x, torch.fx.Proxy):
        return function(x)
    return x.tracer.create_proxy("call_function", function, (x,), {})


class _ByNodes(PythonReferenceAnalysis):
    """Has what PyTorch's analysis can do with numbers only: quotients of integers and roundings."""

    @staticmethod
    def int_truediv(a: Any, b: Any) -> Any:
        return a / b

    @staticmethod
    def floor_to_int(x: Any, dtype: Any) -> Any:
        return _call(math.floor, x)

    @staticmethod
    def ceil_to_int(x: Any, dtype: Any) -> Any:
        return _call(math.ceil, x)

    @staticmethod
    def trunc_to_int(x: Any, dtype: Any) -> Any:
        return _call(math.trunc, x)

    @staticmethod
    def round_to_int(x: Any, dtype: Any) -> Any:
        return _call(round, x)


def size_expression(node: torch.fx.Node) -> Any:
    """Returns a size as an expression of symbols; a number where the trace settled it."""
    return node.meta["val"].node.expr


def compute(expression: Any, symbols: Mapping[Any, torch.fx.Node]) -> Any:
    """Adds the nodes that compute an expression at the graph's insertion point."""
    if expression.is_number:
        return int(expression) if expression.is_integer else float(expression)
    return computing_node(expression, symbols, next(iter(symbols.values())).graph)
