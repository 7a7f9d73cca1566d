"""What takes a model with example inputs takes a module, and a tuple."""

from __future__ import annotations

from typing import Any

from torch import nn

from ...reuse.errors import PlanError


def check_example(what: str, model: Any, args: Any) -> None:
    """Raises PlanError for a model that is none, and for one input without a tuple around it.

    Args:
        what: the function that was called.
        model: its model.
        args: its positional example inputs.
    """
    if not isinstance(model, nn.Module):
        raise PlanError(f"{what} takes an nn.Module, not {type(model).__name__}.")
    if not isinstance(args, (tuple, list)):
        raise PlanError(
            f"args is a tuple of the model's positional inputs, not {type(args).__name__}; "
            "write (x,) for one input."
        )
