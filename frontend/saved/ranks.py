"""A pipeline as the parts of a file, and back: ranks meet, and each has its stages and tensors."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from ...autodiff.derivative import Derivative
from ...autodiff.leaf_derivative import Request
from ...backend.files.container import CallError, Content, Parts, reason_of, to_json, write_parts
from ...backend.files.torch_store import open_cache
from ...pipeline_parallel.actions import ActionTable
from ...pipeline_parallel.cut import Colors, Stage
from ...pipeline_parallel.mesh.plan import REPLICATED
from ...pipeline_parallel.process_groups import (
    DATA_DIM,
    PIPELINE_DIM,
    Ranks,
    all_ranks,
    ranks_along,
    ranks_of,
)
from ...pipeline_parallel.stage_derivative import Halves, StageDerivative
from ...reuse.errors import FileError
from ...reuse.ir.program import Call, Closure, Composite, Program, Value, tensor_type
from ..mesh_placement import stage_dimension
from ..passes.programs import PARTS
from ..passes.rank import RankCompilation, part_name
from ..pipeline import table_of
from .parts import (
    BOUNDARY,
    CAPTURED,
    KeptProgram,
    derivative_data,
    program_parts,
    read_runs,
    take_made,
)

Made = TypeVar("Made")

_MAX_ACTIONS = 2**17  # of each kind: a schedule is laid out in full
_WAIT_S = 0.01
_OF_ALL = ("model.json", f"programs/0/{CAPTURED}.txt")
_SHARED = (*_OF_ALL, "objects/")


class Arrivals:
    """Tells the other ranks, in the default group's store, whether this rank opened a file.

    Not a collective: a rank that cannot read its file does not know whether the file is for one
    process or for all ranks. So it leaves a note under the path and the number of its try. Ranks
    that wait at the same try of the same path find it. All ranks count the same number of meetings.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._store: Any = None
        group: Any = dist.group.WORLD if dist.is_available() else None
        if group is None or dist.get_world_size() == 1 or dist.get_backend() == "fake":
            return
        store, me = group.get_group_store(), dist.get_rank()
        if store is not None:  # ranks that are threads have none
            with suppress(dist.DistError):  # if the other ranks have ended
                tried = store.add(f"lazyinline/tried {me} {os.fspath(path)!r}", 1)
                self._note = f"lazyinline/cannot {tried} {os.fspath(path)!r}"
                self._met, self._store = f"lazyinline/met {me}", store

    def __enter__(self) -> Arrivals:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if self._store is not None and isinstance(error, FileError):
            with suppress(dist.DistError):
                self._store.set(self._note, f"rank {dist.get_rank()} says: {error}")

    def meet(self) -> None:
        """Waits until all ranks have opened a file; FileError if one cannot, or not in time."""
        store, self._store = self._store, None  # later errors show in collectives
        if store is None:
            return
        number, me = store.add(self._met, 0), dist.get_rank()
        opened = [f"lazyinline/opened {number} {rank}" for rank in range(dist.get_world_size())]
        store.set(opened[me], "")
        limit_s = store.timeout.total_seconds()
        deadline = time.monotonic() + limit_s
        while True:
            # In this order, because a rank that left a note may open the file at its next try.
            are_all_here = store.check(opened)
            if store.check([self._note]):
                store.delete_key(opened[me])
                raise CallError(store.get(self._note).decode())
            if are_all_here:
                break
            if time.monotonic() > deadline:
                missing = [rank for rank, key in enumerate(opened) if not store.check([key])]
                raise CallError(f"rank(s) {missing} have not opened it within {limit_s:.0f} s")
            time.sleep(_WAIT_S)
        store.add(self._met, 1)


def together(
    ranks: Ranks, make: Callable[[], Made], why: Callable[[Exception], str] = reason_of
) -> Made:
    """Runs a function on each rank; a collective: if it fails on one, FileError on all."""
    made, cause, said = None, None, ""
    try:
        made = make()
    except Exception as error:  # a file may hold anything, so any error is the file's
        cause, said = error, why(error)
    if said := ranks.agreed_reason(said):
        raise CallError(said) from cause
    return cast(Made, made)


def _as_it_is(error: Exception) -> str:
    return str(error) if isinstance(error, FileError) else f"{type(error).__name__}: {error}"


def place_of(position: int) -> str:
    """Returns the folder of a rank's parts, by its position among the ranks of a file."""
    return f"ranks/{position}/"


def stage_place(index: int) -> str:
    """Returns the folder of a stage's parts, in its rank's."""
    return f"programs/0/stages/{index}/"


# ---- to a file -----------------------------------------------------------------------------------


