"""``parallelize(model, args, mesh=...)``: a training step that is sharded over a device mesh."""

from __future__ import annotations

import hashlib
import itertools
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..autodiff.flows import Draws
from ..autodiff.training_program import Sums
from ..backend.arena import ArenaPlan
from ..backend.kernels.lower import BackendName
from ..backend.run.leases import Lease
from ..backend.run.planned import PlannedProgram
from ..pipeline_parallel.mesh.layouts import Links
from ..pipeline_parallel.mesh.plan import REPLICATED
from ..pipeline_parallel.process_groups import Ranks, all_ranks, check_processes, ranks_along
from ..recompute.planner import Policy
from ..reuse import torch_pytree
from ..reuse.errors import PlanError, door
from ..reuse.ir.leaf import without_autocast
from ..reuse.ir.printer import text_to_compare
from ..reuse.ir.program import ModelTensor, tensor_type
from ..reuse.ir.types import in_own_storage
from .autograd.torch_engine import have_hooks, set_gradients
from .capture.blocks import Reuse
from .compiler import PASSES, made_by
from .guard import Guard
from .mesh_placement import (
    AskedPlan,
    MeshParameters,
    gradient_of,
    local_part,
    part_of,
    parts_elsewhere,
    stage_dimension,
)
from .options import Batch, Batching, LossFunction, LossModel, Options, check_count
from .page.page import compile_page, write_page
from .page.sections import mesh_section
from .passes.context import Context
from .passes.mesh import rank_orders, sharded_step, sharder_of
from .passes.programs import PARTS, tensor_name
from .passes.rank import Split, Splitting
from .passes.state import Compilation, State, Subject, between, run, step_goal
from .pipeline import (
    AskedPipeline,
    Elsewhere,
    KeptRank,
    Pipeline,
    check_sums,
    made_elsewhere,
    table_of,
)
from .refusals import check_example, check_leaves, check_runnable
from .tracing.torch_state import mode_around, refuse_mode

_State = TypeVar("_State")


