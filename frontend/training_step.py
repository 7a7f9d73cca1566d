"""``compile_step(model)``: forward and backward of all micro-batches as one planned program."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..autodiff.micro_batches import ORDERS
from ..backend.planned import Lease
from ..recompute.policy import Policy
from ..reuse import pytree
from ..reuse.errors import PlanError
from ..reuse.leaf import without_autocast
from .autograd_bridge import picker
from .compiler import Batching, CompiledStep, Compiler, Options
from .guard import Guard
from .handed_gradients import HandedGradients
from .report import CompileReport
from .runnable import check_runnable
from .torch_modes import mode_around

LossFunction = Callable[[Any], torch.Tensor]


def compile_step(
    model: nn.Module,
    *,
    micro_batches: int = 1,
    loss_fn: LossFunction | None = None,
    recompute: Policy = None,
    reuse: str = "marked",
    backend: str = "inductor",
    order: str = "forward_first",
) -> TrainingStep:
    """Returns a function that runs one training step and fills ``.grad``.

    The step owns its whole plan: activations, gradients and scratch lie in one arena, and a step
    is a flat replay of kernels. ``.grad`` of every parameter that gets one is set to the gradient
    of the mean loss (not added to what was there) and stays valid until the next step.

    Args:
        model: returns a scalar loss, or an output with ``.loss``.
        micro_batches: each tensor argument is split along dimension 0 into so many parts.
        loss_fn: computes the scalar loss from the model's output.
        recompute: None, ``"full"``, ``"selective"`` or a :class:`Budget`; see :func:`compile`.
        reuse: ``"marked"`` compiles each different marked block once; ``"auto"`` needs no mark and
            finds what repeats; ``"off"`` inlines early.
        backend: ``"inductor"`` or ``"eager"``.
        order: ``"forward_first"`` runs all forwards and then all backwards; ``"one_by_one"`` runs
            each micro-batch's backward right after its forward, which keeps fewer bytes.

    Raises:
        ReuseError, PlanError: for options that do not exist.

    Example:
        >>> step = lazyinline.compile_step(model, micro_batches=4)
        >>> loss = step(ids, targets)
        >>> optimizer.step()
    """
    if micro_batches < 1:
        raise PlanError(f"micro_batches={micro_batches}: there must be at least one.")
    if order not in ORDERS:
        raise PlanError(f"order={order!r} is unknown; there are {ORDERS}.")
    options = Options(reuse=reuse, backend=backend, recompute=recompute, cache="disk")
    return TrainingStep(model, loss_fn, options, Batching(micro_batches, order))


@dataclass(frozen=True)
class StepStats:
    """What a compiled step holds.

    Attributes:
        kernels: launches per step.
        peak_bytes: size of the arena.
        lower_bound_bytes: largest sum of live bytes, which no plan can go below.
        saved_bytes: what one micro-batch's forward keeps for its backward.
        allocations_per_step: results that launches allocate themselves, outside the plan.
        unplaced_launches: the names of those launches, each once.
        outside_bytes: most bytes at one time in those results, in scratch that launches allocate
            and in the losses; a recompute budget counts them too.
    """

    kernels: int
    peak_bytes: int
    lower_bound_bytes: int
    saved_bytes: int
    allocations_per_step: int
    unplaced_launches: tuple[str, ...]
    outside_bytes: int = 0


class TrainingStep:
    """Runs one training step. Made by :func:`compile_step`."""

    def __init__(
        self, model: nn.Module, loss_fn: LossFunction | None, options: Options, batching: Batching
    ) -> None:
        self._model = model
        self._loss_model = LossModel(model, loss_fn)
        self._compiler = Compiler(options)
        self._batching = batching
        self._entries: list[_StepEntry] = []
        self._lock = threading.Lock()
        self._report: CompileReport | None = None

    @property
    def last_report(self) -> CompileReport:
        """What the newest compile did."""
        if self._report is None:
            raise PlanError("Nothing has been compiled yet: run a step once.")
        return self._report

    @property
    def stats(self) -> StepStats:
        """What the step used last holds."""
        if not self._entries:
            raise PlanError("Nothing has been compiled yet: run a step once.")
        return self._entries[0].stats()

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Runs a step; returns the mean loss of the micro-batches.

        Raises:
            PlanError: if the batch cannot be split, another thread is in the step, or a mode that
                sees every operator is active.
        """
        if mode := mode_around():
            raise PlanError(
                f"{mode} is active, and a compiled step runs its kernels past it. Call the model "
                "itself inside, or the step outside."
            )
        if not self._lock.acquire(blocking=False):
            raise PlanError("This step is already running in another thread; it owns one arena.")
        try:
            leaves, tree = pytree.flatten_call(args, kwargs)
            for position, entry in enumerate(self._entries):
                if entry.guard.accepts(leaves, tree):
                    if position:
                        self._entries.insert(0, self._entries.pop(position))
                    return entry.run(leaves)
            return self._compile(leaves, tree).run(leaves)
        finally:
            self._lock.release()

    def _compile(self, leaves: list[Any], tree: pytree.TreeSpec) -> _StepEntry:
        check_runnable(self._model)
        parts = [self._split(leaf) for leaf in leaves]
        first = [part[0] if isinstance(part, tuple) else part for part in parts]
        args, kwargs = pytree.unflatten(first, tree)
        compiled, self._report = self._compiler.compile_step(
            self._loss_model, args, kwargs, self._batching
        )
        self._entries.insert(0, _StepEntry(self._loss_model, compiled, leaves, parts, tree))
        return self._entries[0]

    def _split(self, leaf: Any) -> Any:
        count = self._batching.micro_batches
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if leaf.requires_grad:
            raise PlanError("compile_step takes inputs that do not require grad.")
        if count > 1 and (leaf.dim() == 0 or leaf.shape[0] % count):
            raise PlanError(
                f"A batch tensor of shape {tuple(leaf.shape)} cannot be split into {count} equal "
                "micro-batches along dimension 0. Change micro_batches or the batch size."
            )
        return (
            torch.empty_like(leaf).tensor_split(count) if count > 1 else (torch.empty_like(leaf),)
        )


