"""Seeded random programs: nested, shared, with fan-out, repeated and passed-through values.

A leaf is a small ATen graph on float64 values; a composite is a program of calls on closures from
one pool, so closures are shared within and between bodies. With ``structs``, values are packed,
passed into closures and returned from them, and taken apart again.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.fx

from lazyinline.backend.link.placement import Place
from lazyinline.backend.run.planned import PlannedProgram
from lazyinline.reuse.ir.leaf import flat_types
from lazyinline.reuse.ir.program import Call, Closure, Composite, Leaf, Pack, Program, Unpack, Value
from lazyinline.reuse.ir.types import StructType, TensorType, Type, contiguous_stride

aten = torch.ops.aten
CPU = torch.device("cpu")


def tensor_type(*shape: int, stride: tuple[int, ...] | None = None) -> TensorType:
    """Returns a float64 type on the CPU, contiguous unless strides are given."""
    return TensorType(torch.float64, shape, stride or contiguous_stride(shape), CPU)


MATRIX, VECTOR, SCALAR = tensor_type(3, 4), tensor_type(4), tensor_type()
BASE_TYPES = (MATRIX, MATRIX, VECTOR, SCALAR)


def without_numbers(type_: TensorType) -> torch.Tensor:
    return torch.empty_strided(type_.shape, type_.stride, dtype=type_.dtype, device="meta")


class LeafBuilder:
    """Builds a leaf operator by operator; types follow from running them on the meta device."""

    def __init__(self, input_types: Sequence[Type]) -> None:
        self.graph = torch.fx.Graph()
        self.input_types = tuple(input_types)
        self.nodes = [self._placeholder(i, t) for i, t in enumerate(flat_types(input_types))]

    def _placeholder(self, index: int, type_: TensorType) -> torch.fx.Node:
        node = self.graph.placeholder(f"a{index}")
        node.meta["val"] = without_numbers(type_)
        return node

    def add(self, target: Any, *args: Any, **options: Any) -> torch.fx.Node:
        """Adds one operator."""
        node = self.graph.call_function(target, args, options)
        values = [a.meta["val"] if isinstance(a, torch.fx.Node) else a for a in args]
        node.meta["val"] = target(*values, **options).to("meta")
        self.nodes.append(node)
        return node

    def leaf(self, outputs: Sequence[torch.fx.Node], name: str = "leaf", group: int = 0) -> Leaf:
        """Returns the leaf; its last ``group`` outputs are one struct result."""
        self.graph.output(tuple(outputs))
        module = torch.fx.GraphModule(torch.nn.Module(), self.graph)
        types: list[Type] = [type_of(node) for node in outputs]
        if group:
            types[-group:] = [StructType(tuple(types[-group:]))]
        return Leaf(name, module, self.input_types, tuple(types), level="aten", kernels="eager")


def type_of(node: torch.fx.Node) -> TensorType:
    """Returns the CPU type of a node."""
    value = node.meta["val"]
    return tensor_type(*value.shape, stride=tuple(value.stride()))


def unary_leaf(target: Any, type_: TensorType = MATRIX, name: str = "leaf") -> Leaf:
    """Returns the leaf of one operator on one value."""
    builder = LeafBuilder([type_])
    return builder.leaf([builder.add(target, builder.nodes[0])], name)


def binary_leaf(target: Any, type_: TensorType = MATRIX, name: str = "leaf") -> Leaf:
    """Returns the leaf of one operator on two values."""
    builder = LeafBuilder([type_, type_])
    return builder.leaf([builder.add(target, *builder.nodes)], name)


def random_leaf(rng: random.Random, input_types: Sequence[Type], *, group: bool = False) -> Leaf:
    """Returns a leaf with one to four operators, which may return inputs, views and repeats."""
    builder = LeafBuilder(input_types)
    for _ in range(rng.randint(1, 4)):
        _random_operator(rng, builder)
    outputs = [builder.nodes[-1], *rng.choices(builder.nodes, k=rng.randint(0, 2))]
    rng.shuffle(outputs)
    return builder.leaf(outputs, group=rng.randint(1, len(outputs)) if group else 0)


def _random_operator(rng: random.Random, builder: LeafBuilder) -> None:
    """Adds one operator that fits; never one that changes an input in place."""
    if not builder.nodes:
        builder.add(aten.full.default, [3, 4], rng.random(), dtype=torch.float64)
        return
    x, y = rng.choice(builder.nodes), rng.choice(builder.nodes)
    rank, shape = x.meta["val"].dim(), tuple(x.meta["val"].shape)
    kind = rng.randrange(12)
    if kind == 0:
        builder.add(rng.choice([aten.sin.default, aten.tanh.default, aten.neg.default]), x)
    elif kind == 1:
        builder.add(aten.mul.Tensor, x, rng.choice([0.5, -1.25, 2]))
    elif kind == 2 and rank:
        builder.add(aten.sum.dim_IntList, x, [rng.randrange(rank)])
    elif kind == 3 and rank == 2:
        builder.add(aten.t.default, x)  # a view with other strides
    elif kind in (4, 5) and rank == 1:
        builder.add(aten.expand.default, x, [3, *shape])  # a view with stride 0
    elif kind == 6 and rank:
        builder.add(aten.select.int, x, 0, rng.randrange(shape[0]))  # a view with an offset
    elif kind == 7 and rank == 2:
        builder.add(aten.mm.default, builder.add(aten.t.default, x), x)
    elif kind == 8:
        copy = builder.add(aten.clone.default, x)
        builder.add(rng.choice([aten.tanh_.default, aten.sin_.default]), copy)
    elif kind >= 9 and rank and _broadcasts_to(y, x, skip=1):
        fresh = builder.add(aten.zeros.default, list(shape), dtype=torch.float64)
        view = builder.add(aten.select.int, fresh, 0, rng.randrange(shape[0]))
        builder.add(aten.copy_.default, view, y)  # changes `fresh` through a view
        builder.nodes.append(fresh)
    elif _broadcasts_to(y, x):
        builder.add(rng.choice([aten.add.Tensor, aten.mul.Tensor, aten.sub.Tensor]), x, y)
    else:
        builder.add(aten.cos.default, x)


def _broadcasts_to(small: torch.fx.Node, large: torch.fx.Node, skip: int = 0) -> bool:
    a, b = tuple(small.meta["val"].shape), tuple(large.meta["val"].shape[skip:])
    return not a or a == b[-len(a) :]


class ProgramGenerator:
    """Makes programs over one pool of closures."""

    def __init__(self, rng: random.Random, *, structs: bool) -> None:
        self._rng = rng
        self._structs = structs
        self._pool: list[Closure] = []

    def program(self, depth: int = 3) -> Program:
        """Returns a program nested at most ``depth`` deep below its own calls."""
        rng = self._rng
        body = _Body(rng)
        for _ in range(rng.randint(1, 3)):
            body.new_input(rng.choice(BASE_TYPES))
        for _ in range(rng.randint(2, 5)):
            if self._structs and rng.random() < 0.4:
                body.pack_or_unpack()
            else:
                body.call(self._closure(body, depth), f"m{len(body.calls)}")
        last = body.calls[-1].results[-1]
        outputs = [last, *rng.choices(body.values, k=rng.randint(0, 3))]
        rng.shuffle(outputs)
        return Program(tuple(body.inputs), tuple(body.calls), tuple(outputs))

    def _closure(self, body: "_Body", depth: int) -> Closure:
        rng = self._rng
        known = [c for c in self._pool if closure_depth(c) <= depth]
        if known and rng.random() < 0.5:
            return rng.choice(known)
        if depth and rng.random() < 0.6:
            closure: Closure = Composite(f"block{len(self._pool)}", self.program(depth - 1))
        else:
            operands = rng.choices(body.values, k=rng.randint(0, 3))
            grouped = self._structs and rng.random() < 0.3
            types = [v.type for v in operands]
            closure = random_leaf(rng, types, group=grouped)
        self._pool.append(closure)
        return closure


class _Body:
    """One program in the making."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.inputs: list[Value] = []
        self.calls: list[Call] = []
        self.values: list[Value] = []

    def new_input(self, type_: Type) -> Value:
        value = Value(type_, f"x{len(self.inputs)}")
        self.inputs.append(value)
        self.values.append(value)
        return value

    def call(self, closure: Closure, path: str = "") -> None:
        """Calls a closure on values of the right types; where there is none, on a new input."""
        args = [self._operand(t) for t in closure.input_types]
        results = tuple(Value(t) for t in closure.output_types)
        self.calls.append(Call(closure, tuple(args), results, path))
        self.values.extend(results)

    def _operand(self, type_: Type) -> Value:
        fitting = [v for v in self.values if v.type == type_]
        return self._rng.choice(fitting) if fitting else self.new_input(type_)

    def pack_or_unpack(self) -> None:
        structs = [v for v in self.values if isinstance(v.type, StructType)]
        if structs and self._rng.random() < 0.5:
            struct = self._rng.choice(structs).type
            assert isinstance(struct, StructType)
            self.call(Unpack(struct))
        else:
            fields = self._rng.choices(self.values, k=self._rng.randint(1, 3))
            self.call(Pack(StructType(tuple(v.type for v in fields))))


