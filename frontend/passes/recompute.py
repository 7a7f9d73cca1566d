"""The recompute pass: what is saved is chosen, for a program that is called and for a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...autodiff.derivative import Request
from ...reuse.ir.program import Composite
from .memory import linked, module_bytes, step_bytes
from .programs import (
    StepCompilation,
    decompose,
    estimate,
    lower,
    repeat_micro_batches,
    with_request,
)
from .recompute_choice import ProgramPeaks, Recompute, has_marks
from .state import Compilation, Pass, State, apply, compile_pass


def is_asked_for(state: Compilation) -> bool:
    """Whether a policy or a mark wants something computed again."""
    request = state.request
    if request is None or state.derivative is None:
        return False
    assert isinstance(request.closure, Composite)
    return state.context.options.recompute is not None or has_marks(request.closure)


@compile_pass("recompute", wanted=is_asked_for)
def choose_recompute(state: State) -> State:
    """Per call, what the forward saves and what the backward computes again (where asked for)."""
    return chosen(state, state.context.recompute, peaks(state, (), module_bytes))


@compile_pass("recompute", wanted=is_asked_for)
def choose_step_recompute(state: StepCompilation) -> StepCompilation:
    """Per call, what the forward saves and what the backward computes again (where asked for)."""
    held = peaks(state, (repeat_micro_batches,), step_bytes)
    return chosen(state, state.context.recompute, held)


def chosen(state: State, recompute: Recompute, peaks: ProgramPeaks) -> State:
    """Returns the state with what was chosen."""
    assert state.request is not None
    return with_request(state, recompute.chosen(state.request, peaks))


def peaks(state: State, before: Sequence[Pass], held_bytes: Callable[[State], int]) -> ProgramPeaks:
    """Says what programs hold under a request: each runs the passes that follow, to see."""

    def held(request: Request, kernels: Pass) -> int:
        passes = (*before, decompose, kernels)
        return held_bytes(linked(apply(passes, with_request(state, request))))

    return ProgramPeaks(lambda r: held(r, lower), lambda r: held(r, estimate))
