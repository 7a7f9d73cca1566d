"""What this package was made for: which PyTorch, and which Python.

The numbers agree with pyproject.toml (a test compares them); pip holds to them, but not everybody
installs with pip, and a name of PyTorch that moved would fail far from its cause.
"""

from __future__ import annotations

import re
import sys
import sysconfig
import warnings

import torch

from .errors import LazyInlineError

OLDEST_TORCH, NEWEST_TORCH = (2, 11), (2, 15)
NEWEST_PYTHON = (3, 14)


def check_supported() -> None:
    """Asks for the interpreter and the PyTorch that run.

    Raises:
        LazyInlineError: for a free-threaded Python, and for a PyTorch that is too old.
    """
    here = sys.version_info[:2]
    if _is_free_threaded():
        raise LazyInlineError(
            f"lazyinline does not run on free-threaded Python, and this is a free-threaded "
            f"{_text(here)}: a model that another thread changes while it is captured or checked "
            f"would go unnoticed. Use the ordinary build of Python {_text(here)}."
        )
    found = tuple(map(int, re.findall(r"\d+", torch.__version__)[:2]))
    wanted = f"PyTorch {_text(OLDEST_TORCH)} to {_text(NEWEST_TORCH)}"
    command = f"pip install 'torch>={_text(OLDEST_TORCH)},<{_text(_next(NEWEST_TORCH))}'"
    if found < OLDEST_TORCH:
        raise LazyInlineError(
            f"lazyinline needs {wanted}, and this is {torch.__version__}: {command}"
        )
    if found > NEWEST_TORCH:
        _warn(f"lazyinline is tested with {wanted}, and this is {torch.__version__}: {command}")
    if here > NEWEST_PYTHON:
        _warn(f"lazyinline is tested up to Python {_text(NEWEST_PYTHON)}, this is {_text(here)}")


def _is_free_threaded() -> bool:
    """Whether this interpreter was built without a global lock, in use or not, or runs so."""
    has_lock = getattr(sys, "_is_gil_enabled", lambda: True)
    return bool(sysconfig.get_config_var("Py_GIL_DISABLED")) or not has_lock()


def _next(version: tuple[int, int]) -> tuple[int, int]:
    return version[0], version[1] + 1


def _text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=4)  # at the line that imports lazyinline
