"""The exceptions a user can meet. Every message says what is wrong, the numbers, and what to do.

It names the user's line, too. The traceback ends at the public function that was called: below that
are our own frames, often a hundred lines.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, TypeVar, get_args


class LazyInlineError(Exception):
    """Base of every error that lazyinline raises on purpose."""


class CaptureError(LazyInlineError):
    """The model's Python cannot be turned into a program; the message names the user's line."""


class FinalCaptureError(CaptureError):
    """A capture failed, and the model must not run eagerly: that is wrong or was ruled out."""


class ReuseError(LazyInlineError):
    """A mark or an option about sharing blocks is wrong."""


class DecompositionError(LazyInlineError):
    """A decomposition rule is wrong, or does not fit its operator."""


class PlanError(LazyInlineError):
    """A program cannot be laid out or run as asked."""


class NotDifferentiatedError(PlanError):
    """A program's gradients cannot be compiled with a backward of their own; eager can do it."""


class PipelineError(LazyInlineError):
    """A model cannot be split over the stages asked for."""


class ExportError(LazyInlineError):
    """A program cannot be written as ONNX."""


class FileError(LazyInlineError):
    """A compiled program cannot be saved in a file, or a file cannot be opened."""


class NoProgramError(FileError):
    """A file has no program for a call; the message lists the sizes and types that it has."""


class CacheError(LazyInlineError):
    """The on-disk cache cannot be used as asked."""


class CacheWarning(UserWarning):
    """The on-disk cache, or an entry of it, was not used; the result is made anew."""


class VerifyError(LazyInlineError):
    """A program breaks a rule of its level. This is a bug of lazyinline, not of the model."""


class ParseError(LazyInlineError):
    """A printed program cannot be read; the message names the line and shows the place."""


class CompileInterrupted(KeyboardInterrupt):
    """A compile was interrupted: everything is as it was before, and the next call compiles."""


_PUBLIC = (LazyInlineError, CaptureError, ReuseError, DecompositionError, PlanError, PipelineError)
for _public in (*_PUBLIC, ExportError, FileError, NoProgramError, CacheError, VerifyError):
    _public.__module__ = "lazyinline"  # a traceback shows the name that users catch

VARIABLE = "LAZYINLINE_DEBUG"  # the environment variable that keeps tracebacks whole
OURS = (LazyInlineError, CompileInterrupted)  # exceptions that lazyinline raises on purpose

INSTEAD: Mapping[str, str] = {
    "mode": 'backend="inductor" and backend="eager" are all there is to choose, so leave it out',
    "options": "TorchInductor's options are not taken, so leave it out",
    "fullgraph": 'compile(model, fallback="error") raises where a model cannot be captured, and '
    "compile_step always does",
    "disable": "call the model itself",
}
"""Arguments of ``torch.compile``, and what to do instead."""

Function = TypeVar("Function", bound=Callable[..., Any])
Error = TypeVar("Error", bound=BaseException)


def check_choice(error: type[LazyInlineError], choices: Any, **given: object) -> None:
    """Raises an error for an option, given by its name, that is none of a ``Literal``'s choices."""
    for name, value in given.items():
        if value not in get_args(choices):
            raise error(f"{name}={value!r} is unknown; there are {get_args(choices)}.")


def is_debugging() -> bool:
    """Whether the user asked for whole tracebacks."""
    return os.environ.get(VARIABLE, "0") not in ("", "0")


INVALID = ", but found invalid values"
"""The end of what a program says where a distribution raises ValueError in eager."""


def ended_here(error: Error) -> Error:
    """Returns an error without its traceback, to be raised again by a public function."""
    is_bug = isinstance(error, VerifyError)  # a bug report needs the whole traceback
    if is_bug or is_debugging():
        return error
    error.__cause__ = None
    return error.with_traceback(None)


def door(function: Function) -> Function:
    """Makes tracebacks of our own errors end at a public function."""

    @wraps(function)
    def public(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except OURS as error:
            raise ended_here(error) from error.__cause__

    return public  # type: ignore[return-value]


def without_torchs(function: Function) -> Function:
    """Raises TypeError, with what to do instead, for an argument of ``torch.compile``."""

    @wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        for name in kwargs.keys() & INSTEAD.keys():
            raise TypeError(f"{function.__name__}() takes no {name}=: {INSTEAD[name]}.")
        return function(*args, **kwargs)

    return checked  # type: ignore[return-value]
