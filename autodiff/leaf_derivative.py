"""Derivatives of leaves: requests, the two halves of one, its boundary; those of control flow.

A value that the backward needs is *handed over* if it is an input or a result of the forward (or a
view of one), and saved in one struct value otherwise.

The derivative of control flow is control flow over the derivatives of the bodies. The backward of a
choice recomputes the forward of the chosen body, then runs its backward: to save values would need
memory for both bodies. The backward of a repetition takes the steps from last to first. Each step's
forward saves a row of what its backward needs, so that nothing is recomputed; gradients of operands
that are the same in each step are added up.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, Union

import torch
from torch.fx import GraphModule, Node

from ..reuse.errors import CaptureError
from ..reuse.ir import program as ir
from ..reuse.ir.control import Choose, Repeat, control_leaf, stacked_type
from ..reuse.ir.leaf import flat_types, node_type
from ..reuse.ir.operators import is_view
from ..reuse.ir.program import Closure, Kernels, Leaf, Level, input_nodes, outputs_of
from ..reuse.ir.rewrite import packed, unpacked
from ..reuse.ir.torch_symbols import is_certain
from ..reuse.ir.types import StructType, TensorType, Type
from .traces.joint_trace import JointTrace
from .traces.torch_make_fx import traced_operator


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
    name, types = f"{leaf.name}.forward", (*leaf.output_types, saved_type)
    forward_leaf = replace(
        leaf, name=name, module=forward, output_types=types, level=level, kernels=kernels
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
        whole, views = node_type(source).num_bytes, [node_type(by_name[n]).num_bytes for n in names]
        # A comparison of symbols is often undecided, even of ``n`` with ``2 * n``; that one of the
        # views has as many bytes, which is enough, shows without one.
        if whole in views or is_certain(whole < sum(views)):
            _take_views(backward, {n: chains[n] for n in names if chains[n]})


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


# ---- control flow --------------------------------------------------------------------------------


_FULL = torch.ops.aten.full.default


class _Differentiator(Protocol):
    """Makes the derivatives of bodies; see :class:`.derivative.Differentiator`."""

    def of(self, request: Request) -> Derivative | None: ...
    def active_outputs(self, closure: ir.Closure, active: tuple[bool, ...]) -> tuple[bool, ...]: ...
    def adder(self, type_: TensorType, added: TensorType) -> ir.Leaf: ...


def control_derivative(
    differentiator: _Differentiator, asked: Request, control: ir.Control
) -> Derivative | None:
    """Returns a control-flow operator's derivative, or None; CaptureError for a while_loop."""
    if isinstance(control, Choose):
        return _of_choice(differentiator, asked, control)
    if isinstance(control, Repeat):
        return _Repeated(differentiator, asked, control).derivative()
    raise CaptureError(
        "A while_loop has no derivative: how many steps it takes is known only when it runs, and a "
        "backward takes as many. Use scan, or map, whose number of steps is known."
    )


# ---- a choice ------------------------------------------------------------------------------------


def _of_choice(
    differentiator: _Differentiator, asked: Request, control: Choose
) -> Derivative | None:
    leaf = asked.closure
    assert isinstance(leaf, ir.Leaf)
    inputs = tuple(i - 1 for i in asked.inputs if i)  # the bodies do not take the predicate
    again = [Request(body, inputs, asked.outputs, Whole()) for body in control.bodies]
    found = [differentiator.of(one) for one in again]
    made = [one for one in found if one is not None]
    if not made:
        return None
    seeded = sorted({i for one in made for i in one.cotangent_outputs})
    gradients = sorted({i for one in made for i in one.gradient_inputs})
    bodies = tuple(
        _backward_branch(body, one, seeded, gradients)
        for body, one in zip(control.bodies, found, strict=True)
    )
    seeds = [ir.Value(cotangent_type(leaf.output_types[i])) for i in seeded]
    operands = _inputs(leaf)
    backward = _call(f"{leaf.name}.backward", Choose(bodies), [*operands, *seeds])
    results, pack = tuple(ir.Value(t) for t in leaf.output_types), packed(())
    entry = ir.Value(StructType(()), "saved")
    forward = (ir.Call(leaf, tuple(operands), results), pack)
    return Derivative(
        _composite(f"{leaf.name}.forward", operands, forward, (*results, *pack.results)),
        _composite(
            backward.closure.name,
            (entry, *operands, *seeds),
            (unpacked(entry), backward),
            backward.results,
        ),
        tuple(range(len(operands))),
        (),
        tuple(seeded),
        tuple(i + 1 for i in gradients),
    )


