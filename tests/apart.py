"""Runs what may end a process in one of its own, and work in several threads at once."""

import threading
from collections.abc import Callable
from typing import Any

import forked


def run_apart(function: Callable[..., None], *arguments: str, **environment: str) -> str:
    """Runs a function of a test module; fails with what it printed unless it ends well.

    Args:
        function: found by name, so a module's own.
        arguments: what it is called with.
        environment: variables to set.
    """
    code = f"import {function.__module__} as m; m.{function.__name__}(*{list(arguments)!r})"
    return forked.run(code, **environment)


def in_threads(work: Callable[[int], Any], number: int = 3) -> list[Any]:
    """Runs ``work(i)`` in threads that start together; raises what they raise."""
    results: list[Any] = [None] * number
    start = threading.Barrier(number)

    def run(index: int) -> None:
        start.wait(timeout=60)
        try:
            results[index] = work(index)
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
        assert not thread.is_alive(), "a thread hangs"
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results
