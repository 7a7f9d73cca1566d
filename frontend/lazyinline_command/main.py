"""The command line: all commands with their arguments, and the exit status of errors."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import pathlib
import sys
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

INTERRUPTED = 130  # the exit status that shells report after SIGINT

_DEBUG = "LAZYINLINE_DEBUG"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status.

    It is 2 if the command cannot be carried out or the user's model failed, 130 if interrupted.
    """
    parser = make_parser()
    options = parser.parse_args(argv)
    if options.command == "completion":
        return _print_completion(parser, options.shell)
    before = os.environ.get(_DEBUG)
    if options.debug:
        os.environ[_DEBUG] = "1"  # for full tracebacks
    try:
        return _run(options)
    except KeyboardInterrupt:
        if options.debug:
            raise
        _say_error("interrupted")
        return INTERRUPTED
    except BrokenPipeError:  # the reader, such as `head`, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    finally:
        if options.debug and before is None:
            del os.environ[_DEBUG]


def _run(options: argparse.Namespace) -> int:
    # Imported late, because this imports PyTorch.
    from lazyinline.frontend.commands import COMMANDS, error_line

    try:
        COMMANDS[options.command](options)
        sys.stdout.flush()
    except (KeyboardInterrupt, BrokenPipeError):
        raise
    except Exception as error:
        line = error_line(error)
        if line is None or options.debug:
            raise
        _say_error(line)
        return 2
    return 0


def _say_error(text: str) -> None:
    print(f"lazyinline: {text}", file=sys.stderr)


def _print_completion(parser: argparse.ArgumentParser, shell: str) -> int:
    try:
        import shtab
    except ModuleNotFoundError:
        _say_error('completion needs shtab: pip install "lazyinline[completion]"')
        return 2
    print(shtab.complete(parser, shell=shell))
    return 0


