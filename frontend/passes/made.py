"""Collects what a compile made into its report; only a page looks at it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from ...backend.run.planned import PlannedProgram
from ...backend.run.rank_program import RankPlan, RankProgram
from ...backend.run.runtime import PlannedRuntime
from ...reuse.ir.program import Composite, Program, walk_closures
from ..compile_record import Made, Memory
from .programs import PARTS
from .recompute import is_asked_for
from .state import Compilation


def made_by(state: Compilation) -> Made:
    """Returns what a finished compile made, without the model's tensors."""
    forward, backward = _programs(state)
    held = {c for program in state.programs.values() for c in walk_closures(program)}
    planned = state.runs.program if isinstance(state.runs, PlannedRuntime) else state.runs
    context, request = state.context, state.request
    asked = request is not None and is_asked_for(state)
    return Made(
        captured=_bare(state.captured.program),
        forward=_bare(forward),
        backward=None if backward is None else _bare(backward),
        micro_batches=state.goal.batching.micro_batches,
        kernels={leaf: one for leaf, one in context.recorded.items() if leaf in held},
        memory=_memory(planned),
        frontiers=partial(context.recompute.frontiers, request) if asked and request else tuple,
    )


def _programs(state: Compilation) -> tuple[Program, Program | None]:
    """Returns the forward and the backward that run; of a step, those of its first micro-batch."""
    if state.goal.kind != "step":
        # A rank of a pipeline has parts of its own: what is shown is the whole model.
        forward = state.programs.get(PARTS[0], state.captured.program)
        return forward, state.programs.get(PARTS[1])
    (step,) = state.programs.values()
    # A step calls one forward closure and one backward closure, each first for one part.
    one = step.calls[0].closure
    other = next(c.closure for c in step.calls if c.path and c.closure is not one)
    assert isinstance(one, Composite)
    assert isinstance(other, Composite)
    return one.program, other.program


def _bare(program: Program) -> Program:
    """Returns the same without the model's tensors, which a report does not keep alive."""
    return replace(program, sources=())


def _memory(planned: object) -> Memory | RankPlan | None:
    if isinstance(planned, RankProgram):
        return planned.plan
    if not isinstance(planned, PlannedProgram):
        return None
    return Memory(
        planned.layout,
        planned.offsets,
        planned.plan,
        planned.arena_bytes,
        "gradients" if planned.overlay.hosts else "none",
    )
