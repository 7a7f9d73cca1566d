"""Link (the deferred inline) and the memory plan, or the reason why there is none.

One link serves many shapes: the second shape is linked with numbers that record how they were
computed (:mod:`...reuse.ir.size_tape`). A later shape reuses that program if every comparison made
during the link has the same outcome for it, and its buffers fit: no launch is recorded and no
memory is planned again. A shape that fits none of these programs gets another one, or a link of
its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch

from ...autodiff.flows import view_roots
from ...autodiff.training_program import NotUpdatedError
from ...backend.gpu.targets import ALIGNMENT_BYTES, target_like
from ...backend.gpu.torch_cuda import LoadedKernel
from ...backend.kernels import lower
from ...backend.kernels.lower import InductorBackend, can_record, closure_list
from ...backend.launches.kernel_list import (
    BufferInfo,
    KernelList,
    Launch,
    NativeOp,
    SymbolicList,
    View,
)
from ...backend.launches.torch_native import NotBuiltError
from ...backend.link.layout import Layout, changes, layout_of, least_bytes, most_bytes, outside
from ...backend.link.link import FlatProgram, copied_between_devices, link
from ...backend.link.placement import Place, Tools, UnalignedError
from ...backend.run.planned import PlannedProgram, Runtime
from ...recompute.planner import Budget
from ...reuse.errors import PlanError
from ...reuse.ir.leaf import flat_types
from ...reuse.ir.program import Leaf, ModelTensor
from ...reuse.ir.size_tape import PLAIN, Numbers, SizeTape
from ...reuse.ir.torch_symbols import SymbolTrace, Values, value_of
from ...reuse.ir.types import HOST, TensorType, strides_that_matter
from ...reuse.torch_names import own_device_type
from ..compile_record import DeviceRecord, gpu_record
from .context import leaves_of
from .numbers import check_layouts, forget_numbers, kernel_at_numbers, results_at, with_numbers
from .programs import returned_of, tensor_name
from .state import Compilation, GoalKind, State, Unplanned, compile_pass

LINKED: tuple[GoalKind, ...] = ("module", "step", "gradients")


WRONG_SIZES = "A guard on sizes that the compile relies on does not hold for these sizes."


class OverBudgetError(PlanError):
    """The recompute choice, made for other sizes, exceeds the memory budget at these."""


@compile_pass("link", "flat", goals=LINKED)
def link_program(state: State) -> State:
    """Lays out all calls, replaces symbols by numbers, plans memory: the deferred inline."""
    state = state if state.flats else linked(state)
    if state.captured.sizes is None:
        return _planned_and_run(state)
    values = state.values or state.captured.sizes.example
    if state.shapes is not None:
        return state.shapes.at(state, values) or _linked_at(state, values)
    # Sizes were traced with hints; the guards must also hold for the sizes of this call.
    if not state.captured.sizes.are_right(values):
        raise PlanError(WRONG_SIZES)
    return _linked_at(replace(state, symbolic=state), values)


def _linked_at(state: State, values: Values) -> State:
    """Plans a linked program for the numbers of one shape; only the plan keeps its kernels."""
    context = state.context
    leaves = {leaf: kernel_at_numbers(context, leaf, values) for leaf in leaves_of(state.linked)}
    state = _planned_and_run(replace(with_numbers(state, values, leaves), values=values))
    for leaf in leaves.values():
        check_layouts(context.recorded.get(leaf))
    forget_numbers(context, leaves)
    _check_budget(state)
    return state


def _check_budget(state: Compilation) -> None:
    policy = state.context.options.recompute
    limit = policy.saved_bytes if isinstance(policy, Budget) else None
    if limit is None or state.request is None or state.derivative is None:
        return
    held = held_bytes(state)
    if held > limit:
        raise OverBudgetError(f"{held} bytes are held, and the budget is {limit}")


def linked(state: State) -> State:
    """Lays out the calls of each part."""
    return replace(state, flats={name: link(p) for name, p in state.programs.items()})


def _planned_and_run(state: State) -> State:
    """Plans memory if possible; otherwise each closure allocates its results."""
    try:
        planned = plan(state)
        if isinstance(planned, PlannedProgram) and state.kernels == "made":
            _ = planned.native
    except NotBuiltError as error:  # lazyinline's own C++ code, for example on a full disk
        planned = Unplanned(str(error))
    return run_by(state, planned)


def run_by(state: State, planned: PlannedProgram | Unplanned) -> State:
    """Returns the state with its runtime, planned or not, and notes it in the report."""
    report = state.report
    if isinstance(planned, Unplanned):
        if state.goal.updates:
            raise NotUpdatedError(f"memory is not planned: {planned.reason}")
        report.unplanned = planned.reason
        runs = runs_of(state, _closures(state))
        report.num_launches = runs.num_launches
        return replace(state, unplanned=planned, runs=runs)
    return noted(state, runs_of(state, planned))


def noted(state: State, runs: PlannedProgram | Runtime, **changes: Any) -> State:
    """Returns the changed state with a planned runtime, and notes its memory in the report."""
    report, planned = state.report, runs.program if isinstance(runs, Runtime) else runs
    report.peak_bytes = planned.plan.peak_bytes
    report.arena_bytes, report.why_no_graph = planned.arena_bytes, planned.why_no_graph
    report.held_bytes = planned.held_bytes + planned.result_bytes
    report.lower_bound_bytes = planned.plan.lower_bound_bytes
    _note_devices(state, planned)
    report.num_launches = runs.num_launches
    return replace(state, runs=runs, **changes)


def _note_devices(state: Compilation, planned: PlannedProgram) -> None:
    """Notes in the report what lies on which device, if there are several."""
    if not planned.layout.others:
        return
    devices, report = devices_of(state.linked), state.report
    model = [s for s in state.captured.program.sources if isinstance(s, ModelTensor)]
    report.devices = tuple(
        DeviceRecord(
            "the host" if device == HOST else state.context.options.target or str(device),
            tuple(s.name for s in model if s.tensor.device == device),
            planned.other_bytes.get(device, 0) if index else planned.arena_bytes,
        )
        for index, device in enumerate(devices)
    )
    counts = list(map(copied_between_devices, state.linked))
    report.num_copies = sum(number for number, _ in counts)
    report.copied_bytes = sum(num_bytes for _, num_bytes in counts)


def runs_of(state: Compilation, program: PlannedProgram) -> PlannedProgram | Runtime:
    """Returns the runtime of a planned program; a step is its own runtime."""
    if state.goal.kind == "step":
        return program
    derivative = state.derivative
    num_saved = len(flat_types([derivative.saved_type])) if derivative is not None else 0
    return Runtime(program, len(state.captured.program.outputs), num_saved)


def _closures(state: Compilation) -> PlannedProgram:
    """Returns the program without a memory plan: each closure allocates its results."""
    made = partial(PlannedProgram, state.linked, state.context.closures_of(state.linked))
    if state.goal.kind == "step":
        (flat,) = state.linked
        return made(range(len(flat.inputs)), [len(flat.outputs)], results="copied")
    returned, sources = returned_of(state.captured.program, state.derivative)
    return made([], returned, sources, results="allocated")


@compile_pass(
    "predict",
    "flat",
    goals=("module", "step"),
    wanted=lambda state: state.context.options.target is not None,
)
def describe_gpu(state: State) -> State:
    """Predicts memory and time on a GPU that is not here, by memory plan and roofline."""
    runs, backend = state.runs, state.context.backend
    program = runs.program if isinstance(runs, Runtime) else runs
    if not isinstance(program, PlannedProgram) or program.allocates_all:
        why = state.report.unplanned
        raise PlanError(f"A program for a GPU needs a memory plan, and there is none: {why}.")
    assert isinstance(backend, InductorBackend)
    state.report.gpu = gpu_record(program, launched(state, state.linked), backend)
    return state


def launched(state: Compilation, flats: Sequence[FlatProgram]) -> list[tuple[KernelList, int]]:
    """Returns the kernel list of each closure in linked programs, and how often it is called."""
    calls = Counter(launch.leaf for flat in flats for launch in flat.launches)
    return [(state.context.recorded[leaf], count) for leaf, count in calls.items()]


# ---- what prevents a plan --------------------------------------------------------------------


def hindrance(state: Compilation) -> Unplanned | None:
    """Returns why the memory of linked programs cannot be planned together; None if it can."""
    backend = state.context.options.backend
    # Steps and ranks own their whole arena, so their memory is planned for any backend.
    if state.goal.kind not in ("step", "rank") and backend != "inductor":
        return Unplanned(f"backend {backend} runs operator by operator")
    devices = devices_of(state.linked)
    if any(d.type != "cpu" for d in devices) and state.goal.kind not in LINKED:
        return Unplanned("a stage of a pipeline is planned on the CPU alone")
    if found := other_devices(devices):
        return found
    context = state.context
    for leaf in leaves_of(state.linked) if state.kernels == "made" else ():
        if leaf not in context.recorded and not can_record(context.kernels[leaf]):
            return Unplanned(f"the kernels of @{leaf.name} are not a plain list of launches")
    return None


def why_unplanned(state: Compilation) -> Unplanned | None:
    """Returns why the memory of linked programs is not planned; None if it is."""
    if state.goal.kind == "step":  # it writes changed buffers at its end, after every backward
        return hindrance(state)
    known, derivative = state.unplanned or hindrance(state), state.derivative
    written = {target for _, target in state.captured.program.writes}
    if known is None and derivative is not None and written & set(derivative.kept_inputs):
        return Unplanned("the forward changes a buffer whose old value the backward needs")
    return known


def devices_of(flats: Sequence[FlatProgram]) -> list[torch.device]:
    """Returns the devices that programs use, the CPU last."""
    devices = {t.device for flat in flats for t in flat.slot_types}
    return sorted(devices, key=lambda device: (device.type == "cpu", str(device)))


def other_devices(devices: Sequence[torch.device]) -> Unplanned | None:
    """Returns why not to plan: a device other than the CPU, CUDA and a user's own device."""
    unknown = [d for d in devices if d.type not in ("cpu", "cuda", own_device_type())]
    if not unknown:
        return None
    names = ", ".join(map(str, unknown))
    return Unplanned(f"memory is planned on cpu and cuda, and the program uses {names}")


