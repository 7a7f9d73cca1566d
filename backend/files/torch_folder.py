"""Adapter: the folder in which Inductor builds and finds shared objects, made sure of.

What lies there is loaded, so it must be the user's own work. Inductor takes any folder, by default
one of a known name in a place where everybody may make it first.
"""

from __future__ import annotations

import contextlib
import functools
import os
import struct
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...reuse.errors import CacheWarning
from .disk import default_directory, is_own, why_not_trusted

_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
_ELF_64 = b"\x7fELF\x02\x01"  # little-endian; an object in another format is not looked into
_ELF_HEADER = struct.Struct("<40xQ10xHH")  # where the table of sections is, their size and number
_ELF_HEADER_BYTES = 64


def own_folder() -> Path:
    """Returns Inductor's folder, or another one for this process if others can write to it."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    folder = Path(os.environ.get(_VARIABLE) or default_cache_dir()).absolute()
    reason = _why_refused(folder)
    if reason:
        private = _private_folder()
        warnings.warn(
            f"{reason}. Kernels are built in {private} instead. Make the folder your own "
            f"(chmod 700) after a look at what is in it, or name another one in {_VARIABLE}.",
            CacheWarning,
            stacklevel=2,
        )
        # Inductor itself writes the folder it chose there, and looks there next time.
        os.environ[_VARIABLE] = str(private)
        return private
    return folder


class DamagedObjectError(OSError):
    """A shared object that is not whole, or somebody else's. Inductor finds it no more."""


def sound_object(path: Path) -> Path:
    """Returns the path of a shared object that may be loaded.

    Raises:
        DamagedObjectError: if a part is missing, which would end the process, or if others can
            have written it.
    """
    if is_own(path) and is_whole_object(path):
        return path
    # Only in Inductor's own folder is it ours to delete; then Inductor builds it again.
    if path.resolve().is_relative_to(own_folder().resolve()):
        with contextlib.suppress(OSError):
            path.unlink()
    raise DamagedObjectError(f"{path} is damaged or not the user's own, and was not loaded")


def is_whole_object(path: Path) -> bool:
    """Whether a shared object reaches to its end: the table of sections, which is written last.

    Raises:
        OSError: if it cannot be read.
    """
    with path.open("rb") as file:
        head = file.read(_ELF_HEADER_BYTES)
        if not head.startswith(_ELF_64):
            return len(head) == _ELF_HEADER_BYTES
        if len(head) < _ELF_HEADER_BYTES:
            return False
        start, size, count = _ELF_HEADER.unpack_from(head)
        return bool(start) and start + size * count <= os.fstat(file.fileno()).st_size


def sound_code(cache: type, load: Callable[[str], Any]) -> Any:
    """Returns one of Inductor's code caches that loads what is whole and the user's own."""

    def checked(path: str, key: str) -> Any:
        return load(str(sound_object(Path(path))))

    # A new class each time: a class does not load again what it has loaded.
    return type("Sound", (cache,), {"cache": {}, "_load_library_inner": staticmethod(checked)})


def _why_refused(folder: Path) -> str:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        return str(error)
    return why_not_trusted(folder)


@functools.cache
def _private_folder() -> Path:
    """Returns a folder next to the cache that is kept, or one for this process."""
    chosen = default_directory() / "inductor"
    if not _why_refused(chosen):
        return chosen
    return Path(tempfile.mkdtemp(prefix="lazyinline_"))
