"""``lazyinline cache``: what the on-disk cache holds, and emptying it."""

from __future__ import annotations

import argparse
import dataclasses
import json

from ...backend.files.disk import CacheInfo, DiskCache, default_directory, max_bytes
from ...reuse.errors import CacheError


def run_cache(options: argparse.Namespace) -> None:
    """Runs the command.

    Raises:
        CacheError: if the directory cannot be used.
    """
    try:
        found = DiskCache(default_directory(), max_bytes())
    except OSError as error:
        raise CacheError(f"{default_directory()} cannot be used: {error}.") from error
    held = found.info() if options.action == "info" else found.clear()
    if options.json:
        print(json.dumps(dataclasses.asdict(held), default=str))
    elif options.action == "info":
        print(held)
    else:
        print(_cleared(held))


def _cleared(held: CacheInfo) -> str:
    return (
        f"{held.directory}\n  deleted {held.num_entries} entries, {held.num_objects} compiled "
        f"objects, {held.num_bytes / 2**20:.1f} MiB"
    )
