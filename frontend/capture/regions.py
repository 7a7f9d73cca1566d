"""The vocabulary of capture: regions of the outer graph, templates, call sites, decisions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import torch
import torch.fx
from torch import nn

from ...reuse import torch_pytree
from ...reuse.errors import CaptureError
from ...reuse.evidence.evidence import Evidence
from ...reuse.evidence.reads import Reads
from ...reuse.evidence.root_evidence import RootEvidence
from ...reuse.evidence.slots import SlotEvidence
from ...reuse.ir.program import Control, ModelTensor, Program, RecomputeMark
from ...reuse.ir.types import TensorType
from ..tracing.readings import Reading
from .init_key import NO_KEY, InitKey


class CrossingError(CaptureError):
    """A tensor crosses the boundary of a block in a way that a closure cannot express."""


@dataclass(eq=False)
class Region:
    """Holds a traced instance of a block, a part marked for recompute, or the model (the root).

    ``recompute`` is how the user wants it recomputed, if at all; ``init_key`` is the block's.
    """

    module: nn.Module
    path: str
    name: str
    parent: Region | None = None
    items: list[torch.fx.Node | Region] = field(default_factory=list)
    reads: Reads = field(default_factory=Reads)
    inputs: list[torch.fx.Node] = field(default_factory=list)
    input_names: list[str] = field(default_factory=list)
    outputs: list[torch.fx.Node] = field(default_factory=list)
    num_calls: int = 1
    recompute: RecomputeMark = ""
    init_key: InitKey = NO_KEY

    def nodes(self) -> list[torch.fx.Node]:
        """Returns all nodes of the region and of the regions inside it, in order."""
        found: list[torch.fx.Node] = []
        for item in self.items:
            found.extend(item.nodes() if isinstance(item, Region) else [item])
        return found

    def num_operators(self) -> int:
        """Counts the nodes, and in place of control flow the operators of its bodies."""
        nodes = self.nodes()
        targets: list[Any] = [node.target for node in nodes]
        bodies = [body for t in targets if isinstance(t, Control) for body in t.bodies]
        return len(nodes) + sum(body.program.num_nodes_if_inlined() for body in bodies)


class Sizes(Protocol):
    """The dynamic dimensions of one capture."""

    mode: Any

    def fake(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a fake of an input."""

    def given(self, index: int, leaf: Any) -> Any:
        """Returns what the model is given in place of one of its flat inputs that is no tensor."""

    def settle(self, root: Region, sources: Any) -> None:
        """Rewrites a recorded run so that no size crosses from one region to another."""


def regions_inside(root: Region) -> Iterator[Region]:
    """Yields every region inside one, outer before inner."""
    for item in root.items:
        if isinstance(item, Region):
            yield item
            yield from regions_inside(item)


@dataclass(frozen=True)
class OutputLeaf:
    """Describes a leaf of a block's result: a new tensor, an input passed through, a constant."""

    kind: Literal["new", "input", "constant"]
    index: int = -1
    constant: Any = None
    type: TensorType | None = None
    requires_grad: bool = False
    alias_of: int = -1  # input whose storage a new tensor shares
    storage_offset: int = 0
    prototype: torch.Tensor | None = None


@dataclass(frozen=True)
class Template:
    """Holds what it takes to replace another instance by a call on a region's closure.

    Attributes:
        written: the operands of the call, by position, that it changes in place.
        grown: those of them that are then functions of what requires grad.
    """

    region: Region
    evidence: Evidence
    bindings: tuple[tuple[str, Any], ...]
    output_leaves: tuple[OutputLeaf, ...]
    output_spec: torch_pytree.TreeSpec
    written: tuple[int, ...] = ()
    grown: tuple[int, ...] = ()
    slots: SlotEvidence | None = None


@dataclass(frozen=True)
class CallSite:
    """A call node's meaning: the region whose closure it calls, the instance's path and mark."""

    region: Region
    path: str
    recompute: RecomputeMark = ""


@dataclass(frozen=True)
class SharingDecision:
    """Whether the Python of one instance ran, for the report.

    Attributes:
        path: where the instance sits in the model.
        class_name: of the block.
        shared: whether it became a call without its Python being run.
        reason: why it was traced although an earlier instance was known.
        compared_with: path of that instance, or of the one whose closure it calls.
        key: its class and the arguments of its constructor.
        shares: how it shares a closure all the same, its graph being equal up to constants.
    """

    path: str
    class_name: str
    shared: bool
    reason: str = ""
    compared_with: str = ""
    shares: str = ""
    key: InitKey = NO_KEY


@dataclass(frozen=True)
class ModeChoice:
    """Names the mode in which a derivative that the forward takes is computed, for the report.

    Attributes:
        what: the derivative, in words.
        source: the user's line.
        mode: ``"taylor"``, ``"forward"`` or ``"reverse"``.
        why: that mode.
    """

    what: str
    source: str
    mode: str
    why: str

    def __str__(self) -> str:
        return f"{self.what} at {self.source}: {self.mode} mode, {self.why}"


@dataclass
class CapturedModel:
    """A captured program and what was decided on the way."""

    program: Program
    decisions: list[SharingDecision]
    num_traced: int
    evidence: RootEvidence
    """The reads of the model's Python, which the guard compares."""
    modules: list[nn.Module]
    """The modules outside the model's tree that it read."""
    readings: Mapping[Reading, Any]
    """Settings and registries that it asked for, and the answers: the guard asks again."""
    sizes: Any = None
    """The dynamic sizes it was captured with, if any."""
    modes: Sequence[ModeChoice] = ()
    """The modes of derivatives in the forward, where the user left them open."""

    def without_tensors(self) -> CapturedModel:
        """Returns the same without the model's tensors, which a guard holds as long as they fit."""
        sources = tuple(
            s.forgotten() if isinstance(s, ModelTensor) else s for s in self.program.sources
        )
        return replace(self, program=replace(self.program, sources=sources))


DIFFERENTIATED = "differentiated"
"""Key in ``meta`` of a node that a gradient is taken with respect to in the forward."""


def shared_call(*operands: Any) -> Any:
    """Target of call nodes in the outer graph. Never run."""
    raise AssertionError("a call node of the outer graph was executed")
