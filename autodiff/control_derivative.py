"""Derivatives of control flow: control flow over the derivatives of the bodies.

The backward of a choice recomputes the forward of the chosen body, then runs its backward: to save
values would need memory for both bodies. The backward of a repetition takes the steps from last to
first. Each step's forward saves a row of what its backward needs, so that nothing is recomputed;
gradients of operands that are the same in each step are added up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Protocol

import torch

from ..reuse.errors import CaptureError
from ..reuse.ir import program as ir
from ..reuse.ir.control import Choose, Repeat, control_leaf, stacked_type
from ..reuse.ir.leaf import flat_types
from ..reuse.ir.rewrite import packed, unpacked
from ..reuse.ir.types import StructType, TensorType, Type
from .leaf_derivative import Derivative, Request, Whole, cotangent_type
from .traces.torch_make_fx import traced_operator

_FULL = torch.ops.aten.full.default


class _Differentiator(Protocol):
    """Makes the derivatives of bodies; see :class:`.derivative.Differentiator`."""

    def of(self, request: Request) -> Derivative | None: ...
    def active_outputs(self, closure: ir.Closure, active: Sequence[bool]) -> tuple[bool, ...]: ...
    def adder(self, type_: TensorType) -> ir.Leaf: ...


def control_derivative(
    differentiator: _Differentiator, asked: Request, control: ir.Control
) -> Derivative | None:
    """Returns a control-flow operator's derivative, or None; CaptureError for a while_loop."""
    if isinstance(control, Choose):
        return _of_choice(differentiator, asked, control)
    if isinstance(control, Repeat):
        return _Repeated(differentiator, asked, control).derivative()
    raise CaptureError(
        "A while_loop has no derivative: how many steps it takes is known only when it runs, and a "
        "backward takes as many. Use scan, or map, whose number of steps is known."
    )


# ---- a choice ------------------------------------------------------------------------------------


def _of_choice(
    differentiator: _Differentiator, asked: Request, control: Choose
) -> Derivative | None:
    leaf = asked.closure
    assert isinstance(leaf, ir.Leaf)
    inputs = tuple(i - 1 for i in asked.inputs if i)  # the bodies do not take the predicate
    again = [Request(body, inputs, asked.outputs, Whole()) for body in control.bodies]
    found = [differentiator.of(one) for one in again]
    made = [one for one in found if one is not None]
    if not made:
        return None
    seeded = sorted({i for one in made for i in one.cotangent_outputs})
    gradients = sorted({i for one in made for i in one.gradient_inputs})
    bodies = tuple(
        _backward_branch(body, one, seeded, gradients)
        for body, one in zip(control.bodies, found, strict=True)
    )
    seeds = [ir.Value(cotangent_type(leaf.output_types[i])) for i in seeded]
    operands = _inputs(leaf)
    backward = _call(f"{leaf.name}.backward", Choose(bodies), [*operands, *seeds])
    results, pack = tuple(ir.Value(t) for t in leaf.output_types), packed(())
    entry = ir.Value(StructType(()), "saved")
    forward = (ir.Call(leaf, tuple(operands), results), pack)
    return Derivative(
        _composite(f"{leaf.name}.forward", operands, forward, (*results, *pack.results)),
        _composite(
            backward.closure.name,
            (entry, *operands, *seeds),
            (unpacked(entry), backward),
            backward.results,
        ),
        tuple(range(len(operands))),
        (),
        tuple(seeded),
        tuple(i + 1 for i in gradients),
    )


