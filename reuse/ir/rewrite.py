"""Programs rewritten: each different leaf once, or calls replaced by their callees' bodies.

Compilers that inline early do the second before any other pass. Here it takes a composite apart for
a comparison, and is the oracle of tests: linking late must give exactly what linking the inlined
program gives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from .control import with_bodies
from .program import Call, Closure, Composite, Leaf, Pack, Program, Unpack, Value, walk_closures


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
