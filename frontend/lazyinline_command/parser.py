"""Every command of ``lazyinline`` with its arguments."""

from __future__ import annotations

import argparse
import importlib.metadata
import pathlib
from typing import Any, NoReturn

from . import choices
from .typos import suggestion


class Parser(argparse.ArgumentParser):
    """Says what somebody may have meant.

    Attributes:
        options: the names of its options.
        commands: the parser of each command.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.options: list[str] = []
        self.commands: dict[str, Parser] = {}
        super().__init__(*args, **kwargs)
        self.allow_abbrev = False  # --layer is a typo, not --layers

    def add_argument(self, *args: Any, **kwargs: Any) -> argparse.Action:
        """Adds an argument, and notes its names."""
        action = super().add_argument(*args, **kwargs)
        self.options += action.option_strings
        return action

    def error(self, message: str) -> NoReturn:
        """Ends the process with status 2, the usage and a message."""
        super().error(message + suggestion(message, self.options))

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parses; what is left over is an error of the command that was named."""
        options, rest = self.parse_known_args(args, namespace)
        if rest:
            named = self.commands.get(getattr(options, "command", ""), self)
            named.error(f"unrecognized arguments: {' '.join(rest)}")
        return options


def make_parser() -> Parser:
    """Returns the parser of the command line."""
    parser = Parser(
        prog="lazyinline",
        description="A graph compiler that compiles each different block once and inlines last.",
    )
    version = f"lazyinline {importlib.metadata.version('lazyinline')}"
    parser.add_argument("--version", action="version", version=version)
    _add_debug(parser, default=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (help_, add) in _COMMANDS.items():
        parser.commands[name] = command = commands.add_parser(name, help=help_)
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
    help_ = f"{choices.FORM}; with --layers, a function of their number; default: a small decoder"
    add("--model", metavar="TARGET", help=help_)
    layers = " ".join(map(str, choices.DEFAULT_LAYERS))
    help_ = f"of the decoder, default {layers}; or what TARGET is called with, one after another"
    add("--layers", type=_positive, nargs="+", metavar="N", help=help_)
    add("--micro-batches", type=_positive, metavar="Y", help="parts of a training step")
    add("--infer", action="store_true", help="forward without gradients; default is training")
    add("--backend", choices=choices.BACKENDS, default=choices.BACKENDS[0])
    add("--json", type=pathlib.Path, metavar="FILE", help="write the numbers")
    add("--html", type=pathlib.Path, metavar="FILE", help="write a page")


def _add_inspect(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Captures a model and prints each closure once, with its calls; or its programs after any "
        "pass of the compiler, and what the pass changed."
    )
    add = parser.add_argument
    add("target", metavar="TARGET", nargs="?", help=f"{choices.FORM} or (model, args, kwargs)")
    add("--passes", action="store_true", help="print the passes of every way in, in order")
    add("--after", metavar="PASS", help="print the programs after this pass")
    add("--diff", action="store_true", help="with --after: print what the pass changed")
    help_ = "with --after: whose passes"
    add("--way", choices=choices.INSPECTED, default="compile", help=help_)
    help_ = "with --way step, of which the target is one; default 1"
    add("--micro-batches", type=_positive, default=1, metavar="Y", help=help_)
    help_ = "marked shares marked blocks only, off inlines early"
    add("--reuse", choices=choices.REUSE_CHOICES, default="auto", help=help_)
    add("--train", action="store_true", help="with gradients; shows what is saved and recomputed")
    help_ = "with --train; default: nothing but marks"
    add("--recompute", choices=choices.POLICIES, help=help_)
    add("--backend", choices=choices.BACKENDS, default="eager", help="whose graphs to show")
    add("--source", action="store_true", help="show the line of Python behind each operator")
    help_ = "primitive: every operator taken apart into lazyinline.primitives()"
    add("--level", choices=choices.SHOWN_LEVELS, default=choices.SHOWN_LEVELS[0], help=help_)


def _add_export(parser: argparse.ArgumentParser) -> None:
    parser.description = "Writes a model as ONNX: one function per block, one node per instance."
    add = parser.add_argument
    add("target", metavar="TARGET", help=f"{choices.FORM} or (model, args, kwargs)")
    add("file", metavar="FILE.onnx")
    add("--flat", action="store_true", help="no functions: every call replaced by its nodes")
    add("--train", action="store_true", help="forward and backward; the model returns its loss")
    help_ = f"default {choices.MIN_OPSET}"
    add("--opset", type=int, default=choices.MIN_OPSET, metavar="N", help=help_)
    add("--reuse", choices=choices.REUSE_CHOICES, default="auto", help="off inlines early")
    add("--no-verify", action="store_true", help="do not compare onnxruntime with the model")


def _add_advise(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Finds what repeats in a model without any mark: what sharing each class saves, and which "
        "argument, attribute or constant keeps near-identical blocks apart."
    )
    add = parser.add_argument
    add("target", metavar="TARGET", help=f"{choices.FORM} or (model, args, kwargs)")
    add("--infer", action="store_true", help="forward without gradients; default is training")
    add("--backend", choices=choices.BACKENDS, default=choices.BACKENDS[0], help="whose seconds")


def _add_report(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Compiles a model with late and with early inlining, compares both with eager, and writes "
        "one page on it: the program, who shares and why not, passes, steps, memory. The page "
        "needs nothing else. A model without data (meta device) is compiled and not run."
    )
    add = parser.add_argument
    add("target", metavar="TARGET", help=f"{choices.FORM} or (model, args, kwargs)")
    help_ = "the page to write; default: only text is printed"
    add("--html", type=pathlib.Path, metavar="FILE", help=help_)
    add("--micro-batches", type=_positive, default=1, metavar="Y", help="parts of a training step")
    add("--infer", action="store_true", help="forward without gradients; default is training")
    add("--backend", choices=choices.BACKENDS, default=choices.BACKENDS[0])


def _add_plan_memory(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Gives each buffer of a file an offset in one arena. The file is CSV with the columns id, "
        "lower, upper, size: a buffer of `size` bytes lives in [lower, upper). Prints the size of "
        "the arena (peak), the largest sum of live bytes (lower bound), their ratio and seconds."
    )
    add = parser.add_argument
    add("file", type=pathlib.Path, metavar="FILE.csv")
    add("--offsets", type=pathlib.Path, metavar="OUT.csv", help="write the plan")
    help_ = f"offsets and sizes are multiples of this, default {choices.ALIGNMENT}"
    add("--alignment", type=int, default=choices.ALIGNMENT, metavar="BYTES", help=help_)
    help_ = f"at most about this long, default {choices.EFFORT_S:g}; stops at ratio 1"
    add("--effort", type=float, default=choices.EFFORT_S, metavar="SECONDS", help=help_)


def _add_cache(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Derivatives, kernels and memory plans that later processes start from. "
        f"{choices.DIRECTORY_VARIABLE} moves them, {choices.SIZE_VARIABLE} limits them, "
        f"{choices.SWITCH_VARIABLE}=0 turns the cache off."
    )
    parser.add_argument("action", choices=("info", "clear"))
    parser.add_argument("--json", action="store_true", help="print numbers for a program to read")


def _add_completion(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Prints what makes a shell complete this command's arguments, for instance: "
        'eval "$(lazyinline completion bash)". Needs shtab: pip install "lazyinline[completion]".'
    )
    parser.add_argument("shell", choices=choices.SHELLS)


def _positive(text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number of at least 1")
    return number


_COMMANDS = {
    "bench": ("late against early inlining, side by side", _add_bench),
    "inspect": ("print the program of a model", _add_inspect),
    "export": ("write a model as an ONNX file", _add_export),
    "advise": ("which classes to mark, and what is in the way", _add_advise),
    "report": ("a page on how a model is compiled", _add_report),
    "plan-memory": ("plan the arena of a problem from a file", _add_plan_memory),
    "cache": ("what earlier compiles left on disk", _add_cache),
    "completion": ("complete this command in a shell", _add_completion),
}
