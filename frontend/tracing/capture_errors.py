"""Turns an error of the user's model in a capture into one that has the line and a remedy."""

from __future__ import annotations

import sys
import traceback
from typing import Any

from torch import nn

from ...reuse.errors import CaptureError, LazyInlineError
from ..checks.refusals import CANNOT, RaisedError, WrongCallError
from .frames import frame_text, user_frame
from .torch_tracing import DATA_DEPENDENT_ERRORS, LEAVES_PYTORCH

WHOLE = "model"
"""The path of a model in what computes its loss."""
_NEEDS_A_VALUE = "value out of a tracing tensor"


def own_model(model: nn.Module) -> Any:
    """Returns the user's model: what computes the loss of a step is around it."""
    return model.model if _is_around(model) else model


def model_name(model: nn.Module) -> str:
    """Returns what the user calls a model: its class, or that of the model in ours around it."""
    return type(own_model(model)).__name__


def _is_around(model: nn.Module) -> bool:
    return getattr(type(model), "is_around_a_model", False)


def user_path(model: nn.Module, path: str) -> str:
    """Returns a module's path in the user's model, where what computes the loss is around it.

    The user's model itself is then at :data:`WHOLE`: an empty path is the module around it.
    """
    return path.removeprefix(f"{WHOLE}.") if _is_around(model) else path


def capture_error(model: nn.Module, error: Exception, *, has_symbols: bool) -> CaptureError:
    """Returns what to raise for an error of a model's own Python: the line, and what to do.

    Args:
        model: it.
        error: what it raised.
        has_symbols: whether sizes were symbols, which eager knows nothing of.
    """
    line = _user_line(error)
    where = f" at {line}" if line else ""
    name, text = model_name(model), str(error)
    if isinstance(error, LazyInlineError):  # it says what to do already
        return CaptureError(text)
    if isinstance(error, DATA_DEPENDENT_ERRORS) or _NEEDS_A_VALUE in text:
        return CaptureError(
            f"{name} cannot be captured: its Python needs the value of a tensor{where} (.item(), "
            "if, int() or print do), and a program has no values yet. Compute with the tensor "
            "itself; decide with torch.where or masking, or outside the model; print outside of it."
        )
    if LEAVES_PYTORCH in text:
        return CaptureError(
            f"{name} cannot be captured: its forward leaves PyTorch{where} (.numpy()), and what "
            "NumPy computes cannot be in a program. Use PyTorch's functions, or make it an "
            "operator with torch.library.custom_op."
        )
    if isinstance(error, RecursionError):
        return WrongCallError(
            f"{name} {CANNOT}: its calls are nested so deep that a capture, which adds frames "
            f"to each, reaches Python's recursion limit ({sys.getrecursionlimit()})."
        )
    is_ours = has_symbols or isinstance(error, NotImplementedError)  # no rule for fake tensors
    kind = RaisedError if is_ours else WrongCallError
    return kind(f"{name} {CANNOT}{where}: {type(error).__name__}: {text}")


def _user_line(error: Exception) -> str:
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return next((frame_text(f) for f in reversed(frames) if user_frame(f) is f), "")
