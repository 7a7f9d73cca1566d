"""Lists the collectives of a rank's program with their bytes, and counts the rank's memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.fx

from ...reuse.errors import VerifyError
from ...reuse.ir.costs import Cost, OperatorCosts, value_bytes
from ...reuse.ir.printer import bytes_text
from ...reuse.ir.program import Composite, Leaf, Program
from ...reuse.ir.types import TensorType
from .layouts import Axis, Moves
from .plan import MeshPlan
from .torch_collectives import COLLECTIVES, INTO, WAIT


@dataclass(frozen=True)
class Collective:
    """One collective of a step."""

    path: str  # the module path of the call that it belongs to, such as ``micro_batch_0.blocks.1``
    part: str  # the name of the called closure, such as ``Block.forward``
    # ``"all_reduce"``, ``"all_gather"``, ``"reduce_scatter"``, ``"all_to_all"``, or ``"send"`` from
    # a stage to its neighbour.
    kind: str
    axis: str  # the dimension of the mesh
    num_bytes: int  # the bytes of this rank's input or output, whichever is larger
    # The number of launches that overlap with it; None if it is not linked.
    num_beside: int | None = None


def collectives_of(
    program: Program, launches: Iterable[Any], part: str = ""
) -> tuple[Collective, ...]:
    """Returns the collectives of a linked program in the order in which they start.

    Raises VerifyError unless the program waits for each collective once.
    """
    found, beside = list(collectives_in(program, part=part)), list[int]()
    begun: dict[int, int] = {}  # buffer of the result -> number of the collective
    for place, one in enumerate(launches):
        launch = one.launch
        if launch.function in INTO:
            begun[one.place(dict(launch.kwargs)["out"]).instance] = len(beside)
            beside.append(place)
        elif launch.function is WAIT:
            number = begun.pop(one.place(launch.args[0]).instance, -1)
            if number < 0:
                raise VerifyError("A program waits for a tensor that no collective writes.")
            beside[number] = place - beside[number] - 1
    if begun or len(found) != len(beside):
        raise VerifyError("A program starts a collective and never waits for it.")
    pairs = zip(found, beside, strict=True)
    return tuple(replace(one, num_beside=number) for one, number in pairs)


def collectives_in(program: Program, path: str = "", part: str = "") -> Iterator[Collective]:
    """Yields the collectives of a sharded program, which is called at a path, in order."""
    for call in program.calls:
        closure = call.closure
        inner = ".".join(p for p in (path, call.path) if p)
        if isinstance(closure, Composite):
            yield from collectives_in(closure.program, inner, closure.name)
        elif isinstance(closure, Leaf) and closure.first_target in COLLECTIVES:  # alone in its leaf
            (taken,), (given,) = closure.input_types, closure.output_types
            assert isinstance(taken, TensorType)
            assert isinstance(given, TensorType)
            node: torch.fx.Node = closure.nodes[0]
            kind = str(node.target).split(".")[1]
            axis = str(node.args[-1])
            yield Collective(path, part, kind, axis, max(taken.num_bytes, given.num_bytes))


@dataclass(frozen=True)
class MeshCosts(OperatorCosts):
    """The costs of operators on one device, and of collectives over the axes of a mesh."""

    axes: Sequence[Axis] = ()

    def of(self, node: torch.fx.Node) -> Cost:
        """Returns the cost of an operator or a collective that runs alone."""
        if node.target not in COLLECTIVES:
            return super().of(node)
        place = [axis.name for axis in self.axes].index(str(node.args[-1]))
        size = max(map(value_bytes, (node, *node.all_input_nodes)))
        kind = str(node.target).split(".")[1]
        return Cost(0, size, sum(Moves(self.axes).step_s(kind, place, size)))


@dataclass(frozen=True)
class RankMemory:
    """The bytes of one rank while a step runs, by purpose."""

    parameters: int  # shards of parameters and buffers
    gradients: int  # shards of gradients, which stay in the arena until the next step
    batch: int  # rows of the batch
    arena: int  # the rest of the arena: activations, results of collectives, scratch
    launches: int  # the most bytes that launches allocate at one time
    optimizer: int = 0  # the optimizer's tensors, if known
    outside: int = 0  # memory that PyTorch does not count, if known

    @property
    def num_bytes(self) -> int:
        """The bytes for all purposes."""
        return sum(vars(self).values())

    def __str__(self) -> str:
        parts = (f"{name} {bytes_text(size)}" for name, size in vars(self).items() if size)
        return f"a rank holds {bytes_text(self.num_bytes)}: {', '.join(parts)}"


@dataclass(frozen=True)
class ShardedStep:
    """The plan and the collectives of a step over a mesh. ``print(parallel.plan)`` shows it."""

    layouts: MeshPlan  # the layouts of its tensors
    collectives: tuple[Collective, ...]  # its collectives, in the order in which they start
    memory: RankMemory | None = None  # the memory of one rank

    @property
    def num_bytes(self) -> int:
        """The bytes that the collectives of one rank reduce, gather or exchange in a step."""
        return sum(one.num_bytes for one in self.collectives)

    def __str__(self) -> str:
        lines = [str(self.layouts), traffic_text(self.collectives)]
        lines += [] if self.memory is None else [str(self.memory)]
        if self.layouts.table:
            lines += ["", self.layouts.table]
        if self.layouts.whole:
            lines.append(f"on whole tensors on each rank: {', '.join(self.layouts.whole)}")
        return "\n".join(lines)


@dataclass(frozen=True)
class TrafficRow:
    """The collectives of one kind in a part of a program, which is called several times."""

    part: str  # the part, such as ``Block.forward``
    num_calls: int  # how often a step calls it
    kind: str  # the kind of the collectives
    axis: str  # the dimension of the mesh
    count: float  # their number in one call
    num_bytes: float  # their bytes in one call
    # The fewest and the most launches that overlap with one; empty if not linked.
    beside: tuple[int, ...]

    def __str__(self) -> str:
        text = (
            f"{self.part}: {self.count:g} {self.kind} over {self.axis}, {self.num_bytes:,.0f} bytes"
        )
        text += f" (each of {self.num_calls} calls)" if self.num_calls > 1 else ""
        ends = " to ".join(map(str, dict.fromkeys(self.beside)))
        return f"{text}, waited for after {ends} launches" if ends else text


def traffic_rows(collectives: Iterable[Collective]) -> Iterator[TrafficRow]:
    """Yields a row for each part of a program and each kind of collective in it."""
    paths: dict[str, set[str]] = defaultdict(set)
    rows: dict[tuple[str, str, str], list[Collective]] = defaultdict(list)
    for one in collectives:
        paths[one.part].add(one.path)
        rows[one.part, one.kind, one.axis].append(one)
    for (part, kind, axis), row in rows.items():
        calls, num_bytes = len(paths[part]), sum(one.num_bytes for one in row)
        beside = sorted(one.num_beside for one in row if one.num_beside is not None)
        ends = (beside[0], beside[-1]) if beside else ()
        yield TrafficRow(part, calls, kind, axis, len(row) / calls, num_bytes / calls, ends)


def traffic_text(collectives: Sequence[Collective]) -> str:
    """Returns a table of collectives and their bytes, by part and kind."""
    total = sum(c.num_bytes for c in collectives)
    end = f"in all: {len(collectives)} collectives, {total:,} bytes per step"
    return "\n".join([*map(str, traffic_rows(collectives)), end])
