"""``ForwardDerivatives``: a closure with its series, made once per closure.

The derived closure takes the primal's inputs, then for each active input its coefficients, by
order; it returns the primal's results, then the same for each active result. What coefficients are
is said in ``jets``. It may be differentiated in its turn, in either mode.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch.fx
from torch import Tensor

from ...reuse.errors import PlanError
from ...reuse.ir.leaf import flat_types, stamp_of, without_autocast
from ...reuse.ir.program import Call, Closure, Composite, Leaf, Program, Value
from ...reuse.ir.types import TensorType
from ...reuse.torch_names import OPERATOR_TYPES
from ..traces.joint_trace import laid_out_as, trace_function, trace_taken_apart
from ..traces.torch_interpreters import stop_in_trace
from .jet_interpreter import Fallback, JetInterpreter
from .jets import Jet, Lanes, Orders, Series
from .torch_rules import taken_apart


@dataclass(frozen=True)
class ForwardRequest:
    """Names a forward derivative: of which closure, for which inputs, with which series.

    Attributes:
        closure: the primal, of tensors alone, captured for training: where gradients are off,
            tangents stop.
        inputs: which orders flow with each input.
        series: what flows with active values.
    """

    closure: Closure
    inputs: tuple[Orders, ...]
    series: Series


@dataclass(frozen=True, eq=False)
class ForwardDerivative:
    """Holds a closure with its series.

    Attributes:
        closure: takes and returns the primal's values, then the coefficients that there are.
        inputs: which orders it takes with each input of the primal.
        outputs: which orders it returns with each result; the others are zero.
        fallbacks: operators that had no rule.
    """

    closure: Closure
    inputs: tuple[Orders, ...]
    outputs: tuple[Orders, ...]
    fallbacks: tuple[Fallback, ...] = ()


class ForwardDerivatives:
    """Makes forward derivatives, each once per closure, series and what is known to be zero."""

    def __init__(self) -> None:
        self._derivatives: dict[ForwardRequest, ForwardDerivative] = {}
        self._plain: dict[Leaf, torch.fx.GraphModule] = {}

    def of(self, request: ForwardRequest) -> ForwardDerivative:
        """Returns a closure with its series, whatever of it is zero.

        Raises:
            PlanError: if an operator has no forward derivative.
        """
        if request not in self._derivatives:
            self._derivatives[request] = self._made(request)
        return self._derivatives[request]

    def _made(self, request: ForwardRequest) -> ForwardDerivative:
        closure = request.closure
        # Not on the way from what moves: the closure itself serves, and is not compiled twice.
        if not any(request.inputs):
            return ForwardDerivative(closure, request.inputs, ((),) * len(closure.output_types))
        if isinstance(closure, Composite):
            return self._program(request, closure)
        assert isinstance(closure, Leaf), "structs are taken apart before"
        return self._leaf(request, closure)

    # ---- programs ------------------------------------------------------------------------

    def _program(self, request: ForwardRequest, closure: Composite) -> ForwardDerivative:
        program, series = closure.program, request.series
        flowing: dict[Value, dict[int, Value]] = {}
        for value, orders in zip(program.inputs, request.inputs, strict=True):
            flowing[value] = _beside(value, orders, series)
        calls, fallbacks = [], dict[Fallback, None]()
        for call in program.calls:
            # Which orders are zero is part of the request: equal blocks agree from the second on.
            inner = tuple(tuple(flowing.get(v, ())) for v in call.args)
            derivative = self.of(ForwardRequest(call.closure, inner, series))
            fallbacks.update(dict.fromkeys(derivative.fallbacks))
            for value, found in zip(call.results, derivative.outputs, strict=True):
                flowing[value] = _beside(value, found, series)
            args = (*call.args, *_coefficients(flowing, call.args))
            results = (*call.results, *_coefficients(flowing, call.results))
            calls.append(Call(derivative.closure, args, results, call.path, call.recompute))
        written = {output for output, _ in program.writes}  # buffers carry no series on
        outputs = tuple(
            () if i in written else tuple(flowing.get(v, ())) for i, v in enumerate(program.outputs)
        )
        moving = [v for v, orders in zip(program.outputs, outputs, strict=True) if orders]
        derived = Program(
            (*program.inputs, *_coefficients(flowing, program.inputs)),
            tuple(calls),
            (*program.outputs, *_coefficients(flowing, moving)),
            writes=program.writes,
        )
        name = _name(closure.name, series)
        return ForwardDerivative(
            Composite(name, derived), request.inputs, outputs, tuple(fallbacks)
        )

    # ---- leaves --------------------------------------------------------------------------

    def _taken_apart(self, leaf: Leaf) -> torch.fx.GraphModule:
        if leaf not in self._plain:
            types = flat_types(leaf.input_types)
            self._plain[leaf] = trace_taken_apart(leaf.module, types, taken_apart())
        return self._plain[leaf]

    @without_autocast()
    def _leaf(self, request: ForwardRequest, leaf: Leaf) -> ForwardDerivative:
        _refuse_own_derivatives(leaf)
        plain, series = self._taken_apart(leaf), request.series
        lanes = Lanes(series)
        # One run while it is traced: what it computes on fake tensors is the derived graph.
        interpreter = JetInterpreter(plain, lanes, stop_in_trace)
        types = [_tensor_type(t) for t in leaf.input_types]
        given = [
            series.coefficient_type(type_, order)
            for type_, orders in zip(types, request.inputs, strict=True)
            for order in orders
        ]
        outputs: list[Orders] = []

        def derived(flat: list[Tensor]) -> tuple[Tensor, ...]:
            primals, rest = flat[: len(types)], iter(flat[len(types) :])
            values = [
                lanes.taken(primal, {order: next(rest) for order in orders})
                for primal, orders in zip(primals, request.inputs, strict=True)
            ]
            results = interpreter.run_flat(values)
            outputs[:] = [_orders(result) for result in results]
            return tuple(_laid_out(lanes, results, leaf.output_types))

        module = trace_function(derived, [*types, *given], plain)
        found = [
            series.coefficient_type(_tensor_type(type_), order)
            for type_, orders in zip(leaf.output_types, outputs, strict=True)
            for order in orders
        ]
        derived_leaf = Leaf(
            _name(leaf.name, series),
            module,
            (*types, *given),
            (*leaf.output_types, *found),
            level="composite",
            kernels=leaf.kernels,
        )
        fallbacks = tuple(dict.fromkeys(interpreter.fallbacks))
        return ForwardDerivative(derived_leaf, request.inputs, tuple(outputs), fallbacks)


def _beside(value: Value, orders: Orders, series: Series) -> dict[int, Value]:
    """Returns a new value for each coefficient of a value."""
    return {
        order: Value(
            series.coefficient_type(_tensor_type(value.type), order), f"{value.hint}_t{order}"
        )
        for order in orders
    }


def _coefficients(
    flowing: dict[Value, dict[int, Value]], values: Sequence[Value]
) -> Iterator[Value]:
    for value in values:
        yield from flowing.get(value, {}).values()


def _tensor_type(type_: Any) -> TensorType:
    assert isinstance(type_, TensorType), "structs are taken apart before"
    return type_


def _name(name: str, series: Series) -> str:
    return f"{name}.taylor{series.order}" if series.order > 1 else f"{name}.jvp"


def _orders(result: Any) -> Orders:
    return tuple(sorted(result.coefficients)) if isinstance(result, Jet) else ()


def _laid_out(lanes: Lanes, results: Sequence[Any], types: Sequence[Any]) -> Iterator[Tensor]:
    """Yields the values, then their coefficients, as their types say."""
    for result, type_ in zip(results, types, strict=True):
        yield laid_out_as(result.primal if isinstance(result, Jet) else result, type_)
    for result, type_ in zip(results, types, strict=True):
        for order in _orders(result):
            wanted = lanes.series.coefficient_type(type_, order)
            yield laid_out_as(lanes.joined(result, order), wanted)


def _refuse_own_derivatives(leaf: Leaf) -> None:
    for node in leaf.nodes:
        if callable(node.target) and not isinstance(node.target, _KNOWN):
            name = getattr(node.target, "__name__", str(node.target))
            raise PlanError(
                f"There is no forward derivative of {name} at {stamp_of(node).source}, which has a "
                "derivative of its own (torch.autograd.Function). Take the derivative in reverse, "
                "or of the model itself with torch.func."
            )


_KNOWN = (*OPERATOR_TYPES, type(len))
