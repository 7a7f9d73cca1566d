"""``ForwardDerivatives``: a closure with its series, made once per closure.

The derived closure takes the primal's inputs, then the coefficients of each active input, by order;
it returns the primal's results, then the coefficients of each active result. ``jets`` defines
coefficients. The closure can be differentiated again, in either mode.

For an operator without a rule forward mode is nested. That is slow: the value and its lower
derivatives are computed again at each order. And it is refused where it would be silently wrong:
PyTorch's tangent formula may read further results of the operator (factors of a matrix, statistics
of a norm), which PyTorch treats as constants, so that the formula's own tangent lacks a term.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.fx
from torch import Tensor

from ...reuse.errors import PlanError
from ...reuse.ir.leaf import flat_types, stamp_of, without_autocast
from ...reuse.ir.operators import is_draw, mutated_args
from ...reuse.ir.program import Call, Closure, Composite, Leaf, Program, Value
from ...reuse.ir.torch_symbols import SizedInterpreter
from ...reuse.ir.types import TensorType
from ...reuse.once import once
from ...reuse.torch_names import OPERATOR_TYPES
from ..traces.joint_trace import trace_for_rules, trace_function, with_layout_of
from ..traces.torch_interpreters import origin_of, stop_in_trace
from .jets import Coefficient, Jet, Lanes, Operands, Orders, Series, results_of, scaled
from .torch_rules import decompositions, is_wrong_nested, rule_of

Place: TypeAlias = tuple[int, int]  # an order, and which operand


def nested_forward(lanes: Lanes, target: Any, operands: Operands) -> Any:
    """Returns an operator's results with series, by nested forward mode; may raise PlanError."""
    results = operands.call(target)
    flat = _as_list(results)
    # By autograd, since forward mode silently gives no tangent to a result that it cannot
    # differentiate.
    moving = _differentiable(target, operands)
    _refuse_wrong(target, flat, moving, lanes.order)
    if not moving:
        return results

    def values(*tensors: Tensor) -> tuple[Tensor, ...]:
        found = _as_list(operands.call(target, tensors))
        return tuple(found[i] for i in moving)

    def push(*series: Sequence[Coefficient]) -> list[list[Coefficient]]:
        given = _derivatives_of(operands, series)
        _, *orders = _derivatives(values, given, len(series), len(series[0]))
        return [
            [
                None if row is None else scaled(row[i], 1 / math.factorial(k))
                for k, row in enumerate(orders, start=1)
            ]
            for i in range(len(moving))
        ]

    found: list[Mapping[int, tuple[Tensor, ...]]] = [{} for _ in flat]
    for place, coefficients in zip(moving, lanes.propagated(push, *operands.jets), strict=True):
        found[place] = coefficients
    return results_of(lanes, results, found)


def _refuse_wrong(target: Any, results: list[Any], moving: Sequence[int], order: int) -> None:
    tensors = {i: result for i, result in enumerate(results) if isinstance(result, Tensor)}
    real = {i for i, x in tensors.items() if x.is_floating_point() or x.is_complex()}
    if real and not moving:
        raise PlanError("PyTorch knows no derivative of it.")
    if moving and order > 1 and not real <= set(moving):
        raise PlanError("Its tangent is made of results that are constants to PyTorch.")
    if moving and is_wrong_nested(target):
        raise PlanError("PyTorch's own, nested, is wrong.")


def _as_list(results: Any) -> list[Any]:
    return list(results) if isinstance(results, (list, tuple)) else [results]


def _derivatives_of(
    operands: Operands, series: Sequence[Sequence[Coefficient]]
) -> dict[Place, Tensor]:
    """Returns the operands and their derivatives, those that are not zero."""
    given: dict[Place, Tensor] = {}
    for operand, coefficients in enumerate(series):
        given[0, operand] = operands.jets[operand].primal
        for k, coefficient in enumerate(coefficients, start=1):
            if coefficient is not None:
                # A new tensor: PyTorch wants a tangent to have the layout of its value.
                given[k, operand] = coefficient * math.factorial(k)
    return given


