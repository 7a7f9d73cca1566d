"""``pipeline(model, args)``: splits a model over several ranks, which run micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ..autodiff.training_program import NotUpdatedError, Sums
from ..backend.arena import ArenaPlan
from ..backend.kernels.lower import BackendName
from ..backend.run.rank_program import RankProgram
from ..pipeline_parallel.actions import ActionTable, schedule_name
from ..pipeline_parallel.cut import Stage
from ..pipeline_parallel.mesh.plan import MeshPlan
from ..pipeline_parallel.plan import Progress
from ..pipeline_parallel.process_groups import Ranks, ranks_elsewhere, ranks_of, users_of
from ..pipeline_parallel.stage_derivative import StageDraws
from ..recompute.planner import Policy
from ..reuse import torch_pytree
from ..reuse.errors import PipelineError, PlanError, door
from ..reuse.evidence.root_evidence import Check
from ..reuse.ir.costs import CPU, CUDA
from ..reuse.ir.leaf import without_autocast
from ..reuse.ir.program import ModelTensor, tensor_type
from .autograd.torch_engine import set_gradients
from .capture.blocks import Reuse
from .compiler import PASSES, fitted, made_by
from .guard import Guard
from .options import Batch, LossFunction, LossModel, Options, check_count
from .page.page import ShownPlan
from .passes.context import Context
from .passes.mesh import rank_memory, traffic_of
from .passes.programs import tensor_name
from .passes.rank import (
    UPDATE,
    RankCompilation,
    Split,
    Splitting,
    held_sums,
    model_places,
    started,
    sum_names,
)
from .passes.state import OnMesh, Subject, between, run
from .refusals import check_example, check_leaves, check_runnable
from .torch_optimizer import StepOptimizer, step_optimizer
from .tracing.torch_state import mode_around, refuse_mode


@door
def pipeline(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    num_stages: int,
    micro_batches: int,
    sums: Sums = "as_gradients",
    schedule: str = "1F1B",
    split: Split = "auto",
    loss_fn: LossFunction | None = None,
    recompute: Policy = None,
    memory_bytes_per_rank: int | None = None,
    reuse: Reuse = "auto",
    backend: BackendName = "inductor",
    mesh: Any = None,
    timeout_s: float = 300.0,
    optimizer: torch.optim.Optimizer | None = None,
    max_norm: float | None = None,
    scaler: torch.amp.GradScaler | None = None,
) -> Pipeline | Elsewhere:
    """Splits a model into stages and compiles this rank's; call it on every rank alike.

    Args:
        model: the whole model, the same on every rank. Returns a scalar loss, or an output with
            ``.loss``.
        args: an example batch of one data-parallel rank; only layouts matter.
        kwargs: its keyword inputs.
        num_stages: a multiple of the pipeline's ranks.
        micro_batches: each tensor of the batch is split along dimension 0 into so many parts.
        sums: only ``"as_gradients"``: gradients of micro-batches are added up in their own dtype.
        schedule: ``"GPipe"`` or ``"1F1B"`` (one stage per rank), ``"Interleaved1F1B"``,
            ``"LoopedBFS"``, ``"InterleavedZeroBubble"``, ``"ZBVZeroBubble"``, ``"DualPipeV"`` (two
            stages per rank).
        split: ``"auto"`` balances predicted time, ``"even"`` counts layers; marks made with
            :func:`.marks.stage` win over both.
        loss_fn: computes the scalar loss from the model's output.
        recompute: as in ``compile``, or by marks. A ``Budget`` bounds the bytes of a step on each
            rank (``step_peak_bytes``) or, if memory is not planned, those one micro-batch saves.
        memory_bytes_per_rank: the bytes that a rank may hold, including parameters and gradients;
            ``"auto"`` finds the fastest split within it, with the recompute that it needs.
        reuse: as in ``compile``.
        backend: as in ``compile``.
        mesh: a ``DeviceMesh`` with a dimension ``"pipeline"`` and, if gradients are to be averaged
            over replicas, one named ``"data"``. Without it, all ranks are one pipeline.
            ``{"pipeline": 2}`` compiles for so many ranks that are not here, to be saved.
        timeout_s: how long a transfer may wait for another rank before the step fails.
        optimizer: the optimizer of all the model's parameters, on every rank. A step updates the
            parameters of the rank's stages, see :func:`compile_step`: in the program, after the
            stage's last backward, or once the gradient is summed if several ranks use a parameter.
            If any rank cannot do so, all update after the step.
        max_norm: clips the norm of the gradients of all ranks together.
        scaler: scales the loss of a model in half precision; all ranks skip an update, or none.

    Raises:
        PipelineError: if the model cannot be split so, or ranks differ in model or versions.

    Example:
        >>> pipe = lazyinline.pipeline(model, (ids, targets), num_stages=2, micro_batches=8)
        >>> optimizer = torch.optim.AdamW(p for _, p in pipe.named_parameters())
        >>> loss = pipe.step(ids, targets)
        >>> optimizer.step()
    """
    update = step_optimizer(optimizer, max_norm, scaler)
    check_example("pipeline", model, args)
    check_count(micro_batches, PipelineError)
    check_sums(sums)
    is_elsewhere = isinstance(mesh, Mapping)
    ranks = ranks_elsewhere(mesh, timeout_s) if is_elsewhere else ranks_of(mesh, timeout_s)
    table = table_of(schedule, num_stages, ranks.num_ranks, micro_batches)
    asked = AskedPipeline(
        LossModel(model, loss_fn),
        Batch((args, kwargs or {}), micro_batches),
        Context(Options(reuse=reuse, backend=backend, recompute=recompute, cache="disk")),
        ranks,
        table,
        Splitting(split, memory_bytes_per_rank),
    )
    if not is_elsewhere:
        return Pipeline(asked, update)
    if update is not None:
        update.groups()
    made = made_elsewhere(asked)
    found = [KeptRank(model, g, one, asked=asked, optimizer=update) for _, g, one in made]
    return Elsewhere(found)


def table_of(schedule: str, num_stages: int, num_ranks: int, micro_batches: int) -> ActionTable:
    """Returns the table of the actions of each rank."""
    # Imported late: it brings in Dynamo, which nothing else here needs.
    from ..pipeline_parallel.torch_pipelining import action_table

    return action_table(schedule_name(schedule), num_stages, num_ranks, micro_batches)


def check_sums(sums: Sums) -> None:
    """Raises PipelineError if gradients are to be summed in another dtype than their own."""
    if sums != "as_gradients":
        raise PipelineError(
            f"sums={sums!r} is for a step without stages: a pipeline's add gradients up in their "
            "own dtype. Leave it out, or keep the parameters in float32 under torch.autocast."
        )


@dataclass(frozen=True)
class AskedPipeline:
    """The arguments of a pipeline.

    For a file, ``opened`` loads the state in place of the passes up to recompute, ``together`` runs
    a function that may fail on the file (if it fails on one rank, all raise), and ``file`` is its
    digest.
    """

    model: LossModel
    batch: Batch
    context: Context
    ranks: Ranks
    table: ActionTable
    splitting: Splitting
    on_mesh: OnMesh | None = None
    opened: Callable[[RankCompilation], RankCompilation] | None = None
    together: Callable[[Callable[[], RankCompilation]], RankCompilation] = lambda make: make()
    file: str = ""

    def begun(self) -> RankCompilation:
        """Returns the state of this rank after capture, or as loaded from a file."""
        subject = Subject(self.model, *self.batch.first_micro_batch())
        rank, rates = self.ranks.rank, CUDA if self.ranks.device.type == "cuda" else CPU
        asked = self.table, rank, self.splitting, rates, self.on_mesh
        state = started(self.context, subject, *asked)
        state = replace(state, has_replicas=self.ranks.data_group is not None)
        if self.opened is not None:
            return self.together(partial(self.opened, state))
        return run(between(PASSES, "capture", "derive"), state)

    def guard(self, state: RankCompilation) -> Guard:
        """Returns the guard of the captured model."""
        inputs = torch_pytree.flatten(self.batch.first_micro_batch())
        return Guard(self.model, state.captured, *inputs)

    def ids_of(self, state: RankCompilation, present: Sequence[Tensor]) -> set[int]:
        """Returns the ``id`` of each of the model's present tensors that a rank keeps."""
        places, model = model_places(state.captured.program), self.model.model
        sources = [source for one in state.own for source in one.stage.model_tensors]
        own = {id(present[places[id(source)]]) for source in sources}
        if state.rank == 0:  # it also keeps tensors that no stage uses
            own |= {id(t) for t in (*model.parameters(), *model.buffers())} - set(map(id, present))
        return own


