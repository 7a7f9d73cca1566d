"""One compile between two passes, what a pass is, and what runs a list of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, TypeVar

from torch import nn

from ...autodiff.derivative import Derivative, Request
from ...backend.link.link import FlatProgram, check_flat
from ...reuse.ir.program import Program
from ...reuse.ir.verify import ProgramLevel, verify
from ...reuse.torch_names import lazy_modules
from ..capture.regions import CapturedModel, Sizes
from ..capture.surroundings import one_at_a_time
from ..effects.effects import OnEffects
from ..report import CompileReport
from .context import Context

VERIFY_VARIABLE = "LAZYINLINE_VERIFY"
"""The environment variable that has every program verified after each pass."""


@dataclass(frozen=True)
class Unplanned:
    """Why the memory of a program is not planned."""

    reason: str


@dataclass(frozen=True)
class Subject:
    """What is compiled: a model, and example inputs of which only the layouts count.

    Attributes:
        train: whether gradients are wanted.
        effects: what becomes of a forward that does more than compute, see ``capture_model``.
        sizes: makes the sizes that are symbols, if any are.
        only_reverse: why derivatives in the forward take no other mode, see ``capture_model``.
    """

    model: nn.Module
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    train: bool
    effects: OnEffects = "refuse"
    sizes: Callable[[], Sizes] | None = None
    only_reverse: str = ""


class Runnable(Protocol):
    """What a compile ends in."""

    @property
    def num_launches(self) -> int:
        """Kernel launches of one run."""


@dataclass(frozen=True, kw_only=True)
class Compilation:
    """What is known of one compile, between two passes.

    Attributes:
        context: what was made per closure, in this compile and earlier ones.
        report: gets what passes did.
        subject: what is compiled.
        seen: what capture saw.
        request: the derivative that is asked for; None without gradients.
        derivative: the derivative; None without gradients, or where none flows.
        programs: what will run, part by part.
        kernels: whether the parts' kernels are there, or only estimated.
        flats: the parts, linked.
        unplanned: why memory is not planned, if that is known.
        runs: what runs the parts.
    """

    context: Context
    report: CompileReport
    subject: Subject | None = None
    seen: CapturedModel | None = None
    request: Request | None = None
    derivative: Derivative | None = None
    programs: Mapping[str, Program] = field(default_factory=dict)
    kernels: Literal["made", "estimated"] = "made"
    flats: Mapping[str, FlatProgram] = field(default_factory=dict)
    unplanned: Unplanned | None = None
    runs: Runnable | None = None

    @property
    def captured(self) -> CapturedModel:
        """What capture saw, once it has run."""
        assert self.seen is not None, "a pass before capture asks for what it saw"
        return self.seen

    @property
    def size(self) -> int:
        """Graph nodes held; launches, once what runs is there."""
        if self.runs is not None:
            return self.runs.num_launches
        return sum(program.num_nodes() for program in self.programs.values())

    @property
    def linked(self) -> list[FlatProgram]:
        """The linked parts, in order."""
        return list(self.flats.values())


State = TypeVar("State", bound=Compilation)


def _always(state: Any) -> bool:
    return True


@dataclass(frozen=True)
class Pass:
    """One pass.

    Attributes:
        name: its row in a report.
        function: returns the state after it; the state before stays as it is.
        level: the rules that programs keep after it.
        wanted: whether it is to run.
        verified: ``"always"``, or only when every pass is.
    """

    name: str
    function: Callable[[Any], Any]
    level: ProgramLevel = "shared"
    wanted: Callable[[Any], bool] = _always
    verified: Literal["always", "on request"] = "on request"

    def __call__(self, state: State) -> State:
        """Returns the state after the pass, of the same kind."""
        after: State = self.function(state)
        return after

    @property
    def summary(self) -> str:
        """What it does, in one line."""
        return (self.function.__doc__ or "").partition("\n")[0]


def compile_pass(
    name: str,
    level: ProgramLevel = "shared",
    *,
    wanted: Callable[[Any], bool] = _always,
    verified: Literal["always", "on request"] = "on request",
) -> Callable[[Callable[[State], State]], Pass]:
    """Makes a pass of a function; its docstring's first line is what lists of passes show."""
    return lambda function: Pass(name, function, level, wanted, verified)


Watch = Callable[[Pass, Compilation, Compilation], None]
"""Sees each pass that ran, with the state before and after it."""


def no_watch(one: Pass, before: Compilation, after: Compilation) -> None:
    """Looks at nothing."""


@one_at_a_time
def run(passes: Sequence[Pass], state: State, watch: Watch = no_watch) -> State:
    """Runs passes in order: times each, and verifies what it made where that is asked for.

    Args:
        passes: the list.
        state: what is known before.
        watch: sees each pass that ran.

    Raises:
        VerifyError: if a pass broke a rule of its level.
    """
    everything = os.environ.get(VERIFY_VARIABLE, "0") not in ("", "0")
    names = [one.name for one in passes]
    with lazy_modules(), state.context.progress.passes(names) as followed:
        for one in passes:
            if not one.wanted(state):
                continue
            before = state
            with followed(one.name), state.report.timed(one.name) as nodes:
                state = one(state)
                if everything or one.verified == "always":
                    check(state, one.level)
                nodes.count = state.size
            watch(one, before, state)
    return state


def apply(passes: Sequence[Pass], state: State) -> State:
    """Runs passes to see what would come of it: nothing is timed, the report stays as it is."""
    report = state.report
    trial = replace(report, passes=[])
    state = replace(state, report=trial)
    for one in passes:
        if one.wanted(state):
            state = one(state)
    return replace(state, report=report)


def check(state: Compilation, level: ProgramLevel) -> None:
    """Raises VerifyError if a program breaks a rule of a level, or what is linked is not flat."""
    if level == "flat":
        for flat in state.flats.values():
            check_flat(flat)
        return
    for program in state.programs.values():
        verify(program, level)


def until(name: str, passes: Sequence[Pass]) -> Sequence[Pass]:
    """Returns the passes up to and with the one of a name; all, if there is none."""
    names = [one.name for one in passes]
    return passes[: names.index(name) + 1] if name in names else passes
