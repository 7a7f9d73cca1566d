"""``vjp``: the derivative of a closure as a pair of closures, made once per closure.

The forward closure returns the primal's results and one struct value with what it saves. The
backward closure takes that struct, the inputs and results it needs again (handed over, not saved),
and cotangents; it returns gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx

from ..reuse.leaf import flat_types, is_active, is_view, make_leaf, without_autocast
from ..reuse.program import (
    Call,
    Closure,
    Composite,
    Leaf,
    Pack,
    Program,
    Unpack,
    Value,
    input_nodes,
)
from ..reuse.types import StructType, TensorType, flatten_type
from .torch_autograd import Decompositions, JointTrace, partition


@dataclass(frozen=True, eq=False)
class Derivative:
    """Forward and backward of one closure, for one choice of what is differentiated.

    Attributes:
        forward: results are the primal's results, then the saved struct.
        backward: operands are the saved struct, ``kept_inputs``, ``kept_outputs``, then a cotangent
            for each of ``cotangent_outputs``; results are gradients of ``gradient_inputs``.
    """

    forward: Closure
    backward: Closure
    kept_inputs: tuple[int, ...]
    kept_outputs: tuple[int, ...]
    cotangent_outputs: tuple[int, ...]
    gradient_inputs: tuple[int, ...]

    @property
    def saved_type(self) -> StructType:
        """Type of the saved struct."""
        saved = self.forward.output_types[-1]
        assert isinstance(saved, StructType)
        return saved


Request = tuple[Closure, tuple[int, ...], tuple[int, ...]]


def _unchanged(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    return module


@dataclass(frozen=True)
class Recipe:
    """How leaf closures are differentiated, as their backend wants it.

    Attributes:
        decompositions: how composite operators are taken apart, after differentiation.
        policy: how a joint graph splits into forward and backward (see ``partition``).
        joint_pass: a backend's rewrite of the joint graph before it is split.
        kernels: which kernels the results get, ``"backend"`` or ``"eager"``.
        rewrite: a backend's choice between forms of composite operators, before anything else.
    """

    decompositions: Decompositions = field(default_factory=dict)
    policy: str = "save"
    joint_pass: Callable[[torch.fx.GraphModule], torch.fx.GraphModule] | None = None
    kernels: str = "backend"
    rewrite: Callable[[torch.fx.GraphModule], torch.fx.GraphModule] = _unchanged


class Differentiator:
    """Makes derivatives and remembers them by closure.

    Args:
        recipe_for: the recipe for a leaf closure.
    """

    def __init__(self, recipe_for: Callable[[Leaf], Recipe]) -> None:
        self._recipe_for = recipe_for
        self._derivatives: dict[Request, Derivative | None] = {}
        self._activity: dict[tuple[Closure, tuple[bool, ...]], tuple[bool, ...]] = {}
        self._adders: dict[TensorType, Leaf] = {}

    def vjp(
        self, closure: Closure, inputs: Sequence[int], outputs: Sequence[int]
    ) -> Derivative | None:
        """Returns the derivative of a closure, or None if no gradient flows.

        Args:
            closure: the primal.
            inputs: positions of the inputs whose gradients are wanted.
            outputs: positions of the outputs that have a cotangent.
        """
        request = (closure, tuple(inputs), tuple(outputs))
        if request not in self._derivatives:
            self._derivatives[request] = self._make(*request)
        return self._derivatives[request]

    def _make(
        self, closure: Closure, inputs: tuple[int, ...], outputs: tuple[int, ...]
    ) -> Derivative | None:
        if not inputs or not outputs:
            return None
        if isinstance(closure, Leaf):
            return self._leaf(closure, inputs, outputs)
        assert isinstance(closure, Composite), "pack and unpack appear only after differentiation"
        return _Reversal(self, closure, inputs, outputs).derivative()

    # ---- leaves --------------------------------------------------------------------------

    @without_autocast
    def _leaf(
        self, leaf: Leaf, inputs: tuple[int, ...], outputs: tuple[int, ...]
    ) -> Derivative | None:
        types, recipe = flat_types(leaf.input_types), self._recipe_for(leaf)
        module = recipe.rewrite(leaf.module)
        joint = JointTrace(module, types, inputs, outputs, recipe.decompositions)
        if not joint.tangent_outputs or not joint.grad_inputs:
            return None
        if recipe.joint_pass is not None:
            joint.graph_module = recipe.joint_pass(joint.graph_module)
        forward, backward = partition(joint.graph_module, joint.num_outputs, recipe.policy)
        _hand_over_views(forward, backward)
        return _pair(leaf, forward, backward, joint, recipe.kernels)

    # ---- programs ------------------------------------------------------------------------

    def active_outputs(self, closure: Closure, active: Sequence[bool]) -> tuple[bool, ...]:
        """Says which results of a closure may depend on the active operands, differentiably."""
        key = (closure, tuple(active))
        if key not in self._activity:
            if isinstance(closure, Leaf):
                self._activity[key] = is_active(closure, key[1])
            else:
                assert isinstance(closure, Composite)
                values = active_values(self, closure.program, key[1])
                self._activity[key] = tuple(v in values for v in closure.program.outputs)
        return self._activity[key]

    def adder(self, type_: TensorType) -> Leaf:
        """Returns the closure that adds two values of a type."""
        if type_ not in self._adders:
            self._adders[type_] = make_leaf("add", torch.ops.aten.add.Tensor, type_)
        return self._adders[type_]


def active_values(
    differentiator: Differentiator, program: Program, active: Sequence[bool]
) -> set[Value]:
    """Returns the values of a program that may carry a gradient back to an active input."""
    found = {v for v, flag in zip(program.inputs, active, strict=True) if flag}
    for call in program.calls:
        flags = [v in found for v in call.args]
        if any(flags):
            results = differentiator.active_outputs(call.closure, flags)
            found.update(v for v, flag in zip(call.results, results, strict=True) if flag)
    return found


def _hand_over_views(forward: torch.fx.GraphModule, backward: torch.fx.GraphModule) -> None:
    """Lets the backward take its views of inputs itself, so that the inputs are handed over.

    A saved view of a parameter would hide from autograd that the parameter is needed again, and a
    change between forward and backward would go unnoticed.
    """
    by_name = {n.name: n for n in forward.graph.nodes}
    entry: dict[str, torch.fx.Node] = {n.name: n for n in input_nodes(backward)}
    first = next(n for n in backward.graph.nodes if n.op != "placeholder")
    for name, placeholder in list(entry.items()):
        chain = _view_chain(by_name[name]) if name in by_name else []
        if not chain:
            continue
        source = chain[0].all_input_nodes[0]
        if source.name not in entry:
            with backward.graph.inserting_before(placeholder):
                entry[source.name] = backward.graph.placeholder(source.name)
            entry[source.name].meta.update(source.meta)
        value = entry[source.name]
        with backward.graph.inserting_before(first):
            for node in chain:
                moved = {node.all_input_nodes[0]: value}
                value = backward.graph.node_copy(node, moved.__getitem__)
        placeholder.replace_all_uses_with(value)
        backward.graph.erase_node(placeholder)
    backward.recompile()


def _view_chain(node: torch.fx.Node) -> list[torch.fx.Node]:
    """Returns the views that lead from an input to a node, or nothing if it is not such a view."""
    chain: list[torch.fx.Node] = []
    while is_view(node) and len(node.all_input_nodes) == 1:
        chain.append(node)
        node = node.all_input_nodes[0]
    return chain[::-1] if node.op == "placeholder" else []


def passed_through(program: Program) -> dict[Value, Value]:
    """Maps each result that is really an operand, returned as it came, to that operand."""
    same: dict[Value, Value] = {}
    for call in program.calls:
        if isinstance(call.closure, Composite):
            body = call.closure.program
            inner = passed_through(body)
            place = {v: i for i, v in enumerate(body.inputs)}
            for result, output in zip(call.results, body.outputs, strict=True):
                index = place.get(inner.get(output, output))
                if index is not None:
                    same[result] = same.get(call.args[index], call.args[index])
    return same


def _pair(
    leaf: Leaf,
    forward: torch.fx.GraphModule,
    backward: torch.fx.GraphModule,
    joint: JointTrace,
    kernels: str,
) -> Derivative:
    """Reads the boundary of a partitioned leaf: what is saved, and what is handed over."""
    primals = [n.name for n in input_nodes(forward)]
    results = [o.name if isinstance(o, torch.fx.Node) else "" for o in _outputs(forward)]
    primal_results = results[: joint.num_outputs]
    needed = [n.name for n in input_nodes(backward)]
    tangents = [n for n in needed if n.startswith("tangents_")]
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
        "aten",
        kernels,
    )
    kept = [leaf.input_types[i] for i in kept_inputs] + [leaf.output_types[i] for i in kept_outputs]
    backward_leaf = Leaf(
        f"{leaf.name}.backward",
        backward,
        (saved_type, *kept, *(_cotangent_type(leaf.output_types[i]) for i in cotangents)),
        tuple(_cotangent_type(leaf.input_types[i]) for i in joint.grad_inputs),
        level="aten",
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


def _cotangent_type(type_: object) -> TensorType:
    assert isinstance(type_, TensorType)
    return type_.cotangent()


def _outputs(module: torch.fx.GraphModule) -> list[Any]:
    outputs = module.graph.output_node().args[0]
    assert isinstance(outputs, (tuple, list))
    return list(outputs)


def _reorder_outputs(
    module: torch.fx.GraphModule, num_outputs: int, saved: Sequence[str]
) -> StructType:
    """Makes the saved tensors follow the primal results, in the given order."""
    by_name = {n.name: n for n in module.graph.nodes}
    keep = _outputs(module)[:num_outputs] + [by_name[name] for name in saved]
    module.graph.output_node().args = (tuple(keep),)
    module.graph.eliminate_dead_code()
    module.recompile()
    return StructType(tuple(TensorType.of(by_name[name].meta["val"]) for name in saved))


def _reorder_inputs(module: torch.fx.GraphModule, names: Sequence[str]) -> None:
    """Puts placeholders into the given order; all of them are named."""
    by_name = {n.name: n for n in input_nodes(module)}
    assert set(names) == set(by_name), (names, list(by_name))
    anchor = next(iter(module.graph.nodes))
    for name in names:
        node = by_name[name]
        if node is not anchor:
            anchor.prepend(node)
        else:
            anchor = anchor.next
    module.recompile()


class _Reversal:
    """Differentiates a program: forward calls that save, and their backwards in reverse."""

    def __init__(
        self,
        differentiator: Differentiator,
        closure: Composite,
        inputs: Sequence[int],
        outputs: Sequence[int],
    ) -> None:
        self._make = differentiator
        self._closure = closure
        self._program = closure.program
        self._wanted = inputs
        flags = [i in set(inputs) for i in range(len(self._program.inputs))]
        self._active = active_values(differentiator, self._program, flags)
        self._cotangents: dict[Value, Value] = {}
        self._backward: list[Call] = []
        self._derivatives: dict[Call, tuple[Derivative, Value]] = {}
        self._kept: dict[Value, Value] = {}  # forward value -> its stand-in in the backward program
        self._same = passed_through(self._program)
        self._seeds: list[tuple[int, Value]] = []
        for index in outputs:
            value = self._program.outputs[index]
            if value in self._active:
                seed = Value(_cotangent_type(value.type), f"ct_{value.hint}")
                self._seeds.append((index, seed))
                self._add_cotangent(value, seed)

    def _add_cotangent(self, value: Value, cotangent: Value) -> None:
        """Sums cotangents where a value fans out."""
        present = self._cotangents.get(value)
        if present is None:
            self._cotangents[value] = cotangent
            return
        assert isinstance(cotangent.type, TensorType)
        total = Value(cotangent.type, cotangent.hint)
        adder = self._make.adder(cotangent.type)
        self._backward.append(Call(adder, (present, cotangent), (total,)))
        self._cotangents[value] = total

    def derivative(self) -> Derivative | None:
        """Builds the pair."""
        for call in reversed(self._program.calls):
            self._reverse(call)
        gradients = [i for i in self._wanted if self._program.inputs[i] in self._cotangents]
        if not gradients:
            return None
        forward_calls = [self._forward_call(c) for c in self._program.calls]
        return self._assemble(forward_calls, gradients)

    def _reverse(self, call: Call) -> None:
        wanted = [i for i, v in enumerate(call.args) if v in self._active]
        seeded = [i for i, v in enumerate(call.results) if v in self._cotangents]
        derivative = self._make.vjp(call.closure, wanted, seeded)
        if derivative is None:
            return
        saved = Value(derivative.saved_type, "saved")
        self._derivatives[call] = (derivative, saved)
        operands = [self._keep(saved)]
        operands += [self._keep(call.args[i]) for i in derivative.kept_inputs]
        operands += [self._keep(call.results[i]) for i in derivative.kept_outputs]
        operands += [self._cotangents[call.results[i]] for i in derivative.cotangent_outputs]
        targets = [call.args[i] for i in derivative.gradient_inputs]
        results = tuple(Value(_cotangent_type(v.type), f"ct_{v.hint}") for v in targets)
        self._backward.append(Call(derivative.backward, tuple(operands), results, call.path))
        for target, result in zip(targets, results, strict=True):
            self._add_cotangent(target, result)

    def _keep(self, value: Value) -> Value:
        value = self._same.get(value, value)
        if value not in self._kept:
            self._kept[value] = Value(value.type, value.hint)
        return self._kept[value]

    def _forward_call(self, call: Call) -> Call:
        if call not in self._derivatives:
            return call
        derivative, saved = self._derivatives[call]
        return Call(derivative.forward, call.args, (*call.results, saved), call.path)

    def _assemble(self, forward_calls: list[Call], gradients: list[int]) -> Derivative:
        program = self._program
        kept_inputs = [i for i, v in enumerate(program.inputs) if v in self._kept]
        inputs = set(program.inputs)
        kept_outputs, seen = [], set(inputs)
        for index, value in enumerate(program.outputs):
            if value in self._kept and value not in seen:
                kept_outputs.append(index)
                seen.add(value)
        packed = [v for v in self._kept if v not in seen]
        struct = StructType(tuple(v.type for v in packed))
        saved = Value(struct, "saved")
        forward = Program(
            program.inputs,
            (*forward_calls, Call(Pack(struct), tuple(packed), (saved,))),
            (*program.outputs, saved),
        )
        entry = Value(struct, "saved")
        unpack = Call(Unpack(struct), (entry,), tuple(self._kept[v] for v in packed))
        used = [(i, s) for i, s in self._seeds]
        backward = Program(
            (
                entry,
                *(self._kept[program.inputs[i]] for i in kept_inputs),
                *(self._kept[program.outputs[i]] for i in kept_outputs),
                *(seed for _, seed in used),
            ),
            (unpack, *self._backward),
            tuple(self._cotangents[program.inputs[i]] for i in gradients),
        )
        name = self._closure.name
        return Derivative(
            Composite(f"{name}.forward", forward, self._closure.input_names),
            Composite(f"{name}.backward", backward),
            tuple(kept_inputs),
            tuple(kept_outputs),
            tuple(i for i, _ in used),
            tuple(gradients),
        )


def saved_bytes(derivative: Derivative) -> int:
    """Bytes that one forward call saves for its backward (handed-over values not counted)."""
    return sum(t.num_bytes for t in flatten_type(derivative.saved_type))
