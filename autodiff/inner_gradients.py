"""Replaces derivatives inside a forward: ``torch.autograd.grad`` and Taylor series along lines.

A mark in the captured program names outputs, inputs, and cotangents or directions. The calls from
the inputs to the outputs become forwards that save, and their backwards replace the mark. The
result is again a program that can be differentiated, in training or by another mark. For a series,
the calls become calls that also compute the coefficients of their results; see
:mod:`.forward_mode`. Each different closure is differentiated once.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from ..reuse.errors import CaptureError, PlanError
from ..reuse.ir import program as ir
from ..reuse.ir.leaf import flat_types, stamp_of
from ..reuse.ir.operators import is_draw
from ..reuse.ir.rewrite import FlatStructs
from ..reuse.ir.types import StructType
from .derivative import Derivative, Differentiator, Recipe, Request
from .flows import inlined, needed_calls, with_operands
from .forward_mode.forward_derivative import (
    Fallback,
    ForwardDerivative,
    ForwardDerivatives,
    ForwardRequest,
)
from .forward_mode.jets import Series
from .leaf_derivative import zeros_call
from .traces.torch_interpreters import DIFFERENTIABLE
from .traces.torch_partition import ancestors
from .training_program import backward_calls, own_derivative


@dataclass(frozen=True)
class DerivativeMark:
    """The mark of derivatives inside a forward: the only operator of its leaf, never run.

    It takes outputs, inputs and a cotangent of each output, and returns the gradient of each input.
    With a series it takes outputs, inputs and the directions of each input, and returns the Taylor
    coefficients of each output, order by order.
    """

    num_outputs: int
    num_inputs: int
    series: Series | None = None

    @property
    def __name__(self) -> str:
        return "gradient" if self.series is None else "series"

    def __call__(self, *operands: Any) -> Any:
        """Raises AssertionError."""
        raise AssertionError(f"a {self.__name__} that a forward takes was not made")


@dataclass(frozen=True)
class DerivativeCall:
    """The derivatives that a marked call requests."""

    outputs: tuple[ir.Value, ...]  # the values that are differentiated
    inputs: tuple[ir.Value, ...]  # the values that they are differentiated with respect to
    # A cotangent of each output; for a series the directions of each input.
    seeds: tuple[ir.Value, ...]
    series: Series | None  # which coefficients; None for gradients
    # Pairs of the number of a derivative and the value that it replaces.
    results: tuple[tuple[int, ir.Value], ...]
    source: str  # the user's line


def takes_gradients(program: ir.Program) -> bool:
    """Returns whether a program has a mark of a derivative, at any depth."""
    return any(isinstance(node.target, DerivativeMark) for _, node in ir.leaf_nodes(program))


def derivative_call(call: ir.Call) -> DerivativeCall | None:
    """Returns the derivatives that a call requests, if its closure is a mark."""
    nodes = call.closure.nodes if isinstance(call.closure, ir.Leaf) else ()
    node = next((n for n in nodes if isinstance(n.target, DerivativeMark)), None)
    if node is None:
        return None
    assert isinstance(call.closure, ir.Leaf)
    target = node.target
    assert isinstance(target, DerivativeMark)
    env = dict(zip(call.closure.entries, call.args, strict=True))
    operands = tuple(env[n] for n in node.args)  # type: ignore[index]
    source = stamp_of(node).source
    picks = ir.outputs_of(call.closure.module)
    assert all(n.target is operator.getitem for n in picks)
    picked = [int(n.args[1]) for n in picks]
    results = list(zip(picked, call.results, strict=True))
    first, second = target.num_outputs, target.num_outputs + target.num_inputs
    parts = operands[:first], operands[first:second], operands[second:]
    return DerivativeCall(*parts, target.series, tuple(results), source)


def calls_between(
    calls: Sequence[ir.Call], inputs: Collection[ir.Value], outputs: Collection[ir.Value]
) -> list[ir.Call]:
    """Returns the calls on paths from some values to others, in order."""
    active, reached = set(inputs), []
    for call in calls:
        if not active.isdisjoint(call.args):
            active.update(call.results)
            reached.append(call)
    return needed_calls(reached, outputs)


def refuse_hidden_paths(
    calls: Sequence[ir.Call],
    inputs: Collection[ir.Value],
    asked: DerivativeCall,
    may_depend: Collection[ir.Value],
) -> None:
    """Raises CaptureError if an output may depend on an input in a way that no call shows.

    ``calls`` are those before the gradient; ``may_depend`` are the program's inputs that may be
    functions of other inputs.
    """
    wanted = set(asked.inputs)
    between = calls_between(calls, wanted, asked.outputs)
    if any(result in wanted for call in between for result in call.results):
        raise CaptureError(
            f"The derivative at {asked.source} is by two tensors of which one is computed from the "
            "other, which cannot be followed. Ask for them one by one."
        )
    # Inputs of the program may depend on one another outside of it, where no call shows.
    needed = set(asked.outputs)
    needed.update(v for call in needed_calls(calls, asked.outputs) for v in call.args)
    beside = [v for v in may_depend if v in needed and v not in wanted]
    if beside and not wanted.isdisjoint(inputs):
        raise CaptureError(
            f"The derivative at {asked.source} is by a tensor that was passed in, together with "
            "others that may have been computed from it. Take x.view_as(x) first, and the "
            "derivative by that; or use lazyinline.func.grad."
        )
    for call in calls:
        for value in wanted.intersection(call.results):
            if any(_may_be_of(call, r, value) for r in call.results if r in needed):
                raise CaptureError(
                    f"The derivative at {asked.source} is by a tensor from inside "
                    f"{call.closure.name}, which also returns what it computes of it."
                )


def _may_be_of(call: ir.Call, result: ir.Value, value: ir.Value) -> bool:
    """Returns whether one result of a call may be computed from another."""
    if result is value:
        return False
    if not isinstance(call.closure, ir.Leaf):
        return True
    nodes = dict(zip(call.results, ir.outputs_of(call.closure.module), strict=True))
    return nodes[value] in ancestors([nodes[result]])


Fallbacks: TypeAlias = dict[Fallback, None]
"""Operators that had no rule in Taylor mode, in the order in which they were met."""


class InnerGradients:
    """Replaces the marks of a program by derivatives."""

    def __init__(self) -> None:
        recipe = Recipe(DIFFERENTIABLE, gradients="differentiated")
        self._differentiator = Differentiator(lambda leaf: recipe)
        self._flat = FlatStructs()
        self._forward = ForwardDerivatives()
        self._closures: dict[ir.Closure, tuple[ir.Closure, Fallbacks]] = {}
        self._originals: dict[ir.Closure, ir.Closure] = {}

    def program(self, program: ir.Program) -> tuple[ir.Program, list[Fallback]]:
        """Returns a captured program with its marks replaced, and operators without a Taylor rule.

        The program is the same one if it has no marks. Raises CaptureError if a derivative cannot
        be made.
        """
        given = zip(program.inputs, program.sources, strict=True)
        may_depend = {v for v, s in given if isinstance(s, ir.UserInput) and s.requires_grad}
        fallbacks: Fallbacks = {}
        made = self._made(program, may_depend, fallbacks)
        return made, list(fallbacks)

    def _made(
        self, program: ir.Program, may_depend: Collection[ir.Value], fallbacks: Fallbacks
    ) -> ir.Program:
        """Replaces marks; ``may_depend`` are inputs that may be functions of other inputs."""
        closures = [self._closure(call.closure, fallbacks) for call in program.calls]
        if any(new is not c.closure for new, c in zip(closures, program.calls, strict=True)):
            pairs = zip(program.calls, closures, strict=True)
            program = replace(program, calls=tuple(replace(c, closure=new) for c, new in pairs))
        # One after another: a mark may differentiate the result of an earlier one.
        while True:
            asked = ((i, a) for i, call in enumerate(program.calls) if (a := derivative_call(call)))
            place, one = next(asked, (0, None))
            if one is None:
                return program
            refuse_hidden_paths(program.calls[:place], program.inputs, one, may_depend)
            if one.series is None:
                program = self._flat.program(self._derived(program, place, one))
            else:
                program, found_none = expanded(program, place, one, self._forward)
                fallbacks.update(dict.fromkeys(found_none))

    def _closure(self, closure: ir.Closure, fallbacks: Fallbacks) -> ir.Closure:
        if not isinstance(closure, ir.Composite):
            return closure
        if closure not in self._closures:
            own: Fallbacks = {}
            program = self._made(closure.program, closure.program.inputs, own)
            is_same = program is closure.program
            self._closures[closure] = (
                closure if is_same else replace(closure, program=program),
                own,
            )
        made, own = self._closures[closure]
        fallbacks.update(own)
        return made

    def _derived(self, program: ir.Program, place: int, asked: DerivativeCall) -> ir.Program:
        """Returns the program with the gradients that one mark requests."""
        calls = calls_between(program.calls[:place], asked.inputs, asked.outputs)
        read = {a for call in calls for a in call.args} | set(asked.outputs)
        # Forwards that another gradient has added: their saved values are used again.
        kept = {c for c in calls if c.closure in self._originals and not self._saved(c) & read}
        while True:
            between = DifferentiatedRange(
                program, asked, calls, {c: self._original(c) for c in kept}
            )
            derivative = self._differentiator.of(between.request)
            between.check(derivative)
            if derivative is None:
                remaining = (*program.calls[:place], *program.calls[place + 1 :])
                return replace(program, calls=remaining)
            assert isinstance(derivative.forward, ir.Composite)
            forwards = dict(zip(calls, derivative.forward.program.calls[:-1], strict=True))
            # Such a forward may have saved other values than this gradient needs; then another form
            # of it runs for this one.
            others = {c for c in kept if self._flat.closure(forwards[c].closure) is not c.closure}
            if not others:
                break
            kept -= others
        for call, forward in forwards.items():
            if call not in kept and forward.closure is not call.closure:
                self._originals[self._flat.closure(forward.closure)] = call.closure
        replaced = {c: [f] if c not in kept else _saved_already(c, f) for c, f in forwards.items()}
        return between.spliced(place, derivative, replaced)

    def _saved(self, call: ir.Call) -> set[ir.Value]:
        """Returns the results of a call that its original does not have: saved values.

        If a differentiated call reads one, its gradient flows through that, too.
        """
        return set(call.results[len(self._originals[call.closure].output_types) :])

    def _original(self, call: ir.Call) -> ir.Call:
        """Returns the original of a call that is a saving forward."""
        original = self._originals[call.closure]
        return replace(call, closure=original, results=call.results[: len(original.output_types)])


def _saved_already(call: ir.Call, forward: ir.Call) -> list[ir.Call]:
    """Returns a forward of another gradient, and a pack of the values that it saved."""
    saved = forward.results[-1]
    num_saved = len(flat_types([saved.type]))
    assert isinstance(saved.type, StructType)
    parts = call.results[len(call.results) - num_saved :] if num_saved else ()
    return [call, ir.Call(ir.Pack(saved.type), parts, (saved,))]


@dataclass(frozen=True)
class DifferentiatedRange:
    """The calls from the inputs of a gradient to its outputs."""

    program: ir.Program  # the program of the calls
    asked: DerivativeCall  # the gradient
    calls: Sequence[ir.Call]  # in order
    # For some of the calls, the call that is differentiated instead.
    originals: dict[ir.Call, ir.Call]

    @property
    def wanted(self) -> list[ir.Value]:
        """Returns the values whose gradients are wanted, each once."""
        return list(dict.fromkeys(self.asked.inputs))

    @property
    def seeded(self) -> list[ir.Value]:
        """Returns the outputs that depend on a wanted value: those get a cotangent."""
        made = {*self.wanted, *(result for call in self.calls for result in call.results)}
        return [v for v in dict.fromkeys(self.asked.outputs) if v in made]

    @property
    def request(self) -> Request:
        """Returns the request for the derivative of a closure of the calls."""
        calls = tuple(self.originals.get(call, call) for call in self.calls)
        made = {result for call in calls for result in call.results}
        taken = dict.fromkeys(a for call in calls for a in call.args if a not in made)
        inputs = tuple(dict.fromkeys([*self.wanted, *taken]))
        used = {a for c in self.program.calls if c not in set(self.calls) for a in c.args}
        used |= set(self.program.outputs)
        others = [v for call in calls for v in call.results if v in used and v not in self.seeded]
        body = ir.Program(inputs, calls, (*self.seeded, *others))
        # A custom backward is the user's Python: a second derivative would need it, not the
        # operators that it ran in the trace.
        function = own_derivative(body)
        if function:
            raise CaptureError(
                f"torch.autograd.grad at {self.asked.source} goes through {function}, which has a "
                "derivative of its own (torch.autograd.Function), and cannot be followed."
            )
        closure = ir.Composite("differentiated", body)
        return Request(closure, tuple(range(len(self.wanted))), tuple(range(len(self.seeded))))

    def check(self, derivative: Derivative | None) -> None:
        """Raises CaptureError if a requested gradient does not exist."""
        found = () if derivative is None else derivative.gradient_inputs
        if any(self.wanted.index(self.asked.inputs[i]) not in found for i, _ in self.asked.results):
            raise CaptureError(
                f"torch.autograd.grad at {self.asked.source} gets no gradient: no differentiable "
                "path in the forward leads from what is asked for to the output."
            )

    def spliced(
        self, place: int, derivative: Derivative, replaced: dict[ir.Call, list[ir.Call]]
    ) -> ir.Program:
        """Replaces the calls by forwards that save, and the mark by the backward."""
        assert isinstance(derivative.forward, ir.Composite)
        asked, program, forward = self.asked, self.program, derivative.forward.program
        seed_of = dict(zip(asked.outputs, asked.seeds, strict=True))
        seeds = [seed_of[self.seeded[i]] for i in derivative.cotangent_outputs]
        backward, gradients = backward_calls(derivative, forward, seeds)
        before = [new for call in program.calls[:place] for new in replaced.get(call, [call])]
        found = dict(zip(derivative.gradient_inputs, gradients, strict=True))
        new = {v: found[self.wanted.index(asked.inputs[i])] for i, v in asked.results}
        after = [with_operands(call, new) for call in program.calls[place + 1 :]]
        return replace(
            program,
            calls=(*before, forward.calls[-1], *backward, *after),
            outputs=tuple(new.get(v, v) for v in program.outputs),
        )


def expanded(
    program: ir.Program, place: int, asked: DerivativeCall, derivatives: ForwardDerivatives
) -> tuple[ir.Program, tuple[Fallback, ...]]:
    """Returns a program with the series that one mark requests, and operators without a rule.

    Raises CaptureError if the series cannot be made.
    """
    assert asked.series is not None
    before, after = program.calls[:place], program.calls[place + 1 :]
    between = calls_between(before, asked.inputs, asked.outputs)
    made = {result for call in between for result in call.results}
    outputs = [v for v in dict.fromkeys(asked.outputs) if v in made or v in asked.inputs]
    placed, fallbacks = [*before], tuple[Fallback, ...]()
    found: dict[tuple[ir.Value, int], ir.Value] = {}
    if outputs:
        taken = (a for call in between for a in call.args if a not in made)
        inputs = tuple(dict.fromkeys([*asked.inputs, *taken]))
        body = ir.Program(inputs, tuple(between), tuple(outputs))
        derivative = _derivative(body, asked, derivatives)
        assert isinstance(derivative.closure, ir.Composite)
        beside, fallbacks = derivative.closure.program, derivative.fallbacks
        values, later = _dependent(before, between)
        # If a direction is computed from these calls, they have to come before the series: then
        # they stay, and run a second time with new values.
        is_fed_back = not values.isdisjoint(asked.seeds)
        if is_fed_back:
            again, renamed = inlined(beside, beside.inputs)
            beside = replace(beside, calls=tuple(again), outputs=tuple(renamed))
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
            zeros.append(zeros_call(result))
    rest = [with_operands(call, new) for call in after]
    results = tuple(new.get(v, v) for v in program.outputs)
    return replace(program, calls=(*placed, *zeros, *rest), outputs=results), fallbacks


def _derivative(
    program: ir.Program, asked: DerivativeCall, derivatives: ForwardDerivatives
) -> ForwardDerivative:
    assert asked.series is not None
    leaf = next((leaf for leaf, node in ir.leaf_nodes(program) if is_draw(node)), None)
    if leaf is not None:
        raise CaptureError(
            f"@{leaf.name} draws random numbers between what is asked for at {asked.source} and "
            "what it moves with. Call model.eval(), or set its dropout to 0."
        )
    # Along a line: of an input's coefficients only the first, its direction, is not zero.
    moving = tuple((1,) if v in asked.inputs else () for v in program.inputs)
    try:
        return derivatives.of(ForwardRequest(ir.Composite("along", program), moving, asked.series))
    except PlanError as error:
        raise CaptureError(f"{error} (asked for at {asked.source})") from None


def _called(
    derivative: ForwardDerivative,
    body: ir.Program,
    inputs: Sequence[ir.Value],
    outputs: Sequence[ir.Value],
    asked: DerivativeCall,
) -> tuple[tuple[ir.Call, ...], dict[tuple[ir.Value, int], ir.Value]]:
    """Returns the calls of a derivative, and the value of each coefficient that is not zero."""
    direction_of = dict(zip(asked.inputs, asked.seeds, strict=True))
    moving = [v for v, orders in zip(inputs, derivative.inputs, strict=True) for _ in orders]
    entries = body.inputs[len(inputs) :]
    env = {entry: direction_of[v] for entry, v in zip(entries, moving, strict=True)}
    calls = tuple(with_operands(call, env) for call in body.calls)
    places = [
        (v, order)
        for v, orders in zip(outputs, derivative.outputs, strict=True)
        for order in orders
    ]
    coefficients = (env.get(v, v) for v in body.outputs[len(outputs) :])
    return calls, dict(zip(places, coefficients, strict=True))


def _dependent(
    before: Sequence[ir.Call], between: Sequence[ir.Call]
) -> tuple[set[ir.Value], dict[ir.Call, None]]:
    """Returns the results of calls with all values computed from them, and the later calls."""
    inside = set(between)
    values = {result for call in between for result in call.results}
    later: dict[ir.Call, None] = {}
    for call in before:
        if call not in inside and not values.isdisjoint(call.args):
            values.update(call.results)
            later[call] = None
    return values, later