def _differentiable(target: Any, operands: Operands) -> list[int]:
    """Returns which results PyTorch can differentiate; the tangents of others would be lost."""
    with torch.enable_grad():
        watched = [jet.primal.detach().requires_grad_() for jet in operands.jets]
        results = _as_list(operands.call(target, watched))
    return [i for i, r in enumerate(results) if isinstance(r, Tensor) and r.requires_grad]


def _derivatives(
    values: Callable[..., tuple[Tensor, ...]], given: Mapping[Place, Tensor], width: int, order: int
) -> list[tuple[Tensor, ...] | None]:
    """Returns the results and their derivatives up to an order, given those of all operands.

    None stands for zero.
    """
    if order == 0:
        return [values(*(given[0, operand] for operand in range(width)))]
    moving = [(k, i) for k, i in given if k < order and (k + 1, i) in given]
    if not moving:
        return [*_derivatives(values, given, width, order - 1), None]
    there: list[bool] = []

    def lower(*tensors: Tensor) -> tuple[Tensor, ...]:
        moved = {**given, **dict(zip(moving, tensors, strict=True))}
        rows = _derivatives(values, moved, width, order - 1)
        there[:] = [row is not None for row in rows]
        return tuple(t for row in rows if row is not None for t in row)

    at = tuple(given[place] for place in moving)
    along = tuple(given[k + 1, i] for k, i in moving)
    primal, tangent = torch.func.jvp(lower, at, along)
    size = len(primal) // sum(there)
    rest = iter(primal[i : i + size] for i in range(0, len(primal), size))
    found = [next(rest) if row else None for row in there]
    # The next derivative is that of the highest one before it; the derivative of zero is zero.
    return [*found, tangent[-size:] if there[-1] else None]


@dataclass(frozen=True, slots=True)
class Fallback:
    """Names an operator without a rule, for which forward mode was nested, and the user's line."""

    operator: str
    source: str

    def __str__(self) -> str:
        return f"{self.operator} at {self.source}" if self.source else self.operator


