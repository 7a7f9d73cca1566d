"""The ranks of a pipeline: process groups, checks that ranks agree, and sums of gradients."""

from __future__ import annotations

import datetime
import hashlib
import math
import platform
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..reuse.errors import LazyInlineError, PipelineError
from ..reuse.ir.printer import text_to_compare
from ..reuse.ir.program import Program
from ..reuse.ir.types import TensorType, in_own_storage
from ..reuse.process import package_digest
from .actions import ActionTable
from .stage_derivative import StageDerivative


class GradientSums:
    """Sums the gradients of micro-batches, one buffer per parameter, given types by name.

    Two stages of one rank that use the same parameter share its buffer. The buffers of one dtype
    are parts of one flat tensor, so that replicas sum them in one all-reduce.
    """

    def __init__(self, types: Mapping[str, TensorType]) -> None:
        self.buffers: dict[str, Tensor] = {}
        self.flat: list[Tensor] = []
        kinds: dict[tuple[torch.dtype, torch.device], list[str]] = {}
        for name, type_ in types.items():
            kinds.setdefault((type_.dtype, type_.device), []).append(name)
        for (dtype, device), names in kinds.items():
            sizes = [math.prod(types[n].shape) for n in names]
            self.flat.append(torch.zeros(sum(sizes), dtype=dtype, device=device))
            for name, part in zip(names, self.flat[-1].split(sizes), strict=True):
                # ``torch.save`` of one gradient would write the whole flat tensor otherwise.
                buffer = part.as_strided(types[name].shape, types[name].stride)
                self.buffers[name] = in_own_storage(buffer)

    def zero(self) -> None:
        """Sets all buffers to zero, because a step adds to them."""
        for flat in self.flat:
            flat.zero_()


PIPELINE_DIM = "pipeline"
DATA_DIM = "data"


@dataclass(frozen=True)
class Ranks:
    """This rank's place in its pipeline, and its process groups."""

    # The global ranks of each pipeline, in the order of their stages.
    rows: tuple[tuple[int, ...], ...]
    group: Any  # the ranks of this pipeline
    # The ranks that hold the same stages in other pipelines; None if there are none.
    data_group: Any
    rank: int  # this rank's number in its pipeline
    device: torch.device  # the device that it computes on
    timeout: datetime.timedelta  # how long it waits for another rank
    # How many pipelines have batches of their own, over which gradients are averaged.
    num_batches: int = 1

    @property
    def num_ranks(self) -> int:
        """The number of ranks of one pipeline."""
        return len(self.rows[0])

    def merged(self, own: Mapping[Any, Any]) -> dict[Any, Any]:
        """Gathers the mappings of all ranks of the pipeline into one."""
        everyone = _gathered(dict(own), self.group)
        return {key: value for part in everyone for key, value in part.items()}

    def check_same_program(
        self, program: Program | None, asked: Mapping[str, Any], why: str
    ) -> None:
        """Raises PipelineError on every rank if programs or options of ranks differ.

        Without a program, the options identify it.
        """
        own = {
            "torch": str(torch.__version__),
            "lazyinline (its code)": package_digest()[:12],
            "Python": ".".join(platform.python_version_tuple()[:2]),
            **asked,
        }
        if program is not None:
            # Only a digest is sent to all ranks, because the text of a large model is megabytes.
            digest = hashlib.sha256(text_to_compare(program).encode()).hexdigest()
            own["model (its captured program)"] = digest[:12]
        self.compare(own, f"Ranks do not agree, {why}")

    def check_same_values(
        self, tensors: Mapping[str, Tensor], text: str, group: Any = None
    ) -> None:
        """Raises PipelineError on every rank of a group if tensors of one name differ."""
        self.compare({n: _digest(t) for n, t in tensors.items()}, text, group)

    def compare(self, own: Mapping[str, Any], text: str, group: Any = None) -> None:
        """Raises PipelineError on every rank of a group if values of one name differ."""
        everyone = _gathered(dict(own), self.group if group is None else group)
        different = []
        for key in dict.fromkeys(k for other in everyone for k in other):
            values: dict[Any, list[int]] = {}
            for rank, other in enumerate(everyone):
                if key in other:
                    values.setdefault(other[key], []).append(rank)
            if len(values) > 1:
                rows = [f"{v!r} on rank(s) {r}" for v, r in values.items()]
                different.append(f"{key}: {', '.join(rows)}")
        if different:
            raise PipelineError(f"{text}. {'; '.join(different[:5])}.")

    def agreed_reason(self, own: str) -> str:
        """Returns the first reason of any rank of all pipelines; empty if none has one."""
        return next(filter(None, _gathered(own, None)), "")

    @contextmanager
    def leader_first(self, place: str) -> Iterator[None]:
        """Runs the body on one rank per place first, then on the other ranks of the pipeline.

        The others find what the first one left there, such as compiled kernels. Ranks that share a
        cache have one place, and "" shares none.
        """
        everyone = _gathered(place or f"rank {self.rank}", self.group)
        # The leader enters the barrier after its turn, the others before theirs.
        leads = everyone.index(everyone[self.rank]) == self.rank
        if not leads:
            with _explained("while another rank compiled", self.group):
                dist.barrier(group=self.group)
        try:
            yield
        finally:
            if leads:
                dist.barrier(group=self.group)

    def broadcast(self, value: Tensor | None, type_: TensorType, rank: int) -> Tensor:
        """Returns one rank's tensor on all ranks of the pipeline."""
        if value is None:
            value = torch.empty(type_.shape, dtype=type_.dtype, device=self.device)
        row = next(row for row in self.rows if dist.get_rank() in row)
        with _explained(f"in the broadcast from rank {row[rank]}", self.group):
            dist.broadcast(value, row[rank], group=self.group)
        return value

    def reduction(
        self, users: Mapping[str, tuple[int, ...]], types: Mapping[str, TensorType]
    ) -> Reduction:
        """Returns what sums gradients over the ranks that use a parameter; a collective.

        The types are of the gradients that are summed outside of the arenas of ranks.
        """
        groups: dict[tuple[int, ...], Any] = {}
        for members in dict.fromkeys(users[name] for name in types if len(users[name]) > 1):
            subsets = [[row[m] for m in members] for row in self.rows]
            groups[members] = _member_group(subsets, self.timeout)
        own = {name: type_ for name, type_ in types.items() if self.rank in users[name]}
        shared = {name: groups[users[name]] for name in own if len(users[name]) > 1}
        return Reduction(GradientSums(own), shared, self)


