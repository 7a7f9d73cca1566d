"""A device mesh in a file: the placements of tensors, and the parts of each rank."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ...backend.files.container import CallError, Parts
from ...pipeline_parallel.actions import ActionTable
from ...pipeline_parallel.cut import Stage
from ...pipeline_parallel.mesh.layouts import WHOLE, split
from ...pipeline_parallel.mesh.plan import PIPELINE, MeshPlan, Placements
from ...pipeline_parallel.mesh.torch_collectives import COLLECTIVES, OWN, check_collective
from ...pipeline_parallel.mesh.torch_parts import distributed
from ...pipeline_parallel.mesh.torch_sharding import local_type, replicated
from ...pipeline_parallel.mesh.torch_sharding_rules import layout_of, placement
from ...pipeline_parallel.process_groups import Ranks
from ...reuse.errors import FileError
from ...reuse.ir import program as ir
from ...reuse.ir.types import TensorType, Type, contiguous_stride
from ..mesh_placement import AskedPlan, without_stages
from ..options import Batching, Options
from ..passes.programs import PARTS, tensor_name
from ..passes.state import OnMesh
from ..pipeline import KeptRank
from .parts import BOUNDARY, STEP, ReadProgram, read_texts, step_of
from .ranks import place_of

MAX_MICRO_BATCHES = 2**17  # a step has calls for each of them
_LAYOUT = re.compile(r"R|S(\d{1,2})(?:/(\d{1,4}))?", re.ASCII)

# ---- to a file -----------------------------------------------------------------------------------


def mesh_data(kept: KeptRank) -> Any:
    """Returns a mesh, its ranks and the placements on it, as JSON data."""
    plan, mesh = kept.lowered.layouts, kept.mesh
    axes = tuple(zip(mesh.mesh_dim_names, mesh.mesh.shape, strict=True))
    lies = {name: _text(layout) for name, layout in plan.parameters.items()}
    batch = list(map(_text, plan.batch))
    return [axes, kept.row, lies, batch, plan.whole, plan.table]


def _text(layout: Placements) -> str:
    return ",".join(map(str, map(layout_of, layout)))


# ---- from a file ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class SavedMesh:
    """The mesh of a file, and the placements of tensors on it."""

    plan: MeshPlan  # the placements, on the dimensions other than the pipeline's
    axes: Sequence[tuple[str, int]]  # all dimensions, including the pipeline's
    row: Sequence[int]  # the ranks, in the order of the mesh
    given: DeviceMesh | None  # the mesh that the user passed, if any

    @classmethod
    def read(cls, said: Any, given: DeviceMesh | None, *, has_stages: bool) -> SavedMesh:
        """Reads the result of :func:`mesh_data`; FileError if it is not a mesh, or not as given."""
        axes, row, lies, batch, whole, table = said
        names, sizes = [name for name, _ in axes], [size for _, size in axes]
        sound = all(type(n) is str and n for n in names) and len(set(names)) == len(names)
        sound = sound and all(type(size) is int and 0 < size < 2**20 for size in sizes)
        axes = tuple(zip(names, sizes, strict=True))
        own = tuple(axis for axis in axes if axis[0] not in PIPELINE)
        sound = sound and bool(own) and len(axes) - len(own) == has_stages
        sound = sound and len(row) == math.prod(sizes)  # before the list, whose size is unchecked
        if not sound or sorted(row) != list(range(len(row))):
            raise FileError(f"there is no mesh of such dimensions and ranks: {str(axes)[:80]}")
        plan = MeshPlan(
            own,
            {name: _layout(text, len(own)) for name, text in lies.items()},
            tuple(_layout(text, len(own)) for text in batch),
            whole=tuple(map(str, whole)),
            table=str(table),
        )
        if given is None:
            return cls(plan, axes, row, None)
        found = tuple(zip(given.mesh_dim_names or (), given.mesh.shape, strict=False))
        if (found, given.device_type) != (axes, "cpu"):
            text = f"{MeshPlan(found).mesh_text} on {given.device_type}"
            expected = f"a mesh of {MeshPlan(axes).mesh_text} on cpu"
            raise CallError(f"it is for {expected}, and mesh= is {text}: leave mesh= out")
        # Its ranks may be in another order, because parts are found by position in the mesh.
        return cls(plan, axes, given.mesh.flatten().tolist(), given)

    @cached_property
    def whole(self) -> DeviceMesh:
        """The mesh of all ranks; if it was not given, it is made, which is a collective."""
        names, sizes = zip(*self.axes, strict=True)
        ranks = torch.tensor(self.row, device="cpu").reshape(sizes)
        return self.given or DeviceMesh("cpu", ranks, mesh_dim_names=names)

    @cached_property
    def mesh(self) -> DeviceMesh:
        """This rank's sub-mesh, without the pipeline dimension."""
        has_stages = len(self.axes) > len(self.plan.axes)
        own: DeviceMesh = without_stages(self.whole) if has_stages else self.whole
        return own

    def place_of(self, rank: int) -> str:
        """Returns the folder of a rank's parts."""
        return place_of(self.row.index(rank))

    def on_mesh(self, options: Options) -> OnMesh:
        """Returns the mesh and the costs for compiling."""
        costs = AskedPlan(self.mesh, None, None, options).costs()
        return OnMesh(self.mesh, lambda *_: self.plan, None, costs, self.whole)

    def localized(self, program: ir.Program) -> ir.Program:
        """Returns a program whose inputs have the types of this rank's parts.

        Raises FileError if a tensor cannot be split by its placements.
        """
        inputs, whole = [], replicated(self.mesh)
        for source, value in zip(program.sources, program.inputs, strict=True):
            # A tensor that the plan does not name is whole on each rank.
            layout = whole
            if isinstance(source, ir.ModelTensor):
                layout = self.plan.parameters.get(source.name, whole)
            elif isinstance(source, ir.UserInput):
                if source.index >= len(self.plan.batch):
                    raise FileError(f"nothing says how {source.name} of the batch lies")
                layout = self.plan.batch[source.index]
            type_ = ir.tensor_type(value)
            _check_split(layout, self.mesh.mesh.shape, type_.shape)
            inputs.append(ir.Value(local_type(type_, self.mesh, layout)))
        return replace(program, inputs=tuple(inputs))

    def parameters(
        self, read: Mapping[str, torch.Tensor], types: Mapping[str, TensorType]
    ) -> dict[str, torch.Tensor]:
        """Returns the parameters whose parts were read, as DTensors; ``types`` are global types."""
        return {name: self._parameter(name, part, types.get(name)) for name, part in read.items()}

    def _parameter(self, name: str, local: torch.Tensor, whole: TensorType | None) -> torch.Tensor:
        layout, sizes = self.plan.parameters[name], self.mesh.mesh.shape
        if whole is None:  # no program uses it, so its type was not checked
            shape = list(local.shape)
            for one, size in zip(map(layout_of, layout), sizes, strict=True):
                if one is not None and one.is_split:
                    shape[one.dim] *= size
            _check_split(layout, sizes, shape)
            stride = contiguous_stride(tuple(shape))
            whole = TensorType(local.dtype, tuple(shape), stride, local.device)
        return distributed(local, self.mesh, layout, whole)

    def stages(
        self, captured: ir.Program, ranks: Ranks, table: ActionTable, *, trusted: bool
    ) -> Callable[[Stage], tuple[str, dict[str, Any]]]:
        """Returns a function from a stage to its folder and arguments of ``read_runs``."""
        local = self.localized(captured)
        types = {
            s.name if isinstance(s, ir.ModelTensor) else s.index: v.type
            for s, v in zip(local.sources, local.inputs, strict=True)
        }
        line = next(row for row in ranks.rows if dist.get_rank() in row)

        def reading(stage: Stage) -> tuple[str, dict[str, Any]]:
            own = partial(self._local_stage, types, stage, trusted=trusted)
            return self.place_of(line[table.rank_of[stage.index]]), {"own": OWN, "local": own}

        return reading

    def _local_stage(
        self,
        types: Mapping[Any, Type],
        stage: Stage,
        programs: Mapping[str, ir.Program],
        *,
        trusted: bool,
    ) -> ir.Program:
        """Returns a stage in local types; those received and sent are as its forward has them.

        Raises FileError if its own inputs or outputs differ in type from the captured program's.
        """
        if not trusted:
            _check_collectives(programs, self.plan)
        forward, first, sent = programs[PARTS[0]], stage.num_received, stage.num_sent
        own = [
            types[tensor_name(s.name) if isinstance(s, ir.ModelTensor) else s.index]
            for s in stage.sources
        ]
        results = [value.type for value in stage.program.outputs]
        for output, position in stage.writes:
            results[output] = own[position]
        taken, given = ([v.type for v in row] for row in (forward.inputs, forward.outputs))
        travels = all(isinstance(type_, TensorType) for type_ in (*taken[:first], *given[:sent]))
        is_sound = travels and len(taken) == first + len(own) and len(given) >= len(results)
        if not is_sound or (taken[first:], given[sent : len(results)]) != (own, results[sent:]):
            raise FileError(f"stage {stage.index} takes or gives other types than it has parts of")
        return replace(forward, outputs=forward.outputs[: len(results)])


