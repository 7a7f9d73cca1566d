"""Files that appear complete under their name, or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

TEMPORARY = ".new-"  # how the name of a file that is being written begins


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