def _backward_branch(
    body: ir.Composite,
    derivative: Derivative | None,
    seeded: Sequence[int],
    gradients: Sequence[int],
) -> ir.Composite:
    """Returns the closure that computes a body's gradients from its operands and cotangents."""
    operands = _inputs(body)
    seeds = {i: ir.Value(cotangent_type(body.output_types[i])) for i in seeded}
    calls, found = list[ir.Call](), {}
    if derivative is not None:
        saved = _packed(derivative.saved_type, iter(()), calls)  # empty: bodies draw nothing
        calls.append(_backward_call(derivative, saved, operands, (), seeds))
        found = dict(zip(derivative.gradient_inputs, calls[-1].results, strict=True))
    for i in gradients:
        if i not in found:
            found[i] = ir.Value(cotangent_type(body.input_types[i]), "zeros")
            calls.append(zeros_call(found[i]))
    outputs = [found[i] for i in gradients]
    return _composite(f"{body.name}.backward", (*operands, *seeds.values()), calls, outputs)


# ---- a repetition --------------------------------------------------------------------------------


class _Repeated:
    """Makes the derivative of a repetition from that of its body."""

    def __init__(self, differentiator: _Differentiator, asked: Request, control: Repeat) -> None:
        assert isinstance(asked.closure, ir.Leaf)
        self._leaf, self._control, self._asked = asked.closure, control, asked
        self._adder = differentiator.adder
        self._body = control.bodies[0]
        self._num_carried = control.num_carried
        self._first_same = control.num_carried + control.num_scanned
        self._active = self._carried_actively(differentiator)
        wanted = sorted({*self._active, *(i for i in asked.inputs if i >= control.num_carried)})
        seeded = {*self._active, *(i for i in asked.outputs if i >= control.num_carried)}
        step = Request(self._body, tuple(wanted), tuple(sorted(seeded)))
        self._step = differentiator.of(step)
        # A tensor with gaps cannot be stacked: then each step of the backward recomputes the step's
        # forward, whose saved values stay inside the step.
        if self._step is not None and not _are_dense(flat_types([self._step.saved_type])):
            self._step = differentiator.of(replace(step, choice=Whole()))

    def _carried_actively(self, differentiator: _Differentiator) -> list[int]:
        """Returns the carried operands that may depend on an input whose gradient is wanted."""
        types = flat_types(self._body.input_types)
        flags = [i in self._asked.inputs for i in range(len(types))]
        while True:
            found = differentiator.active_outputs(self._body, flags)[: self._num_carried]
            now = [a or b for a, b in zip(flags, found, strict=False)] + flags[len(found) :]
            if now == flags:
                carried = range(self._num_carried)
                return [i for i in carried if flags[i] and types[i].is_differentiable]
            flags = now

    def derivative(self) -> Derivative | None:
        """Builds the pair."""
        step = self._step
        if step is None or not self._gradients:
            return None
        forward, saved = self._forward(step)
        return Derivative(
            forward,
            self._backward(step, saved),
            self._kept_inputs(step),
            tuple(i for i in step.kept_outputs if i >= self._num_carried),
            self._seeded(step),
            tuple(self._gradients),
        )

    @property
    def _gradients(self) -> list[int]:
        """The operands that get a gradient."""
        assert self._step is not None
        found = {*self._active, *self._step.gradient_inputs}
        return [i for i in self._asked.inputs if i in found]

    def _kept_inputs(self, step: Derivative) -> tuple[int, ...]:
        return tuple(i for i in step.kept_inputs if i >= self._num_carried)

    def _seeded(self, step: Derivative) -> tuple[int, ...]:
        used = {*self._active, *step.cotangent_outputs}
        return tuple(i for i in self._asked.outputs if i in used)

    def _forward(self, step: Derivative) -> tuple[ir.Composite, list[TensorType]]:
        """Returns the forward, and the types of the rows that each step saves for the backward."""
        body, control, count = self._body, self._control, self._num_carried
        inputs = _inputs(body)
        results = [ir.Value(t) for t in body.output_types]
        saved = ir.Value(step.saved_type, "saved")
        calls = [ir.Call(step.forward, tuple(inputs), (*results, saved))]
        left = list(_taken_apart(saved, calls))
        left += [inputs[i] for i in step.kept_inputs if i < count]
        left += [results[i] for i in step.kept_outputs if i < count]
        name = f"{body.name}.forward"
        made = _composite(name, inputs, calls, (*results, *left))
        rows = flat_types(value.type for value in left)
        assert _are_dense(rows), "the launches of the backward read rows by their types"
        operands = _inputs(self._leaf)
        call = _call(f"{self._leaf.name}.forward", replace(control, bodies=(made,)), operands)
        number = len(self._leaf.output_types)
        pack = packed(call.results[number:])
        outputs = (*call.results[:number], *pack.results)
        return _composite(call.closure.name, operands, (call, pack), outputs), rows

    def _backward(self, step: Derivative, left: Sequence[TensorType]) -> ir.Composite:
        leaf, control, count = self._leaf, self._control, self._num_carried
        made, sums = self._backward_step(step, left)
        struct = StructType(tuple(stacked_type(t, control.num_steps) for t in left))
        entry = ir.Value(struct, "saved")
        calls = [unpacked(entry)]
        rows = list(calls[0].results)
        kept = {i: ir.Value(leaf.input_types[i]) for i in self._kept_inputs(step)}
        results = {i: ir.Value(leaf.output_types[i]) for i in step.kept_outputs if i >= count}
        seeds = {i: ir.Value(cotangent_type(leaf.output_types[i])) for i in self._seeded(step)}
        carried = []
        for i in (*self._active, *sums):
            seed = seeds.get(i) if i < count else None
            if seed is None:
                seed = ir.Value(cotangent_type(leaf.input_types[i]), "zeros")
                calls.append(zeros_call(seed))
            carried.append(seed)
        rows += [value for i, value in kept.items() if i < self._first_same]
        rows += results.values()
        rows += [seeds[i] for i in step.cotangent_outputs if i >= count]
        same = [value for i, value in kept.items() if i >= self._first_same]
        turned = Repeat(
            (made,), control.num_steps, len(carried), len(rows), 1 - control.is_reversed
        )
        calls.append(_call(f"{leaf.name}.backward", turned, [*carried, *rows, *same]))
        scanned = [i for i in step.gradient_inputs if count <= i < self._first_same]
        found = dict(zip([*self._active, *sums, *scanned], calls[-1].results, strict=True))
        entries = (entry, *kept.values(), *results.values(), *seeds.values())
        outputs = [found[i] for i in self._gradients]
        return _composite(f"{leaf.name}.backward", entries, calls, outputs)

    def _backward_step(
        self, step: Derivative, left: Sequence[TensorType]
    ) -> tuple[ir.Composite, list[int]]:
        """Returns the body of the backward, and the operands whose gradients it adds up."""
        body, count = self._body, self._num_carried
        sums = [i for i in step.gradient_inputs if i >= self._first_same]
        cotangents = {i: ir.Value(cotangent_type(body.input_types[i])) for i in self._active}
        totals = {i: ir.Value(cotangent_type(body.input_types[i])) for i in sums}
        rows = [ir.Value(t) for t in left]
        inputs = {i: ir.Value(body.input_types[i]) for i in self._kept_inputs(step)}
        outputs = {i: ir.Value(body.output_types[i]) for i in step.kept_outputs if i >= count}
        seeds = {
            i: ir.Value(cotangent_type(body.output_types[i]))
            for i in step.cotangent_outputs
            if i >= count
        }
        entries = [
            *cotangents.values(),
            *totals.values(),
            *rows,
            *(value for i, value in inputs.items() if i < self._first_same),
            *outputs.values(),
            *seeds.values(),
            *(value for i, value in inputs.items() if i >= self._first_same),
        ]
        calls: list[ir.Call] = []
        rest = iter(rows)
        saved = _packed(step.saved_type, rest, calls)
        inputs |= {i: next(rest) for i in step.kept_inputs if i < count}
        outputs |= {i: next(rest) for i in step.kept_outputs if i < count}
        calls.append(_backward_call(step, saved, inputs, outputs, {**cotangents, **seeds}))
        found = dict(zip(step.gradient_inputs, calls[-1].results, strict=True))
        for i in self._active:
            if i not in found:  # no gradient flows back to the step before
                found[i] = ir.Value(cotangent_type(body.input_types[i]), "zeros")
                calls.append(zeros_call(found[i]))
        for i in sums:
            type_ = cotangent_type(body.input_types[i])
            total = ir.Value(type_)
            calls.append(ir.Call(self._adder(type_), (totals[i], found[i]), (total,)))
            found[i] = total
        scanned = [i for i in step.gradient_inputs if count <= i < self._first_same]
        returned = [found[i] for i in (*self._active, *sums, *scanned)]
        return _composite(f"{body.name}.backward", entries, calls, returned), sums


