"""A program and its derivative as the two parts that are linked: a forward, and its backward."""

from __future__ import annotations

from typing import Any

from ...autodiff.derivative import Derivative
from ...reuse.ir.leaf import flat_types
from ...reuse.ir.program import Composite, Program

PARTS = ("forward", "backward")


def programs_of(derivative: Derivative) -> dict[str, Program]:
    """Returns the programs that run, by name."""
    assert isinstance(derivative.forward, Composite)
    assert isinstance(derivative.backward, Composite)
    programs = (derivative.forward.program, derivative.backward.program)
    return dict(zip(PARTS, programs, strict=True))


def returned_of(
    program: Program, derivative: Derivative | None
) -> tuple[list[int], list[tuple[str, Any]]]:
    """How many outputs of each part the user receives, and where a backward's inputs come from."""
    num_results = len(program.outputs)
    if derivative is None:
        return [num_results], []
    num_saved = len(flat_types([derivative.saved_type]))
    returned = [num_results, len(derivative.gradient_inputs)]
    return returned, _backward_sources(derivative, num_results, num_saved)


def _backward_sources(
    derivative: Derivative, num_results: int, num_saved: int
) -> list[tuple[str, Any]]:
    """Says where each flat input of the backward comes from."""
    types = derivative.backward.input_types[-len(derivative.cotangent_outputs) :]
    sources: list[tuple[str, Any]] = [("output", num_results + i) for i in range(num_saved)]
    sources += [("input", i) for i in derivative.kept_inputs]
    sources += [("output", i) for i in derivative.kept_outputs]
    return [*sources, *(("new", t) for t in types)]
