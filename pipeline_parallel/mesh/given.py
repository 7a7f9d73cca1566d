"""Makes a plan of what the user says: styles of modules, and pins of single parameters.

The name of a mesh dimension says what it is for. Along data-parallel dimensions each rank has its
own rows of the batch; ``fsdp`` also shards parameters, which are gathered before use. Styles and
pins apply to the tensor-parallel dimension.

A weight may hold several projections, such as queries, keys and values in one Linear. Shards of its
rows would give one rank the queries and half of the keys, so each projection is sharded by itself.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
import torch.fx
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)
from torch.distributed.tensor.placement_types import Placement

from ...autodiff.training_program import StepProgram
from ...reuse.errors import PlanError
from ...reuse.ir.costs import tensors_of
from ...reuse.torch_names import RESHAPES
from .folding import folded_step
from .layouts import split
from .plan import GATHERED, TENSOR, MeshPlan, Placements
from .sharded import result_of_weight
from .torch_sharding_rules import placement as placement_of

Styles: TypeAlias = Mapping[str, Any]  # parallel styles by a pattern of module paths

# These redistribute a module's inputs and outputs, which follows from the layouts anyway.
_AROUND = (PrepareModuleInput, PrepareModuleInputOutput, PrepareModuleOutput, SequenceParallel)
_DIMENSIONS: Mapping[tuple[type, type], Mapping[str, int]] = {
    (ColwiseParallel, nn.Linear): {"weight": 0, "bias": 0},
    (ColwiseParallel, nn.Embedding): {"weight": 1},
    (RowwiseParallel, nn.Linear): {"weight": 1},
    (RowwiseParallel, nn.Embedding): {"weight": 0},
}


@dataclass(frozen=True)
class Pins:
    """The placements that the user fixes for a module: of parameters, by name, and of its result.

    Those of parameters are along the tensor-parallel dimension.
    """

    parameters: Mapping[str, Placement] = field(default_factory=dict)
    output: Placement | None = None


def given_plan(
    modules: Sequence[tuple[str, nn.Module]],
    mesh: DeviceMesh,
    styles: Styles,
    marks: Iterable[tuple[str, Pins]],
    batch: Sequence[Any],
) -> MeshPlan:
    """Returns the plan that styles and marks say, for the flat arguments of one micro-batch.

    Raises PlanError if a pattern matches no module, or a tensor cannot be sharded as asked.
    """
    by_path = dict(modules)
    pins = _of_styles(by_path, styles)
    for path, pin in marks:
        pins.setdefault(path, []).append(pin)
    axes = _axes(mesh)
    tensor = next((i for i, (name, _) in enumerate(axes) if name in TENSOR), None)
    if pins and tensor is None:
        raise PlanError(
            f"The plan splits {min(pins) or 'the model'} for tensor parallel, and no dimension of "
            f"the mesh {dict(axes)} is named {' or '.join(map(repr, TENSOR))}."
        )
    dims: dict[int, Placement] = {}
    outputs: dict[str, Placements] = {}
    for path, found in pins.items():
        for pin in found:
            _apply(path, by_path[path], pin, dims)
            if pin.output is not None:
                outputs[path] = tuple(
                    pin.output if i == tensor else Replicate() for i in range(len(axes))
                )
    parameters = {
        name: _layout(name, parameter, axes, tensor, dims.get(id(parameter)))
        for name, parameter in _named(modules)
    }
    gathered = frozenset(i for i, (name, _) in enumerate(axes) if name in GATHERED)
    rows = tuple(_rows(leaf, axes) for leaf in batch)
    return MeshPlan(axes, parameters, rows, outputs, gathered)


def pinned(
    modules: Sequence[tuple[str, nn.Module]], mesh: DeviceMesh, marks: Sequence[tuple[str, Pins]]
) -> dict[str, tuple[int, Placement]]:
    """Returns the dimension of the mesh and the placement of each parameter that marks pin.

    Raises PlanError if a parameter cannot be sharded as asked, or a result is pinned.
    """
    if not marks:
        return {}
    for path, pin in marks:
        if pin.output is not None:
            raise PlanError(
                f"{path or 'The model'} is marked with output={pin.output}, and plan='auto' finds "
                "how results lie. Leave output= out, or give a plan."
            )
    layouts = given_plan(modules, mesh, {}, marks, ()).parameters
    axis = next(i for i, (name, _) in enumerate(_axes(mesh)) if name in TENSOR)
    by_path = dict(modules)
    # A tied weight has several names, any of which may be the captured one.
    tensors = {id(getattr(by_path[path], name)) for path, pin in marks for name in pin.parameters}
    return {
        name: (axis, layouts[name][axis])
        for name, tensor in _named(modules)
        if id(tensor) in tensors
    }


def _named(modules: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[str, nn.Parameter]]:
    """Yields every parameter by all its names."""
    for path, module in modules:
        for name, parameter in module.named_parameters(recurse=False):
            yield f"{path}.{name}" if path else name, parameter


def all_names(modules: Iterable[tuple[str, nn.Module]]) -> dict[str, list[str]]:
    """Returns, by each name of a parameter, all of its names: a tied one has several."""
    names: dict[int, list[str]] = {}
    found = {name: names.setdefault(id(tensor), []) for name, tensor in _named(modules)}
    for name, same in found.items():
        same.append(name)
    return found


def _axes(mesh: DeviceMesh) -> tuple[tuple[str, int], ...]:
    names = mesh.mesh_dim_names or ()
    return tuple((name, mesh.size(i)) for i, name in enumerate(names))


def _of_styles(modules: Mapping[str, nn.Module], styles: Styles) -> dict[str, list[Pins]]:
    pins: dict[str, list[Pins]] = {}
    for pattern, style in styles.items():
        found = [path for path in modules if _matches(path, pattern)]
        if not found:
            known = ", ".join([p for p in modules if p][:8])
            raise PlanError(
                f"{pattern!r} in the plan matches no module. The model has {known} and others."
            )
        for path in found:
            pins.setdefault(path, []).append(_of_style(path, modules[path], style))
    return pins


def _matches(path: str, pattern: str) -> bool:
    parts, patterns = path.split("."), pattern.split(".")
    return len(parts) == len(patterns) and all(map(fnmatch.fnmatchcase, parts, patterns))


def _of_style(path: str, module: nn.Module, style: Any) -> Pins:
    if isinstance(style, _AROUND):
        return Pins()
    for (kind, of), names in _DIMENSIONS.items():
        if isinstance(style, kind) and isinstance(module, of):
            own = dict(module.named_parameters(recurse=False))
            return Pins({n: Shard(d) for n, d in names.items() if n in own}, _output(style))
    raise PlanError(
        f"The plan has {type(style).__name__} for {path}, which is {type(module).__name__}. "
        "ColwiseParallel and RowwiseParallel are for Linear and Embedding; for others pin "
        'parameters: lazyinline.shard(module, {"weight": Shard(0)}).'
    )


def _output(style: Any) -> Placement | None:
    """Returns the placement that a style asks of the result; None for the style's default."""
    # Rowwise has a tuple of layouts in some versions, one layout in others.
    layouts = style.output_layouts
    layout = layouts[0] if isinstance(layouts, (tuple, list)) else layouts
    usual = Replicate() if isinstance(style, RowwiseParallel) else Shard(-1)
    return None if layout == usual else layout


