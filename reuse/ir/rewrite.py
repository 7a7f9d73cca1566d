"""Programs rewritten: each leaf once, calls replaced by their callees' bodies, structs taken apart.

Compilers that inline early do the second before any other pass. Here it takes a composite apart for
a comparison, and is the oracle of tests: linking late must give exactly what linking the inlined
program gives.

A derivative saves into a struct, which is opaque. Where that derivative is differentiated in its
turn, gradients flow through what is saved, one for each tensor, so the third passes it tensor by
tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

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


# ---- programs without struct values --------------------------------------------------------------


T = TypeVar("T")


def grouped(values: Iterable[T], types: Iterable[Type]) -> Iterator[list[T]]:
    """Yields flat values by the type that they are of: one of a tensor, several of a struct."""
    rest = iter(values)
    for type_ in types:
        yield [next(rest) for _ in flatten_type(type_)]


class FlatStructs:
    """Takes structs apart, once per closure."""

    def __init__(self) -> None:
        self._closures: dict[Closure, Closure] = {}

    def program(self, program: Program) -> Program:
        """Returns the program with each struct value as the values in it."""
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
        if closure.bodies:  # its own operands are single tensors
            return with_bodies(closure, [self.closure(body) for body in closure.bodies])  # type: ignore[misc]
        if not any(
            isinstance(t, StructType) for t in (*closure.input_types, *closure.output_types)
        ):
            return closure
        inputs, outputs = flat_types(closure.input_types), flat_types(closure.output_types)
        # Its graph takes and gives single tensors as it is.
        return replace(
            closure, input_types=tuple(inputs), output_types=tuple(outputs), input_names=()
        )


def _parts(value: Value) -> tuple[Value, ...]:
    if not isinstance(value.type, StructType):
        return (value,)
    return tuple(Value(type_, value.hint) for type_ in flat_types([value.type]))
