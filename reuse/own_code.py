"""Where the code of lazyinline lies: what its cache goes by, and which frames are its own."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

# Named one by one: in a checkout they stand beside tests, examples and whatever else a user put
# there, and code that is taken for ours is not watched.
FOLDERS = ("autodiff", "backend", "frontend", "pipeline_parallel", "recompute", "reuse")


def package_root() -> Path:
    """Returns what holds the folders of lazyinline: the installed package, or a checkout.

    Links are not resolved: frames name the path by which a file was imported.
    """
    depth = __name__.count(".")  # lazyinline.<folder>[.<folder>...].own_code
    return Path(os.path.abspath(__file__)).parents[depth - 1]


def own_places(root: Path | None = None) -> tuple[str, ...]:
    """Returns how the paths of our files begin: of all of them, and of no others."""
    root = root or package_root()
    if (root / "__init__.py").is_file():  # installed: the root is the package itself
        return (f"{root}{os.sep}",)
    return tuple(f"{root / folder}{os.sep}" for folder in FOLDERS)


def own_files(root: Path | None = None) -> Iterator[Path]:
    """Yields every file of the package, at any depth, in an order that depends on names alone."""
    for place in own_places(root):
        for folder, inside, names in os.walk(place, followlinks=True):  # make lint has links
            inside[:] = sorted(name for name in inside if name != "__pycache__")
            yield from (Path(folder, name) for name in sorted(names) if name[0] != ".")


def code_digest(root: Path) -> str:
    """Returns a digest of the paths and contents of all files of the package under ``root``."""
    digest = hashlib.sha256()
    for path in own_files(root):
        content = path.read_bytes()
        name = path.relative_to(root).as_posix()
        digest.update(f"{name}\n{len(content)}\n".encode() + content)
    return digest.hexdigest()


@functools.cache
def package_digest() -> str:
    """Returns a digest of this package's code: another version makes other results."""
    return code_digest(package_root())
