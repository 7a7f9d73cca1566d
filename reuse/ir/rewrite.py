"""Rewrites programs (each leaf once, or structs into the tensors in them), and checks their rules.

A derivative saves its tensors in one opaque struct. When that derivative is differentiated again,
gradients flow through each saved tensor, so the tensors are then passed one by one.

A program keeps the rules of its level. Levels, from capture to link:

* ``shared``: closures, calls, and struct values made by autodiff; leaf bodies are pure.
* ``aten``: also, every leaf is decomposed into the operators that backends have kernels for.
* ``flat``: every call is on a leaf (what early inlining gives, and what link lays out).
* ``primitive``: every leaf holds only primitives (for people who read or count them).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar, get_args

import torch
import torch.fx

from ..errors import VerifyError
from ..torch_names import schema_of
from .control import checked, with_bodies
from .leaf import flat_types, memory_of, stamp_of
from .operators import is_primitive, mutated_args, takes_one_of_several
from .printer import format_program
from .program import (
    Call,
    Closure,
    Composite,
    Leaf,
    Pack,
    Program,
    Unpack,
    Value,
    leaf_nodes,
    walk_closures,
)
from .types import StructType, Type, flatten_type


def map_leaves(program: Program, change: Callable[[Leaf], Leaf]) -> Program:
    """Rewrites each leaf once, callees first; the same program if no leaf changed."""
    new: dict[Closure, Closure] = {}
    for closure in walk_closures(program):
        if isinstance(closure, Leaf) and closure.bodies:
            bodies = [new[body] for body in closure.bodies]
            new[closure] = change(with_bodies(closure, bodies))  # type: ignore[arg-type]
        elif isinstance(closure, Leaf):
            new[closure] = change(closure)
        elif isinstance(closure, Composite):
            body = _replace_callees(closure.program, new)
            same = body is closure.program
            new[closure] = closure if same else Composite(closure.name, body, closure.input_names)
        else:
            new[closure] = closure
    return _replace_callees(program, new)


def _replace_callees(program: Program, new: Mapping[Closure, Closure]) -> Program:
    if all(new[call.closure] is call.closure for call in program.calls):
        return program
    calls = tuple(replace(c, closure=new[c.closure]) for c in program.calls)
    return replace(program, calls=calls)


# ---- programs without struct values --------------------------------------------------------------


T = TypeVar("T")


def grouped(values: Iterable[T], types: Iterable[Type]) -> Iterator[list[T]]:
    """Yields flat values grouped by type: one for a tensor, several for a struct."""
    rest = iter(values)
    for type_ in types:
        yield [next(rest) for _ in flatten_type(type_)]


def packed(values: Iterable[Value], hint: str = "saved") -> Call:
    """Returns the call that packs values into one struct."""
    fields = tuple(values)
    struct = StructType(tuple(value.type for value in fields))
    return Call(Pack(struct), fields, (Value(struct, hint),))


def unpacked(struct: Value, fields: Iterable[Value] | None = None) -> Call:
    """Returns the call that unpacks a struct into ``fields``, or into new values."""
    assert isinstance(struct.type, StructType)
    made = tuple(map(Value, struct.type.fields) if fields is None else fields)
    return Call(Unpack(struct.type), (struct,), made)


class FlatStructs:
    """Replaces structs by the values in them, once per closure."""

    def __init__(self) -> None:
        self._closures: dict[Closure, Closure] = {}

    def program(self, program: Program) -> Program:
        """Returns the program with each struct replaced by the values in it."""
        parts: dict[Value, tuple[Value, ...]] = {}

        def taken(values: Sequence[Value]) -> tuple[Value, ...]:
            return tuple(part for value in values for part in parts[value])

        for value in program.inputs:
            parts[value] = _parts(value)
        calls = []
        for call in program.calls:
            if isinstance(call.closure, Pack):
                parts[call.results[0]] = taken(call.args)
            elif isinstance(call.closure, Unpack):
                inner = grouped(parts[call.args[0]], [v.type for v in call.results])
                parts.update(zip(call.results, map(tuple, inner), strict=True))
            else:
                parts.update((value, _parts(value)) for value in call.results)
                args, results = taken(call.args), taken(call.results)
                calls.append(Call(self.closure(call.closure), args, results, call.path))
        return replace(
            program,
            inputs=taken(program.inputs),
            calls=tuple(calls),
            outputs=taken(program.outputs),
        )

    def closure(self, closure: Closure) -> Closure:
        """Returns the closure without struct values, the same one each time."""
        if closure not in self._closures:
            self._closures[closure] = self._made(closure)
        return self._closures[closure]

    def _made(self, closure: Closure) -> Closure:
        if isinstance(closure, Composite):
            return Composite(closure.name, self.program(closure.program))
        assert isinstance(closure, Leaf)
        if closure.bodies:  # operands of control flow are tensors already
            return with_bodies(closure, [self.closure(body) for body in closure.bodies])  # type: ignore[misc]
        if not any(
            isinstance(t, StructType) for t in (*closure.input_types, *closure.output_types)
        ):
            return closure
        inputs, outputs = flat_types(closure.input_types), flat_types(closure.output_types)
        # The graph of a leaf takes and returns single tensors already.
        return replace(
            closure, input_types=tuple(inputs), output_types=tuple(outputs), input_names=()
        )


def _parts(value: Value) -> tuple[Value, ...]:
    if not isinstance(value.type, StructType):
        return (value,)
    return tuple(Value(type_, value.hint) for type_ in flat_types([value.type]))


# ---- the rules of a level ------------------------------------------------------------------------


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
