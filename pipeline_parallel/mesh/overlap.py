"""The order of a local graph's operators in which collectives run beside other work.

A collective starts as soon as its operand is there, and is waited for where its result is first
read; what does not need the result runs in between. Parameters are gathered before anything else,
and what is only handed out (gradients, reduced) is waited for last, so that callers can move both
further away. All that is gathered so, or reduced so, goes in one collective.
"""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.fx

from ...reuse.ir.program import input_nodes
from ...reuse.torch_names import RESHAPES
from .torch_collectives import COLLECTIVES, WAIT, started
from .torch_sharding import CASTS

_ATEN, _OWN = torch.ops.aten, torch.ops.lazyinline
_GATHER, _SCATTER = _OWN.all_gather.default, _OWN.reduce_scatter.default
_EXCHANGE = _OWN.all_to_all.default
_TRANSPOSES = (_ATEN.t.default, _ATEN.permute.default, _ATEN.transpose.int)
_TAKES_PART = frozenset({*RESHAPES, *_TRANSPOSES, _ATEN.slice.Tensor})
MOVES_ONLY = frozenset({*_TAKES_PART, _ATEN.cat.default})
"""Operators that need no kernel of a compiler's."""
_SAME_ELEMENTS = frozenset({*_TAKES_PART, _ATEN.clone.default})
Nodes: TypeAlias = "Collection[torch.fx.Node]"


@dataclass(frozen=True)
class Ordered:
    """The operators of a graph, in three parts.

    Attributes:
        ahead: starts that need parameters alone, and what those need.
        body: all between.
        behind: waits for what is only handed out, and views and copies of it.
    """

    ahead: Sequence[torch.fx.Node]
    body: Sequence[torch.fx.Node]
    behind: Sequence[torch.fx.Node]


def ordered(module: torch.fx.GraphModule, parameters: Nodes) -> Ordered:
    """Merges the collectives of a graph, in place, and puts its operators in order.

    Args:
        module: a local graph.
        parameters: the inputs that are there before the step begins.
    """
    for wait in [n for n in module.graph.nodes if n.target is WAIT]:
        _cast_first(module.graph, wait)
    given, handed_out = _given(module.graph, parameters), _handed_out(module.graph)
    groups: dict[Any, list[torch.fx.Node]] = defaultdict(list)
    for wait in (n for n in module.graph.nodes if n.target is WAIT):
        start: Any = wait.args[0]
        if start.args[0] in given or wait in handed_out:
            is_ahead = start.args[0] in given
            groups[is_ahead, start.target, start.args[1:], wait.meta["val"].dtype].append(wait)
    for waits in groups.values():
        if len(waits) > 1:
            _merge(module.graph, waits)
    return _parts(module, parameters)


def _parts(module: torch.fx.GraphModule, parameters: Nodes) -> Ordered:
    graph, entries = module.graph, input_nodes(module)
    given, handed_out = _given(graph, parameters), _handed_out(graph)
    draws = [n for n in graph.nodes if _draws(n)]
    after = dict(zip(draws[1:], draws, strict=False))
    everything = [n for n in graph.nodes if n.op not in ("placeholder", "output")]
    depths = _added(dict.fromkeys(entries, 0), everything, after)
    ahead = [n for n in everything if n.target in COLLECTIVES and n.args[0] in given]
    order = _added(dict.fromkeys(entries, 0), ahead, after)
    num_ahead = len(order)
    for depth in range(max(depths.values(), default=0) + 1):
        own = [n for n in depths if depths[n] == depth and n not in handed_out]
        _added(order, [n for n in own if n.target in COLLECTIVES], after)
        _added(order, [n for n in own if n.target is not WAIT], after)
    num_before = len(order)
    made = list(_added(order, depths, after))
    return Ordered(made[len(entries) : num_ahead], made[num_ahead:num_before], made[num_before:])


def _added(
    order: dict[torch.fx.Node, int],
    nodes: Iterable[torch.fx.Node],
    after: Mapping[torch.fx.Node, torch.fx.Node],
) -> dict[torch.fx.Node, int]:
    """Adds operators that are not there yet, each after what it needs and what it is ``after``.

    Returns how many collectives, one after another, each needs.
    """
    for node in nodes:
        stack = [node]
        while stack:
            needed = [*stack[-1].all_input_nodes, *filter(None, [after.get(stack[-1])])]
            missing = [n for n in needed if n not in order]
            stack += reversed(missing)
            if missing:
                continue
            made = stack.pop()
            depth = max((order[n] for n in needed), default=0) + (made.target is WAIT)
            order[made] = depth
            # The items of a tuple stay in one leaf with it: it is no value of a program.
            items = (user for user in made.users if user.target is operator.getitem)
            order.update(dict.fromkeys(items, depth))
    return order


