"""A progress bar for long work: on a terminal, not when piped."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm


@contextmanager
def progress(total: int, unit: str) -> Iterator[Callable[[], None]]:
    """Shows a bar on a terminal, nothing when piped; yields a function that advances it."""
    hidden = total < 2 or not sys.stderr.isatty() or "LAZYINLINE_NO_PROGRESS" in os.environ
    with tqdm(total=total, unit=unit, desc="lazyinline", disable=hidden, leave=False) as bar:
        yield functools.partial(_advance, bar)


def _advance(bar: Any) -> None:
    bar.update(1)