def _apply(path: str, module: nn.Module, pin: Pins, dims: dict[int, Placement]) -> None:
    own = dict(module.named_parameters(recurse=False))
    for name, placement in pin.parameters.items():
        if name not in own:
            raise PlanError(
                f"{path or 'The model'} ({type(module).__name__}) has no parameter {name!r}; it "
                f"has {', '.join(own) or 'none'}."
            )
        # By the tensor, not by its name: tied weights have one placement.
        before = dims.setdefault(id(own[name]), placement)
        if before != placement:
            raise PlanError(
                f"{path}.{name} is pinned as {placement}, and as {before} under another name."
            )


def _layout(
    name: str,
    parameter: torch.Tensor,
    axes: Sequence[tuple[str, int]],
    tensor: int | None,
    pinned: Placement | None,
) -> Placements:
    """Returns the placements in which a parameter is stored."""
    layout: list[Placement] = [Replicate() for _ in axes]
    shape = list(parameter.shape)
    if tensor is not None and pinned is not None and pinned.is_shard():
        dim = pinned.dim % max(len(shape), 1)  # type: ignore[attr-defined]
        axis, size = axes[tensor]
        if dim >= len(shape) or shape[dim] % size:
            raise PlanError(
                f"Dimension {dim} of {name} has {shape[dim] if dim < len(shape) else 0} entries, "
                f"which cannot be split evenly over the {size} ranks of {axis!r}."
            )
        layout[tensor] = Shard(dim)
        shape[dim] = 1  # not sharded a second time, because a gather would then reorder rows
    for index, (axis, size) in enumerate(axes):
        if axis not in GATHERED:
            continue
        dim = next((d for d, n in enumerate(shape) if n > 1 and n % size == 0), None)
        if dim is not None:
            layout[index] = Shard(dim)
            shape[dim] = 1
    return tuple(layout)


