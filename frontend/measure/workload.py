"""A copy of a model with the inputs of one step, and how far the results of two steps are apart."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import nn

from ...reuse import torch_pytree
from ...reuse.errors import PlanError
from ..training_step import TrainingStep, check_splits

Tensors: TypeAlias = Mapping[str, torch.Tensor | None]


class Workload:
    """A copy of a model and of its inputs, so that a step leaves the user's own as they are.

    Args:
        model: the model.
        args: positional inputs of a step.
        kwargs: keyword inputs of a step.
        train: whether a step has gradients.
        make: makes of the copy what runs it; None runs the copy itself.
        micro_batches: parts of the batch that the copy runs one after another, for their mean loss.
    """

    def __init__(
        self,
        model: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        train: bool,
        make: Callable[[nn.Module], Any] | None = None,
        micro_batches: int = 1,
    ) -> None:
        self._model, self._train = copy.deepcopy(model), train
        self.run: Any = self._model if make is None else make(self._model)
        args, kwargs = _copied((tuple(args), dict(kwargs)))
        inputs = _tensors_in((args, kwargs))
        named = dict(self._model.named_parameters()) | {f"input {n}": t for n, t in inputs.items()}
        self._wanted = {name: t for name, t in named.items() if t.requires_grad and train}
        if train and not self._wanted:
            raise PlanError(
                f"Nothing in {type(model).__name__} requires grad, so there is no training step to "
                "measure. Pass train=False, or parameters that require grad."
            )
        # What is compiled for micro-batches splits the batch itself.
        self._parts = split_batch(args, kwargs, 1 if make else micro_batches)

    def step(self) -> tuple[Tensors, Tensors]:
        """Runs a forward, and in training a backward; returns outputs and gradients by name."""
        for tensor in self._wanted.values():
            tensor.grad = None
        with torch.set_grad_enabled(self._train):
            results = [self.run(*args, **kwargs) for args, kwargs in self._parts]
            if len(results) > 1:
                results = [torch.stack([*map(_loss_of, results)]).mean()]
        outputs = _tensors_in(results[0])
        if self._train and not isinstance(self.run, TrainingStep):
            torch.autograd.backward(*_objective(results[0], outputs))
        values = {name: tensor.detach() for name, tensor in outputs.items()}
        return values, {name: tensor.grad for name, tensor in self._wanted.items()}


def split_batch(
    args: Sequence[Any], kwargs: Mapping[str, Any], count: int
) -> list[tuple[Any, Any]]:
    """Returns the inputs of each micro-batch: tensors are split along dimension 0."""
    if count == 1:
        return [(args, kwargs)]
    leaves, tree = torch_pytree.flatten((tuple(args), dict(kwargs)))
    check_splits(leaves, count)
    split = [x.tensor_split(count) if isinstance(x, torch.Tensor) else [x] * count for x in leaves]
    return [torch_pytree.unflatten([part[i] for part in split], tree) for i in range(count)]


def _copied(inputs: Any) -> Any:
    leaves, tree = torch_pytree.flatten(inputs)
    copies = [
        x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x
        for x in leaves
    ]
    return torch_pytree.unflatten(copies, tree)


def _tensors_in(value: Any) -> dict[str, torch.Tensor]:
    leaves = torch_pytree.flatten_with_names(value)
    return {name: leaf for name, leaf in leaves if isinstance(leaf, torch.Tensor)}


def _loss_of(result: Any) -> Any:
    return result.get("loss") if isinstance(result, Mapping) else getattr(result, "loss", result)


def _objective(result: Any, outputs: Mapping[str, torch.Tensor]) -> tuple[Any, Any]:
    """Returns what is differentiated: the loss, or all outputs, each with its cotangent."""
    loss = _loss_of(result)
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        return loss, None
    ends = [tensor for tensor in outputs.values() if tensor.requires_grad]
    # Not all ones: the sum of a normalized output has no gradient.
    ramps = [torch.linspace(-1, 1, t.numel(), device=t.device) for t in ends]
    return ends, [ramp.view_as(t).to(t.dtype) for ramp, t in zip(ramps, ends, strict=True)]


@contextmanager
def generators_kept() -> Iterator[None]:
    """Puts the random generators back at the end."""
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(gpus):
        yield


def largest_error(actual: Tensors, expected: Tensors, *, relative: bool) -> tuple[float, str]:
    """Returns the largest difference from what is right, and the name of the tensor it is in.

    It is that of any two numbers; relative, the norm of the difference by that of what is right.
    """
    found = {name: _error(actual.get(name), expected[name], relative) for name in expected}
    worst = max(found, key=found.__getitem__, default="")
    return found.get(worst, 0.0), worst


def _error(a: torch.Tensor | None, b: torch.Tensor | None, relative: bool) -> float:
    given = b if a is None else a
    if given is None:
        return 0.0
    a, b = (torch.zeros_like(given) if t is None else t for t in (a, b))  # no gradient: zeros
    if a.shape != b.shape:
        return math.inf
    a, b = (t.detach().to(torch.complex128 if t.is_complex() else torch.float64) for t in (a, b))
    off = (a - b).masked_fill((a == b) | (a.isnan() & b.isnan()), 0.0)
    if relative:
        error = off.norm().item() / max(b.norm().item(), torch.finfo(torch.float32).tiny)
    else:
        error = off.abs().max().item() if off.numel() else 0.0
    return math.inf if math.isnan(error) else error
