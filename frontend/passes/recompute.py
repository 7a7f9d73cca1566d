"""The recompute pass: measures by trial compiles how much memory each choice would hold."""

from __future__ import annotations

from operator import attrgetter

from ...autodiff.derivative import Request
from ...autodiff.traces.torch_make_fx import SizesAt
from ...reuse.ir.program import Leaf
from ...reuse.ir.torch_symbols import Values
from .context import leaves_of
from .link import held_bytes, linked
from .numbers import forget_numbers, kernel_at_numbers, with_numbers
from .programs import decompose, estimate, lower, repeat_micro_batches, with_derivative
from .recompute_choice import ProgramPeaks
from .state import Compilation, Pass, State, apply, compile_pass


@compile_pass("recompute", goals=("module", "step"), wanted=attrgetter("wants_recompute"))
def choose_recompute(state: State) -> State:
    """Chooses per call what the forward saves and the backward computes again (where asked for)."""
    assert state.request is not None
    sizes, recompute = state.captured.sizes, state.context.recompute
    if sizes is not None:  # measured at the sizes of the call that is compiled
        recompute = recompute.at(sizes.example)
    trials = Trials(state)
    try:
        request = recompute.chosen(state.request, trials.peaks, state.policy)
        return with_derivative(state, request, state.context.differentiator.of(request))
    finally:
        trials.end()


class Trials:
    """Measures the memory that a program holds under a request, by running the later passes."""

    def __init__(self, state: Compilation) -> None:
        self._state = state
        sizes = state.captured.sizes
        self._values = None if sizes is None else sizes.example
        self._sizes = SizesAt(self._values or Values())
        self._made, self._guessed = dict[Leaf, Leaf](), dict[Leaf, Leaf]()
        self.peaks = ProgramPeaks(lambda r: self._held(r, lower), lambda r: self._held(r, estimate))

    def _held(self, request: Request, kernels: Pass) -> int:
        passes = (repeat_micro_batches, decompose, kernels)
        derivative = self._state.context.differentiator.of(request)
        state = linked(apply(passes, with_derivative(self._state, request, derivative)))
        if self._values is None:
            return held_bytes(state)
        known = self._made if state.kernels == "made" else self._guessed
        for leaf in leaves_of(state.linked):
            if leaf not in known:
                known[leaf] = (
                    kernel_at_numbers(state.context, leaf, self._values)
                    if state.kernels == "made"
                    else self._sizes.leaf(leaf)
                )
        return held_bytes(with_numbers(state, self._values, known))

    def end(self) -> None:
        """Drops the kernels that trials made for numbers."""
        forget_numbers(self._state.context, self._made)