# ---- calls ---------------------------------------------------------------------------------------


def _inputs(closure: ir.Leaf | ir.Composite) -> list[ir.Value]:
    """Returns a value for each operand of a closure, with its name."""
    names = closure.input_names or [""] * len(closure.input_types)
    return [ir.Value(t, n) for t, n in zip(closure.input_types, names, strict=True)]


def _are_dense(types: Sequence[TensorType]) -> bool:
    return all(type_.is_dense for type_ in types)


def _call(name: str, control: Choose | Repeat, operands: Sequence[ir.Value]) -> ir.Call:
    """Returns a call of a new control-flow operator on ``operands``."""
    body = control.bodies[0]
    types = flat_types(body.output_types)
    if isinstance(control, Repeat):
        carried, rows = types[: control.num_carried], types[control.num_carried :]
        types = [*carried, *(stacked_type(row, control.num_steps) for row in rows)]
    leaf = control_leaf(name, control, flat_types(v.type for v in operands), types)
    return ir.Call(leaf, tuple(operands), tuple(map(ir.Value, types)))


def _backward_call(
    derivative: Derivative,
    saved: ir.Value,
    inputs: Sequence[ir.Value] | dict[int, ir.Value],
    outputs: Sequence[ir.Value] | dict[int, ir.Value],
    seeds: dict[int, ir.Value],
) -> ir.Call:
    """Returns the call of a body's backward."""
    args = (
        saved,
        *(inputs[i] for i in derivative.kept_inputs),
        *(outputs[i] for i in derivative.kept_outputs),
        *(seeds[i] for i in derivative.cotangent_outputs),
    )
    results = tuple(map(ir.Value, derivative.backward.output_types))
    return ir.Call(derivative.backward, args, results)


