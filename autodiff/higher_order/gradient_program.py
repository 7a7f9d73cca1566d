"""The gradients of a program as a program, to be differentiated like any other.

Each different closure is differentiated once, into halves whose operators have a derivative in
their turn; they are taken apart and cut for memory only after the last derivative. So it goes to
any order: the gradients of this program are again such a program.

A derivative saves into a struct, which is opaque. Gradients have to flow through what is saved, one
for each tensor, so a program of gradients passes what structs hold tensor by tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import BuiltinFunctionType

from ...reuse.ir.leaf import flat_types
from ...reuse.ir.program import (
    Call,
    Closure,
    Composite,
    Leaf,
    Pack,
    Program,
    Source,
    Unpack,
    Value,
    walk_closures,
)
from ...reuse.ir.types import StructType
from ...reuse.torch_names import OPERATOR_TYPES
from ..derivative import Differentiator, Recipe, Request
from ..flows import Draws
from ..traces.torch_differentiable import DIFFERENTIABLE
from ..training_program import training_program


class FlatStructs:
    """Takes structs apart, once per closure."""

    def __init__(self) -> None:
        self._closures: dict[Closure, Closure] = {}

    def program(self, program: Program) -> Program:
        """Returns the program with each struct value as the values in it."""
        parts: dict[Value, tuple[Value, ...]] = {}

        def taken(values: Sequence[Value]) -> tuple[Value, ...]:
            return tuple(part for value in values for part in parts[value])

        for value in program.inputs:
            parts[value] = _parts(value)
        calls = []
        for call in program.calls:
            if isinstance(call.closure, Pack):
                parts[call.results[0]] = taken(call.args)
            elif isinstance(call.closure, Unpack):
                rest = list(parts[call.args[0]])
                for value in call.results:
                    number = len(flat_types([value.type]))
                    parts[value], rest = tuple(rest[:number]), rest[number:]
            else:
                parts.update((value, _parts(value)) for value in call.results)
                args, results = taken(call.args), taken(call.results)
                calls.append(Call(self.closure(call.closure), args, results, call.path))
        return replace(
            program,
            inputs=taken(program.inputs),
            calls=tuple(calls),
            outputs=taken(program.outputs),
        )

    def closure(self, closure: Closure) -> Closure:
        """Returns the closure without struct values, the same one each time."""
        if closure not in self._closures:
            self._closures[closure] = self._made(closure)
        return self._closures[closure]

    def _made(self, closure: Closure) -> Closure:
        if isinstance(closure, Composite):
            return Composite(closure.name, self.program(closure.program))
        assert isinstance(closure, Leaf)
        if not any(
            isinstance(t, StructType) for t in (*closure.input_types, *closure.output_types)
        ):
            return closure
        inputs, outputs = flat_types(closure.input_types), flat_types(closure.output_types)
        # Its graph takes and gives single tensors as it is.
        return replace(
            closure, input_types=tuple(inputs), output_types=tuple(outputs), input_names=()
        )


def _parts(value: Value) -> tuple[Value, ...]:
    if not isinstance(value.type, StructType):
        return (value,)
    return tuple(Value(type_, value.hint) for type_ in flat_types([value.type]))


@dataclass(frozen=True)
class GradientProgram:
    """The gradients of a program.

    Attributes:
        program: takes what the program takes, then a cotangent for each of ``outputs``.
        outputs: of the program, those that gradients come from.
        inputs: of the program, those whose gradients are the results.
    """

    program: Program
    outputs: tuple[int, ...]
    inputs: tuple[int, ...]


class GradientPrograms:
    """Makes programs of gradients; what it makes per closure is kept for the next."""

    def __init__(self) -> None:
        recipe = Recipe(DIFFERENTIABLE, gradients="differentiated")
        self._differentiator = Differentiator(lambda leaf: recipe)
        self._flat = FlatStructs()

    def of(
        self,
        program: Program,
        inputs: Sequence[int],
        outputs: Sequence[int],
        sources: Sequence[Source],
    ) -> GradientProgram | None:
        """Returns the program of gradients; None if none flows.

        Args:
            program: an entry program.
            inputs: positions of the inputs whose gradients are wanted.
            outputs: positions of the outputs that have a cotangent.
            sources: of what the program takes, then of a cotangent for each output.
        """
        closure = Composite("main", replace(program, sources=()))
        request = Request(closure, tuple(inputs), tuple(outputs))
        derivative = self._differentiator.of(request)
        if derivative is None:
            return None
        seeded = derivative.cotangent_outputs
        own, seeds = sources[: len(program.inputs)], sources[len(program.inputs) :]
        used = [seed for output, seed in zip(outputs, seeds, strict=True) if output in seeded]
        both = training_program(replace(program, sources=tuple(own)), derivative, used)
        gradients = both.outputs[len(program.outputs) :]
        # Whoever reads what they draw: those behind them draw what comes next.
        draws = Draws()
        drawing = [call for call in both.calls if draws.of_closure(call.closure)]
        drawn = [value for call in drawing for value in call.results]
        calls = needed_calls(both.calls, (*gradients, *drawn))
        alone = Program(both.inputs, calls, gradients, both.sources)
        flat = self._flat.program(alone)
        return GradientProgram(flat, seeded, derivative.gradient_inputs)


def needed_calls(calls: Sequence[Call], outputs: Sequence[Value]) -> tuple[Call, ...]:
    """Returns the calls that some outputs are computed from."""
    needed, kept = set(outputs), []
    for call in reversed(calls):
        if any(result in needed for result in call.results):
            needed.update(call.args)
            kept.append(call)
    return tuple(reversed(kept))


def own_derivative(program: Program) -> str:
    """Names a function of the user's that has a derivative of its own; "" if there is none.

    Its operators would be differentiated a second time, and it would not.
    """
    leaves = (c for c in walk_closures(program) if isinstance(c, Leaf))
    targets = (node.target for leaf in leaves for node in leaf.nodes)
    own = (t for t in targets if not isinstance(t, (*OPERATOR_TYPES, BuiltinFunctionType)))
    return next((str(getattr(target, "__name__", target)) for target in own), "")
