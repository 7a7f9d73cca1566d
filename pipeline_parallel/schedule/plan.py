"""The plan of a pipeline: stages, costs, memory, and the step as it should be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...reuse.ir.printer import WIDTH
from .actions import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    COMPUTE,
    FORWARD,
    Action,
    ActionTable,
)
from .simulation import Durations, Timeline, simulate


@dataclass(frozen=True)
class StagePlan:
    """What one stage holds and costs, per micro-batch where it says so.

    Attributes:
        index: its number.
        rank: where it runs.
        num_blocks: calls in it.
        first, last: module paths of its first and last call.
        forward_s, backward_s: predicted, per micro-batch.
        flops: forward and backward, per micro-batch.
        parameter_bytes: of the model's tensors it uses.
        gradient_bytes: of its parameters' gradients.
        saved_bytes: kept from forward to backward, per micro-batch in flight.
        received_bytes: what arrives for a forward, per micro-batch.
        in_flight: most micro-batches between forward and backward.
    """

    index: int
    rank: int
    num_blocks: int
    first: str
    last: str
    forward_s: float
    backward_s: float
    flops: int
    parameter_bytes: int
    gradient_bytes: int
    saved_bytes: int
    received_bytes: int
    in_flight: int

    @property
    def flight_bytes(self) -> int:
        """What one micro-batch in flight holds."""
        return self.saved_bytes + self.received_bytes


@dataclass(frozen=True)
class PipelinePlan:
    """A pipeline before it runs. ``print(plan)`` shows it.

    Attributes:
        table: what each rank does, in order.
        stages: all stages.
        timeline: the predicted step.
    """

    table: ActionTable
    stages: tuple[StagePlan, ...]
    timeline: Timeline

    @property
    def bubble(self) -> float:
        """Predicted part of all ranks' time in which they wait."""
        return self.timeline.bubble

    @property
    def step_s(self) -> float:
        """Predicted time of a step."""
        return self.timeline.step_s

    def in_flight_bytes(self, rank: int) -> int:
        """Most bytes that a rank's micro-batches in flight hold."""
        held = {s.index: s.flight_bytes for s in self.stages}
        return self.table.peak_bytes(rank, held)

    def peak_bytes(self, rank: int) -> int:
        """Parameters, gradients, and micro-batches in flight of a rank at its fullest."""
        own = [s for s in self.stages if s.rank == rank]
        return sum(s.parameter_bytes + s.gradient_bytes for s in own) + self.in_flight_bytes(rank)

    def simulated(self, measured_s: dict[tuple[int, str], float]) -> Timeline:
        """Returns the step as it would be with measured durations of (stage, kind of action)."""
        return simulate(self.table, lambda a: measured_s[a.stage, a.kind], lambda a: 0.0)

    def __str__(self) -> str:
        table = self.table
        lines = [
            f"{table.schedule}: {table.num_stages} stages on {len(table.ranks)} rank(s), "
            f"{table.num_micro_batches} micro-batches; predicted bubble {self.bubble:.1%}",
        ]
        lines += _table(self.stages)
        for rank in range(len(table.ranks)):
            lines.append(
                f"rank {rank}: peak {megabytes(self.peak_bytes(rank))}, of it in flight "
                f"{megabytes(self.in_flight_bytes(rank))}"
            )
        return "\n".join(lines)


_HEAD = ("stage", "rank", "calls", "GFLOP", "forward", "backward", "params", "saved", "in flight")


def _table(stages: Sequence[StagePlan]) -> list[str]:
    """A line for each stage, no wider than a screen: names of layers are cut, numbers never."""
    rows = [
        (
            *(str(n) for n in (s.index, s.rank, s.num_blocks)),
            f"{s.flops / 1e9:.2f}",
            f"{s.forward_s * 1e3:.2f} ms",
            f"{s.backward_s * 1e3:.2f} ms",
            megabytes(s.parameter_bytes),
            megabytes(s.saved_bytes),
            str(s.in_flight),
        )
        for s in stages
    ]
    widths = [max(map(len, column)) for column in zip(_HEAD, *rows, strict=True)]
    lines = [
        " ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True))
        for row in (_HEAD, *rows)
    ]
    left = WIDTH - len(lines[0]) - 2
    return [
        f"{line}  {span}".rstrip()
        for line, span in zip(lines, ("layers", *(_span(s, left) for s in stages)), strict=True)
    ]


def _span(stage: StagePlan, width: int) -> str:
    """The first and the last layer; where that is too long, what both begin with is said once."""
    first, last = stage.first, stage.last
    if first == last:
        return _end_of(first, width)
    parent = first.rpartition(".")[0]
    short = last.removeprefix(f"{parent}.") if parent else last
    half = (width - len(" .. ")) // 2
    texts = (f"{first} .. {last}", f"{first} .. {short}")
    cut = f"{_end_of(first, half)} .. {_end_of(short, half)}"
    return next((text for text in texts if len(text) <= width), cut)


def _end_of(path: str, width: int) -> str:
    """A path, or the end of one that is too long."""
    return path if len(path) <= width else f"...{path[-max(width - 3, 1) :]}"


def megabytes(num_bytes: int) -> str:
    """Returns a size in text."""
    return f"{num_bytes / 2**20:.2f} MB"


def predicted_durations(stages: Sequence[StagePlan]) -> Durations:
    """Durations from the predicted costs; a backward's halves take half of it each."""
    by_stage = {s.index: s for s in stages}

    def duration_s(action: Action) -> float:
        stage = by_stage[action.stage]
        if action.kind == FORWARD:
            return stage.forward_s
        return stage.backward_s if action.kind == BACKWARD else stage.backward_s / 2

    assert set(COMPUTE) == {FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT}
    return duration_s
