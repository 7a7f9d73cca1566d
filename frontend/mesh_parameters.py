"""The parameters of a model over a device mesh: DTensors, and stand-ins for what was captured."""

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
    """One parameter, everywhere that modules hold it: as captured, and as a DTensor."""

    tables: tuple[tuple[dict[str, Any], str], ...]
    captured: Tensor
    own: Tensor


class MeshParameters:
    """The model's parameters as DTensors, and stand-ins for what was captured.

    Args:
        model: whose parameters are replaced.
        mesh: that they lie on.
        plan: how.
        only: the identities of those to replace; None for all.
        read: those of a file by name, in place of the model's own.
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

        places: dict[int, list[tuple[dict[str, Any], str]]] = {}
        names: dict[int, str] = {}
        tensors: dict[int, Tensor] = {}
        for path, module in walk_modules(model):
            for name, parameter in module._parameters.items():
                if parameter is not None and (only is None or id(parameter) in only):
                    places.setdefault(id(parameter), []).append((module._parameters, name))
                    names.setdefault(id(parameter), f"{path}.{name}" if path else name)
                    tensors[id(parameter)] = parameter
        self._held: dict[int, _Held] = {}
        for key, tensor in tensors.items():
            layout = plan.parameters[names[key]]
            # It takes the values of rank 0, so that all ranks begin alike whatever they were given.
            given = None if read is None else read[names[key]]
            whole = distribute_tensor(tensor.detach(), mesh, layout) if given is None else given
            own = nn.Parameter(whole, requires_grad=tensor.requires_grad)
            self._held[key] = held = _Held(tuple(places[key]), _stand_in(tensor), own)
            _put(held.tables, own)
            # The captured program holds the old parameter, and is not to hold its memory.
            nothing = math.nan if tensor.is_floating_point() else 0
            tensor.data = tensor.new_full((), nothing).expand_as(tensor)

    def of(self, tensor: Tensor) -> Tensor:
        """Returns what took the place of a captured tensor; buffers stay."""
        held = self._held.get(id(tensor))
        return tensor if held is None else held.own

    def part_of(self, tensor: Tensor) -> Tensor:
        """Returns this rank's part of what modules hold within :meth:`as_captured`."""
        found = (one.own for one in self._held.values() if one.captured is tensor)
        return local_part(next(found, tensor))

    @contextmanager
    def as_captured(self) -> Iterator[None]:
        """Within it modules hold what looks like the parameters they were captured with."""
        # The guard compares what modules hold with what they held, which were no DTensors.
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
    """The parameters of a model that stays whole, of which a rank that is not here has parts.

    Args:
        model: whose they are.
        plan: how they lie.
        coordinate: of the rank, on the dimensions of the plan.
    """

    def __init__(self, model: nn.Module, plan: MeshPlan, coordinate: Sequence[int]) -> None:
        named = model.named_parameters()
        self._lies = {id(tensor): plan.parameters.get(name, ()) for name, tensor in named}
        self._sizes, self._coordinate = [size for _, size in plan.axes], coordinate

    def part_of(self, tensor: Tensor) -> Tensor:
        """Returns the rank's part of a tensor of the model."""
        lies = self._lies.get(id(tensor), ())
        return _part(tensor.detach(), self._sizes, self._coordinate, lies)

    def as_captured(self) -> AbstractContextManager[None]:
        """Within it modules hold what they were captured with, as they do anyway."""
        return nullcontext()


@dataclass(frozen=True)
class KeptOnMesh:
    """Holds what a file has of a rank's step over a mesh, or of its stages over one.

    Attributes:
        model: whose it is.
        guard: of the call that it was compiled for.
        lowered: its compile.
        plans: where a step has memory.
        parameters: of the model, and the rank's parts of them.
        axes: the dimensions of the mesh of all ranks.
        row: these, in its order.
        position: of the rank, in that.
        asked: of stages, what they are made of.
    """

    model: nn.Module
    guard: Guard
    lowered: Compilation
    plans: Sequence[ArenaPlan]
    parameters: MeshParameters | WholeParameters
    axes: Sequence[tuple[str, int]]
    row: Sequence[int]
    position: int
    asked: Any = None

    @classmethod
    def here(
        cls,
        mesh: Any,
        model: nn.Module,
        guard: Guard,
        lowered: Compilation,
        plans: Sequence[ArenaPlan],
        parameters: MeshParameters,
        asked: Any = None,
    ) -> KeptOnMesh:
        """Returns this rank's, of a mesh of ranks that are there."""
        axes = tuple(zip(mesh.mesh_dim_names, mesh.mesh.shape, strict=True))
        row = mesh.mesh.flatten().tolist()
        own = model, guard, lowered, plans, parameters
        return cls(*own, axes, row, row.index(mesh.get_rank()), asked)

    @property
    def plan(self) -> MeshPlan:
        """How tensors lie."""
        assert self.lowered.mesh_plan is not None
        return self.lowered.mesh_plan


def _put(tables: Iterable[tuple[dict[str, Any], str]], tensor: Tensor) -> None:
    for table, name in tables:
        table[name] = tensor


def _stand_in(tensor: Tensor) -> nn.Parameter:
    """Returns a parameter of the same layout, without memory: only its type is compared."""
    memory = TensorType.of(tensor).empty()
    memory.untyped_storage().resize_(0)
    return nn.Parameter(memory, requires_grad=tensor.requires_grad)


def gradient_of(parameter: Any, local: Tensor) -> Tensor:
    """Returns this rank's part of a gradient as a DTensor that lies as its parameter does."""
    from ..pipeline_parallel.mesh.torch_parts import distributed

    return distributed(local, parameter.device_mesh, parameter.placements, parameter)


def local_part(tensor: Tensor) -> Tensor:
    """Returns this rank's part of a tensor."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def part_of(tensor: Tensor, mesh: Any, layout: Placements) -> Tensor:
    """Returns this rank's part of a tensor that it has whole."""
    return _part(tensor, mesh.mesh.shape, mesh.get_coordinate(), layout)


def _part(
    tensor: Tensor, sizes: Sequence[int], coordinate: Sequence[int], layout: Placements
) -> Tensor:
    for size, place, lies in zip(sizes, coordinate, layout, strict=False):
        dim: int | None = getattr(lies, "dim", None)
        parts = int(getattr(lies, "split_factor", 1))
        if parts > 1:
            each = tensor.unflatten(dim, (parts, -1))  # type: ignore[arg-type]
            tensor = each.tensor_split(size, dim + 1)[place].flatten(dim, dim + 1)  # type: ignore[operator,arg-type]
        elif dim is not None:
            tensor = tensor.tensor_split(size, dim)[place]
    return tensor
