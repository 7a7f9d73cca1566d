"""``compile_step(model)``: forward and backward of all micro-batches as one planned program."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..autodiff.training_program import NotUpdatedError, Order, Sums
from ..backend.kernels.lower import BackendName
from ..backend.launches.torch_native import Move, address_in
from ..backend.run.leases import Lease
from ..recompute.planner import Policy
from ..reuse import torch_pytree
from ..reuse.errors import INVALID, OURS, CaptureError, PlanError, ended_here, without_torchs
from ..reuse.evidence.module_state import walk_modules
from ..reuse.evidence.root_evidence import Check
from ..reuse.ir.leaf import without_autocast
from ..reuse.ir.program import ModelTensor
from ..reuse.process import ProcessLock
from ..reuse.torch_names import new_cpu_tensor
from . import refusals
from .autograd.bridge import picker
from .autograd.torch_engine import HandedGradients
from .capture.blocks import Reuse
from .compiled import CompiledStep
from .dispatch.dispatcher import Dispatcher
from .dispatch.torch_slot import check_asks_slot, slot_filled
from .effects.effects import EffectError
from .guard import Inputs
from .options import Batching, Boundaries, LossFunction, LossModel, Options, split
from .passes.state import step_goal
from .sizes.shapes import CompileResult
from .torch_optimizer import StepOptimizer, step_optimizer
from .tracing.torch_state import autograd_mode_around, mode_around, refuse_mode


@without_torchs
def compile_step(
    model: nn.Module,
    *,
    micro_batches: int = 1,
    loss_fn: LossFunction | None = None,
    recompute: Policy = None,
    reuse: Reuse = "auto",
    backend: BackendName = "inductor",
    order: Order = "forward_first",
    sums: Sums = "as_gradients",
    dynamic: bool | None = None,
    target: str | None = None,
    boundaries: Boundaries = "kept",
    optimizer: torch.optim.Optimizer | None = None,
    max_norm: float | None = None,
    scaler: torch.amp.GradScaler | None = None,
) -> TrainingStep:
    """Returns a function that runs one training step and fills ``.grad``.

    The step owns its whole plan: activations, gradients and scratch lie in one arena, and a step
    runs kernel after kernel. ``.grad`` of every parameter that gets one is set to the gradient
    of the mean loss (without adding to earlier values) and stays valid until the next step. Its
    storage covers only the gradient's bytes in the arena, so saving it saves no more; it cannot be
    resized. A ``.grad`` that an earlier step set and this one does not is set to None.

    A step does not keep what the forward writes to given dictionaries and to attributes of modules;
    the report says so.

    A step is one backward of the mean loss: hooks on parameters run once per step, whatever the
    number of micro-batches, after all kernels, from the last parameter used to the first.

    Args:
        model: returns a scalar loss, or an output with ``.loss``; or ``DistributedDataParallel``
            around one, which then sees a step as one forward and one backward, and reduces its
            gradients once, whatever the number of micro-batches.
        micro_batches: each tensor argument is split along dimension 0 into so many parts.
        loss_fn: computes the scalar loss from the model's output.
        recompute: None, ``"full"``, ``"selective"`` or a :class:`Budget`; see :func:`compile`.
        reuse: ``"auto"`` compiles each different block once, both marked and repeated ones;
            ``"marked"`` only marked ones; ``"off"`` inlines early.
        backend: ``"inductor"`` or ``"eager"``.
        order: ``"forward_first"`` runs all forwards and then all backwards; ``"one_by_one"`` runs
            each micro-batch's backward right after its forward, which keeps fewer bytes.
        sums: ``"float32"`` adds gradients of micro-batches up in float32 where they are in half
            precision, and rounds the sums once; ``.grad`` has the parameter's dtype all the same.
        dynamic: sizes that are symbols, see :func:`compile`: by default those of batches that came
            in several sizes.
        target: ``"cuda:sm_90"`` and the like compile for a GPU that need not be here: the report
            has the plan, and the step itself raises PlanError.
        boundaries: ``"fused"`` lets kernels fuse across blocks, see :func:`compile`.
        optimizer: updates the parameters in each step. SGD, Adam and AdamW do so inside the
            program, by PyTorch's fused kernels: each parameter as soon as its gradient is complete,
            whose memory is free from then on, so that ``.grad`` is None afterwards. What cannot be
            there (hooks, other optimizers) is called after the program, as ``optimizer.step()``,
            and the report says why. Learning rates are read at each step.
        max_norm: gradients are clipped to this norm first, all together.
        scaler: scales the loss of a model in half precision.

    Raises:
        ReuseError, PlanError: for options that do not exist.

    Example:
        >>> step = lazyinline.compile_step(model, optimizer=torch.optim.AdamW(model.parameters()))
        >>> for batch in batches:
        ...     loss = step(*batch)
    """
    batching = Batching(micro_batches, order, sums)
    if target is not None:  # there is nothing to link again
        dynamic = False
    options = Options(reuse, backend, recompute, "disk", target=target, boundaries=boundaries)
    update = step_optimizer(optimizer, max_norm, scaler, target)
    return TrainingStep(model, loss_fn, options, batching, dynamic, update)


@dataclass(frozen=True)
class StepStats:
    """The launches and the memory of a compiled step.

    Attributes:
        kernels: launches per step.
        peak_bytes: the size of the arena.
        lower_bound_bytes: the largest sum of live bytes; no plan can need less.
        saved_bytes: the bytes that one micro-batch's forward saves for its backward.
        allocations_per_step: the number of results that launches allocate outside the plan.
        unplaced_launches: the names of these launches.
        outside_bytes: the most bytes at one time in these results, scratch that launches allocate,
            cuBLAS workspace and losses. A recompute budget counts them too. (Neither counts memory
            that oneDNN allocates inside a product, which depends on the CPU.)
        why_no_graph: why a step on a GPU is not one CUDA graph; empty if it is, and on CPU.
    """

    kernels: int
    peak_bytes: int
    lower_bound_bytes: int
    saved_bytes: int
    allocations_per_step: int
    unplaced_launches: tuple[str, ...]
    outside_bytes: int = 0
    why_no_graph: str = ""


class TrainingStep(Dispatcher["_StepEntry"]):
    """Runs one training step. Made by :func:`compile_step`."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction | None,
        options: Options,
        batching: Batching,
        dynamic: bool | None = None,
        optimizer: StepOptimizer | None = None,
    ) -> None:
        self.made_of: tuple[Any, ...] = (model, loss_fn, options, batching, dynamic, optimizer)
        self._optimizer = optimizer
        inside = refusals.model_inside(model)
        if inside is not None:
            check_asks_slot(inside)
        self._wrapper = None if inside is None else model
        self._model = model if inside is None else inside
        super().__init__(LossModel(self._model, loss_fn), options, dynamic)
        self._given: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._batching = batching
        self._lock = ProcessLock(threading.Lock)

    @property
    def model(self) -> nn.Module:
        """The model that it trains."""
        return self._model

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer, if it has one."""
        return None if self._optimizer is None else self._optimizer.optimizer

    @property
    def stats(self) -> StepStats | None:
        """The launches and memory of the program used last; None before the first step."""
        first = self.entries.first
        return first.stats() if first else None

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Runs a step; returns the mean loss of the micro-batches.

        Raises:
            PlanError: if the batch cannot be split, another thread is in the step, or a mode that
                sees every operator or its backward is active.
        """
        refuse_mode(mode_around() or autograd_mode_around())
        try:
            if self._wrapper is None:
                return self._run(args, kwargs, _StepEntry.run)
            return self._run_in(self._wrapper, args, kwargs)
        except OURS as error:
            raise ended_here(error) from error.__cause__
        except RuntimeError as error:
            if not str(error).endswith(INVALID):
                raise
            raise ValueError(str(error)) from None

    def _run_in(
        self, wrapper: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> torch.Tensor:
        """Runs a step as one forward and one backward of a wrapper around the model.

        It sets all gradients, including those that the wrapper gives to unused parameters.
        """

        def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
            return self._run(args, kwargs, _StepEntry.run_to_graph)

        # Autograd would add to an existing gradient, but a step sets gradients.
        for parameter, gradient in self._given:
            if parameter.grad is gradient:
                parameter.grad = None
        with torch.inference_mode(False), torch.enable_grad(), slot_filled(self._model, forward):
            loss: torch.Tensor = wrapper(*args, **kwargs)
            if loss.requires_grad:
                loss.backward()
        self._given = [(p, p.grad) for p in wrapper.parameters() if p.grad is not None]
        if self._optimizer is not None:
            self._optimizer.update()
        return loss.detach()

    def _run(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        run: Callable[[_StepEntry, Sequence[Any]], torch.Tensor],
    ) -> torch.Tensor:
        # Two steps at once would set the same gradients: an error of the caller, so do not wait.
        if not self._lock.acquire(blocking=False):
            raise PlanError("This step is already running in another thread; it owns one arena.")
        try:
            leaves, tree, _ = torch_pytree.flatten_call(args, kwargs)
            if self._optimizer is not None and not self._optimizer.is_as_compiled():
                self._forget()
            first = self.entries.first
            handed = first.handed if first is not None else None
            entry = self.entries.fitting(leaves, tree)
            may_link = entry is None and self._shapes.has_symbols
            # A symbolic program's guard checks all but sizes, so no other check is needed.
            if may_link and not refusals.watching_input(self._model, leaves):
                entry = self._linked_for(self._inputs(leaves, tree))
            # Parameters may have been replaced, or come to share memory, since the last step.
            if entry is not None and entry.why_no_update(first):
                self._forget()
                entry = None
            entry = entry or self._compile(leaves, tree)
            if first is not None and first is not entry:
                entry.follow(first, handed)
            loss = run(entry, leaves)
            if self._optimizer is not None and not (entry.is_updating or self._wrapper):
                self._optimizer.update()
            return loss
        finally:
            self._lock.release()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies the options only: a copy compiles at its first call."""
        return TrainingStep, self.made_of

    def _inputs(self, leaves: list[Any], tree: torch_pytree.TreeSpec) -> Inputs:
        """Returns the inputs: a copy of the first micro-batch, and the batch as given."""
        count = self._batching.micro_batches
        distinct = {id(leaf): split(_copied(leaf), count)[0] for leaf in leaves}
        first = [distinct[id(leaf)] for leaf in leaves]  # a tensor passed twice stays one tensor
        return Inputs.of(first, tree, given=leaves)

    def _compile(self, leaves: list[Any], tree: torch_pytree.TreeSpec) -> _StepEntry:
        refusals.refuse_wrappers(walk_modules(self._model))
        if watching := refusals.watching_tensor(self._model, leaves):
            raise PlanError(
                f"A step cannot be compiled: {watching}, and kernels bypass it. Use "
                "plain tensors, or call the model itself."
            )
        refusals.refuse_containers(tree, "compile_step")
        refusals.check_runnable(self._model, self._compiler.options.target)
        try:
            return self._compile_with_update(self._inputs(leaves, tree))
        except EffectError as effect:
            raise CaptureError(
                f"{effect} A step is one program: do that outside of the model, or use "
                "lazyinline.compile, which lets such a model run eagerly."
            ) from effect

    def _compile_with_update(self, inputs: Inputs) -> _StepEntry:
        """Compiles with the optimizer's update in the program, or without it if it cannot be."""
        if self._optimizer is None:
            return self._compile_for(inputs, step_goal(self._batching))
        own = [*self._model.parameters(), *self._model.buffers()]
        why = "the model is in a wrapper, which reduces gradients" if self._wrapper else ""
        why = why or self._optimizer.hindrance([], own)
        try:
            goal = step_goal(self._batching, self._optimizer.groups(why))
            entry = self._compile_for(inputs, goal)
            # Only now is it known which parameters the program updates.
            if why := entry.why_no_update():
                self._forget()
                raise NotUpdatedError(why)
        except NotUpdatedError as error:
            self._optimizer.groups(str(error))
            entry = self._compile_for(inputs, step_goal(self._batching))
        return entry

    def _entry(self, made: CompileResult, leaves: Sequence[Any]) -> _StepEntry:
        if self._optimizer is not None:
            made.report.update_after = self._optimizer.why_after
        return _StepEntry(made, self._optimizer)


class _StepEntry:
    """One compiled step, bound to its own copy of the batch, the model's tensors, and an arena."""

    def __init__(self, made: CompileResult, optimizer: StepOptimizer | None = None) -> None:
        compiled = made.compiled
        assert isinstance(compiled, CompiledStep)
        self._optimizer = optimizer
        self._updates = compiled.step.updates
        self.is_updating = bool(self._updates.parameters)  # inside the program
        self._has_its_state: Check | None = None  # of the optimizer
        runner = compiled.runner
        native = runner.native
        # With a native ``move``, no operator runs that the caller's modes could affect.
        self._move = native.move if native and runner.is_native else None
        self.guard, self.can_be_linked_again = made.guard, made.is_linked
        self.compiled = self._compiled = compiled
        self._staging: list[tuple[int, _Staging]] = []
        self._batch: list[torch.Tensor] = []
        count = len(compiled.step.batch)
        self._num_losses = count
        self._num_writes = len(compiled.step.writes)
        self._loss_bytes = Batching(count).loss_bytes
        self._lease: Lease | None = None
        self._token: object = None
        self.handed: HandedGradients | None = None  # of its last step
        # The entry that ran before this one, and its gradients.
        self._handed_before: HandedGradients | None = None
        self._before: _StepEntry | None = None
        self._trained_of = picker(compiled.step.gradients)
        sources = compiled.captured.program.sources
        self._names = self._trained_of([s.name for s in sources if isinstance(s, ModelTensor)])
        # The backward of each micro-batch starts with 1 / count, so that gradients are of the mean.
        seed_type = compiled.step.program.inputs[-1].type
        self._seed = torch.full((), 1.0 / count, dtype=seed_type.dtype, device=seed_type.device)  # type: ignore[union-attr]
        # A copy, because a GradScaler overwrites the seed.
        self._share = self._seed.clone()

    def follow(self, before: _StepEntry, handed: HandedGradients | None) -> None:
        """Sets to None the gradients of the previous program that this one does not compute."""
        if handed is not None:
            handed.take_back(self._trained_of(self.guard.tensors))
        self._before, self._handed_before = before, handed

    def _is_bound_as(self, other: _StepEntry | None) -> bool:
        """Whether another program is bound to the model's present tensors, with the same update."""
        if other is None or other._lease is None or other._token is not self.guard.token:
            return False
        return other._updates is self._updates

    def why_no_update(self, before: _StepEntry | None = None) -> str:
        """Says why the program cannot update the present parameters; empty if it can."""
        if not self.is_updating or self._optimizer is None or self.guard.token is self._token:
            return ""
        if self._is_bound_as(before):
            return ""
        present = self.guard.tensors
        return self._optimizer.hindrance([present[i] for i in self._updates.parameters], present)

    def run(self, leaves: Sequence[Any]) -> torch.Tensor:
        """Copies the batch in, runs the program, and sets the gradients."""
        if self._move:
            return self._run(leaves)
        with without_autocast(), torch.no_grad():
            return self._run(leaves)

    @without_autocast()
    def run_to_graph(self, leaves: Sequence[Any]) -> torch.Tensor:
        """Does the same, but returns a loss whose backward sets the gradients."""
        with torch.no_grad():
            if not self._batch:
                self._stage(leaves)
            self._set_seed()
            self._take(leaves)
            loss, outputs = self._computed(self._leased())
            handed = self._handed_of(outputs)
        self._before = self._handed_before = None
        return handed.as_graph_of(loss)

    def _run(self, leaves: Sequence[Any]) -> torch.Tensor:
        self._set_seed()
        left = self._lease_as_left()
        if left is None and not self._batch:
            self._stage(leaves)
        self._take(leaves)
        loss, outputs = self._computed(left or self._leased())
        if left is None:
            self._handed_of(outputs).hand_out()
        self._before = self._handed_before = None
        return loss

    def _set_seed(self) -> None:
        """Multiplies the seed of the backward by the scale of a GradScaler."""
        scaled = self._optimizer.scaled(self._share) if self._optimizer is not None else None
        if scaled is not None:
            self._seed.copy_(scaled)

    def _stage(self, leaves: Sequence[Any]) -> None:
        """Makes our own copy of the batch, into which later batches are copied."""
        tensors = {i: _copied(x) for i, x in enumerate(leaves) if isinstance(x, torch.Tensor)}
        self._staging = [(i, _Staging(t, leaves[i], self._move)) for i, t in tensors.items()]
        parts = [split(tensor, self._num_losses) for tensor in tensors.values()]
        self._batch = [
            parts[user][number].detach()
            for number, users in enumerate(self._compiled.step.batch)
            for user in users
        ]

    def _take(self, leaves: Sequence[Any]) -> None:
        for index, staging in self._staging:
            staging.take(leaves[index])

    def _computed(self, lease: Lease) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        """Runs the program; returns the mean loss, and all outputs."""
        outputs: Sequence[torch.Tensor] = lease.runners[0]([])
        loss = self._loss_for_user(outputs)
        if self._num_writes:
            self._write(outputs)
        return loss, outputs

    is_small = False

    def rest(self) -> None:
        """See :class:`.guard.Entry`. The user's ``.grad`` tensors keep their memory."""
        self.handed = self._lease = self._token = self._before = self._handed_before = None
        self._staging, self._batch = [], []
        self._compiled.runner.rest()

    def _lease_as_left(self) -> Lease | None:
        """Returns the lease, if the model and its gradients are as the last step left them."""
        if self.guard.token is not self._token or self.handed is None:
            return None
        if not self._is_bound_to_state():
            return None
        return self._lease if self.handed.are_as_left() else None

    def _is_bound_to_state(self) -> bool:
        return self._has_its_state is None or self._has_its_state()

    def _leased(self) -> Lease:
        """Returns the lease, a new one if the model's tensors or the arena moved."""
        if self.handed is not None and not self.handed.are_unmoved():
            self.handed = None
        if self._lease is not None and not self._lease.has_its_arena():
            self.handed = self._lease = None
        is_same = self.guard.token is self._token and self._is_bound_to_state()
        if self._lease is not None and is_same:
            return self._lease
        self.handed = None
        refusals.check_leaves(zip(self._names, self._trained_of(self.guard.tensors), strict=True))
        tensors = [*self._batch, *self.guard.tensors, *self._updated(), self._seed]
        if self._lease is None or not self._lease.is_bound_to(tensors):
            self._lease = None  # released before another one is made
            before = self._before._lease if self._before is not None else None
            self._lease = self._compiled.runner.lease(tensors, before)
        self._token = self.guard.token
        return self._lease

    def _updated(self) -> list[torch.Tensor]:
        """Returns the optimizer's tensors that the program takes; creates missing state."""
        if self._optimizer is None or not self.is_updating:
            return []
        before = self._before
        known = before if self._is_bound_as(before) else None
        if known and known._lease and known._has_its_state and known._has_its_state():
            self._has_its_state = known._has_its_state
            return known._lease.tensors[len(self._batch) + len(self.guard.tensors) : -1]
        self._compiled.runner.check_is_here()
        own = self._updates, self.guard.tensors, self._compiled.hold
        state, self._has_its_state = self._optimizer.bound(*own)
        return state

    def _handed_of(self, outputs: Sequence[torch.Tensor]) -> HandedGradients:
        """Returns the ``.grad`` tensors, kept as long as the lease and the parameters stay."""
        if self.handed is None:
            gradients = outputs[self._num_losses : len(outputs) - self._num_writes]
            parameters = self._trained_of(self.guard.tensors)
            before = self._handed_before
            # Steps of several shapes may share an arena, with gradients at the same addresses.
            if before is not None and before.are_of(parameters, gradients):
                self.handed = before
            else:
                self.handed = HandedGradients(parameters, gradients)
        return self.handed

    def _loss_for_user(self, outputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns the mean loss as a new tensor, which no later step changes."""
        # The losses lie in the arena, where the next step writes.
        if self._num_losses > 1:
            return torch.stack(list(outputs[: self._num_losses])).mean()
        if not self._move:
            return outputs[0].clone()
        loss = new_cpu_tensor((), (), outputs[0].dtype)
        self._move(loss.data_ptr(), outputs[0].data_ptr(), loss.element_size())
        return loss

    def _write(self, outputs: Sequence[torch.Tensor]) -> None:
        """Writes the new values of the model's tensors that its forward changes."""
        states = outputs[len(outputs) - self._num_writes :]
        for index, state in zip(self._compiled.step.writes, states, strict=True):
            self.guard.tensors[index].copy_(state)

    def stats(self) -> StepStats:
        """Returns the launches and memory of this program."""
        runner = self._compiled.runner
        return StepStats(
            runner.num_launches,
            runner.plan.peak_bytes,
            runner.plan.lower_bound_bytes,
            self._compiled.saved_bytes(),
            runner.num_made_per_run,
            tuple(dict.fromkeys(runner.foreign_launches())),
            runner.outside_bytes + self._loss_bytes,
            runner.why_no_graph,
        )


def _copied(leaf: Any) -> Any:
    """Returns a copy of a tensor of the batch; anything else unchanged."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if leaf.requires_grad:
        raise PlanError("compile_step takes inputs that do not require grad.")
    return torch.empty_like(leaf).copy_(leaf)


class _Staging:
    """Our copy of one tensor of the batch."""

    def __init__(self, tensor: torch.Tensor, like: torch.Tensor, move: Move | None) -> None:
        self._tensor, self._address = tensor, tensor.data_ptr()
        self._num_bytes = tensor.numel() * tensor.element_size()
        same = tensor.stride() == like.stride() and tensor.device == like.device
        is_plain = same and type(like) is torch.Tensor and like.device.type == "cpu"
        self._move = move if is_plain else None

    def take(self, tensor: torch.Tensor) -> None:
        """Copies a tensor in, by memory copy if possible: the guard has checked its layout."""
        start = address_in(tensor)
        if self._move:
            self._move(self._address, start, self._num_bytes)
        else:
            self._tensor.copy_(tensor)
