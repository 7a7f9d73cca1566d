"""Data flow in programs: where random draws, shared memory, values and gradients come from.

Each different closure is analysed once.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch.fx

from ..reuse.ir import program as ir
from ..reuse.ir.leaf import flat_types, is_active
from ..reuse.ir.operators import is_draw, is_mutable, is_view, mutated_args
from ..reuse.ir.rewrite import grouped
from ..reuse.once import once
from ..reuse.torch_names import operator_schema

Inputs = frozenset[int]
Flows = list[Inputs]  # for each output, the positions of the inputs that flow into it
T = TypeVar("T")
Through = Callable[[torch.fx.Node], Iterable[torch.fx.Node]]
"""Returns the operands of an operator that flow into its result."""

_STATISTICS = ("running_mean", "running_var")
_TRAINING = ("training", "train")


def saved_inputs(forward: ir.Program) -> tuple[int, ...]:
    """Returns the inputs that share memory with the last output (the saved struct).

    Autograd raises an error in a backward whose saved tensors were changed since the forward. For
    our saved struct it can do so only if it knows which inputs are inside.
    """
    return tuple(sorted(_flows(forward, partial(_in_graph, _shares_with))[-1]))


def _shares_with(node: torch.fx.Node) -> Iterable[torch.fx.Node]:
    is_shared = is_view(node) or mutated_args(node) or node.target is operator.getitem
    return node.all_input_nodes if is_shared else ()


def view_roots(program: ir.Program) -> list[object]:
    """Returns for each output a key of what it is a view of; equal for views of one value.

    The key of an input is its position. An output that is no view has a key of its own. Only ATen's
    own views count: a ``torch.autograd.Function`` may return a view with another gradient.
    """
    return _folded(
        program, _program_roots, _leaf_roots, lambda types: [object() for _ in types.output_types]
    )


def _folded(
    program: ir.Program,
    of_program: Callable[[ir.Program, Mapping[ir.Closure, list[T]]], list[T]],
    of_leaf: Callable[[ir.Leaf], list[T]],
    of_struct: Callable[[ir.Pack | ir.Unpack], list[T]],
) -> list[T]:
    """Returns a property of each output of a program, computed once per different closure."""
    found: dict[ir.Closure, list[T]] = {}
    for closure in ir.walk_closures(program):
        if isinstance(closure, ir.Leaf):
            found[closure] = of_leaf(closure)
        elif isinstance(closure, ir.Composite):
            found[closure] = of_program(closure.program, found)
        else:
            found[closure] = of_struct(closure)
    return of_program(program, found)


def _program_roots(
    program: ir.Program, closures: Mapping[ir.Closure, list[object]]
) -> list[object]:
    roots: dict[ir.Value, object] = {value: i for i, value in enumerate(program.inputs)}
    for index, call in enumerate(program.calls):
        for result, root in zip(call.results, closures[call.closure], strict=True):
            if isinstance(root, int):  # a view of an operand
                roots[result] = roots[call.args[root]]
            else:
                roots[result] = (program, index, root)
    return [roots[value] for value in program.outputs]


def _leaf_roots(leaf: ir.Leaf) -> list[object]:
    entries = grouped(leaf.entries, leaf.input_types)
    roots: dict[torch.fx.Node, object] = {n: i for i, group in enumerate(entries) for n in group}
    for node in leaf.nodes:
        is_passed = is_view(node) and getattr(node.target, "namespace", "") == "aten"
        is_passed = is_passed or node.target is operator.getitem
        roots[node] = roots[node.all_input_nodes[0]] if is_passed else node
    flat = ir.outputs_of(leaf.module)
    return [roots[n] if isinstance(n, torch.fx.Node) else object() for n in flat]


Moment = tuple[int, ...]
"""When a value is computed: the position of its call, and of the call or operator within that."""


def output_order(program: ir.Program) -> list[int]:
    """Returns the outputs in the order of computation: none depends on a later one."""

    def begins(made: ir.Pack | ir.Unpack) -> list[Moment]:
        return [()] * len(made.output_types)

    moments = _folded(program, _moments, _leaf_moments, begins)
    return sorted(range(len(moments)), key=moments.__getitem__)


def _leaf_moments(leaf: ir.Leaf) -> list[Moment]:
    places = {node: i for i, node in enumerate(leaf.nodes)}
    groups = grouped(ir.outputs_of(leaf.module), leaf.output_types)
    return [(max((places.get(n, -1) for n in group), default=-1),) for group in groups]


def _moments(program: ir.Program, closures: Mapping[ir.Closure, list[Moment]]) -> list[Moment]:
    moments: dict[ir.Value, Moment] = {value: () for value in program.inputs}
    for index, call in enumerate(program.calls):
        for result, inner in zip(call.results, closures[call.closure], strict=True):
            moments[result] = (index, *inner)
    return [moments[value] for value in program.outputs]


def used_inputs(program: ir.Program) -> Inputs:
    """Returns the positions of the inputs that some output is computed from.

    These are all inputs if an operator changes a value in place, which aliases may see. An operator
    uses all of its operands, except batch norm in training mode: it only updates the running
    statistics, and neither result nor gradients depend on their old values.
    """
    if any(is_mutable(node.target) for _, node in ir.leaf_nodes(program)):
        return frozenset(range(len(program.inputs)))
    return frozenset().union(*_flows(program, partial(_in_graph, _computed_from)))


def _computed_from(node: torch.fx.Node) -> Iterable[torch.fx.Node]:
    schema = operator_schema(node)
    names = [argument.name for argument in schema.arguments] if schema is not None else []
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    # In eval mode a norm computes with its running statistics: then they count.
    if not any(given.get(name) is True for name in _TRAINING):
        return node.all_input_nodes
    unused = [given.get(name) for name in _STATISTICS]
    others = [value for name, value in given.items() if name not in _STATISTICS]
    return [n for n in node.all_input_nodes if n not in unused or n in others]


def trained_inputs(program: ir.Program, *, but_zeros: bool = False) -> Flows:
    """Returns for each output the inputs that its gradient may flow back to.

    ``but_zeros`` leaves out gradients that are zero because something is overwritten.

    Where no path leads to a parameter, autograd leaves its ``.grad`` None and an optimizer skips
    it; with a gradient of zeros it would decay. So a backward has to tell zeros from no gradient.
    """
    return _flows(program, partial(_carries_back, but_zeros=but_zeros))


def _carries_back(leaf: ir.Leaf, *, but_zeros: bool) -> Flows:
    number = len(flat_types(leaf.input_types))
    # One input at a time: with several active, nothing tells which one an output depends on.
    flags = [
        is_active(leaf, [i == index for i in range(number)], but_zeros=but_zeros)
        for index in range(number)
    ]
    outputs = range(len(flat_types(leaf.output_types)))
    return [frozenset(i for i, carries in enumerate(flags) if carries[o]) for o in outputs]


def _flows(program: ir.Program, of_leaf: Callable[[ir.Leaf], Flows]) -> Flows:
    # A struct is opaque, so every operand counts as flowing into every result: the safe answer.
    def of_struct(made: ir.Pack | ir.Unpack) -> Flows:
        return [frozenset(range(len(made.input_types)))] * len(made.output_types)

    return _folded(program, _of_program, of_leaf, of_struct)


def _of_program(program: ir.Program, closures: Mapping[ir.Closure, Flows]) -> Flows:
    values: dict[ir.Value, Inputs] = {v: frozenset([i]) for i, v in enumerate(program.inputs)}
    for call in program.calls:
        for result, operands in zip(call.results, closures[call.closure], strict=True):
            values[result] = _union(values[call.args[i]] for i in operands)
    return [values[value] for value in program.outputs]


def _in_graph(through: Through, leaf: ir.Leaf) -> Flows:
    entries = grouped(leaf.entries, leaf.input_types)
    nodes = {n: frozenset([i]) for i, group in enumerate(entries) for n in group}
    for node in leaf.nodes:
        nodes[node] = _union(nodes[n] for n in through(node))
    results = grouped(ir.outputs_of(leaf.module), leaf.output_types)
    return [_union(nodes[n] for n in group if isinstance(n, torch.fx.Node)) for group in results]


def _union(parts: Iterable[Inputs]) -> Inputs:
    return frozenset().union(*parts)


def needed_calls(calls: Sequence[ir.Call], outputs: Iterable[ir.Value]) -> list[ir.Call]:
    """Returns the calls that outputs are computed from, in their order."""
    needed, kept = set(outputs), []
    for call in reversed(calls):
        if not needed.isdisjoint(call.results):
            needed.update(call.args)
            kept.append(call)
    return kept[::-1]


def in_closure(
    name: str, calls: Sequence[ir.Call], later: Collection[ir.Value], path: str = ""
) -> ir.Call:
    """Returns the call of a closure that makes calls; its results are the values in ``later``."""
    made = dict.fromkeys(v for call in calls for v in call.results)
    taken = tuple(dict.fromkeys(v for c in calls for v in c.args if v not in made))
    given = tuple(v for v in made if v in later)
    return ir.Call(ir.Composite(name, ir.Program(taken, tuple(calls), given)), taken, given, path)


def with_operands(call: ir.Call, new: Mapping[ir.Value, ir.Value]) -> ir.Call:
    """Returns a call with some of its operands replaced."""
    return replace(call, args=tuple(new.get(value, value) for value in call.args))


def inlined(
    program: ir.Program, args: Sequence[ir.Value], path: str = ""
) -> tuple[list[ir.Call], list[ir.Value]]:
    """Inlines a call of a program with ``args``; returns the calls and the results."""
    env, calls = dict(zip(program.inputs, args, strict=True)), []
    for call in program.calls:
        results = tuple(ir.Value(v.type, v.hint) for v in call.results)
        env.update(zip(call.results, results, strict=True))
        where = ".".join(p for p in (path, call.path) if p)
        taken = tuple(env[v] for v in call.args)
        calls.append(replace(call, args=taken, results=results, path=where))
    return calls, [env[v] for v in program.outputs]


class Draws:
    """Counts the random operators of closures by device, once per different closure."""

    def of(self, calls: Iterable[ir.Call]) -> Counter[str]:
        """Returns the random operators that some calls run, by device."""
        total: Counter[str] = Counter()
        for call in calls:
            total.update(self.of_closure(call.closure))
        return total

    @once
    def of_closure(self, closure: ir.Closure) -> Counter[str]:
        """Returns the random operators that one call of a closure runs, by device."""
        nodes = closure.nodes if isinstance(closure, ir.Leaf) else ()
        inside = closure.program.calls if isinstance(closure, ir.Composite) else ()
        return Counter(_device_of(node) for node in nodes if is_draw(node)) + self.of(inside)


def _device_of(node: torch.fx.Node) -> str:
    value = node.meta["val"]
    first = next(iter(value)) if isinstance(value, (tuple, list)) else value
    return str(first.device.type)
