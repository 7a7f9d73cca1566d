"""Forward and backward as one program: the loss and every gradient as results."""

from __future__ import annotations

from collections.abc import Sequence

from ..reuse.ir.program import Call, Composite, Program, Source, Value
from .derivative import Derivative


def training_program(program: Program, derivative: Derivative, seeds: Sequence[Source]) -> Program:
    """Puts the backward of a program behind its forward.

    Args:
        program: an entry program.
        derivative: of the program; its closures are composite.
        seeds: where the cotangents of ``derivative.cotangent_outputs`` come from.

    Returns:
        A program of the same inputs and the seeds; its outputs are the program's, then the
        gradients of ``derivative.gradient_inputs``.
    """
    assert isinstance(derivative.forward, Composite)
    assert isinstance(derivative.backward, Composite)
    forward, backward = derivative.forward.program, derivative.backward.program
    *results, saved = forward.outputs
    entries = backward.inputs[len(backward.inputs) - len(seeds) :]
    cotangents = tuple(Value(v.type, "seed") for v in entries)
    operands = (
        saved,
        *(forward.inputs[i] for i in derivative.kept_inputs),
        *(results[i] for i in derivative.kept_outputs),
        *cotangents,
    )
    env = dict(zip(backward.inputs, operands, strict=True))
    calls = list(forward.calls)
    for call in backward.calls:
        env.update((v, Value(v.type, v.hint)) for v in call.results)
        args, made = (tuple(env[v] for v in values) for values in (call.args, call.results))
        calls.append(Call(call.closure, args, made, call.path))
    return Program(
        (*forward.inputs, *cotangents),
        tuple(calls),
        (*results, *(env[v] for v in backward.outputs)),
        (*program.sources, *seeds),
        program.writes,
        program.output_tree,
    )