class _StepEntry:
    """One compiled step: bound to its own copy of the batch, to the model, and to an arena."""

    def __init__(
        self,
        model: nn.Module,
        compiled: CompiledStep,
        leaves: Sequence[Any],
        parts: Sequence[Any],
        tree: pytree.TreeSpec,
    ) -> None:
        self.guard = Guard(model, compiled.captured, leaves, tree, compiled.planned.same_words)
        self._compiled = compiled
        tensors = [(i, p) for i, p in enumerate(parts) if isinstance(p, tuple)]
        self._staging = [(i, _Staging(_whole(p, leaves[i]), leaves[i])) for i, p in tensors]
        self._batch = [
            tensors[user][1][number].detach()
            for number, users in enumerate(compiled.step.batch)
            for user in users
        ]
        count = len(compiled.step.batch)
        self._loss_bytes = Batching(count).loss_bytes
        # No mode of the caller's changes what is copied beside native launches.
        self._is_native = compiled.planned.is_native
        self._lease: Lease | None = None
        self._token: object = None
        self._handed: HandedGradients | None = None
        self._trained_of = picker(compiled.step.gradients)
        seed_type = compiled.step.program.inputs[-1].type
        self._seed = torch.full((), 1.0 / count, dtype=seed_type.dtype)  # type: ignore[union-attr]

    def run(self, leaves: Sequence[Any]) -> torch.Tensor:
        """Copies the batch in, replays the program, hands out the gradients."""
        return self._run(leaves) if self._is_native else self._run_without_modes(leaves)

    @without_autocast
    def _run_without_modes(self, leaves: Sequence[Any]) -> torch.Tensor:
        with torch.no_grad():
            return self._run(leaves)

    def _run(self, leaves: Sequence[Any]) -> torch.Tensor:
        step = self._compiled.step
        for index, staging in self._staging:
            staging.take(leaves[index])
        model = self.guard.tensors
        outputs = self._arena_for(model).runners[0]([])
        count = len(step.batch)
        loss = torch.stack(outputs[:count]).mean() if count > 1 else self._loss_for_user(outputs[0])
        end = count + len(step.gradients)
        if self._handed is None:
            self._handed = self._gradients_for_user(outputs[count:end])
        self._handed.hand_out()
        for index, state in zip(step.writes, outputs[end:], strict=True):
            model[index].copy_(state)
        return loss

    def _loss_for_user(self, output: torch.Tensor) -> torch.Tensor:
        """Returns a copy, which no later step changes."""
        if not self._is_native:
            return output.clone()
        loss = torch.empty_like(output)
        ctypes.memmove(loss.data_ptr(), output.data_ptr(), output.element_size())
        return loss

    def _arena_for(self, model: list[torch.Tensor]) -> Lease:
        """Keeps one lease, for as long as the model's tensors and the arena stay where they are."""
        token = self.guard.token()
        if self._handed is not None and not self._handed.lie_there_still():
            self._handed = None
            if self._lease is not None and not self._lease.has_its_arena():
                self._lease = None
        if self._lease is not None and token is not None and token is self._token:
            return self._lease
        if token is not None or not self._are_handed_to(self._trained_of(model)):
            self._handed = None
        tensors = [*self._batch, *model, self._seed]
        if self._lease is None or not self._lease.is_bound_to(tensors):
            self._handed = self._lease = None  # released before another one is made
            self._lease = self._compiled.planned.lease(tensors)
        self._token = token
        return self._lease

    def _are_handed_to(self, trained: Sequence[torch.Tensor]) -> bool:
        return self._handed is not None and self._handed.belong_to(trained)

    def _gradients_for_user(self, gradients: Sequence[torch.Tensor]) -> HandedGradients:
        """What holds for as long as the lease and the model's tensors do."""
        is_watched = self._token is not None
        same_words = self._compiled.planned.same_words if is_watched else None
        return HandedGradients(self._trained_of(self.guard.tensors), gradients, same_words)

    def stats(self) -> StepStats:
        """Numbers of the plan."""
        planned = self._compiled.planned
        forward = self._compiled.step.program.calls[0].closure
        foreign = planned.foreign_launches()
        return StepStats(
            planned.num_launches,
            planned.plan.peak_bytes,
            planned.plan.lower_bound_bytes,
            forward.output_types[-1].num_bytes,
            planned.num_made_per_run,
            tuple(dict.fromkeys(foreign)),
            planned.outside_bytes + self._loss_bytes,
        )


