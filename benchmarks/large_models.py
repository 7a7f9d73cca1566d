"""The training step of a model too large for this machine, compiled and planned; nothing runs.

    python benchmarks/large_models.py llama-13b
    python benchmarks/large_models.py llama-13b --target cuda:sm_90     # a GPU that is not here
    python benchmarks/large_models.py 175b --rank first                 # one rank of a pipeline
    python benchmarks/large_models.py llama-13b --html page.html --json rows.json

The parameters are on the meta device, so a program for hundreds of gigabytes is compiled, planned
and counted on a small machine: once keeping everything, and once recomputing each block, or for a
GPU as little as fits into it.
"""

from __future__ import annotations

import argparse
import json
import pathlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, TypeVar

import decoders
import torch

from lazyinline.autodiff.training_program import Order
from lazyinline.backend.kernels.lower import BackendName
from lazyinline.frontend.compiled import CompiledStep
from lazyinline.frontend.compiler import Compiler
from lazyinline.frontend.marks import lazy_inline
from lazyinline.frontend.options import Batching, Options
from lazyinline.frontend.page.page import PageData, compile_page, gpu_tiles, write_page
from lazyinline.frontend.page.sections import passes_section
from lazyinline.frontend.passes.state import step_goal
from lazyinline.frontend.report import CompileReport
from lazyinline.recompute.planner import Budget, Policy

Report = TypeVar("Report")

GIB = 2**30
WAYS = ("recompute nothing", "recompute each block")


@dataclass(frozen=True)
class LargeModel:
    """A published size, and how it is trained.

    Attributes:
        layers: number of blocks.
        micro_batches: how many one step accumulates.
        sizes: further fields of :class:`~decoders.DecoderConfig`.
    """

    layers: int
    micro_batches: int
    sizes: dict[str, Any] = field(default_factory=dict)


LARGE_MODELS = {
    "llama-13b": LargeModel(
        layers=40,
        micro_batches=16,
        sizes={
            "hidden": 5120,
            "num_heads": 40,
            "ffn": 13824,
            "vocab": 32000,
            "seq": 2048,
            "batch": 1,
        },
    ),
}


@dataclass(frozen=True)
class LargeReport:
    """What compiling a large model's training step took, and what it would need to run.

    Attributes:
        name: of the model.
        num_parameters: numbers the model learns.
        micro_batches: how many one step accumulates.
        order: how they follow one another.
        num_nodes: graph nodes held of the whole step, forward and backward.
        num_nodes_if_inlined: what they would be if every call were inlined.
        num_launches: kernel launches of one step.
        peak_bytes: size of the planned arena (parameters and gradients that are given not counted).
        lower_bound_bytes: largest sum of live bytes.
        compiled: seconds and nodes pass by pass.
    """

    name: str
    num_parameters: int
    micro_batches: int
    order: Order
    num_nodes: int
    num_nodes_if_inlined: int
    num_launches: int
    peak_bytes: int
    lower_bound_bytes: int
    compiled: CompileReport

    def __str__(self) -> str:
        lines = [
            f"{self.name}: {self.num_parameters / 1e9:.1f}e9 parameters, training step of "
            f"{self.micro_batches} micro-batches, {self.order}; nothing executed",
            f"  {self.num_nodes} nodes held, {self.num_nodes_if_inlined} if inlined; "
            f"{self.num_launches} launches",
            f"  arena {self.peak_bytes / GIB:.1f} GiB, "
            f"{self.peak_bytes / self.lower_bound_bytes:.4f} of the lower bound",
        ]
        return "\n".join([*lines, self.compiled.details()])


def compile_large(
    name: str,
    *,
    order: Order = "forward_first",
    backend: BackendName = "inductor",
    layers: int | None = None,
    micro_batches: int | None = None,
    recompute: Policy = None,
    target: str | None = None,
) -> LargeReport:
    """Compiles the training step of a large model, from capture to the linked, planned program.

    Args:
        name: one of ``LARGE_MODELS``.
        order: see :func:`lazyinline.compile_step`.
        backend: what lowers it; the kernels are built, and never run.
        layers: instead of the model's own number.
        micro_batches: instead of the model's own number.
        recompute: what is computed again in the backward, see :func:`lazyinline.compile_step`.
        target: a GPU; the model is then in bfloat16, as such models are trained there.
    """
    large = LARGE_MODELS[name]
    lazy_inline(decoders.DecoderBlock)
    with torch.device("meta"):
        model, args = decoders.llama(layers or large.layers, **large.sizes)
    if target is not None:
        model = model.to(torch.bfloat16)
    batching = Batching(micro_batches or large.micro_batches, order)
    compiler = Compiler(Options(backend=backend, recompute=recompute, target=target))
    compiled, report = compiler.compile(model, args, {}, step_goal(batching))
    assert isinstance(compiled, CompiledStep)
    return _report(name, sum(p.numel() for p in model.parameters()), batching, compiled, report)


