"""Series that a forward takes along lines, made once per closure: forward and Taylor mode.

The calls between what moves and what is asked for become calls that compute the coefficients
beside their results; see :mod:`..forward_mode`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
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
from .derivation import SeriesCall, calls_between


def expanded(
    program: Program, place: int, asked: SeriesCall, derivatives: ForwardDerivatives
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
    before, after = program.calls[:place], program.calls[place + 1 :]
    between = calls_between(before, asked.inputs, asked.outputs)
    made = _beside(before, between, asked, derivatives)
    zeros, new = [], {}
    for output, order, result in asked.results:
        if (output, order) in made.coefficients:
            new[result] = made.coefficients[output, order]
        else:
            zeros.append(_zeros(result))
    rest = [replace(call, args=tuple(new.get(a, a) for a in call.args)) for call in after]
    placed = _placed(before, between, made.calls, asked)
    results = tuple(new.get(v, v) for v in program.outputs)
    return replace(program, calls=(*placed, *zeros, *rest), outputs=results), made.fallbacks


@dataclass(frozen=True)
class _Beside:
    """Holds the calls that compute coefficients beside values.

    Attributes:
        calls: those between, with the series beside their results.
        coefficients: of each output, by order, those that there are.
        fallbacks: operators that had no rule.
    """

    calls: tuple[Call, ...] = ()
    coefficients: Mapping[tuple[Value, int], Value] = field(default_factory=dict)
    fallbacks: tuple[Fallback, ...] = ()


def _beside(
    before: Sequence[Call],
    between: Sequence[Call],
    asked: SeriesCall,
    derivatives: ForwardDerivatives,
) -> _Beside:
    results = {result for call in between for result in call.results}
    taken = (a for call in between for a in call.args if a not in results)
    inputs = tuple(dict.fromkeys([*asked.inputs, *taken]))
    outputs = [v for v in dict.fromkeys(asked.outputs) if v in results or v in asked.inputs]
    if not outputs:
        return _Beside()
    closure = Composite("along", Program(inputs, tuple(between), tuple(outputs)))
    _refuse_draws(closure.program, asked)
    active = tuple(v in asked.inputs for v in inputs)
    try:
        derivative = derivatives.of(closure, active, asked.series, "lines")
    except PlanError as error:
        raise CaptureError(f"{error} (asked for at {asked.source})") from None
    assert isinstance(derivative.closure, Composite)
    body = derivative.closure.program
    # Then the calls cannot be replaced: a direction is computed from them, and comes before the
    # series. They run twice, under names of their own.
    if _is_made_between(asked.directions, before, between):
        body = _renamed(body, results)
    calls, coefficients = _called(derivative, body, inputs, outputs, asked)
    return _Beside(calls, coefficients, derivative.fallbacks)


def _called(
    derivative: ForwardDerivative,
    body: Program,
    inputs: Sequence[Value],
    outputs: Sequence[Value],
    asked: SeriesCall,
) -> tuple[tuple[Call, ...], dict[tuple[Value, int], Value]]:
    """Returns the calls of a derivative, and the value of each coefficient that there is."""
    direction_of = dict(zip(asked.inputs, asked.directions, strict=True))
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


def _is_made_between(
    directions: Sequence[Value], before: Sequence[Call], between: Sequence[Call]
) -> bool:
    """Returns whether a direction is computed from what the calls between compute, or beside it."""
    return not _dependent(before, between)[0].isdisjoint(directions)


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


def _placed(
    before: Sequence[Call], between: Sequence[Call], calls: Sequence[Call], asked: SeriesCall
) -> list[Call]:
    """Puts calls with series in the place of those without, before all that uses their results.

    Where a direction is computed from these, they run beside those without.
    """
    values, later = _dependent(before, between)
    if not values.isdisjoint(asked.directions):
        return [*before, *calls]
    inside = set(between)
    first = [call for call in before if call not in inside and call not in later]
    return [*first, *calls, *later]


def _refuse_draws(program: Program, asked: SeriesCall) -> None:
    leaf = drawing_leaf(program)
    if leaf is not None:
        raise CaptureError(
            f"@{leaf.name} draws random numbers between what is asked for at {asked.source} and "
            "what it moves with. Call model.eval(), or set its dropout to 0."
        )


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