class JetInterpreter(SizedInterpreter):
    """Runs a graph of plain operators; uses their rules if an operand has a series.

    The module has no in-place operators, and each ``detach`` in it stops a derivative. ``lanes``
    compute the series; ``stop`` detaches, and marks the detach in the trace, so that it stays.
    """

    def __init__(
        self, module: torch.fx.GraphModule, lanes: Lanes, stop: Callable[[Tensor], Tensor]
    ) -> None:
        super().__init__(module)
        self.extra_traceback = False  # our messages say which operator it is
        self._lanes = lanes
        self._stop = stop
        self._node: torch.fx.Node | None = None
        self.fallbacks: list[Fallback] = []

    def run_flat(self, args: list[Any]) -> tuple[Any, ...]:
        """Runs on flat inputs; returns the flat outputs."""
        return tuple(super().run(*args))

    def run_node(self, n: torch.fx.Node) -> Any:
        """Runs a node; keeps it for messages."""
        self._node = n
        return super().run_node(n)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Calls an operator, or its rule."""
        operands = Operands.of(args, kwargs)
        # First: a detach that is left in the graph is the user's, and stops tangents as gradients.
        if target is torch.ops.aten.detach.default:
            return self._stop(operands.call(lambda tensor: tensor))
        if not operands.jets:
            return super().call_function(target, args, kwargs)
        if not isinstance(target, OPERATOR_TYPES):
            return super().call_function(target, args, kwargs)
        rule = rule_of(target)
        found = NotImplemented if rule is None else rule(self._lanes, target, operands)
        return self._nested(target, operands) if found is NotImplemented else found

    def _nested(self, target: Any, operands: Operands) -> Any:
        assert self._node is not None
        origin = origin_of(self._node)
        fallback = Fallback(str(target), "" if origin is None else origin.source)
        if is_draw(self._node) or mutated_args(self._node):
            raise PlanError(
                f"There is no forward derivative of {fallback}: it draws random numbers or changes "
                "what it is given. Take the derivative of a model in eval mode, or in reverse."
            )
        try:
            found = nested_forward(self._lanes, target, operands)
        except (PlanError, RuntimeError) as error:  # PyTorch's, where it has no formula
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            raise PlanError(
                f"There is no forward derivative of order {self._lanes.order} of {fallback}: "
                f"{reason} Take it in reverse."
            ) from error
        self.fallbacks.append(fallback)
        return found


# ---- Closures with their series ------------------------------------------------------------------


@dataclass(frozen=True)
class ForwardRequest:
    """Names a forward derivative: of which closure, for which inputs, with which series."""

    # The primal, without structs, captured for training: tangents stop where grad mode is off.
    closure: Closure
    inputs: tuple[Orders, ...]  # the orders whose coefficients each input has
    series: Series  # which coefficients active values have


@dataclass(frozen=True, eq=False)
class ForwardDerivative:
    """A closure that also computes the coefficients of its results."""

    closure: Closure  # takes and returns the primal's values, then the nonzero coefficients
    inputs: tuple[Orders, ...]  # the orders that it takes for each input of the primal
    outputs: tuple[Orders, ...]  # the orders that it returns for each result; the others are zero
    fallbacks: tuple[Fallback, ...] = ()  # operators without a rule


class ForwardDerivatives:
    """Makes forward derivatives, once per closure, series and pattern of zero coefficients."""

    @once
    def of(self, request: ForwardRequest) -> ForwardDerivative:
        """Returns the forward derivative for a request; PlanError if an operator has none."""
        closure = request.closure
        # No input is active: the closure itself is used, and not compiled a second time.
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
            flowing[value] = _coefficient_values(value, orders, series)
        calls, fallbacks = [], dict[Fallback, None]()
        for call in program.calls:
            # The pattern of zero orders is part of the request; from the second block on it is
            # equal.
            inner = tuple(tuple(flowing.get(v, ())) for v in call.args)
            derivative = self.of(ForwardRequest(call.closure, inner, series))
            fallbacks.update(dict.fromkeys(derivative.fallbacks))
            for value, found in zip(call.results, derivative.outputs, strict=True):
                flowing[value] = _coefficient_values(value, found, series)
            args = (*call.args, *_coefficients(flowing, call.args))
            results = (*call.results, *_coefficients(flowing, call.results))
            calls.append(Call(derivative.closure, args, results, call.path, call.recompute))
        written = {output for output, _ in program.writes}  # buffers have no series
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

    @once
    def _decomposed(self, leaf: Leaf) -> torch.fx.GraphModule:
        return trace_for_rules(leaf.module, flat_types(leaf.input_types), decompositions())

    @without_autocast()
    def _leaf(self, request: ForwardRequest, leaf: Leaf) -> ForwardDerivative:
        _refuse_own_derivatives(leaf)
        plain, series = self._decomposed(leaf), request.series
        lanes = Lanes(series)
        # One traced run on fake tensors gives the derived graph.
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
                lanes.jet(primal, {order: next(rest) for order in orders})
                for primal, orders in zip(primals, request.inputs, strict=True)
            ]
            results = interpreter.run_flat(values)
            outputs[:] = [_orders(result) for result in results]
            return tuple(_with_layouts(lanes, results, leaf.output_types))

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


def _coefficient_values(value: Value, orders: Orders, series: Series) -> dict[int, Value]:
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


def _with_layouts(lanes: Lanes, results: Sequence[Any], types: Sequence[Any]) -> Iterator[Tensor]:
    """Yields the values, then their coefficients, in the layouts of their types."""
    for result, type_ in zip(results, types, strict=True):
        yield with_layout_of(result.primal if isinstance(result, Jet) else result, type_)
    for result, type_ in zip(results, types, strict=True):
        for order in _orders(result):
            wanted = lanes.series.coefficient_type(type_, order)
            yield with_layout_of(lanes.stacked(result, order), wanted)


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
