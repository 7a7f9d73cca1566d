"""What the command says of an error in one line, with the user's own source line."""

from __future__ import annotations

import traceback

from ...reuse.errors import LazyInlineError
from ...reuse.own_code import own_places
from ..tracing.torch_tracing import is_library_frame, is_standard_frame


def said_of(error: Exception) -> str | None:
    """Returns one line for an error that is the user's to mend; None for one that is ours.

    What the model itself raises, also deep in PyTorch, is the user's. Where code of ours stands
    between the model and what raised, it may be ours, and the traceback is what a report of it
    needs.
    """
    if isinstance(error, LazyInlineError):
        return str(error)
    where = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        if code.co_filename.startswith(own_places()):
            where = ""
        elif not (is_library_frame(frame) or is_standard_frame(frame)):
            where = f"{code.co_filename}:{line} {getattr(code, 'co_qualname', code.co_name)}"
    if not where:
        return None
    return f"{type(error).__name__} at {where}: {error} (--debug shows the traceback)"
