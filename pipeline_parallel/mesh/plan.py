"""The plan of a step over a mesh: how parameters, the batch and the tensors of closures lie.

A layout is a tuple of ``torch.distributed.tensor`` placements, one for each dimension of the mesh.
Whoever makes a plan, by hand or by search, makes these objects; whoever shards a program reads
them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import torch.fx

from ...reuse.ir.program import Closure, RecomputeMark

if TYPE_CHECKING:  # importing it takes as long as importing all of lazyinline
    from torch.distributed.tensor.placement_types import Placement

REPLICATED = ("data", "dp", "dp_replicate")
GATHERED = ("fsdp", "dp_shard")
TENSOR = ("tensor", "tp")
PIPELINE = ("pipeline", "pp")
"""Names of dimensions of a mesh, by their purpose."""

Placements: TypeAlias = "tuple[Placement, ...]"
"""The layout of one tensor: a DTensor placement for each dimension of the mesh."""


@dataclass(frozen=True)
class NodeLayouts:
    """The layouts of one operator.

    Attributes:
        inputs: of each tensor operand, in the order of ``node.all_input_nodes``; None leaves it to
            DTensor's propagation.
        outputs: of each result, which is redistributed to this layout; a partial one is left as
            DTensor's rules make it.
    """

    inputs: tuple[Placements | None, ...] = ()
    outputs: tuple[Placements | None, ...] = ()


@dataclass(frozen=True)
class LeafPlan:
    """The layouts of a leaf's calls, by flat tensors.

    Attributes:
        inputs: of each operand; None accepts any layout.
        outputs: of each result; None keeps the layout that is computed.
        nodes: of operators; those left out follow DTensor's propagation.
    """

    inputs: tuple[Placements | None, ...] = ()
    outputs: tuple[Placements | None, ...] = ()
    nodes: Mapping[torch.fx.Node, NodeLayouts] = field(default_factory=dict)


@dataclass(frozen=True)
class MeshPlan:
    """The layouts of a step.

    Attributes:
        axes: name and size of each dimension of the mesh.
        parameters: the layout of each parameter and buffer between steps, by its name.
        batch: the layout of each tensor of the batch, in the order of the flattened arguments.
        results: the layouts of modules' results that are fixed, by path of the module.
        gathered: dimensions along which parameters are sharded for memory alone (FSDP): they are
            all-gathered before a leaf uses them.
        leaves: plans of leaves of the decomposed step; others follow their operands' layouts.
        whole: operators that every rank runs on whole tensors, as found when leaves were sharded.
        table: of a found plan, the choice for each operator, as text.
        moved_bytes: of a found plan, the predicted bytes of a step's collectives.
        held_bytes: of a found plan, the predicted bytes on a rank: parameters, gradients, optimizer
            state, tensors saved for backward.
        recompute: of a found plan, the recompute policy of each block that makes it fit.
    """

    axes: tuple[tuple[str, int], ...]
    parameters: Mapping[str, Placements] = field(default_factory=dict)
    batch: tuple[Placements, ...] = ()
    results: Mapping[str, Placements] = field(default_factory=dict)
    gathered: frozenset[int] = frozenset()
    leaves: Mapping[Closure, LeafPlan] = field(default_factory=dict)
    whole: tuple[str, ...] = ()
    table: str = field(default="", repr=False)
    moved_bytes: int | None = None
    held_bytes: int = 0
    recompute: RecomputeMark = ""

    def used(self, held: Placements) -> Placements | None:
        """Returns the layout in which leaves use a parameter; None if it is the one held."""
        # Imported here, and only if something is sharded.
        from torch.distributed.tensor import Replicate

        gathered = tuple(Replicate() if i in self.gathered else p for i, p in enumerate(held))
        return None if gathered == held else gathered

    @property
    def replicas(self) -> frozenset[int]:
        """Dimensions along which stages sum gradients once per step, at its end.

        Empty if a parameter is sharded along one of them: then each micro-batch reduces.
        """
        dims = frozenset(i for i, (name, _) in enumerate(self.axes) if name in REPLICATED)
        layouts = self.parameters.values()
        return (
            dims
            if all(layout[i].is_replicate() for layout in layouts for i in dims)
            else frozenset()
        )

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
        """Returns the names of parameters by layout, with those of equal layers merged."""
        groups: dict[str, list[str]] = {}
        for name, placements in self.parameters.items():
            groups.setdefault(self.layout_text(placements), []).append(name)
        return {layout: merged_names(names) for layout, names in groups.items()}

    def layout_text(self, placements: Placements) -> str:
        """Returns a layout in words: ``dimension 0 split over tensor`` for ``Shard(0)`` there."""
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
    """Returns names with ``*`` in place of numbers, each once."""
    merged = (".".join("*" if part.isdigit() else part for part in n.split(".")) for n in names)
    return list(dict.fromkeys(merged))