@door
def parallelize(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    mesh: Any,
    plan: Mapping[str, Any] | Literal["auto"] | None = None,
    memory_bytes_per_rank: int | None = None,
    links: Links | None = None,
    micro_batches: int = 1,
    sums: Sums = "as_gradients",
    schedule: str = "1F1B",
    num_stages: int | None = None,
    split: Split = "auto",
    loss_fn: LossFunction | None = None,
    recompute: Policy = None,
    reuse: Reuse = "auto",
    backend: BackendName = "inductor",
    timeout_s: float = 300.0,
) -> ParallelStep | ParallelPipeline | Elsewhere:
    """Compiles a training step over a device mesh; call it on every rank alike.

    The model's parameters become DTensors in place, with the values of rank 0: make the optimizer
    afterwards. (For ranks on other machines they are not changed.) Numbers are those of a single
    process under any plan, including random draws.

    Args:
        model: the whole model, the same on every rank. Returns a scalar loss, or an output with
            ``.loss``.
        args: an example of the whole batch; only layouts matter.
        kwargs: its keyword inputs.
        mesh: a ``DeviceMesh`` of all ranks. Its dimension ``"data"`` (``dp``, ``dp_replicate``)
            splits the batch, ``"fsdp"`` (``dp_shard``) the batch and, between uses, parameters,
            ``"tensor"`` (``tp``) what the plan says, ``"pipeline"`` (``pp``) the model into stages.
            ``{"data": 2, "tensor": 2}`` compiles for ranks on other machines, to be saved.
        plan: ``ColwiseParallel``, ``RowwiseParallel``, ``SequenceParallel`` by patterns of module
            paths, as in torchtitan; :func:`.marks.shard` pins more, and the rest follows by
            DTensor's rules. ``"auto"`` finds the fastest plan, for dimensions of any name.
        memory_bytes_per_rank: with ``"auto"``, the bytes that a rank may hold, including two
            optimizer tensors per parameter; ``recompute`` is then chosen too, unless it is given.
        links: with ``"auto"``, rates of the mesh as :func:`measure_links` returned or wrote them.
        micro_batches: each tensor of the batch is split along dimension 0 into so many parts.
        sums: as in :func:`compile_step`; a pipeline supports only ``"as_gradients"``.
        schedule: for a pipeline, as in :func:`.pipeline`.
        num_stages: for a pipeline, by default one per rank.
        split: for a pipeline, as in :func:`.pipeline`.
        loss_fn: computes the scalar loss from the model's output.
        recompute: ``"selective"`` or ``"full"``, as in ``compile``, decided on global shapes.
        reuse: as in ``compile``.
        backend: as in ``compile``.
        timeout_s: for a pipeline, how long a transfer may wait for another rank.

    Raises:
        PlanError: if the model cannot be split so.
        PipelineError: if ranks differ in model or versions.

    Example:
        >>> mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        >>> parallel = lazyinline.parallelize(model, (ids, targets), mesh=mesh, plan=plan)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> loss = parallel.step(ids, targets)
        >>> optimizer.step()
    """
    check_example("parallelize", model, args)
    check_count(micro_batches)
    batch = Batch((args, kwargs or {}), micro_batches)
    options = Options(reuse=reuse, backend=backend, recompute=recompute, cache="disk")
    whole = LossModel(model, loss_fn)
    subject = Subject(whole, *batch.first_micro_batch())
    is_elsewhere = isinstance(mesh, Mapping)
    with _mesh_of(mesh, any_names=plan == "auto") as mesh:
        _check_devices(model, mesh)
        asked = AskedPlan(mesh, plan, memory_bytes_per_rank, options, links)
        # Without stages a step is one program, whose arena also holds the micro-batches.
        batching = Batching(micro_batches, "forward_first", sums)
        if (dim := stage_dimension(mesh)) is None:
            state = asked.step(subject, step_goal(batching))
            return step_elsewhere(state) if is_elsewhere else ParallelStep(model, batch, state)
        check_sums(sums)
        on_mesh = asked.stages(subject)  # first, so that errors of the mesh precede the schedule's
        ranks = ranks_along(mesh, dim, REPLICATED, 1, timeout_s)
        number = ranks.num_ranks
        table = table_of(schedule, num_stages or number, number, micro_batches)
        context, splitting = Context(options), Splitting(split)
        pipe = AskedPipeline(whole, batch, context, ranks, table, splitting, on_mesh)
        if not is_elsewhere:
            return ParallelPipeline(pipe)
        made = made_elsewhere(pipe, _of_each_rank)
        return Elsewhere([_kept(whole, guard, one, at, pipe) for at, guard, one in made])


def for_checkpoint(state: _State) -> _State:
    """Returns a state that ``torch.distributed.checkpoint`` saves and loads under any plan.

    A joint projection is sharded in each of its parts, which a checkpoint could not express. The
    tensors share memory with the originals, so loading into them loads model and optimizer.

    Args:
        state: the state of a model or an optimizer, or a dictionary of several.

    Example:
        >>> state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        >>> dcp.save(lazyinline.for_checkpoint(state), checkpoint_id=folder)
    """
    # Imported late: DTensor takes as long to import as all of lazyinline.
    from ..pipeline_parallel.mesh.torch_parts import with_pieces

    return with_pieces(state)


@contextmanager
def _mesh_of(asked: Any, *, any_names: bool) -> Iterator[Any]:
    """Yields the given mesh, or a mesh of absent ranks for a dictionary of sizes."""
    from ..pipeline_parallel.mesh.plan import check_mesh
    from ..pipeline_parallel.mesh.torch_collectives import absent_ranks

    is_elsewhere = isinstance(asked, Mapping)
    if not is_elsewhere:
        needed = "A mesh is of several processes, and torch.distributed is not initialized."
        check_processes(PlanError(needed))
    with absent_ranks(asked) if is_elsewhere else nullcontext(asked) as mesh:
        check_mesh(mesh, any_names=any_names)
        yield mesh


