"""Derivatives: a request for one, the two halves of a leaf's, and the boundary between them.

A value that the backward needs is *handed over* if it is an input or a result of the forward (or a
view of one), and saved in one struct value otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Union

from torch.fx import GraphModule, Node

from ..reuse.ir.leaf import node_type
from ..reuse.ir.operators import is_view
from ..reuse.ir.program import Closure, Kernels, Leaf, Level, input_nodes, outputs_of
from ..reuse.ir.torch_symbols import is_certain
from ..reuse.ir.types import StructType, TensorType
from .traces.joint_trace import JointTrace


@dataclass(frozen=True, slots=True)
class Cut:
    """Cuts a leaf's joint graph where just these named values are saved, some on the host."""

    saved: frozenset[str]
    offloaded: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Whole:
    """Recomputes the whole closure in the backward; only random draws are saved."""


@dataclass(frozen=True, slots=True)
class PerCall:
    """Holds a choice for each call of a composite closure; None saves what the recipe saves."""

    choices: tuple[Choice | None, ...]


Choice = Union[Cut, Whole, PerCall]  # noqa: UP007  (a forward reference inside PerCall)


@dataclass(frozen=True)
class Request:
    """Names a derivative: of which closure, with respect to which inputs, with what saved."""

    closure: Closure  # the primal
    inputs: tuple[int, ...]  # positions of the inputs whose gradients are wanted
    outputs: tuple[int, ...]  # positions of the outputs that have a cotangent
    choice: Choice | None = None  # what is saved; None saves what the recipe says


@dataclass(frozen=True, eq=False)
class Derivative:
    """Holds forward and backward of one closure, for one choice of what is differentiated."""

    forward: Closure  # results are the primal's results, then the saved struct
    # Operands are the saved struct, ``kept_inputs``, ``kept_outputs``, then a cotangent for each of
    # ``cotangent_outputs``; results are gradients of ``gradient_inputs``.
    backward: Closure
    kept_inputs: tuple[int, ...]
    kept_outputs: tuple[int, ...]
    cotangent_outputs: tuple[int, ...]
    gradient_inputs: tuple[int, ...]
    # Positions in the saved struct of what is in host memory between the two.
    offloaded: tuple[int, ...] = ()

    @property
    def saved_type(self) -> StructType:
        """Returns the type of the saved struct."""
        saved = self.forward.output_types[-1]
        assert isinstance(saved, StructType)
        return saved

    @property
    def has_one_cotangent(self) -> bool:
        """Whether any loss needs the whole backward, as there is one result to come from."""
        return len(self.cotangent_outputs) == 1


def make_pair(
    leaf: Leaf,
    forward: GraphModule,
    backward: GraphModule,
    joint: JointTrace,
    kernels: Kernels,
    level: Level = "aten",
) -> Derivative:
    """Makes a derivative of the two halves of a partitioned leaf."""
    primals = [n.name for n in input_nodes(forward)]
    results = [o.name if isinstance(o, Node) else "" for o in outputs_of(forward)]
    primal_results = results[: joint.num_outputs]
    needed = [n.name for n in input_nodes(backward)]
    tangents = [n for n in needed if n.startswith("tangents_")]
    # Both halves were cut from one graph, so equal names are one value that crosses the boundary.
    kept_inputs = [primals.index(n) for n in needed if n in primals]
    kept_outputs = [
        primal_results.index(n) for n in needed if n in primal_results and n not in primals
    ]
    known = {*primals, *primal_results, *tangents}
    saved = [n for n in needed if n not in known]
    saved_type = _reorder_outputs(forward, joint.num_outputs, saved)
    order = [*saved, *(primals[i] for i in kept_inputs), *(primal_results[i] for i in kept_outputs)]
    _reorder_inputs(backward, [*order, *tangents])
    cotangents = tuple(joint.tangent_outputs[int(n.split("_")[1]) - 1] for n in tangents)
    forward_leaf = Leaf(
        f"{leaf.name}.forward",
        forward,
        leaf.input_types,
        (*leaf.output_types, saved_type),
        leaf.input_names,
        level,
        kernels,
    )
    kept = [leaf.input_types[i] for i in kept_inputs] + [leaf.output_types[i] for i in kept_outputs]
    backward_leaf = Leaf(
        f"{leaf.name}.backward",
        backward,
        (saved_type, *kept, *(cotangent_type(leaf.output_types[i]) for i in cotangents)),
        tuple(cotangent_type(leaf.input_types[i]) for i in joint.grad_inputs),
        level=level,
        kernels=kernels,
    )
    return Derivative(
        forward_leaf,
        backward_leaf,
        tuple(kept_inputs),
        tuple(kept_outputs),
        cotangents,
        joint.grad_inputs,
    )


