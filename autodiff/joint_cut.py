"""Cuts of a joint graph: any set of forward values may be the saved ones.

The backward computes again whatever else it needs, each value right before its first use, so that
recomputed tensors live shortly. Random operators are never among what is computed again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
import torch.fx

from ..reuse.ir.program import input_nodes
from ..reuse.torch_names import operator_schema


def may_draw(node: torch.fx.Node) -> bool:
    """Whether an operator is one that draws random numbers, for some arguments at least."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def is_draw(node: torch.fx.Node) -> bool:
    """Whether an operator draws random numbers (attention without dropout does not)."""
    if not may_draw(node):
        return False
    schema = operator_schema(node)
    for index, argument in enumerate(schema.arguments if schema is not None else ()):
        if argument.name == "dropout_p":
            given = node.args[index] if index < len(node.args) else argument.default_value
            return bool(node.kwargs.get(argument.name, given) != 0.0)
    return True


def is_tangent(node: torch.fx.Node) -> bool:
    """Whether a joint graph's placeholder is a cotangent."""
    return node.op == "placeholder" and node.name.startswith("tangents_")


def outputs_of(module: torch.fx.GraphModule) -> list[Any]:
    """Returns what a graph returns, flat."""
    outputs = module.graph.output_node().args[0]
    assert isinstance(outputs, (tuple, list))
    return list(outputs)


def ancestors(
    nodes: Iterable[torch.fx.Node], stop: Iterable[torch.fx.Node] = ()
) -> set[torch.fx.Node]:
    """Returns the nodes and all that they are computed from; does not go beyond ``stop``."""
    ends, found, todo = set(stop), set(), list(nodes)
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            if node not in ends:
                todo.extend(node.all_input_nodes)
    return found


def backward_nodes(joint: torch.fx.GraphModule) -> set[torch.fx.Node]:
    """Returns the nodes that depend on a cotangent."""
    found: set[torch.fx.Node] = set()
    for node in joint.graph.nodes:
        if is_tangent(node) or any(n in found for n in node.all_input_nodes):
            found.add(node)
    found.discard(joint.graph.output_node())
    return found


def copy_graph(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Returns a copy with the same names, for those who change what they are given."""
    graph = torch.fx.Graph()
    mapping: dict[torch.fx.Node, torch.fx.Node] = {}
    outputs = graph.graph_copy(module.graph, mapping)
    graph.output(outputs)
    return torch.fx.GraphModule(module, graph)


def cut_joint(
    joint: torch.fx.GraphModule, num_outputs: int, saved: frozenset[str]
) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
    """Splits a joint graph into a forward that saves the named values, and a backward.

    Args:
        joint: placeholders ``primals_*`` and ``tangents_*``; outputs, then gradients.
        num_outputs: how many of the outputs belong to the forward.
        saved: names of forward nodes.
    """
    outputs = outputs_of(joint)
    keep = [n for n in joint.graph.nodes if n.name in saved]
    assert len(keep) == len(saved), f"not in the graph: {saved - {n.name for n in keep}}"
    entries = input_nodes(joint)
    primals = [n for n in entries if not is_tangent(n)]
    tangents = [n for n in entries if is_tangent(n)]
    forward = extract(joint, primals, [*outputs[:num_outputs], *keep])
    gradients = outputs[num_outputs:]
    ends = [*primals, *keep, *tangents]
    reached = ancestors((g for g in gradients if isinstance(g, torch.fx.Node)), ends)
    in_forward = ancestors(n for n in outputs[:num_outputs] if isinstance(n, torch.fx.Node))
    twice = [n.name for n in reached - set(ends) if n in in_forward and is_draw(n)]
    assert not twice, f"{twice} would be drawn twice"
    used = [n for n in (*primals, *keep) if n in reached]
    return forward, extract(joint, [*used, *tangents], gradients, order="when_needed")


def extract(
    module: torch.fx.GraphModule,
    inputs: Sequence[torch.fx.Node],
    outputs: Sequence[Any],
    order: Literal["as_is", "when_needed"] = "as_is",
) -> torch.fx.GraphModule:
    """Copies the part of a graph that leads from some of its nodes to others.

    Args:
        module: the graph.
        inputs: nodes that become placeholders of the same names.
        outputs: nodes (or constants) that are returned.
        order: ``"as_is"`` keeps the graph's order; ``"when_needed"`` moves what does not depend on
            a cotangent right before its first use.
    """
    wanted = [n for n in outputs if isinstance(n, torch.fx.Node)]
    needed = ancestors(wanted, inputs) - set(inputs)
    nodes = [n for n in module.graph.nodes if n in needed]
    if order == "when_needed":
        nodes = _just_in_time(nodes, backward_nodes(module))
    graph = torch.fx.Graph()
    mapping: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in inputs:
        mapping[node] = graph.placeholder(node.name)
        mapping[node].meta.update(node.meta)
    for node in nodes:
        assert node.op != "placeholder", f"{node.name} is not among the inputs"
        mapping[node] = graph.node_copy(node, mapping.__getitem__)
    graph.output(tuple(mapping[n] if isinstance(n, torch.fx.Node) else n for n in outputs))
    return torch.fx.GraphModule(module, graph)


def _just_in_time(
    nodes: Sequence[torch.fx.Node], backward: set[torch.fx.Node]
) -> list[torch.fx.Node]:
    """Orders recomputed nodes right before the first backward node that needs them."""
    wanted, placed = set(nodes), dict[torch.fx.Node, None]()

    def place(node: torch.fx.Node) -> None:
        todo = [node]
        while todo:
            top = todo[-1]
            missing = [n for n in top.all_input_nodes if n in wanted and n not in placed]
            if missing:
                todo.extend(reversed(missing))
            else:
                placed.setdefault(todo.pop())

    for node in nodes:
        if node in backward:
            place(node)
    for node in nodes:
        place(node)
    return list(placed)
