"""Adapter: the schedules, the action table and the runtime of ``torch.distributed.pipelining``.

PyTorch makes the schedule, runs its actions and starts the transfers; a :class:`ClosureStage` says
what an action computes and which tensors are sent. It owns its buffers, so it overrides all methods
of PyTorch's stage that a schedule calls. Private names for this are used only here.
"""

from __future__ import annotations

import contextlib
import time
import types
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partialmethod
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from ..reuse.errors import PipelineError
from ..reuse.ir.program import ModelTensor
from .actions import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    COMPUTE,
    FORWARD,
    Action,
    ActionTable,
    rank_of_stages,
)
from .plan import Progress
from .process_groups import Ranks, stopped
from .stage_derivative import StageDerivative, StageDraws

_RECEIVES = {"F": "RECV_F", "B": "RECV_B", "I": "RECV_B"}
# 1F1B waits for an action's sends before or right after the next action; the others wait at the end
# of a step (GPipe: of its forwards, and of its backwards).
_ACTIONS_SENDING = {"1F1B": 2}


def action_table(
    schedule: str, num_stages: int, num_ranks: int, num_micro_batches: int
) -> ActionTable:
    """Returns the action table of a schedule, by PyTorch; needs no process group."""
    rank_of = rank_of_stages(schedule, num_stages, num_ranks)
    stages = [
        types.SimpleNamespace(
            num_stages=num_stages,
            stage_index=s,
            group_size=num_ranks,
            group_rank=0,
            is_first=s == 0,
            is_last=s == num_stages - 1,
            submod=None,
            stage_index_to_group_rank={},
        )
        for s, rank in enumerate(rank_of)
        if rank == 0
    ]
    made = _make(schedule, stages, num_micro_batches)
    ranks = [list(_compute_actions(made.pipeline_order[rank])) for rank in range(num_ranks)]
    posted: dict[Action, int] = {}
    if isinstance(made, PipelineScheduleSingle):
        ranks = [_renumbered(actions) for actions in ranks]
    else:
        for rank in range(num_ranks):
            posted |= dict(_posted(made.pipeline_order_with_comms[rank], ranks[rank]))
    return ActionTable(
        schedule,
        tuple(map(tuple, ranks)),
        rank_of,
        num_micro_batches,
        posted,
        _ACTIONS_SENDING.get(schedule),
    )


def _compute_actions(actions: Sequence[Any]) -> Iterator[Action]:
    for action in actions:
        if action is None:
            continue
        for part in action.sub_actions or (action,):
            if part.computation_type.value in COMPUTE:
                yield Action(part.computation_type.value, part.stage_index, part.microbatch_index)


def _posted(steps: Sequence[Any], actions: Sequence[Action]) -> Iterator[tuple[Action, int]]:
    """Yields each receiving action, and how many actions are done when its receive starts."""
    receivers = {
        _RECEIVES[a.kind] + f"{a.stage}.{a.micro_batch}": a for a in actions if a.kind != "W"
    }
    num_done = 0
    for step in steps:
        kind = step.computation_type.value
        if kind in _RECEIVES.values():
            yield receivers[f"{kind}{step.stage_index}.{step.microbatch_index}"], num_done
        num_done += len(list(_compute_actions([step])))


def _renumbered(actions: Sequence[Action]) -> list[Action]:
    """Numbers micro-batches in the order in which they run.

    PyTorch's table of 1F1B starts at 1 on the last rank; it does not use it to run the schedule.
    """
    counts: Counter[str] = Counter()
    found = []
    for action in actions:
        found.append(Action(action.kind, action.stage, counts[action.kind]))
        counts[action.kind] += 1
    return found


def _make(schedule: str, stages: Sequence[Any], num_micro_batches: int) -> Any:
    """Makes PyTorch's schedule, with a loss function that returns the last stage's result."""
    made = getattr(torch_schedules, f"Schedule{schedule}")
    options = {"loss_fn": _returned_loss, "scale_grads": False}
    try:
        if issubclass(made, PipelineScheduleSingle):
            return made(stages[0], num_micro_batches, **options)
        assert issubclass(made, PipelineScheduleMulti)
        return made(list(stages), num_micro_batches, **options)
    except (ValueError, AssertionError) as error:
        raise PipelineError(f"{schedule} cannot run this: {error}") from error


def _returned_loss(output: Any, target: Tensor) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


class RankRunner(Protocol):
    """Runs the parts of a rank's stages, and holds the values that stages send and receive.

    A ``way`` is ``"F"`` for activations, ``"B"`` for their gradients. Implemented in ``backend``.
    """

    def run(self, unit: int, part: str, flight: int, given: Sequence[Tensor]) -> list[Tensor]:
        """Runs a part of a stage for a micro-batch; later runs may overwrite what it returns."""

    def inbox(self, unit: int, way: str, flight: int) -> list[Tensor]:
        """Returns memory to receive the values of another rank into."""

    def outbox(self, unit: int, way: str, flight: int) -> list[Tensor]:
        """Returns the values for another rank, in the form in which they are sent."""

    def forget(self) -> None:
        """Drops all micro-batches in flight."""