def tools_of(state: Compilation) -> Tools:
    """Returns the tools to place buffers and run launches on the devices of a linked program."""
    tools, devices = state.context.tools, devices_of(state.linked)
    if state.plans:
        tools = tools.answered_by(state.plans)
    if tools.place.missing:
        others = tuple(device for device in devices if device == HOST)
        return replace(tools, place=replace(tools.place, others=others))
    on_gpu = partial(Place, load=LoadedKernel, first_launches="apart")
    if len(devices) > 1:  # launches come one by one, in the order of the program
        place = on_gpu(device=devices[0], others=tuple(devices[1:]))
        return replace(tools, alignment=ALIGNMENT_BYTES, place=place)
    gpu = next((device for device in devices if device.type == "cuda"), None)
    if gpu is None:
        return tools
    is_here = torch.cuda.is_available()
    target = target_like(torch.cuda.get_device_capability(gpu)) if is_here else None
    # Never tested on a GPU: see docs/gpu.md
    place = on_gpu(device=gpu, graphs="captured", target=target)
    return replace(tools, alignment=ALIGNMENT_BYTES, place=place)


# ---- the plan ---------------------------------------------------------------------------------


def plan(state: Compilation) -> PlannedProgram | Unplanned:
    """Plans the arena of a linked forward and backward, or of a step."""
    why = why_unplanned(state)
    while why is None:
        try:
            return plan_at(state, launches(state))
        except UnalignedError as found:
            # A GPU kernel may need more alignment than the arena gives: it is compiled again.
            if not state.context.lower_unaligned(found.inputs):
                raise
    return why


