"""Writes a page as one self-contained file, and formats numbers for readers."""

from __future__ import annotations

import datetime
import json
import os
import pathlib
import platform
import shlex
import sys
from importlib import resources
from typing import Any, TypeAlias

import torch

PageData: TypeAlias = dict[str, Any]
"""The data of a page: a title, and the data of each section. Plain values only."""

_ASSETS = resources.files(__package__) / "assets"
_CPU_INFO = pathlib.Path("/proc/cpuinfo")


def write_page(data: PageData) -> str:
    """Returns the text of a page."""
    import jinja2  # imported late, because only pages need it

    # The script draws a section for each name in the data.
    present = {name: section for name, section in data.items() if section is not None}
    files = {name: _asset(name) for name in ("page.css", "echarts.min.js", "page.js")}
    template = jinja2.Environment(autoescape=True).from_string(_asset("page.html.jinja"))
    return template.render(present, files=files, data=as_json(present))


def as_json(data: PageData) -> str:
    """Returns data as JSON for a script element; no string in it can close the element."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def about() -> dict[str, Any]:
    """Returns the machine, versions and command that made a page."""
    now = datetime.datetime.now(datetime.timezone.utc)
    from lazyinline import __version__

    return {
        "rows": [
            ["Processor", _processor()],
            ["Cores", f"{os.cpu_count()}, {torch.get_num_threads()} threads in PyTorch"],
            ["System", f"{platform.system()} {platform.machine()}"],
            ["Python", platform.python_version()],
            ["PyTorch", torch.__version__],
            ["lazyinline", __version__],
        ],
        # In a notebook or a console, the name of that program.
        "command": shlex.join([pathlib.Path(sys.orig_argv[0]).name, *sys.orig_argv[1:]]),
        "date": now.strftime("%Y-%m-%d %H:%M UTC"),
    }


def _processor() -> str:
    try:
        lines = _CPU_INFO.read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or "unknown"
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or "unknown")


def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


_EQUAL = 0.02  # ratios this close to one are called equal


def times_less(late: float, early: float) -> str:
    """Compares the first number with the second: ``2.4x less``, ``1.1x more``, ``equal``."""
    if not late or not early:
        return "equal" if late == early else "-"
    ratio = early / late
    if abs(ratio - 1) <= _EQUAL:  # so small a difference is noise
        return "equal"
    return f"{ratio:.3g}\u00d7 less" if ratio > 1 else f"{1 / ratio:.3g}\u00d7 more"


def ratio_range(ratios: list[float]) -> str:
    """Formats ratios as a range: ``0.9-1.1x``, or ``1.0x`` if they agree."""
    low, high = (f"{r:.2f}" if r < 10 else f"{r:.0f}" for r in (min(ratios), max(ratios)))
    return f"{low}\u00d7" if low == high else f"{low}\u2013{high}\u00d7"


def error_text(error: float | str | None) -> str:
    """Formats an error in two digits: ``1.2e-07``, ``0``, or ``-`` if it is not known."""
    return "-" if error is None else "0" if error == 0 else f"{float(error):.1e}"