class ClosureStage(PipelineStage):
    """A stage whose steps are closures, for PyTorch's schedules to run.

    The ``tensors`` are those of the model, in the order of ``stage.model_tensors``.
    """

    def __init__(
        self,
        derived: StageDerivative,
        table: ActionTable,
        ranks: Ranks,
        runner: RankRunner,
        progress: Progress,
        tensors: Callable[[], Sequence[Tensor]],
        draws: StageDraws,
    ) -> None:
        stage = derived.stage
        # The module is not used: every method of PyTorch's that would call it is overridden.
        super().__init__(
            nn.Module(), stage.index, table.num_stages, ranks.device, group=ranks.group
        )
        self.doing = ""  # the last action, for errors
        # For each kind of action, how often it ran, and its seconds.
        self.counts: dict[str, tuple[int, float]] = {}
        self._runs, self._progress, self._draws = runner, progress, draws
        self._tensors, self._targets = tensors, stage.written_tensors
        self._splits = table.splits_backward
        self._users = [s.index for s in stage.sources if not isinstance(s, ModelTensor)]
        self._given: list[list[Tensor]] = []
        # The gradient of the loss, with which backwards begin, on the last stage.
        self.seeds: list[Tensor] = []
        if stage.num_sent == 0:
            type_, seed = derived.cotangent_types[0], 1.0 / table.num_micro_batches
            seeds = torch.full(type_.shape, seed, dtype=type_.dtype, device=type_.device)
            self.seeds.append(seeds)

    def give(self, user: Sequence[Sequence[Tensor]]) -> None:
        """Begins a step with the user's tensors for each micro-batch."""
        self._given = [[*(tensors[i] for i in self._users), *self.seeds] for tensors in user]
        self._runs.forget()
        self._progress.start()

    # ---- set-up: nothing is exchanged, since all about the transfers is known ----------------

    def _warmup_forward_vote(self, *args: Any, **kwargs: Any) -> Tensor:
        return torch.ones(1, dtype=torch.int32, device="cpu")

    _warmup_backward_result = _warmup_forward_vote

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        return []

    def _prepare_forward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> Any:
        self.chunks = num_microbatches
        self.args_recv_info = {i: () for i in range(num_microbatches)}
        self.act_send_info = {}
        return ()

    _prepare_backward_infra = _prepare_forward_infra

    def clear_runtime_states(self) -> None:
        """Forgets the last step."""
        self.output_chunks.clear()

    # ---- transfers -----------------------------------------------------------------------

    def _receive(self, way: str, step: int, micro_batch: int) -> list[dist.P2POp]:
        peer = self.stage_index + step
        kind = FORWARD if way == FORWARD else BACKWARD_INPUT if self._splits else BACKWARD
        self._progress.check_receive(Action(kind, self.stage_index, micro_batch))
        buffers = self._runs.inbox(self.stage_index, way, micro_batch)
        if buffers:
            self.doing = f"receive {way}{micro_batch} from stage {peer}, rank {self._rank_of(peer)}"
        return [self._operation(dist.irecv, buffer, peer) for buffer in buffers]

    def _send(self, way: str, step: int, micro_batch: int) -> list[dist.P2POp]:
        peer = self.stage_index + step
        tensors = self._runs.outbox(self.stage_index, way, micro_batch)
        if tensors:
            self.doing = f"send {way}{micro_batch} to stage {peer}, rank {self._rank_of(peer)}"
        return [self._operation(dist.isend, tensor, peer) for tensor in tensors]

    # Activations come from the stage before and go to the next one, gradients the other way.
    get_fwd_recv_ops = partialmethod(_receive, FORWARD, -1)  # type: ignore[assignment]
    get_fwd_send_ops = partialmethod(_send, FORWARD, 1)  # type: ignore[assignment]
    get_bwd_recv_ops = partialmethod(_receive, BACKWARD, 1)  # type: ignore[assignment]
    get_bwd_send_ops = partialmethod(_send, BACKWARD, -1)  # type: ignore[assignment]

    def _operation(self, kind: Callable[..., Any], tensor: Tensor, peer: int) -> dist.P2POp:
        return dist.P2POp(kind, tensor, self._rank_of(peer), self.group)

    def _rank_of(self, stage: int) -> int:
        place = self.stage_index_to_group_rank[stage]  # which a schedule has set
        return dist.get_process_group_ranks(self.group)[place]

    def get_local_bwd_output(self, mb_index: int) -> tuple[Tensor, ...]:
        """Returns nothing: the rank's runner passes values between stages of one rank."""
        return ()

    def _nothing(self, *args: Any, **kwargs: Any) -> None: ...

    # V-shaped schedules have two neighbouring stages on one rank: the runner passes their values.
    set_local_fwd_input = set_local_bwd_input = _nothing
    # Called since torch 2.15; not needed, since a step begins with empty inboxes.
    _clear_unlaunched_fwd_recv = _clear_unlaunched_bwd_recv = _nothing
    # The loss's gradient is scaled instead, and gradients are reduced after the step.
    scale_grads = perform_reduce_grad = _nothing

    # ---- steps ---------------------------------------------------------------------------

    @contextlib.contextmanager
    def _counted(self, kind: str, micro_batch: int) -> Iterator[None]:
        """Counts and times the action inside."""
        self.doing = str(Action(kind, self.stage_index, micro_batch))
        start = time.perf_counter()
        yield
        number, total = self.counts.get(kind, (0, 0.0))
        self.counts[kind] = (number + 1, total + time.perf_counter() - start)

    @torch.no_grad()
    def forward_one_chunk(
        self, fwd_chunk_id: int, args: Any, kwargs: Any = None, save_forward_output: bool = True
    ) -> Any:
        """Runs the forward of a micro-batch."""
        with self._counted(FORWARD, fwd_chunk_id):
            self._draws.begin(self.stage_index, fwd_chunk_id)
            outputs = self._run(FORWARD, fwd_chunk_id)
            present = self._tensors() if self._targets else ()
            first = len(outputs) - len(self._targets)
            # Buffers such as running means: the next micro-batch reads the model's tensors.
            for state, target in zip(outputs[first:], self._targets, strict=True):
                present[target].copy_(state)
            # Results may be in an arena, where the next micro-batch overwrites them.
            return tuple(t.clone() for t in outputs[:first])

    @torch.no_grad()
    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        """Runs the backward of a micro-batch, or its early half."""
        kind = BACKWARD if full_backward else BACKWARD_INPUT
        # If a schedule splits any backward, all are compiled as two halves.
        both = (BACKWARD_INPUT, BACKWARD_WEIGHT)
        with self._counted(kind, bwd_chunk_id):
            for part in both if full_backward and self._splits else (kind,):
                self._run(part, bwd_chunk_id)

    @torch.no_grad()
    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Runs the late half of a micro-batch's backward."""
        with self._counted(BACKWARD_WEIGHT, bwd_chunk_id):
            self._run(BACKWARD_WEIGHT, bwd_chunk_id)

    def _run(self, kind: str, micro_batch: int) -> list[Tensor]:
        self._progress.begin(Action(kind, self.stage_index, micro_batch))
        return self._runs.run(self.stage_index, kind, micro_batch, self._given[micro_batch])