def plan_at(state: Compilation, kernel_lists: Mapping[Leaf, KernelList]) -> PlannedProgram:
    """Plans the arena for these kernel lists."""
    planned = partial(PlannedProgram, state.linked, kernel_lists, tools=tools_of(state))
    if state.goal.kind == "step":  # its results stay in place until the next step
        (flat,) = state.linked
        own_copies = [""] * sum(map(len, state.step.batch))
        return planned(
            range(len(flat.inputs)),
            [len(flat.outputs) - state.step.updates.num_results],
            results="pinned",
            names=[*own_copies, *(tensor_name(s.name) for s in state.step.model)],
        )
    program = state.captured.program
    own = {i: s.name for i, s in enumerate(program.sources) if isinstance(s, ModelTensor)}
    # A budget bounds what is held between forward and backward: less without gradients.
    has_budget = isinstance(state.context.options.recompute, Budget)
    return planned(
        list(own),
        *returned_of(program, state.derivative),
        gradients="apart" if has_budget else "overlaid",
        names=list(own.values()),
        roots=state.known.get("view_roots") or view_roots(program),
    )


def held_bytes(state: Compilation) -> int:
    """Returns the bytes that a linked program holds at its peak.

    They are those of its memory plan, or of the best plan possible where kernels are estimated;
    without a plan, those of an upper bound for a step, and of the saved tensors for a module.
    """
    is_step = state.goal.kind == "step"
    losses = state.goal.batching.loss_bytes if is_step else 0
    made: object = state.runs.program if isinstance(state.runs, Runtime) else state.runs
    if state.kernels == "made" and not isinstance(made, PlannedProgram):
        made = plan(state)
    if isinstance(made, PlannedProgram) and not made.allocates_all:
        return made.held_bytes + losses
    if why_unplanned(state) is None:
        return losses + least_bytes(_layout(state))
    if is_step:
        lists = {leaf: closure_list(leaf) for leaf in leaves_of(state.linked)}
        own = outside(layout_of(state.linked, lists, [0], results="copied"))
        return losses + most_bytes(changes(own))
    assert state.derivative is not None
    return state.derivative.saved_type.num_bytes


