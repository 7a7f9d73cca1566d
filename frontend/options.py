"""The options of a compile, checked; batches and their micro-batches; a model with its loss."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..autodiff.training_program import Order, Sums
from ..backend.kernels.lower import BackendName, backend_named
from ..recompute.planner import POLICIES, Policy, check_policy
from ..reuse import torch_pytree
from ..reuse.errors import LazyInlineError, PipelineError, PlanError, ReuseError, check_choice
from ..reuse.torch_names import is_lazy
from .capture.blocks import Reuse
from .refusals import refuse_containers
from .tracing.torch_state import why_no_memory, why_watched

Boundaries = Literal["kept", "fused"]
Fallback = Literal["eager", "error"]


@dataclass(frozen=True)
class Options:
    """The options of one compiled module, checked."""

    reuse: Reuse = "auto"
    backend: BackendName = "inductor"
    recompute: Policy = None
    cache: Literal["off", "disk"] = "off"
    """``"disk"`` uses results of earlier processes; measurements use ``"off"``."""

    fallback: Fallback = "eager"
    """``"eager"`` runs modules that cannot be captured eagerly, between compiled ones."""

    target: str | None = None
    """A GPU to compile for, which need not be here; None for the model's device."""

    boundaries: Boundaries = "kept"
    """``"fused"`` lets kernels fuse from the end of a block into the start of the next."""

    def __post_init__(self) -> None:
        check_choice(PlanError, Fallback, fallback=self.fallback)
        check_choice(PlanError, Boundaries, boundaries=self.boundaries)
        check_policy(self.recompute)
        check_choice(ReuseError, Reuse, reuse=self.reuse)
        backend_named(self.backend, self.target)
        if self.recompute in POLICIES and self.boundaries == "fused":
            raise PlanError(
                f"recompute={self.recompute!r} is decided for each block, and boundaries='fused' "
                "leaves none whole: leave boundaries as they are, or use a Budget."
            )
        if self.recompute in POLICIES and self.reuse == "off":
            raise PlanError(
                f"recompute={self.recompute!r} is decided for each block, and reuse='off' leaves "
                "none: leave reuse as it is, or use a Budget."
            )


@dataclass(frozen=True)
class Batching:
    """How a step's batch is split, and in which order the parts run."""

    micro_batches: int = 1
    order: Order = "forward_first"
    sums: Sums = "as_gradients"

    def __post_init__(self) -> None:
        check_count(self.micro_batches)
        check_choice(PlanError, Order, order=self.order)
        check_choice(PlanError, Sums, sums=self.sums)

    @property
    def loss_bytes(self) -> int:
        """Most bytes that a step allocates for the losses: one per part, and their mean."""
        return 8 * (self.micro_batches + 1)


class Batch:
    """Splits batches that have the structure of an example batch."""

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
        if is_lazy(leaf):  # the memory of a copy holds the values
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
    """Raises an error for a number of micro-batches less than 1."""
    if micro_batches < 1:
        raise error(f"micro_batches={micro_batches}: there must be at least one.")


def split(leaf: Any, count: int, error: type[LazyInlineError] = PlanError) -> Sequence[Any]:
    """Returns the equal parts of a tensor, or ``count`` times anything else in a batch."""
    if count == 1 or not isinstance(leaf, Tensor):
        return [leaf] * count
    if leaf.dim() == 0 or leaf.shape[0] % count or not leaf.shape[0]:
        raise error(
            f"A batch tensor of shape {tuple(leaf.shape)} cannot be split into {count} equal "
            "micro-batches along dimension 0. Change micro_batches or the batch size."
        )
    return leaf.tensor_split(count)


LossFunction = Callable[[Any], torch.Tensor]  # computes the loss from a model's output


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
        # Not by ``__setattr__``, which would register a loss module as a sub-module.
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
    """Raises PlanError if the loss function cannot be called with the model's output alone."""
    if loss_fn is None:
        return
    called = loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn
    try:
        signature = inspect.signature(called)
    except (TypeError, ValueError):  # a C function without a signature: the call will show
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
    """Returns the loss in a model's output: the output itself, or its ``.loss``."""
    if isinstance(output, torch.Tensor):
        return output
    if isinstance(output, Mapping) and "loss" in output:
        return output["loss"]
    return getattr(output, "loss", output)
