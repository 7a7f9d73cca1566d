"""Series of functions by forward mode inside forward mode; and how derived closures run."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from models import Around
from torch import Tensor, nn

import lazyinline
from lazyinline.autodiff.forward_mode.forward_derivative import (
    ForwardDerivative,
    ForwardDerivatives,
    ForwardRequest,
)
from lazyinline.autodiff.forward_mode.jets import Series
from lazyinline.reuse.ir.leaf import interpret
from lazyinline.reuse.ir.program import Call, Closure, Composite, ModelTensor, Program, Value
from lazyinline.reuse.ir.types import TensorType
from lazyinline.reuse.ir.verify import verify

Function = Callable[..., Any]
Entry = Literal["curves", "lines"]
Curves = list[list[Tensor]]
"""For each active input its coefficients, one tensor of all directions for each order."""


def captured(model: nn.Module, args: Sequence[Tensor]) -> tuple[Program, list[Tensor]]:
    """Returns the program of a model, and what it is called with."""
    program = lazyinline.capture(model, tuple(args), train=True)
    values = [
        source.tensor.detach() if isinstance(source, ModelTensor) else args[source.index]
        for source in program.sources
    ]
    return program, values


def closure_of(program: Program) -> Composite:
    return Composite("main", replace(program, sources=(), output_tree=None))


def derived(
    closure: Closure,
    active: Sequence[bool],
    series: Series,
    entry: Entry = "curves",
    derivatives: ForwardDerivatives | None = None,
) -> ForwardDerivative:
    """Returns a closure with its series; what enters has all orders, or moves along a line."""
    derivatives = derivatives or ForwardDerivatives()
    moving = (1,) if entry == "lines" else series.orders
    orders = tuple(moving if flag else () for flag in active)
    return derivatives.of(ForwardRequest(closure, orders, series))


def random_like(tensor: Tensor, *lead: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*lead, *tensor.shape, dtype=tensor.dtype, generator=generator)


def curves_for(tensors: Sequence[Tensor], series: Series, entry: Entry) -> Curves:
    """Returns coefficients of every order and direction; on a line, zero from the second on."""
    found: Curves = []
    for index, tensor in enumerate(tensors):
        rows = [
            random_like(tensor, series.directions, seed=10 * index + order) * 0.5
            for order in series.orders
        ]
        found.append([r if k == 0 or entry == "curves" else r * 0 for k, r in enumerate(rows)])
    return found


def nested_series(function: Function, points: Sequence[Tensor], curves: Curves) -> list[Any]:
    """Returns the Taylor coefficients of a function along curves, order by order from 0 on."""
    order = len(curves[0])

    def along(t: Tensor) -> tuple[Tensor, ...]:
        moved = [
            x + sum(c * t**k for k, c in enumerate(row, start=1))
            for x, row in zip(points, curves, strict=True)
        ]
        found = function(*moved)
        return found if isinstance(found, tuple) else (found,)

    def orders(t: Tensor, highest: int) -> tuple[tuple[Tensor, ...], ...]:
        if highest == 0:
            return (along(t),)
        lower, slopes = torch.func.jvp(lambda t: orders(t, highest - 1), (t,), (t * 0 + 1,))
        return (*lower, slopes[-1])

    found = orders(torch.zeros((), dtype=points[0].dtype), order)
    return [[t / math.factorial(k) for t in row] for k, row in enumerate(found)]


def run_series(
    derivative: ForwardDerivative,
    closure: Closure,
    values: Sequence[Tensor],
    curves: Sequence[list[Tensor] | None],
    series: Series,
) -> list[list[Tensor | None]]:
    """Runs a derived closure; returns for each result its value and its coefficients."""
    given = []
    for row, orders in zip(curves, derivative.inputs, strict=True):
        for order in orders:
            assert row is not None
            given.append(row[order - 1].sum(0) if series.is_sum(order) else row[order - 1])
    called = derivative.closure
    program = called.program if isinstance(called, Composite) else one_call(called)
    verify(program)
    laid = [
        torch.empty_strided(v.type.shape, v.type.stride, dtype=v.type.dtype).copy_(t)
        for v, t in zip(program.inputs, [*values, *given], strict=True)
        if isinstance(v.type, TensorType)
    ]
    results = interpret(program, laid)
    for result, value in zip(results, program.outputs, strict=True):
        assert TensorType.of(result) == value.type
    count = len(derivative.outputs)
    rest = iter(results[count:])
    rows: list[list[Tensor | None]] = []
    for value, orders in zip(results[:count], derivative.outputs, strict=True):
        found = {order: next(rest) for order in orders}
        rows.append([value, *(found.get(k) for k in series.orders)])
    return rows


def one_call(closure: Closure) -> Program:
    inputs = tuple(Value(t) for t in closure.input_types)
    outputs = tuple(Value(t) for t in closure.output_types)
    return Program(inputs, (Call(closure, inputs, outputs),), outputs)


def assert_series(
    function: Function | None,
    tensors: Sequence[Tensor],
    series: Series,
    *,
    active: Sequence[bool] | None = None,
    entry: Entry = "curves",
    model: nn.Module | None = None,
    derivatives: ForwardDerivatives | None = None,
    reference: Function | None = None,
) -> ForwardDerivative:
    """Compares a function's derived closure with forward mode inside forward mode.

    Args:
        function: of the tensors; None if there is a model.
        tensors: its inputs.
        series: what flows.
        active: which inputs move; all of them unless said.
        entry: along what.
        model: in place of a function.
        derivatives: makes the closure.
        reference: what PyTorch differentiates, where it gets the function itself wrong.
    """
    flags = [True] * len(tensors) if active is None else list(active)
    program, values = captured(
        model or Around(lambda _, *args: function and function(*args)), tensors
    )
    closure = closure_of(program)
    moving = []
    for source in program.sources:
        moving.append(not isinstance(source, ModelTensor) and flags[source.index])
    derivative = derived(closure, moving, series, entry, derivatives)
    points = [t for t, flag in zip(tensors, flags, strict=True) if flag]
    curves = dict(
        zip([i for i, f in enumerate(flags) if f], curves_for(points, series, entry), strict=True)
    )
    given = [
        curves.get(source.index) if flag and not isinstance(source, ModelTensor) else None
        for source, flag in zip(program.sources, moving, strict=True)
    ]
    found = run_series(derivative, closure, values, given, series)

    def of_active(*moved: Tensor) -> Any:
        rest = iter(moved)
        args = [next(rest) if f else t for t, f in zip(tensors, flags, strict=True)]
        return (reference or model or function)(*args)

    compare(found, of_active, points, list(curves.values()), series)
    return derivative


def compare(
    found: list[list[Tensor | None]],
    function: Function,
    points: Sequence[Tensor],
    curves: Curves,
    series: Series,
) -> None:
    expected = [
        nested_series(function, points, [[c[k] for c in row] for row in curves])
        for k in range(series.directions)
    ]
    for place, row in enumerate(found[: len(expected[0][0])]):  # then what buffers become
        for order, actual in enumerate(row):
            if order == 0:
                wanted = expected[0][0][place]
            else:
                rows = [e[order][place] for e in expected]
                wanted = torch.stack(rows).sum(0) if series.is_sum(order) else torch.stack(rows)
            if actual is None:
                actual = torch.zeros_like(wanted)
            say = lambda m, p=place, o=order: f"result {p}, order {o}: {m}"  # noqa: E731
            torch.testing.assert_close(actual, wanted.detach(), rtol=1e-9, atol=1e-10, msg=say)
