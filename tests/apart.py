"""Runs what may end a process in one of its own."""

import os
import pathlib
import subprocess
import sys
from collections.abc import Callable

_TESTS = pathlib.Path(__file__).parent
_LIMIT_S = 300.0


def run_apart(function: Callable[..., None], *arguments: str, **environment: str) -> str:
    """Runs a function of a test module; fails with what it printed unless it ends well.

    Args:
        function: found by name, so a module's own.
        arguments: what it is called with.
        environment: variables to set.
    """
    code = f"import {function.__module__} as m; m.{function.__name__}(*{list(arguments)!r})"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = [{str(_TESTS)!r}]; {code}"],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_LIMIT_S,
    )
    assert done.returncode == 0, f"ended with {done.returncode}:\n{done.stdout}"
    return done.stdout
