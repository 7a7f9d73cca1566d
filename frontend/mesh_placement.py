"""The placements of a step over a mesh: as the user says, with pins, or the cheapest.

The parameters of the model are placed so: DTensors, and stand-ins for the guard.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from torch import Tensor, nn

from ..autodiff.training_program import StepProgram
from ..backend.gpu.targets import target_named
from ..pipeline_parallel.mesh.layouts import Links
from ..pipeline_parallel.mesh.plan import PIPELINE, MeshPlan, Placements
from ..recompute.planner import POLICIES, Budget
from ..reuse import torch_pytree
from ..reuse.errors import PlanError
from ..reuse.evidence.module_state import walk_modules
from ..reuse.ir.costs import CPU, CUDA, Rates
from ..reuse.ir.program import RecomputeMark
from ..reuse.ir.types import TensorType
from .compiler import Compiler
from .marks import shard_mark
from .options import LossModel, Options
from .passes.programs import tensor_name
from .passes.state import Compilation, Goal, Judge, OnMesh, Planner, Subject

if TYPE_CHECKING:  # importing DTensor takes as long as importing all of lazyinline
    from ..pipeline_parallel.mesh.layouts import Axis
    from ..pipeline_parallel.mesh.traffic import MeshCosts

Plan: TypeAlias = Mapping[str, Any] | Literal["auto"] | None


@dataclass(frozen=True)
class AskedPlan:
    """The user's arguments for placing a step on a mesh; see :func:`.parallel.parallelize`."""

    mesh: Any
    plan: Plan
    memory_bytes_per_rank: int | None
    options: Options
    links: Links | None = None

    def step(self, subject: Subject, goal: Goal) -> Compilation:
        """Returns the state of a step's compile before the first pass."""
        on_mesh = OnMesh(self.mesh, planner_of(subject, self))
        return Compiler(self.options).started(subject, replace(goal, on_mesh=on_mesh))

    def stages(self, subject: Subject) -> OnMesh:
        """Returns the mesh of pipeline stages: the dimensions other than the pipeline's."""
        own, limit = without_stages(self.mesh), self.memory_bytes_per_rank
        # All stages are planned as one step, so the limit is that of all the pipeline's ranks.
        whole = limit and limit * (self.mesh.size() // own.size())
        asked = replace(self, mesh=own, memory_bytes_per_rank=whole)
        return OnMesh(own, planner_of(subject, asked), limit, asked.costs(), self.mesh)

    def costs(self) -> MeshCosts:
        """Returns the costs of the stages' operators and collectives over the mesh."""
        from ..pipeline_parallel.mesh.traffic import MeshCosts

        rates, axes = self.rates()
        return MeshCosts(rates, fused=False, axes=axes)

    def rates(self) -> tuple[Rates, Sequence[Axis]]:
        """Returns the speed of a rank's device, and of the links along each mesh dimension."""
        from ..pipeline_parallel.mesh.planner import axes_of_mesh

        mesh, target = self.mesh, self.options.target
        rates = (
            target_named(target).rates if target else CUDA if mesh.device_type == "cuda" else CPU
        )
        device_type = "cuda" if target else mesh.device_type
        return rates, axes_of_mesh(mesh.mesh_dim_names, mesh.mesh.shape, device_type, self.links)


def stage_dimension(mesh: Any) -> str | None:
    """Returns the pipeline dimension of a mesh, if it has one."""
    return next((name for name in mesh.mesh_dim_names if name in PIPELINE), None)


def without_stages(mesh: Any) -> Any:
    """Returns this rank's sub-mesh, without the pipeline dimension."""
    dim = stage_dimension(mesh)
    others = tuple(name for name in mesh.mesh_dim_names if name != dim)
    if not others:
        raise PlanError(
            f"The mesh has only the dimension {dim!r}: use lazyinline.pipeline. Here other "
            "dimensions split the stages."
        )
    return mesh[others]


def planner_of(subject: Subject, asked: AskedPlan) -> Planner:
    """Returns the planner of a step: of the user's plan, or of the cheapest one."""
    from ..pipeline_parallel.mesh.given import Pins, all_names, given_plan, pinned

    mesh, plan = asked.mesh, asked.plan
    if isinstance(asked.options.recompute, Budget):
        raise PlanError(
            "A Budget is kept by the memory of one process, which a rank's is not: a step over a "
            'mesh takes recompute="selective" or "full".'
        )
    assert isinstance(subject.model, LossModel)
    modules = [(path, module) for path, module in walk_modules(subject.model.model)]
    marks = [(path, Pins(*mark)) for path, module in modules if (mark := shard_mark(module))]
    if plan == "auto":
        return partial(_found, asked, pinned(modules, mesh, marks))
    if asked.memory_bytes_per_rank is not None or asked.links is not None:
        raise PlanError("memory_bytes_per_rank= and links= are for plan='auto'.")
    if not isinstance(plan, Mapping | None):
        raise PlanError(f"plan={plan!r} is unknown; give 'auto', styles by module paths, or None.")
    leaves, _ = torch_pytree.flatten((subject.args, subject.kwargs))
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    given = given_plan(modules, mesh, plan or {}, marks, tensors)
    return partial(_given, given, all_names(modules))


def _given(
    plan: MeshPlan,
    names: Mapping[str, Sequence[str]],
    make_step: Callable[[RecomputeMark], StepProgram],
    judged: Judge,
) -> MeshPlan:
    """Returns the user's plan, in which each part of a joint projection is sharded."""
    from ..pipeline_parallel.mesh.given import with_joint_projections

    return with_joint_projections(
        plan, lambda: make_step(""), lambda source: names[tensor_name(source)]
    )


def _found(
    asked: AskedPlan,
    pins: Mapping[str, tuple[int, Any]],
    make_step: Callable[[RecomputeMark], StepProgram],
    judged: Judge,
) -> MeshPlan:
    """Finds the cheapest plan of a step, with recompute if it fits memory in less time so."""
    from ..pipeline_parallel.mesh.planner import FoundPlan, cheapest_plan, find_plan

    rates, axes = asked.rates()

    def plan_of(policy: RecomputeMark) -> FoundPlan:
        step = make_step(policy)
        own = {s.name: pins[n] for s in step.model if (n := tensor_name(s.name)) in pins}
        memory = asked.memory_bytes_per_rank
        found = find_plan(step, axes, rates, memory_bytes_per_rank=memory, pinned=own)
        placements = {tensor_name(name): layout for name, layout in found.plan.parameters.items()}
        plan = replace(found.plan, parameters=placements)
        return replace(found, plan=plan, seconds=judged(plan, policy, found.seconds))

    return cheapest_plan(plan_of, POLICIES[::-1] if asked.options.recompute is None else ()).plan


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


def parts_elsewhere(
    model: nn.Module, plan: MeshPlan, coordinate: Sequence[int]
) -> Callable[[Tensor], Tensor]:
    """Returns a function from a tensor of an unchanged model to the part of a rank elsewhere."""
    layouts = {id(p): plan.parameters.get(name, ()) for name, p in model.named_parameters()}
    sizes = [size for _, size in plan.axes]
    return lambda one: _part(one.detach(), sizes, coordinate, layouts.get(id(one), ()))


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