@dataclass(frozen=True)
class Reduction:
    """Sums gradients over ranks after a step.

    ``shared`` has, for each parameter that ranks of other stages use too, the group of those ranks.
    """

    sums: GradientSums
    shared: Mapping[str, Any]
    ranks: Ranks

    def run(self) -> None:
        """Sums over stages, then over replicas; PipelineError if another rank has ended."""
        for name, group in self.shared.items():
            with _explained(f"in the sum of the gradient of {name} over its stages", group):
                dist.all_reduce(self.sums.buffers[name], group=group)
        replicas = self.ranks.data_group
        for flat in self.sums.flat if replicas is not None else ():
            with _explained("in the sum of gradients over replicas", replicas):
                dist.all_reduce(flat, group=replicas)
                flat.div_(self.ranks.num_batches)

    def total_norm(self, gradients: Iterable[tuple[str, Tensor]]) -> Tensor:
        """Returns the norm of the gradients of all ranks; one that several share counts once."""
        total = torch.zeros((), dtype=torch.float64, device=self.ranks.device)
        for name, gradient in gradients:
            norm: Any = torch.linalg.vector_norm(gradient, dtype=torch.float64)
            # For a DTensor, the norm over all its shards.
            square = (norm if type(norm) is Tensor else norm.full_tensor()) ** 2
            shared = self.shared.get(name)
            total += square if shared is None else square / dist.get_world_size(shared)
        group = self.ranks.group
        with _explained("in the sum of the norms of stages", group):
            dist.all_reduce(total, group=group)
        return total.sqrt().float()

    def agree_on_largest(self, flags: dict[Any, Tensor]) -> None:
        """Sets this rank's flag to the largest of all ranks of the pipeline."""
        device, group = self.ranks.device, self.ranks.group
        flag = flags.setdefault(device, torch.zeros((), device=device))
        with _explained("in the agreement on infinite gradients", group):
            dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group)


@contextmanager
def _explained(where: str, group: Any) -> Iterator[None]:
    """Turns an error of a collective into a PipelineError that says what this rank was doing."""
    try:
        yield
    except RuntimeError as error:
        raise PipelineError(stopped(where, group, error)) from error


def stopped(where: str, group: Any, error: BaseException) -> str:
    """Returns the text of an error, with what this rank was doing and with which ranks."""
    ranks = ", ".join(map(str, dist.get_process_group_ranks(group)))
    text = f"Rank {dist.get_rank()} stopped {where} (ranks {ranks}). {first_line(error)}"
    if isinstance(error, LazyInlineError):  # which says what to look at
        return text
    return f"{text} If one of them has ended or hangs, look at its output first."


def first_line(error: BaseException) -> str:
    """Returns an error's class and the first line of its text."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def check_processes(error: LazyInlineError) -> None:
    """Raises an error, with advice, if there is no process group."""
    if not dist.is_available() or not dist.is_initialized():
        raise type(error)(
            f"{error} Start the script with torchrun --nproc-per-node N script.py and call "
            'torch.distributed.init_process_group("gloo") (or "nccl") first.'
        )


def ranks_of(mesh: Any, timeout_s: float) -> Ranks:
    """Returns this rank's place; a collective that every rank takes part in.

    The mesh has a dimension "pipeline" and perhaps "data"; without a mesh, all ranks are one
    pipeline. Raises PipelineError if there is no process group, or the mesh has other dimensions.
    """
    needed = "A pipeline runs on several processes, and torch.distributed is not initialized."
    check_processes(PipelineError(needed))
    if mesh is None:
        return _place([tuple(range(dist.get_world_size()))], [], 1, timeout_s)
    names = tuple(mesh.mesh_dim_names or ())
    _check_names(names)
    num_pipelines = mesh.size() // mesh.size(names.index(PIPELINE_DIM))
    return ranks_along(mesh, PIPELINE_DIM, (DATA_DIM,), num_pipelines, timeout_s)


def all_ranks(device: torch.device) -> Ranks:
    """Returns this rank's place among all ranks, as one pipeline in the default group."""
    everyone = tuple(range(dist.get_world_size()))
    return Ranks((everyone,), None, None, dist.get_rank(), device, datetime.timedelta())


