"""The commands of ``lazyinline``, run with their parsed arguments, and the rows of ``bench``."""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..backend.files.container import open_parts
from ..backend.files.torch_store import DiskCache, default_directory, max_bytes
from ..reuse.errors import CacheError, LazyInlineError
from ..reuse.ir.printer import Shown, folded, format_program
from ..reuse.process import own_places
from . import inspection
from .advise import advise
from .fit import fit
from .measure import MeasureReport, measure
from .onnx_file import export_onnx
from .options import Options
from .page.page import about, measured_page, write_page
from .page.sections import error_text
from .pipeline import Pipeline
from .tracing.frames import is_library_frame, is_standard_frame

DEFAULT_LAYERS = (4, 8, 16)
HEAD = (
    f"{'':>6} {'graph nodes':>15} {'compile CPU s':>15} {'compile wall s':>15}"
    f" {'step ms (fastest)':>23} {'error, late':>19}\n"
    f"{'layers':>6} {'held':>7} {'inlined':>7} {'late':>7} {'early':>7} {'late':>7} {'early':>7}"
    f" {'eager':>7} {'late':>7} {'early':>7} {'output':>9} {'gradient':>9}"
)


class Decoder(nn.Module):
    """A GPT-like decoder of PyTorch's own layers."""

    def __init__(self, layers: int, hidden: int = 256, vocab: int = 1000, seq: int = 64) -> None:
        super().__init__()
        block = nn.TransformerEncoderLayer(
            *(hidden, 4, 4 * hidden, 0.0, "gelu"), batch_first=True, norm_first=True
        )
        self.embed, self.head = nn.Embedding(vocab, hidden), nn.Linear(hidden, vocab)
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        mask = nn.Transformer.generate_square_subsequent_mask(seq)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Tensor:
        """Returns the loss if targets are given, else the logits."""
        logits: Tensor = self.head(self.blocks(self.embed(ids), self.mask, is_causal=True))
        return logits if targets is None else F.cross_entropy(logits.mT, targets)


def decoder(
    layers: int, *, batch: int = 2, train: bool = True
) -> tuple[nn.Module, tuple[Tensor, ...], dict[str, Any]]:
    """Returns the default model of ``bench``, and a batch."""
    ids, targets = torch.randint(1000, (2, batch, 64), device="cpu").unbind()
    return Decoder(layers).train(train), (ids, targets) if train else (ids,), {}


def bench(
    make: Callable[..., tuple[nn.Module, tuple[Any, ...], Mapping[str, Any]]],
    layers: Sequence[int],
    say: Callable[[str], None],
    **options: Any,
) -> list[MeasureReport]:
    """Measures all rows and says each as soon as it is known.

    ``make`` returns a model and its inputs, for a number of layers if ``layers`` has some;
    ``options`` are those of :func:`lazyinline.measure`.
    """
    # All depths share C++ kernels. Without a warm-up the first row would pay for them.
    if layers:
        say(f"warm-up: {min(layers)} layers, all ways; imports, C++ kernels built ...")
        measure(*make(min(layers)), **options, execute=bool(options.get("against")))
    say(f"late: different blocks compiled once, inlined at link. early: all inlined first.\n{HEAD}")
    reports = []
    for given in [[depth] for depth in layers] or [[]]:
        report = measure(*make(*given), **options)
        reports.append(replace(report, layers=given[0] if given else None))
        say(_row(reports[-1]))
        for name in report.others:
            say(f"{'':>6} {report.other_text(name)}")
    others = {one.other_text(name) for one in reports for name in one.others}
    for note in dict.fromkeys(note for report in reports for note in report.notes()):
        if note not in others:  # printed below its row already
            say(note)
    say("errors are against eager: largest absolute of the output, largest relative of a gradient")
    return reports


def _row(report: MeasureReport) -> str:
    late, early = report.late, report.early
    seconds = (late.cpu_s, early.cpu_s, late.wall_s, early.wall_s)
    return (
        f"{report.layers or '-':>6} {late.num_nodes:>7} {late.num_nodes_if_inlined:>7}"
        + "".join(f" {s:>7.2f}" for s in seconds)
        + "".join(f" {1e3 * min(report.steps[n].times):>7.1f}" for n in ("eager", *report.sides))
        + "".join(f" {error_text(error):>9}" for error in report.errors["late"][:2])
    )


