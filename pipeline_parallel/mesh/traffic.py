"""What one rank moves and holds: the collectives of a local program, and its memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch.fx

from ...reuse.ir.program import Composite, Leaf, Program
from ...reuse.ir.types import TensorType
from .plan import MeshPlan
from .table import bytes_text
from .torch_collectives import COLLECTIVES


@dataclass(frozen=True)
class Collective:
    """One collective of a step.

    Attributes:
        path: the call that it is in, such as ``micro_batch_0.blocks.1``.
        part: the closure there, such as ``Block.forward``.
        kind: ``"all_reduce"``, ``"all_gather"`` or ``"reduce_scatter"``.
        axis: the dimension of the mesh.
        num_bytes: of the tensor that is whole on one side: what is summed or gathered.
    """

    path: str
    part: str
    kind: str
    axis: str
    num_bytes: int


def collectives_of(program: Program) -> tuple[Collective, ...]:
    """Returns the collectives of a program in the order in which they run."""
    return tuple(_walk(program, "", ""))


def _walk(program: Program, path: str, part: str) -> Iterator[Collective]:
    for call in program.calls:
        closure = call.closure
        inner = ".".join(p for p in (path, call.path) if p)
        if isinstance(closure, Composite):
            yield from _walk(
                closure.program, inner, closure.name if call.path else "end of the step"
            )
        elif isinstance(closure, Leaf) and closure.nodes and closure.nodes[0].target in COLLECTIVES:
            (taken,), (given,) = closure.input_types, closure.output_types
            assert isinstance(taken, TensorType)
            assert isinstance(given, TensorType)
            node: torch.fx.Node = closure.nodes[0]
            kind = str(node.target).split(".")[1]
            axis = str(node.args[-1])
            yield Collective(path, part, kind, axis, max(taken.num_bytes, given.num_bytes))


@dataclass(frozen=True)
class RankMemory:
    """What one rank holds while a step runs, in bytes.

    Attributes:
        parameters: its parts of parameters and buffers.
        gradients: its parts of gradients, for which the arena has a place until the next step.
        batch: its rows of the batch.
        arena: what else is planned: activations, what collectives make, scratch.
        launches: most at one time that launches allocate themselves.
        optimizer: the optimizer's tensors, where they are known.
        outside: what PyTorch does not count, where it is known.
    """

    parameters: int
    gradients: int
    batch: int
    arena: int
    launches: int
    optimizer: int = 0
    outside: int = 0

    @property
    def num_bytes(self) -> int:
        """All of it."""
        return sum(vars(self).values())

    def __str__(self) -> str:
        parts = (f"{name} {bytes_text(size)}" for name, size in vars(self).items() if size)
        return f"a rank holds {bytes_text(self.num_bytes)}: {', '.join(parts)}"


@dataclass(frozen=True)
class ShardedStep:
    """Shows the plan and the collectives of a step over a mesh. ``print(parallel.plan)`` shows it.

    Attributes:
        layouts: what lies where.
        collectives: in the order in which they run.
        memory: of one rank.
    """

    layouts: MeshPlan
    collectives: tuple[Collective, ...]
    memory: RankMemory | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes that are summed or gathered in a step, on one rank."""
        return sum(one.num_bytes for one in self.collectives)

    def __str__(self) -> str:
        lines = [str(self.layouts), traffic_text(self.collectives)]
        lines += [] if self.memory is None else [str(self.memory)]
        if self.layouts.table:
            lines += ["", self.layouts.table]
        if self.layouts.whole:
            lines.append(f"on whole tensors on each rank: {', '.join(self.layouts.whole)}")
        return "\n".join(lines)


def traffic_text(collectives: tuple[Collective, ...]) -> str:
    """Returns a table: of each kind of place, how many collectives there are, and their bytes."""
    # Blocks move alike, so a part of the program has one row whatever the number of its calls.
    places = set((c.part, c.path) for c in collectives)
    rows: dict[tuple[str, str, str], tuple[int, int]] = {}
    for one in collectives:
        key = (one.part, one.kind, one.axis)
        number, num_bytes = rows.get(key, (0, 0))
        rows[key] = number + 1, num_bytes + one.num_bytes
    lines = []
    for (part, kind, axis), (number, num_bytes) in rows.items():
        calls = sum(name == part for name, _ in places)
        lines.append(
            f"{part}: {number / calls:g} {kind} over {axis}, {num_bytes / calls:,.0f} bytes"
            + (f" (each of {calls} calls)" if calls > 1 else "")
        )
    total = sum(c.num_bytes for c in collectives)
    return "\n".join([*lines, f"in all: {len(collectives)} collectives, {total:,} bytes per step"])