def _backward_branch(
    body: ir.Composite,
    derivative: Derivative | None,
    seeded: Sequence[int],
    gradients: Sequence[int],
) -> ir.Composite:
    """Returns the closure that computes a body's gradients from its operands and cotangents."""
    operands = _inputs(body)
    seeds = {i: ir.Value(cotangent_type(body.output_types[i])) for i in seeded}
    calls, found = list[ir.Call](), {}
    if derivative is not None:
        saved = _packed(derivative.saved_type, iter(()), calls)  # empty: bodies draw nothing
        calls.append(_backward_call(derivative, saved, operands, (), seeds))
        found = dict(zip(derivative.gradient_inputs, calls[-1].results, strict=True))
    for i in gradients:
        if i not in found:
            found[i] = ir.Value(cotangent_type(body.input_types[i]), "zeros")
            calls.append(zeros_call(found[i]))
    outputs = [found[i] for i in gradients]
    return _composite(f"{body.name}.backward", (*operands, *seeds.values()), calls, outputs)


# ---- a repetition --------------------------------------------------------------------------------


class _Repeated:
    """Makes the derivative of a repetition from that of its body."""

    def __init__(self, differentiator: _Differentiator, asked: Request, control: Repeat) -> None:
        assert isinstance(asked.closure, ir.Leaf)
        self._leaf, self._control, self._asked = asked.closure, control, asked
        self._adder = differentiator.adder
        self._body = control.bodies[0]
        self._num_carried = control.num_carried
        self._first_same = control.num_carried + control.num_scanned
        self._active = self._carried_actively(differentiator)
        wanted = sorted({*self._active, *(i for i in asked.inputs if i >= control.num_carried)})
        seeded = {*self._active, *(i for i in asked.outputs if i >= control.num_carried)}
        step = Request(self._body, tuple(wanted), tuple(sorted(seeded)))
        self._step = differentiator.of(step)
        # A tensor with gaps cannot be stacked: then each step of the backward recomputes the step's
        # forward, whose saved values stay inside the step.
        saved = flat_types([self._step.saved_type]) if self._step is not None else ()
        if not all(type_.is_dense for type_ in saved):
            self._step = differentiator.of(replace(step, choice=Whole()))

    def _carried_actively(self, differentiator: _Differentiator) -> list[int]:
        """Returns the carried operands that may depend on an input whose gradient is wanted."""
        types = flat_types(self._body.input_types)
        flags = [i in self._asked.inputs for i in range(len(types))]
        while True:
            found = differentiator.active_outputs(self._body, tuple(flags))[: self._num_carried]
            now = [a or b for a, b in zip(flags, found, strict=False)] + flags[len(found) :]
            if now == flags:
                carried = range(self._num_carried)
                return [i for i in carried if flags[i] and types[i].is_differentiable]
            flags = now

    def derivative(self) -> Derivative | None:
        """Builds the pair."""
        step = self._step
        if step is None or not self._gradients:
            return None
        forward, saved = self._forward(step)
        return Derivative(
            forward,
            self._backward(step, saved),
            self._kept_inputs(step),
            tuple(i for i in step.kept_outputs if i >= self._num_carried),
            self._seeded(step),
            tuple(self._gradients),
        )

    @property
    def _gradients(self) -> list[int]:
        """The operands that get a gradient."""
        assert self._step is not None
        found = {*self._active, *self._step.gradient_inputs}
        return [i for i in self._asked.inputs if i in found]

    def _kept_inputs(self, step: Derivative) -> tuple[int, ...]:
        return tuple(i for i in step.kept_inputs if i >= self._num_carried)

    def _seeded(self, step: Derivative) -> tuple[int, ...]:
        used = {*self._active, *step.cotangent_outputs}
        return tuple(i for i in self._asked.outputs if i in used)

    def _forward(self, step: Derivative) -> tuple[ir.Composite, list[TensorType]]:
        """Returns the forward, and the types of the rows that each step saves for the backward."""
        body, control, count = self._body, self._control, self._num_carried
        inputs = _inputs(body)
        results = [ir.Value(t) for t in body.output_types]
        saved = ir.Value(step.saved_type, "saved")
        calls = [ir.Call(step.forward, tuple(inputs), (*results, saved))]
        left = list(_taken_apart(saved, calls))
        left += [inputs[i] for i in step.kept_inputs if i < count]
        left += [results[i] for i in step.kept_outputs if i < count]
        name = f"{body.name}.forward"
        made = _composite(name, inputs, calls, (*results, *left))
        rows = flat_types(value.type for value in left)
        assert all(t.is_dense for t in rows), (
            "the launches of the backward read rows by their types"
        )
        operands = _inputs(self._leaf)
        call = _call(f"{self._leaf.name}.forward", replace(control, bodies=(made,)), operands)
        number = len(self._leaf.output_types)
        pack = packed(call.results[number:])
        outputs = (*call.results[:number], *pack.results)
        return _composite(call.closure.name, operands, (call, pack), outputs), rows

    def _backward(self, step: Derivative, left: Sequence[TensorType]) -> ir.Composite:
        leaf, control, count = self._leaf, self._control, self._num_carried
        made, sums = self._backward_step(step, left)
        struct = StructType(tuple(stacked_type(t, control.num_steps) for t in left))
        entry = ir.Value(struct, "saved")
        calls = [unpacked(entry)]
        rows = list(calls[0].results)
        kept = {i: ir.Value(leaf.input_types[i]) for i in self._kept_inputs(step)}
        results = {i: ir.Value(leaf.output_types[i]) for i in step.kept_outputs if i >= count}
        seeds = {i: ir.Value(cotangent_type(leaf.output_types[i])) for i in self._seeded(step)}
        carried = []
        for i in (*self._active, *sums):
            seed = seeds.get(i) if i < count else None
            if seed is None:
                seed = ir.Value(cotangent_type(leaf.input_types[i]), "zeros")
                calls.append(zeros_call(seed))
            carried.append(seed)
        rows += [value for i, value in kept.items() if i < self._first_same]
        rows += results.values()
        rows += [seeds[i] for i in step.cotangent_outputs if i >= count]
        same = [value for i, value in kept.items() if i >= self._first_same]
        turned = Repeat(
            (made,), control.num_steps, len(carried), len(rows), 1 - control.is_reversed
        )
        calls.append(_call(f"{leaf.name}.backward", turned, [*carried, *rows, *same]))
        scanned = [i for i in step.gradient_inputs if count <= i < self._first_same]
        found = dict(zip([*self._active, *sums, *scanned], calls[-1].results, strict=True))
        entries = (entry, *kept.values(), *results.values(), *seeds.values())
        outputs = [found[i] for i in self._gradients]
        return _composite(f"{leaf.name}.backward", entries, calls, outputs)

    def _backward_step(
        self, step: Derivative, left: Sequence[TensorType]
    ) -> tuple[ir.Composite, list[int]]:
        """Returns the body of the backward, and the operands whose gradients it adds up."""
        body, count = self._body, self._num_carried
        sums = [i for i in step.gradient_inputs if i >= self._first_same]
        cotangents = {i: ir.Value(cotangent_type(body.input_types[i])) for i in self._active}
        totals = {i: ir.Value(cotangent_type(body.input_types[i])) for i in sums}
        rows = [ir.Value(t) for t in left]
        inputs = {i: ir.Value(body.input_types[i]) for i in self._kept_inputs(step)}
        outputs = {i: ir.Value(body.output_types[i]) for i in step.kept_outputs if i >= count}
        seeds = {
            i: ir.Value(cotangent_type(body.output_types[i]))
            for i in step.cotangent_outputs
            if i >= count
        }
        entries = [
            *cotangents.values(),
            *totals.values(),
            *rows,
            *(value for i, value in inputs.items() if i < self._first_same),
            *outputs.values(),
            *seeds.values(),
            *(value for i, value in inputs.items() if i >= self._first_same),
        ]
        calls: list[ir.Call] = []
        rest = iter(rows)
        saved = _packed(step.saved_type, rest, calls)
        inputs |= {i: next(rest) for i in step.kept_inputs if i < count}
        outputs |= {i: next(rest) for i in step.kept_outputs if i < count}
        calls.append(_backward_call(step, saved, inputs, outputs, {**cotangents, **seeds}))
        found = dict(zip(step.gradient_inputs, calls[-1].results, strict=True))
        for i in self._active:
            if i not in found:  # no gradient flows back to the step before
                found[i] = ir.Value(cotangent_type(body.input_types[i]), "zeros")
                calls.append(zeros_call(found[i]))
        for i in sums:
            type_ = cotangent_type(body.input_types[i])
            total = ir.Value(type_)
            calls.append(ir.Call(self._adder(type_, type_), (totals[i], found[i]), (total,)))
            found[i] = total
        scanned = [i for i in step.gradient_inputs if count <= i < self._first_same]
        returned = [found[i] for i in (*self._active, *sums, *scanned)]
        return _composite(f"{body.name}.backward", entries, calls, returned), sums


