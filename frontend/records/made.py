"""What a compile made, kept for a page: nothing is computed before one is asked for.

A report outlives what it reports on, so nothing here holds the model's tensors or an arena.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ...backend.arena.arena import ArenaPlan
from ...backend.launches.kernel_list import KernelList
from ...backend.link.gradient_memory import gradients_of
from ...backend.link.layout import Layout
from ...backend.run.rank_plan import RankPlan
from ...reuse.ir.program import Leaf, Program


@dataclass(frozen=True, eq=False)
class Memory:
    """Where the buffers of a linked program lie.

    Attributes:
        layout: every buffer and launch, on one timeline.
        offsets: in bytes, for each buffer that the plan places.
        plan: of all of them.
        arena_bytes: the part that is kept from run to run.
        hosts: whether the user's gradients follow the arena, for activations to lie in them.
    """

    layout: Layout
    offsets: Sequence[int]
    plan: ArenaPlan
    arena_bytes: int
    hosts: Literal["none", "gradients"] = "none"

    @property
    def gradients(self) -> dict[int, int]:
        """Buffers that lie behind the arena, with their offset in bytes."""
        found = gradients_of(self.layout) if self.hosts == "gradients" else []
        first = len(self.plan.offsets) - len(found)
        return dict(zip(found, self.plan.offsets[first:].tolist(), strict=True))


@dataclass(frozen=True)
class FrontierPoint:
    """One way to differentiate a call: what it saves, and what it computes again for that."""

    saved_bytes: int
    extra_s: float
    extra_flops: int


@dataclass(frozen=True)
class Frontier:
    """The ways to differentiate a closure that no other beats, fewest bytes first."""

    closure: str
    num_calls: int
    points: tuple[FrontierPoint, ...]


@dataclass(frozen=True, eq=False)
class Made:
    """What one compile made.

    Attributes:
        captured: the model as captured.
        forward, backward: what runs of it, in plain ATen; of a step, for one micro-batch.
        micro_batches: how often both run in one step.
        kernels: the launches of each leaf for which they are known.
        memory: the plan of it; None where memory is not planned.
        frontiers: finds what could be saved instead; empty where recompute was not asked for.
    """

    captured: Program
    forward: Program
    backward: Program | None = None
    micro_batches: int = 1
    kernels: Mapping[Leaf, KernelList] | None = None
    memory: Memory | RankPlan | None = None
    frontiers: Callable[[], Sequence[Frontier]] = tuple

    def __deepcopy__(self, memo: object) -> Made:
        """Nothing in it changes, so a copy is itself."""
        return self