class Runner:
    """One rank's stages, in order, under a schedule."""

    def __init__(self, table: ActionTable, stages: Sequence[ClosureStage]) -> None:
        self._stages = stages
        self._num_micro_batches = table.num_micro_batches
        self._schedule = _make(table.schedule, stages, table.num_micro_batches)
        self._has_last = any(stage.is_last for stage in stages)

    def begin_with(self, seed: Tensor) -> None:
        """Sets the gradient of the loss, with which backwards begin."""
        for stage in self._stages:
            for own in stage.seeds:
                own.copy_(seed)

    def step(self, user: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """Runs a step; returns the loss of each micro-batch on the rank with the last stage."""
        for stage in self._stages:
            stage.give(user)
        losses: list[Tensor] = []
        options: dict[str, Any] = {"return_outputs": False}
        # A schedule calls the loss function only if it has targets. The last stage has computed the
        # loss already, so these are not used.
        if self._has_last:
            options |= {
                "target": torch.zeros(self._num_micro_batches, device="cpu"),
                "losses": losses,
            }
        try:
            with torch.enable_grad():  # a schedule with backwards refuses to run without
                self._schedule.step(**options)
        except Exception as error:
            self._forget()
            raise self._explained(error) from error
        return losses

    def _forget(self) -> None:
        for stage in self._stages:
            stage.give(())
            stage.clear_runtime_states()
        for name in ("fwd_recv_ops", "bwd_recv_ops", "_internal_losses"):
            with contextlib.suppress(AttributeError):
                getattr(self._schedule, name).clear()

    def _explained(self, error: Exception) -> PipelineError:
        doing = "; ".join(f"stage {s.stage_index}: {s.doing}" for s in self._stages if s.doing)
        where = f"in the middle of a step. Last action of {doing}"
        return PipelineError(stopped(where, self._stages[0].group, error))