def _draws(node: torch.fx.Node) -> bool:
    """Whether an operator draws random numbers, which ranks do in the same order."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _given(graph: torch.fx.Graph, parameters: Nodes) -> Nodes:
    """Returns parameters, and what is computed from them alone without a collective."""
    given = set(parameters)
    for node in graph.nodes:
        operands = node.all_input_nodes
        if operands and node.target is not WAIT and not _draws(node) and given.issuperset(operands):
            given.add(node)
    return given


def _handed_out(graph: torch.fx.Graph) -> Nodes:
    """Returns the waits whose results are only returned, and views and copies of them."""
    found: set[torch.fx.Node] = set()
    for node in reversed(graph.nodes):
        keeps = node.target is WAIT or node.target in _SAME_ELEMENTS
        if keeps and all(user.op == "output" or user in found for user in node.users):
            found.add(node)
    for node in graph.nodes:
        if node.target is not WAIT and found.isdisjoint(node.all_input_nodes):
            found.discard(node)
    return found


# ---- fewer bytes -------------------------------------------------------------------------------


def _cast_first(graph: torch.fx.Graph, wait: torch.fx.Node) -> None:
    """Gathers what is read in a smaller type alone, as parameters under autocast, in that type."""
    start: Any = wait.args[0]
    casts = list(wait.users)
    ways = {(n.target, n.args[1:], *n.kwargs.items()) for n in casts if n.target in CASTS}
    if start.target is not _GATHER or len(ways) != 1 or any(n.target not in CASTS for n in casts):
        return
    cast = casts[0]
    if cast.meta["val"].dtype.itemsize >= wait.meta["val"].dtype.itemsize:
        return
    with graph.inserting_before(cast):
        x = _add(graph, cast.target, start.args[0], *cast.args[1:], **cast.kwargs)
        rest = start.args[1:]
        made = started(graph, _GATHER, (x, *rest), _GATHER(x.meta["val"], *rest))
    for node in casts:
        node.replace_all_uses_with(made)
        graph.erase_node(node)
    graph.erase_node(wait)
    graph.erase_node(start)


# ---- several collectives as one ----------------------------------------------------------------


def _merge(graph: torch.fx.Graph, waits: Sequence[torch.fx.Node]) -> None:
    """Puts one collective in place of several of one kind: flat, one after another."""
    starts: list[Any] = [wait.args[0] for wait in waits]
    target, (_, *rest) = starts[0].target, starts[0].args
    # A scatter hands out rows, a gather makes them, and an exchange does both: a row holds a part
    # of each tensor.
    parts = rest[-3] if target in (_SCATTER, _EXCHANGE) else 1
    ranks = rest[-3] if target in (_GATHER, _EXCHANGE) else 1
    with graph.inserting_before(graph.output_node()):
        rows = [_viewed(graph, start.args[0], [parts, -1]) for start in starts]
        flat = _add(graph, _ATEN.cat.default, rows, 1)
        whole = started(graph, target, (flat, *rest), target(flat.meta["val"], *rest))
        begin = 0
        for start, wait in zip(starts, waits, strict=True):
            shape = wait.meta["val"].shape
            end = begin + math.prod(shape) // ranks
            part = _add(graph, _ATEN.slice.Tensor, whole, 1, begin, end)
            part, begin = _viewed(graph, part, list(shape)), end
            wait.replace_all_uses_with(part)
            graph.erase_node(wait)
            graph.erase_node(start)


def _viewed(graph: torch.fx.Graph, node: torch.fx.Node, shape: list[int]) -> torch.fx.Node:
    """Adds a view to a graph, of a copy where it can be none."""
    if not node.meta["val"].is_contiguous():
        node = _add(graph, _ATEN.clone.default, node, memory_format=torch.contiguous_format)
    return _add(graph, _ATEN.view.default, node, shape)


def _add(graph: torch.fx.Graph, target: Any, *args: Any, **kwargs: Any) -> torch.fx.Node:
    given = torch.fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
    example = target(*given[0], **given[1])
    node = graph.call_function(target, args, kwargs)
    node.meta["val"] = example
    return node
