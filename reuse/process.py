"""The process that lazyinline runs in: PyTorch and Python, the files of lazyinline, stack, forks.

The oldest and newest versions are those of pyproject.toml (a test compares them). pip checks them,
but not everybody installs with pip, and a PyTorch name that moved would fail far from its cause.
Keys of the cache include a digest of lazyinline's files; its own frames are known by their path.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import sys
import sysconfig
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch

from .errors import LazyInlineError

Result = TypeVar("Result")

OLDEST_TORCH, NEWEST_TORCH = (2, 11), (2, 15)
NEWEST_PYTHON = (3, 14)


def check_supported() -> None:
    """Checks Python's and PyTorch's versions: LazyInlineError if too old, a warning if too new."""
    here = sys.version_info[:2]
    has_lock = getattr(sys, "_is_gil_enabled", lambda: True)
    # Refused are builds without a global lock, in use or not, and those that run so.
    if sysconfig.get_config_var("Py_GIL_DISABLED") or not has_lock():
        raise LazyInlineError(
            f"lazyinline does not run on free-threaded Python, and this is a free-threaded "
            f"{_text(here)}: a model that another thread changes while it is captured or checked "
            f"would go unnoticed. Use the ordinary build of Python {_text(here)}."
        )
    found = tuple(map(int, re.findall(r"\d+", torch.__version__)[:2]))
    wanted = f"PyTorch {_text(OLDEST_TORCH)} to {_text(NEWEST_TORCH)}"
    major, minor = NEWEST_TORCH
    command = f"pip install 'torch>={_text(OLDEST_TORCH)},<{major}.{minor + 1}'"
    if found < OLDEST_TORCH:
        raise LazyInlineError(
            f"lazyinline needs {wanted}, and this is {torch.__version__}: {command}"
        )
    if found > NEWEST_TORCH:
        _warn(f"lazyinline is tested with {wanted}, and this is {torch.__version__}: {command}")
    if here > NEWEST_PYTHON:
        _warn(f"lazyinline is tested up to Python {_text(NEWEST_PYTHON)}, this is {_text(here)}")


def _text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=4)  # at the line that imports lazyinline


# Listed by name: a checkout also holds tests, examples and a user's own files, and what code reads
# is not recorded if it is taken for ours.
FOLDERS = ("autodiff", "backend", "frontend", "pipeline_parallel", "recompute", "reuse")


def package_root() -> Path:
    """Returns what holds the folders of lazyinline: the installed package, or a checkout."""
    depth = __name__.count(".")  # lazyinline.<folder>[.<folder>...].process
    # Links are not resolved: frames name the path by which a file was imported.
    return Path(os.path.abspath(__file__)).parents[depth - 1]


def own_places(root: Path | None = None) -> tuple[str, ...]:
    """Returns the path prefixes of our files: every file of ours has one, and no other file."""
    root = root or package_root()
    if (root / "__init__.py").is_file():  # installed: the root is the package itself
        return (f"{root}{os.sep}",)
    return tuple(f"{root / folder}{os.sep}" for folder in FOLDERS)


def own_files(root: Path | None = None) -> Iterator[str]:
    """Yields every file of the package, at any depth, in an order that depends on names alone."""
    for place in own_places(root):
        for folder, inside, names in os.walk(place, followlinks=True):  # make lint has links
            # Sorted: other machines list a folder in another order, and digests must agree.
            inside[:] = sorted(name for name in inside if name != "__pycache__")
            yield from (os.path.join(folder, name) for name in sorted(names) if name[0] != ".")


def code_digest(root: Path) -> str:
    """Returns a digest of the paths and contents of all files of the package under ``root``."""
    digest = hashlib.sha256()
    for path in own_files(root):
        with open(path, "rb", buffering=0) as file:  # every process that opens a file waits for it
            content = file.read()
        name = path.removeprefix(f"{root}{os.sep}").replace(os.sep, "/")
        digest.update(f"{name}\n{len(content)}\n".encode() + content)
    return digest.hexdigest()


@functools.cache
def package_digest() -> str:
    """Returns a digest of this package's code, for cache keys: other code may compile otherwise."""
    return code_digest(package_root())


def with_room(function: Callable[[], Result]) -> Result:
    """Calls a function from a large frame, whose chunk of memory has room for the frames below.

    Since 3.11 Python keeps frames in chunks of 16 KB: a call at the end of one maps another, and
    its return unmaps it. Where the calls of a loop met an end, which the depth of the user's stack
    decides, a compile took up to a tenth longer. This frame has half a megabyte, its chunk one.
    """
    return function()


with_room.__code__ = with_room.__code__.replace(co_stacksize=70_000)  # pointers of 8 bytes


class ProcessLock:
    """A lock per process: a forked child gets a free one, as the thread that held it is gone."""

    def __init__(self, make: Callable[[], Any] = threading.RLock) -> None:
        self._make = make
        self._locks: dict[int, Any] = {}

    def acquire(self, *, blocking: bool = True) -> bool:
        """Takes the lock; returns whether it did."""
        return bool(self._of_process().acquire(blocking=blocking))

    def release(self) -> None:
        """Gives the lock back."""
        self._of_process().release()

    def __enter__(self) -> None:
        self._of_process().acquire()

    def __exit__(self, *_: object) -> None:
        self._of_process().release()

    def _of_process(self) -> Any:
        process = os.getpid()
        return self._locks.get(process) or self._locks.setdefault(process, self._make())