def _check_devices(model: nn.Module, mesh: Any) -> None:
    """Raises PlanError if model and mesh do not fit together, or the model has no data."""
    num_ranks = dist.get_world_size()
    if mesh.size() != num_ranks:
        raise PlanError(
            f"The mesh has {mesh.size()} ranks, and there are {num_ranks} processes. A step is "
            "split over all of them."
        )
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if hasattr(tensor, "placements"):
            raise PlanError(
                f"{name} is a DTensor: the model is parallelized already, by parallelize, "
                "fully_shard or parallelize_module. Build it anew."
            )
        if tensor.device.type != mesh.device_type:
            raise PlanError(
                f"{name} is on {tensor.device}, and the mesh is of {mesh.device_type} devices. "
                f'Move the model there first: model.to("{mesh.device_type}").'
            )
    check_runnable(model)


class ParallelStep:
    """One rank's part of a step over a mesh. Made by :func:`parallelize`.

    Args:
        model: the model to train.
        batch: splits a batch into micro-batches.
        state: the state before the first pass; before ``lower``, if loaded from a file.
        read: parameters loaded from a file, by name, in place of the model's own.
        together: runs a function that may fail on a file: if it fails on one rank, all raise.

    Attributes:
        model: holds the parameters, as DTensors, for an optimizer and for checkpoints.
        plan: the placements and collectives; ``print(parallel.plan)`` shows them.
        last_report: the report of the compile.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Batch,
        state: Compilation,
        read: Mapping[str, Tensor] | None = None,
        together: Callable[[Callable[[], Compilation]], Compilation] = lambda make: make(),
    ) -> None:
        self.model, self._batch = model, batch
        self._mesh = state.on_mesh.mesh
        self._num_parts = state.goal.batching.micro_batches
        device = torch.device(self._mesh.device_type)
        self._agreement = _Agreement(self._mesh)
        state = together(partial(self._compiled, state))
        assert isinstance(state.runs, PlannedProgram)
        self.last_report, self._runner, self._step = state.report, state.runs, state.step
        self._layout_of = state.layouts
        # Without memory: the search for a memory plan ends by time, so plans of ranks may differ.
        order = [(one.kind, one.axis, one.num_bytes) for one in self.plan.collectives]
        self._agreement.check_plans({"plan": f"{replace(self.plan, memory=None)}\n{order}"})
        self._draws = bool(Draws().of(self._step.program.calls))
        sources = [s for s in state.captured.program.sources if isinstance(s, ModelTensor)]
        names = [tensor_name(s.name) for s in sources]
        check_leaves([(names[i], sources[i].tensor) for i in self._step.gradients])
        subject = state.subject
        assert subject is not None
        flat = torch_pytree.flatten((subject.args, subject.kwargs))
        self._guard = Guard(subject.model, state.captured, *flat)
        self._parameters = MeshParameters(model, self._mesh, self._layout_of, read=read)
        self._own = [self._parameters.of(source.tensor) for source in sources]
        self._trained = [self._own[i] for i in self._step.gradients]
        self._lease: Lease | None = None
        self._staged: list[Tensor] = []
        self._given: list[Tensor] = []
        self._lowered = replace(state, subject=None, flats={}, runs=None)
        seed = tensor_type(self._step.program.inputs[-1])
        self._seed = torch.full((), 1.0 / self._num_parts, dtype=seed.dtype, device=device)

    def _compiled(self, state: Compilation) -> Compilation:
        ranks, first = self._agreement.ranks, "lower"
        if state.composed is None:
            first, state = "plan", run(between(PASSES, "capture", "derive"), state)
            asked = {"mesh": str(self._mesh.mesh.tolist()), "micro_batches": self._num_parts}
            asked["sums"] = state.goal.batching.sums
            why = "so their parts would not fit together"
            ranks.check_same_program(state.programs[PARTS[0]], asked, why)
        # Ranks that share a cache compile in turn: the others find what the first one built.
        place = state.context.cache_place
        with ranks.leader_first(place), state.context.cached(state.report):
            state = run(between(PASSES, first, "link"), state)
        state.report.made = made_by(state)
        self.plan = sharded_step(state)  # raises if nothing waits for a collective
        return state

    @without_autocast()
    @door
    def step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Runs one training step; call it on every rank with the whole batch.

        ``.grad`` of each parameter is set to this rank's part of the gradient of the mean loss, a
        DTensor with the placements of the parameter.

        Returns:
            The mean loss of the micro-batches, the same on every rank.

        Raises:
            PlanError: if the batch does not fit, the model changed, or a rank failed.
        """
        refuse_mode(mode_around())
        self._agreement.settle()
        parts = self._batch.split(args, kwargs)
        self._parameters.check_present()
        with self._parameters.as_captured():
            fits = self._guard.accepts(list(parts[0]), self._batch.tree)
        if not fits:
            raise PlanError(
                "The batch or the model no longer fits what this step was compiled for (shapes, "
                "dtypes, train/eval mode, attributes that forward reads). Parallelize it anew."
            )
        self._agreement.check_batch(parts, draws=self._draws)
        with torch.no_grad(), self._agreement.collectives():
            self._take(parts)
            outputs = self._leased().runners[0]([])
            self._write(outputs)
            self._hand_out(outputs)
            return torch.stack(list(outputs[: self._num_parts])).mean()

    @property
    def kept(self) -> list[KeptRank]:
        """Returns what a file holds of this rank."""
        own, placed = (self.model, self._guard, self._lowered), self._parameters
        at, plans = (self._mesh, self._mesh.get_rank()), self._runner.plans
        return [KeptRank(*own, *at, placed.part_of, placed.as_captured, plans=plans)]

    def save_html(self, path: str | os.PathLike[str]) -> None:
        """Writes a page: placements and collectives, the program, its memory, its passes.

        Args:
            path: the file to write.

        Example:
            >>> parallel.save_html("parallel.html")
        """
        plan, page = self.plan, compile_page(self.last_report)
        memory = {} if plan.memory is None else vars(plan.memory)
        page["mesh"] = mesh_section(plan.layouts, {"": plan.collectives}, memory)
        pathlib.Path(path).write_text(write_page(page), encoding="utf-8")

    def _take(self, parts: Sequence[Sequence[Any]]) -> None:
        """Copies this rank's rows of the batch in."""
        users = [
            ([x for x in leaves if isinstance(x, Tensor)][u], self._layout_of.batch[u])
            for leaves, row in zip(parts, self._step.batch, strict=True)
            for u in row
        ]
        own = [part_of(tensor, self._mesh, layout) for tensor, layout in users]
        if not self._staged:
            values = self._step.program.inputs[: len(own)]
            self._staged = [tensor_type(value).empty() for value in values]
        for staged, tensor in zip(self._staged, own, strict=True):
            # Copied, because the step is bound to one address, and callers may free their tensors.
            staged.copy_(tensor)

    def _leased(self) -> Lease:
        """Returns the lease, a new one if the parameters moved."""
        tensors = [*self._staged, *map(local_part, self._own), self._seed]
        if self._lease is None or not self._lease.is_bound_to(tensors):
            self._lease, self._given = None, []  # released before another one is made
            self._lease = self._runner.lease(tensors)
        return self._lease

    def _write(self, outputs: Sequence[Tensor]) -> None:
        """Writes the new values of the model's buffers that its forward changes."""
        states = outputs[len(outputs) - len(self._step.writes) :]
        for index, state in zip(self._step.writes, states, strict=True):
            local_part(self._own[index]).copy_(state)

    def _hand_out(self, outputs: Sequence[Tensor]) -> None:
        if have_hooks(self._trained):
            raise PlanError(
                "A parameter has a hook, and a step over a mesh runs none. Do that between the "
                "step and the optimizer's."
            )
        # Made once, because every step writes each gradient at the same address.
        if not self._given:
            made = outputs[self._num_parts : self._num_parts + len(self._trained)]
            self._given = list(map(gradient_of, self._trained, map(in_own_storage, made)))
        set_gradients(self._trained, self._given)


