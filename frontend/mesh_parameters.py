"""The parameters of a model over a device mesh: DTensors, and stand-ins for the guard."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..backend.arena.arena import ArenaPlan
from ..pipeline_parallel.mesh.plan import MeshPlan, Placements
from ..reuse.errors import PlanError
from ..reuse.evidence.module_state import walk_modules
from ..reuse.ir.types import TensorType
from .guards.guard import Guard
from .passes.state import Compilation


@dataclass(frozen=True)
class _Held:
    """One parameter: the module dicts that hold it, its stand-in, and its DTensor."""

    tables: tuple[tuple[dict[str, Any], str], ...]
    captured: Tensor
    own: Tensor


class MeshParameters:
    """Replaces a model's parameters by DTensors, and keeps a stand-in of each for the guard.

    Replaces all, or those whose ``id`` is in ``only``. Values are the model's, or those of
    ``read``, loaded from a file by name.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: Any,
        plan: MeshPlan,
        only: Container[int] | None = None,
        read: Mapping[str, Tensor] | None = None,
    ) -> None:
        from torch.distributed.tensor import distribute_tensor

        found: dict[int, tuple[Tensor, str, list[tuple[dict[str, Any], str]]]] = {}
        for path, module in walk_modules(model):
            for name, parameter in module._parameters.items():
                if parameter is not None and (only is None or id(parameter) in only):
                    known = f"{path}.{name}" if path else name
                    _, _, places = found.setdefault(id(parameter), (parameter, known, []))
                    places.append((module._parameters, name))
        self._held: dict[int, _Held] = {}
        for key, (tensor, name, places) in found.items():
            layout = plan.parameters[name]
            # distribute_tensor uses the values of rank 0, so that all ranks start equal.
            given = None if read is None else read[name]
            whole = distribute_tensor(tensor.detach(), mesh, layout) if given is None else given
            own = nn.Parameter(whole, requires_grad=tensor.requires_grad)
            self._held[key] = held = _Held(tuple(places), _stand_in(tensor), own)
            _put(held.tables, own)
            # The captured program references the old parameter, whose memory must be freed.
            nothing = math.nan if tensor.is_floating_point() else 0
            tensor.data = tensor.new_full((), nothing).expand_as(tensor)

    def of(self, tensor: Tensor) -> Tensor:
        """Returns the DTensor of a captured parameter; a buffer unchanged."""
        held = self._held.get(id(tensor))
        return tensor if held is None else held.own

    def part_of(self, tensor: Tensor) -> Tensor:
        """Returns this rank's part of a stand-in's parameter, or of a buffer."""
        found = (one.own for one in self._held.values() if one.captured is tensor)
        return local_part(next(found, tensor))

    @contextmanager
    def as_captured(self) -> Iterator[None]:
        """Puts the stand-ins into the modules inside, for the guard, which knows no DTensors."""
        for one in self._held.values():
            _put(one.tables, one.captured)
        try:
            yield
        finally:
            for one in self._held.values():
                _put(one.tables, one.own)

    def check_present(self) -> None:
        """Raises PlanError if a parameter was replaced."""
        for held in self._held.values():
            for table, name in held.tables:
                if table.get(name) is not held.own:
                    raise PlanError(
                        f"The parameter {name} was replaced since the model was parallelized. "
                        "Change parameters in place, or parallelize the model anew."
                    )


class WholeParameters:
    """The unchanged parameters of a model that is compiled for a rank on another machine."""

    def __init__(self, model: nn.Module, plan: MeshPlan, coordinate: Sequence[int]) -> None:
        named = model.named_parameters()
        self._placements = {id(tensor): plan.parameters.get(name, ()) for name, tensor in named}
        self._sizes, self._coordinate = [size for _, size in plan.axes], coordinate

    def part_of(self, tensor: Tensor) -> Tensor:
        """Returns the rank's part of a tensor of the model."""
        placements = self._placements.get(id(tensor), ())
        return _part(tensor.detach(), self._sizes, self._coordinate, placements)

    def as_captured(self) -> AbstractContextManager[None]:
        """Does nothing: the modules hold the captured parameters."""
        return nullcontext()


@dataclass(frozen=True)
class KeptOnMesh:
    """The part of a file for a rank's step, or its pipeline stages, over a mesh."""

    model: nn.Module
    guard: Guard
    lowered: Compilation  # the state of its compile before link
    plans: Sequence[ArenaPlan]  # the memory plans of a step
    parameters: MeshParameters | WholeParameters
    mesh: Any  # with the pipeline's dimension
    rank: int
    asked: Any = None  # for stages, the arguments of the pipeline

    @property
    def axes(self) -> tuple[tuple[str, int], ...]:
        """The names and sizes of the mesh's dimensions."""
        return tuple(zip(self.mesh.mesh_dim_names, self.mesh.mesh.shape, strict=True))

    @property
    def row(self) -> list[int]:
        """All ranks, in the order of the mesh."""
        ranks: list[int] = self.mesh.mesh.flatten().tolist()
        return ranks

    @property
    def position(self) -> int:
        """The position of the rank in ``row``."""
        return self.row.index(self.rank)

    @property
    def plan(self) -> MeshPlan:
        """The placements of tensors."""
        assert self.lowered.mesh_plan is not None
        return self.lowered.mesh_plan


def _put(tables: Iterable[tuple[dict[str, Any], str]], tensor: Tensor) -> None:
    for table, name in tables:
        table[name] = tensor


def _stand_in(tensor: Tensor) -> nn.Parameter:
    """Returns a parameter of the same layout without memory: guards compare only its type."""
    memory = TensorType.of(tensor).empty()
    memory.untyped_storage().resize_(0)
    return nn.Parameter(memory, requires_grad=tensor.requires_grad)


def gradient_of(parameter: Any, local: Tensor) -> Tensor:
    """Returns this rank's part of a gradient as a DTensor with its parameter's placements."""
    from ..pipeline_parallel.mesh.torch_parts import distributed

    return distributed(local, parameter.device_mesh, parameter.placements, parameter)


def local_part(tensor: Tensor) -> Tensor:
    """Returns this rank's part of a tensor."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def part_of(tensor: Tensor, mesh: Any, layout: Placements) -> Tensor:
    """Returns this rank's part of a whole tensor."""
    return _part(tensor, mesh.mesh.shape, mesh.get_coordinate(), layout)


def _part(
    tensor: Tensor, sizes: Sequence[int], coordinate: Sequence[int], layout: Placements
) -> Tensor:
    for size, place, placement in zip(sizes, coordinate, layout, strict=False):
        dim: int | None = getattr(placement, "dim", None)
        parts = int(getattr(placement, "split_factor", 1))
        if parts > 1:
            each = tensor.unflatten(dim, (parts, -1))  # type: ignore[arg-type]
            tensor = each.tensor_split(size, dim + 1)[place].flatten(dim, dim + 1)  # type: ignore[operator,arg-type]
        elif dim is not None:
            tensor = tensor.tensor_split(size, dim)[place]
    return tensor