def closure_depth(closure: Closure) -> int:
    """Levels of composites below a call on this closure: 0 for a leaf."""
    if not isinstance(closure, Composite):
        return 0
    return 1 + max((closure_depth(c.closure) for c in closure.program.calls), default=0)


def random_program(seed: int, *, structs: bool = True) -> Program:
    """Returns the random program of a seed."""
    return ProgramGenerator(random.Random(seed), structs=structs).program()


def assert_same(ours: Sequence[Any], theirs: Sequence[Any], what: str) -> None:
    """Asserts that two runs gave the same bits."""
    assert len(ours) == len(theirs), what
    for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert torch.equal(a, b), f"{what}: output {index} differs"


def random_arguments(program: Program, seed: int) -> list[Any]:
    """Returns values for a program's inputs; nested tuples for structs."""
    generator = torch.Generator().manual_seed(seed)
    return [random_value(v.type, generator) for v in program.inputs]


def random_value(type_: Type, generator: torch.Generator) -> Any:
    """Returns a random value of a type, with its strides."""
    if isinstance(type_, StructType):
        return tuple(random_value(field, generator) for field in type_.fields)
    reach = 1 + sum((d - 1) * s for d, s in zip(type_.shape, type_.stride, strict=True))
    memory = torch.randn(reach, dtype=type_.dtype, generator=generator)
    return memory.as_strided(type_.shape, type_.stride)