class ParallelPipeline(Pipeline):
    """One rank's part of a pipeline over a mesh. Made by :func:`parallelize`.

    The parameters of this rank's stages become DTensors over the mesh without the pipeline
    dimension. Those of other stages are not changed, and get no gradient. ``read`` has parameters
    loaded from a file, by name, in place of the model's own.
    """

    def __init__(self, asked: AskedPipeline, read: Mapping[str, Tensor] | None = None) -> None:
        self._read = read or {}
        super().__init__(asked)
        state = self._made
        self._mesh, self._batch_placements = state.on_mesh.mesh, state.layouts.batch
        self._agreement = _Agreement(self._mesh)
        # A loaded pipeline compares less: to predict other ranks would read all their operators.
        moved = str(state.layouts) if asked.opened else self.plan.moved_text
        self._agreement.check_plans({"plan": moved, **rank_orders(state)})
        own = {id(source.tensor) for source in self._own_tensors()}
        self._on_mesh = MeshParameters(asked.model.model, self._mesh, state.layouts, own, read)
        self._read = {}
        self._tensors = [self._on_mesh.of(tensor) for tensor in self._guard.tensors]
        self._given: dict[Tensor, Tensor] = {}

    @without_autocast()
    @door
    def step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Runs one training step, as that of a :class:`ParallelStep`; it raises PipelineError."""
        self._agreement.settle()
        with self._agreement.collectives():
            loss = super().step(*args, **kwargs)
        return self._ranks.broadcast(loss, self._loss_type, self._table.rank_of[-1])

    @property
    def kept(self) -> list[KeptRank]:
        """Returns what a file holds of this rank."""
        own, mesh = (self._model.model, self._guard, self._made), self._made.on_mesh.whole
        at, placed = (mesh, mesh.get_rank()), self._on_mesh
        return [KeptRank(*own, *at, placed.part_of, placed.as_captured, asked=self._asked)]

    def _first_value(self, source: ModelTensor) -> Tensor:
        return local_part(self._read.get(tensor_name(source.name), source.tensor))

    def state_dict(self) -> dict[str, Tensor]:
        """Returns this rank's part, which ``torch.distributed.checkpoint`` saves and loads."""
        return for_checkpoint(super().state_dict())

    def _held(self) -> Sequence[Tensor]:
        return self._tensors

    def _local(self) -> Sequence[Tensor]:
        return list(map(local_part, self._tensors))

    def _rows(self, leaves: Sequence[Any]) -> list[Tensor]:
        pairs = zip(super()._rows(leaves), self._batch_placements, strict=True)
        # Cloned, because a part of a tensor may have gaps, but closures take contiguous inputs.
        return [part_of(tensor, self._mesh, placements).clone() for tensor, placements in pairs]

    def _check(self, micro_batches: Sequence[Sequence[Any]]) -> None:
        self._on_mesh.check_present()
        with self._on_mesh.as_captured():
            super()._check(micro_batches)
        self._agreement.check_batch(micro_batches, draws=bool(self._draws))

    def _gradient(self, parameter: Tensor, summed: Tensor) -> Tensor:
        if parameter not in self._given:
            self._given[parameter] = gradient_of(parameter, summed)
        return self._given[parameter]