def ranks_data(table: ActionTable, ranks: Ranks, colors: Colors | None) -> Any:
    """Returns the schedule, the sizes of a pipeline and the stage of each call, as JSON data."""
    sizes = table.num_stages, ranks.num_ranks, table.num_micro_batches, len(ranks.rows)
    return [table.schedule, sizes, ranks.timeout.total_seconds(), colors]


def save_together(
    path: str | os.PathLike[str], row: Sequence[int], make: Callable[[], Mapping[str, Content]]
) -> None:
    """Writes the parts of the ranks in ``row``, on the first of them; a collective of all ranks."""
    ranks, me = all_ranks(torch.device("cpu")), dist.get_rank()
    parts = together(ranks, lambda: make() if me in row else {}, _as_it_is)
    whole = {  # a memoryview cannot be sent
        name: [one if isinstance(one, bytes) else bytearray(one) for one in content]
        for name, content in parts.items()
    }
    everyone: list[Any] | None = [None] * dist.get_world_size() if me == row[0] else None
    dist.gather_object(whole, everyone, dst=row[0])
    merged = {n: c for rank in row for n, c in everyone[rank].items()} if everyone else {}
    together(ranks, lambda: write_parts(path, merged, open_cache()) if merged else None, _as_it_is)


def placed(parts: Mapping[str, Content], position: int) -> dict[str, Content]:
    """Returns the parts of a rank by their paths; the first rank also has the common parts."""
    own = place_of(position)
    names = {n: n if n.startswith(_SHARED) else own + n for n in parts}
    return {to: parts[n] for n, to in names.items() if position == 0 or to not in _OF_ALL}


def stage_parts(
    kept: KeptProgram, state: RankCompilation, one: StageDerivative
) -> Iterator[tuple[str, Content]]:
    """Yields the parts of a stage."""
    place = stage_place(one.stage.index)
    yield place + BOUNDARY, [to_json(derivative_data(one.derivative))]
    own = [state.programs[part_name(one, kind)] for kind in one.parts]
    if one.halves is not None and one.derivative is not None:
        own[1:] = [_joined(one.halves, one.derivative, *own)]
    runs = dict(zip(PARTS, own, strict=False))
    for name, content in program_parts(kept, runs, state.context.recorded, None):
        yield name if name.startswith("objects/") else place + name, content


def _joined(halves: Halves, derivative: Derivative, forward: Program, *parts: Program) -> Program:
    """Returns a backward in halves as one program, which calls those that there are."""
    results, programs = forward.outputs, iter(parts)
    kept = [results[-1], *(forward.inputs[i] for i in derivative.kept_inputs)]
    kept += [results[i] for i in derivative.kept_outputs]
    cotangents = [tensor_type(results[i]).cotangent() for i in derivative.cotangent_outputs]
    inputs = tuple(map(Value, [*(value.type for value in kept), *cotangents]))
    calls, outputs, carried = list[Call](), list[Value](), tuple[Value, ...]()
    for name, half, taken, number in (
        ("early", halves.early, halves.early_inputs, len(halves.early_outputs)),
        ("late", halves.late, halves.late_inputs, len(halves.late_outputs)),
    ):
        if half is not None:
            closure = Composite(name, next(programs))
            made = tuple(map(Value, closure.output_types))
            calls.append(Call(closure, (*carried, *(inputs[i] for i in taken)), made))
            outputs += made[:number]
            carried = made[number:]
    return Program(inputs, tuple(calls), tuple(outputs))


# ---- from a file ---------------------------------------------------------------------------------


def check_number(number: int, what: str) -> None:
    """Raises FileError unless there are ``number`` ranks."""
    there = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 0
    if there != number:
        raise CallError(
            f"it is {what}, and torch.distributed has {there} rank(s) here: start {number} "
            f"(torchrun --nproc-per-node {number}), and call init_process_group first"
        )


def read_ranks(said: Any, meet: Callable[[], None], mesh: Any = None) -> tuple[Ranks, ActionTable]:
    """Returns the ranks of the pipeline, and the table of their actions; a collective.

    ``said`` is the result of :func:`ranks_data`; ``mesh`` is what stages are sharded over, with its
    pipeline dimension. Raises FileError if the number of ranks differs from the file's.
    """
    _, (_, ranks, _, replicas), timeout_s, _ = said
    table = read_table(said)
    what = f"a pipeline of {ranks} rank(s) in {replicas} replica(s)"
    check_number(ranks * replicas, what)
    meet()
    if mesh is not None:
        dim = stage_dimension(mesh)
        assert dim is not None
        found = ranks_along(mesh, dim, REPLICATED, 1, timeout_s)
        if (found.num_ranks, len(found.rows)) != (ranks, replicas):
            raise FileError(f"it is {what}, and its mesh is another")
        return found, table
    if replicas > 1:
        from torch.distributed.device_mesh import init_device_mesh

        names = (DATA_DIM, PIPELINE_DIM)
        mesh = init_device_mesh("cpu", (replicas, ranks), mesh_dim_names=names)
    return ranks_of(mesh, timeout_s), table


