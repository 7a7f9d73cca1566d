"""``measure(model)``: late against early inlining, in one run, both against eager."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ...backend.kernels import torch_inductor
from ...backend.kernels.lower import BackendName
from ...reuse.errors import PlanError, door
from ..capture.blocks import Reuse
from ..checks.models import check_example
from ..checks.refusals import check_runnable
from ..compiler import Compiler
from ..options import Batching, Options
from ..passes.state import Goal, step_goal
from ..report import CompileReport
from ..training_step import LossModel
from .report import MeasureReport, Step
from .workload import Workload, errors, generators_kept, split_batch

if TYPE_CHECKING:
    from torch.utils.benchmark import Measurement

ROUNDS, ROUND_S = 3, 0.5
"""Steps of all ways are timed by turns, so many times and for so many seconds each."""


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

    A small compile goes before, so that neither side pays for imports. Inductor's cache of whole
    graphs is off meanwhile, its cache of C++ objects is not; the late side comes first, so what
    both sides need in C++ is charged to it. ``torch.utils.benchmark`` times the steps, by turns.

    In training a step is a forward and the gradients of a scalar result or of its ``.loss``; of a
    model with neither, all outputs are differentiated with a fixed cotangent. Train and eval modes
    stay the model's own. Copies are run: the model, its ``.grad`` and the inputs stay as they are.

    Args:
        model: any ``nn.Module`` that can be copied.
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
    check_example("measure", model, args)
    if micro_batches < 1:
        raise PlanError(f"micro_batches={micro_batches}: there must be at least one.")
    if micro_batches > 1 and not train:
        raise PlanError(
            f"micro_batches={micro_batches} goes with training, where gradients are summed over "
            "them. For inference leave it 1."
        )
    late, early = (Options(reuse=one, backend=backend) for one in (reuse, "off"))
    if execute:
        check_runnable(model)
    warm_up_compiler(backend=backend, train=train)
    found = partial(
        MeasureReport, type(model).__name__, train, backend, micro_batches, torch.get_num_threads()
    )
    work = partial(Workload, model, args, kwargs or {}, train=train, micro_batches=micro_batches)
    with generators_kept(), graph_cache_off(backend):
        if not execute:
            compiled = partial(_compiled, model, args, kwargs or {}, train, micro_batches)
            return found(compiled(late), compiled(early))
        sides = {"late": work(options=late), "early": work(options=early)}
        for side in sides.values():
            gc.collect()  # so that no side pays for what was there before
            _seeded(side)  # compiles
        reports = {name: side.run.last_report for name, side in sides.items()}
        ways = {"eager": work()} | sides
        _seeded(ways["eager"])  # the first step makes what later ones reuse, the second counts
        results = {name: _seeded(way) for name, way in ways.items()}
        # Before more steps: they write their gradients where these lie.
        off = {name: errors(results[name], results["eager"]) for name in sides}
        steps = _timed({name: way.step for name, way in ways.items()})
    again = {name for name, side in sides.items() if side.run.last_report is not reports[name]}
    assert not again, f"{again}: compiled again for the same inputs, which is not a step"
    return found(reports["late"], reports["early"], steps, off)


def warm_up_compiler(*, backend: BackendName, train: bool) -> None:
    """Compiles a tiny model, so that imports and first uses are paid."""
    with generators_kept(), graph_cache_off(backend), torch.device("cpu"):
        tiny = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Softmax(-1))
        _compiled(tiny, (torch.ones(4, 8),), {}, train, 1, Options(backend=backend))


def _compiled(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    train: bool,
    micro_batches: int,
    options: Options,
) -> CompileReport:
    """Compiles, and runs nothing."""
    compiler = Compiler(options)
    with torch.set_grad_enabled(train):
        if micro_batches == 1:
            return compiler.compile(model, args, kwargs, Goal(train=train))[1]
        args, kwargs = split_batch(args, kwargs, micro_batches)[0]
        loss = LossModel(model, None)
        return compiler.compile(loss, args, kwargs, step_goal(Batching(micro_batches)))[1]


def _seeded(work: Workload) -> Step:
    torch.manual_seed(0)  # dropout draws the same in every way
    return work.step()


def _timed(steps: Mapping[str, Callable[[], Any]]) -> dict[str, Measurement]:
    """Times steps, by turns."""
    from torch.utils.benchmark import Measurement, Timer  # with it PyTorch's builder of extensions

    threads = torch.get_num_threads()
    timers = [Timer("step()", globals={"step": s}, num_threads=threads) for s in steps.values()]
    rounds = [[t.blocked_autorange(min_run_time=ROUND_S) for t in timers] for _ in range(ROUNDS)]
    times = [Measurement.merge(of_one)[0] for of_one in zip(*rounds, strict=True)]
    return dict(zip(steps, times, strict=True))


def graph_cache_off(backend: BackendName) -> AbstractContextManager[Any]:
    """Keeps Inductor from taking whole graphs from its cache."""
    return torch_inductor.graph_cache_off() if backend == "inductor" else nullcontext()
