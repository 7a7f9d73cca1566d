"""Repeated regions of a flat graph become blocks of a module.

Dynamo inlines the model's modules into one flat graph, in which each node records the modules it
was called in. The consecutive nodes of one module call are a *run*. Runs that compute the same
(operators, constants and edges are compared in full) become calls of one graph, in a module that is
captured like any other: its blocks share by evidence.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.fx
from torch import nn

from ...reuse.freeze import Identity
from ...reuse.ir.fx_form import Block, Places, hold, holder_of
from ...reuse.ir.leaf import FullKey, frozen_operands
from ..capture.blocks import pays
from ..marks import lazy_inline


def region_key(
    root: torch.nn.Module,
    nodes: Sequence[torch.fx.Node],
    inputs: Sequence[torch.fx.Node],
    outputs: Sequence[torch.fx.Node],
) -> FullKey:
    """Returns a key that is equal for two regions only if they compute the same.

    All nodes are in order; ``root`` holds the graphs that nodes of the region refer to.
    """
    number = {node: index for index, node in enumerate((*inputs, *nodes))}
    rows = _rows(root, nodes, number)
    return FullKey((len(inputs), *rows, tuple(number[node] for node in outputs)))


def held(root: torch.nn.Module, node: torch.fx.Node) -> Any:
    """Returns the attribute that a ``get_attr`` or ``call_module`` node refers to."""
    return operator.attrgetter(str(node.target))(root)


def _rows(
    root: torch.nn.Module, nodes: Sequence[torch.fx.Node], number: Mapping[torch.fx.Node, int]
) -> list[Any]:
    return [
        (node.op, _target(root, node), frozen_operands((node.args, node.kwargs), number))
        for node in nodes
    ]


def _target(root: torch.nn.Module, node: torch.fx.Node) -> Any:
    """Returns the target of a node for comparison: operators by identity, graphs by content."""
    if node.op in ("placeholder", "output"):  # names do not count
        return None
    if node.op not in ("get_attr", "call_module"):
        return node.target
    value = held(root, node)
    if not isinstance(value, torch.fx.GraphModule):
        return Identity(value)
    nodes = list(value.graph.nodes)
    return tuple(_rows(value, nodes, {node: index for index, node in enumerate(nodes)}))


Node = torch.fx.Node

_CALLS = ("call_function", "call_method", "call_module")


lazy_inline(Block)


@dataclass(frozen=True)
class ModuleCall:
    """A call of a module, as recorded by the nodes in it."""

    key: str  # differs for each call, even of the same module
    path: str
    kind: str  # the name of its class
    is_marked: bool = False


ModuleCalls = Mapping[Node, tuple[ModuleCall, ...]]
"""For each operator, the module calls around it, the outermost first."""


def outlined(module: torch.fx.GraphModule, calls: ModuleCalls) -> torch.fx.GraphModule:
    """Returns a module that computes the same, with repeated runs as blocks."""
    chosen = _chosen(module, list(_runs(_operators(module), calls, 0)))
    return _Outline(module, calls, chosen).build() if chosen else module


@dataclass(frozen=True)
class _Run:
    """The nodes of one module call in a graph."""

    call: ModuleCall
    nodes: tuple[Node, ...]
    inner: tuple[_Run, ...]


@dataclass(frozen=True)
class _Region:
    """A run, its inputs and outputs, and its key, which is equal for runs that can share."""

    run: _Run
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]
    key: FullKey
    num_nodes: int


def _operators(module: torch.fx.GraphModule) -> list[Node]:
    """Returns the nodes that compute, and those that load graphs for them."""
    return [node for node in module.graph.nodes if node.op in _CALLS or _is_graph(module, node)]


def _is_graph(module: nn.Module, node: Node) -> bool:
    return node.op == "get_attr" and isinstance(held(module, node), torch.fx.GraphModule)


def _runs(nodes: Sequence[Node], calls: ModuleCalls, depth: int) -> Iterator[_Run]:
    """Yields the runs at one call depth, with the inner runs of each."""
    start = 0
    for end in range(1, len(nodes) + 1):
        call = _call_at(calls[nodes[start]], depth)
        if end < len(nodes) and _call_at(calls[nodes[end]], depth) == call:
            continue
        if call is not None:
            piece = tuple(nodes[start:end])
            yield _Run(call, piece, tuple(_runs(piece, calls, depth + 1)))
        start = end


def _call_at(calls: Sequence[ModuleCall], depth: int) -> ModuleCall | None:
    return calls[depth] if depth < len(calls) else None


def _chosen(module: nn.Module, runs: Sequence[_Run]) -> list[_Region]:
    """Returns the outermost regions that repeat and are worth a closure."""
    if not runs:
        return []
    # A call whose nodes are not consecutive is not a region.
    pieces = Counter(run.call for run in runs)
    regions = [_region(module, run) for run in runs if pieces[run.call] == 1]
    # Closures cannot return sizes or modes to the code outside.
    given = [(region.key, map(value_of, region.outputs)) for region in regions]
    uses = Counter(k for k, values in given if all(isinstance(x, torch.Tensor) for x in values))
    found = [region for region in regions if _pays(region, uses[region.key])]
    taken = {region.run.call for region in found}
    inner = [deeper for run in runs if run.call not in taken for deeper in run.inner]
    return found + _chosen(module, inner)


def _pays(region: _Region, num_calls: int) -> bool:
    # The user decided with the mark.
    if region.run.call.is_marked:
        return num_calls > 1
    return pays(region.num_nodes, num_calls)


def _region(module: nn.Module, run: _Run) -> _Region:
    inside = set(run.nodes)
    used = (source for node in run.nodes for source in node.all_input_nodes)
    inputs = tuple(dict.fromkeys(source for source in used if source not in inside))
    outputs = tuple(node for node in run.nodes if any(user not in inside for user in node.users))
    key = region_key(module, run.nodes, inputs, outputs)
    return _Region(run, inputs, outputs, key, _count(module, run.nodes))


def value_of(node: Node) -> Any:
    """Returns the fake value of a node, from Dynamo or from torch.export."""
    return node.meta.get("example_value", node.meta.get("val"))


def _count(module: nn.Module, nodes: Sequence[Node]) -> int:
    """Counts operators, including those of nested graphs."""
    graphs = [held(module, node) for node in nodes if _is_graph(module, node)]
    return len(nodes) - len(graphs) + sum(_count(g, _operators(g)) for g in graphs)


class _Outline:
    """Copies a graph; each chosen region becomes one call."""

    def __init__(
        self, module: torch.fx.GraphModule, calls: ModuleCalls, chosen: Sequence[_Region]
    ) -> None:
        self._module = module
        self._calls = calls
        self._starts = {region.run.nodes[0]: region for region in chosen}
        self._inside = {node for region in chosen for node in region.run.nodes}
        self._graph = torch.fx.Graph()
        self._copies: dict[Node, Node] = {}
        self._bodies: dict[FullKey, torch.fx.GraphModule] = {}
        self._root = nn.Module()
        self._places = Places(self._root)

    def build(self) -> torch.fx.GraphModule:
        """Returns the module."""
        nodes = list(self._module.graph.nodes)
        outside = [node for node in nodes if node not in self._inside]
        take_over(self._root, self._module, outside)
        # Tensors of the model come first, because regions take them as inputs.
        inputs = [n for n in outside if n.op in ("placeholder", "get_attr")]
        self._copies.update((node, self._graph.node_copy(node)) for node in inputs)
        for node in nodes:
            if node in self._starts:
                self._call(self._starts[node])
            elif node not in self._inside and node not in self._copies:
                self._copies[node] = self._graph.node_copy(node, self._copies.__getitem__)
        return torch.fx.GraphModule(self._root, self._graph)

    def _call(self, region: _Region) -> None:
        if region.key not in self._bodies:
            self._bodies[region.key] = self._body(region)
        origin, body = region.run.call, self._bodies[region.key]
        operands = tuple(self._copies[node] for node in region.inputs)
        call = self._graph.call_module(self._places.put(origin.path, origin.kind, body), operands)
        if len(region.outputs) == 1:
            self._copies[region.outputs[0]] = call
            return
        for index, output in enumerate(region.outputs):
            self._copies[output] = self._graph.call_function(operator.getitem, (call, index))

    def _body(self, region: _Region) -> torch.fx.GraphModule:
        """Returns a region as a graph of its own, in which repeated runs are blocks again."""
        graph, root = torch.fx.Graph(), nn.Module()
        copies = {n: graph.placeholder(f"a{i}") for i, n in enumerate(region.inputs)}
        for node in region.run.nodes:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        returned = tuple(copies[node] for node in region.outputs)
        graph.output(returned[0] if len(returned) == 1 else returned)
        take_over(root, self._module, region.run.nodes)
        body = torch.fx.GraphModule(root, graph)
        return outlined(body, {copies[node]: self._calls[node] for node in region.run.nodes})


def take_over(root: nn.Module, module: nn.Module, nodes: Iterable[Node]) -> None:
    """Copies to ``root`` the attributes of a module that nodes refer to."""
    for node in nodes:
        if node.op in ("get_attr", "call_module"):
            holder, _, last = holder_of(root, str(node.target))
            hold(holder, last, held(module, node))
