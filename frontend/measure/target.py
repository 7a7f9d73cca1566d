"""``package.module:function``: how the command line names a model."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from ...reuse.errors import LazyInlineError

FORM = "package.module:function, a function without arguments that returns (model, args)"


@dataclass(frozen=True)
class Target:
    """A model with example inputs."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


def load_target(text: str) -> Target:
    """Calls the function that a command line names.

    Args:
        text: ``package.module:function``. The function takes no arguments and returns
            ``(model, args)`` or ``(model, args, kwargs)``; its module is also looked for in the
            working directory.

    Raises:
        LazyInlineError: if there is no such function, if it fails, or if it returns something else.
    """
    module_name, colon, function_name = text.partition(":")
    if not (module_name and colon and function_name):
        raise LazyInlineError(f"{text!r} is not a target. A target is {FORM}.")
    if module_name.endswith(".py"):
        name = ".".join(module_name.removesuffix(".py").split("/"))
        raise LazyInlineError(f"{text!r} names a file. Write {name}:{function_name}.")
    function = _function(text, module_name, function_name)
    try:
        result = function()
    except LazyInlineError:
        raise
    except Exception as error:
        raise LazyInlineError(f"{text} failed{_where(error)}: {_text(error)}") from error
    return _checked(text, result)


def _function(text: str, module_name: str, function_name: str) -> Any:
    # A console script does not look in the working directory by itself, unlike `python -m`.
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise LazyInlineError(
                f"{text}: there is no module {error.name} here or on PYTHONPATH. "
                f"A target is {FORM}."
            ) from error
        raise LazyInlineError(f"{module_name} cannot be imported: {_text(error)}") from error
    except Exception as error:
        message = f"{module_name} cannot be imported{_where(error)}: {_text(error)}"
        raise LazyInlineError(message) from error
    for name in function_name.split("."):
        if not hasattr(found, name):
            raise LazyInlineError(f"{text}: {module_name} has no {function_name}.")
        found = getattr(found, name)
    if not callable(found):
        raise LazyInlineError(f"{text} is a {type(found).__name__}. A target is {FORM}.")
    return found


def _checked(text: str, result: Any) -> Target:
    if not isinstance(result, tuple) or len(result) not in (2, 3):
        raise LazyInlineError(
            f"{text} returned {_kind(result)}; it has to return (model, args) or "
            "(model, args, kwargs)."
        )
    model, args, kwargs = (*result, {}) if len(result) == 2 else result
    if not isinstance(model, nn.Module):
        raise LazyInlineError(f"{text} returned {_kind(model)} where an nn.Module belongs.")
    if not isinstance(args, (tuple, list)):
        raise LazyInlineError(
            f"{text} returned {_kind(args)} as args; it has to be a tuple, (x,) for one input."
        )
    if not isinstance(kwargs, Mapping):
        raise LazyInlineError(f"{text} returned {_kind(kwargs)} as kwargs; it has to be a dict.")
    return Target(model, tuple(args), kwargs)


def _kind(value: Any) -> str:
    kind = type(value).__name__
    return f"a tuple of {len(value)}" if isinstance(value, tuple) else f"a value of type {kind}"


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _where(error: Exception) -> str:
    """The line that failed, as far from this file as the traceback goes."""
    frames = traceback.extract_tb(error.__traceback__)
    last = frames[-1] if frames else None
    return f" at {last.filename}:{last.lineno}" if last and last.filename != __file__ else ""
