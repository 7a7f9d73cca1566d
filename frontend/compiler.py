"""The compiler: the list of passes, in order, from a model to something that runs.

    capture     model -> program of closures and calls
    autodiff    program -> forward program and backward program      (training)
    decompose   composite operators taken apart, once per leaf
    lower       kernels, once per leaf
    link        calls laid out: the deferred inline

Everything before link costs one visit per different closure.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn

from ..autodiff.aliasing import saved_inputs
from ..autodiff.derivative import Derivative, Differentiator, Request
from ..autodiff.micro_batches import StepProgram, step_program
from ..backend.cache.results import CompileCache
from ..backend.kernels.lower import (
    Backend,
    Kernel,
    backend_named,
    can_record,
    decompose_leaf,
    kernel_list,
    lower_leaves,
)
from ..backend.launches.kernel_list import KernelList
from ..backend.link.estimate import Estimates
from ..backend.link.link import FlatProgram, link
from ..backend.run.executable import Executable
from ..backend.run.planned import PlannedProgram, Tools, lay_out, least_bytes
from ..backend.run.runtime import PlannedRuntime, ReplayRuntime, Runtime
from ..backend.run.unplanned_step import ReplayedProgram, StepRunner, live_bytes
from ..recompute.policy import POLICIES, Budget, Policy, check_policy
from ..recompute.summary import RecomputeRecord
from ..reuse.errors import PlanError, ReuseError
from ..reuse.ir.leaf import flat_types, leaf_key
from ..reuse.ir.program import (
    Leaf,
    ModelTensor,
    Program,
    walk_closures,
)
from ..reuse.ir.rewrite import map_leaves
from ..reuse.ir.verify import verify
from .capture.blocks import REUSE_CHOICES
from .capture.capture import capture_model, one_at_a_time
from .capture.regions import CapturedModel
from .checks.runnable import check_batch_is_kept
from .parts import programs_of, returned_of, why_written
from .progress import progress
from .recomputing import ProgramPeaks, Recompute
from .report import CompileReport
from .requests import differentiation, loss_differentiation, model_name
from .unused_outputs import UnusedOutputs

BACKEND_CHOICES = ("inductor", "eager")


@dataclass(frozen=True)
class Options:
    """The options of one compiled module, checked."""

    reuse: str = "marked"
    backend: str = "inductor"
    recompute: Policy = None
    cache: str = "off"  # "disk" takes results of earlier processes; what is measured does not

    def __post_init__(self) -> None:
        check_policy(self.recompute)
        if self.reuse not in REUSE_CHOICES:
            raise ReuseError(f"reuse={self.reuse!r} is unknown; there are {REUSE_CHOICES}.")
        backend_named(self.backend)
        if self.recompute in POLICIES and self.reuse == "off":
            raise PlanError(
                f"recompute={self.recompute!r} is decided for each block, and reuse='off' leaves "
                "none: use reuse='marked', or a Budget."
            )


@dataclass(frozen=True)
class CompiledProgram:
    """A captured program and what runs it.

    ``derivative`` is there when training: what the forward saves and hands over, and what the
    backward takes. ``watched_inputs`` share memory with what is saved, so that they must not change
    in between. ``without`` makes the same program with a backward for some outputs unused, of which
    ``unused_outputs`` knows the graphs.
    """

    captured: CapturedModel
    runtime: Runtime
    derivative: Derivative | None = None
    watched_inputs: tuple[int, ...] = ()
    unused_outputs: UnusedOutputs | None = None
    without: Callable[[CompiledProgram, Sequence[int]], CompiledProgram | None] | None = None

    def without_tensors(self) -> CompiledProgram:
        """Returns the same for one who has the model's tensors from elsewhere."""
        return replace(self, captured=self.captured.without_tensors())


@dataclass(frozen=True)
class Batching:
    """How a step's batch is split, and in which order the parts run."""

    micro_batches: int = 1
    order: str = "forward_first"

    @property
    def loss_bytes(self) -> int:
        """Most bytes that a step allocates for the losses: one per part, and their mean."""
        return 8 * (self.micro_batches + 1)


@dataclass(frozen=True)
class CompiledStep:
    """A training step, and what runs it."""

    captured: CapturedModel
    step: StepProgram
    runner: StepRunner

    def without_tensors(self) -> CompiledStep:
        """Returns the same for one who has the model's tensors from elsewhere."""
        model = tuple(tensor.forgotten() for tensor in self.step.model)
        return CompiledStep(
            self.captured.without_tensors(), replace(self.step, model=model), self.runner
        )