def to_json(reports: Sequence[MeasureReport]) -> str:
    """Returns all rows, with a description of the machine."""
    found = {"about": about(), "rows": [report.to_dict() for report in reports]}
    return json.dumps(found, indent=2, allow_nan=False) + "\n"


# ---- commands ------------------------------------------------------------------------------------


def run_bench(options: argparse.Namespace) -> None:
    """Runs ``bench``: measures late against early inlining; prints a row per depth."""
    _check_folders(options.json, options.html)
    micro_batches, layers = options.micro_batches or 1, options.layers or ()
    if options.model is None:
        # A micro-batch has as many sequences as a whole step without them, for comparable rows.
        make: Callable[..., Any] = partial(
            decoder, batch=2 * micro_batches, train=not options.infer
        )
        layers = layers or DEFAULT_LAYERS
    else:
        make = partial(inspection.load_target, options.model)
    reports = bench(
        make,
        layers,
        lambda line: print(folded(line), flush=True),
        train=not options.infer,
        micro_batches=micro_batches,
        backend=options.backend,
        against=options.against,
    )
    if options.json is not None:
        options.json.write_text(to_json(reports), encoding="utf-8")
    if options.html is not None:
        page = measured_page([(one.to_dict(), one.sides) for one in reports], reports[-1].title())
        options.html.write_text(write_page(page), encoding="utf-8")


def run_inspect(options: argparse.Namespace) -> None:
    """Runs ``inspect``: prints a model's programs."""
    if options.passes:
        print(inspection.pass_lists(), end="")
        return
    if options.target is None:
        form = inspection.FORM
        raise LazyInlineError(f"inspect needs a target, or --passes. A target is {form}.")
    if options.diff and options.after is None:
        raise LazyInlineError("--diff shows what one pass changed: name it with --after PASS.")
    if options.level == "primitive" and (options.after or options.recompute):
        raise LazyInlineError(
            "--level primitive shows a model before any backend is chosen. Leave out --after and "
            "--recompute."
        )
    if _is_file(options.target):
        if options.after or options.level == "primitive" or options.diff:
            raise LazyInlineError(
                "A file has captured programs only: leave out --after, --level and --diff."
            )
        for what, program in inspection.programs_of_file(options.target):
            print(folded(f"// {what}"), format_program(program), sep="\n", end="")
        return
    target = inspection.load_target(options.target)
    settings = Options(reuse=options.reuse, backend=options.backend, recompute=options.recompute)
    source: Shown = "show" if options.source else "hide"
    if options.after is None:
        of_primitives = options.level == "primitive"
        show = inspection.show_primitives if of_primitives else inspection.show_captured
        print(show(target, settings, train=options.train, source=source), end="")
        return
    text = inspection.show_after(
        options.after,
        target,
        settings,
        way=options.way,
        train=options.train,
        micro_batches=options.micro_batches,
        diff=options.diff,
    )
    print(text, end="")


def run_export(options: argparse.Namespace) -> None:
    """Runs ``export``: writes an ONNX file."""
    same: dict[str, Any] = {"functions": not options.flat, "opset": options.opset}
    if _is_file(options.target):
        found = inspection.programs_of_file(options.target, bound=True)
        program = next((one for what, one in found if what.endswith("inference")), None)
        if program is None or options.train:
            raise LazyInlineError(
                f"Only inference programs of a file are exported, and {options.target} has none: "
                "save what lazyinline.compile returned, after a call without gradients."
            )
        print(export_onnx(program, (), options.file, verify=False, **same))
        return
    model, args, kwargs = inspection.load_target(options.target)
    same |= {"kwargs": kwargs, "reuse": options.reuse, "train": options.train}
    print(export_onnx(model, args, options.file, verify=not options.no_verify, **same))