class _Staging:
    """Our copy of one tensor of the batch.

    Args:
        tensor: the copy.
        like: what every tensor taken is laid out like.
    """

    def __init__(self, tensor: torch.Tensor, like: torch.Tensor) -> None:
        self._tensor, self._address = tensor, tensor.data_ptr()
        self._num_bytes = tensor.numel() * tensor.element_size()
        same = tensor.stride() == like.stride() and tensor.device == like.device
        self._is_plain = same and type(like) is torch.Tensor and like.device.type == "cpu"

    def take(self, tensor: torch.Tensor) -> None:
        """Copies a tensor in: its memory where that holds its numbers, past the dispatcher."""
        if self._is_plain and not tensor.is_neg() and not tensor.is_conj():
            ctypes.memmove(self._address, tensor.data_ptr(), self._num_bytes)
        else:
            self._tensor.copy_(tensor)


def _whole(parts: tuple[torch.Tensor, ...], like: torch.Tensor) -> torch.Tensor:
    """Returns the tensor whose parts these are."""
    base = parts[0]
    return base if len(parts) == 1 else torch.as_strided(base, like.shape, base.stride())


class LossModel(nn.Module):
    """A model and its loss as one module with the model's own parameter names."""

    def __init__(self, model: nn.Module, loss_fn: LossFunction | None) -> None:
        super().__init__()
        for table in ("_parameters", "_buffers"):
            self.__dict__[table] = {}
        self.model = model
        self.__dict__["_loss_fn"] = loss_fn

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Returns the scalar loss."""
        output = self.model(*args, **kwargs)
        loss_fn = self.__dict__["_loss_fn"]
        loss = loss_fn(output) if loss_fn is not None else _loss_of(output)
        if not isinstance(loss, torch.Tensor) or loss.dim():
            shape = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise PlanError(
                f"The loss must be a scalar tensor, not {shape}. Pass loss_fn=, which computes it "
                "from the model's output."
            )
        return loss


def _loss_of(output: Any) -> Any:
    if isinstance(output, torch.Tensor):
        return output
    if isinstance(output, Mapping) and "loss" in output:
        return output["loss"]
    return getattr(output, "loss", output)
