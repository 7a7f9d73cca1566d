"""Text that fits a screen: what a report or a command prints is folded at one width."""

from __future__ import annotations

import textwrap

WIDTH = 100
"""Columns of all that is printed; a word that is longer by itself stays whole."""

_INDENT = 4


def folded(text: str, *, width: int = WIDTH, indent: int | None = None) -> str:
    """Returns a text whose lines fit: one that is too long goes on below.

    Args:
        text: of any number of lines.
        width: columns that there are.
        indent: where a line goes on; None: further in than it begins.
    """
    return "\n".join(piece for line in text.split("\n") for piece in _pieces(line, width, indent))


def _pieces(line: str, width: int, indent: int | None) -> list[str]:
    if len(line) <= width:
        return [line]
    if indent is None:
        indent = len(line) - len(line.lstrip()) + _INDENT
    return textwrap.wrap(
        line,
        width,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
