"""A program and its derivative as the two parts that are linked: a forward, and its backward."""

from __future__ import annotations

from typing import Any

from ..autodiff.derivative import Derivative
from ..reuse.ir.leaf import flat_types
from ..reuse.ir.program import Composite, Program


def programs_of(program: Program, derivative: Derivative | None) -> list[Program]:
    """Returns the programs that run: the forward, and the backward if there is a derivative."""
    if derivative is None:
        return [program]
    assert isinstance(derivative.forward, Composite)
    assert isinstance(derivative.backward, Composite)
    return [derivative.forward.program, derivative.backward.program]


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


def why_written(program: Program, derivative: Derivative | None) -> str:
    """Why memory cannot be planned because of a buffer of the model that changes, if so."""
    written = {target for _, target in program.writes}
    if derivative is not None and written & set(derivative.kept_inputs):
        return "the forward changes a buffer whose old value the backward needs"
    return ""
