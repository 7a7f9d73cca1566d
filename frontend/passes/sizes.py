"""Passes for sizes that vary: kernels are made once, for symbols, and linked for each shape."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from ...autodiff.derivative import Derivative
from ...backend.kernels.lower import kernel_at
from ...backend.link.link import FlatProgram, Launch
from ...reuse.errors import PlanError
from ...reuse.ir.program import Closure, Composite, Leaf, Program, Value, walk_closures
from ...reuse.ir.torch_symbols import Values, refuse_inexact, tensor_type_at, type_at
from .context import Context
from .memory import plan_and_run_module, plan_and_run_step
from .programs import StepCompilation, capture, differentiate, differentiate_loss
from .recompute_choice import has_marks
from .state import Compilation, State, compile_pass

_WEIGHS_BYTES = "recompute weighs bytes, which have to be numbers"


@dataclass(frozen=True, kw_only=True)
class ShapeCompilation(Compilation):
    """A program of symbols on its way to one shape.

    Attributes:
        values: the number of each symbol.
    """

    values: Values


@dataclass(frozen=True, kw_only=True)
class StepShapeCompilation(ShapeCompilation, StepCompilation):
    """The same of a training step."""


AnyShape = TypeVar("AnyShape", bound=ShapeCompilation)


@compile_pass("capture")
def capture_sizes(state: Compilation) -> Compilation:
    """As any capture, with a symbol for each size that varies; one that rounds is refused."""
    if state.context.options.recompute is not None:
        raise PlanError(_WEIGHS_BYTES)
    state = capture(state)
    for closure in walk_closures(state.captured.program):
        if isinstance(closure, Leaf):
            refuse_inexact(closure.module)
    return state


@compile_pass("autodiff")
def differentiate_sizes(state: Compilation) -> Compilation:
    """With gradients, a program becomes two; what is saved is not chosen, bytes are symbols."""
    return _saves_what_it_needs(differentiate(state))


@compile_pass("autodiff")
def differentiate_loss_sizes(state: StepCompilation) -> StepCompilation:
    """A micro-batch becomes two programs; what is saved is not chosen, bytes are symbols."""
    return _saves_what_it_needs(differentiate_loss(state))


def _saves_what_it_needs(state: State) -> State:
    """Raises PlanError if a mark wants something computed again."""
    if state.request is not None:
        assert isinstance(state.request.closure, Composite)
        if has_marks(state.request.closure):
            raise PlanError(_WEIGHS_BYTES)
    return state


@compile_pass("link", "flat")
def link_shape(state: ShapeCompilation) -> ShapeCompilation:
    """Numbers take the place of symbols, then memory is planned: the deferred inline."""
    return _at_numbers(state, plan_and_run_module)


@compile_pass("link", "flat")
def link_step_shape(state: StepShapeCompilation) -> StepShapeCompilation:
    """Numbers take the place of symbols, then one arena is planned: the deferred inline."""
    return _at_numbers(state, plan_and_run_step)


def _at_numbers(state: AnyShape, plan_and_run: Callable[[AnyShape], AnyShape]) -> AnyShape:
    """Plans what is linked for the numbers of one shape; kernels of it are kept there only."""
    context, lowered = state.context, dict[Leaf, Leaf]()
    flats = {n: _flat_at(context, f, state.values, lowered) for n, f in state.flats.items()}
    derivative = state.derivative and _derivative_at(state.derivative, state.values)
    state = plan_and_run(replace(state, flats=flats, derivative=derivative))
    for of_symbols, leaf in lowered.items():
        _check_layouts(context.recorded.get(leaf))
        if leaf is not of_symbols:
            context.forget(leaf)
    return state


def _flat_at(
    context: Context, flat: FlatProgram, values: Values, lowered: dict[Leaf, Leaf]
) -> FlatProgram:
    types = {t: tensor_type_at(t, values) for t in set(flat.slot_types)}
    for leaf in (launch.leaf for launch in flat.launches):
        if leaf not in lowered:
            made, kernel = kernel_at(leaf, context.kernels[leaf], values)
            lowered[leaf] = made
            context.kernels[made] = kernel
    launches = tuple(
        Launch(lowered[one.leaf], one.operands, one.results, one.frees, one.path)
        for one in flat.launches
    )
    slot_types = tuple(types[t] for t in flat.slot_types)
    return FlatProgram(flat.inputs, launches, flat.outputs, slot_types)


def _check_layouts(kernels: Any) -> None:
    """Raises PlanError unless what a closure returns is laid out as the program says."""
    for view, type_ in zip(kernels.outputs, kernels.output_types, strict=True) if kernels else ():
        strides = zip(view.shape, view.stride, type_.stride, strict=True)
        if view.shape != type_.shape or any(n > 1 and a != b for n, a, b in strides):
            raise PlanError(f"@{kernels.name} returns strides {view.stride}, not {type_.stride}")


def _derivative_at(derivative: Derivative, values: Values) -> Derivative:
    forward, backward = (_signature(c, values) for c in (derivative.forward, derivative.backward))
    return replace(derivative, forward=forward, backward=backward)


def _signature(closure: Closure, values: Values) -> Composite:
    """Returns a closure of the same types, for those who ask for types only."""
    inputs = tuple(Value(type_at(t, values)) for t in closure.input_types)
    outputs = tuple(Value(type_at(t, values)) for t in closure.output_types)
    return Composite(closure.name, Program(inputs, (), outputs))