class _Agreement:
    """Checks that all ranks of a mesh do the same.

    ``settle`` waits for collectives that a failed step left unfinished; ``collectives`` is a
    context in which those of a program run over the mesh.
    """

    def __init__(self, mesh: Any) -> None:
        from ..pipeline_parallel.mesh import torch_collectives

        self.settle = torch_collectives.settle
        groups = torch_collectives.groups_of(mesh)
        self.collectives = partial(torch_collectives.collectives_over, groups)
        self.ranks: Ranks = all_ranks(torch.device(mesh.device_type))
        self._is_checked = False

    def check_plans(self, plans: Mapping[str, str]) -> None:
        """Raises PipelineError if plans of one name differ."""
        text = "Ranks have different plans, so their collectives would not meet"
        digests = {n: hashlib.sha256(plan.encode()).hexdigest()[:12] for n, plan in plans.items()}
        self.ranks.compare(digests, text)

    def check_batch(self, parts: Sequence[Sequence[Any]], *, draws: bool) -> None:
        """Raises PipelineError if the first batches differ, or the states of random generators."""
        if not self._is_checked:
            flat = enumerate(x for leaves in parts for x in leaves if isinstance(x, Tensor))
            text = "Ranks were given different batches; every rank passes the whole batch"
            self.ranks.check_same_values({f"tensor {i}": t for i, t in flat}, text)
            self._is_checked = True
        if draws:
            text = "Ranks would draw different random numbers; seed them alike"
            self.ranks.check_same_values({"random state": torch.get_rng_state()}, text)


