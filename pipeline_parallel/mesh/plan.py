"""The plan of a step over a mesh: the placements of parameters, of the batch, and in closures.

``given`` makes a plan of what the user says, ``planner`` finds one, and ``sharded`` rewrites a
program by it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import torch.fx

from ...reuse.errors import PlanError
from ...reuse.ir.program import Closure, RecomputeMark

if TYPE_CHECKING:  # importing it takes as long as importing all of lazyinline
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement

REPLICATED = ("data", "dp", "dp_replicate")
GATHERED = ("fsdp", "dp_shard")
TENSOR = ("tensor", "tp")
PIPELINE = ("pipeline", "pp")
"""The names that a dimension of a mesh may have, by its purpose."""

Placements: TypeAlias = "tuple[Placement, ...]"
"""The placement of one tensor on each dimension of the mesh, as DTensor has them."""


def check_mesh(mesh: Any, *, any_names: bool = False) -> DeviceMesh:
    """Returns a mesh; PlanError unless the names of its dimensions say what they are for."""
    from torch.distributed.device_mesh import DeviceMesh

    if not isinstance(mesh, DeviceMesh):
        raise PlanError(
            f"mesh= takes a DeviceMesh, not {type(mesh).__name__}. Make one with "
            'torch.distributed.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor")).'
        )
    known = (*REPLICATED, *GATHERED, *TENSOR, *PIPELINE)
    names = mesh.mesh_dim_names or ()
    is_twice = any(sum(n in kind for n in names) > 1 for kind in (TENSOR, PIPELINE))
    if not names or is_twice or (set(names) - set(known) and not any_names):
        raise PlanError(
            f"The dimensions of the mesh are named {names}. Each needs a name that says what it "
            f"is for: {', '.join(REPLICATED)} (each rank has its own rows of the batch), "
            f"{', '.join(GATHERED)} (the same, and parameters are split for memory), one of "
            f"{', '.join(TENSOR)} (tensor parallel), or one of {', '.join(PIPELINE)} (stages)."
        )
    return mesh


@dataclass(frozen=True)
class NodeLayouts:
    """The placements that an operator's tensors are redistributed to; None for no change.

    The inputs are ``node.all_input_nodes``. A partial result is left as DTensor's rules make it.
    """

    inputs: tuple[Placements | None, ...] = ()
    outputs: tuple[Placements | None, ...] = ()


@dataclass(frozen=True)
class LeafPlan:
    """The placements of a leaf's flat operands and results, and of its operators.

    An operand without placements may have any, a result keeps those in which it is computed, and an
    operator follows DTensor's propagation.
    """

    inputs: tuple[Placements | None, ...] = ()
    outputs: tuple[Placements | None, ...] = ()
    nodes: Mapping[torch.fx.Node, NodeLayouts] = field(default_factory=dict)


@dataclass(frozen=True)
class MeshPlan:
    """The placements of a step's tensors. The last four attributes are set by the planner alone."""

    axes: tuple[tuple[str, int], ...]  # the name and size of each dimension of the mesh
    # The placements of each parameter and buffer between steps, by name.
    parameters: Mapping[str, Placements] = field(default_factory=dict)
    # The placements of each tensor of the batch, in the order of the flattened arguments.
    batch: tuple[Placements, ...] = ()
    # The placements that the user fixed for modules' results, by path of the module.
    results: Mapping[str, Placements] = field(default_factory=dict)
    # The dimensions along which parameters are sharded only to save memory (FSDP): they are
    # all-gathered before a leaf uses them.
    gathered: frozenset[int] = frozenset()
    # The plans of leaves of the decomposed step; other leaves follow their operands.
    leaves: Mapping[Closure, LeafPlan] = field(default_factory=dict)
    # The operators that every rank runs on whole tensors, noted when leaves were sharded.
    whole: tuple[str, ...] = ()
    table: str = field(default="", repr=False)  # the choice for each operator, as text
    moved_bytes: int | None = None  # the predicted bytes of a step's collectives
    # The predicted bytes on a rank: parameters, gradients, optimizer state, tensors saved for
    # backward.
    held_bytes: int = 0
    # The recompute policy of each block with which the plan fits memory.
    recompute: RecomputeMark = ""

    def used(self, held: Placements) -> Placements | None:
        """Returns the placements in which leaves use a parameter; None if they are those held."""
        from torch.distributed.tensor import Replicate

        gathered = tuple(Replicate() if i in self.gathered else p for i, p in enumerate(held))
        return None if gathered == held else gathered

    @property
    def replicas(self) -> frozenset[int]:
        """The dimensions along which stages sum gradients once, at the end of a step.

        Empty if a parameter is sharded along one of them: then each micro-batch reduces.
        """
        dims = frozenset(i for i, (name, _) in enumerate(self.axes) if name in REPLICATED)
        held = (placements[i] for placements in self.parameters.values() for i in dims)
        return dims if all(one.is_replicate() for one in held) else frozenset()

    def __str__(self) -> str:
        lines = [f"mesh: {self.mesh_text}"]
        batch = dict.fromkeys(self.layout_text(p) for p in self.batch)
        lines += [f"batch: {'; '.join(batch)}"] if batch else []
        lines += [f"{layout}: {', '.join(names)}" for layout, names in self.by_layout().items()]
        return "\n".join(lines)

    @property
    def mesh_text(self) -> str:
        """The mesh in words: ``data 2 x tensor 4``."""
        return " x ".join(f"{name} {size}" for name, size in self.axes)

    def by_layout(self) -> dict[str, list[str]]:
        """Returns the names of parameters by their placements in words; equal layers are merged."""
        groups: dict[str, list[str]] = {}
        for name, placements in self.parameters.items():
            groups.setdefault(self.layout_text(placements), []).append(name)
        return {layout: merged_names(names) for layout, names in groups.items()}

    def layout_text(self, placements: Placements) -> str:
        """Returns placements in words, such as ``dimension 0 split over tensor``."""
        texts = [
            f"{placement_text(placement)} over {name}"
            for (name, _), placement in zip(self.axes, placements, strict=True)
            if not placement.is_replicate()
        ]
        return ", ".join(texts) or "whole on each rank"


def placement_text(placement: Placement) -> str:
    """Returns a placement in words."""
    if placement.is_replicate():
        return "whole"
    if placement.is_partial():
        return "a part of the sum"
    parts = getattr(placement, "split_factor", None)
    within = "" if parts is None else f" in each of its {parts} parts"
    return f"dimension {placement.dim} split{within}"  # type: ignore[attr-defined]


def merged_names(names: Sequence[str]) -> list[str]:
    """Replaces the numbers in names by ``*``, and returns each name once."""
    merged = (".".join("*" if part.isdigit() else part for part in n.split(".")) for n in names)
    return list(dict.fromkeys(merged))
