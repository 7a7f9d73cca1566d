"""``fit(model, args, mesh=...)``: predicts the memory of one rank of a mesh, without ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from torch import nn

from ..backend.gpu.targets import CONTEXT_BYTES, GIB, Target, predict, target_named
from ..pipeline_parallel.actions import schedule_name
from ..pipeline_parallel.mesh.layouts import Links
from ..pipeline_parallel.plan import PipelinePlan, make_plan
from ..recompute.planner import PolicyName
from ..reuse.errors import PlanError, door
from ..reuse.ir.costs import Cost
from ..reuse.ir.program import Program
from .capture.blocks import Reuse
from .compiler import PASSES
from .mesh_placement import AskedPlan, Plan, stage_dimension
from .onnx_file import copied
from .options import Batching, LossFunction, LossModel, Options, split_batch
from .passes.context import Context
from .passes.link import launched
from .passes.mesh import REDUCTION, rank_memory, rank_moves, rank_traffic, sharded_step
from .passes.rank import RankCompilation, Split, Splitting, part_name, started
from .passes.stages import of_rank
from .passes.state import Subject, between, run, step_goal
from .pipeline import table_of
from .refusals import check_example

if TYPE_CHECKING:
    from ..pipeline_parallel.mesh.layouts import Axis
    from ..pipeline_parallel.mesh.traffic import Collective, RankMemory, ShardedStep

NCCL_BYTES = 2 * 32 * 4 * 2**20
"""Memory of NCCL for a group of ranks, about: 32 channels (``NCCL_MAX_NCHANNELS``), each with a
buffer of 4 MiB (``NCCL_BUFFSIZE``) to each of two neighbours. (NCCL's guide, environment variables)
"""


@dataclass(frozen=True)
class Fit:
    """Whether a step fits on each rank of a mesh. ``print(fit)`` shows it.

    Attributes:
        target: the GPU.
        limit_bytes: the memory that a rank may use.
        way: the plan and the recompute policy, in words.
        mesh: the size of each dimension, by name.
        step: the placements and collectives; for stages, of the rank that holds most.
        memory: the memory of that rank.
        seconds: the least time of a step, by the roofline of its launches.
        pipeline: the stages and their predicted time, if the mesh has a pipeline dimension.
        instead: if it does not fit, the fastest other way that does, of those tried.
    """

    target: Target
    limit_bytes: int
    way: str
    mesh: Mapping[str, int]
    step: ShardedStep
    memory: RankMemory
    seconds: float
    pipeline: PipelinePlan | None = None
    instead: Fit | None = None

    @property
    def fits(self) -> bool:
        """Whether a rank has enough memory."""
        return self.memory.num_bytes <= self.limit_bytes

    def __str__(self) -> str:
        axes = " x ".join(f"{name} {size}" for name, size in self.mesh.items())
        lines = [f"{axes}, each rank a {self.target.board}; {self.way}; compiled, not run"]
        lines += [f"  {n:<12}{b / GIB:8.2f} GiB  {_WHAT[n]}" for n, b in vars(self.memory).items()]
        left = self.limit_bytes - self.memory.num_bytes
        verdict = f"fits, {left / GIB:.2f} are left" if left >= 0 else "does NOT fit"
        held = self.memory.num_bytes / GIB
        lines.append(f"  {'in all':<12}{held:8.2f} GiB  of {self.limit_bytes / GIB:.2f}: {verdict}")
        moved = self.step.num_bytes / GIB
        lines.append(f"  a step takes {self.seconds:.3g} s at least and moves {moved:.2f} GiB")
        if (stages := self.pipeline) is not None:
            table, most = stages.table, max(one.in_flight for one in stages.stages)
            lines.append(
                f"  {table.schedule} of {table.num_stages} stages, {table.num_micro_batches} "
                f"micro-batches, {most} in flight at most; {stages.bubble:.1%} of it is bubble"
            )
        if self.instead is not None:
            lines += ["what fits:", str(self.instead)]
        elif not self.fits:
            lines.append("nothing that was tried fits: take more ranks, or a smaller batch")
        return "\n".join(lines)


_WHAT = {
    "parameters": "parts of parameters and buffers",
    "gradients": "parts of gradients",
    "batch": "rows of the batch",
    "arena": "activations, results of collectives, scratch: planned",
    "launches": "allocated by launches: attention, cuBLAS",
    "optimizer": "the optimizer's tensors",
    "outside": "CUDA context, NCCL: not measured",
}


@door
def fit(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    mesh: Mapping[str, int],
    target: str,
    plan: Plan = None,
    memory_bytes_per_rank: int | None = None,
    micro_batches: int = 1,
    schedule: str = "1F1B",
    num_stages: int | None = None,
    split: Split = "auto",
    recompute: PolicyName | None = None,
    optimizer_tensors: int = 2,
    loss_fn: LossFunction | None = None,
    links: Links | None = None,
    reuse: Reuse = "auto",
) -> Fit:
    """Predicts the memory of a rank of a mesh in a training step; runs nothing.

    One rank's program is compiled and its memory planned as :func:`parallelize` would on that GPU;
    for a pipeline, the program of each of its ranks, with equal blocks compiled once. No GPU and
    no other process is needed, and the model may be on the meta device. If the step does not fit,
    more recompute and the plan of ``plan="auto"`` are tried.

    Args:
        model: the whole model; see :func:`parallelize`.
        args: an example of the whole batch; only layouts matter.
        kwargs: its keyword inputs.
        mesh: the size of each dimension, by name.
        target: the GPU of a rank, ``"cuda:sm_90"``.
        plan: see :func:`parallelize`.
        memory_bytes_per_rank: by default the memory of the GPU, less a margin.
        micro_batches: the number of parts of the batch.
        schedule: for a pipeline; see :func:`parallelize`.
        num_stages: for a pipeline, a multiple of its ranks; by default one per rank.
        split: how the model is cut into stages: ``"auto"``, ``"even"`` or ``"marked"``.
        recompute: ``"selective"`` or ``"full"``.
        optimizer_tensors: how many tensors of a parameter's size the optimizer holds: two for
            AdamW with ``fused=True``, none for SGD.
        loss_fn: computes the scalar loss from the model's output.
        links: rates of the mesh, as :func:`measure_links` returned or wrote them; by default those
            of this package.
        reuse: ``"auto"``, ``"marked"`` or ``"off"``, as in ``compile``.

    Raises:
        PlanError: if the model cannot be split so, or torch.distributed is initialized here.
        PipelineError: if it cannot be cut into these stages, or the schedule refuses them.

    Example:
        >>> with torch.device("meta"):
        ...     model, ids = Llama(layers=32), torch.zeros(16, 8192, dtype=torch.long)
        >>> print(lazyinline.fit(model, (ids, ids), mesh={"fsdp": 8}, target="cuda:sm_90"))
    """
    check_example("fit", model, args)
    batching = Batching(micro_batches)
    # A copy, because a step takes micro-batches in storage of their own, not views.
    first = copied(split_batch(args, kwargs or {}, micro_batches)[0])
    subject = Subject(LossModel(model, loss_fn), *first)
    machine = mesh, target_named(target), memory_bytes_per_rank, optimizer_tensors, reuse, links
    stages = schedule_name(schedule), num_stages, Splitting(split)
    offline = _Offline(subject, batching, *machine, *stages)
    asked = offline.fit(plan, recompute)
    if asked.fits:
        return asked
    more = _BY_COST[_BY_COST.index(recompute) + 1 :]
    ways = (offline.fit(plan, policy) for policy in ([] if plan == "auto" else more))
    found = [*islice((one for one in ways if one.fits), 1), *offline.found()]
    return replace(asked, instead=min(found, key=lambda one: one.seconds, default=None))


@dataclass(frozen=True)
class _Offline:
    """Compiles the program of one rank for different plans and recompute policies."""

    subject: Subject
    batching: Batching
    mesh: Mapping[str, int]
    target: Target
    memory_bytes: int | None
    optimizer_tensors: int
    reuse: Reuse
    links: Links | None
    schedule: str
    num_stages: int | None
    splitting: Splitting

    def __post_init__(self) -> None:
        held, limit = self.optimizer_tensors, self.memory_bytes
        if held < 0 or (limit is not None and limit <= 0):
            raise PlanError(
                f"optimizer_tensors={held} and memory_bytes_per_rank={limit}: the first is at "
                "least 0, and the second more."
            )

    @property
    def limit_bytes(self) -> int:
        # ``RankMemory`` includes the CUDA context.
        return self.memory_bytes or self.target.usable_bytes + CONTEXT_BYTES

    def found(self) -> Iterator[Fit]:
        """Yields the plan found by ``"auto"`` that fits, if there is one."""
        room_bytes = None
        for _ in range(_ATTEMPTS):
            try:
                one = self.fit("auto", None, room_bytes)
            except PlanError:  # no plan fits
                return
            if one.fits:
                yield one
                return
            # The search ignores scratch inside closures, so the next one gets less room.
            num_ranks = 1 if one.pipeline is None else len(one.pipeline.table.ranks)
            held_bytes = one.step.layouts.held_bytes // num_ranks
            room_bytes = held_bytes - (one.memory.num_bytes - self.limit_bytes)

    def fit(self, plan: Plan, recompute: PolicyName | None, room_bytes: int | None = None) -> Fit:
        """Compiles a plan; with ``"auto"``, one within ``room_bytes``."""
        # Imported late: DTensor takes as long to import as all of lazyinline.
        from ..pipeline_parallel.mesh.plan import check_mesh
        from ..pipeline_parallel.mesh.torch_collectives import absent_ranks

        options = Options(
            reuse=self.reuse, recompute=recompute, cache="disk", target=self.target.name
        )
        # Only the search for a plan needs rates.
        links = self.links if plan == "auto" else None
        way = "the plan that was found" if plan == "auto" else "the plan as given"
        with absent_ranks(self.mesh) as mesh:
            check_mesh(mesh, any_names=plan == "auto")
            asked = AskedPlan(mesh, plan, room_bytes, options, links)
            dim = stage_dimension(mesh)
            found = self._step(asked) if dim is None else self._stages(asked, dim)
        if again := recompute or found.step.layouts.recompute:
            way += f", recompute {again}"
        return replace(found, way=way)

    def _step(self, asked: AskedPlan) -> Fit:
        state = asked.step(self.subject, step_goal(self.batching))
        with state.context.cached(state.report):
            state = run(PASSES, state)
        step = sharded_step(state)
        assert state.report.gpu is not None
        seconds = self._taken_s(state.report.gpu.prediction.cost.seconds, step.collectives)
        return self._said(step, seconds)

    def _stages(self, asked: AskedPlan, dim: str) -> Fit:
        """Compiles the stages of all ranks of a pipeline; returns the fit of the largest."""
        from ..pipeline_parallel.mesh.traffic import ShardedStep

        on_mesh, context = asked.stages(self.subject), Context(asked.options)
        num_ranks, number = self.mesh[dim], self.batching.micro_batches
        table = table_of(self.schedule, self.num_stages or num_ranks, num_ranks, number)
        axis = self._axes[list(self.mesh).index(dim)].rates
        rates = replace(
            self.target.rates,
            transfer_bytes_per_s=axis.bytes_per_s,
            transfer_latency_s=axis.latency_s,
        )
        state = started(context, self.subject, table, 0, self.splitting, rates, on_mesh)
        with state.context.cached(state.report):
            state = run(between(PASSES, last="shard"), state)
            # Kernels are kept per closure, so those of equal blocks are made only once.
            ranks = [
                run(between(PASSES, "lower", "link"), of_rank(state, rank))
                for rank in range(num_ranks)
            ]
        if why := next((one.unplanned for one in ranks if one.unplanned), None):
            raise PlanError(f"A stage for a GPU needs a memory plan, and has none: {why.reason}.")
        costs = {program: cost for one in ranks for program, cost in self._costs(one)}
        plan = make_plan(state.derived, table, costs.__getitem__, rates)
        moved = [rank_moves(one, dim) for one in ranks]
        reduced = [[c for c in one if c.part == REDUCTION] for one in moved]
        seconds = plan.step_s + max(self._taken_s(0.0, one) for one in reduced)
        steps = map(partial(ShardedStep, state.layouts), moved, map(rank_memory, ranks))
        found = [self._said(step, seconds) for step in steps]
        return replace(max(found, key=lambda one: one.memory.num_bytes), pipeline=plan)

    def _costs(self, rank: RankCompilation) -> Iterator[tuple[Program, Cost]]:
        """Yields the cost of each part of a rank's stages per micro-batch, with collectives."""
        traffic = rank_traffic(rank)
        for one in rank.own:
            for kind, program in one.parts.items():
                lists = launched(rank, [rank.flats[part_name(one, kind)]])
                cost = predict(lists, self.target).cost
                seconds = self._taken_s(cost.seconds, traffic[program])
                yield program, replace(cost, seconds=seconds)

    def _said(self, step: ShardedStep, seconds: float) -> Fit:
        assert step.memory is not None
        memory = replace(
            step.memory,
            optimizer=self.optimizer_tensors * step.memory.gradients,
            outside=CONTEXT_BYTES + NCCL_BYTES * len(self.mesh),
        )
        return Fit(self.target, self.limit_bytes, "", self.mesh, step, memory, seconds)

    @cached_property
    def _axes(self) -> Sequence[Axis]:
        from ..pipeline_parallel.mesh.planner import axes_of_mesh

        return axes_of_mesh(list(self.mesh), list(self.mesh.values()), "cuda", self.links)

    def _taken_s(self, compute_s: float, collectives: Iterable[Collective]) -> float:
        """Returns the predicted seconds of launches and collectives.

        That is the time of launches and collectives without overlap, or of all collectives in
        sequence, whichever is longer.
        """
        from ..pipeline_parallel.mesh.layouts import Moves

        moves, places = Moves(self._axes), {name: i for i, name in enumerate(self.mesh)}
        taken = [
            (sum(moves.step_s(c.kind, places[c.axis], c.num_bytes)), c.num_beside)
            for c in collectives
        ]
        alone_s = sum(seconds for seconds, num_beside in taken if not num_beside)
        return max(compute_s + alone_s, sum(seconds for seconds, _ in taken))


_BY_COST: tuple[PolicyName | None, ...] = (None, "selective", "full")
_ATTEMPTS = 4