def _layout(state: Compilation) -> Layout:
    """Lays out buffers for kernels that are only estimated."""
    others = tools_of(state).place.others
    made = partial(layout_of, state.linked, launches(state), others=others)
    if state.goal.kind == "step":
        (flat,) = state.linked
        return made([len(flat.outputs) - state.step.updates.num_results], results="pinned")
    return made(*returned_of(state.captured.program, state.derivative))


def launches(state: Compilation) -> Mapping[Leaf, KernelList]:
    """Returns the kernel list of each leaf that is launched."""
    if state.kernels == "made":
        return state.context.launches_of(state.linked)
    return state.context.estimates.lists(state.linked, state.context.recorded)


_CPU = torch.device("cpu")
_MAX_PATTERNS = 8
"""The most programs linked for many shapes; a shape that fits none of them is linked alone."""
_HEADROOM = (8, 4, 3, 2)  # room is for the largest size so far plus 1/8; then plus 1/4, ...


class ManyShapes:
    """Programs of one symbolic compile, each linked once for many shapes."""

    def __init__(self) -> None:
        self._patterns: tuple[_Pattern, ...] = ()
        self._num_tried = 0
        self._room = Values()
        self._recorded: tuple[dict[Leaf, KernelList], list[Any]] | None = None

    def at(self, state: State, values: Values) -> State | None:
        """Returns the linked state of one shape, or None if the shape needs a link of its own."""
        # A memory budget applies at each shape, so each is planned without headroom.
        if isinstance(state.context.options.recompute, Budget):
            return None
        found = self.known(state, values)
        if found is None and self._num_tried < _MAX_PATTERNS:
            self._num_tried += 1
            try:
                made = self._pattern(state, self._room_for(state, values), values)
            except Exception:  # the caller links this shape alone, which works or raises again
                made = None
            self._patterns = (*self._patterns, made)[-_MAX_PATTERNS:] if made else self._patterns
            found = self.known(state, values)
        return found

    def _pattern(self, state: State, room: Values, values: Values) -> _Pattern | None:
        """Links a program with room for some sizes, and checks it at others."""
        others = (values, state.captured.sizes.example)
        other = next((one for one in others if one != room), None)
        if other is None:
            return None
        tape = SizeTape(room)
        # Launches are recorded with symbols once. A further room asks what was asked of its sizes.
        for _ in range(2):
            self._recorded = self._recorded or launches_for_all(state, room, other)
            if self._recorded is None:
                return None
            launches, conditions = self._recorded
            if all([value_of(condition, tape.values) for condition in conditions]):
                return _Pattern.of(state, tape, launches, other)
            self._recorded = None
        return None

    def known(self, state: State, values: Values) -> State | None:
        """Like ``at``, but only reuses programs that are linked already."""
        for pattern in reversed(self._patterns):
            numbers = pattern.at(values)
            if numbers is not None:
                return noted(state, pattern.runs.at(numbers), values=values)
        return None

    def _room_for(self, state: Compilation, values: Values) -> Values:
        """Returns the sizes to plan for: the largest so far, with headroom for those that vary."""
        sizes = state.captured.sizes
        known, is_first = self._room or sizes.example, not self._room
        for part in (_HEADROOM[: self._num_tried][-1], 0):
            room = Values()
            for symbol, number in values.items():
                most = max(number, known[symbol])
                grows = part and (number > known[symbol] or (is_first and number != most))
                room[symbol] = most + most // part if grows else most
            if sizes.are_right(Values(room)):
                self._room = room
                return Values(room)
        return Values(values)


