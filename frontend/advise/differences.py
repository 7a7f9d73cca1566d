"""Where two graphs of one block class part: the first constant or operator that differs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Literal

import torch
import torch.fx

from ...reuse.freeze import Freezer, describe, narrow
from ...reuse.ir.inline import inline_calls
from ...reuse.ir.leaf import stamp_of
from ...reuse.ir.program import Closure, Composite, Leaf


@dataclass(frozen=True)
class GraphDifference:
    """The first place where two graphs differ.

    Attributes:
        kind: ``"constant"`` is the same operators with other numbers, ``"layout"`` that of an
            input, ``"wiring"`` the same operators on other values.
        text: what differs, for a person to read.
        source: the line of the user's code, such as ``model.py:31 Block.forward``.
    """

    kind: Literal["none", "constant", "operator", "layout", "wiring"]
    text: str = ""
    source: str = ""


def graph_difference(first: Closure, second: Closure) -> GraphDifference:
    """Compares two closures operator by operator; a nested one with its calls expanded."""
    if first is second:
        return GraphDifference("none")
    constant = wiring = GraphDifference("none")
    numbers: tuple[dict[torch.fx.Node, int], ...] = ({}, {})
    for a, b in zip_longest(_operators(first), _operators(second)):
        if a is None or b is None or a.target != b.target:
            pair = " and ".join("no operator" if n is None else _name(n) for n in (a, b))
            return GraphDifference("operator", pair, _source(b if b is not None else a))
        if wiring.kind == "none" and _operands(a, numbers[0]) != _operands(b, numbers[1]):
            wiring = GraphDifference("wiring", f"{_name(b)} reads another value", _source(b))
        if constant.kind == "none":
            text = _constants(a, b)
            constant = GraphDifference("constant", text, _source(b)) if text else constant
    if constant.kind == "none" and first.input_types != second.input_types:
        pairs = zip_longest(first.input_types, second.input_types)
        a, b = next((x, y) for x, y in pairs if x != y)
        return GraphDifference("layout", f"an input is {a} and {b}")
    return constant if constant.kind != "none" else wiring


def _operands(node: torch.fx.Node, numbers: dict[torch.fx.Node, int]) -> list[int]:
    """Numbers a node's operands by their first use, so that two graphs can be compared."""
    found = [numbers.setdefault(n, len(numbers)) for n in node.all_input_nodes]
    numbers.setdefault(node, len(numbers))
    return found


def _operators(closure: Closure) -> Iterator[torch.fx.Node]:
    if isinstance(closure, Leaf):
        yield from closure.nodes
    elif isinstance(closure, Composite):
        for call in inline_calls(closure.program).calls:
            yield from _operators(call.closure)


def _name(node: torch.fx.Node) -> str:
    return getattr(node.target, "__name__", str(node.target)).removesuffix(".default")


def _source(node: torch.fx.Node | None) -> str:
    return "" if node is None else stamp_of(node).source


def _constants(a: torch.fx.Node, b: torch.fx.Node) -> str:
    """Names the first operand that is another number, or an empty text."""
    freezer = Freezer()
    rows = [freezer.freeze(_without_nodes((list(n.args), dict(n.kwargs)))) for n in (a, b)]
    if rows[0] == rows[1]:
        return ""
    _, one, other = narrow(*rows)
    return f"{describe(one)} and {describe(other)} in {_name(a)}"


def _without_nodes(value: Any) -> Any:
    return torch.fx.node.map_arg(value, lambda node: None)