@dataclass(frozen=True)
class KeptRank:
    """One rank in a file: its step over a mesh, or its stages."""

    model: nn.Module
    guard: Guard
    lowered: Any  # the state of its compile before link
    mesh: Any = None  # with the pipeline's dimension
    rank: int = 0  # over a mesh
    part_of: Callable[[Tensor], Tensor] = lambda tensor: tensor  # the rank's part of a tensor
    # A context in which the modules hold the captured parameters.
    as_captured: Callable[[], AbstractContextManager[None]] = nullcontext
    asked: AskedPipeline | None = None  # for stages, the arguments of the pipeline
    optimizer: StepOptimizer | None = None
    plans: Sequence[ArenaPlan] = ()  # the memory plans of a step

    @property
    def row(self) -> Sequence[int]:
        """The ranks that a file is for, in order; without a mesh, those of one replica."""
        if self.asked is not None and self.mesh is None:
            return self.asked.ranks.rows[0]
        ranks: list[int] = self.mesh.mesh.flatten().tolist()
        return ranks

    @property
    def position(self) -> int:
        """The position of the rank in ``row``."""
        return self.lowered.rank if self.mesh is None else self.row.index(self.rank)


class Pipeline:
    """One rank's part of a pipeline. Made by :func:`pipeline`.

    Attributes:
        last_report: the report of the compile.
        counts: for each stage of this rank and each kind of action, how often it ran, and its
            seconds.
    """

    def __init__(self, asked: AskedPipeline, optimizer: StepOptimizer | None = None) -> None:
        ranks, table = asked.ranks, asked.table
        self._asked, self._model, self._optimizer = asked, asked.model, optimizer
        self._table, self._ranks, self._batch = table, ranks, asked.batch
        state = asked.begun()
        self.last_report, program = state.report, state.captured.program
        same = {"schedule": table.schedule, "num_stages": table.num_stages}
        same |= {"micro_batches": table.num_micro_batches, "file (its digest)": asked.file[:12]}
        why = "so their stages would not fit together"
        ranks.check_same_program(None if asked.opened else program, same, why)
        self._guard = asked.guard(state)
        self._places = model_places(program)
        self._names = [tensor_name(s.name) for s in program.sources if isinstance(s, ModelTensor)]
        state = state if asked.opened else run(between(PASSES, "plan", "autodiff"), state)
        state = self._fitted_with_update(state)
        state = state if asked.opened else run(between(PASSES, "predict"), state)
        self._made = state
        self.last_report.made = made_by(state)
        self._derived, self._updates = state.own, state.updates
        self._updated = {source.name for one in state.updates for source in one.parameters}
        self._more: list[Tensor] = []  # the optimizer's tensors that updates take
        self._has_its_state: Check = lambda: False
        self._token: object = None
        self._loss_type = tensor_type(program.outputs[0])
        assert isinstance(state.runs, RankProgram)
        self._runs = state.runs
        self._sum_names = sum_names(state)
        own = self._own_tensors()
        self._parameters = {s.name: s for s in own if isinstance(s.tensor, nn.Parameter)}
        users, types = users_of(state.derived, table)
        self._check_tensors(users)
        forwards = [one.forward for one in state.derived]
        self._draws = StageDraws(() if state.mesh_plan is None else forwards)
        from ..pipeline_parallel.torch_pipelining import ClosureStage, Runner

        made = partial(ClosureStage, table=table, ranks=ranks, runner=self._runs, draws=self._draws)
        made = partial(made, progress=Progress(state.order))
        stages = [made(one, tensors=self._tensors_of(one.stage)) for one in self._derived]
        self.counts = {one.stage_index: one.counts for one in stages}
        self._runner = Runner(table, stages)
        if state.mesh_plan is not None and not state.mesh_plan.replicas:
            ranks = replace(ranks, data_group=None)
        held = held_sums(state)
        types = {name: type_ for name, type_ in types.items() if name not in held}
        self._reduction = ranks.reduction(users, types)
        self._sums = self._reduction.sums

    @cached_property
    def plan(self) -> ShownPlan:
        """The stages with their predicted time and memory. ``print(pipe.plan)`` shows them."""
        return shown_plan(self._made)

    def _fitted_with_update(self, state: RankCompilation) -> RankCompilation:
        """Compiles with the optimizer's update in the program, if every rank can do so."""
        update = self._optimizer
        if update is None:
            return self._fitted_in_turn(state)
        goal = replace(state.goal, updates=update.groups())
        # On all ranks or none: otherwise ranks that share a parameter would round it differently.
        why = update.why_after or update.hindrance([], self._guard.tensors)
        why = self._ranks.agreed_reason(why)
        if not why:
            try:
                made = self._fitted_in_turn(replace(state, goal=goal))
            except NotUpdatedError as error:
                why = str(error)
            why = self._ranks.agreed_reason(why)
        self.last_report.update_after = why
        if why:
            update.groups(why)
            made = self._fitted_in_turn(state)
        return made

    def _fitted_in_turn(self, state: RankCompilation) -> RankCompilation:
        def made() -> RankCompilation:
            # Ranks that share a cache compile in turn: the others find what the first one built.
            place = state.context.cache_place
            with self._ranks.leader_first(place), state.context.cached(self.last_report):
                if not self._asked.opened:
                    return fitted(state)
                # Only the parts of the file that launches need are read.
                first = "update" if state.goal.updates else "lower"
                return run(between(PASSES, first, "link"), state)

        return self._asked.together(made)

    def _present_parameters(self) -> dict[str, Tensor]:
        present = self._held()
        return {name: present[self._places[id(s)]] for name, s in self._parameters.items()}

    def _held(self) -> Sequence[Tensor]:
        """Returns the model's present tensors."""
        return self._guard.tensors

    def _local(self) -> Sequence[Tensor]:
        """Returns the same tensors as the rank computes with them: local parts."""
        return self._guard.tensors

    def _tensors_of(self, stage: Stage) -> Callable[[], list[Tensor]]:
        places = [self._places[id(source)] for source in stage.model_tensors]
        return lambda: list(map(self._local().__getitem__, places))

    def _check_tensors(self, users: Mapping[str, tuple[int, ...]]) -> None:
        """Checks that tensors which several ranks hold have equal initial values."""
        check_runnable(self._model)
        check_leaves((s.name, s.tensor) for s in self._own_tensors())
        own = {s.name: self._first_value(s) for s in self._own_tensors()}
        text = "Ranks start from different values. Seed them alike or load one checkpoint"
        shared = {name: tensor for name, tensor in own.items() if len(users[name]) > 1}
        self._ranks.check_same_values(shared, text)
        if self._ranks.data_group is not None:
            self._ranks.check_same_values(own, text, self._ranks.data_group)

    def _first_value(self, source: ModelTensor) -> Tensor:
        """Returns the initial value of a tensor of the model on this rank."""
        return source.tensor

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields the parameters that this rank's stages use, under the model's own names."""
        for name, parameter in self._present_parameters().items():
            assert isinstance(parameter, nn.Parameter)
            yield tensor_name(name), parameter

    @door
    def state_dict(self) -> dict[str, Tensor]:
        """Returns this rank's part of the model's state: its parameters and buffers, by name.

        The parts of all ranks together are the model's whole ``state_dict`` (a tensor of several
        ranks is in each of their parts), so a run may continue with another number of stages. The
        tensors are the model's own, so loading into them loads the model.

        Example:
            >>> dcp.save(pipe.state_dict(), checkpoint_id=folder)
            >>> dcp.load(pipe.state_dict(), checkpoint_id=folder)
        """
        own = self._asked.ids_of(self._made, self._held())
        whole = self._model.model.state_dict(keep_vars=True)
        return {name: t.detach() for name, t in whole.items() if id(t) in own}

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer of its steps, if it has one."""
        return None if self._optimizer is None else self._optimizer.optimizer

    @property
    def kept(self) -> list[KeptRank]:
        """Returns what a file holds of this rank."""
        own = self._model.model, self._guard, self._made
        return [KeptRank(*own, asked=self._asked, optimizer=self._optimizer)]

    def _own_tensors(self) -> list[ModelTensor]:
        return [s for d in self._derived for s in d.stage.model_tensors]

    @property
    def step_peak_bytes(self) -> int:
        """The most bytes that a step holds on this rank by plan: arenas and transferred tensors.

        Parameters, gradient sums and the batch are not included.

        Raises:
            PipelineError: if memory is not planned here (device, kernels).
        """
        if why := self.last_report.unplanned:
            raise PipelineError(f"The memory of this rank's stages is not planned: {why}.")
        return self._runs.plan.held_bytes

    @property
    def arena_bytes(self) -> int:
        """Bytes of this rank's arena; 0 before the first step."""
        return self._runs.arena_bytes

    def measured_s(self) -> dict[tuple[int, str], float]:
        """Returns the mean seconds of each kind of action per stage; call it on every rank.

        ``plan.simulated(pipe.measured_s())`` predicts the time of a step from them.
        """
        own = {
            (stage, kind): total / number
            for stage, counts in self.counts.items()
            for kind, (number, total) in counts.items()
        }
        return self._ranks.merged(own)

    @door
    @without_autocast()
    def step(self, *args: Any, **kwargs: Any) -> Tensor | None:
        """Runs one training step; call it on every rank with the whole batch.

        ``.grad`` of this rank's parameters is set to the gradient of the mean loss; hooks on them
        run once per step.

        Returns:
            The mean loss of the micro-batches on ranks with the last stage, None elsewhere.

        Raises:
            PipelineError: if the batch does not fit, the model changed, or a rank failed.
        """
        refuse_mode(mode_around(), PipelineError)
        micro_batches = self._batch.split(args, kwargs)
        self._check(micro_batches)
        sums = [self._sums.buffers[name] for name in self._sum_names]
        self._runs.begin([*self._local(), *sums, *self._tensors_of_updates()], self._names)
        self._sums.zero()
        seed = torch.tensor(1.0 / self._table.num_micro_batches, device=self._ranks.device)
        scaled = None if self._optimizer is None else self._optimizer.scaled(seed)
        if scaled is not None:
            self._runner.begin_with(scaled)
        with self._draws.step(len(micro_batches)):
            losses = self._runner.step([self._rows(leaves) for leaves in micro_batches])
        with torch.no_grad():
            self._runs.run_due()
            self._reduction.run()
            for update in self._updates:
                if update.after is None:
                    self._runs.run(update.unit, UPDATE, 0, ())
            self._hand_out()
            if self._optimizer is not None and self.last_report.update_after:
                self._optimizer.update(self._total_norm, self._reduction.agree_on_largest)
            return torch.stack(losses).mean() if losses else None

    def _tensors_of_updates(self) -> list[Tensor]:
        """Returns the optimizer's state and numbers that the updates in the program take."""
        if self._optimizer is None or not self._updates:
            return []
        present = self._guard.tensors
        own = [[present[self._places[id(s)]] for s in one.parameters] for one in self._updates]
        why = ""
        if self._guard.token is not self._token:
            why = self._optimizer.hindrance([p for parameters in own for p in parameters], present)
        if not self._optimizer.is_as_compiled():
            why = "its groups, their options (other than numbers) or hooks have changed"
        if why:
            raise PipelineError(
                f"The optimizer no longer fits this pipeline: {why}. Make a new pipeline."
            )
        self._token = self._guard.token
        if not self._has_its_state():
            self._more = []
            for one, parameters in zip(self._updates, own, strict=True):
                found, self._has_its_state = self._optimizer.bound(one.step.updates, parameters)
                self._more += found
        return self._more

    @door
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clips the total norm of the gradients of all ranks; call it on every rank.

        ``torch.nn.utils.clip_grad_norm_`` would clip the gradients of each rank separately.

        Returns:
            The norm before clipping.
        """
        own = list(self._present_parameters().values())
        with torch.no_grad():
            total = self._total_norm(own)
            torch.nn.utils.clip_grads_with_norm_(own, max_norm, total)
        return total

    def _total_norm(self, parameters: Iterable[Tensor]) -> Tensor:
        names = {id(p): name for name, p in self._present_parameters().items()}
        named = [(names.get(id(p), ""), p.grad) for p in parameters if p.grad is not None]
        return self._reduction.total_norm(named)

    def _rows(self, leaves: Sequence[Any]) -> list[Tensor]:
        """Returns the tensors of a micro-batch that this rank takes."""
        return [x for x in leaves if isinstance(x, Tensor)]

    def _check(self, micro_batches: Sequence[Sequence[Any]]) -> None:
        if not self._guard.accepts(list(micro_batches[0]), self._batch.tree):
            raise PipelineError(
                "The batch or the model no longer fits what this pipeline was compiled for "
                "(shapes, dtypes, train/eval mode, attributes that forward reads). Make a new one."
            )

    def _gradient(self, parameter: Tensor, summed: Tensor) -> Tensor:
        """Returns the ``.grad`` of a parameter, given its gradient sum."""
        return summed

    def _hand_out(self) -> None:
        parameters, sums = self._present_parameters(), self._sums.buffers
        mine = sums.keys() - self._updated
        given = {p: self._gradient(p, sums[name]) for name, p in parameters.items() if name in mine}
        set_gradients([*given], [*given.values()])


def shown_plan(state: RankCompilation) -> ShownPlan:
    """Returns the predicted time and memory of a linked rank's pipeline."""
    # For a loaded pipeline predicted on demand, because it reads the operators of all stages.
    state = run(between(PASSES, "predict"), state) if state.predicted is None else state
    more: dict[str, Any] = {"layouts": state.mesh_plan, "traffic": traffic_of(state)}
    if state.mesh_plan is not None and state.planned is not None:
        more["memory"] = rank_memory(state)
    return ShownPlan.of(state.plan, state.report, rank=state.rank, **more)


