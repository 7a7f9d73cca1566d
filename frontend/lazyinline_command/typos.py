"""What somebody may have meant who mistyped a command, an option or a choice."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

_CHOICE = re.compile(r"invalid choice: '(?P<wrong>[^']*)' \(choose from (?P<known>.*)\)")
_OPTIONS = re.compile(r"unrecognized arguments: (?P<given>.*)")


def suggestion(message: str, options: Iterable[str]) -> str:
    """Returns `` Did you mean ...?`` for a message of argparse; "" if nothing is close.

    Args:
        message: of argparse.
        options: the option names where it went wrong.
    """
    if choice := _CHOICE.search(message):
        known = [name.strip(" '") for name in choice["known"].split(",")]
        return _closest([choice["wrong"]], known)
    if unknown := _OPTIONS.search(message):
        given = [word.partition("=")[0] for word in unknown["given"].split()]
        return _closest([word for word in given if word.startswith("-")], options)
    return ""


def _closest(wrong: Iterable[str], known: Iterable[str]) -> str:
    among = list(known)
    found = [name for word in wrong for name in difflib.get_close_matches(word, among, 1)]
    return f" Did you mean {' and '.join(found)}?" if found else ""