def read_table(said: Any) -> ActionTable:
    """Returns the table of actions, by PyTorch's schedule; FileError for invalid sizes."""
    schedule, sizes, timeout_s, _ = said
    stages, ranks, micro_batches, replicas = sizes
    whole = all(type(size) is int and size > 0 for size in sizes)
    most = stages * max(micro_batches, replicas) if whole else 0
    if not 0 < most <= _MAX_ACTIONS or not 0 < timeout_s < 1e9:
        raise FileError(f"there is no pipeline of such sizes: {str(sizes)[:80]}")
    return table_of(str(schedule), stages, ranks, micro_batches)


def read_colors(said: Any, num_stages: int) -> Colors:
    """Returns the stage of each call; FileError if there is no such stage."""
    if any(type(one) is int and not 0 <= one < num_stages for one in said):
        raise FileError(f"a call is on none of its {num_stages} stages")
    return tuple(one if type(one) is int else read_colors(one, num_stages) for one in said)


def read_stages(
    state: RankCompilation,
    parts: Parts,
    local: Callable[[Stage], tuple[str, dict[str, Any]]] | None = None,
    *,
    trusted: bool,
) -> list[StageDerivative]:
    """Reads and checks the derivatives of all stages of a pipeline, after the pass ``split``.

    The operators of other ranks' stages are not checked, only the types that they send and sum.
    Over a mesh, ``local`` returns a stage's folder and arguments of ``read_runs``.
    """
    found: list[StageDerivative] = []
    arriving: tuple[int, ...] = (0,)  # result 0 of the last stage is the loss
    own = state.table.stages_of(state.rank)
    for stage in reversed(state.stages):
        is_own, rank = stage.index in own, state.table.rank_of[stage.index]
        before, more = (place_of(rank), dict[str, Any]()) if local is None else local(stage)
        place, more["trusted"] = before + stage_place(stage.index), trusted or not is_own
        read = read_runs(parts, place, stage.program, parts.json(place + BOUNDARY), **more)
        stage = replace(stage, program=read.captured)
        # Over a mesh the file says the types of what is sent.
        if found and stage.sent_types != found[0].stage.received_types:
            raise FileError(f"stage {stage.index} sends other types than the next one takes")
        if trusted and is_own:
            take_made(state, parts, place, read)
        derivative, taken = read.derivative, arriving
        gradients: tuple[int, ...] = ()
        if derivative is None:
            stage = replace(stage, program=read.runs[PARTS[0]])
        else:
            gradients, taken = derivative.gradient_inputs, derivative.cotangent_outputs
        are_sent = set(taken) <= set(arriving) and (stage.num_sent or taken == arriving)
        if not are_sent or list(gradients) != sorted(set(gradients)):
            raise FileError(f"stage {stage.index} has gradients of what nobody sends")
        sent = tuple(i for i in gradients if i < stage.num_received)
        halves = None
        if state.table.splits_backward and derivative is not None:
            halves = _halves_of(derivative.backward, len(sent))
        request = Request(Composite("stage", stage.program), (), ())
        found.insert(0, StageDerivative(stage, derivative, request, halves, sent, arriving))
        arriving = sent
    return found


def _halves_of(backward: Closure, num_sent: int) -> Halves:
    """Returns the halves that a program of :func:`_joined` calls; FileError if it is another."""
    assert isinstance(backward, Composite)
    program, calls, found = backward.program, iter(backward.program.calls), []
    places = {value: place for place, value in enumerate(program.inputs)}
    sides = tuple(range(num_sent)), tuple(range(num_sent, len(program.outputs)))
    carried = tuple[Value, ...]()
    for side in sides:
        call = next(calls, None) if side else None
        args, results = ((), ()) if call is None else (call.args, call.results)
        first, carried, number = carried, results[len(side) :], len(carried)
        is_sound = args[:number] == first and places.keys() >= {*args[number:]}
        if not is_sound or results[: len(side)] != tuple(program.outputs[i] for i in side):
            raise FileError("a backward in halves calls other programs than these")
        half = None if call is None else call.closure
        found.append((half, tuple(places[v] for v in args[number:])))
    (early, early_inputs), (late, late_inputs) = found
    return Halves(early, late, early_inputs, late_inputs, *sides)
