"""Work, counted: what the clock says depends on the machine and on who else is using it."""

import sys
from collections.abc import Callable
from typing import Any


def num_calls(function: Callable[[], object]) -> int:
    """Counts the calls, of Python and of C, that a function makes in this thread."""
    count = 0

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count