class Elsewhere:
    """A step that is compiled for ranks on other machines, for ``save`` to write.

    Made by :func:`pipeline` and :func:`.parallel.parallelize`, which leave the model as it is.
    """

    def __init__(self, kept: Sequence[KeptRank]) -> None:
        self.kept, first = sorted(kept, key=lambda one: one.position), kept[0]
        self.model, self.last_report = first.model, first.lowered.report

    @cached_property
    def plan(self) -> ShownPlan | MeshPlan:
        """The stages with their predicted time and memory; over a mesh, the placements."""
        state = self.kept[0].lowered
        return shown_plan(state) if state.goal.on_mesh is None else state.layouts

    def step(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises PipelineError, or PlanError if it has no stages: its ranks are elsewhere."""
        raise (PlanError if self.kept[0].asked is None else PipelineError)(
            "This step was compiled for ranks that are not here: lazyinline.save it, and "
            "lazyinline.load the file on each of them."
        )


def made_elsewhere(
    asked: AskedPipeline, each: Callable[[RankCompilation], Iterable[Any]] = lambda one: [((), one)]
) -> Iterator[tuple[Sequence[int], Guard, RankCompilation]]:
    """Compiles the stages of each rank, given its coordinates in a mesh and states from ``each``.

    Yields a coordinate, the guard of the captured model, and the rank's compile.
    """
    state = asked.begun()
    guard = asked.guard(state)
    state = run(between(PASSES, "plan", "autodiff"), state)
    with state.context.cached(state.report):
        for coordinate, one in each(state):
            for rank in range(asked.ranks.num_ranks):
                yield coordinate, guard, replace(fitted(replace(one, rank=rank)), sharder=None)