# ---- calls ---------------------------------------------------------------------------------------


def _inputs(closure: ir.Leaf | ir.Composite) -> list[ir.Value]:
    """Returns a value for each operand of a closure, with its name."""
    names = closure.input_names or [""] * len(closure.input_types)
    return [ir.Value(t, n) for t, n in zip(closure.input_types, names, strict=True)]


def _call(name: str, control: Choose | Repeat, operands: Sequence[ir.Value]) -> ir.Call:
    """Returns a call of a new control-flow operator on ``operands``."""
    body = control.bodies[0]
    types = flat_types(body.output_types)
    if isinstance(control, Repeat):
        carried, rows = types[: control.num_carried], types[control.num_carried :]
        types = [*carried, *(stacked_type(row, control.num_steps) for row in rows)]
    leaf = control_leaf(name, control, flat_types(v.type for v in operands), types)
    return ir.Call(leaf, tuple(operands), tuple(map(ir.Value, types)))


def _backward_call(
    derivative: Derivative,
    saved: ir.Value,
    inputs: Sequence[ir.Value] | dict[int, ir.Value],
    outputs: Sequence[ir.Value] | dict[int, ir.Value],
    seeds: dict[int, ir.Value],
) -> ir.Call:
    """Returns the call of a body's backward."""
    args = (
        saved,
        *(inputs[i] for i in derivative.kept_inputs),
        *(outputs[i] for i in derivative.kept_outputs),
        *(seeds[i] for i in derivative.cotangent_outputs),
    )
    results = tuple(map(ir.Value, derivative.backward.output_types))
    return ir.Call(derivative.backward, args, results)