def ranks_elsewhere(sizes: Mapping[str, int], timeout_s: float) -> Ranks:
    """Returns the place of the first rank of a pipeline whose processes do not exist.

    Raises PipelineError if it has other dimensions, or a size is not a positive integer.
    """
    _check_names(tuple(sizes))
    if not all(type(size) is int and size > 0 for size in sizes.values()):
        raise PipelineError(f"mesh={dict(sizes)!r} is not the number of ranks of each dimension.")
    number, replicas = sizes[PIPELINE_DIM], sizes.get(DATA_DIM, 1)
    rows = (tuple(range(i * number, (i + 1) * number)) for i in range(replicas))
    timeout = datetime.timedelta(seconds=timeout_s)
    return Ranks(tuple(rows), None, None, 0, torch.device("cpu"), timeout, replicas)


def _check_names(names: Sequence[str]) -> None:
    if PIPELINE_DIM not in names or set(names) - {PIPELINE_DIM, DATA_DIM}:
        raise PipelineError(
            f"The mesh has the dimensions {names}. A pipeline needs one named {PIPELINE_DIM!r} and "
            f"takes one named {DATA_DIM!r}; make it with init_device_mesh(..., mesh_dim_names=...)."
        )


def ranks_along(
    mesh: Any, pipeline: str, replicas: Collection[str], num_batches: int, timeout_s: float
) -> Ranks:
    """Returns this rank's place in the pipeline along one dimension of a mesh; a collective.

    Along the dimensions ``replicas``, ranks sum their gradients after a step, as the mean over
    ``num_batches`` batches.
    """
    return _place(_lines(mesh, (pipeline,)), _lines(mesh, replicas), num_batches, timeout_s)


def _lines(mesh: Any, dims: Collection[str]) -> list[tuple[int, ...]]:
    """Returns the sets of ranks that differ along these dimensions alone."""
    own = [i for i, name in enumerate(mesh.mesh_dim_names) if name in dims]
    moved = mesh.mesh.movedim(own, list(range(-len(own), 0)))
    return [tuple(line) for line in moved.reshape(-1, math.prod(map(mesh.size, own))).tolist()]


def _place(
    rows: Sequence[tuple[int, ...]],
    columns: Sequence[tuple[int, ...]],
    num_batches: int,
    timeout_s: float,
) -> Ranks:
    timeout = datetime.timedelta(seconds=timeout_s)
    me = dist.get_rank()
    row = next(r for r in rows if me in r)
    group = _member_group(rows, timeout)
    is_summed = any(len(column) > 1 for column in columns)
    data_group = _member_group(columns, timeout) if is_summed else None
    device = torch.device("cpu")
    if dist.get_backend(group) == "nccl":
        device = torch.device("cuda", torch.cuda.current_device())
    place = row.index(me)
    return Ranks(tuple(rows), group, data_group, place, device, timeout, num_batches)


def _gathered(own: object, group: Any) -> list[Any]:
    """Gathers an object from each rank of a group."""
    everyone: list[Any] = [None] * dist.get_world_size(group)
    with _explained("where ranks compare what they have", group):
        dist.all_gather_object(everyone, own, group=group)
    return everyone


def _member_group(sets: Iterable[Sequence[int]], timeout: datetime.timedelta) -> Any:
    """Makes a process group of each set of ranks; returns the one of this rank."""
    own = None
    # ``new_group`` is a collective of all ranks, also of those that are not in the group.
    for ranks in sets:
        group = dist.new_group(list(ranks), timeout=timeout)
        if dist.get_rank() in ranks:
            own = group
    return own


def users_of(
    derived: Sequence[StageDerivative], table: ActionTable
) -> tuple[dict[str, tuple[int, ...]], dict[str, TensorType]]:
    """Returns the ranks that use each tensor of the model, and the type of each gradient."""
    ranks: dict[str, set[int]] = {}
    for one in derived:
        for source in one.stage.model_tensors:
            ranks.setdefault(source.name, set()).add(table.rank_of[one.stage.index])
    types = {source.name: type_ for one in derived for source, type_ in one.trained_types}
    return {n: tuple(sorted(r)) for n, r in ranks.items()}, types


def _digest(tensor: Tensor) -> str:
    flat = tensor.detach().reshape(-1).contiguous().cpu()
    return hashlib.sha256(flat.view(torch.uint8).numpy().tobytes()).hexdigest()[:12]
