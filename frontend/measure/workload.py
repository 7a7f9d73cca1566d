"""One step of a model under measurement: run it, compare it with eager.

A step is a forward, and in training the gradients of every parameter and input that wants one.
Gradients are taken with ``torch.autograd.grad``, so no ``.grad`` is touched and no hook that waits
for one runs. :func:`left_as_found` puts back what a step changes: buffers, inputs, generators.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...reuse import torch_pytree
from ...reuse.errors import PlanError


@dataclass(frozen=True)
class StepResult:
    """What one step computed.

    Attributes:
        outputs: the tensors in the model's result, by name.
        gradients: by parameter or input name; None where autograd found no way.
    """

    outputs: Mapping[str, torch.Tensor]
    gradients: Mapping[str, torch.Tensor | None]


@dataclass(frozen=True)
class Errors:
    """How far a step is from eager's.

    Attributes:
        max_abs_error: largest absolute difference of any output value; None if nothing was run.
        max_rel_grad_error: largest, over parameters and inputs, of the norm of a gradient's
            difference over the norm of eager's gradient; None without training.
        worst_gradient: the name it belongs to.
    """

    max_abs_error: float | None = None
    max_rel_grad_error: float | None = None
    worst_gradient: str = ""


@dataclass(frozen=True)
class Workload:
    """A model with the inputs of one step.

    With several ``micro_batches`` a training step runs the parts of the batch one after another;
    its result is the mean of their losses, and the gradients are those of the mean.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    train: bool
    micro_batches: int = 1

    def step(self, module: Callable[..., Any]) -> StepResult:
        """Runs one step through the model itself or through what it was compiled to."""
        if self.micro_batches == 1:
            return self._whole_step(module)
        return self._split_step() if module is self.model else self._planned_step(module)

    def _whole_step(self, module: Callable[..., Any]) -> StepResult:
        with torch.set_grad_enabled(self.train):
            result = module(*self.args, **self.kwargs)
            outputs = {
                name: leaf
                for name, leaf in torch_pytree.flatten_with_names(result)
                if isinstance(leaf, torch.Tensor)
            }
            gradients = self._gradients(result, outputs) if self.train else {}
        return StepResult({name: t.detach() for name, t in outputs.items()}, gradients)

    def _split_step(self) -> StepResult:
        """Runs the model's own forward and backward on each micro-batch; adds the gradients."""
        wanted = self._wanted_in_training()
        sums: list[torch.Tensor | None] = [None] * len(wanted)
        losses = []
        for args, kwargs in self.parts():
            with torch.enable_grad():
                loss = _scalar_loss(self.model(*args, **kwargs))
                found = torch.autograd.grad(
                    loss / self.micro_batches, list(wanted.values()), allow_unused=True
                )
            losses.append(loss.detach())
            sums = [_sum(a, b) for a, b in zip(sums, found, strict=True)]
        mean = torch.stack(losses).mean()
        return StepResult({"loss": mean}, dict(zip(wanted, sums, strict=True)))

    def _planned_step(self, step: Callable[..., torch.Tensor]) -> StepResult:
        """Runs a compiled step, which fills ``.grad``; puts back what was there.

        The gradients found are valid until the next step.
        """
        wanted = self._wanted_in_training()
        before = {name: tensor.grad for name, tensor in wanted.items()}
        try:
            for tensor in wanted.values():
                tensor.grad = None
            loss = step(*self.args, **self.kwargs)
            gradients = {name: tensor.grad for name, tensor in wanted.items()}
        finally:
            for name, tensor in wanted.items():
                tensor.grad = before[name]
        return StepResult({"loss": loss}, gradients)

    def parts(self) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        """Positional and keyword inputs of each micro-batch: tensors split along dimension 0."""
        leaves, tree = torch_pytree.flatten((self.args, dict(self.kwargs)))
        split = [self._split(leaf) for leaf in leaves]
        parts = range(self.micro_batches)
        return [torch_pytree.unflatten([part[i] for part in split], tree) for i in parts]

    def _split(self, leaf: Any) -> Sequence[Any]:
        count = self.micro_batches
        if not isinstance(leaf, torch.Tensor):
            return (leaf,) * count
        if leaf.dim() == 0 or leaf.shape[0] % count:
            raise PlanError(
                f"A batch tensor of shape {tuple(leaf.shape)} cannot be split into {count} equal "
                "micro-batches along dimension 0. Change micro_batches or the batch size."
            )
        return leaf.tensor_split(count)

    def wanted(self) -> dict[str, torch.Tensor]:
        """The parameters and inputs that want a gradient."""
        named: dict[str, torch.Tensor] = dict(self.model.named_parameters())
        named.update(
            (f"input {name}", leaf)
            for name, leaf in torch_pytree.flatten_with_names((self.args, dict(self.kwargs)))
            if isinstance(leaf, torch.Tensor)
        )
        return {name: tensor for name, tensor in named.items() if tensor.requires_grad}

    def devices(self) -> set[torch.device]:
        """Where the tensors of the model and the inputs are."""
        leaves, _ = torch_pytree.flatten((self.args, dict(self.kwargs)))
        tensors = [t for t in leaves if isinstance(t, torch.Tensor)]
        return {t.device for t in (*tensors, *self.model.parameters(), *self.model.buffers())}

    def _gradients(
        self, result: Any, outputs: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor | None]:
        ends, cotangents = _objective(result, outputs)
        wanted = self.wanted()
        if not ends or not wanted:
            raise self._nothing_to_train()
        found = torch.autograd.grad(ends, list(wanted.values()), cotangents, allow_unused=True)
        return dict(zip(wanted, found, strict=True))

    def _wanted_in_training(self) -> dict[str, torch.Tensor]:
        wanted = self.wanted()
        if not wanted:
            raise self._nothing_to_train()
        return wanted

    def _nothing_to_train(self) -> PlanError:
        return PlanError(
            f"Nothing in {type(self.model).__name__} requires grad, so there is no training "
            "step to measure. Pass train=False, or parameters that require grad."
        )


