"""The early inliner: calls replaced by their callees' bodies, before any other pass.

Compilers that inline early do this first. Here it is the oracle: linking late must give exactly
what linking the inlined program gives.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.fx

from .leaf import flat_types
from .program import Call, Composite, Leaf, Pack, Program, Unpack, Value
from .types import TensorType


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
    return Program(
        program.inputs,
        tuple(expansion.calls),
        outputs,
        program.sources,
        program.writes,
        program.output_tree,
    )


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
        with_val = torch.empty_strided(
            value.type.shape, value.type.stride, dtype=value.type.dtype, device="meta"
        )
        node.meta["val"] = with_val
        env[value] = node
    for call in program.calls:
        assert isinstance(call.closure, Leaf)
        results = graph.graph_copy(
            call.closure.module.graph,
            _placeholder_map(call.closure, [env[v] for v in call.args]),
        )
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


def _placeholder_map(
    leaf: Leaf, args: Sequence[torch.fx.Node]
) -> dict[torch.fx.Node, torch.fx.Node]:
    placeholders = leaf.entries
    return dict(zip(placeholders, args, strict=True))
