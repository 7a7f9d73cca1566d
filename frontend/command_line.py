"""The ``lazyinline`` command."""

from __future__ import annotations

import argparse
import os
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from ..backend.kernels.lower import BACKENDS
from ..recompute.policy import POLICIES
from ..reuse.errors import LazyInlineError
from ..reuse.ir.printer import Shown
from . import cache_command, plan_memory_command
from .advise.advise import advise
from .capture.blocks import REUSE_CHOICES
from .inspection import INSPECTED, pass_lists, show_after, show_captured
from .measure.bench import DEFAULT_LAYERS, OWN_MODELS, Plan, bench, title, to_json
from .measure.large_models import LARGE_MODELS, bench_large, reports_to_json
from .measure.page import page
from .measure.rank_bench import RANK_MODELS, RANKS, bench_rank
from .measure.target import FORM, load_target
from .onnx.export import MIN_OPSET, export_onnx
from .options import Options


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: the arguments; None means those of the process.

    Returns:
        The exit status: 0, or 2 if something was asked that cannot be done.
    """
    options = _parser().parse_args(argv)
    try:
        runs = {
            "advise": _advise,
            "bench": _bench,
            "inspect": _inspect,
            "export": _export,
            "cache": cache_command.run,
            "plan-memory": plan_memory_command.run,
        }
        runs[options.command](options)
        sys.stdout.flush()
    except LazyInlineError as error:
        print(f"lazyinline: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader, say `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _bench(options: argparse.Namespace) -> None:
    for file in (options.json, options.html):
        if file is not None and not file.resolve().parent.is_dir():
            raise LazyInlineError(f"{file} cannot be written: there is no such folder.")
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
        options.html.write_text(page(reports, about=title(plan)), encoding="utf-8")


def _bench_large(options: argparse.Namespace) -> None:
    if (options.layers and len(options.layers) > 1) or options.infer or options.html:
        raise LazyInlineError(
            f"{options.model} is compiled and not run: it takes one number of --layers, no --infer "
            "and no --html."
        )
    sizes: dict[str, Any] = {
        "micro_batches": options.micro_batches,
        "layers": options.layers[0] if options.layers else None,
        "backend": options.backend,
    }
    if options.model in RANK_MODELS:
        sizes["ranks"] = options.rank
        text = reports_to_json(bench_rank(options.model, _say, **sizes))
    else:
        text = reports_to_json(bench_large(options.model, _say, **sizes))
    if options.json is not None:
        options.json.write_text(text, encoding="utf-8")


def _say(line: str) -> None:
    print(line, flush=True)


def _layers(options: argparse.Namespace) -> tuple[int, ...]:
    if options.model in OWN_MODELS:
        return tuple(options.layers or DEFAULT_LAYERS)
    if options.layers:
        raise LazyInlineError(
            f"--layers goes with {' and '.join(OWN_MODELS)}; {options.model} decides for itself "
            "how deep its model is."
        )
    return ()


def _inspect(options: argparse.Namespace) -> None:
    if options.passes:
        print(pass_lists(), end="")
        return
    if options.target is None:
        raise LazyInlineError(f"inspect needs a target, or --passes. A target is {FORM}.")
    if options.diff and options.after is None:
        raise LazyInlineError("--diff shows what one pass changed: name it with --after PASS.")
    target = load_target(options.target)
    settings = Options(reuse=options.reuse, backend=options.backend, recompute=options.recompute)
    if options.after is None:
        source: Shown = "show" if options.source else "hide"
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
    print(text, end="")


def _export(options: argparse.Namespace) -> None:
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


def _advise(options: argparse.Namespace) -> None:
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lazyinline",
        description="A graph compiler that compiles each different block once and inlines last.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_bench(commands.add_parser("bench", help="late against early inlining, side by side"))
    _add_inspect(commands.add_parser("inspect", help="print the program of a model"))
    _add_export(commands.add_parser("export", help="write a model as an ONNX file"))
    _add_advise(commands.add_parser("advise", help="which classes to mark, and what is in the way"))
    plan_memory_command.add_parser(commands)
    cache_command.add_parser(commands)
    return parser


def _add_bench(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Compiles a model with late and with early inlining and compares both with eager: graph "
        "nodes, seconds to compile, time of a step, largest errors; one row per number of layers."
    )
    add = parser.add_argument
    names = "|".join((*OWN_MODELS, *LARGE_MODELS, *RANK_MODELS, "TARGET"))
    add("--model", default="llama", metavar=names, help=f"default llama; {FORM}")
    layers = " ".join(map(str, DEFAULT_LAYERS))
    add("--layers", type=_positive, nargs="+", metavar="N", help=f"default {layers}")
    add("--micro-batches", type=_positive, metavar="Y", help="parts of a training step")
    ranks = "|".join((*RANKS, "NUMBER"))
    names = ", ".join(RANK_MODELS)
    help_ = f"with {names}: whose program to compile; default middle"
    add("--rank", nargs="+", default=["middle"], metavar=ranks, help=help_)
    add("--infer", action="store_true", help="forward without gradients; default is training")
    add("--backend", choices=BACKENDS, default=BACKENDS[0])
    add("--json", type=pathlib.Path, metavar="FILE", help="write the numbers")
    add("--html", type=pathlib.Path, metavar="FILE", help="write a page")


def _add_inspect(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Captures a model and prints each closure once, with its calls; or its programs after any "
        "pass of the compiler, and what the pass changed."
    )
    add = parser.add_argument
    add("target", metavar="TARGET", nargs="?", help=f"{FORM} or (model, args, kwargs)")
    add("--passes", action="store_true", help="print the passes of every way in, in order")
    add("--after", metavar="PASS", help="print the programs after this pass")
    add("--diff", action="store_true", help="with --after: print what the pass changed")
    add("--way", choices=INSPECTED, default="compile", help="with --after: whose passes")
    help_ = "with --way step, of which the target is one; default 1"
    add("--micro-batches", type=_positive, default=1, metavar="Y", help=help_)
    add(
        "--reuse",
        choices=REUSE_CHOICES,
        default="auto",
        help="marked shares marked blocks only, off inlines early",
    )
    add("--train", action="store_true", help="with gradients; shows what is saved and recomputed")
    add("--recompute", choices=POLICIES, help="with --train; default: nothing but marks")
    add("--backend", choices=BACKENDS, default="eager", help="whose graphs to show")
    add("--source", action="store_true", help="show the line of Python behind each operator")


def _add_export(parser: argparse.ArgumentParser) -> None:
    parser.description = "Writes a model as ONNX: one function per block, one node per instance."
    add = parser.add_argument
    add("target", metavar="TARGET", help=f"{FORM} or (model, args, kwargs)")
    add("file", metavar="FILE.onnx")
    add("--flat", action="store_true", help="no functions: every call replaced by its nodes")
    add("--train", action="store_true", help="forward and backward; the model returns its loss")
    add("--opset", type=int, default=MIN_OPSET, metavar="N", help=f"default {MIN_OPSET}")
    add("--reuse", choices=REUSE_CHOICES, default="auto", help="off inlines early")
    add("--no-verify", action="store_true", help="do not compare onnxruntime with the model")


def _add_advise(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Finds what repeats in a model without any mark: what sharing each class saves, and which "
        "argument, attribute or constant keeps near-identical blocks apart."
    )
    add = parser.add_argument
    add("target", metavar="TARGET", help=f"{FORM} or (model, args, kwargs)")
    add("--infer", action="store_true", help="forward without gradients; default is training")
    add("--backend", choices=BACKENDS, default=BACKENDS[0], help="whose seconds")


def _positive(text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number of at least 1")
    return number