@dataclass(frozen=True)
class Linked:
    """Flat programs with their kernels, and what plans them; no kernels if they are not planned."""

    flats: Sequence[FlatProgram]
    kernel_lists: Mapping[Leaf, KernelList]
    tools: Tools


class Compiler:
    """Runs the passes; keeps what it made per closure for the next program it compiles."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.backend: Backend = backend_named(options.backend)
        found = CompileCache.of_user(options.backend) if options.cache == "disk" else None
        self._cache = found or CompileCache(None, options.backend)
        self._tools = Tools(self._cache.plan, self._cache.replay)
        self._differentiator = Differentiator(self.backend.recipe, self._cache.derivative)
        self._recompute = Recompute(self._differentiator, options.recompute, options.backend)
        self._leaves: dict[Any, Leaf] = {}
        self._decomposed: dict[Leaf, Leaf] = {}
        self._kernels: dict[Leaf, Kernel] = {}
        self._kernel_lists: dict[Leaf, KernelList] = {}
        self._estimates = Estimates(fuses=options.backend == "inductor")

    @one_at_a_time
    def compile(
        self,
        model: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        train: bool,
        known: CapturedModel | None = None,
    ) -> tuple[CompiledProgram, CompileReport]:
        """Compiles a model for inputs of these layouts; ``known`` is the model captured for them.

        Raises:
            CaptureError: if the model cannot be captured.
            PlanError: if it cannot be run (parameters on the meta device).
        """
        report = CompileReport(train, self.options.backend, self.options.reuse)
        self._cache.begin()
        with report.timed("capture") as nodes:
            captured = known or capture_model(
                model, args, kwargs, reuse=self.options.reuse, train=train
            )
            program = self._known(captured.program)
            nodes.count = program.num_nodes()
        report.describe(captured)
        request = differentiation(program) if train else None
        with report.timed("autodiff") as nodes:
            derivative = self._differentiator.of(request) if request is not None else None
            programs = programs_of(program, derivative)
            nodes.count = sum(p.num_nodes() for p in programs)
        if request is not None and derivative is not None:
            request = self._recompute.chosen(request, report, self.peaks(program))
            derivative = self._differentiator.of(request)
            programs = programs_of(program, derivative)
        programs = self._lowered(programs, report)
        with report.timed("link") as nodes:
            flats = [link(p) for p in programs]
            runtime = self._runtime(captured.program, flats, derivative, report, self._gradients)
            report.num_launches = nodes.count = runtime.num_launches
        report.cache = self._cache.finish()
        watched = saved_inputs(programs[0]) if derivative is not None else ()
        unused = UnusedOutputs(derivative) if derivative is not None else None
        without = partial(self._without, relinked=self._relinked, report=report)
        return CompiledProgram(captured, runtime, derivative, watched, unused, without), report

    @one_at_a_time
    def _without(
        self,
        compiled: CompiledProgram,
        unused: Sequence[int],
        relinked: Callable[[CompiledProgram, Derivative, CompileReport], CompiledProgram | None],
        report: CompileReport,
    ) -> CompiledProgram | None:
        """Compiles another backward for the same forward; None where it cannot be had.

        Where the backend's kernels do not go with the forward as it is, it gets PyTorch's.
        """
        known = compiled.unused_outputs
        for kernels in ("backend", "eager"):
            derivative = known.without(unused, kernels) if known is not None else None
            if derivative is None:
                break
            passes = CompileReport(True, report.backend, "", unplanned=report.unplanned)
            made = relinked(compiled, derivative, passes)
            if made is not None and type(made.runtime) is type(compiled.runtime):
                report.num_backwards += 1
                return made
        return None

    def _relinked(
        self, compiled: CompiledProgram, derivative: Derivative, report: CompileReport
    ) -> CompiledProgram:
        """Compiles the same program with another derivative."""
        program = compiled.captured.program
        self._cache.begin()
        programs = self._lowered(programs_of(program, derivative), report)
        flats = [link(p) for p in programs]
        runtime = self._runtime(program, flats, derivative, report, self._gradients)
        self._cache.finish()
        return replace(compiled, runtime=runtime, derivative=derivative)

    @one_at_a_time
    def compile_step(
        self,
        model: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        batching: Batching,
        known: CapturedModel | None = None,
    ) -> tuple[CompiledStep, CompileReport]:
        """Compiles a training step; ``args`` and ``kwargs`` are those of one micro-batch.

        ``known`` is the model captured for them.

        Raises:
            CaptureError: if the model cannot be captured.
            PlanError: if its result is not a scalar loss that depends on a parameter.
        """
        report = CompileReport(True, self.options.backend, self.options.reuse)
        self._cache.begin()
        with report.timed("capture") as nodes:
            captured = known or capture_model(
                model, args, kwargs, reuse=self.options.reuse, train=True
            )
            program = self._known(captured.program)
            nodes.count = program.num_nodes()
        report.describe(captured)
        check_batch_is_kept(program)
        request = loss_differentiation(program)
        with report.timed("autodiff") as nodes:
            step = self._step_program(program, request, batching)
            nodes.count = step.program.num_nodes()

        def linked_peak(request: Request) -> int:
            linked = self._decompose(self._step_program(program, request, batching).program)
            self._lower([linked])
            return self._step_runner(link(linked)).held_bytes + batching.loss_bytes

        def guessed_peak(request: Request) -> int:
            flats = [link(self._decompose(self._step_program(program, request, batching).program))]
            if _why_not_on_cpu(flats):
                return live_bytes(flats[0])
            lists = self._estimates.lists(flats, self._kernel_lists)
            return least_bytes(lay_out(flats, lists, [len(flats[0].outputs)], results="pinned"))

        request = self._recompute.chosen(request, report, ProgramPeaks(linked_peak, guessed_peak))
        step = self._step_program(program, request, batching)
        (linked,) = self._lowered([step.program], report)
        with report.timed("link") as nodes:
            flat = link(linked)
            own_copies = [""] * sum(map(len, step.batch))
            runner = self._step_runner(
                flat, [*own_copies, *(model_name(s.name) for s in step.model)]
            )
            report.num_launches = nodes.count = runner.num_launches
        if isinstance(runner, ReplayedProgram):
            report.unplanned = self._why_step_is_unplanned(flat)
        else:
            report.peak_bytes = report.arena_bytes = runner.plan.peak_bytes
            report.lower_bound_bytes = runner.plan.lower_bound_bytes
        report.cache = self._cache.finish()
        return CompiledStep(captured, step, runner), report

    @property
    def cache_place(self) -> str:
        """Names the machine and the directory of the cache; "" without one."""
        return f"{platform.node()}:{self._cache.directory}" if self._cache.directory else ""

    @property
    def differentiator(self) -> Differentiator:
        """Makes derivatives as the backend wants them, each once."""
        return self._differentiator

    @one_at_a_time
    def capture(
        self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], *, train: bool
    ) -> tuple[CapturedModel, Program]:
        """Captures a model; returns what was seen, and its program on leaves known already."""
        captured = capture_model(model, args, kwargs, reuse=self.options.reuse, train=train)
        return captured, self._known(captured.program)

    @one_at_a_time
    def saved_and_recomputed(self, program: Program) -> list[RecomputeRecord]:
        """Returns what the backward of a captured program is given and what it computes again."""
        report = CompileReport(True, self.options.backend, self.options.reuse)
        request = differentiation(program)
        if self._differentiator.of(request) is not None:
            self._recompute.chosen(request, report, self.peaks(program))
        return report.recompute

    @one_at_a_time
    def executables(self, programs: Sequence[Program]) -> list[Executable]:
        """Decomposes, lowers and links programs that run one at a time, without a memory plan."""
        flats = [link(verify(self._decompose(p))) for p in programs]
        self._make_kernels(_leaves_of(flats))
        return [Executable(flat, self._kernels) for flat in flats]

    @property
    def recompute(self) -> Recompute:
        """Picks what a derivative saves."""
        return self._recompute

    def peaks(self, program: Program) -> ProgramPeaks:
        """What a program that is run on its own holds, with the derivative that is asked for."""
        return ProgramPeaks(partial(self._peak_of, program), partial(self._likely_peak, program))

    @one_at_a_time
    def linked(self, programs: Sequence[Program], report: CompileReport) -> Linked:
        """Decomposes, lowers and links programs whose memory is planned together."""
        self._cache.begin()
        decomposed = [verify(self._decompose(p)) for p in programs]
        report.num_kernels += self._lower(decomposed)
        flats = [link(p) for p in decomposed]
        report.unplanned = self._why_unplanned(flats)
        lists = {} if report.unplanned else self._lists(flats)
        report.cache = self._cache.finish()
        return Linked(flats, lists, self._tools)

    @one_at_a_time
    def guessed(self, programs: Sequence[Program]) -> Linked:
        """Links programs with estimates for kernels that are not there yet."""
        flats = [link(self._decompose(p)) for p in programs]
        if self._why_never_planned(flats):
            return Linked(flats, {}, self._tools)
        return Linked(flats, self._estimates.lists(flats, self._kernel_lists), self._tools)

    def _step_program(self, program: Program, request: Request, batching: Batching) -> StepProgram:
        derivative = self._differentiator.of(request)
        if derivative is None:
            raise PlanError("The loss depends on no parameter that requires grad.")
        return step_program(
            program,
            derivative,
            self._differentiator,
            micro_batches=batching.micro_batches,
            order=batching.order,
        )

    def _step_runner(self, flat: FlatProgram, names: Sequence[str] = ()) -> StepRunner:
        """Plans the memory of a step where its kernels allow it, else replays closures."""
        if self._why_step_is_unplanned(flat):
            self._make_kernels(_leaves_of([flat]))
            return ReplayedProgram(flat, self._kernels)
        return PlannedProgram(
            [flat],
            self._lists([flat]),
            range(len(flat.inputs)),
            [len(flat.outputs)],
            results="pinned",
            tools=self._tools,
            names=names,
        )

    def _why_step_is_unplanned(self, flat: FlatProgram) -> str:
        return _why_not_on_cpu([flat]) or self._why_not_recorded([flat])

    def _lists(self, flats: Sequence[FlatProgram]) -> dict[Leaf, KernelList]:
        """Returns the kernel list of each leaf, recorded at most once."""
        for leaf in _leaves_of(flats):
            if leaf not in self._kernel_lists:
                self._kernel_lists[leaf] = made = kernel_list(leaf, self._kernels[leaf])
                self._cache.keep_kernels(leaf, made)
        return self._kernel_lists

    def _runtime(
        self,
        program: Program,
        flats: Sequence[FlatProgram],
        derivative: Derivative | None,
        report: CompileReport,
        gradients: str = "apart",
    ) -> Runtime:
        """Plans the memory of a program where its kernels and the report allow it, else replays."""
        num_results = len(program.outputs)
        why = report.unplanned or self._why_unplanned(flats) or why_written(program, derivative)
        report.unplanned = why
        if why:
            self._make_kernels(_leaves_of(flats))
            executables = [Executable(flat, self._kernels) for flat in flats]
            backward = executables[1] if derivative is not None else None
            return ReplayRuntime(executables[0], backward, num_results)
        planned = self._planned(program, flats, derivative, gradients)
        report.peak_bytes = planned.plan.peak_bytes
        report.arena_bytes = planned.arena_bytes
        report.lower_bound_bytes = planned.plan.lower_bound_bytes
        num_saved = len(flat_types([derivative.saved_type])) if derivative is not None else 0
        return PlannedRuntime(planned, num_results, num_saved)

    @property
    def _gradients(self) -> str:
        """A budget bounds what a forward in flight holds, which is less without gradients."""
        return "apart" if isinstance(self.options.recompute, Budget) else "overlaid"

    def _planned(
        self,
        program: Program,
        flats: Sequence[FlatProgram],
        derivative: Derivative | None,
        gradients: str = "apart",
    ) -> PlannedProgram:
        model_inputs = [i for i, s in enumerate(program.sources) if isinstance(s, ModelTensor)]
        num_returned, sources = returned_of(program, derivative)
        lists = self._lists(flats)
        names = [program.sources[i].name for i in model_inputs]
        make = partial(PlannedProgram, tools=self._tools, gradients=gradients, names=names)
        return make(flats, lists, model_inputs, num_returned, sources)

    def _likely_peak(self, program: Program, request: Request) -> int:
        """What :meth:`_peak_of` will say, told without kernels."""
        derivative = self._differentiator.of(request)
        assert derivative is not None
        flats = [link(self._decompose(p)) for p in programs_of(program, derivative)]
        if self._why_never_planned(flats) or why_written(program, derivative):
            return derivative.saved_type.num_bytes
        returned, sources = returned_of(program, derivative)
        return least_bytes(
            lay_out(flats, self._estimates.lists(flats, self._kernel_lists), returned, sources)
        )

    def _peak_of(self, program: Program, request: Request) -> int:
        """Links a program for one choice of what is saved; returns its peak in bytes.

        Where memory is not planned, that is what the forward saves.
        """
        derivative = self._differentiator.of(request)
        assert derivative is not None
        programs = [self._decompose(p) for p in programs_of(program, derivative)]
        self._lower(programs)
        flats = [link(p) for p in programs]
        if self._why_unplanned(flats) or why_written(program, derivative):
            return derivative.saved_type.num_bytes
        return self._planned(program, flats, derivative).held_bytes

    def _why_unplanned(self, flats: Sequence[FlatProgram]) -> str:
        why = self._why_never_planned(flats)
        return why or self._why_not_recorded(flats)

    def _why_not_recorded(self, flats: Sequence[FlatProgram]) -> str:
        for leaf in _leaves_of(flats):
            if leaf not in self._kernel_lists and not can_record(self._kernels[leaf]):
                return f"the kernels of @{leaf.name} are not a plain list of launches"
        return ""

    def _why_never_planned(self, flats: Sequence[FlatProgram]) -> str:
        """Why memory is not planned, whatever the kernels are."""
        if self.options.backend != "inductor":
            return f"backend {self.options.backend} runs operator by operator"
        return _why_not_on_cpu(flats)

    def _known(self, program: Program) -> Program:
        """Replaces leaves by equal ones that an earlier compile has seen."""
        return map_leaves(program, lambda leaf: self._leaves.setdefault(_LeafKey(leaf), leaf))

    def _decompose(self, program: Program) -> Program:
        def decomposed(leaf: Leaf) -> Leaf:
            if leaf not in self._decomposed:
                make = partial(decompose_leaf, leaf, self.backend)
                self._decomposed[leaf] = self._cache.decomposed(leaf, make)
            return self._decomposed[leaf]

        return map_leaves(program, decomposed)

    def _lowered(self, programs: Sequence[Program], report: CompileReport) -> list[Program]:
        """Decomposes programs and makes what kernels they need; notes both in the report."""
        with report.timed("decompose") as nodes:
            found = [verify(self._decompose(p)) for p in programs]
            nodes.count = sum(p.num_nodes() for p in found)
        with report.timed("lower") as nodes:
            report.num_kernels = self._lower(found)
            nodes.count = sum(p.num_nodes() for p in found)
        return found

    def _lower(self, programs: Sequence[Program]) -> int:
        leaves = {c: None for p in programs for c in walk_closures(p) if isinstance(c, Leaf)}
        new = [c for c in leaves if c not in self._kernels and c not in self._kernel_lists]
        for leaf in new:
            launches = self._cache.kernels(leaf)
            if launches is not None:
                self._kernel_lists[leaf] = launches
        self._make_kernels([leaf for leaf in new if leaf not in self._kernel_lists])
        return len(new)

    def _make_kernels(self, leaves: Sequence[Leaf]) -> None:
        """Compiles what has no kernel yet; launches from the cache do not stand for one here."""
        new = [leaf for leaf in leaves if leaf not in self._kernels]
        with progress(len(new), "closures") as advance:
            self._kernels.update(lower_leaves(new, self.backend, advance))


def _why_not_on_cpu(flats: Sequence[FlatProgram]) -> str:
    devices = {t.device.type for flat in flats for t in flat.slot_types}
    if devices - {"cpu"}:
        return f"memory is planned on cpu only, and the program uses {sorted(devices)}"
    return ""


def capture(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    reuse: str = "marked",
    train: bool = False,
) -> Program:
    """Captures a model as a program of closures and calls; nothing is compiled or run.

    Args:
        model: any ``nn.Module``. Its parameters may be on the meta device.
        args: example positional inputs; only layouts matter.
        kwargs: example keyword inputs.
        reuse: ``"marked"`` (share instances of marked classes), ``"auto"`` (also modules that
            repeat, without any mark) or ``"off"`` (inline early).
        train: capture with grad mode on.

    Returns:
        The program; ``print(program)`` shows each closure once with its call count.

    Raises:
        CaptureError: if the model's Python cannot be traced.

    Example:
        >>> print(lazyinline.capture(model, (ids,)))
    """
    options = Options(reuse=reuse, backend="eager")
    arguments = dict(kwargs or {})
    captured = capture_model(
        model, args, arguments, reuse=options.reuse, train=train, effects="undo"
    )
    return verify(captured.program)


def _leaves_of(flats: Sequence[FlatProgram]) -> list[Leaf]:
    return list({launch.leaf: None for flat in flats for launch in flat.launches})


class _LeafKey:
    """A leaf as a dictionary key, equal to every leaf that computes the same."""

    def __init__(self, leaf: Leaf) -> None:
        self._key = leaf_key(leaf)

    def __hash__(self) -> int:
        return hash((len(self._key), self._key[0], self._key[1]))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _LeafKey) and self._key == other._key
