"""Adapter: a joint graph split into forward and backward, by PyTorch's minimum cut or our cuts.

In a cut of ours any set of forward values can be saved. The backward recomputes what else it needs,
each value right before its first use, so that recomputed tensors have short lives. Random operators
are never recomputed: each runs in the half where it was traced, in the order of the trace.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from ...reuse.ir.operators import is_draw, is_view, may_draw
from ...reuse.ir.program import input_nodes, outputs_of
from ...reuse.torch_names import module_of

PartitionPolicy: TypeAlias = Literal["save", "min_cut"]
_EQUAL = torch.ops.aten.eq.Tensor


def partition(
    joint: GraphModule, num_outputs: int, policy: PartitionPolicy
) -> tuple[GraphModule, GraphModule]:
    """Splits a joint graph into forward and backward.

    ``"save"`` saves what autograd would; ``"min_cut"`` recomputes cheap operators to save fewer
    bytes. Random operators are never run twice. A graph whose backward draws is cut where autograd
    cuts it: PyTorch's minimum cut would move these draws into the forward.
    """
    if policy == "save" or late_draws(joint):
        return cut_joint(joint, num_outputs, read_by_backward(joint, num_outputs))
    # Imported here: it imports Inductor, which inference on eager kernels does not need.
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    copied = copy_graph(joint)  # it changes its argument
    # It sees the results of a multi-output operator by its getitem nodes alone.
    _mend_picks(copied)
    for node in set().union(*compared(copied)):
        node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    forward, backward = min_cut_rematerialization_partition(copied, (), num_fwd_outputs=num_outputs)
    return forward, _without_second_draws(backward)


def compared(joint: GraphModule) -> list[set[Node]]:
    """Returns forward values that the backward compares for equality, as with their maximum.

    Computed again by another kernel, one may differ in its last bit. Then no element equals the
    maximum, and the gradient, which is divided by the number of those that do, is not a number.
    """
    early = early_nodes(joint)
    made = {n for n in early if n.op == "call_function" and not is_view(n) and _is_float(n)}
    late = (n for n in joint.graph.nodes if n.target is _EQUAL and n not in early)
    return [ancestors(n.all_input_nodes, made) & made for n in late]


def _is_float(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _mend_picks(joint: GraphModule) -> None:
    """Removes unused getitem nodes: a gradient that was not requested is no tensor.

    Adds one to each multi-output operator without any, such as an unused draw: a partitioner would
    take the operator's result for a tensor.
    """
    for node in reversed([*joint.graph.nodes]):
        value = node.meta.get("val")
        if not node.users and node.target is operator.getitem:
            joint.graph.erase_node(node)
        elif not node.users and isinstance(value, (tuple, list)) and value:
            with joint.graph.inserting_after(node):
                pick = joint.graph.call_function(operator.getitem, (node, 0))
            pick.meta.update({**node.meta, "val": value[0]})


def _without_second_draws(backward: GraphModule) -> GraphModule:
    """Returns a backward without the random operators that a partitioner copied into it.

    Their results are unused there (the draws are saved), but running them would advance the
    generator, and every later mask would differ from eager's. One may feed another, so all unused
    nodes are removed, from the last to the first.
    """
    for node in reversed(backward.graph.nodes):
        if not node.users and (may_draw(node.target) or not node.is_impure()):
            backward.graph.erase_node(node)
        else:
            assert not is_draw(node), f"{node.target} would be drawn twice"
    return module_of(backward.graph, backward)  # the partitioner's is not lazy


# ---- cuts of our own -----------------------------------------------------------------------------


def early_nodes(joint: GraphModule) -> set[Node]:
    """Returns the nodes traced before autograd ran: those up to the last that is tagged forward.

    That a node depends on no cotangent is not enough: a backward may draw a mask of its own.
    """
    nodes = list(joint.graph.nodes)
    noted = [i for i, n in enumerate(nodes) if n.meta.get("partitioner_tag") == "is_forward"]
    return set(nodes[: noted[-1] + 1]) if noted else set(nodes) - backward_nodes(joint)


def late_draws(joint: GraphModule) -> list[Node]:
    """Returns the random operators of the backward that autograd ran, in order."""
    early = early_nodes(joint)
    return [n for n in joint.graph.nodes if is_draw(n) and n not in early]


def read_by_backward(joint: GraphModule, num_outputs: int) -> frozenset[str]:
    """Names the values that autograd itself would save: forward values that the backward reads."""
    early = early_nodes(joint)
    late = [n for n in joint.graph.nodes if n not in early and n.op != "output"]
    read = {p for n in late for p in n.all_input_nodes}
    read.update(n for n in outputs_of(joint)[num_outputs:] if isinstance(n, Node))
    return frozenset(n.name for n in read if n in early and n.op != "placeholder")


def is_tangent(node: Node) -> bool:
    """Returns whether a joint graph's placeholder is a cotangent."""
    return node.op == "placeholder" and node.name.startswith("tangents_")


