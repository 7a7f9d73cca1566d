"""Rewrites programs: each different leaf once, or structs into the tensors in them.

A derivative saves its tensors in one opaque struct. When that derivative is differentiated again,
gradients flow through each saved tensor, so the tensors are then passed one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from ..once import once
from .control import with_bodies
from .leaf import flat_types
from .program import Call, Closure, Composite, Leaf, Pack, Program, Unpack, Value, walk_closures
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

    @once
    def closure(self, closure: Closure) -> Closure:
        """Returns the closure without struct values, the same one each time."""
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
