"""A device mesh in a file: how tensors lie, and for each rank the parts that it alone has."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from ...backend.files.container import Content, Parts, read_json
from ...pipeline_parallel.mesh.layouts import WHOLE, split
from ...pipeline_parallel.mesh.plan import MeshPlan, Placements
from ...pipeline_parallel.mesh.torch_collectives import COLLECTIVES, OWN, check_collective
from ...pipeline_parallel.mesh.torch_parts import distributed
from ...pipeline_parallel.mesh.torch_sharding import local_type, replicated
from ...pipeline_parallel.mesh.torch_sharding_rules import layout_of, placement
from ...reuse.errors import FileError
from ...reuse.ir.program import (
    Leaf,
    ModelTensor,
    Program,
    UserInput,
    Value,
    tensor_type,
    walk_closures,
)
from ...reuse.ir.types import TensorType, contiguous_stride
from ..options import Batching
from .parts import BOUNDARY, CAPTURED, STEP, ReadProgram, read_texts, step_of

MAX_MICRO_BATCHES = 2**17  # which a step has one after another
_LAYOUT = re.compile(r"R|S(\d{1,2})(?:/(\d{1,4}))?", re.ASCII)
_OF_ALL = ("model.json", f"programs/0/{CAPTURED}.txt")
_SHARED = (*_OF_ALL, "objects/")


def place_of(position: int) -> str:
    """Returns where the parts of a rank are, by its position in the mesh."""
    return f"mesh/{position}/"


# ---- to a file -----------------------------------------------------------------------------------


def mesh_data(plan: MeshPlan, row: Sequence[int]) -> Any:
    """Returns a mesh of ranks in that order, and how tensors lie on it, as JSON holds it."""
    lies = {name: _text(layout) for name, layout in plan.parameters.items()}
    return [plan.axes, row, lies, list(map(_text, plan.batch)), plan.whole, plan.table]


def placed(parts: Mapping[str, Content], position: int) -> dict[str, Content]:
    """Returns the parts of a rank where they belong; the first has those of all, too."""
    own = place_of(position)
    names = {n: n if n.startswith(_SHARED) else own + n for n in parts}
    return {to: parts[n] for n, to in names.items() if position == 0 or to not in _OF_ALL}


def _text(layout: Placements) -> str:
    return ",".join(map(str, map(layout_of, layout)))


# ---- from a file ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class SavedLayouts:
    """How tensors lie on the mesh of a file, whose ranks are in the order of ``row``."""

    plan: MeshPlan
    row: Sequence[int]

    @classmethod
    def read(cls, said: Any, given: DeviceMesh | None) -> SavedLayouts:
        """Reads what :func:`mesh_data` made.

        Raises:
            FileError: if it is no mesh, or another one is given.
        """
        axes, row, lies, batch, whole, table = said
        names, sizes = [name for name, _ in axes], [size for _, size in axes]
        sound = all(type(n) is str and n for n in names) and len(set(names)) == len(names) > 0
        # Bounded, so that their product stays a number that can be listed.
        sound = sound and all(type(size) is int and 0 < size < 2**20 for size in sizes)
        if not sound or sorted(row) != list(range(math.prod(sizes))):
            raise FileError(f"there is no mesh of such dimensions and ranks: {str(axes)[:80]}")
        plan = MeshPlan(
            tuple(zip(names, sizes, strict=True)),
            {name: _layout(text, len(sizes)) for name, text in lies.items()},
            tuple(_layout(text, len(sizes)) for text in batch),
            whole=tuple(map(str, whole)),
            table=str(table),
        )
        if given is None:
            return cls(plan, row)
        found = tuple(zip(given.mesh_dim_names or (), given.mesh.shape, strict=False))
        if (found, given.device_type) != (plan.axes, "cpu"):
            text = f"{MeshPlan(found).mesh_text} on {given.device_type}"
            raise FileError(f"it is for a mesh of {plan.mesh_text} on cpu, and mesh= is {text}")
        # Its ranks may be in another order: parts go by the position in a mesh.
        return cls(plan, given.mesh.flatten().tolist())

    def mesh(self) -> DeviceMesh:
        """Makes the mesh; a collective."""
        names, sizes = zip(*self.plan.axes, strict=True)
        ranks = torch.tensor(self.row, device="cpu").reshape(sizes)
        return DeviceMesh("cpu", ranks, mesh_dim_names=names)

    def localized(self, program: Program, mesh: DeviceMesh) -> Program:
        """Returns a program that takes this rank's parts.

        Raises:
            FileError: if something cannot be split as it is said to lie.
        """
        inputs, whole = [], replicated(mesh)
        for source, value in zip(program.sources, program.inputs, strict=True):
            # A tensor that the plan does not name is whole on each rank.
            layout = whole
            if isinstance(source, ModelTensor):
                layout = self.plan.parameters.get(source.name, whole)
            elif isinstance(source, UserInput):
                if source.index >= len(self.plan.batch):
                    raise FileError(f"nothing says how {source.name} of the batch lies")
                layout = self.plan.batch[source.index]
            type_ = tensor_type(value)
            _check_split(layout, mesh.mesh.shape, type_.shape)
            inputs.append(Value(local_type(type_, mesh, layout)))
        return replace(program, inputs=tuple(inputs))

    def parameter(
        self, name: str, local: torch.Tensor, whole: TensorType | None, mesh: DeviceMesh
    ) -> torch.Tensor:
        """Returns a parameter of which this rank has a part; ``whole`` is what programs take."""
        layout = self.plan.parameters[name]
        if whole is None:  # then nothing has compared it
            shape = list(local.shape)
            for one, size in zip(map(layout_of, layout), mesh.mesh.shape, strict=True):
                if one is not None and one.is_split:
                    shape[one.dim] *= size
            _check_split(layout, mesh.mesh.shape, shape)
            stride = contiguous_stride(tuple(shape))
            whole = TensorType(local.dtype, tuple(shape), stride, local.device)
        return distributed(local, mesh, layout, whole)


def _layout(text: Any, number: int) -> Placements:
    """Reads how a tensor lies on a mesh of so many dimensions."""
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
        # Two dimensions of a mesh may split the same one: the second takes of what the first left.
        if one is None or not one.is_split:
            continue
        if one.dim >= len(left) or not one.factor or left[one.dim] % (size * one.factor):
            raise FileError(f"a tensor of shape {tuple(shape)} cannot lie as {_text(layout)}")
        left[one.dim] //= size


def read_step(
    parts: Parts,
    place: str,
    captured: Program,
    layouts: SavedLayouts,
    batching: Batching,
    *,
    trusted: bool,
) -> ReadProgram:
    """Reads this rank's step, which takes what the captured program of local types takes.

    Raises:
        FileError: if it is none, or has a collective that its mesh cannot run.
    """
    programs, sizes = read_texts(parts, place, [STEP], own=OWN, trusted=trusted), layouts.plan.axes
    # What this machine has signed came from a compile, which made its collectives itself.
    for closure in () if trusted else walk_closures(programs[STEP]):
        for node in closure.nodes if isinstance(closure, Leaf) else ():
            if node.target in COLLECTIVES:
                check_collective(node, dict(sizes))
    step = step_of(captured, programs[STEP], [], read_json(parts.read(place + BOUNDARY)))
    if len(step.batch) != batching.micro_batches:
        raise FileError("a step takes another number of micro-batches")
    return ReadProgram(captured, programs, step=step)
