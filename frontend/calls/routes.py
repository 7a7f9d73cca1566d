"""The way of calls while a model runs itself: those of modules in it go to what is compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from ...reuse.process_lock import ProcessLock
from .calls import Calls
from .torch_slot import empty_slot, fill_slot, in_slot


class Routes:
    """Fills PyTorch's own slots of modules for as long as any thread runs the model around them.

    Args:
        find: returns what takes the calls; asked when the first thread comes.
    """

    def __init__(self, find: Callable[[], Sequence[Calls]]) -> None:
        self._find = find
        self._lock = ProcessLock()
        self._num_running = 0
        self._taken: list[tuple[Calls, Callable[[], None]]] = []

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Within it the calls of the modules go to what is compiled for them."""
        with self._lock:
            if not self._num_running:
                self._taken = [(calls, _filled(calls)) for calls in self._find()]
            self._num_running += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_running -= 1
                if not self._num_running:
                    self._close()

    def _close(self) -> None:
        for calls, put_back in self._taken:
            if in_slot(calls.model) is calls:  # else the model's Python has filled it anew
                put_back()
        self._taken = []


def _filled(calls: Calls) -> Callable[[], None]:
    """Fills a module's slot; returns what puts back what was there."""
    module, before = calls.model, in_slot(calls.model)
    fill_slot(module, calls)
    return lambda: empty_slot(module) if before is None else fill_slot(module, before)