def _sum(a: torch.Tensor | None, b: torch.Tensor | None) -> torch.Tensor | None:
    return b if a is None else a if b is None else a + b


def _scalar_loss(result: Any) -> torch.Tensor:
    loss = result.get("loss") if isinstance(result, Mapping) else getattr(result, "loss", result)
    if not isinstance(loss, torch.Tensor) or loss.dim() or not loss.requires_grad:
        raise PlanError(
            "Micro-batches are measured on a scalar loss that requires grad. Let the model return "
            f"it, or an output with .loss; it returns {type(result).__name__}."
        )
    return loss


def _objective(
    result: Any, outputs: Mapping[str, torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor] | None]:
    """What is differentiated: the loss, or every output, each with a fixed cotangent."""
    loss = result if isinstance(result, torch.Tensor) else getattr(result, "loss", None)
    if isinstance(loss, torch.Tensor) and loss.numel() == 1 and loss.requires_grad:
        return [loss], None
    ends = [tensor for tensor in outputs.values() if tensor.requires_grad]
    return ends, [_cotangent(tensor) for tensor in ends]


def _cotangent(tensor: torch.Tensor) -> torch.Tensor:
    # Not all ones: the sum of a normalized output has no gradient.
    ramp = torch.linspace(-1.0, 1.0, tensor.numel(), device=tensor.device)
    return ramp.reshape(tensor.shape).to(tensor.dtype)


# ---- leaving everything as it was ------------------------------------------------------------


@contextmanager
def left_as_found(workload: Workload) -> Iterator[Callable[[], None]]:
    """Puts buffers, inputs and generators back at the end; yields a function that does so now."""
    restore_tensors = _tensor_snapshot(workload)
    with generators_left_as_found() as restore_generators:

        def restore() -> None:
            restore_tensors()
            restore_generators()

        try:
            yield restore
        finally:
            restore_tensors()


@contextmanager
def generators_left_as_found() -> Iterator[Callable[[], None]]:
    """Puts random generators back at the end; yields a function that does so now."""
    on_cpu = torch.get_rng_state()
    on_cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []

    def restore() -> None:
        torch.set_rng_state(on_cpu)
        if on_cuda:
            torch.cuda.set_rng_state_all(on_cuda)

    try:
        yield restore
    finally:
        restore()


def _tensor_snapshot(workload: Workload) -> Callable[[], None]:
    buffers = [
        (module._buffers, name, tensor)
        for module in workload.model.modules()
        for name, tensor in module._buffers.items()
    ]
    leaves, _ = torch_pytree.flatten((workload.args, dict(workload.kwargs)))
    tensors = [t for t in (*leaves, *(b for _, _, b in buffers)) if isinstance(t, torch.Tensor)]
    copies = [(t, t.detach().clone()) for t in tensors]

    def restore() -> None:
        for table, name, tensor in buffers:
            table[name] = tensor
        with torch.no_grad():
            for tensor, copy in copies:
                if not torch.equal(tensor, copy):
                    tensor.copy_(copy)

    return restore


# ---- comparing -------------------------------------------------------------------------------


def compare(actual: StepResult, expected: StepResult) -> Errors:
    """Says how far a step is from the one that is right."""
    outputs = [
        _max_difference(actual.outputs.get(name), tensor)
        for name, tensor in expected.outputs.items()
    ]
    gradients = {
        name: _relative_difference(actual.gradients[name], tensor)
        for name, tensor in expected.gradients.items()
    }
    worst = max(gradients, key=lambda name: gradients[name], default="")
    return Errors(max(outputs, default=0.0), gradients.get(worst), worst)


def _max_difference(actual: torch.Tensor | None, expected: torch.Tensor) -> float:
    """Largest absolute difference; infinite where shapes differ or only one is a number."""
    if actual is None or actual.shape != expected.shape:
        return math.inf
    actual, expected = _widened(actual), _widened(expected)
    same = (actual == expected) | (actual.isnan() & expected.isnan())
    difference = (actual - expected).abs().masked_fill(same, 0.0)
    largest = difference.max().item() if difference.numel() else 0.0
    return math.inf if math.isnan(largest) else float(largest)


def _relative_difference(actual: torch.Tensor | None, expected: torch.Tensor | None) -> float:
    """Norm of the difference over the norm of what is expected; no gradient counts as zero."""
    if actual is None or expected is None:
        given = actual if expected is None else expected
        if given is None:
            return 0.0
        zero = torch.zeros_like(given)
        actual, expected = (zero, given) if actual is None else (given, zero)
    if actual.shape != expected.shape:
        return math.inf
    actual, expected = _widened(actual), _widened(expected)
    if torch.equal(actual, expected):
        return 0.0
    scale = max(torch.linalg.vector_norm(expected).item(), torch.finfo(torch.float32).tiny)
    difference = torch.linalg.vector_norm(actual - expected).item() / scale
    return math.inf if math.isnan(difference) else float(difference)


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
