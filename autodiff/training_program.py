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
    forward = derivative.forward.program
    *results, _ = forward.outputs
    entries = derivative.backward.input_types[-len(seeds) :] if seeds else ()
    cotangents = tuple(Value(type_, "seed") for type_ in entries)
    calls, gradients = backward_calls(derivative, forward, cotangents)
    return Program(
        (*forward.inputs, *cotangents),
        (*forward.calls, *calls),
        (*results, *gradients),
        (*program.sources, *seeds),
        program.writes,
        program.output_tree,
    )


def backward_calls(
    derivative: Derivative, program: Program, cotangents: Sequence[Value]
) -> tuple[list[Call], tuple[Value, ...]]:
    """Returns the calls of a backward behind its forward, and the gradients that they compute.

    Args:
        derivative: its closures are composite.
        program: its inputs and results are the values that the forward takes and gives.
        cotangents: of ``derivative.cotangent_outputs``.
    """
    assert isinstance(derivative.forward, Composite)
    assert isinstance(derivative.backward, Composite)
    backward, saved = derivative.backward.program, derivative.forward.program.outputs[-1]
    operands = (
        saved,
        *(program.inputs[i] for i in derivative.kept_inputs),
        *(program.outputs[i] for i in derivative.kept_outputs),
        *cotangents,
    )
    env = dict(zip(backward.inputs, operands, strict=True))
    calls = []
    for call in backward.calls:
        env.update((v, Value(v.type, v.hint)) for v in call.results)
        args, made = (tuple(env[v] for v in values) for values in (call.args, call.results))
        calls.append(Call(call.closure, args, made, call.path))
    return calls, tuple(env[v] for v in backward.outputs)
