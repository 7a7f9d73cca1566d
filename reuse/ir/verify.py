"""Checks that a program keeps the rules of its level.

Levels, from capture to link:

* ``shared``: closures, calls, and struct values made by autodiff; leaf bodies are pure.
* ``aten``: also, every leaf is decomposed into the operators that backends have kernels for.
* ``flat``: every call is on a leaf (what early inlining gives, and what link lays out).
* ``primitive``: every leaf holds only primitives (for people who read or count them).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.fx

from ..errors import VerifyError
from ..torch_names import schema_of
from .control import checked
from .leaf import flat_types, memory_of, stamp_of
from .operators import is_primitive, mutated_args, takes_one_of_several
from .printer import format_program
from .program import Call, Composite, Leaf, Pack, Program, Unpack, Value, leaf_nodes, walk_closures

ProgramLevel = Literal["shared", "aten", "flat", "primitive"]
LEVELS: tuple[ProgramLevel, ...] = get_args(ProgramLevel)


def verify(program: Program, level: ProgramLevel = "shared") -> Program:
    """Returns the program if it keeps its level's rules; VerifyError with the rule and the call."""
    try:
        _check(program, level)
    except _BrokenRuleError as broken:
        raise VerifyError(f"{broken} (level {level!r})\n\n{format_program(program)}") from None
    return program


def operators_of(program: Program) -> Counter[str]:
    """Counts the operators of a program by name, each different closure's once."""
    return Counter(
        name_of(node) for _, node in leaf_nodes(program) if not takes_one_of_several(node.target)
    )


@dataclass(frozen=True, slots=True)
class NotPrimitive:
    """An operator that is not a primitive, in a leaf, and the user's line; empty if unknown."""

    operator: str
    closure: str
    source: str

    def __str__(self) -> str:
        place = f"@{self.closure}, from {self.source}" if self.source else f"@{self.closure}"
        return f"{self.operator} ({place})"


def not_primitive(program: Program) -> list[NotPrimitive]:
    """Returns the operators of a program that are not primitives, each place once."""
    found = (
        NotPrimitive(name_of(node), leaf.name, stamp_of(node).source)
        for leaf, node in leaf_nodes(program)
        if not is_primitive(node.target)
    )
    return list(dict.fromkeys(found))


def name_of(node: torch.fx.Node) -> str:
    """Returns the full name of what a node calls."""
    if schema_of(node.target):
        return str(node.target)
    return str(getattr(node.target, "__name__", node.target))


class _BrokenRuleError(Exception):
    """One broken rule."""


def _check(program: Program, level: ProgramLevel) -> None:
    if level not in LEVELS:
        raise _BrokenRuleError(f"unknown level {level!r}; there are {LEVELS}")
    if program.sources and len(program.sources) != len(program.inputs):
        raise _BrokenRuleError(f"{len(program.inputs)} inputs but {len(program.sources)} sources")
    for closure in walk_closures(program):
        if isinstance(closure, Leaf):
            _check_leaf(closure)
            if level == "aten" and closure.level != "aten":
                raise _BrokenRuleError(f"@{closure.name} is a leaf of level {closure.level!r}")
        elif isinstance(closure, Composite):
            if level == "flat":
                raise _BrokenRuleError(f"@{closure.name} is a composite closure")
            _check_body(closure.program, f"@{closure.name}")
    _check_body(program, "@main")
    foreign = not_primitive(program) if level == "primitive" else []
    if foreign:
        raise _BrokenRuleError(f"operators that are no primitives: {', '.join(map(str, foreign))}")
    # A write copies into the user's tensor, whose type stays.
    for output, target in program.writes:
        if program.outputs[output].type != program.inputs[target].type:
            raise _BrokenRuleError(f"write of output {output} into input {target} changes the type")


def _check_body(program: Program, where: str) -> None:
    defined: set[Value] = set()
    for value in program.inputs:
        _define(value, defined, f"{where} inputs")
    for index, call in enumerate(program.calls):
        at = f"{where}, call {index} of @{call.closure.name}"
        _check_call(call, defined, at)
        for value in call.results:
            _define(value, defined, at)
    for value in program.outputs:
        if value not in defined:
            raise _BrokenRuleError(f"{where} returns a value that no call defines")


def _define(value: Value, defined: set[Value], where: str) -> None:
    if value in defined:
        raise _BrokenRuleError(f"{where}: a value is defined twice")
    defined.add(value)


def _check_call(call: Call, defined: set[Value], where: str) -> None:
    closure = call.closure
    for index, value in enumerate(call.args):
        if value not in defined:
            raise _BrokenRuleError(f"{where}: operand {index} is used before it is defined")
    for kind, types, values in (
        ("operand", closure.input_types, call.args),
        ("result", closure.output_types, call.results),
    ):
        if len(types) != len(values):
            raise _BrokenRuleError(f"{where}: {len(values)} {kind}s for {len(types)}")
        for index, (type_, value) in enumerate(zip(types, values, strict=True)):
            if type_ != value.type:
                raise _BrokenRuleError(f"{where}: {kind} {index} is {value.type!r}, not {type_!r}")
    if isinstance(closure, (Pack, Unpack)) and call.path:
        raise _BrokenRuleError(f"{where}: pack and unpack have no module path")


def _check_leaf(leaf: Leaf) -> None:
    where = f"@{leaf.name}"
    if leaf.control is not None:
        try:
            checked(leaf.control, leaf.input_types, leaf.output_types)
        except ValueError as error:
            raise _BrokenRuleError(f"{where}: {error}") from None
    placeholders = leaf.entries
    if len(placeholders) != len(flat_types(leaf.input_types)):
        raise _BrokenRuleError(f"{where}: {len(placeholders)} placeholders for its input types")
    outputs = leaf.module.graph.output_node().args[0]
    if not isinstance(outputs, (tuple, list)) or len(outputs) != len(flat_types(leaf.output_types)):
        raise _BrokenRuleError(f"{where}: outputs do not match its output types")
    # A leaf must not change its inputs: the caller may use an operand again after the call. Of one
    # that it only clones it may change the clone.
    clone = torch.ops.aten.clone.default
    own = {memory_of(n) for n in placeholders if any(u.target is not clone for u in n.users)}
    for node in leaf.nodes:
        if node.op != "call_function":
            raise _BrokenRuleError(
                f"{where}: node {node.name} is a {node.op}; every tensor must be an input"
            )
        for changed in mutated_args(node):
            if memory_of(changed) in own:
                raise _BrokenRuleError(f"{where}: node {node.name} changes an input in place")
