"""``lazyinline bench``, ``inspect``, ``export``, ``advise`` and ``report``."""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ...reuse.errors import LazyInlineError
from ...reuse.folding import folded
from ...reuse.ir.printer import Shown
from ..advise.advise import advise
from ..inspection import pass_lists, show_after, show_captured, show_primitives
from ..measure.bench import DEFAULT_LAYERS, OWN_MODELS, Plan, bench, title, to_json
from ..measure.large_models import LARGE_MODELS, bench_large, large_json
from ..measure.measure import measure
from ..measure.measure_page import large_page, measure_page, rank_page
from ..measure.rank_bench import RANK_MODELS, bench_rank
from ..measure.saved import is_file, is_page, read_saved
from ..measure.target import FORM, load_target
from ..onnx.export import export_onnx
from ..options import Options
from ..page.write import PageData, write_page
from .colours import coloured_diff, has_colours


def run_bench(options: argparse.Namespace) -> None:
    """Runs ``bench``: measures late against early inlining; prints a row per depth.

    Raises:
        LazyInlineError: if something was asked that cannot be done.
    """
    _check_folders(options.json, options.html)
    if options.target is not None and options.model not in LARGE_MODELS:
        raise LazyInlineError(
            f"--target goes with {' and '.join(LARGE_MODELS)}. For a model of your own: "
            f"lazyinline.compile_step(model, target={options.target!r}), and its last_report."
        )
    if options.model in LARGE_MODELS or options.model in RANK_MODELS:
        _bench_large(options)
        return
    plan = Plan(
        model=options.model,
        layers=_layers(options),
        train=not options.infer,
        backend=options.backend,
        micro_batches=options.micro_batches or 1,
    )
    reports = bench(plan, _say)
    if options.json is not None:
        options.json.write_text(to_json(plan, reports), encoding="utf-8")
    if options.html is not None:
        page = write_page(measure_page(reports, title(plan)))
        options.html.write_text(page, encoding="utf-8")


def _bench_large(options: argparse.Namespace) -> None:
    if (options.layers and len(options.layers) > 1) or options.infer:
        raise LazyInlineError(
            f"{options.model} is compiled and not run: it takes one number of --layers, no --infer."
        )
    sizes: dict[str, Any] = {
        "micro_batches": options.micro_batches,
        "layers": options.layers[0] if options.layers else None,
        "backend": options.backend,
    }
    reports: Sequence[Any]
    make_page: Callable[[], PageData]
    if options.model in RANK_MODELS:
        reports = ranks = bench_rank(options.model, _say, ranks=options.rank, **sizes)
        make_page = partial(rank_page, ranks)
    else:
        reports = steps = bench_large(options.model, _say, target=options.target, **sizes)
        make_page = partial(large_page, steps)
    if options.html is None and options.json is None:
        return
    page = make_page()
    if options.html is not None:
        options.html.write_text(write_page(page), encoding="utf-8")
    if options.json is not None:
        options.json.write_text(large_json(reports, page), encoding="utf-8")


def _say(line: str) -> None:
    print(folded(line), flush=True)


def _layers(options: argparse.Namespace) -> tuple[int, ...]:
    if options.model in OWN_MODELS:
        return tuple(options.layers or DEFAULT_LAYERS)
    if options.layers:
        raise LazyInlineError(
            f"--layers goes with {' and '.join(OWN_MODELS)}; {options.model} decides for itself "
            "how deep its model is."
        )
    return ()


def run_inspect(options: argparse.Namespace) -> None:
    """Runs ``inspect``: prints a model's programs.

    Raises:
        LazyInlineError: if something was asked that cannot be done.
    """
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
    target = load_target(options.target)
    settings = Options(reuse=options.reuse, backend=options.backend, recompute=options.recompute)
    source: Shown = "show" if options.source else "hide"
    if options.level == "primitive":
        print(show_primitives(target, settings, train=options.train, source=source), end="")
        return
    if options.after is None:
        print(show_captured(target, settings, train=options.train, source=source), end="")
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
    print(coloured_diff(text) if options.diff and has_colours(sys.stdout) else text, end="")


def run_export(options: argparse.Namespace) -> None:
    """Runs ``export``: writes an ONNX file.

    Raises:
        LazyInlineError: if something was asked that cannot be done.
    """
    target = load_target(options.target)
    report = export_onnx(
        target.model,
        target.args,
        options.file,
        kwargs=target.kwargs,
        reuse=options.reuse,
        functions=not options.flat,
        opset=options.opset,
        train=options.train,
        verify=not options.no_verify,
    )
    print(report)


def run_report(options: argparse.Namespace) -> None:
    """Runs ``report``: measures a model, prints what came out, writes a page; or shows a file.

    Raises:
        LazyInlineError: if something was asked that cannot be done.
    """
    _check_folders(options.html)
    if is_file(options.target):
        _show_saved(pathlib.Path(options.target), options)
        return
    target = load_target(options.target)
    report = measure(
        target.model,
        target.args,
        target.kwargs,
        train=not options.infer,
        micro_batches=options.micro_batches,
        execute=not any(p.is_meta for p in target.model.parameters()),
        backend=options.backend,
    )
    print(report)
    if options.html is not None:
        report.save_html(options.html)


def _show_saved(path: pathlib.Path, options: argparse.Namespace) -> None:
    if options.infer or options.micro_batches > 1:
        raise LazyInlineError(
            f"{path} is measured already: --infer and --micro-batches do not fit."
        )
    found = read_saved(path)
    if options.html is not None and is_page(path):
        raise LazyInlineError(f"{path} is a page already: open it in a browser.")
    print(found)
    if options.html is not None:
        options.html.write_text(found.page(), encoding="utf-8")


def _check_folders(*files: pathlib.Path | None) -> None:
    """Raises LazyInlineError for a file in no folder, before anything takes long."""
    for file in files:
        if file is not None and not file.resolve().parent.is_dir():
            raise LazyInlineError(f"{file} cannot be written: there is no such folder.")


def run_advise(options: argparse.Namespace) -> None:
    """Runs ``advise``: prints which classes to mark.

    Raises:
        LazyInlineError: if something was asked that cannot be done.
    """
    target = load_target(options.target)
    print(
        advise(
            target.model,
            target.args,
            target.kwargs,
            train=not options.infer,
            backend=options.backend,
        )
    )
