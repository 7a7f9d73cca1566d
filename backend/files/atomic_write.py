"""Files that appear complete under their name, or not at all; objects of others may not."""

from __future__ import annotations

import contextlib
import os
import struct
import tempfile
from pathlib import Path

TEMPORARY = ".new-"  # how the name of a file that is being written begins


_ELF_64 = b"\x7fELF\x02\x01"  # little-endian; an object in another format is not looked into
_ELF_HEADER = struct.Struct("<40xQ10xHH")  # where the table of sections is, their size and number
_ELF_HEADER_BYTES = 64


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


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file, so that no other process ever sees a part of it.

    Raises:
        OSError: if it could not be written; nothing of it is left then.
    """
    handle, temporary = tempfile.mkstemp(prefix=TEMPORARY, dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
