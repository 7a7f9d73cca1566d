"""A model and its loss as one module, whose forward is what a training step differentiates."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ..reuse.errors import PlanError

LossFunction = Callable[[Any], torch.Tensor]
"""Computes the loss from what a model returns."""


class LossModel(nn.Module):
    """A model and its loss as one module with the model's own parameter names."""

    is_around_a_model = True
    _loss_fn: LossFunction | None

    def __init__(self, model: nn.Module, loss_fn: LossFunction | None) -> None:
        super().__init__()
        for table in ("_parameters", "_buffers"):
            self.__dict__[table] = {}
        self.model = model
        _check_takes_output(loss_fn)
        # Past ``__setattr__``, which would make a loss that is a module a part of the model.
        self.__dict__["_loss_fn"] = loss_fn

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Returns the scalar loss."""
        output = self.model(*args, **kwargs)
        loss_fn = self._loss_fn
        loss = loss_fn(output) if loss_fn is not None else loss_of(output)
        if not isinstance(loss, torch.Tensor) or loss.dim():
            shape = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise PlanError(
                f"The loss must be a scalar tensor, not {shape}. Pass loss_fn=, which computes it "
                "from the model's output."
            )
        if loss.is_complex():
            raise PlanError(f"The loss must be real, not {loss.dtype}. Take .real or .abs() of it.")
        return loss


def _check_takes_output(loss_fn: LossFunction | None) -> None:
    """Raises PlanError if a function of the user's cannot be called with the output alone."""
    if loss_fn is None:
        return
    called = loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn
    try:
        signature = inspect.signature(called)
    except (TypeError, ValueError):  # written in C: the call will tell
        return
    try:
        signature.bind(None)
    except TypeError as error:
        raise PlanError(
            f"loss_fn{signature} is called with one argument, the model's output ({error}). Let "
            "the model return what else the loss needs, as in loss_fn=lambda output: "
            "cross_entropy(output[0], output[1])."
        ) from None


def loss_of(output: Any) -> Any:
    """Returns the loss in what a model returned: itself, or its ``.loss``."""
    if isinstance(output, torch.Tensor):
        return output
    if isinstance(output, Mapping) and "loss" in output:
        return output["loss"]
    return getattr(output, "loss", output)