# ---- the rest of inlining early ------------------------------------------------------------------


def remove_unused_packs(program: Program) -> Program:
    """Drops pack calls whose struct value nobody uses."""
    used = set(program.outputs) | {v for call in program.calls for v in call.args}
    calls = tuple(
        c for c in program.calls if not (isinstance(c.closure, Pack) and c.results[0] not in used)
    )
    if len(calls) == len(program.calls):
        return program
    return Program(
        program.inputs, calls, program.outputs, program.sources, program.writes, program.output_tree
    )


def merge_leaves(program: Program, name: str = "whole") -> Leaf:
    """Concatenates a program of leaf calls into one leaf: the graph an early inliner works on."""
    graph = torch.fx.Graph()
    env: dict[Value, torch.fx.Node] = {}
    for index, value in enumerate(program.inputs):
        node = graph.placeholder(f"a{index}")
        assert isinstance(value.type, TensorType)
        node.meta["val"] = without_numbers(value.type)
        env[value] = node
    for call in program.calls:
        assert isinstance(call.closure, Leaf)
        given = dict(zip(call.closure.entries, (env[v] for v in call.args), strict=True))
        results = graph.graph_copy(call.closure.module.graph, given)
        assert isinstance(results, (tuple, list))
        env.update(zip(call.results, results, strict=True))
    graph.output(tuple(env[v] for v in program.outputs))
    return Leaf(
        name,
        torch.fx.GraphModule(torch.nn.Module(), graph),
        tuple(flat_types(v.type for v in program.inputs)),
        tuple(flat_types(v.type for v in program.outputs)),
        tuple(v.hint for v in program.inputs),
    )


# ---- the early inliner: linking late must give exactly what linking its result gives -------------


def inline_calls(program: Program) -> Program:
    """Expands every call on a composite closure, to any depth; leaf calls stay.

    Struct values disappear where both ends are inside the program. Returns the same program if
    there is nothing to expand.
    """
    if all(isinstance(call.closure, Leaf) for call in program.calls):
        return program
    expansion = _Expansion()
    env = {v: v for v in program.inputs}
    expansion.body(program, env, "")
    outputs = tuple(env[v] for v in program.outputs)
    return replace(program, calls=tuple(expansion.calls), outputs=outputs)


class _Expansion:
    """Collects the calls of the expanded program."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._fields: dict[Value, tuple[Value, ...]] = {}

    def body(self, program: Program, env: dict[Value, Value], path: str) -> None:
        for call in program.calls:
            args = tuple(env[v] for v in call.args)
            inner_path = ".".join(p for p in (path, call.path) if p)
            env.update(zip(call.results, self._call(call, args, inner_path), strict=True))

    def _call(self, call: Call, args: tuple[Value, ...], path: str) -> Sequence[Value]:
        closure = call.closure
        if isinstance(closure, Composite):
            env = dict(zip(closure.program.inputs, args, strict=True))
            self.body(closure.program, env, path)
            return [env[v] for v in closure.program.outputs]
        if isinstance(closure, Unpack) and args[0] in self._fields:
            return self._fields[args[0]]
        results = tuple(Value(v.type, v.hint) for v in call.results)
        if isinstance(closure, Pack):
            self._fields[results[0]] = args
        self.calls.append(Call(closure, args, results, path if isinstance(closure, Leaf) else ""))
        return results


def move_to(program: PlannedProgram, place: Place) -> None:
    """Runs a program somewhere else from now on: one for a GPU on CPU memory, kernel by kernel."""
    program.rest()
    program._tools = replace(program._tools, place=place)
