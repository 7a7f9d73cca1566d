"""``measure(model)``: late against early inlining, in one run, both against eager."""

from __future__ import annotations

import gc
import resource
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from ...backend.kernels import torch_inductor
from ...backend.kernels.lower import BackendName
from ...reuse.errors import PlanError, door
from ..calls.torch_slot import slots_empty
from ..capture.blocks import Reuse
from ..checks.example_inputs import check_example
from ..checks.runnable import check_runnable
from ..compiled_module import CompiledModule
from ..compiler import Compiler
from ..options import Batching, Options
from ..report import cpu_seconds
from ..training_step import LossModel, TrainingStep, compile_step
from .measurement import Seconds, Side
from .report import MeasureReport
from .timing import StepTime, time_steps
from .torch_memory import taken_bytes
from .workload import (
    StepResult,
    Workload,
    compare,
    generators_left_as_found,
    left_as_found,
)


@door
def measure(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    train: bool = True,
    micro_batches: int = 1,
    execute: bool = True,
    backend: BackendName = "inductor",
    reuse: Reuse = "auto",
) -> MeasureReport:
    """Compiles a model with late and with early inlining and compares both with eager.

    A small compile goes before, so that neither side pays for imports; the report names it.
    Inductor's cache of whole graphs is off meanwhile, its cache of C++ objects is not. The late
    side comes first, so what both sides need in C++ is charged to it. Steps are timed in rounds of
    all three, until rounds agree or time is up; where others used the machine, the report says so.

    In training a step is a forward and the gradients of a scalar result or of its ``.loss``; of a
    model with neither, all outputs are differentiated with a fixed cotangent. Train and eval modes
    stay the model's own. ``.grad``, buffers, inputs and random generators are left as found.

    Args:
        model: any ``nn.Module``.
        args: positional inputs of one step.
        kwargs: keyword inputs of one step.
        train: measure a training step; otherwise a forward without gradients.
        micro_batches: training only. Each tensor of the batch is split along dimension 0 into so
            many parts; both sides are then :func:`compile_step`, whose loss is the mean.
        execute: run the steps; otherwise only compile. The model may then be on the meta device.
        backend: ``"inductor"`` or ``"eager"``.
        reuse: what the late side shares, ``"auto"`` or ``"marked"``; early is always ``"off"``.

    Returns:
        The numbers; ``print(report)``, ``report.to_json()``, ``report.save_html(path)``.

    Raises:
        CaptureError: if the model cannot be captured.
        PlanError: if it cannot be run or measured as asked.

    Example:
        >>> print(lazyinline.measure(model, (ids, targets)))
    """
    options = Options(reuse=reuse, backend=backend)
    workload = _workload(model, args, kwargs, train, micro_batches)
    if execute:
        check_runnable(model)
    warm_up = warm_up_compiler(backend=backend, train=train)
    report = compare_sides(workload, options) if execute else compile_sides(workload, options)
    return replace(report, warm_up=warm_up)


def _workload(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    train: bool,
    micro_batches: int,
) -> Workload:
    check_example("measure", model, args)
    check_micro_batches(micro_batches, train=train)
    return Workload(model, tuple(args), dict(kwargs or {}), train, micro_batches)


def check_micro_batches(micro_batches: int, *, train: bool) -> None:
    """Raises PlanError for a number of micro-batches that no step can have."""
    if micro_batches < 1:
        raise PlanError(f"micro_batches={micro_batches}: there must be at least one.")
    if micro_batches > 1 and not train:
        raise PlanError(
            f"micro_batches={micro_batches} goes with training, where gradients are summed over "
            "them. For inference leave it 1."
        )


def compare_sides(workload: Workload, options: Options) -> MeasureReport:
    """Compiles and runs both sides next to eager; see :func:`measure`."""
    model = workload.model
    with left_as_found(workload) as restore, slots_empty(model), _graph_cache_off(options):
        expected = workload.step(model)
        late, run_late = _run_side(workload, options, expected, restore)
        off = replace(options, reuse="off")
        early, run_early = _run_side(workload, off, expected, restore)
        del expected
        steps = {"eager": model, "late": run_late, "early": run_early}
        timed = {name: partial(workload.step, module) for name, module in steps.items()}
        timing = time_steps(timed, workload.devices())
        taken = {name: taken_bytes(step, workload.devices()) for name, step in timed.items()}
    times = timing.steps
    late = _timed(late, run_late, times["late"], taken["late"])
    early = _timed(early, run_early, times["early"], taken["early"])
    report = _report(workload, options, late, early)
    return replace(
        report,
        eager=times["eager"],
        others_share=timing.others_share,
        eager_held_bytes=taken["eager"],
    )


