"""Where ranks that open a file say that they have, or why they cannot."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from types import TracebackType
from typing import Any

import torch.distributed as dist

from ...reuse.errors import FileError

_MOST_S = 0.1


class Arrivals:
    """What ranks say as they open a file, in the store of PyTorch's default group.

    Not a collective: a rank that cannot read its file does not know that others wait for it, for
    the file might be of one process. So it leaves a note, which those find that try to open the
    same path as often as it did. How often ranks have met, in whatever file, is the same for all.

    Args:
        path: of the file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._store: Any = None
        group: Any = dist.group.WORLD if dist.is_available() else None
        if group is None or dist.get_world_size() == 1 or dist.get_backend() == "fake":
            return
        store, me = group.get_group_store(), dist.get_rank()
        if store is not None:  # ranks that are threads have none
            with suppress(dist.DistError):  # should the others have ended
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
        """Waits until all ranks have opened a file.

        Raises:
            FileError: on all others, if one of them cannot; or if one does not come in time.
        """
        store, self._store = self._store, None  # what comes after it others hear of in collectives
        if store is None:
            return
        number, me = store.add(self._met, 0), dist.get_rank()
        opened = [f"lazyinline/opened {number} {rank}" for rank in range(dist.get_world_size())]
        store.set(opened[me], "")
        wait_s, limit_s = 0.001, store.timeout.total_seconds()
        deadline = time.monotonic() + limit_s
        while True:
            # In this order: a rank that left a note may be at its next try, and open the file.
            are_all_here = store.check(opened)
            if store.check([self._note]):
                store.delete_key(opened[me])
                raise FileError(store.get(self._note).decode())
            if are_all_here:
                break
            if time.monotonic() > deadline:
                missing = [rank for rank, key in enumerate(opened) if not store.check([key])]
                raise FileError(f"rank(s) {missing} have not opened it within {limit_s:.0f} s")
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, _MOST_S)
        store.add(self._met, 1)