def step_elsewhere(state: Compilation) -> Elsewhere:
    """Compiles the step of each rank of a mesh; programs that ranks share are compiled once."""
    subject, linked = state.subject, dict[str, Compilation]()
    assert subject is not None
    kept = []
    with state.context.cached(state.report):
        state = run(between(PASSES, last="decompose"), state)
        sources = [s for s in state.captured.program.sources if isinstance(s, ModelTensor)]
        own = [sources[i] for i in state.step.gradients]
        check_leaves([(tensor_name(s.name), s.tensor) for s in own])
        flat = torch_pytree.flatten((subject.args, subject.kwargs))
        guard = Guard(subject.model, state.captured, *flat)
        for coordinate, one in _of_each_rank(state):
            one = run(between(PASSES, "shard", "shard"), one)
            text = text_to_compare(one.programs["step"])
            if text not in linked:
                linked[text] = run(between(PASSES, "lower", "link"), one)
            runs = linked[text].runs
            assert isinstance(runs, PlannedProgram)
            lowered = replace(linked[text], subject=None, flats={}, runs=None, sharder=None)
            kept.append(_kept(subject.model, guard, lowered, coordinate, plans=runs.plans))
    return Elsewhere(kept)


def _of_each_rank(state: State) -> Iterator[tuple[tuple[int, ...], State]]:
    """Yields the state for each rank of the mesh, while this process acts as that rank."""
    from ..pipeline_parallel.mesh.sharded import Ends
    from ..pipeline_parallel.mesh.torch_collectives import become, forget_meshes

    mesh, ends = state.on_mesh.mesh, Ends()
    coordinates = list(itertools.product(*map(range, mesh.shape)))
    # First and last rank first: closures that are equal on both are equal on all ranks.
    for coordinate in dict.fromkeys((coordinates[0], coordinates[-1], *coordinates)):
        become(mesh, coordinate)
        forget_meshes()  # DTensor caches the sizes of parts, which may differ between ranks
        sharder = state.sharder if coordinate == coordinates[0] else None
        sharder = sharder or sharder_of(state, ends)
        yield coordinate, replace(state, sharder=sharder)
        if len(ends.sharders) < 2:
            ends.sharders.append(sharder)
    become(mesh, coordinates[0])


def _kept(
    whole: nn.Module,
    guard: Guard,
    lowered: Any,
    coordinate: Sequence[int],
    asked: AskedPipeline | None = None,
    plans: Sequence[ArenaPlan] = (),
) -> KeptRank:
    """Returns what a file holds of the rank at a coordinate of the mesh without pipeline."""
    assert isinstance(whole, LossModel)
    on_mesh, place = lowered.on_mesh, list(coordinate)
    mesh = on_mesh.whole or on_mesh.mesh
    if asked is not None:
        place.insert(mesh.mesh_dim_names.index(stage_dimension(mesh)), lowered.rank)
    at = mesh, int(mesh.mesh[tuple(place)])
    part_of = parts_elsewhere(whole.model, lowered.layouts, coordinate)
    return KeptRank(whole.model, guard, lowered, *at, part_of, asked=asked, plans=plans)