def cotangent_type(type_: object) -> TensorType:
    """Returns the type of the cotangent of a tensor of this type."""
    assert isinstance(type_, TensorType)
    return type_.cotangent()


def _reorder_outputs(module: GraphModule, num_outputs: int, saved: Sequence[str]) -> StructType:
    """Makes the saved tensors follow the primal results, in the given order."""
    by_name = {n.name: n for n in module.graph.nodes}
    keep = outputs_of(module)[:num_outputs] + [by_name[name] for name in saved]
    module.graph.output_node().args = (tuple(keep),)
    module.graph.eliminate_dead_code()
    module.recompile()
    return StructType(tuple(TensorType.of(by_name[name].meta["val"]) for name in saved))


def _reorder_inputs(module: GraphModule, names: Sequence[str]) -> None:
    """Puts placeholders into the given order; all of them are named."""
    by_name = {n.name: n for n in input_nodes(module)}
    assert set(names) == set(by_name), (names, list(by_name))
    # The order of placeholders is the order of arguments, so the nodes themselves are moved.
    anchor = next(iter(module.graph.nodes))
    for name in names:
        node = by_name[name]
        if node is not anchor:
            anchor.prepend(node)
        else:
            anchor = anchor.next
    module.recompile()


def hand_over_views(forward: GraphModule, backward: GraphModule) -> None:
    """Moves views of inputs into the backward, so that the inputs are handed over.

    With a saved view of a parameter, autograd would not know that the backward reads the parameter,
    and a change between forward and backward would go unnoticed.
    """
    chains = _view_chains(forward, backward)
    _take_views(backward, {n: c for n, c in chains.items() if c and _is_input(_source_of(c))})


def _view_chains(forward: GraphModule, backward: GraphModule) -> dict[str, list[Node]]:
    """Returns, for each forward value that the backward takes, the views that lead to it."""
    by_name = {n.name: n for n in forward.graph.nodes}
    needed = (n.name for n in input_nodes(backward) if n.name in by_name)
    return {name: _view_chain(by_name[name]) for name in needed}


def save_memory_once(forward: GraphModule, backward: GraphModule) -> None:
    """Saves one value in place of several views of it; the backward then makes the views."""
    by_name, chains = {n.name: n for n in forward.graph.nodes}, _view_chains(forward, backward)
    groups: dict[Node, list[str]] = {}
    for name, chain in chains.items():
        groups.setdefault(_source_of(chain) if chain else by_name[name], []).append(name)
    own = {n.name for n in backward.graph.nodes if n.op != "placeholder"}
    for source, names in groups.items():
        # An input is handed over at no cost; a name that the backward uses cannot be added.
        if len(names) == 1 or _is_input(source) or source.name in own:
            continue
        views = [node_type(by_name[n]).num_bytes for n in names]
        if _are_fewer(node_type(source).num_bytes, views):
            _take_views(backward, {n: chains[n] for n in names if chains[n]})


def _are_fewer(num_bytes: int, others: Sequence[int]) -> bool:
    """Returns whether a number of bytes is less than the sum of others, for all symbolic sizes.

    A comparison of symbols is often undecided, even of ``n`` with ``2 * n``. That one of the others
    is equal, which is enough, shows without a comparison.
    """
    return num_bytes in others or is_certain(num_bytes < sum(others))


def _take_views(backward: GraphModule, chains: Mapping[str, Sequence[Node]]) -> None:
    """Replaces operands of a backward by views that it takes of a value of the forward."""
    entry: dict[str, Node] = {n.name: n for n in input_nodes(backward)}
    first = next(n for n in backward.graph.nodes if n.op != "placeholder")
    for name, chain in chains.items():
        placeholder, source = entry[name], _source_of(chain)
        if source.name not in entry:
            with backward.graph.inserting_before(placeholder):
                entry[source.name] = backward.graph.placeholder(source.name)
            # Values are matched by their names in the joint graph, so the name is set by hand.
            entry[source.name].name = entry[source.name].target = source.name
            entry[source.name].meta.update(source.meta)
        value = entry[source.name]
        with backward.graph.inserting_before(first):
            for node in chain:
                moved = {node.all_input_nodes[0]: value}
                value = backward.graph.node_copy(node, moved.__getitem__)
        placeholder.replace_all_uses_with(value)
        backward.graph.erase_node(placeholder)
    backward.recompile()


def _view_chain(node: Node) -> list[Node]:
    """Returns the chain of views that ends in a node; it starts at a value that is no view."""
    chain: list[Node] = []
    while is_view(node) and len(node.all_input_nodes) == 1:
        chain.append(node)
        node = node.all_input_nodes[0]
    return chain[::-1]


def _source_of(chain: Sequence[Node]) -> Node:
    return chain[0].all_input_nodes[0]


def _is_input(node: Node) -> bool:
    return node.op == "placeholder"