def run_report(options: argparse.Namespace) -> None:
    """Runs ``report``: measures a model, prints the report, writes a page."""
    _check_folders(options.html)
    if _is_file(options.target):
        with open_parts(options.target, None) as parts:
            print(*(f"{parts.size_of(name):>12,}  {name}" for name in parts.names), sep="\n")
        for ranks, made in inspection.opened_as_ranks(options.target):
            print(*([f"// {ranks}", made.plan] if ranks else []), made.last_report, sep="\n")
            if options.html is not None:
                page = options.html.with_stem(
                    "-".join([options.html.stem, *ranks.replace(",", "").split()])
                )
                shown = made.plan if isinstance(made, Pipeline) else made
                (shown if ranks else made.last_report).save_html(page)
        return
    model, args, kwargs = inspection.load_target(options.target)
    report = measure(
        model,
        args,
        kwargs,
        train=not options.infer,
        micro_batches=options.micro_batches,
        execute=not any(p.is_meta for p in model.parameters()),
        backend=options.backend,
    )
    print(report)
    if options.html is not None:
        report.save_html(options.html)


def _is_file(target: str | None) -> bool:
    """Whether a target is a file of ``lazyinline.save``."""
    return (
        target is not None
        and not target.endswith((".py", ".pt2"))
        and pathlib.Path(target).is_file()
    )


def _check_folders(*files: pathlib.Path | None) -> None:
    """Raises LazyInlineError for a file without a folder, before the slow work begins."""
    for file in files:
        if file is not None and not file.resolve().parent.is_dir():
            raise LazyInlineError(f"{file} cannot be written: there is no such folder.")


def run_advise(options: argparse.Namespace) -> None:
    """Runs ``advise``: prints which classes to mark."""
    target = inspection.load_target(options.target)
    print(advise(*target, train=not options.infer, backend=options.backend))


def run_fit(options: argparse.Namespace) -> None:
    """Runs ``fit``: prints the memory of a rank of a mesh."""
    found = fit(
        *inspection.load_target(options.model),
        mesh=dict(options.mesh),
        target=options.target,
        # A command line cannot hold a plan; "marked" goes by names of dimensions and by marks.
        plan="auto" if options.plan == "auto" else None,
        memory_bytes_per_rank=options.memory_gib and int(options.memory_gib * 2**30),
        micro_batches=options.micro_batches,
        schedule=options.schedule,
        num_stages=options.num_stages,
        recompute=options.recompute,
        optimizer_tensors=options.optimizer_tensors,
        links=options.links,
    )
    print(found)
    if options.show:
        print(*filter(None, (found.pipeline, found.step)), sep="\n")


def run_cache(options: argparse.Namespace) -> None:
    """Runs ``cache``: prints the contents of the on-disk cache, or empties it."""
    try:
        found = DiskCache(default_directory(), max_bytes())
    except OSError as error:
        raise CacheError(f"{default_directory()} cannot be used: {error}.") from error
    held = found.info() if options.action == "info" else found.clear()
    if options.json:
        print(json.dumps(dataclasses.asdict(held), default=str))
    elif options.action == "info":
        print(held)
    else:
        print(
            f"{held.directory}\n  deleted {held.num_entries} entries, {held.num_objects} compiled "
            f"objects, {held.num_bytes / 2**20:.1f} MiB"
        )


COMMANDS: Mapping[str, Callable[[argparse.Namespace], None]] = {
    "advise": run_advise,
    "bench": run_bench,
    "cache": run_cache,
    "export": run_export,
    "fit": run_fit,
    "inspect": run_inspect,
    "report": run_report,
}


def error_line(error: Exception) -> str | None:
    """Returns one line for an error of the user's code; None for one that may be our bug."""
    if isinstance(error, LazyInlineError):
        return str(error)
    # An error that the model raises, also deep in PyTorch, is the user's. If code of ours was
    # called by the model, it may be ours, and a bug report needs the traceback.
    where = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        # The user's innermost frame is reported, unless a frame of ours is below it.
        if code.co_filename.startswith(own_places()):
            where = ""
        elif not (is_library_frame(frame) or is_standard_frame(frame)):
            where = f"{code.co_filename}:{line} {getattr(code, 'co_qualname', code.co_name)}"
    if not where:
        return None
    return f"{type(error).__name__} at {where}: {error} (--debug shows the traceback)"