def _layout(text: Any, number: int) -> Placements:
    """Parses the placements of a tensor on a mesh with ``number`` dimensions."""
    found = [_LAYOUT.fullmatch(one) for one in str(text).split(",")]
    if len(found) != number or not all(found):
        raise FileError(f"a tensor lies as {str(text)[:40]!r}, which is no layout on its mesh")
    pairs = [one.groups() for one in found if one is not None]
    return tuple(
        placement(WHOLE if dim is None else split(int(dim), int(factor or 1)))
        for dim, factor in pairs
    )


def _check_split(layout: Placements, sizes: Iterable[int], shape: Sequence[int]) -> None:
    left = list(shape)
    for one, size in zip(map(layout_of, layout), sizes, strict=True):
        # Two mesh dimensions may split the same tensor dimension, one after the other.
        if one is None or not one.is_split:
            continue
        if one.dim >= len(left) or not one.factor or left[one.dim] % (size * one.factor):
            raise FileError(f"a tensor of shape {tuple(shape)} cannot lie as {_text(layout)}")
        left[one.dim] //= size


def read_step(
    parts: Parts,
    place: str,
    captured: ir.Program,
    plan: MeshPlan,
    batching: Batching,
    *,
    trusted: bool,
) -> ReadProgram:
    """Reads this rank's step, and checks it against the captured program in local types.

    Raises FileError for one that is not valid, or has a collective that its mesh cannot run.
    """
    programs = read_texts(parts, place, [STEP], own=OWN, trusted=trusted)
    # A file that this machine signed was written by a compile, so its collectives are valid.
    if not trusted:
        _check_collectives(programs, plan)
    step = step_of(captured, programs[STEP], [], parts.json(place + BOUNDARY))
    if len(step.batch) != batching.micro_batches:
        raise FileError("a step takes another number of micro-batches")
    return ReadProgram(captured, programs, step=step)


def _check_collectives(programs: Mapping[str, ir.Program], plan: MeshPlan) -> None:
    """Raises FileError for a collective that the mesh of a plan cannot run."""
    for closure in (one for program in programs.values() for one in ir.walk_closures(program)):
        for node in closure.nodes if isinstance(closure, ir.Leaf) else ():
            if node.target in COLLECTIVES:
                check_collective(node, dict(plan.axes))
