"""What a disk, another program or somebody else does to files: a table of ways."""

import os
import pathlib
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

Damage = Callable[[pathlib.Path, Random], Any]


def flip(path: pathlib.Path, random: Random) -> None:
    content = bytearray(path.read_bytes())
    content[random.randrange(len(content))] ^= 1 << random.randrange(8)
    path.write_bytes(bytes(content))


def through_a_link(path: pathlib.Path) -> None:
    other = path.parent.parent / f"elsewhere-{path.name}"
    path.rename(other)
    path.symlink_to(other)


def instead(path: pathlib.Path, make: Callable[[pathlib.Path], Any]) -> None:
    """Makes something else under the name of a file."""
    path.unlink()
    make(path)


# Each at a place of chance.
WAYS: dict[str, Damage] = {
    "cut off": lambda p, random: os.truncate(p, random.randrange(p.stat().st_size)),
    "a bit flipped": flip,
    "longer": lambda p, random: p.write_bytes(p.read_bytes() + random.randbytes(3)),
    "other bytes": lambda p, random: p.write_bytes(random.randbytes(random.randrange(99))),
    "writable by others": lambda p, random: p.chmod(0o666),
    "a link": lambda p, random: through_a_link(p),
    "a pipe": lambda p, random: instead(p, os.mkfifo),
}


def swap(files: Sequence[pathlib.Path]) -> None:
    """Gives each file what the next one holds."""
    contents = [path.read_bytes() for path in files]
    for path, content in zip(files, [*contents[1:], contents[0]], strict=True):
        path.write_bytes(content)
