"""Which kernels are built already, by content: a folder beside the objects, for all processes.

    <key>.json   where the kernel's shared object is, and the digest of that object
    <key>.lock   held by the process that builds the kernel

An entry appears complete or not at all. An object is loaded only if it lies in the folder, is the
user's own and has the right digest; any other goes, with what names it, and the kernel is built
again.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from filelock import FileLock, Timeout

from ..files.atomic_write import write_whole
from ..files.ownership import is_own
from ..launches.built_kernel import BuiltKernel, loaded_kernel
from .source import KernelSource

_LOCK_TIMEOUT_S = 600.0


class KernelIndex:
    """The index in a folder, made if it is not there.

    Args:
        folder: where; the objects are anywhere in the folder that it stands in.
        setting: all that decides what is made of a source: flags, compiler, versions.
    """

    def __init__(self, folder: Path, setting: str) -> None:
        self._folder = folder
        self.setting = setting
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def find(self, source: KernelSource) -> BuiltKernel | None:
        """Returns a kernel that was built before, or None."""
        entry = self._entry(source)
        try:
            said = json.loads(entry.read_bytes())
            path, digest = self._folder.parent / said["object"], said["digest"]
        except (OSError, ValueError, LookupError, TypeError):
            return None
        own = all(map(is_own, (self._folder, entry, path.parent, path)))
        if not (own and self._is_inside(path) and _is_sound(path, digest)):
            self._remove(entry)
            self._remove(path)
            return None
        try:
            return loaded_kernel(path, source.symbol, source.argument_types)
        except (OSError, AttributeError):
            return None

    def keep(self, sources: Sequence[KernelSource], path: Path) -> list[BuiltKernel]:
        """Notes that a shared object holds these kernels; returns them.

        Raises:
            OSError, AttributeError: if it does not load, or does not hold them.
        """
        place = os.path.relpath(path, self._folder.parent)
        said = {"object": place, "digest": hashlib.sha256(path.read_bytes()).hexdigest()}
        for source in sources:
            with contextlib.suppress(OSError):  # a full disk: built again next time
                write_whole(self._entry(source), json.dumps(said).encode())
        return [loaded_kernel(path, s.symbol, s.argument_types) for s in sources]

    @contextlib.contextmanager
    def claimed(self, sources: Sequence[KernelSource]) -> Iterator[list[KernelSource]]:
        """Yields the kernels that no other process is building, which wait for this one then."""
        with contextlib.ExitStack() as held:
            mine = []
            for source in sources:
                with contextlib.suppress(Timeout):
                    held.enter_context(self._lock(source).acquire(blocking=False))
                    mine.append(source)
            yield mine

    @contextlib.contextmanager
    def waiting(self, source: KernelSource) -> Iterator[None]:
        """Waits until no other process is building a kernel; others wait inside."""
        with self._lock(source).acquire(timeout=_LOCK_TIMEOUT_S):
            yield

    def _lock(self, source: KernelSource) -> FileLock:
        return FileLock(str(self._entry(source).with_suffix(".lock")))

    def _entry(self, source: KernelSource) -> Path:
        key = hashlib.sha256(f"{self.setting}\n{source.symbol}".encode()).hexdigest()
        return self._folder / f"{key}.json"

    def _remove(self, path: Path) -> None:
        """Removes an entry or an object, and nothing else that a damaged entry may name."""
        if self._is_inside(path) and path.suffix in (".json", ".so"):
            with contextlib.suppress(OSError):
                path.unlink()

    def _is_inside(self, path: Path) -> bool:
        return path.resolve().is_relative_to(self._folder.parent.resolve())


def _is_sound(path: Path, digest: str) -> bool:
    try:
        status = path.stat()
        return _digest(path, status.st_mtime_ns, status.st_size) == digest
    except OSError:
        return False


@functools.lru_cache(maxsize=64)
def _digest(path: Path, changed_ns: int, num_bytes: int) -> str:
    """Digest of an object; read once for all kernels in it."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
