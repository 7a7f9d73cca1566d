"""The reference interpreter: runs a program call by call on real tensors, nothing clever.

Tests compare every other way of running a program with this one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .leaf import ModalInterpreter
from .program import Call, Closure, Composite, Leaf, Pack, Program, Value
from .types import StructType, Type


def interpret(program: Program, args: Sequence[Any]) -> tuple[Any, ...]:
    """Runs a program; tensors for tensor inputs, nested tuples for struct inputs."""
    env: dict[Value, Any] = dict(zip(program.inputs, args, strict=True))
    for call in program.calls:
        env.update(zip(call.results, _apply(call, [env[v] for v in call.args]), strict=True))
    return tuple(env[v] for v in program.outputs)


def _apply(call: Call, args: list[Any]) -> Sequence[Any]:
    closure: Closure = call.closure
    if isinstance(closure, Composite):
        return interpret(closure.program, args)
    if isinstance(closure, Leaf):
        flat = [tensor for arg in args for tensor in flatten_value(arg)]
        results = iter(ModalInterpreter(closure.module).run_flat(flat))
        return [_unflatten(type_, results) for type_ in closure.output_types]
    return (tuple(args),) if isinstance(closure, Pack) else args[0]


def flatten_value(value: Any) -> list[Any]:
    """Flattens nested tuples of tensors."""
    if isinstance(value, tuple):
        return [inner for item in value for inner in flatten_value(item)]
    return [value]


def _unflatten(type_: Type, tensors: Any) -> Any:
    if isinstance(type_, StructType):
        return tuple(_unflatten(field, tensors) for field in type_.fields)
    return next(tensors)
