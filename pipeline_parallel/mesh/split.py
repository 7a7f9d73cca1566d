"""A local graph as a closure: a leaf for each collective and each wait, and for what lies between.

Where collectives can run beside the calls before and after, there are up to three closures:
*ahead* starts what needs parameters alone, *body* is the rest, *behind* waits for what is only
handed out. A :class:`Schedule` moves them apart.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Literal, TypeAlias

import torch
import torch.fx

from ...reuse.ir.program import (
    Call,
    Closure,
    Composite,
    Leaf,
    Pack,
    Program,
    Unpack,
    Value,
    input_nodes,
    outputs_of,
)
from ...reuse.ir.rewrite import grouped
from ...reuse.ir.types import StructType, TensorType, Type
from ...reuse.torch_names import module_of
from .overlap import MOVES_ONLY, ordered
from .torch_collectives import COLLECTIVES, WAIT
from .torch_sharding import LocalGraph

_VIEW = torch.ops.aten.view.default
Part: TypeAlias = Literal["ahead", "body", "behind"]


def split_at_collectives(
    leaf: Leaf, made: LocalGraph, parameters: Collection[int]
) -> tuple[Closure, tuple[Part, ...]]:
    """Returns a local graph as a closure of tensors, and which parts its calls are.

    Args:
        leaf: of global shapes.
        made: of local shapes.
        parameters: the inputs that are there before the step begins.
    """
    module = made.module
    _without_idle_nodes(module.graph)
    module.graph.eliminate_dead_code()
    if any(n.target in COLLECTIVES for n in module.graph.nodes):
        return _Split(leaf, module).closure(made.input_types, parameters)
    module.recompile()
    types = tuple(TensorType.of(n.meta["val"]) for n in outputs_of(module))
    own = replace(leaf, module=module, input_types=made.input_types, output_types=types)
    return replace(own, input_names=()), ()


def _without_idle_nodes(graph: torch.fx.Graph) -> None:
    """Takes out views of the shape that is there, which DTensor leaves, and what has no data."""
    for node in reversed(graph.nodes):
        if node.op == "call_function" and not node.users and _is_without_data(node):
            graph.erase_node(node)
        elif node.target is _VIEW:
            before, made = node.args[0].meta["val"], node.meta["val"]
            if before.shape == made.shape and before.stride() == made.stride():
                node.replace_all_uses_with(node.args[0])
                graph.erase_node(node)


def _is_without_data(node: torch.fx.Node) -> bool:
    made = node.meta.get("val")
    values = made if isinstance(made, (tuple, list)) else [made]
    on_meta = "meta" in {t.device.type for t in values if isinstance(t, torch.Tensor)}
    return on_meta or node.target is operator.getitem


class _Split:
    """Builds the program of a local graph with collectives."""

    def __init__(self, leaf: Leaf, module: torch.fx.GraphModule) -> None:
        self._leaf, self._module = leaf, module
        self._calls: list[Call] = []
        self._env: dict[torch.fx.Node, Value] = {}

    def closure(
        self, types: Sequence[TensorType], parameters: Collection[int]
    ) -> tuple[Composite, tuple[Part, ...]]:
        """Returns a program of up to three calls, and which parts they are."""
        entries, inputs = input_nodes(self._module), tuple(map(Value, types))
        order = ordered(self._module, {entries[i] for i in parameters})
        self._env.update(zip(entries, inputs, strict=True))
        parts: dict[Part, list[Call]] = {
            "ahead": self._calls_of(order.ahead),
            "body": self._calls_of(order.body),
            "behind": self._calls_of(order.behind),
        }
        parts = {kind: calls for kind, calls in parts.items() if calls}
        outputs = tuple(self._env[n] for n in outputs_of(self._module))
        later, made = set(outputs), list[Call]()
        for calls in reversed(parts.values()):
            made.append(in_closure(self._leaf.name, calls, later))
            later.update(made[-1].args)
        program = Program(inputs, tuple(reversed(made)), outputs)
        return Composite(self._leaf.name, program), tuple(parts)

    def _calls_of(self, nodes: Sequence[torch.fx.Node]) -> list[Call]:
        part: list[torch.fx.Node] = []
        self._calls = []
        for node in nodes:
            # Alone in its leaf, a collective runs where it stands: a backend would reorder it.
            if node.target in COLLECTIVES or node.target is WAIT:
                self._add(part)
                self._add([node])
                part = []
            else:
                part.append(node)
        self._add(part)
        return self._calls

    def _add(self, nodes: Sequence[torch.fx.Node]) -> None:
        """Adds the call of a leaf of some nodes."""
        own, results = set(nodes), outputs_of(self._module)
        made = [n for n in nodes if n in results or any(user not in own for user in n.users)]
        made = [n for n in made if isinstance(n.meta["val"], torch.Tensor)]
        if not made:  # nobody reads what lies between two collectives
            return
        read = dict.fromkeys(n for node in nodes for n in node.all_input_nodes if n not in own)
        graph = torch.fx.Graph()
        env = {}
        for index, node in enumerate(read):
            env[node] = graph.placeholder(f"a{index}")
            env[node].meta["val"] = node.meta["val"]
        for node in nodes:
            env[node] = graph.node_copy(node, env.__getitem__)
        graph.output(tuple(env[n] for n in made))
        is_collective = nodes[0].target in COLLECTIVES or nodes[0].target is WAIT
        is_moved = all(n.target in MOVES_ONLY for n in nodes)
        leaf = Leaf(
            nodes[0].name if is_collective else self._leaf.name,
            module_of(graph),
            tuple(self._env[n].type for n in read),
            tuple(TensorType.of(n.meta["val"]) for n in made),
            (),
            "aten",
            "eager" if is_collective or is_moved else self._leaf.kernels,
        )
        values = tuple(Value(t) for t in leaf.output_types)
        self._calls.append(Call(leaf, tuple(self._env[n] for n in read), values))
        self._env.update(zip(made, values, strict=True))


def in_closure(name: str, calls: Sequence[Call], later: Collection[Value], path: str = "") -> Call:
    """Returns the call of a closure that makes calls; it gives those of its values in ``later``."""
    made = dict.fromkeys(v for call in calls for v in call.results)
    taken = tuple(dict.fromkeys(v for c in calls for v in c.args if v not in made))
    given = tuple(v for v in made if v in later)
    return Call(Composite(name, Program(taken, tuple(calls), given)), taken, given, path)


# ---- calls moved apart -------------------------------------------------------------------------


def inlined(program: Program, args: Sequence[Value], path: str) -> tuple[list[Call], list[Value]]:
    """Returns the calls of a program that is called with ``args``, and its results there."""
    env, calls = dict(zip(program.inputs, args, strict=True)), []
    for call in program.calls:
        results = tuple(Value(v.type, v.hint) for v in call.results)
        env.update(zip(call.results, results, strict=True))
        where = ".".join(p for p in (path, call.path) if p)
        taken = tuple(env[v] for v in call.args)
        calls.append(replace(call, args=taken, results=results, path=where))
    return calls, [env[v] for v in program.outputs]


def opened(program: Program) -> tuple[Call, list[Call], Sequence[Value]]:
    """Returns the last call with a path, the calls from there on as one list, and all results.

    What follows that call, a backward, comes among the calls in it as soon as it can.
    """
    opening = [isinstance(c.closure, Composite) and bool(c.path) for c in program.calls]
    first = max((i for i, opens in enumerate(opening) if opens), default=0)
    env: dict[Value, Value] = {}
    made_at: dict[Value, int] = {}
    later: dict[int, list[Call]] = defaultdict(list)
    inner: list[Call] = []
    for call in program.calls[first:]:
        calls, results = [call], list(call.results)
        if isinstance(call.closure, Composite):
            args = [env.get(v, v) for v in call.args]
            calls, results = inlined(call.closure.program, args, "")
        env.update(zip(call.results, results, strict=True))
        if not inner:
            inner = calls
            made_at = {v: i for i, one in enumerate(inner) for v in one.results}
            continue
        for one in calls:
            one = replace(one, args=tuple(env.get(v, v) for v in one.args))
            at = max((made_at.get(v, -1) for v in one.args), default=-1)
            made_at.update(dict.fromkeys(one.results, at))
            later[at].append(one)
    calls = [*later[-1], *(one for i, call in enumerate(inner) for one in (call, *later[i]))]
    return program.calls[first], calls, [env.get(v, v) for v in program.outputs]


def with_structs(program: Program, given: Sequence[Type], made: Sequence[Type]) -> Program:
    """Returns a program of tensors as one that takes and gives structs of them, as types say."""
    before, after = list[Call](), list[Call]()
    inputs, outputs = list[Value](), list[Value]()
    for type_, own in zip(given, grouped(program.inputs, given), strict=True):
        inputs.append(Value(type_) if isinstance(type_, StructType) else own[0])
        if isinstance(type_, StructType):
            before.append(Call(Unpack(type_), (inputs[-1],), tuple(own)))
    for type_, own in zip(made, grouped(program.outputs, made), strict=True):
        struct = StructType(tuple(value.type for value in own))
        outputs.append(Value(struct) if isinstance(type_, StructType) else own[0])
        if isinstance(type_, StructType):
            after.append(Call(Pack(struct), tuple(own), (outputs[-1],)))
    calls = (*before, *program.calls, *after)
    return replace(program, inputs=tuple(inputs), calls=calls, outputs=tuple(outputs))


class Schedule:
    """Puts calls in order: starts one computation ahead, waits late.

    One computation ahead is what hides a gather: more would hold more parameters at once. A wait
    that keeps an operand in memory comes after the next computation, any other where its result is
    read.

    Args:
        inputs: of the program.
    """

    def __init__(self, inputs: Iterable[Value]) -> None:
        self.calls: list[Call] = []
        self._inputs = frozenset(inputs)
        self._last = 0
        self._behind: list[Call] = []

    def add(self, call: Call, part: Part = "body") -> None:
        """Adds a call."""
        if part == "behind":
            self._behind.append(call)
        elif part == "ahead" and self._inputs.issuperset(call.args):
            self.calls.insert(self._last, call)
        else:
            self._wait_for([b for b in self._behind if not set(b.results).isdisjoint(call.args)])
            computes = _computes(call.closure)
            self._last = len(self.calls) if computes else self._last
            self.calls.append(call)
            self._wait_for([b for b in self._behind if computes and _holds(b.closure)])

    def finished(self) -> tuple[Call, ...]:
        """Returns all calls."""
        self._wait_for(self._behind)
        return tuple(self.calls)

    def _wait_for(self, calls: Sequence[Call]) -> None:
        self.calls += calls
        self._behind = [b for b in self._behind if b not in calls]


def _computes(closure: Closure) -> bool:
    if isinstance(closure, Composite):
        return any(_computes(call.closure) for call in closure.program.calls)
    idle = {*MOVES_ONLY, *COLLECTIVES, WAIT}
    return isinstance(closure, Leaf) and not all(n.target in idle for n in closure.nodes)


def _holds(closure: Closure) -> bool:
    """Whether a wait in a closure keeps an operand in memory."""
    if isinstance(closure, Composite):
        return any(_holds(call.closure) for call in closure.program.calls)
    return isinstance(closure, Leaf) and any(
        n.target is WAIT and len(n.args) > 1 for n in closure.nodes
    )
