"""The action table: each rank's actions in order, from a schedule of PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..reuse.errors import PipelineError

FORWARD = "F"
BACKWARD = "B"
BACKWARD_INPUT = "I"
BACKWARD_WEIGHT = "W"
COMPUTE = (FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)
TRAVELS_BACK = (BACKWARD, BACKWARD_INPUT)

ACTION_TEXT = {
    FORWARD: "forward",
    BACKWARD: "backward",
    BACKWARD_INPUT: "backward of inputs",
    BACKWARD_WEIGHT: "backward of weights",
}

# The number of stages on a rank that PyTorch's schedule of this name takes.
_STAGES_PER_RANK = {
    "GPipe": "one",
    "1F1B": "one",
    "Interleaved1F1B": "many",
    "LoopedBFS": "many",
    "InterleavedZeroBubble": "many",
    "ZBVZeroBubble": "two",
    "DualPipeV": "two",
}
SCHEDULES = tuple(_STAGES_PER_RANK)
# Here stages s and num_stages - 1 - s share a rank: the first rank also has the last stage.
_V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
_ALIASES = {"zbv": "ZBVZeroBubble"}


@dataclass(frozen=True, slots=True)
class Action:
    """One step of one stage for one micro-batch."""

    kind: str
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


@dataclass(frozen=True)
class ActionTable:
    """The compute actions of each rank, in order."""

    schedule: str  # the name of the schedule
    ranks: tuple[tuple[Action, ...], ...]  # the actions of each rank
    rank_of: tuple[int, ...]  # the rank of each stage
    num_micro_batches: int  # the number of micro-batches
    # Not compared: a dict has no hash, and it follows from the rest.
    # For an action that receives from another rank, how many actions of its rank are done when the
    # receive may start; by default those before it.
    posted: Mapping[Action, int] = field(default_factory=dict, compare=False)
    # The number of further actions after which PyTorch's runtime has waited for a send; None if it
    # waits at the end of the step.
    num_actions_sending: int | None = None

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return len(self.rank_of)

    @property
    def splits_backward(self) -> bool:
        """Whether any backward is split in two halves."""
        return any(a.kind == BACKWARD_INPUT for rank in self.ranks for a in rank)

    def stages_of(self, rank: int) -> list[int]:
        """Returns the stages that a rank holds, in order."""
        return [s for s, r in enumerate(self.rank_of) if r == rank]

    def in_flight(self) -> list[int]:
        """Returns, for each stage, the most micro-batches between forward and last backward."""
        return [self.peak_bytes(rank, {stage: 1}) for stage, rank in enumerate(self.rank_of)]

    @property
    def num_flights(self) -> int:
        """The most micro-batches in flight on a rank, averaged over its stages."""
        ones = dict.fromkeys(range(self.num_stages), 1)
        return max(-(-self.peak_bytes(r, ones) // len(self.stages_of(r))) for r in self.rank_of)

    def peak_bytes(self, rank: int, bytes_per_flight: Mapping[int, int]) -> int:
        """Returns the most bytes that a rank's micro-batches in flight hold, given one's."""
        held = most = 0
        for action in self.ranks[rank]:
            if action.kind == FORWARD:
                held += bytes_per_flight.get(action.stage, 0)
            # The late half of a backward still reads what the forward saved.
            elif action.kind in (BACKWARD, BACKWARD_WEIGHT):
                held -= bytes_per_flight.get(action.stage, 0)
            most = max(most, held)
        assert not held, f"{held} bytes stay without a backward"
        return most


def schedule_name(name: str) -> str:
    """Returns the full name of a schedule, given in any case; PipelineError for an unknown one."""
    known = {n.lower(): n for n in SCHEDULES} | _ALIASES
    if name.lower() not in known:
        raise PipelineError(f"schedule={name!r} is unknown; there are {SCHEDULES}.")
    return known[name.lower()]


def rank_of_stages(schedule: str, num_stages: int, num_ranks: int) -> tuple[int, ...]:
    """Returns the rank of each stage; PipelineError if the schedule is not for so many."""
    per_rank = _STAGES_PER_RANK[schedule]
    if num_stages < num_ranks or num_stages % num_ranks:
        raise PipelineError(
            f"num_stages={num_stages} cannot be spread evenly over {num_ranks} rank(s). Use a "
            f"multiple of {num_ranks}."
        )
    held = num_stages // num_ranks
    wanted = {"one": held == 1, "two": held == 2, "many": True}[per_rank]
    if not wanted:
        raise PipelineError(
            f"{schedule} holds {per_rank} stage(s) per rank, and num_stages={num_stages} on "
            f"{num_ranks} rank(s) makes {held}. Use num_stages="
            f"{num_ranks * (1 if per_rank == 'one' else 2)}, or another schedule."
        )
    if schedule in _V_SHAPED:
        return tuple(min(s, num_stages - 1 - s) for s in range(num_stages))
    return tuple(s % num_ranks for s in range(num_stages))
