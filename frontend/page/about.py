"""Where a page was made: machine, versions, and the command."""

from __future__ import annotations

import datetime
import os
import pathlib
import platform
import shlex
import sys
from importlib import metadata
from typing import Any

import torch

_CPU_INFO = pathlib.Path("/proc/cpuinfo")


def about() -> dict[str, Any]:
    """Returns what the last section of a page shows."""
    rows = [
        ("Processor", _processor()),
        ("Cores", f"{os.cpu_count()}, {torch.get_num_threads()} threads in PyTorch"),
        ("System", f"{platform.system()} {platform.machine()}"),
        ("Python", platform.python_version()),
        ("PyTorch", torch.__version__),
        ("lazyinline", _own_version()),
    ]
    now = datetime.datetime.now(datetime.timezone.utc)
    return {
        "rows": [list(row) for row in rows],
        "command": _command(),
        "date": now.strftime("%Y-%m-%d %H:%M UTC"),
    }


def _command() -> str:
    """The command of this process; in a notebook or a console, its name."""
    return shlex.join([pathlib.Path(sys.orig_argv[0]).name, *sys.orig_argv[1:]])


def _own_version() -> str:
    try:
        return metadata.version("lazyinline")
    except metadata.PackageNotFoundError:  # a bare checkout
        return "not installed"


def _processor() -> str:
    try:
        lines = _CPU_INFO.read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or "unknown"
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or "unknown")
