"""``lazyinline cache``: what the on-disk cache holds, and emptying it."""

from __future__ import annotations

import argparse
from typing import Any

from ..backend.files.disk import (
    DIRECTORY_VARIABLE,
    SIZE_VARIABLE,
    SWITCH_VARIABLE,
    DiskCache,
    default_directory,
    max_bytes,
)
from ..reuse.errors import CacheError


def add_parser(commands: Any) -> None:
    """Adds the command to the command line."""
    parser = commands.add_parser("cache", help="what earlier compiles left on disk")
    parser.description = (
        "Derivatives, kernels and memory plans that later processes start from. "
        f"{DIRECTORY_VARIABLE} moves them, {SIZE_VARIABLE} limits them, {SWITCH_VARIABLE}=0 turns "
        "the cache off."
    )
    parser.add_argument("action", choices=("info", "clear"))


def run(options: argparse.Namespace) -> None:
    """Runs the command.

    Raises:
        CacheError: if the directory cannot be used.
    """
    try:
        found = DiskCache(default_directory(), max_bytes())
    except OSError as error:
        raise CacheError(f"{default_directory()} cannot be used: {error}.") from error
    if options.action == "info":
        print(found.info())
        return
    held = found.clear()
    print(
        f"{held.directory}\n  deleted {held.num_entries} entries, {held.num_objects} compiled "
        f"objects, {held.num_bytes / 2**20:.1f} MiB"
    )
