"""Who else may have written a file that is about to be loaded, or may exchange it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def not_private(status: os.stat_result) -> str:
    """Says why somebody else may have written this; empty if nobody else can."""
    if os.name != "posix":
        return ""
    if status.st_uid != os.geteuid():
        return f"it belongs to user {status.st_uid}"
    if status.st_mode & _OTHERS:
        return f"others may write to it (mode {stat.S_IMODE(status.st_mode):o})"
    return ""


def why_not_trusted(path: Path) -> str:
    """Says why a file or folder may not be the user's own work; empty if it is.

    Whoever can write to a folder above can put another one in its place, unless the folder is
    sticky, as ``/tmp`` is.
    """
    if os.name != "posix":
        return ""
    path = path.absolute()
    try:
        reason = _not_own(path.stat())
        return f"{path} cannot be trusted, since {reason}" if reason else why_exchangeable(path)
    except OSError as error:
        return str(error)


def is_own(path: Path) -> bool:
    """Whether nobody but the user can have written a file, whatever lies above it."""
    try:
        return not _not_own(path.stat())
    except OSError:
        return False


def _not_own(status: os.stat_result) -> str:
    reason = not_private(status)
    return reason if reason and not _is_of_own_group(status) else ""


def why_exchangeable(path: Path) -> str:
    """Says which folder above a path lets somebody else put another one in its place."""
    for folder in path.resolve().parents:
        status = folder.stat()
        if status.st_uid not in (0, os.geteuid()):
            return f"{path} cannot be trusted: {folder} belongs to user {status.st_uid}"
        if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
            return f"{path} cannot be trusted: everybody may rename what is in {folder}"
    return ""


def _is_of_own_group(status: os.stat_result) -> bool:
    """Whether who may write is the user, and a group that many systems give to each user."""
    if status.st_uid != os.geteuid() or status.st_mode & stat.S_IWOTH or os.geteuid() == 0:
        return False
    import grp
    import pwd

    try:
        group, user = grp.getgrgid(status.st_gid), pwd.getpwuid(os.geteuid())
    except KeyError:
        return False
    return group.gr_name == user.pw_name and not set(group.gr_mem) - {user.pw_name}