def _composite(
    name: str, inputs: Sequence[ir.Value], calls: Sequence[ir.Call], outputs: Sequence[ir.Value]
) -> ir.Composite:
    program = ir.Program(tuple(inputs), tuple(calls), tuple(outputs))
    return ir.Composite(name, program, tuple(v.hint for v in inputs))


def _taken_apart(value: ir.Value, calls: list[ir.Call]) -> Iterator[ir.Value]:
    """Yields the tensors in a struct; adds the calls that take it apart."""
    if isinstance(value.type, TensorType):
        yield value
        return
    calls.append(unpacked(value))
    for field in calls[-1].results:
        yield from _taken_apart(field, calls)


def _packed(type_: Type, tensors: Iterator[ir.Value], calls: list[ir.Call]) -> ir.Value:
    """Returns a struct of tensors; adds the calls that make it."""
    if isinstance(type_, TensorType):
        return next(tensors)
    calls.append(packed([_packed(field, tensors, calls) for field in type_.fields]))
    return calls[-1].results[0]


def zeros_call(value: ir.Value) -> ir.Call:
    """Returns the call that makes a value of zeros."""
    type_ = ir.tensor_type(value)
    options = {"dtype": type_.dtype, "device": type_.device, "layout": torch.strided}
    module = traced_operator(_FULL, (), type_, [list(type_.shape), 0], options)
    return ir.Call(ir.Leaf("zeros", module, (), (type_,), kernels="compiled"), (), (value,))
