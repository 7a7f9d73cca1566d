"""Runs the command; what an error, an interrupt or a closed pipe ends in."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from .parser import make_parser

INTERRUPTED = 130  # as a shell reports a process that SIGINT ended

_DEBUG = "LAZYINLINE_DEBUG"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: the arguments; None means those of the process.

    Returns:
        The exit status: 0; 2 if something was asked that cannot be done, or the user's model
        failed; 130 if it was interrupted.
    """
    parser = make_parser()
    options = parser.parse_args(argv)
    if options.command == "completion":
        return _print_completion(parser, options.shell)
    before = os.environ.get(_DEBUG)
    if options.debug:
        os.environ[_DEBUG] = "1"  # for what would shorten a traceback
    try:
        return _run(options)
    except KeyboardInterrupt:
        if options.debug:
            raise
        _say_error("interrupted")
        return INTERRUPTED
    except BrokenPipeError:  # the reader, say `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    finally:
        if options.debug and before is None:
            del os.environ[_DEBUG]


def _run(options: argparse.Namespace) -> int:
    # Only now: this imports PyTorch.
    from lazyinline.frontend.commands import COMMANDS, error_line
    from lazyinline.frontend.progress import showing

    try:
        # Whoever watches a log wants to see that something moves; a bar is for terminals.
        with showing("bar" if sys.stderr.isatty() else "lines"):
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
