"""``package.module:function``: how the command line names a model."""

from __future__ import annotations

import importlib
import operator
import os
import sys
import traceback
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import nn

from ..reuse.errors import LazyInlineError

FORM = "package.module:function, a function without arguments that returns (model, args)"


class Target(NamedTuple):
    """Holds a model with example inputs."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


def load_target(text: str, *arguments: int) -> Target:
    """Calls the function that a command line names.

    Args:
        text: ``package.module:function``. The function returns ``(model, args)`` or ``(model, args,
            kwargs)``; its module is also looked for in the working directory.
        arguments: what it is called with; usually none.

    Raises:
        LazyInlineError: if there is no such function, if it fails, or if it returns something else.
    """
    module_name, _, function_name = text.partition(":")
    if not (module_name and function_name):
        raise LazyInlineError(f"{text!r} is not a target. A target is {FORM}.")
    if module_name.endswith(".py"):
        name = ".".join(module_name.removesuffix(".py").split("/"))
        raise LazyInlineError(f"{text!r} names a file. Write {name}:{function_name}.")
    # A console script does not look in the working directory by itself, unlike `python -m`.
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        result = operator.attrgetter(function_name)(importlib.import_module(module_name))(
            *arguments
        )
    except LazyInlineError:
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        # Where the user's function failed, not where it was imported and called.
        inside = [f for f in frames if f.filename != __file__ and "importlib" not in f.filename]
        where = f" at {inside[-1].filename}:{inside[-1].lineno}" if inside else ""
        raise LazyInlineError(
            f"{text} failed{where}: {type(error).__name__}: {error}. A target is {FORM}."
        ) from error
    return _checked(text, result)


def _checked(text: str, result: Any) -> Target:
    model, args, kwargs = (*result, {}, {}, {})[:3] if isinstance(result, tuple) else (None,) * 3
    wrong = ""
    if not isinstance(result, tuple) or len(result) not in (2, 3):
        wrong = f"a {type(result).__name__}"
    elif not isinstance(model, nn.Module):
        wrong = f"a {type(model).__name__} where an nn.Module belongs"
    elif not isinstance(args, (tuple, list)):
        wrong = f"a {type(args).__name__} as args: write (x,) for one input"
    elif not isinstance(kwargs, Mapping):
        wrong = f"a {type(kwargs).__name__} as kwargs"
    if wrong:
        raise LazyInlineError(
            f"{text} has to return (model, args) or (model, args, kwargs); it returned {wrong}."
        )
    return Target(model, tuple(args), kwargs)
