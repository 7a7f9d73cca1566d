"""The commands of ``lazyinline``, run with their parsed arguments."""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ..backend.files.torch_store import DiskCache, default_directory, max_bytes
from ..reuse.errors import CacheError, LazyInlineError
from ..reuse.ir.printer import Shown, folded, format_program
from ..reuse.process import own_places
from .advise import advise
from .bench import DEFAULT_LAYERS, bench, decoder, to_json
from .compiled_module import last_report
from .fit import fit
from .inspection import FORM, load_target, pass_lists, show_after, show_captured, show_primitives
from .measure import measure
from .onnx.export import export_onnx
from .options import Options
from .page.page import measured_page
from .page.write import write_page
from .saved.load import captured_programs, load, parts_text
from .tracing.frames import is_library_frame, is_standard_frame


def run_bench(options: argparse.Namespace) -> None:
    """Runs ``bench``: measures late against early inlining; prints a row per depth."""
    _check_folders(options.json, options.html)
    micro_batches, layers = options.micro_batches or 1, options.layers or ()
    if options.model is None:
        # A micro-batch has as many sequences as a step without them: rows can be compared.
        make: Callable[..., Any] = partial(
            decoder, batch=2 * micro_batches, train=not options.infer
        )
        layers = layers or DEFAULT_LAYERS
    else:
        make = partial(load_target, options.model)
    reports = bench(
        make,
        layers,
        _say,
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


def _say(line: str) -> None:
    print(folded(line), flush=True)


def run_inspect(options: argparse.Namespace) -> None:
    """Runs ``inspect``: prints a model's programs."""
    if options.passes:
        print(pass_lists(), end="")
        return
    if options.target is None:
        raise LazyInlineError(f"inspect needs a target, or --passes. A target is {FORM}.")
    if options.diff and options.after is None:
        raise LazyInlineError("--diff shows what one pass changed: name it with --after PASS.")
    if options.level == "primitive" and (options.after or options.recompute):
        raise LazyInlineError(
            "--level primitive shows a model before any choice of a backend: it goes with no "
            "--after and no --recompute."
        )
    if _is_file(options.target):
        if options.after or options.level == "primitive" or options.diff:
            raise LazyInlineError("A file has programs as they were captured: leave --after out.")
        for what, program in captured_programs(options.target):
            print(f"// {what}\n{format_program(program)}", end="")
        return
    target = load_target(options.target)
    settings = Options(reuse=options.reuse, backend=options.backend, recompute=options.recompute)
    source: Shown = "show" if options.source else "hide"
    if options.after is None:
        show = show_primitives if options.level == "primitive" else show_captured
        print(show(target, settings, train=options.train, source=source), end="")
        return
    text = show_after(
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
        found = captured_programs(options.target, "bound")
        program = next((one for what, one in found if what.endswith("inference")), None)
        if program is None or options.train:
            raise LazyInlineError("A file is exported in inference, for which it has a program.")
        print(export_onnx(program, (), options.file, verify=False, **same))
        return
    model, args, kwargs = load_target(options.target)
    same |= {"kwargs": kwargs, "reuse": options.reuse, "train": options.train}
    print(export_onnx(model, args, options.file, verify=not options.no_verify, **same))


def run_report(options: argparse.Namespace) -> None:
    """Runs ``report``: measures a model, prints what came out, writes a page."""
    _check_folders(options.html)
    if _is_file(options.target):
        made = last_report(load(options.target))
        assert made is not None
        print(f"{parts_text(options.target)}\n{made}")
        if options.html is not None:
            made.save_html(options.html)
        return
    model, args, kwargs = load_target(options.target)
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
    """Raises LazyInlineError for a file in no folder, before anything takes long."""
    for file in files:
        if file is not None and not file.resolve().parent.is_dir():
            raise LazyInlineError(f"{file} cannot be written: there is no such folder.")


def run_advise(options: argparse.Namespace) -> None:
    """Runs ``advise``: prints which classes to mark."""
    model, args, kwargs = load_target(options.target)
    train = not options.infer
    print(advise(model, args, kwargs, train=train, backend=options.backend))


def run_fit(options: argparse.Namespace) -> None:
    """Runs ``fit``: prints what a rank of a mesh holds."""
    model, args, kwargs = load_target(options.model)
    found = fit(
        model,
        args,
        kwargs,
        mesh=dict(options.mesh),
        target=options.target,
        # On a command line no plan can be written down: "marked" is what names and marks say.
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
    """Runs ``cache``: prints what the on-disk cache holds, or empties it."""
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
    """Returns one line for an error that is the user's to mend; None for one that is ours."""
    if isinstance(error, LazyInlineError):
        return str(error)
    # What the model raises, also deep in PyTorch, is the user's. Where code of ours is between the
    # model and what raised, it may be ours, and a bug report needs the traceback.
    where = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        # The innermost frame of the user's counts, and one of ours below it makes the error ours.
        if code.co_filename.startswith(own_places()):
            where = ""
        elif not (is_library_frame(frame) or is_standard_frame(frame)):
            where = f"{code.co_filename}:{line} {getattr(code, 'co_qualname', code.co_name)}"
    if not where:
        return None
    return f"{type(error).__name__} at {where}: {error} (--debug shows the traceback)"
