"""A lock that a forked child finds open, whoever held it in the parent."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any


class ProcessLock:
    """One lock in each process: a child has only the thread that forked it.

    Args:
        make: makes the lock of a process.
    """

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
