"""The gradients of a program as a program, to be differentiated like any other.

Each different closure is differentiated once, into halves whose operators have a derivative in
their turn; they are taken apart and cut for memory only after the last derivative. So it goes to
any order: the gradients of this program are again such a program.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import BuiltinFunctionType

from ...reuse.ir.program import Composite, Control, Leaf, Program, Source, walk_closures
from ...reuse.torch_names import OPERATOR_TYPES
from ..derivative import Differentiator, Recipe, Request
from ..flat_structs import FlatStructs
from ..flows import Draws, needed_calls
from ..traces.torch_differentiable import DIFFERENTIABLE
from ..training_program import training_program


@dataclass(frozen=True)
class GradientProgram:
    """Holds the gradients of a program as a program.

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
        # Sources belong to entry programs; a closure's has none.
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
        calls = tuple(needed_calls(both.calls, (*gradients, *drawn)))
        alone = Program(both.inputs, calls, gradients, both.sources)
        flat = self._flat.program(alone)
        return GradientProgram(flat, seeded, derivative.gradient_inputs)


def own_derivative(program: Program) -> str:
    """Names a function of the user's that has a derivative of its own; "" if there is none.

    Its operators would be differentiated a second time, and it would not.
    """
    leaves = (c for c in walk_closures(program) if isinstance(c, Leaf))
    targets = (node.target for leaf in leaves for node in leaf.nodes)
    known = (*OPERATOR_TYPES, BuiltinFunctionType, Control)
    own = (t for t in targets if not isinstance(t, known))
    return next((str(getattr(target, "__name__", target)) for target in own), "")
