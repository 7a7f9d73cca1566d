"""``lazyinline bench``: late against early inlining over the number of layers, row by row."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...backend.kernels.lower import BackendName
from ..marks import lazy_inline
from ..options import Options
from ..page.write import about
from . import models
from .measure import check_micro_batches, compare_sides, compile_sides, measure
from .measurement import Seconds, error_text
from .report import MeasureReport
from .target import Target, load_target
from .workload import Workload

Print = Callable[[str], None]

OWN_MODELS = ("llama", "gpt")
DEFAULT_LAYERS = (4, 8, 16)

HEAD = (
    f"{'':>6} {'graph nodes':>15} {'compile CPU s':>15} {'compile wall s':>15}"
    f" {'step ms (fastest)':>23} {'error, late':>19}\n"
    f"{'layers':>6} {'held':>7} {'inlined':>7} {'late':>7} {'early':>7} {'late':>7} {'early':>7}"
    f" {'eager':>7} {'late':>7} {'early':>7} {'output':>9} {'gradient':>9}"
)


@dataclass(frozen=True)
class Plan:
    """What to measure.

    Attributes:
        model: ``llama``, ``gpt`` or a target.
        layers: numbers of layers; empty for a target.
        train: training steps rather than inference.
        micro_batches: parts of a step; of the own models each has the usual batch.
    """

    model: str = "llama"
    layers: tuple[int, ...] = DEFAULT_LAYERS
    train: bool = True
    backend: BackendName = "inductor"
    micro_batches: int = 1


def bench(plan: Plan, say: Print) -> list[MeasureReport]:
    """Measures all rows; says each as soon as it is there.

    Raises:
        LazyInlineError: if the target is bad, or cannot be compiled.
    """
    check_micro_batches(plan.micro_batches, train=plan.train)
    reports = []
    say(f"late against early inlining: {title(plan)}")
    measured = _own_rows(plan, say) if plan.model in OWN_MODELS else _target_row(plan, say)
    for report in measured:
        say(row(report))
        reports.append(report)
    for line in _conclusion(reports):
        say(line)
    return reports


def _own_rows(plan: Plan, say: Print) -> Iterator[MeasureReport]:
    """Yields a report for each number of layers.

    The smallest model is compiled twice before, both ways. That pays for imports and for building
    the C++ kernels, which all depths share: the rows then show what the compilers do.
    """
    options = Options(backend=plan.backend)
    smallest = min(plan.layers)
    say(f"warm-up: {smallest} layers, late and early; imports, C++ kernels built ...")
    warm = compile_sides(_own_workload(plan, smallest), options)
    sides = [side.compiled for side in warm.sides.values()]
    spent = Seconds(sum(s.cpu_s for s in sides), sum(s.wall_s for s in sides))
    say(f"... {spent.cpu_s:.1f} CPU s, {spent.wall_s:.1f} wall s, which count on neither side\n")
    say(HEAD)
    for layers in plan.layers:
        report = compare_sides(_own_workload(plan, layers), options)
        yield replace(report, model=plan.model, layers=layers, warm_up=spent)


def _own_workload(plan: Plan, layers: int) -> Workload:
    lazy_inline(models.DecoderBlock if plan.model == "llama" else models.GptBlock)
    build: Any = models.llama if plan.model == "llama" else models.gpt
    batch = models.DecoderConfig(0).batch * plan.micro_batches
    model, (ids, targets) = build(layers, batch=batch)
    if plan.train:
        return Workload(model, (ids, targets), {}, True, plan.micro_batches)
    return Workload(model.eval(), (ids,), {}, train=False)


def _target_row(plan: Plan, say: Print) -> Iterator[MeasureReport]:
    target: Target = load_target(plan.model)
    say(HEAD)
    report = measure(
        target.model,
        target.args,
        target.kwargs,
        train=plan.train,
        micro_batches=plan.micro_batches,
        backend=plan.backend,
    )
    yield replace(report, model=plan.model)


def title(plan: Plan) -> str:
    """Says what is measured, and on what."""
    kind = "training" if plan.train else "inference"
    if plan.micro_batches > 1:
        kind += f" of {plan.micro_batches} micro-batches"
    sizes = ""
    if plan.model in OWN_MODELS:
        config = models.DecoderConfig(0)
        sizes = f" (hidden {config.hidden}, seq {config.seq}, batch {config.batch})"
    return (
        f"{plan.model}{sizes}, {kind}, backend {plan.backend}; "
        f"torch {torch.__version__}, {torch.get_num_threads()} threads"
    )


def row(report: MeasureReport) -> str:
    """One row of the table."""
    late, early = report.late, report.early
    layers = "-" if report.layers is None else str(report.layers)
    seconds = (late.compiled.cpu_s, early.compiled.cpu_s, late.compiled.wall_s)
    steps = [step.minimum_ms if step else 0.0 for step in (report.eager, late.step, early.step)]
    errors = late.errors
    return (
        f"{layers:>6} {late.compiled.num_nodes:>7} {late.compiled.num_nodes_if_inlined:>7}"
        + "".join(f" {s:>7.2f}" for s in (*seconds, early.compiled.wall_s))
        + "".join(f" {ms:>7.1f}" for ms in steps)
        + f" {error_text(errors.max_abs_error):>9} {error_text(errors.max_rel_grad_error):>9}"
    )


def _conclusion(reports: Sequence[MeasureReport]) -> Iterator[str]:
    yield ""
    first, last = reports[0], reports[-1]
    if len(reports) > 1:
        growth = [
            f"{name} {a.compiled.cpu_s:.2f} -> {b.compiled.cpu_s:.2f} CPU s"
            for (name, a), b in zip(first.sides.items(), last.sides.values(), strict=True)
        ]
        yield f"compiling {first.layers} -> {last.layers} layers: {', '.join(growth)}"
    for report in reports:
        if report.layers is None:
            yield from report.notes()
            continue
        yield from [f"{report.noise} ({report.layers} layers)"] if report.noise else []
        yield from report.warnings()
    yield "errors are against eager: largest absolute of the output, largest relative of a gradient"


def to_json(plan: Plan, reports: Sequence[MeasureReport]) -> str:
    """Returns all rows, and where they were measured."""
    where = {
        "title": title(plan),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "machine": about(),
    }
    rows = [report.to_dict() for report in reports]
    return json.dumps({"about": where, "rows": rows}, indent=2, allow_nan=False) + "\n"
