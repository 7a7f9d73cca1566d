"""A program of global shapes becomes this rank's program of local shapes, once per closure.

Layouts flow through the calls from the inputs on. A leaf that is called with other layouts, or with
another plan, is another sharded leaf; blocks that are called alike stay calls of one. A sharded
leaf is split at its collectives, each of which is a leaf of its own, so that all ranks run them in
the same order, whatever a backend does with what lies between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.fx
from torch.distributed.device_mesh import DeviceMesh

from ...autodiff.traces.torch_make_fx import Decompositions
from ...reuse.errors import PlanError
from ...reuse.ir.leaf import flat_types
from ...reuse.ir.program import (
    Call,
    Closure,
    Composite,
    Leaf,
    Pack,
    Program,
    Unpack,
    Value,
    outputs_of,
)
from ...reuse.ir.types import StructType, TensorType, Type
from ...reuse.torch_names import RESHAPES, module_of
from .plan import LeafPlan, NodeLayouts, Placements
from .torch_collectives import COLLECTIVES, with_own_collectives
from .torch_sharding import LocalGraph, local_graph, local_type, replicated

_ATEN = torch.ops.aten
_ADD, _EMBEDDING = _ATEN.add.Tensor, _ATEN.embedding.default
_TRANSPOSES = (_ATEN.t.default, _ATEN.permute.default, _ATEN.transpose.int)
_PRODUCTS = (_ATEN.mm.default, _ATEN.addmm.default)


@dataclass(frozen=True)
class Layout:
    """How one tensor lies.

    Attributes:
        held: as it is stored.
        used: what it is brought to before a leaf computes with it; None takes it as it is.
        result: of a weight, how the result of its module is to lie.
    """

    held: Placements
    used: Placements | None = None
    result: Placements | None = None


Layouts = tuple[Layout, ...]
"""Of the tensors in one value."""


@dataclass(frozen=True)
class Sharded:
    """A closure of local shapes, and how its results lie, flat."""

    closure: Closure
    layouts: Layouts


@dataclass
class Sharder:
    """Makes the local closures of a program; each different one once.

    Args:
        mesh: where it runs.
        axes: the dimensions of the mesh, by the names of their process groups.
        decompositions: of a leaf's operators, where its kernels are compiled.
        plans: what is planned for calls of leaves.

    Attributes:
        whole: operators that every rank runs on whole tensors, since no rule splits them.
    """

    mesh: DeviceMesh
    axes: Mapping[str, str]
    decompositions: Callable[[Leaf], Decompositions]
    plans: Mapping[Call, LeafPlan] = field(default_factory=dict)
    whole: dict[str, None] = field(default_factory=dict)
    _made: dict[Any, Sharded] = field(default_factory=dict)

    def step(
        self, program: Program, inputs: Sequence[Layout], outputs: Sequence[Placements]
    ) -> Program:
        """Returns a step's local program.

        Args:
            program: whose values are tensors.
            inputs: how they lie.
            outputs: how the results are to lie.
        """
        everything = frozenset(range(len(program.outputs)))
        types = [
            self._local(v.type, layout) for v, layout in zip(program.inputs, inputs, strict=True)
        ]
        given = [(layout,) for layout in inputs]
        local, layouts = self._program(program, types, given, everything)
        calls, results = list(local.calls), []
        for whole, value, (layout,), target in zip(
            program.outputs, local.outputs, layouts, outputs, strict=True
        ):
            if layout.held != target:
                call = self._moved(whole.type, value, layout, target)
                calls.append(call)
                (value,) = call.results
            results.append(value)
        return replace(local, calls=tuple(calls), outputs=tuple(results))

    def _moved(self, type_: Type, value: Value, layout: Layout, target: Placements) -> Call:
        """Returns the call that brings a value from one layout to another."""
        assert isinstance(type_, TensorType)
        graph = torch.fx.Graph()
        graph.output((graph.placeholder("x"),))
        key = ("moved", type_, value.type, layout.held, target)
        if key not in self._made:
            leaf = Leaf("gathered", module_of(graph), (type_,), (type_,), ("x",), "aten")
            plan = LeafPlan(outputs=(target,))
            self._made[key] = self._leaf(leaf, plan, (value.type,), (layout,), frozenset())
        closure = self._made[key].closure
        return Call(closure, (value,), (Value(closure.output_types[0], value.hint),))

    def _program(
        self,
        program: Program,
        types: Sequence[Type],
        inputs: Sequence[Layouts],
        partial: frozenset[int],
    ) -> tuple[Program, list[Layouts]]:
        """Returns the local program, and how its results lie.

        ``partial`` are results whose sums over ranks the caller takes.
        """
        env: dict[Value, tuple[Value, Layouts]] = {}
        for value, type_, layouts in zip(program.inputs, types, inputs, strict=True):
            env[value] = (Value(type_, value.hint), layouts)
        local_inputs = tuple(env[v][0] for v in program.inputs)
        open_values = _values_that_may_be_partial(program, partial)
        calls = []
        for call in program.calls:
            args = [env[v] for v in call.args]
            may = frozenset(i for i, v in enumerate(call.results) if v in open_values)
            made = self._call(call, args, may)
            results = []
            flat = iter(made.layouts)
            for value, type_ in zip(call.results, made.closure.output_types, strict=True):
                layouts = tuple(next(flat) for _ in flat_types([type_]))
                results.append(Value(type_, value.hint))
                env[value] = (results[-1], layouts)
            operands = tuple(v for v, _ in args)
            calls.append(replace(call, closure=made.closure, args=operands, results=tuple(results)))
        outputs = tuple(env[v][0] for v in program.outputs)
        local = replace(
            program, inputs=local_inputs, calls=tuple(calls), outputs=outputs, sources=()
        )
        return local, [env[v][1] for v in program.outputs]

    def _local(self, type_: Type, layout: Layout) -> Type:
        assert isinstance(type_, TensorType)
        return local_type(type_, self.mesh, layout.held)

    def _call(
        self, call: Call, args: Sequence[tuple[Value, Layouts]], partial: frozenset[int]
    ) -> Sharded:
        closure = call.closure
        types = tuple(v.type for v, _ in args)
        layouts = tuple(layout for _, flat in args for layout in flat)
        if isinstance(closure, Pack):
            return Sharded(Pack(StructType(types)), layouts)
        if isinstance(closure, Unpack):
            (struct,) = types
            assert isinstance(struct, StructType)
            return Sharded(Unpack(struct), layouts)
        plan = self.plans.get(call, LeafPlan())
        nodes = frozenset(plan.nodes.items())
        key = (closure, types, layouts, partial, plan.inputs, plan.outputs, nodes)
        if key not in self._made:
            if isinstance(closure, Leaf):
                flat_partial = _flat_positions(closure.output_types, partial)
                self._made[key] = self._leaf(closure, plan, types, layouts, flat_partial)
            else:
                self._made[key] = self._composite(closure, args, partial)
        return self._made[key]

    def _composite(
        self,
        closure: Composite,
        args: Sequence[tuple[Value, Layouts]],
        partial: frozenset[int],
    ) -> Sharded:
        # The strides of an operand come from whoever made it, not from its layout alone.
        types = [value.type for value, _ in args]
        layouts = [flat for _, flat in args]
        body, results = self._program(closure.program, types, layouts, partial)
        return Sharded(
            Composite(closure.name, body, closure.input_names),
            tuple(layout for flat in results for layout in flat),
        )

    def _leaf(
        self,
        leaf: Leaf,
        plan: LeafPlan,
        types: tuple[Type, ...],
        layouts: Layouts,
        partial: frozenset[int],
    ) -> Sharded:
        if leaf.bodies:
            if any(layout.held != replicated(self.mesh) for layout in layouts):
                raise PlanError(
                    f"@{leaf.name} is control flow over tensors, which cannot be split over a "
                    "mesh. Leave what it takes whole on each rank."
                )
            whole = Layout(replicated(self.mesh))
            return Sharded(leaf, (whole,) * len(flat_types(leaf.output_types)))
        wanted = plan.inputs or (None,) * len(layouts)
        used = tuple(w or layout.used for w, layout in zip(wanted, layouts, strict=True))
        made = local_graph(
            leaf,
            self.mesh,
            flat_types(types),
            [layout.held for layout in layouts],
            replace(plan, inputs=used, nodes={**_pinned_results(leaf, layouts), **plan.nodes}),
            partial,
            self.decompositions(leaf),
        )
        self.whole.update(dict.fromkeys(made.whole))
        with_own_collectives(made.module, self.axes)
        results = tuple(map(Layout, made.output_layouts))
        return Sharded(split_at_collectives(leaf, made, types), results)


def _pinned_results(leaf: Leaf, layouts: Layouts) -> dict[torch.fx.Node, NodeLayouts]:
    """Returns the nodes of a leaf that are the results of modules whose result is pinned."""
    pinned = {}
    for entry, layout in zip(leaf.entries, layouts, strict=True):
        node = None if layout.result is None else _result_of_weight(entry)
        if node is not None:
            pinned[node] = NodeLayouts(outputs=(layout.result,))
    return pinned


def _result_of_weight(entry: torch.fx.Node) -> torch.fx.Node | None:
    """Returns what a Linear or an Embedding gives, by its weight; None where it is not computed.

    A backward multiplies by the weight as it lies, and a forward by its transpose.
    """
    for user in entry.users:
        if user.target is _EMBEDDING and user.args[0] is entry:
            return user
        if user.target not in _TRANSPOSES:
            continue
        for product in user.users:
            if product.target in _PRODUCTS and product.args[-1] is user:
                shaped = (n for n in product.users if n.target in RESHAPES)
                return next(shaped, product)
    return None


def _flat_positions(types: Sequence[Type], positions: Iterable[int]) -> frozenset[int]:
    """Returns the positions of values among the tensors inside all of them."""
    found: set[int] = set()
    start = 0
    for index, type_ in enumerate(types):
        number = len(flat_types([type_]))
        if index in positions:
            found.update(range(start, start + number))
        start += number
    return frozenset(found)


def _values_that_may_be_partial(program: Program, outputs: frozenset[int]) -> set[Value]:
    """Returns the values that lead, through sums alone, to results that may be parts of a sum."""
    open_values = {program.outputs[i] for i in outputs}
    closed = {v for i, v in enumerate(program.outputs) if i not in outputs}
    for call in reversed(program.calls):
        adds = _only_adds(call.closure)
        if adds and open_values.issuperset(call.results):
            open_values.update(call.args)
        else:
            closed.update(call.args)
    return open_values - closed


def _only_adds(closure: Closure) -> bool:
    if isinstance(closure, Composite):
        return all(_only_adds(call.closure) for call in closure.program.calls)
    return isinstance(closure, Leaf) and [n.target for n in closure.nodes] == [_ADD]


# ---- a leaf, split at its collectives ----------------------------------------------------------


def split_at_collectives(leaf: Leaf, made: LocalGraph, types: tuple[Type, ...]) -> Closure:
    """Returns a local graph as a closure: one leaf, or a program with a leaf per collective."""
    module = made.module
    _without_idle_views(module.graph)
    module.graph.eliminate_dead_code()
    nodes = [n for n in module.graph.nodes if n.op not in ("placeholder", "output")]
    results = outputs_of(module)
    flat_outputs = [TensorType.of(n.meta["val"]) for n in results]
    output_types = _like(leaf.output_types, flat_outputs)
    if not any(n.target in COLLECTIVES for n in nodes):
        module.recompile()
        return replace(leaf, module=module, input_types=types, output_types=output_types)
    return _Split(leaf, types, output_types).closure(module, nodes)


def _without_idle_views(graph: torch.fx.Graph) -> None:
    """Takes out views of the shape that is there, which DTensor leaves, and unread parts."""
    for node in list(graph.nodes):
        if node.target is not _ATEN.view.default:
            continue
        before, after = node.args[0].meta["val"], node.meta["val"]
        if before.shape == after.shape and before.stride() == after.stride():
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _like(types: Sequence[Type], flat: Sequence[TensorType]) -> tuple[Type, ...]:
    """Returns tensor types in the structure of other types."""
    parts = iter(flat)

    def one(type_: Type) -> Type:
        if isinstance(type_, StructType):
            return StructType(tuple(map(one, type_.fields)))
        return next(parts)

    return tuple(map(one, types))


class _Split:
    """Builds the program of a local graph with collectives."""

    def __init__(
        self, leaf: Leaf, input_types: tuple[Type, ...], output_types: tuple[Type, ...]
    ) -> None:
        self._leaf, self._output_types = leaf, output_types
        names = leaf.input_names or ("",) * len(input_types)
        self._inputs = tuple(Value(t, n) for t, n in zip(input_types, names, strict=True))
        self._calls: list[Call] = []
        self._env: dict[torch.fx.Node, Value] = {}

    def closure(self, module: torch.fx.GraphModule, nodes: Sequence[torch.fx.Node]) -> Composite:
        flat = [tensor for value in self._inputs for tensor in self._unpacked(value)]
        entries = [n for n in module.graph.nodes if n.op == "placeholder"]
        self._env.update(zip(entries, flat, strict=True))
        results = outputs_of(module)
        part: list[torch.fx.Node] = []
        for node in nodes:
            # Alone in its leaf, a collective runs where it stands: a backend would reorder it.
            if node.target in COLLECTIVES:
                self._add(part, results)
                self._add([node], results)
                part = []
            else:
                part.append(node)
        self._add(part, results)
        tensors = iter([self._env[n] for n in results])
        outputs = tuple(self._packed(t, tensors) for t in self._output_types)
        program = Program(self._inputs, tuple(self._calls), outputs)
        return Composite(self._leaf.name, program, self._leaf.input_names)

    def _unpacked(self, value: Value) -> list[Value]:
        if not isinstance(value.type, StructType):
            return [value]
        fields = tuple(Value(t) for t in value.type.fields)
        self._calls.append(Call(Unpack(value.type), (value,), fields))
        return [tensor for one in fields for tensor in self._unpacked(one)]

    def _packed(self, type_: Type, tensors: Any) -> Value:
        if not isinstance(type_, StructType):
            value: Value = next(tensors)
            return value
        fields = tuple(self._packed(t, tensors) for t in type_.fields)
        packed = Value(type_)
        self._calls.append(Call(Pack(type_), fields, (packed,)))
        return packed

    def _add(self, nodes: Sequence[torch.fx.Node], results: Sequence[Any]) -> None:
        """Adds the call of a leaf of some nodes."""
        own = set(nodes)
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
        is_collective = nodes[0].target in COLLECTIVES
        leaf = Leaf(
            nodes[0].name if is_collective else self._leaf.name,
            module_of(graph),
            tuple(self._env[n].type for n in read),
            tuple(TensorType.of(n.meta["val"]) for n in made),
            (),
            "aten",
            "eager" if is_collective else self._leaf.kernels,
        )
        values = tuple(Value(t) for t in leaf.output_types)
        self._calls.append(Call(leaf, tuple(self._env[n] for n in read), values))
        self._env.update(zip(made, values, strict=True))
