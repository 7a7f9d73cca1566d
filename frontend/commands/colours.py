"""Colours, on terminals only and unless ``NO_COLOR`` asks for none (https://no-color.org)."""

from __future__ import annotations

import os
from typing import TextIO

_RED, _GREEN, _PLAIN = "\033[31m", "\033[32m", "\033[0m"


def has_colours(stream: TextIO) -> bool:
    """Whether a stream shows colours."""
    return stream.isatty() and not os.environ.get("NO_COLOR")


def coloured_diff(text: str) -> str:
    """Returns a unified diff with its lines in the usual colours."""
    return "".join(map(_coloured, text.splitlines(keepends=True)))


def _coloured(line: str) -> str:
    colour = {"+": _GREEN, "-": _RED}.get(line[:1])
    body = line.rstrip("\n")
    return line if colour is None else f"{colour}{body}{_PLAIN}{line[len(body) :]}"
