"""A copy of a model with the inputs of one step, and how far the results of two steps are apart."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ...reuse import torch_pytree
from ...reuse.errors import PlanError
from ..compiled_module import CompiledModule
from ..onnx.check import copied
from ..options import Batching, Options
from ..training_step import TrainingStep, check_splits, loss_of
from .report import Errors, Step


class Workload:
    """Holds a copy of a model and of its inputs: a step leaves the user's own as they are.

    Args:
        model: the model.
        args: positional inputs of a step.
        kwargs: keyword inputs of a step.
        train: whether a step has gradients.
        micro_batches: parts of the batch that are run one after another, for their mean loss.
        options: how the copy is compiled, in its first step; None runs the copy eagerly.
    """

    def __init__(
        self,
        model: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        train: bool,
        micro_batches: int = 1,
        options: Options | None = None,
    ) -> None:
        model, self._train = copy.deepcopy(model), train
        self.run: Any = model
        if options is not None and micro_batches > 1:
            self.run = TrainingStep(model, None, options, Batching(micro_batches))
            micro_batches = 1  # it splits the batch itself
        elif options is not None:
            self.run = CompiledModule(model, options)
        args, kwargs = copied((tuple(args), dict(kwargs)))
        inputs = _tensors_in((args, kwargs))
        named = dict(model.named_parameters()) | {f"input {n}": t for n, t in inputs.items()}
        self._wanted = {name: t for name, t in named.items() if t.requires_grad and train}
        if train and not self._wanted:
            raise PlanError(
                f"Nothing in {type(model).__name__} requires grad, so there is no training step to "
                "measure. Pass train=False, or parameters that require grad."
            )
        self._parts = split_batch(args, kwargs, micro_batches)

    def step(self) -> Step:
        """Runs a forward, and in training a backward; returns outputs and gradients by name."""
        for tensor in self._wanted.values():
            tensor.grad = None
        with torch.set_grad_enabled(self._train):
            results = [self.run(*args, **kwargs) for args, kwargs in self._parts]
            if len(results) > 1:
                results = [torch.stack([*map(loss_of, results)]).mean()]
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


def _tensors_in(value: Any) -> dict[str, torch.Tensor]:
    leaves = torch_pytree.flatten_with_names(value)
    return {name: leaf for name, leaf in leaves if isinstance(leaf, torch.Tensor)}


def _objective(result: Any, outputs: Mapping[str, torch.Tensor]) -> tuple[Any, Any]:
    """Returns what is differentiated: the loss, or all outputs, each with its cotangent."""
    loss = loss_of(result)
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


def errors(actual: Step, expected: Step) -> Errors:
    """Returns how far a step is from what is right: the largest of outputs and of gradients."""
    outputs, gradients = (
        {name: difference(found.get(name), b, relative=relative) for name, b in right.items()}
        for found, right, relative in zip(actual, expected, (False, True), strict=True)
    )
    output = max(outputs.values(), default=0.0)
    if not gradients:
        return Errors(output)
    worst = max(gradients, key=gradients.__getitem__)
    return Errors(output, gradients[worst], worst)


def difference(a: torch.Tensor | None, b: torch.Tensor | None, *, relative: bool) -> float:
    """Returns the largest difference of two numbers; or its norm, relative to that of ``b``."""
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
