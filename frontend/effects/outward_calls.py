"""Built-in functions that act or ask outside, where nothing shows what changed.

What a forward writes to a file, sends, or hands to a queue in C cannot be put back, and the time is
another at each call. So such a call is noticed before it is made.
"""

from __future__ import annotations

import random
import sys
import types
from typing import Any

_FILES = ("write", "writelines", "truncate", "read", "readinto", "readline", "readlines")
_SYSTEM = ("write", "pwrite", "read", "urandom", "putenv", "unsetenv", "system", "kill", "fork")
_FOLDERS = ("remove", "unlink", "rename", "replace", "mkdir", "rmdir", "symlink", "link", "utime")
_SOCKETS = ("send", "sendall", "sendto", "sendmsg", "recv", "recv_into", "recvfrom", "connect")
_CLOCKS = ("time", "perf_counter", "monotonic", "process_time", "thread_time", "sleep")
_TIME = "asks for the time"

_OUTWARD: dict[str, tuple[str, tuple[str, ...]]] = {
    "_io": ("reads or writes a file", _FILES),
    "posix": ("asks the operating system for something", (*_SYSTEM, *_FOLDERS)),
    "nt": ("asks the operating system for something", (*_SYSTEM, *_FOLDERS)),
    "_posixsubprocess": ("starts a process", ("fork_exec",)),
    "_socket": ("sends or receives something", _SOCKETS),
    "_queue": ("uses a queue", ("put", "put_nowait", "get", "get_nowait")),
    "_pickle": ("writes or reads a pickle", ("dump", "load")),
    "_csv": ("writes a table", ("writerow", "writerows")),
    "_random": ("draws from Python's random", ("random", "getrandbits", "seed", "setstate")),
    "sqlite3": ("uses a database", ("execute", "executemany", "executescript", "commit")),
    "generator": ("hands something to a generator", ("send", "throw")),
    "time": (_TIME, (*_CLOCKS, *(f"{name}_ns" for name in _CLOCKS))),
    "datetime": (_TIME, ("now", "utcnow", "today")),
}
_SHARED = getattr(random.random, "__self__", None)
NAMES = frozenset(name for _, names in _OUTWARD.values() for name in names)
"""Those of the functions that are looked at."""


def reach_of(function: Any, caller: str) -> str:
    """Says what a built-in function does outside, or returns an empty text.

    Args:
        function: written in C.
        caller: the module that calls it; what a lock or a logger of Python's own asks is no effect.
    """
    owner = getattr(function, "__self__", None)
    if isinstance(owner, random.Random) and owner is not _SHARED:
        return ""  # a state like others, of which evidence sees what changed
    for home in _homes(owner):
        what, names = _OUTWARD.get(home, ("", ()))
        if function.__name__ in names:
            is_pythons = caller.partition(".")[0] in sys.stdlib_module_names
            return "" if what == _TIME and is_pythons else what
    return ""


def _homes(owner: Any) -> list[str]:
    """Returns the modules of what a built-in function belongs to."""
    if isinstance(owner, types.ModuleType):
        return [owner.__name__]
    if isinstance(owner, types.GeneratorType):
        return ["generator"]
    return [base.__module__ for base in (owner if isinstance(owner, type) else type(owner)).__mro__]
