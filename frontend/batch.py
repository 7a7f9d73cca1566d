"""A step's batch, split into micro-batches; and its loss: with the model as one module."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..reuse import torch_pytree
from ..reuse.errors import LazyInlineError, PipelineError, PlanError
from ..reuse.torch_names import is_lazy
from .checks.refusals import refuse_containers
from .checks.torch_state import why_no_memory, why_watched


class Batch:
    """The structure of a batch, and how it is split: by an example of a whole one."""

    def __init__(
        self, example: tuple[Sequence[Any], Mapping[str, Any]], num_micro_batches: int
    ) -> None:
        self._count = num_micro_batches
        args, kwargs = example
        self._example, self.tree = torch_pytree.flatten((tuple(args), dict(kwargs)))
        refuse_containers(self.tree, "pipeline")

    def first_micro_batch(self) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Returns args and kwargs of the first micro-batch of the example."""
        leaves = [self._part(leaf)[0] for leaf in self._example]
        args, kwargs = torch_pytree.unflatten(leaves, self.tree)
        return args, kwargs

    def split(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[list[Any]]:
        """Returns the flat inputs of each micro-batch."""
        leaves, tree = torch_pytree.flatten((tuple(args), dict(kwargs)))
        if tree != self.tree:
            raise PipelineError("The batch has another structure than the example batch had.")
        parts = [self._part(leaf) for leaf in leaves]
        return [list(row) for row in zip(*parts, strict=True)]

    def _part(self, leaf: Any) -> Sequence[Any]:
        if not isinstance(leaf, Tensor):
            return split(leaf, self._count)
        if leaf.requires_grad:
            raise PipelineError("A pipeline takes inputs that do not require grad.")
        if why := why_watched((leaf,)) or why_no_memory(leaf):
            raise PipelineError(
                f"A batch tensor is {why}, and kernels bypass it. Pass plain tensors."
            )
        if is_lazy(leaf):  # in the memory of a copy the numbers are what they say
            leaf = leaf.clone()
        return split(leaf, self._count, PipelineError)


def split_batch(
    args: Sequence[Any], kwargs: Mapping[str, Any], count: int
) -> list[tuple[Any, Any]]:
    """Returns the inputs of each micro-batch: tensors are split along dimension 0."""
    leaves, tree = torch_pytree.flatten((tuple(args), dict(kwargs)))
    parts = [split(leaf, count) for leaf in leaves]
    return [torch_pytree.unflatten([part[i] for part in parts], tree) for i in range(count)]


def check_count(micro_batches: int, error: type[LazyInlineError] = PlanError) -> None:
    """Raises an error for a number of micro-batches that no batch has."""
    if micro_batches < 1:
        raise error(f"micro_batches={micro_batches}: there must be at least one.")


def split(leaf: Any, count: int, error: type[LazyInlineError] = PlanError) -> Sequence[Any]:
    """Returns the equal parts of a tensor, or what else is in a batch for each micro-batch.

    Raises:
        PlanError, PipelineError: for a tensor that has none.
    """
    if count == 1 or not isinstance(leaf, Tensor):
        return [leaf] * count
    if leaf.dim() == 0 or leaf.shape[0] % count or not leaf.shape[0]:
        raise error(
            f"A batch tensor of shape {tuple(leaf.shape)} cannot be split into {count} equal "
            "micro-batches along dimension 0. Change micro_batches or the batch size."
        )
    return leaf.tensor_split(count)


# ---- The loss ------------------------------------------------------------------------------------


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
