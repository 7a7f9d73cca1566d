"""What is saved, chosen by what fits; link, the deferred inline; and the plan of memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch

from ...autodiff.derivative import Derivative, Request
from ...autodiff.flows import view_roots
from ...backend.gpu.targets import ALIGNMENT_BYTES, Place, target_like
from ...backend.kernels.lower import GpuBackend
from ...backend.launches.kernel_list import KernelList
from ...backend.launches.torch_native import NotBuiltError
from ...backend.link.layout import layout_of, least_bytes
from ...backend.link.link import FlatProgram, link
from ...backend.link.placement import Tools, UnalignedError
from ...backend.run.planned import PlannedProgram
from ...backend.run.runtime import ClosureRuntime, PlannedRuntime
from ...backend.run.unplanned import Executable, UnplannedStep, live_bytes
from ...recompute.policy import Budget
from ...reuse.errors import PlanError
from ...reuse.ir.leaf import flat_types
from ...reuse.ir.program import Composite, Leaf, ModelTensor, Program
from ..compile_record import gpu_record
from ..requests import model_name
from .programs import (
    StepCompilation,
    decompose,
    estimate,
    lower,
    repeat_micro_batches,
    returned_of,
    with_request,
)
from .recompute_choice import ProgramPeaks, Recompute, has_marks
from .state import Compilation, Pass, State, Unplanned, apply, compile_pass

AnyStep = TypeVar("AnyStep", bound=StepCompilation)


@compile_pass("link", "flat")
def link_module(state: State) -> State:
    """The calls of each part are laid out, their memory is planned: the deferred inline."""
    return plan_and_run_module(linked(state))


def plan_and_run_module(state: State) -> State:
    """Plans the memory of a linked program where nothing hinders it; else closures allocate."""
    planned, report = _planned_or_why_not(state, plan_module), state.report
    if isinstance(planned, Unplanned):
        report.unplanned = planned.reason
        return _launched(replace(state, unplanned=planned, runs=_closures_run(state)))
    report.peak_bytes = planned.plan.peak_bytes
    report.arena_bytes = planned.arena_bytes
    report.held_bytes = planned.held_bytes + planned.result_bytes
    report.lower_bound_bytes = planned.plan.lower_bound_bytes
    derivative = state.derivative
    num_saved = len(flat_types([derivative.saved_type])) if derivative is not None else 0
    num_results = len(state.captured.program.outputs)
    return _launched(replace(state, runs=PlannedRuntime(planned, num_results, num_saved)))


@compile_pass("link", "flat")
def link_step(state: StepCompilation) -> StepCompilation:
    """The calls of all micro-batches are laid out, one arena is planned: the deferred inline."""
    return plan_and_run_step(linked(state))


def plan_and_run_step(state: AnyStep) -> AnyStep:
    """Plans the memory of a linked step where nothing hinders it; else closures allocate."""
    planned, report = _planned_or_why_not(state, plan_step), state.report
    if isinstance(planned, Unplanned):
        report.unplanned = planned.reason
        return _launched(replace(state, unplanned=planned, runs=_unplanned_step(state)))
    report.peak_bytes = report.arena_bytes = planned.plan.peak_bytes
    report.held_bytes = planned.held_bytes
    report.lower_bound_bytes = planned.plan.lower_bound_bytes
    return _launched(replace(state, runs=planned))


def linked(state: State) -> State:
    """Lays out the calls of each part."""
    return replace(state, flats={name: link(p) for name, p in state.programs.items()})


def _has_target(state: Any) -> bool:
    return state.context.options.target is not None


@compile_pass("predict", "flat", wanted=_has_target)
def describe_gpu(state: State) -> State:
    """For a GPU that is not here: what a run will hold and take, by the plan and the roofline."""
    runs, backend = state.runs, state.context.backend
    program = runs.program if isinstance(runs, PlannedRuntime) else runs
    if not isinstance(program, PlannedProgram):
        why = state.report.unplanned
        raise PlanError(f"A program for a GPU needs a memory plan, and there is none: {why}.")
    assert isinstance(backend, GpuBackend)
    calls = Counter(launch.leaf for flat in state.linked for launch in flat.launches)
    lists = [(state.context.recorded[leaf], count) for leaf, count in calls.items()]
    state.report.gpu = gpu_record(program, lists, backend)
    return state


def _launched(state: State) -> State:
    assert state.runs is not None
    state.report.num_launches = state.runs.num_launches
    return state


# ---- what hinders a plan ---------------------------------------------------------------------


def hindrance(state: Compilation) -> Unplanned | None:
    """Says why linked parts cannot have their memory planned together; None if they can."""
    backend = state.context.options.backend
    if backend != "inductor":
        return Unplanned(f"backend {backend} runs operator by operator")
    return step_hindrance(state)


def step_hindrance(state: Compilation) -> Unplanned | None:
    """The same for a step: it owns its whole arena, so it is planned for any backend."""
    return other_devices(state.linked) or _unrecordable(state)


def other_devices(flats: Sequence[FlatProgram]) -> Unplanned | None:
    """Memory has one kind of address: the CPU's, or that of one GPU."""
    devices = {t.device for flat in flats for t in flat.slot_types}
    if len(devices) <= 1 and {device.type for device in devices} <= {"cpu", "cuda"}:
        return None
    names = ", ".join(sorted(map(str, devices)))
    return Unplanned(f"memory is planned on one device, and the program uses {names}")


