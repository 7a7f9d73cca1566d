"""``pipeline(model, args)``: a model over several ranks, fed with micro-batches."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ...backend.run.rank_program import RankProgram
from ...backend.run.runtime import ReplayRuntime
from ...pipeline_parallel.schedule.actions import ActionTable, schedule_name
from ...pipeline_parallel.schedule.plan import PipelinePlan
from ...pipeline_parallel.schedule.rank_order import RankOrder, rank_order
from ...pipeline_parallel.split.call_costs import CPU_RATES, CUDA_RATES, CostModel
from ...pipeline_parallel.split.cut import Stage, cut_program
from ...pipeline_parallel.stages.checkpoint import copy_state, read_parts
from ...pipeline_parallel.stages.make_plan import make_plan
from ...pipeline_parallel.stages.planned_steps import PlannedSteps, Progress
from ...pipeline_parallel.stages.process_groups import Ranks, ranks_of
from ...pipeline_parallel.stages.sharded_optimizer import Shards
from ...pipeline_parallel.stages.stage import (
    GradientSums,
    Run,
    StageCounts,
    StageDerivative,
    StageRuntime,
    StageSteps,
    UnplannedSteps,
    differentiate_stages,
)
from ...recompute.policy import Policy
from ...reuse import torch_pytree
from ...reuse.errors import PipelineError
from ...reuse.ir.leaf import without_autocast
from ...reuse.ir.program import ModelTensor, Program
from ..autograd.torch_hooks import have_hooks, pass_through_autograd
from ..checks.runnable import check_runnable
from ..compiler import Compiler, Options
from ..guards.guard import Guard
from ..marks import STAGE_MARK
from ..report import CompileReport
from ..requests import model_name
from ..training_step import LossFunction, LossModel
from .batch import Batch
from .rank_compile import boundaries_of, rank_program
from .split import SPLITS, Splitting, colors_of
from .stage_recompute import StageRecompute

GRADIENTS = ("replicated", "sharded")

# How often to save less before giving up on a bound.
_ATTEMPTS = 6


def stage(module: nn.Module, number: int) -> nn.Module:
    """Marks a module for a pipeline stage; returns the module.

    What runs in no marked module goes to the first stage that has what it needs.

    Args:
        module: a layer, or anything that contains layers.
        number: the stage, counted from 0.

    Raises:
        PipelineError: if the number is negative.

    Example:
        >>> for i, layer in enumerate(model.layers):
        ...     lazyinline.stage(layer, i // 8)
    """
    if number < 0:
        raise PipelineError(f"stage {number}: stages are counted from 0.")
    module.__dict__[STAGE_MARK] = number
    return module


def pipeline(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    num_stages: int,
    micro_batches: int,
    schedule: str = "1F1B",
    split: str = "auto",
    loss_fn: LossFunction | None = None,
    recompute: Policy = None,
    memory_bytes_per_rank: int | None = None,
    reuse: str = "marked",
    backend: str = "inductor",
    mesh: Any = None,
    gradients: str = "replicated",
    timeout_s: float = 300.0,
) -> Pipeline:
    """Splits a model into stages and compiles this rank's; every rank calls it in the same way.

    Args:
        model: the whole model, the same on every rank. Returns a scalar loss, or an output with
            ``.loss``.
        args: an example batch of one data-parallel rank; only layouts matter.
        kwargs: its keyword inputs.
        num_stages: a multiple of the pipeline's ranks.
        micro_batches: each tensor of the batch is split along dimension 0 into so many parts.
        schedule: ``"GPipe"``, ``"1F1B"`` (one stage per rank), ``"Interleaved1F1B"``,
            ``"LoopedBFS"``, ``"InterleavedZeroBubble"``, ``"ZBVZeroBubble"`` or ``"DualPipeV"``
            (two stages per rank).
        split: ``"auto"`` balances predicted time, ``"even"`` counts layers; marks made with
            :func:`stage` win over both.
        loss_fn: computes the scalar loss from the model's output.
        recompute: ``"full"`` or ``"selective"`` computes forward again in the backward; modules
            may also be marked one by one (``lazyinline.recompute``). A ``Budget`` bounds what a
            step holds on each rank (``step_peak_bytes``); where memory is not planned, what one
            micro-batch saves.
        memory_bytes_per_rank: what a rank may hold, parameters and gradients included; ``"auto"``
            finds the fastest split within it, and what is computed again to keep it.
        reuse: ``"marked"`` or ``"off"``, as in ``compile``.
        backend: ``"inductor"`` or ``"eager"``.
        mesh: a ``DeviceMesh`` with a dimension ``"pipeline"`` and, if gradients are to be averaged
            over replicas, one named ``"data"``. Without it, all ranks are one pipeline.
        gradients: with replicas, ``"replicated"`` gives each the mean of all gradients;
            ``"sharded"`` gives each its part of them, in :attr:`Pipeline.shards`, so that the
            optimizer's state and work are shared too.
        timeout_s: how long a transfer may wait for another rank before the step fails.

    Raises:
        PipelineError: if the model cannot be split so, or ranks differ in model or versions.

    Example:
        >>> pipe = lazyinline.pipeline(model, (ids, targets), num_stages=2, micro_batches=8)
        >>> optimizer = torch.optim.AdamW(p for _, p in pipe.named_parameters())
        >>> loss = pipe.step(ids, targets)
        >>> optimizer.step()
    """
    if split not in SPLITS:
        raise PipelineError(f"split={split!r} is unknown; there are {SPLITS}.")
    if gradients not in GRADIENTS:
        raise PipelineError(f"gradients={gradients!r} is unknown; there are {GRADIENTS}.")
    if micro_batches < 1:
        raise PipelineError(f"micro_batches={micro_batches}: there must be at least one.")
    # Imported late: it brings in Dynamo, which nothing else here needs.
    from ...pipeline_parallel.stages.torch_pipelining import action_table

    ranks = ranks_of(mesh, timeout_s)
    table = action_table(schedule_name(schedule), num_stages, ranks.num_ranks, micro_batches)
    settings = Options(reuse=reuse, backend=backend, recompute=recompute, cache="disk")
    compiler = Compiler(settings)
    example = (args, kwargs or {})
    splitting = Splitting(split, memory_bytes_per_rank)
    made = Pipeline(LossModel(model, loss_fn), example, compiler, ranks, table, splitting)
    if gradients == "sharded":
        made.share_optimizer()
    return made


class Pipeline:
    """One rank's part of a pipeline. Made by :func:`pipeline`."""

    def __init__(
        self,
        model: LossModel,
        example: tuple[Sequence[Any], Mapping[str, Any]],
        compiler: Compiler,
        ranks: Ranks,
        table: ActionTable,
        splitting: Splitting,
    ) -> None:
        self._model = model
        self._table = table
        self.last_report = CompileReport(True, compiler.options.backend, compiler.options.reuse)
        self._ranks = ranks
        self._batch = Batch(example, table.num_micro_batches)
        args, kwargs = self._batch.first_micro_batch()
        captured, program = compiler.capture(model, args, kwargs, train=True)
        ranks.check_same(program, table)
        self._guard = Guard(model, captured, *torch_pytree.flatten((args, kwargs)))
        rates = CUDA_RATES if ranks.device.type == "cuda" else CPU_RATES
        bounded = splitting.memory_bytes_per_rank is not None
        trade_offs = compiler.recompute.trade_offs if bounded else None
        costs = CostModel(compiler.differentiator, rates, trade_offs)
        colors = colors_of(model, program, splitting, table, costs)
        stages = cut_program(program, colors, table.num_stages)
        recompute = StageRecompute(
            compiler,
            self.last_report,
            table,
            ranks.rank,
            differentiate_stages(stages, compiler.differentiator, halves=False),
            splitting.memory_bytes_per_rank if splitting.split == "auto" else None,
        )
        self._places = _places(program)
        self._names = [model_name(s.name) for s in program.sources if isinstance(s, ModelTensor)]
        with ranks.leader_first(compiler.cache_place):
            derived, order = self._fitted(compiler, stages, recompute)
        self.plan: PipelinePlan = make_plan(derived, table, costs, rates)
        self._sums = GradientSums()
        self._parameters = self._own_parameters()
        self._check_tensors(derived)
        self._steps = self._compile(compiler, order)
        from ...pipeline_parallel.stages.torch_pipelining import ClosureStage, Runner

        made = [ClosureStage(s, table.num_stages, ranks.device, ranks.group) for s in self._steps]
        self._runner = Runner(table, made)
        self._reduction = ranks.reduction(derived, table, self._sums)
        self._sums.allocate(len(ranks.rows))

    def share_optimizer(self) -> None:
        """Lets each replica hold and update a part of this rank's parameters."""
        shards = self._ranks.shards(self._sums)
        shards.take(self._present_parameters())
        self._reduction = replace(self._reduction, shards=shards)

    @property
    def shards(self) -> list[nn.Parameter]:
        """This replica's part of the parameters, for an optimizer that works element by element.

        After ``optimizer.step()`` the next :meth:`step` gathers the parts; :meth:`gather` does it
        at once.

        Raises:
            PipelineError: unless the pipeline was made with ``gradients="sharded"``.
        """
        return self._own_shards().parameters

    def gather(self) -> None:
        """Brings the parts of all replicas into the model's parameters; every rank calls it."""
        self._own_shards().gather(self._present_parameters())

    def _own_shards(self) -> Shards:
        if self._reduction.shards is None:
            raise PipelineError('Parameters are not shared out: pass gradients="sharded".')
        return self._reduction.shards

    def _present_parameters(self) -> dict[str, Tensor]:
        present = self._guard.tensors
        return {name: present[self._places[id(s)]] for name, s in self._parameters.items()}

    def _fitted(
        self, compiler: Compiler, stages: Sequence[Stage], recompute: StageRecompute
    ) -> tuple[list[StageDerivative], RankOrder]:
        """Differentiates all stages and plans this rank's; saves less until the plan fits."""
        table, rank = self._table, self._ranks.rank
        limit, held = recompute.limit_bytes, 0
        for attempt in range(_ATTEMPTS):
            derived = differentiate_stages(
                stages,
                compiler.differentiator,
                halves=table.splits_backward,
                chosen=recompute.chosen,
            )
            self._derived = [derived[s] for s in table.stages_of(rank)]
            order = rank_order(table, rank, boundaries_of(derived))
            self._planned = self._plan(compiler, order)
            held = 0 if self._planned is None else self._planned.held_bytes
            if limit is None or held <= limit:
                return derived, order
            recompute.tighten((attempt + 1) * (held - limit))
        raise PipelineError(
            f"A step of rank {rank} needs {held} bytes, and may hold {limit}. Allow more, or use "
            "more ranks or smaller micro-batches."
        )

    def _plan(self, compiler: Compiler, order: RankOrder) -> RankProgram | None:
        """Compiles all that this rank runs into one planned program, if that can be."""
        names = [s.name for d in self._derived for s in d.trained]
        first = len(self._places)
        sums = {name: first + i for i, name in enumerate(dict.fromkeys(names))}
        places = {
            d.stage.index: [
                *(self._places[id(s)] for s in d.stage.model_tensors),
                *(sums[s.name] for s in d.trained),
            ]
            for d in self._derived
        }
        self._sum_names = list(sums)
        return rank_program(compiler, self._derived, order, places, self.last_report)

    def _compile(self, compiler: Compiler, order: RankOrder) -> list[StageSteps]:
        """Makes what runs this rank's stages; closures that stages share are compiled once."""
        seed = 1.0 / self._table.num_micro_batches
        for derived in self._derived:
            for source, type_ in derived.trained_types:
                self._sums.add_parameter(source.name, type_)
        if self._planned is not None:
            progress = Progress(order)
            splits = self._table.splits_backward
            return [
                PlannedSteps(d, self._planned, progress, self._tensors_of(d.stage), seed, splits)
                for d in self._derived
            ]
        found: list[StageSteps] = []
        for derived, (runtime, halves) in zip(self._derived, self._runtimes(compiler), strict=True):
            tensors = self._tensors_of(derived.stage)
            found.append(UnplannedSteps(derived, runtime, halves, tensors, self._sums, seed))
        return found

    def _runtimes(self, compiler: Compiler) -> list[tuple[StageRuntime, list[Run | None]]]:
        """What runs each stage where memory is not planned: closures one by one."""
        programs = [p for d in self._derived for p in (d.forward, *d.backward) if p is not None]
        made = iter(compiler.executables(programs))
        found: list[tuple[StageRuntime, list[Run | None]]] = []
        for derived in self._derived:
            outputs = len(derived.stage.program.outputs)
            forward = next(made)
            parts = [None if p is None else next(made) for p in derived.backward]
            whole = None if derived.halves is not None or not parts else parts[0]
            runs = [None if p is None else p.run for p in parts] if derived.halves else []
            found.append((ReplayRuntime(forward, whole, outputs), list(runs)))
        return found

    def _tensors_of(self, stage: Stage) -> Callable[[], list[Tensor]]:
        places = [self._places[id(source)] for source in stage.model_tensors]

        def tensors() -> list[Tensor]:
            present = self._guard.tensors
            return [present[place] for place in places]

        return tensors

    def _own_parameters(self) -> dict[str, ModelTensor]:
        own = self._own_tensors()
        return {s.name: s for s in own if isinstance(s.tensor, nn.Parameter)}

    def _check_tensors(self, derived: Sequence[StageDerivative]) -> None:
        """What several ranks hold must start from the same values."""
        check_runnable(self._model)
        own = {s.name: s.tensor for s in self._own_tensors()}
        ranks: dict[str, set[int]] = {}
        for one in derived:
            for source in one.stage.model_tensors:
                ranks.setdefault(source.name, set()).add(self._table.rank_of[one.stage.index])
        shared = {n: t for n, t in own.items() if len(ranks[n]) > 1}
        self._ranks.check_same_tensors(shared, own)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields the parameters that this rank's stages use, under the model's own names."""
        for name, source in self._parameters.items():
            parameter = self._guard.tensors[self._places[id(source)]]
            assert isinstance(parameter, nn.Parameter)
            yield model_name(name), parameter

    def state_dict(self) -> dict[str, Tensor]:
        """Returns this rank's part of the model's state: its parameters and buffers, by name.

        The parts of all ranks together are the model's whole ``state_dict`` (what several ranks
        hold is in each of theirs), so a run may go on with another number of stages.
        """
        shards = self._reduction.shards
        if shards is not None and have_hooks(list(self._present_parameters().values())):
            raise PipelineError(
                'A parameter has a hook, and with gradients="sharded" no replica has its whole '
                'gradient. Remove the hook, or use gradients="replicated".'
            )
        if shards is not None and shards.is_ahead:
            raise PipelineError("The optimizer has changed the shards: call gather() on all ranks.")
        present = self._guard.tensors
        own = {id(present[self._places[id(s)]]) for s in self._own_tensors()}
        whole = self._model.model.state_dict(keep_vars=True)
        if self._ranks.rank == 0:  # what no stage uses is kept too
            own |= {id(t) for t in whole.values()} - set(map(id, present))
        return {name: t.detach() for name, t in whole.items() if id(t) in own}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Copies this rank's part out of a whole or a partial state of the model.

        Args:
            state: tensors by the model's own names; names of other ranks are ignored.

        Raises:
            PipelineError: if a tensor of this rank is missing or has another shape.
        """
        own = self.state_dict()
        copy_state(own, state)
        if self._reduction.shards is not None:
            self._reduction.shards.take(self._present_parameters())

    def save(self, folder: str | pathlib.Path) -> pathlib.Path:
        """Writes this rank's part to ``folder/stages-K.pt`` (its first stage is K)."""
        path = pathlib.Path(folder) / f"stages-{self._derived[0].stage.index}.pt"
        path.parent.mkdir(parents=True, exist_ok=True)
        if self._ranks.is_first_replica:
            torch.save(self.state_dict(), path)
        return path

    def load(self, folder: str | pathlib.Path) -> None:
        """Loads this rank's part from what the ranks of any pipeline of this model saved.

        Raises:
            PipelineError: if nothing was saved there, or a tensor is missing.
        """
        self.load_state_dict(read_parts(folder))

    def _own_tensors(self) -> list[ModelTensor]:
        return [s for d in self._derived for s in d.stage.model_tensors]

    @property
    def step_peak_bytes(self) -> int:
        """The most bytes that a step holds on this rank by plan: arenas and what travels.

        Parameters, gradient sums and the batch are not in it.

        Raises:
            PipelineError: if memory is not planned here (backend, device, a buffer that changes).
        """
        if self._planned is None:
            why = self.last_report.unplanned
            raise PipelineError(f"The memory of this rank's stages is not planned: {why}.")
        return self._planned.held_bytes

    @property
    def arena_bytes(self) -> int:
        """Bytes of this rank's arena; 0 before the first step."""
        return 0 if self._planned is None else self._planned.arena_bytes

    def measured_s(self) -> dict[tuple[int, str], float]:
        """Mean seconds of each kind of action so far, of all stages; every rank calls it.

        ``plan.simulated(pipe.measured_s())`` says how long a step takes if nothing else costs time.
        """
        own: dict[tuple[int, str], float] = {}
        for index, counts in self.counts.items():
            for kind, (number, total) in counts.seconds.items():
                own[index, kind] = total / number
        return self._ranks.merged(own)

    @property
    def counts(self) -> dict[int, StageCounts]:
        """For each stage of this rank, how often its steps have run."""
        return {s.derived.stage.index: s.counts for s in self._steps}

    @without_autocast
    def step(self, *args: Any, **kwargs: Any) -> Tensor | None:
        """Runs one training step; every rank calls it with the whole batch.

        ``.grad`` of this rank's parameters is set to the gradient of the mean loss; hooks on them
        run once per step.

        Returns:
            The mean loss of the micro-batches on ranks with the last stage, None elsewhere.

        Raises:
            PipelineError: if the batch does not fit, the model changed, or a rank failed.
        """
        shards = self._reduction.shards
        if shards is not None and have_hooks(list(self._present_parameters().values())):
            raise PipelineError(
                'A parameter has a hook, and with gradients="sharded" no replica has its whole '
                'gradient. Remove the hook, or use gradients="replicated".'
            )
        if shards is not None and shards.is_ahead:
            shards.gather(self._present_parameters())
        micro_batches = self._batch.split(args, kwargs)
        self._check(micro_batches[0])
        self._sums.start()
        if self._planned is not None:
            sums = [self._sums.buffers[name] for name in self._sum_names]
            self._planned.begin([*self._guard.tensors, *sums], self._names)
            self._sums.zero()
        users = [[x for x in leaves if isinstance(x, Tensor)] for leaves in micro_batches]
        losses = self._runner.step(users)
        self._sums.finish()
        with torch.no_grad():
            self._reduction.run()
            if shards is None:
                self._hand_out()
            return torch.stack(losses).mean() if losses else None

    def _check(self, leaves: Sequence[Any]) -> None:
        if not self._guard.accepts(list(leaves), self._batch.tree):
            raise PipelineError(
                "The batch or the model no longer fits what this pipeline was compiled for "
                "(shapes, dtypes, train/eval mode, attributes that forward reads). Make a new one."
            )

    def _hand_out(self) -> None:
        parameters, sums = self._present_parameters(), self._sums.buffers
        given = {p: sums[name] for name, p in parameters.items() if sums.get(name) is not None}
        if have_hooks(list(given)):
            pass_through_autograd(list(given), list(given.values()))
            return
        for parameter, gradient in given.items():
            if parameter.grad is not gradient:
                parameter.grad = gradient


def _places(program: Program) -> dict[int, int]:
    """Where each of the program's model tensors is among them."""
    own = [s for s in program.sources if isinstance(s, ModelTensor)]
    return {id(source): place for place, source in enumerate(own)}