def _rows(leaf: Any, axes: Sequence[tuple[str, int]]) -> Placements:
    """Returns the placements of a tensor of the batch."""
    # Ranks of tensor parallel get the same rows, because each computes a part of every row.
    own = [i for i, (name, _) in enumerate(axes) if name not in TENSOR]
    if not isinstance(leaf, torch.Tensor) or not leaf.dim():
        return tuple(Replicate() for _ in axes)
    ranks = math.prod(axes[index][1] for index in own)
    if leaf.shape[0] % ranks:
        raise PlanError(
            f"A batch tensor of shape {tuple(leaf.shape)} cannot be split evenly over the {ranks} "
            "ranks that have rows of their own. Change the batch size, micro_batches or the mesh."
        )
    return tuple(Shard(0) if i in own else Replicate() for i in range(len(axes)))


# ---- weights that hold several projections -------------------------------------------------------


def with_joint_projections(
    plan: MeshPlan, make_step: Callable[[], StepProgram], names_of: Callable[[str], Sequence[str]]
) -> MeshPlan:
    """Returns a plan that shards each projection by itself in weights that hold several.

    ``names_of`` returns all names in the model of a parameter of the step.
    """
    parameters, rows = dict(plan.parameters), Shard(0)
    axis = next((i for i, (name, _) in enumerate(plan.axes) if name in TENSOR), None)
    if axis is None or all(held[axis] != rows for held in parameters.values()):
        return plan
    folded = folded_step(make_step())
    weights = (
        (folded.leaves[leaf][0].entries[place], folded.slots[slot].names)
        for (leaf, is_output, place), slot in folded.slot_of.items()
        if not is_output and folded.slots[slot].names
    )
    for weight, names in weights:
        for parts in _projections(weight, plan.axes[axis][1]):
            paths = [n.removesuffix("weight") for name in names for n in names_of(name)]
            for name in (path + own for path in paths for own in ("weight", "bias")):
                held = list(parameters.get(name, ()))
                if held and held[axis] == rows:
                    held[axis] = placement_of(split(0, parts))
                    parameters[name] = tuple(held)
    return replace(plan, parameters=parameters)


def _projections(weight: torch.fx.Node, size: int) -> Iterator[int]:
    """Yields the number of projections in a weight, if only their heads divide over the ranks."""
    made = result_of_weight(weight)
    for user in () if made is None else made.users:
        if made is not None and user.target in RESHAPES:
            parts = tensors_of(user)[0].shape[tensors_of(made)[0].dim() - 1 :]
            if len(parts) > 2 and parts[0] % size and not parts[1] % size:
                yield parts[0]
