"""Random programs with a derivative: forward and backward as the two parts of one plan."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from programs import random_arguments, random_program, random_value

from lazyinline.autodiff.derivative import Derivative, Differentiator, Recipe
from lazyinline.backend.run.planned import PlannedProgram, Runtime
from lazyinline.reuse.ir.leaf import flat_types, interpret
from lazyinline.reuse.ir.program import Composite, Program


@dataclass(frozen=True)
class Halves:
    """A program in which a gradient flows, and its derivative."""

    program: Program
    derivative: Derivative

    @property
    def programs(self) -> list[Program]:
        """Forward and backward."""
        halves = self.derivative.forward, self.derivative.backward
        return [half.program for half in halves if isinstance(half, Composite)]

    @property
    def cotangents(self) -> Sequence[Any]:
        """The types of what the backward is given from outside."""
        return self.derivative.backward.input_types[-len(self.derivative.cotangent_outputs) :]

    @property
    def num_saved(self) -> int:
        """How many tensors the forward saves."""
        return len(flat_types([self.derivative.saved_type]))

    @property
    def options(self) -> dict[str, Any]:
        """What a plan of both parts is told of them."""
        made, num_results = self.derivative, len(self.program.outputs)
        sources: list[tuple[str, Any]] = [
            ("output", num_results + i) for i in range(self.num_saved)
        ]
        sources += [("input", i) for i in made.kept_inputs]
        sources += [("output", i) for i in made.kept_outputs]
        sources += [("new", t) for t in self.cotangents]
        return {"num_results": [num_results, len(made.gradient_inputs)], "backward_inputs": sources}

    def runtime(self, planned: PlannedProgram) -> Runtime:
        """Returns what runs a plan of both."""
        return Runtime(planned, len(self.program.outputs), self.num_saved)

    def arguments(self, seed: int, generator: torch.Generator) -> tuple[list[Any], list[Any]]:
        """Returns random arguments for the forward, and cotangents for the backward."""
        args = random_arguments(self.program, seed)
        return args, [random_value(t, generator) for t in self.cotangents]

    def handed(self, args: Any, results: Any, seeds: Sequence[Any]) -> list[Any]:
        """Returns what the backward is handed besides what was saved."""
        kept = [args[i] for i in self.derivative.kept_inputs]
        return [*kept, *(results[i] for i in self.derivative.kept_outputs), *seeds]

    def interpreted(self, args: Any, seeds: Sequence[Any]) -> tuple[list[Any], Any]:
        """Returns the results and the gradients, by the interpreter."""
        forward, backward = self.programs
        *results, saved = interpret(forward, args)
        return results, interpret(backward, [saved, *self.handed(args, results, seeds)])


@functools.cache
def differentiated(seed: int) -> Halves:
    """Returns the first random program from a seed on in which a gradient flows."""
    for candidate in range(seed, seed + 20_000, 1000):
        program = random_program(candidate, structs=False)
        wanted = [i for i, v in enumerate(program.inputs) if v.type.is_differentiable]
        outputs = list(range(len(program.outputs)))
        derivative = Differentiator(lambda leaf: Recipe()).vjp(
            Composite("main", program), wanted, outputs
        )
        if derivative is not None:
            return Halves(program, derivative)
    raise AssertionError("no gradient flows in twenty programs")