# Copies of choices in modules that import PyTorch; tests/test_command_line.py compares them.
_BACKENDS = ("inductor", "eager")
_REUSE = ("auto", "marked", "off")
_AGAINST = ("torch.compile", "per-block")
_FORM = "package.module:function, a function without arguments that returns (model, args)"


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    how: dict[str, Any] = {"allow_abbrev": False}  # --layer is a typo, not --layers
    if sys.version_info >= (3, 14):
        how["suggest_on_error"] = True
    parser = argparse.ArgumentParser(
        prog="lazyinline",
        description="A graph compiler that compiles each different block once and inlines last.",
        **how,
    )
    version = f"lazyinline {importlib.metadata.version('lazyinline')}"
    parser.add_argument("--version", action="version", version=version)
    _add_debug(parser, default=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (help_, add) in _COMMANDS.items():
        command = commands.add_parser(name, help=help_, **how)
        _add_debug(command, default=argparse.SUPPRESS)
        add(command)
    return parser


def _add_debug(parser: argparse.ArgumentParser, *, default: Any) -> None:
    help_ = "show the traceback of an error"
    parser.add_argument("--debug", action="store_true", default=default, help=help_)


def _add_bench(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Compiles a model with late and with early inlining and compares both with eager: graph "
        "nodes, seconds to compile, time of a step, largest errors; one row per number of layers."
    )
    add = parser.add_argument
    help_ = f"{_FORM}; with --layers, the function takes their number; default: a small decoder"
    add("--model", metavar="TARGET", help=help_)
    help_ = "numbers of layers, of the decoder default 4 8 16; TARGET is called with each"
    add("--layers", type=_positive, nargs="+", metavar="N", help=help_)
    add("--micro-batches", type=_positive, metavar="Y", help="parts of a training step")
    add("--infer", action="store_true", help="forward without gradients; default is training")
    add("--backend", choices=_BACKENDS, default="inductor")
    help_ = "also measure torch.compile on the model, or on each block"
    add("--against", choices=_AGAINST, nargs="+", default=(), help=help_)
    add("--json", type=pathlib.Path, metavar="FILE", help="write the numbers")
    add("--html", type=pathlib.Path, metavar="FILE", help="write a page")


def _add_inspect(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Captures a model and prints each closure once, with its calls; or prints the programs "
        "after a pass of the compiler, or what the pass changed."
    )
    add = parser.add_argument
    add("target", metavar="TARGET|FILE", nargs="?", help=f"{_FORM} or (model, args, kwargs)")
    add("--passes", action="store_true", help="print the passes of each entry point, in order")
    add("--after", metavar="PASS", help="print the programs after this pass")
    add("--diff", action="store_true", help="with --after: print what the pass changed")
    help_ = "with --after: the passes of compile or of compile_step"
    add("--way", choices=("compile", "step"), default="compile", help=help_)
    help_ = "with --way step: micro-batches of a step, each as large as the target's; default 1"
    add("--micro-batches", type=_positive, default=1, metavar="Y", help=help_)
    help_ = "marked shares marked blocks only, off inlines early"
    add("--reuse", choices=_REUSE, default="auto", help=help_)
    add("--train", action="store_true", help="with gradients; shows what is saved and recomputed")
    help_ = "with --train; default: as marked with lazyinline.recompute"
    add("--recompute", choices=("full", "selective"), help=help_)
    add("--backend", choices=_BACKENDS, default="eager", help="show the graphs for this backend")
    add("--source", action="store_true", help="show the line of Python behind each operator")
    help_ = "primitive: every operator decomposed into lazyinline.primitives()"
    add("--level", choices=("shared", "primitive"), default="shared", help=help_)


def _add_export(parser: argparse.ArgumentParser) -> None:
    parser.description = "Writes a model as ONNX: one function per block, one node per instance."
    add = parser.add_argument
    add("target", metavar="TARGET|FILE", help=f"{_FORM} or (model, args, kwargs)")
    add("file", metavar="FILE.onnx")
    add("--flat", action="store_true", help="no functions: every call replaced by its nodes")
    add("--train", action="store_true", help="forward and backward; the model returns its loss")
    add("--opset", type=int, default=18, metavar="N", help="default 18")
    add("--reuse", choices=_REUSE, default="auto", help="off inlines early")
    add("--no-verify", action="store_true", help="do not compare onnxruntime with the model")


def _add_advise(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Finds repeated classes in a model without marks: what sharing each one saves, and which "
        "argument, attribute or constant prevents sharing of near-identical blocks."
    )
    add = parser.add_argument
    add("target", metavar="TARGET", help=f"{_FORM} or (model, args, kwargs)")
    add("--infer", action="store_true", help="forward without gradients; default is training")
    add("--backend", choices=_BACKENDS, default="inductor", help="estimate for this backend")


def _add_report(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Compiles a model with late and with early inlining, compares both with eager, and writes "
        "a self-contained page: the program, which blocks share or why not, passes, steps, memory. "
        "A model on the meta device is compiled but not run."
    )
    add = parser.add_argument
    add("target", metavar="TARGET|FILE", help=f"{_FORM} or (model, args, kwargs)")
    help_ = "the page to write; default: only text is printed"
    add("--html", type=pathlib.Path, metavar="FILE", help=help_)
    add("--micro-batches", type=_positive, default=1, metavar="Y", help="parts of a training step")
    add("--infer", action="store_true", help="forward without gradients; default is training")
    add("--backend", choices=_BACKENDS, default="inductor")


def _add_fit(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Prints the memory of each rank of a mesh in a training step, and whether it fits. Plans "
        "the program of one rank, without data, a GPU or another process. For the names "
        "of the mesh's dimensions, see docs/parallel.md."
    )
    add = parser.add_argument
    add("model", metavar="TARGET", help=f"{_FORM} or (model, args, kwargs); args: the whole batch")
    add("--mesh", type=_mesh, required=True, metavar="NAME=SIZE,...", help="as pp=4,fsdp=8,tp=2")
    add("--target", required=True, metavar="GPU", help="of each rank, such as cuda:sm_90")
    help_ = "auto: found without marks; marked (default): from names of dimensions and marks"
    add("--plan", choices=("auto", "marked"), default="marked", help=help_)
    add("--memory-gib", type=Fraction, metavar="GIB", help="per rank; default: the GPU's memory")
    add("--micro-batches", type=_positive, default=1, metavar="Y", help="parts of a training step")
    add("--schedule", default="1F1B", help="of a pipeline, along the dimension pp; default 1F1B")
    add("--num-stages", type=_positive, metavar="N", help="default: one for each rank along pp")
    add("--recompute", choices=("full", "selective"))
    help_ = "tensors that the optimizer holds per parameter; default 2, as AdamW"
    add("--optimizer-tensors", type=int, default=2, metavar="N", help=help_)
    help_ = "rates of the mesh, written by lazyinline.measure_links"
    add("--links", type=pathlib.Path, metavar="FILE", help=help_)
    add("--show", action="store_true", help="also print the plan and the traffic")


def _mesh(text: str) -> tuple[tuple[str, int], ...]:
    axes = [part.partition("=") for part in text.split(",")]
    names = {name for name, _, size in axes if name and size.isdecimal() and int(size)}
    if len(names) < len(axes):
        raise argparse.ArgumentTypeError(f"{text} is not of the form fsdp=8,tp=2, each name once")
    return tuple((name, int(size)) for name, _, size in axes)


def _add_cache(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Shows or clears the on-disk cache of derivatives, kernels and memory plans. "
        "LAZYINLINE_CACHE_DIR sets its folder, LAZYINLINE_CACHE_MAX_BYTES its limit, and "
        "LAZYINLINE_CACHE=0 turns it off."
    )
    parser.add_argument("action", choices=("info", "clear"))
    parser.add_argument("--json", action="store_true", help="print JSON")


def _add_completion(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Prints a completion script for a shell, for instance: "
        'eval "$(lazyinline completion bash)". Needs shtab: pip install "lazyinline[completion]".'
    )
    parser.add_argument("shell", choices=("bash", "zsh", "tcsh"))


def _positive(text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number of at least 1")
    return number


_COMMANDS = {
    "bench": ("compare late with early inlining, and both with eager", _add_bench),
    "inspect": ("print the program of a model", _add_inspect),
    "export": ("write a model as an ONNX file", _add_export),
    "advise": ("find which classes to mark, and what prevents sharing", _add_advise),
    "fit": ("compute the memory of each rank of a mesh, without its GPUs", _add_fit),
    "report": ("write a page on how a model is compiled", _add_report),
    "cache": ("show or clear the on-disk cache", _add_cache),
    "completion": ("print a completion script for a shell", _add_completion),
}
