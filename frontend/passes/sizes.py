"""Passes for sizes that vary: kernels are made once, for symbols, and linked for each shape."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from ...autodiff.derivative import Derivative
from ...backend.kernels.lower import kernel_at
from ...backend.link.link import FlatProgram, Launch
from ...recompute.policy import Budget
from ...recompute.sizes_at import SizesAt
from ...reuse.errors import PlanError
from ...reuse.ir.program import Closure, Composite, Leaf, Program, Value, walk_closures
from ...reuse.ir.torch_symbols import Values, refuse_inexact, tensor_type_at, type_at
from .context import Context, leaves_of
from .memory import (
    chosen,
    is_asked_for,
    module_bytes,
    peaks,
    plan_and_run_module,
    plan_and_run_step,
    step_bytes,
)
from .programs import StepCompilation, capture, repeat_micro_batches
from .state import Compilation, Pass, State, compile_pass


class OverBudgetError(PlanError):
    """A program whose recompute was chosen for other sizes does not keep the budget at these."""


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
    state = capture(state)
    for closure in walk_closures(state.captured.program):
        if isinstance(closure, Leaf):
            refuse_inexact(closure.module)
    return state


@compile_pass("recompute", wanted=is_asked_for)
def choose_recompute_sizes(state: Compilation) -> Compilation:
    """As without symbols, weighed at the sizes of the call at hand (where asked for)."""
    return _chosen(state, (), module_bytes)


@compile_pass("recompute", wanted=is_asked_for)
def choose_step_recompute_sizes(state: StepCompilation) -> StepCompilation:
    """As without symbols, weighed at the sizes of the batch at hand (where asked for)."""
    return _chosen(state, (repeat_micro_batches,), step_bytes)


def _chosen(state: State, before: Sequence[Pass], held_bytes: Callable[[State], int]) -> State:
    values, context = state.captured.sizes.example, state.context
    guessed, made = dict[Leaf, Leaf](), dict[Leaf, Leaf]()

    def held(linked: State) -> int:
        known = made if linked.kernels == "made" else guessed
        for leaf in leaves_of(linked.linked):
            if leaf not in known:
                known[leaf] = (
                    _kernel_at(context, leaf, values) if known is made else sizes.leaf(leaf)
                )
        return held_bytes(_with_numbers(linked, values, known))

    sizes = SizesAt(values)
    try:
        return chosen(state, context.recompute.at(values), peaks(state, before, held))
    finally:
        _forget(context, made)


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
    context, values = state.context, state.values
    leaves = {leaf: _kernel_at(context, leaf, values) for leaf in leaves_of(state.linked)}
    state = plan_and_run(_with_numbers(state, values, leaves))
    for leaf in leaves.values():
        _check_layouts(context.recorded.get(leaf))
    _forget(context, leaves)
    return state


def check_budget(state: AnyShape, held_bytes: Callable[[AnyShape], int]) -> None:
    """Raises OverBudgetError if what was chosen for other sizes holds too much at these."""
    policy = state.context.options.recompute
    limit = policy.saved_bytes if isinstance(policy, Budget) else None
    if limit is None or state.request is None or state.derivative is None:
        return
    held = held_bytes(state)
    if held > limit:
        raise OverBudgetError(f"{held} bytes are held, and the budget is {limit}")


def _kernel_at(context: Context, leaf: Leaf, values: Values) -> Leaf:
    """Makes the kernel of a leaf for numbers; returns the leaf that has it."""
    found, kernel = kernel_at(leaf, context.kernels[leaf], values)
    context.kernels[found] = kernel
    return found


def _forget(context: Context, leaves: Mapping[Leaf, Leaf]) -> None:
    """Drops the kernels of one shape."""
    for of_symbols, leaf in leaves.items():
        if leaf is not of_symbols:
            context.forget(leaf)


def _with_numbers(state: State, values: Values, leaves: Mapping[Leaf, Leaf]) -> State:
    """Returns a linked state with numbers for symbols, given its leaves for them."""
    flats = {name: _flat_at(flat, values, leaves) for name, flat in state.flats.items()}
    derivative = state.derivative and _derivative_at(state.derivative, values)
    return replace(state, flats=flats, derivative=derivative)


def _flat_at(flat: FlatProgram, values: Values, leaves: Mapping[Leaf, Leaf]) -> FlatProgram:
    types = {t: tensor_type_at(t, values) for t in set(flat.slot_types)}
    launches = tuple(
        Launch(leaves[one.leaf], one.operands, one.results, one.frees, one.path)
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