@dataclass(frozen=True)
class _Pattern:
    """A program linked with sizes that recorded how they were computed.

    ``numbers`` recomputes all sizes for another shape; it gives None if a comparison differs there.
    """

    numbers: Callable[[Values], Numbers | None]
    runs: PlannedProgram | Runtime
    rooms: Sequence[tuple[int, int]]  # of each buffer its bytes, a recorded size, and those planned

    @classmethod
    def of(
        cls,
        state: Compilation,
        tape: SizeTape,
        recorded: Mapping[Leaf, KernelList],
        values: Values,
    ) -> _Pattern | None:
        """Links a program with recorded sizes; None if that is not possible, or its check fails.

        Memory is planned for the sizes of the tape. For ``values``, other sizes, the launches must
        equal those ``recorded``, with these filled in.
        """
        if state.context.options.target is not None or devices_of(state.linked) != [_CPU]:
            return None  # GPU kernels were never tested with other sizes filled in
        leaves, lists, expected = {}, {}, {}
        for leaf in leaves_of(state.linked):
            made, known = leaf, recorded.get(leaf)
            if isinstance(known, SymbolicList):
                expected[leaf] = _described(lower.numbered(leaf, known, values)[1])
                made, known = lower.numbered(leaf, known, tape.values)
                check_layouts(known)
            leaves[leaf], lists[made] = made, known or state.context.launches_of_leaf(leaf)
        if not state.captured.sizes.are_right(tape.values):
            return None
        results_at(state.captured.program, tape.values)
        program = plan_at(with_numbers(state, tape.values, leaves), lists)
        numbers = tape.function()
        # A size whose computation was not recorded would be wrong here: the check finds it.
        filled = numbers(values)
        if filled is None or any(
            _described(lists[leaves[leaf]], filled) != one for leaf, one in expected.items()
        ):
            return None
        return cls(numbers, runs_of(state, program), program.rooms)

    def at(self, values: Values) -> Numbers | None:
        """Returns the sizes for a shape; None if a comparison differs or a buffer is too small."""
        numbers = self.numbers(values)
        if numbers is None or any(numbers.of(size) > room for size, room in self.rooms):
            return None
        return numbers


def launches_for_all(
    state: Compilation, examples: Values, called: Values
) -> tuple[dict[Leaf, KernelList], list[Any]] | None:
    """Returns kernel lists with symbolic sizes, and the conditions under which they are valid.

    None if that is not possible, or if they differ from those recorded for the sizes of a call.
    """
    context = state.context
    if why_unplanned(state) or any(leaf.bodies for leaf in leaves_of(state.linked)):
        return None
    new = [x for x in leaves_of(state.linked) if x not in context.recorded and lower.has_sizes(x)]
    if not new:  # symbols import Dynamo
        return dict(context.recorded), []
    trace = SymbolTrace(examples)
    try:
        found = {x: lower.symbolic_launches(x, context.kernels[x], trace) for x in new}
        for leaf, launches in found.items():
            expected = lower.kernel_list(*lower.kernel_at(leaf, context.kernels[leaf], called))
            if _described(lower.numbered(leaf, launches, called)[1]) != _described(expected):
                return None
    except Exception:  # kernels are then recorded for each shape alone
        return None
    return {**context.recorded, **found}, trace.conditions()


def _described(value: Any, numbers: Numbers = PLAIN) -> Any:
    """Returns launches as nested lists, which are equal if the launches do the same."""
    if isinstance(value, View):  # the stride of a dimension of size 1 does not matter
        shape, stride = (tuple(map(numbers.of, sizes)) for sizes in (value.shape, value.stride))
        offset_bytes = numbers.of(value.offset_bytes)
        return value.buffer, value.dtype, shape, strides_that_matter(shape, stride), offset_bytes
    if isinstance(value, (tuple, list)):
        return [_described(one, numbers) for one in value]
    if isinstance(value, (KernelList, Launch, NativeOp, BufferInfo, TensorType)):
        return [_described(getattr(value, field.name), numbers) for field in fields(value)]
    return numbers.of(value)
