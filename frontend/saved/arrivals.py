"""Ranks that open a file together tell each other of success or failure."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from types import TracebackType
from typing import Any

import torch.distributed as dist

from ...backend.files.container import CallError
from ...reuse.errors import FileError

_MOST_S = 0.1


class Arrivals:
    """Tells the other ranks, in the default group's store, whether this rank opened a file.

    Not a collective: a rank that cannot read its file does not know whether the file is for one
    process or for all ranks. So it leaves a note under the path and the number of its try. Ranks
    that wait at the same try of the same path find it. All ranks count the same number of meetings.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._store: Any = None
        group: Any = dist.group.WORLD if dist.is_available() else None
        if group is None or dist.get_world_size() == 1 or dist.get_backend() == "fake":
            return
        store, me = group.get_group_store(), dist.get_rank()
        if store is not None:  # ranks that are threads have none
            with suppress(dist.DistError):  # if the other ranks have ended
                tried = store.add(f"lazyinline/tried {me} {os.fspath(path)!r}", 1)
                self._note = f"lazyinline/cannot {tried} {os.fspath(path)!r}"
                self._met, self._store = f"lazyinline/met {me}", store

    def __enter__(self) -> Arrivals:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if self._store is not None and isinstance(error, FileError):
            with suppress(dist.DistError):
                self._store.set(self._note, f"rank {dist.get_rank()} says: {error}")

    def meet(self) -> None:
        """Waits until all ranks have opened a file; FileError if one cannot, or not in time."""
        store, self._store = self._store, None  # later errors show in collectives
        if store is None:
            return
        number, me = store.add(self._met, 0), dist.get_rank()
        opened = [f"lazyinline/opened {number} {rank}" for rank in range(dist.get_world_size())]
        store.set(opened[me], "")
        wait_s, limit_s = 0.001, store.timeout.total_seconds()
        deadline = time.monotonic() + limit_s
        while True:
            # In this order, because a rank that left a note may open the file at its next try.
            are_all_here = store.check(opened)
            if store.check([self._note]):
                store.delete_key(opened[me])
                raise CallError(store.get(self._note).decode())
            if are_all_here:
                break
            if time.monotonic() > deadline:
                missing = [rank for rank, key in enumerate(opened) if not store.check([key])]
                raise CallError(f"rank(s) {missing} have not opened it within {limit_s:.0f} s")
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, _MOST_S)
        store.add(self._met, 1)
