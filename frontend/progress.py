"""Progress of a compile that takes long: a bar on a terminal, or a line per pass."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, Literal, get_args

from tqdm import tqdm

from ..reuse.errors import ReuseError

VARIABLE = "LAZYINLINE_PROGRESS"
"""The environment variable that says what is shown."""

Shown = Literal["auto", "bar", "lines", "off"]
"""``auto``: a bar on a terminal, else nothing; ``lines``: one line on stderr for each pass."""

# A context variable: two threads that compile may be shown in two ways.
_SHOWN: ContextVar[Shown] = ContextVar("shown", default="auto")


@contextmanager
def showing(shown: Shown) -> Iterator[None]:
    """Shows progress in this form inside the block, unless the environment says otherwise."""
    token = _SHOWN.set(shown)
    try:
        yield
    finally:
        _SHOWN.reset(token)


class Progress:
    """Follows the passes of one compiler on stderr."""

    def __init__(self) -> None:
        self._bar: Any = None

    @contextmanager
    def passes(self, names: Sequence[str]) -> Iterator[Callable[[str], Any]]:
        """Follows a list of passes; yields what to run each in."""
        shown = _shown()
        if shown == "lines":
            yield _line
        elif shown == "off" or self._bar is not None:  # passes inside a pass belong to that one
            yield nullcontext
        else:
            form = "{desc} |{bar}| {n_fmt}/{total_fmt} passes, {elapsed}{postfix}"
            with tqdm(total=len(names), bar_format=form, leave=False) as self._bar:
                try:
                    yield self._step
                finally:
                    self._bar = None

    @contextmanager
    def parts(self, total: int, unit: str) -> Iterator[Callable[[], None]]:
        """Follows parts of the running pass; yields a function that counts one."""
        bar, done = self._bar, 0

        def count() -> None:
            nonlocal done
            done += 1
            bar.set_postfix_str(f"{done}/{total} {unit}")

        yield (lambda: None) if bar is None else count
        if bar is not None:
            bar.set_postfix_str("")

    @contextmanager
    def _step(self, name: str) -> Iterator[None]:
        bar = self._bar
        bar.set_description_str(f"lazyinline: {name}")
        yield
        bar.update(1)


@contextmanager
def _line(name: str) -> Iterator[None]:
    begun = time.perf_counter()
    yield
    print(f"lazyinline: {name} {time.perf_counter() - begun:.2f} s", file=sys.stderr, flush=True)


def _shown() -> Shown:
    wish = os.environ.get(VARIABLE) or _SHOWN.get()
    if wish not in get_args(Shown):
        raise ReuseError(f"{VARIABLE}={wish} is none of {', '.join(get_args(Shown))}.")
    if wish == "auto":
        return "bar" if sys.stderr.isatty() else "off"
    return wish  # type: ignore[return-value]