def _composite(
    name: str, inputs: Sequence[ir.Value], calls: Sequence[ir.Call], outputs: Sequence[ir.Value]
) -> ir.Composite:
    program = ir.Program(tuple(inputs), tuple(calls), tuple(outputs))
    return ir.Composite(name, program, tuple(v.hint for v in inputs))


def _taken_apart(value: ir.Value, calls: list[ir.Call]) -> Iterator[ir.Value]:
    """Yields the tensors in a struct; adds the calls that take it apart."""
    if isinstance(value.type, TensorType):
        yield value
        return
    calls.append(unpacked(value))
    for field in calls[-1].results:
        yield from _taken_apart(field, calls)


def _packed(type_: Type, tensors: Iterator[ir.Value], calls: list[ir.Call]) -> ir.Value:
    """Returns a struct of tensors; adds the calls that make it."""
    if isinstance(type_, TensorType):
        return next(tensors)
    calls.append(packed([_packed(field, tensors, calls) for field in type_.fields]))
    return calls[-1].results[0]


def zeros_call(value: ir.Value) -> ir.Call:
    """Returns the call that makes a value of zeros."""
    type_ = ir.tensor_type(value)
    options = {"dtype": type_.dtype, "device": type_.device, "layout": torch.strided}
    module = traced_operator(_FULL, (), type_, [list(type_.shape), 0], options)
    return ir.Call(ir.Leaf("zeros", module, (), (type_,), kernels="compiled"), (), (value,))
