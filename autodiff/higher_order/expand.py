"""Series that a forward takes along lines, made once per closure: forward and Taylor mode.

The calls between what moves and what is asked for become calls that compute the coefficients
beside their results; see :mod:`..forward_mode`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.fx

from ...reuse.errors import CaptureError, PlanError
from ...reuse.ir.program import Call, Composite, Leaf, Program, Value
from ...reuse.ir.types import TensorType
from ...reuse.torch_names import module_of
from ..flows import drawing_leaf
from ..forward_mode.forward_derivative import ForwardDerivative, ForwardDerivatives
from ..forward_mode.jet_interpreter import Fallback
from .derivation import DerivativeCall, calls_between


def expanded(
    program: Program, place: int, asked: DerivativeCall, derivatives: ForwardDerivatives
) -> tuple[Program, tuple[Fallback, ...]]:
    """Returns a program with the series that one of its calls asks for.

    Args:
        program: without structs.
        place: of the call.
        asked: what it asks for.
        derivatives: makes them.

    Returns:
        The program, and which operators had no rule: forward mode was nested for them.

    Raises:
        CaptureError: if there is none.
    """
    assert asked.series is not None
    before, after = program.calls[:place], program.calls[place + 1 :]
    between = calls_between(before, asked.inputs, asked.outputs)
    made = {result for call in between for result in call.results}
    outputs = [v for v in dict.fromkeys(asked.outputs) if v in made or v in asked.inputs]
    placed, fallbacks = [*before], tuple[Fallback, ...]()
    found: dict[tuple[Value, int], Value] = {}
    if outputs:
        taken = (a for call in between for a in call.args if a not in made)
        inputs = tuple(dict.fromkeys([*asked.inputs, *taken]))
        body = Program(inputs, tuple(between), tuple(outputs))
        derivative = _derivative(body, asked, derivatives)
        assert isinstance(derivative.closure, Composite)
        beside, fallbacks = derivative.closure.program, derivative.fallbacks
        values, later = _dependent(before, between)
        # Then the calls cannot be replaced: a direction is computed from them, and comes before the
        # series. They run twice, under names of their own.
        is_fed_back = not values.isdisjoint(asked.seeds)
        if is_fed_back:
            beside = _renamed(beside, made)
        calls, found = _called(derivative, beside, inputs, outputs, asked)
        kept = {*before} if is_fed_back else {*before} - {*between, *later}
        first = [call for call in before if call in kept]
        placed = [*first, *calls, *(call for call in later if call not in kept)]
    zeros, new, orders = [], {}, asked.series.orders
    for index, result in asked.results:
        key = asked.outputs[index // len(orders)], orders[index % len(orders)]
        if key in found:
            new[result] = found[key]
        else:
            zeros.append(_zeros(result))
    rest = [replace(call, args=tuple(new.get(a, a) for a in call.args)) for call in after]
    results = tuple(new.get(v, v) for v in program.outputs)
    return replace(program, calls=(*placed, *zeros, *rest), outputs=results), fallbacks


def _derivative(
    program: Program, asked: DerivativeCall, derivatives: ForwardDerivatives
) -> ForwardDerivative:
    assert asked.series is not None
    leaf = drawing_leaf(program)
    if leaf is not None:
        raise CaptureError(
            f"@{leaf.name} draws random numbers between what is asked for at {asked.source} and "
            "what it moves with. Call model.eval(), or set its dropout to 0."
        )
    active = tuple(v in asked.inputs for v in program.inputs)
    try:
        return derivatives.along_lines(Composite("along", program), active, asked.series)
    except PlanError as error:
        raise CaptureError(f"{error} (asked for at {asked.source})") from None


def _called(
    derivative: ForwardDerivative,
    body: Program,
    inputs: Sequence[Value],
    outputs: Sequence[Value],
    asked: DerivativeCall,
) -> tuple[tuple[Call, ...], dict[tuple[Value, int], Value]]:
    """Returns the calls of a derivative, and the value of each coefficient that there is."""
    direction_of = dict(zip(asked.inputs, asked.seeds, strict=True))
    moving = [v for v, orders in zip(inputs, derivative.inputs, strict=True) for _ in orders]
    entries = body.inputs[len(inputs) :]
    env = {entry: direction_of[v] for entry, v in zip(entries, moving, strict=True)}
    calls = tuple(
        replace(call, args=tuple(env.get(a, a) for a in call.args)) for call in body.calls
    )
    places = [
        (v, order)
        for v, orders in zip(outputs, derivative.outputs, strict=True)
        for order in orders
    ]
    coefficients = (env.get(v, v) for v in body.outputs[len(outputs) :])
    return calls, dict(zip(places, coefficients, strict=True))


def _dependent(
    before: Sequence[Call], between: Sequence[Call]
) -> tuple[set[Value], dict[Call, None]]:
    """Returns what the calls between make, with all that is computed from it; and these calls."""
    inside = set(between)
    values = {result for call in between for result in call.results}
    later: dict[Call, None] = {}
    for call in before:
        if call not in inside and not values.isdisjoint(call.args):
            values.update(call.results)
            later[call] = None
    return values, later


def _renamed(program: Program, values: set[Value]) -> Program:
    """Returns a program that computes some values under names of its own."""
    new = {v: Value(v.type, v.hint) for v in values}

    def named(old: tuple[Value, ...]) -> tuple[Value, ...]:
        return tuple(new.get(v, v) for v in old)

    calls = (replace(c, args=named(c.args), results=named(c.results)) for c in program.calls)
    return replace(program, calls=tuple(calls), outputs=named(program.outputs))


def _zeros(result: Value) -> Call:
    """Returns the call that makes a coefficient which is zero whatever the inputs are."""
    type_ = result.type
    assert isinstance(type_, TensorType)
    graph = torch.fx.Graph()
    options: dict[str, Any] = {"dtype": type_.dtype, "device": type_.device}
    made = graph.call_function(torch.ops.aten.zeros.default, (list(type_.shape),), options)
    made.meta["val"] = torch.empty(type_.shape, dtype=type_.dtype, device="meta")
    graph.output((made,))
    return Call(Leaf("zeros", module_of(graph), (), (type_,)), (), (result,))