def compile_sides(workload: Workload, options: Options) -> MeasureReport:
    """Compiles both sides and runs nothing; see :func:`measure`."""
    with generators_left_as_found(), _graph_cache_off(options):
        late = _compile_side(workload, options)
        early = _compile_side(workload, replace(options, reuse="off"))
    return _report(workload, options, late, early)


def warm_up_compiler(*, backend: BackendName, train: bool) -> Seconds:
    """Compiles a tiny model, so that imports and first uses are paid; returns what that cost."""
    start = Seconds(cpu_seconds(), time.perf_counter())
    options = Options(backend=backend)
    with generators_left_as_found(), _graph_cache_off(options), torch.set_grad_enabled(train):
        Compiler(options).compile(_Tiny(), (torch.ones(4, 8),), {}, train=train)
    return Seconds(cpu_seconds() - start.cpu_s, time.perf_counter() - start.wall_s)


class _Tiny(nn.Module):
    """A few of the operators that any model has."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.gelu(self.norm(self.linear(x))).softmax(-1).square().sum()


def _run_side(
    workload: Workload, options: Options, expected: StepResult, restore: Callable[[], None]
) -> tuple[Side, CompiledModule | TrainingStep]:
    module = _to_compile(workload, options)
    restore()
    gc.collect()  # so that no side pays for what was there before
    with _children() as spent:
        workload.step(module)
    compiled = module.last_report
    assert compiled is not None
    restore()  # compiling may have drawn random numbers
    errors = compare(workload.step(module), expected)
    return Side(compiled, spent(), errors=errors), module


def _to_compile(workload: Workload, options: Options) -> CompiledModule | TrainingStep:
    """Returns what compiles itself in its first step."""
    if workload.micro_batches == 1:
        return CompiledModule(workload.model, options)
    return compile_step(
        workload.model,
        micro_batches=workload.micro_batches,
        reuse=options.reuse,
        backend=options.backend,
    )


def _timed(
    side: Side, module: CompiledModule | TrainingStep, step: StepTime, taken: int | None
) -> Side:
    held = None if taken is None else taken + (side.compiled.arena_bytes or 0)
    again = module.last_report is not side.compiled
    return replace(side, step=step, held_bytes=held, compiled_again=again)


def _compile_side(workload: Workload, options: Options) -> Side:
    compiler = Compiler(options)
    gc.collect()
    with _children() as spent, torch.set_grad_enabled(workload.train):
        if workload.micro_batches == 1:
            _, report = compiler.compile(
                workload.model, workload.args, workload.kwargs, train=workload.train
            )
        else:
            args, kwargs = workload.parts()[0]
            batching = Batching(workload.micro_batches)
            model = LossModel(workload.model, None)
            _, report = compiler.compile_step(model, args, kwargs, batching)
    return Side(report, spent())


@contextmanager
def _children() -> Iterator[Callable[[], float]]:
    """Yields a function that tells the CPU-seconds of child processes in the block."""
    before, spent = _children_cpu_s(), 0.0

    def tell() -> float:
        return spent

    yield tell
    spent = _children_cpu_s() - before


def _children_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _graph_cache_off(options: Options) -> AbstractContextManager[Any]:
    return torch_inductor.graph_cache_off() if options.backend == "inductor" else nullcontext()


def _report(workload: Workload, options: Options, late: Side, early: Side) -> MeasureReport:
    return MeasureReport(
        model=type(workload.model).__name__,
        train=workload.train,
        backend=options.backend,
        late=late,
        early=early,
        micro_batches=workload.micro_batches,
        threads=torch.get_num_threads(),
        peak_bytes=late.compiled.peak_bytes,
        lower_bound_bytes=late.compiled.lower_bound_bytes,
    )
