"""Rewriting the leaves of a program, each different one once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from .program import Closure, Composite, Leaf, Program, walk_closures


def map_leaves(program: Program, change: Callable[[Leaf], Leaf]) -> Program:
    """Rewrites each leaf of a program once, callees first, and rewires the callers.

    Returns the same program if no leaf changed.
    """
    new: dict[Closure, Closure] = {}
    for closure in walk_closures(program):
        if isinstance(closure, Leaf):
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
    return Program(
        program.inputs, calls, program.outputs, program.sources, program.writes, program.output_tree
    )