def _report(
    name: str,
    num_parameters: int,
    batching: Batching,
    compiled: CompiledStep,
    report: CompileReport,
) -> LargeReport:
    program, plan = compiled.step.program, compiled.runner.plan
    return LargeReport(
        name,
        num_parameters,
        batching.micro_batches,
        batching.order,
        program.num_nodes(),
        program.num_nodes_if_inlined(),
        compiled.runner.num_launches,
        plan.peak_bytes,
        plan.lower_bound_bytes,
        report,
    )


def bench_large(name: str, say: Callable[[str], None], **options: Any) -> list[LargeReport]:
    """Compiles a large model twice, and says what it took.

    Once keeping everything; once recomputing each block, or for a GPU as little as fits into it.
    """
    compile_with = partial(compile_large, name, **options)
    if options.get("target") is None:
        return with_and_without_recompute(name, say, compile_with)
    whole = _compiled(name, say, compile_with, None)
    gpu = whole.compiled.gpu
    assert gpu is not None
    # What is left there for activations, gradients, scratch and cuBLAS.
    left = Budget(saved_bytes=max(gpu.target.usable_bytes - gpu.given_bytes, 0))
    return [whole, _compiled(name, say, compile_with, left)]


def with_and_without_recompute(
    what: str, say: Callable[[str], None], compile_with: Callable[..., Report]
) -> list[Report]:
    """Compiles twice, ``recompute=None`` and ``"full"``, and says what each took."""
    return [_compiled(what, say, compile_with, recompute) for recompute in (None, "full")]


def _compiled(
    what: str, say: Callable[[str], None], compile_with: Callable[..., Report], recompute: Policy
) -> Report:
    if isinstance(recompute, Budget):
        policy = f"recompute what does not fit into {(recompute.saved_bytes or 0) / GIB:.1f} GiB"
    else:
        policy = "recompute nothing" if recompute is None else "recompute each block"
    say(f"compiling {what} on {torch.get_num_threads()} threads, {policy} ...")
    report = compile_with(recompute=recompute)
    say(str(report))
    return report


def large_page(reports: Sequence[LargeReport]) -> PageData:
    """Returns the data of a page on a large model's step, compiled and not run.

    Args:
        reports: the step without and with recompute; the first is drawn.
    """
    first, second = reports
    gpu = second.compiled.gpu
    ways = WAYS if gpu is None else (WAYS[0], "recompute what does not fit")
    sides = {way: report.compiled for way, report in zip(ways, reports, strict=True)}
    page = compile_page(first.compiled, title_of(first))
    page["verdict"]["tiles"] += gpu_tiles(gpu, ways[1])
    return page | {"passes": passes_section(sides)}


def title_of(report: Any) -> str:
    return f"{report.name}: {report.num_parameters / 1e9:.1f}e9 parameters"


def as_json(reports: Sequence[Any], page: PageData) -> str:
    """Returns the numbers of all reports; the plan of a pipeline is in the page, not among them."""
    rows = [asdict(report) for report in reports]
    for row in rows:
        row.pop("plan", None)
    return json.dumps({"about": page["about"], "rows": rows}, default=str) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    from rank_bench import RANK_MODELS, RANKS, bench_rank, rank_page  # which imports this file

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", choices=(*LARGE_MODELS, *RANK_MODELS))
    parser.add_argument("--layers", type=int, help="instead of the model's own")
    parser.add_argument("--micro-batches", type=int, help="instead of the model's own")
    help_ = f"whose program of 175b: {', '.join(RANKS)} or numbers; default middle"
    parser.add_argument("--rank", nargs="+", default=["middle"], help=help_)
    parser.add_argument("--target", help="a GPU that need not be here, with llama-13b: cuda:sm_90")
    parser.add_argument("--backend", choices=("inductor", "eager"), default="inductor")
    parser.add_argument("--json", type=pathlib.Path, help="write the numbers")
    parser.add_argument("--html", type=pathlib.Path, help="write a page")
    options = parser.parse_args(arguments)
    how = {name: getattr(options, name) for name in ("layers", "micro_batches", "backend")}
    if options.model in RANK_MODELS:
        if options.target:
            parser.error("--target goes with llama-13b")
        reports: Sequence[Any] = bench_rank(options.model, print, ranks=options.rank, **how)
        page = rank_page(reports)
    else:
        reports = bench_large(options.model, print, target=options.target, **how)
        page = large_page(reports)
    if options.html is not None:
        options.html.write_text(write_page(page), encoding="utf-8")
    if options.json is not None:
        options.json.write_text(as_json(reports, page), encoding="utf-8")


if __name__ == "__main__":
    main()