def ancestors(nodes: Iterable[Node], stop: Iterable[Node] = ()) -> set[Node]:
    """Returns the nodes and all that they depend on; does not go beyond ``stop``."""
    ends, found, todo = set(stop), set(), list(nodes)
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            if node not in ends:
                todo.extend(node.all_input_nodes)
    return found


def backward_nodes(joint: GraphModule, late: Iterable[Node] = ()) -> set[Node]:
    """Returns the nodes that depend on a cotangent, or on one of ``late``."""
    found: set[Node] = set(late)
    for node in joint.graph.nodes:
        if is_tangent(node) or any(n in found for n in node.all_input_nodes):
            found.add(node)
    found.discard(joint.graph.output_node())
    return found


def copy_graph(module: GraphModule) -> GraphModule:
    """Returns a copy of a graph with the same names, for callees that change their argument."""
    graph = Graph()
    mapping: dict[Node, Node] = {}
    outputs = graph.graph_copy(module.graph, mapping)
    graph.output(outputs)
    return module_of(graph, module)


def cut_joint(
    joint: GraphModule, num_outputs: int, saved: frozenset[str]
) -> tuple[GraphModule, GraphModule]:
    """Splits a joint graph into a forward that saves the named values, and a backward."""
    outputs = outputs_of(joint)
    early = early_nodes(joint)
    keep = [n for n in joint.graph.nodes if n.name in saved]
    assert len(keep) == len(saved), f"not in the graph: {saved - {n.name for n in keep}}"
    entries = input_nodes(joint)
    primals = [n for n in entries if not is_tangent(n)]
    tangents = [n for n in entries if is_tangent(n)]
    # Unused draws, too, as in eager: they advance the generator; and assertions, which may raise.
    calls = [n for n in joint.graph.nodes if n.op == "call_function"]
    acts = [n for n in calls if is_draw(n) or n.is_impure(impure_random=False)]
    run, late = ([n for n in acts if (n in early) is is_early] for is_early in (True, False))
    forward = extract(joint, primals, [*outputs[:num_outputs], *keep], also=run)
    gradients = outputs[num_outputs:]
    ends = [*primals, *keep, *tangents]
    reached = ancestors((n for n in (*gradients, *late) if isinstance(n, Node)), ends)
    twice = [n.name for n in run if is_draw(n) and n in reached and n not in keep]
    # A second draw gives another mask: a silent wrong gradient.
    assert not twice, f"{twice} would be drawn twice"
    used = [n for n in (*primals, *keep) if n in reached]
    backward = extract(joint, [*used, *tangents], gradients, also=late, order="when_needed")
    return forward, backward


def extract(
    module: GraphModule,
    inputs: Sequence[Node],
    outputs: Sequence[Any],
    *,
    also: Sequence[Node] = (),
    order: Literal["as_is", "when_needed"] = "as_is",
) -> GraphModule:
    """Copies the part of a graph that leads from some of its nodes to others.

    ``also`` are nodes that run whether an output needs them or not. ``"when_needed"`` moves nodes
    that depend on no cotangent, nor on one of those, right before their first use.
    """
    wanted = [n for n in outputs if isinstance(n, Node)]
    needed = ancestors((*wanted, *also), inputs) - set(inputs)
    nodes = [n for n in module.graph.nodes if n in needed]
    if order == "when_needed":
        nodes = _just_in_time(nodes, backward_nodes(module, also))
    graph = Graph()
    mapping: dict[Node, Node] = {}
    for node in inputs:
        mapping[node] = graph.placeholder(node.name)
        mapping[node].meta.update(node.meta)
    for node in nodes:
        assert node.op != "placeholder", f"{node.name} is not among the inputs"
        mapping[node] = graph.node_copy(node, mapping.__getitem__)
    graph.output(tuple(mapping[n] if isinstance(n, Node) else n for n in outputs))
    return module_of(graph, module)


def _just_in_time(nodes: Sequence[Node], backward: set[Node]) -> list[Node]:
    """Orders recomputed nodes right before the first backward node that needs them."""
    # An explicit stack, not recursion: a chain of recomputed nodes may be thousands long.
    wanted, placed = set(nodes), dict[Node, None]()

    def place(node: Node) -> None:
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