def tools_of(state: Compilation) -> Tools:
    """Returns what places buffers and runs launches, on the device of a linked program."""
    tools = state.context.tools
    devices = {t.device for flat in state.linked for t in flat.slot_types}
    gpu = next((device for device in devices if device.type == "cuda"), None)
    if gpu is None:
        return tools
    is_here = torch.cuda.is_available()
    target = target_like(torch.cuda.get_device_capability(gpu)) if is_here else None
    # Never run on one by us: docs/gpu.md
    place = Place(device=gpu, graphs="captured", target=target)
    return replace(tools, alignment=ALIGNMENT_BYTES, place=place)


def _unrecordable(state: Compilation) -> Unplanned | None:
    leaf = state.context.unrecordable(state.linked) if state.kernels == "made" else None
    if leaf is None:
        return None
    return Unplanned(f"the kernels of @{leaf.name} are not a plain list of launches")


def changed_buffer(program: Program, derivative: Derivative | None) -> Unplanned | None:
    """A state that the forward replaces lies where the backward reads the old one."""
    written = {target for _, target in program.writes}
    if derivative is not None and written & set(derivative.kept_inputs):
        return Unplanned("the forward changes a buffer whose old value the backward needs")
    return None


# ---- a program that is called, with its backward ---------------------------------------------


def plan_module(state: Compilation) -> PlannedProgram | Unplanned:
    """Plans the arena of a linked program and its backward."""
    why = _module_hindrance(state)
    if why is not None:
        return why
    program = state.captured.program
    own = {i: s.name for i, s in enumerate(program.sources) if isinstance(s, ModelTensor)}
    num_returned, sources = returned_of(program, state.derivative)
    # A budget bounds what a forward in flight holds, which is less without gradients.
    has_budget = isinstance(state.context.options.recompute, Budget)
    return _aligned(
        state,
        lambda: PlannedProgram(
            state.linked,
            launches(state),
            list(own),
            num_returned,
            sources,
            tools=tools_of(state),
            gradients="apart" if has_budget else "overlaid",
            names=list(own.values()),
            roots=view_roots(state.captured.program),
        ),
    )


def _aligned(state: Compilation, plan: Callable[[], PlannedProgram]) -> PlannedProgram:
    """Plans; kernels of a GPU that do not allow where an operand begins are made anew."""
    while True:
        try:
            return plan()
        except UnalignedError as found:
            if not state.context.lower_unaligned(found.inputs):
                raise


def _planned_or_why_not(
    state: State, plan: Callable[[State], PlannedProgram | Unplanned]
) -> PlannedProgram | Unplanned:
    """Plans; where our own C++ cannot be built (a full disk), closures allocate."""
    try:
        planned = plan(state)
        if isinstance(planned, PlannedProgram) and state.kernels == "made":
            _ = planned.native
    except NotBuiltError as error:
        return Unplanned(str(error))
    return planned


def module_bytes(state: Compilation) -> int:
    """Returns what a linked program holds at its peak: as planned, at least, or saved."""
    assert state.derivative is not None
    if isinstance(state.runs, PlannedRuntime):
        return state.runs.program.held_bytes
    if _module_hindrance(state) is not None:
        return state.derivative.saved_type.num_bytes
    if state.kernels == "made":
        planned = plan_module(state)
        assert isinstance(planned, PlannedProgram)
        return planned.held_bytes
    returned, sources = returned_of(state.captured.program, state.derivative)
    return least_bytes(layout_of(state.linked, launches(state), returned, sources))


def _module_hindrance(state: Compilation) -> Unplanned | None:
    written = partial(changed_buffer, state.captured.program, state.derivative)
    return state.unplanned or hindrance(state) or written()


def _closures_run(state: Compilation) -> ClosureRuntime:
    kernels = state.context.kernels_of(state.linked)
    forward, *backward = (Executable(flat, kernels) for flat in state.linked)
    num_results = len(state.captured.program.outputs)
    return ClosureRuntime(forward, backward[0] if backward else None, num_results)


# ---- a step, which is one program ------------------------------------------------------------


def plan_step(state: StepCompilation) -> PlannedProgram | Unplanned:
    """Plans the arena of a linked step; its results stay where they are until the next one."""
    (flat,) = state.linked
    why = step_hindrance(state)
    if why is not None:
        return why
    own_copies = [""] * sum(map(len, state.step.batch))
    return _aligned(
        state,
        lambda: PlannedProgram(
            [flat],
            launches(state),
            range(len(flat.inputs)),
            [len(flat.outputs)],
            results="pinned",
            tools=tools_of(state),
            names=[*own_copies, *(model_name(s.name) for s in state.step.model)],
        ),
    )


def _unplanned_step(state: StepCompilation) -> UnplannedStep:
    """Returns what runs a linked step closure by closure."""
    (flat,) = state.linked
    return UnplannedStep(flat, state.context.kernels_of([flat]))


def step_bytes(state: StepCompilation) -> int:
    """Returns what a linked step holds at its peak: as planned, or at least."""
    (flat,) = state.linked
    if isinstance(state.runs, PlannedProgram):
        held = state.runs.held_bytes
    elif step_hindrance(state) is not None:
        held = live_bytes(flat)
    elif state.kernels == "made":
        planned = plan_step(state)
        assert isinstance(planned, PlannedProgram)
        held = planned.held_bytes
    else:
        held = least_bytes(
            layout_of([flat], launches(state), [len(flat.outputs)], results="pinned")
        )
    return held + state.batching.loss_bytes


def launches(state: Compilation) -> Mapping[Leaf, KernelList]:
    """Returns the kernel list of each leaf that is launched."""
    if state.kernels == "made":
        return state.context.launches_of(state.linked)
    return state.context.likely_launches_of(state.linked)


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
