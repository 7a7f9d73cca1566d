"""The plan of a pipeline: stages, costs, memory, and the simulated step.

A step is simulated from the action table that the ranks run and a duration per action, predicted or
measured; that gives step time and bubble. The memory of a rank, and how long its buffers must not
be overwritten, follow from the order of actions.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from graphlib import CycleError, TopologicalSorter

from ..reuse.errors import PipelineError
from ..reuse.ir.costs import Cost, Rates
from ..reuse.ir.printer import WIDTH, bytes_text
from ..reuse.ir.program import Composite, Program
from ..reuse.ir.types import TensorType, Wire
from .actions import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    TRAVELS_BACK,
    Action,
    ActionTable,
)
from .stage_derivative import StageDerivative

Durations = Callable[[Action], float]  # seconds that an action takes
CostOf = Callable[[Program], Cost]  # predicts the cost of one run of a program


@dataclass(frozen=True)
class Slot:
    """One action in time."""

    action: Action
    rank: int
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """A simulated step."""

    slots: tuple[Slot, ...]
    num_ranks: int

    @property
    def step_s(self) -> float:
        """When the last action ends."""
        return max(slot.end_s for slot in self.slots)

    @property
    def bubble(self) -> float:
        """The share of the time of all ranks in which they wait."""
        busy = sum(slot.end_s - slot.start_s for slot in self.slots)
        whole = self.step_s * self.num_ranks
        return 1.0 - busy / whole if whole else 0.0


def simulate(
    table: ActionTable, duration_s: Durations, transfer_s: Callable[[Action], float]
) -> Timeline:
    """Runs an action table on a model of the ranks.

    An action takes ``duration_s``, and its result ``transfer_s`` to the next rank. Raises if
    actions wait for each other (a deadlock).
    """
    done: dict[Action, float] = {}
    clock = [0.0] * len(table.ranks)
    slots: list[Slot] = []
    for action, needed in _ordered(table).items():
        rank = table.rank_of[action.stage]
        # A result of the same rank needs no transfer.
        travels = {one: table.rank_of[one.stage] != rank for one in needed}
        ready = [done[one] + (transfer_s(one) if travels[one] else 0.0) for one in needed]
        start = max([clock[rank], *ready])
        clock[rank] = done[action] = start + duration_s(action)
        slots.append(Slot(action, rank, start, clock[rank]))
    return Timeline(tuple(slots), len(table.ranks))


def _ordered(table: ActionTable) -> dict[Action, list[Action]]:
    """Returns all actions, each with those whose results it needs, and after them."""
    known = dict.fromkeys(action for actions in table.ranks for action in actions)
    needed = {
        action: [next(filter(known.__contains__, options)) for options in _needs(action, table)]
        for action in known
    }
    sorter = TopologicalSorter(needed)
    for actions in table.ranks:
        for before, action in itertools.pairwise(actions):
            sorter.add(action, before)
    try:
        return {action: needed[action] for action in sorter.static_order()}
    except CycleError as error:
        stuck = ", ".join(map(str, error.args[1]))
        raise PipelineError(f"The schedule cannot go on: {stuck} wait for each other.") from error


def _needs(action: Action, table: ActionTable) -> list[list[Action]]:
    """Returns lists of actions; the one of each list that is in the table must precede this one."""
    stage, number = action.stage, action.micro_batch
    if action.kind == FORWARD:
        return [[Action(FORWARD, stage - 1, number)]] if stage else []
    if action.kind == BACKWARD_WEIGHT:
        return [[Action(BACKWARD_INPUT, stage, number)]]
    # The last stage computes the loss itself: its backward waits for no other stage.
    own = [Action(FORWARD, stage, number)]
    if stage == table.num_stages - 1:
        return [own]
    # A whole backward or its early half sends the gradient: a schedule may mix the two.
    return [own, [Action(kind, stage + 1, number) for kind in TRAVELS_BACK]]


@dataclass(frozen=True)
class StagePlan:
    """The predicted bytes and costs of one stage; some are per micro-batch."""

    index: int  # its number
    rank: int  # the rank that runs it
    num_blocks: int  # the number of calls in it
    first: str  # the module path of its first call
    last: str  # that of its last call
    forward_s: float  # the seconds of its forward, per micro-batch
    backward_s: float  # those of its backward
    flops: int  # the operations of both, per micro-batch
    parameter_bytes: int  # the bytes of the model's tensors that it uses
    gradient_bytes: int  # the bytes of its parameters' gradients
    saved_bytes: int  # the bytes that a micro-batch in flight keeps from forward to backward
    received_bytes: int  # the bytes that it receives for a forward, per micro-batch
    in_flight: int  # the most micro-batches between forward and backward

    @property
    def flight_bytes(self) -> int:
        """The bytes that one micro-batch in flight holds."""
        return self.saved_bytes + self.received_bytes


@dataclass(frozen=True)
class PipelinePlan:
    """A pipeline before it runs: its actions, its stages and a predicted step.

    ``print(plan)`` shows it.
    """

    table: ActionTable
    stages: tuple[StagePlan, ...]
    timeline: Timeline

    @property
    def bubble(self) -> float:
        """The predicted share of the time of all ranks in which they wait."""
        return self.timeline.bubble

    @property
    def step_s(self) -> float:
        """Predicted time of a step."""
        return self.timeline.step_s

    def in_flight_bytes(self, rank: int) -> int:
        """Returns the most bytes that a rank's micro-batches in flight hold."""
        held = {s.index: s.flight_bytes for s in self.stages}
        return self.table.peak_bytes(rank, held)

    def peak_bytes(self, rank: int) -> int:
        """Returns the most bytes on a rank: parameters, gradients, micro-batches in flight."""
        own = [s for s in self.stages if s.rank == rank]
        return sum(s.parameter_bytes + s.gradient_bytes for s in own) + self.in_flight_bytes(rank)

    def simulated(self, measured_s: dict[tuple[int, str], float]) -> Timeline:
        """Simulates a step with durations that were measured for each stage and kind of action."""
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
                f"rank {rank}: peak {bytes_text(self.peak_bytes(rank))}, of it in flight "
                f"{bytes_text(self.in_flight_bytes(rank))}"
            )
        return "\n".join(lines)


_HEAD = ("stage", "rank", "calls", "GFLOP", "forward", "backward", "params", "saved", "in flight")


def _table(stages: Sequence[StagePlan]) -> list[str]:
    """Returns a line for each stage, no wider than a screen; only names of layers are shortened."""
    rows = [
        (
            *(str(n) for n in (s.index, s.rank, s.num_blocks)),
            f"{s.flops / 1e9:.2f}",
            f"{s.forward_s * 1e3:.2f} ms",
            f"{s.backward_s * 1e3:.2f} ms",
            bytes_text(s.parameter_bytes),
            bytes_text(s.saved_bytes),
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
    layers = ("layers", *(_layers(stage, left) for stage in stages))
    return [f"{line}  {text}".rstrip() for line, text in zip(lines, layers, strict=True)]


def _layers(stage: StagePlan, width: int) -> str:
    """Returns the paths of the first and last layer, shortened at the left if they are too long."""
    parent = stage.first.rpartition(".")[0]
    short = stage.last.removeprefix(f"{parent}.") if parent else stage.last
    texts = [f"{stage.first} .. {last}" for last in (stage.last, short)]
    texts = texts if stage.first != stage.last else [stage.first]
    return next((text for text in texts if len(text) <= width), f"...{texts[-1][3 - width :]}")


def predicted_durations(stages: Sequence[StagePlan]) -> Durations:
    """Returns predicted durations; each half of a backward takes half of its time."""
    by_stage = {s.index: s for s in stages}

    def duration_s(action: Action) -> float:
        stage = by_stage[action.stage]
        if action.kind == FORWARD:
            return stage.forward_s
        # Only the whole backward has a predicted cost.
        return stage.backward_s if action.kind == BACKWARD else stage.backward_s / 2

    return duration_s


def make_plan(
    derived: Sequence[StageDerivative], table: ActionTable, cost_of: CostOf, rates: Rates
) -> PipelinePlan:
    """Returns the plan of all stages; ``rates`` are those of transfers."""
    in_flight = table.in_flight()
    stages = tuple(_stage(d, table, cost_of, in_flight) for d in derived)
    sent = {(FORWARD, d.stage.index): _wire_bytes(d.stage.sent_types) for d in derived}
    back = {d.stage.index: _wire_bytes(d.gradient_types) for d in derived}

    def transfer_s(action: Action) -> float:
        key = (action.kind, action.stage)
        num_bytes = sent[key] if key in sent else back[action.stage]
        return rates.transfer_latency_s + num_bytes / rates.transfer_bytes_per_s

    timeline = simulate(table, predicted_durations(stages), transfer_s)
    return PipelinePlan(table, stages, timeline)


def _stage(
    derived: StageDerivative, table: ActionTable, cost_of: CostOf, in_flight: Sequence[int]
) -> StagePlan:
    stage = derived.stage
    forward = cost_of(derived.forward)
    backward = sum(map(cost_of, derived.backward), Cost())
    paths = stage.paths or ("",)
    held = {id(s.tensor): t for s, t in zip(stage.model_tensors, stage.model_types, strict=True)}
    return StagePlan(
        stage.index,
        table.rank_of[stage.index],
        num_blocks(stage.program),
        paths[0],
        paths[-1],
        forward.seconds,
        backward.seconds,
        forward.flops + backward.flops,
        sum(t.num_bytes for t in held.values()),
        sum(t.num_bytes for _, t in derived.trained_types),
        derived.saved_bytes,
        sum(t.num_bytes for t in stage.received_types),
        in_flight[stage.index],
    )


def num_blocks(program: Program) -> int:
    """Counts the calls of blocks: those with a module path, also inside parts of composites."""
    total = 0
    for call in program.calls:
        if call.path:
            total += 1
        elif isinstance(call.closure, Composite):
            total += num_blocks(call.closure.program)
    return total


def _wire_bytes(types: Sequence[TensorType]) -> int:
    return sum(Wire(t).num_bytes for t in types)


# ---- The order of a rank's actions ---------------------------------------------------------------
#
# PyTorch's runtime starts a receive some actions before the action that needs it, and waits for
# sends when the step ends. The memory of a sent value can be reused much sooner: as soon as this
# rank has received something that the other rank sent after it had that value. The order of all
# ranks' actions tells when that is: those of a rank follow one another, and an action follows the
# one that sends to it. Nothing has to wait for it. (Lamport, "Time, Clocks, and the Ordering of
# Events in a Distributed System", 1978.)
#
# Where memory is not planned, a rank also holds sent and received tensors, and the gradients of one
# backward: PyTorch's runtime frees what it sent when the step ends (1F1B: when it sends the next).


@dataclass(frozen=True)
class RankOrder:
    """The actions of one rank, and when what it receives and sends is on its way."""

    # In order; if any backward is split, all are, into two actions each.
    actions: tuple[Action, ...]
    # For an action that receives from another rank, the number of the first action that the receive
    # may overlap with.
    posted: Mapping[Action, int]
    # For an action that sends to another rank, the number of the first action at which the value
    # has certainly arrived; ``len(actions)`` if that is the end of the step.
    delivered: Mapping[Action, int]


class Progress:
    """Checks that a rank's actions run in the planned order, for which alone memory was planned."""

    def __init__(self, order: RankOrder) -> None:
        self._order = order
        self._num_done = 0

    def start(self) -> None:
        """Begins a step."""
        self._num_done = 0

    def begin(self, action: Action) -> None:
        """Checks that the action that runs now is the planned one."""
        planned = self._order.actions[self._num_done : self._num_done + 1]
        if planned != (action,):
            self._refuse(f"runs {action}", f"{planned[0] if planned else 'the end'}")
        self._num_done += 1

    def check_receive(self, action: Action) -> None:
        """Checks that the memory to receive into is free."""
        if self._num_done < self._order.posted.get(action, 0):
            self._refuse(
                f"starts to receive for {action} after {self._num_done} actions",
                f"not before {self._order.posted[action]}",
            )

    def _refuse(self, found: str, planned: str) -> None:
        raise PipelineError(
            f"PyTorch's runtime {found}, and memory was planned for {planned}: this version of "
            "PyTorch runs schedules in another order than its action table says."
        )


def rank_order(
    table: ActionTable, rank: int, forward: Collection[int], back: Collection[int]
) -> RankOrder:
    """Returns the order of one rank.

    The stages ``forward`` send a value to the next one, and the stages ``back`` a gradient back.
    """
    split = _split_table(table)
    actions, rank_of = split.ranks[rank], split.rank_of
    takers = _takers(split, forward, back)
    makers = {taker: action for action, taker in takers.items()}
    proofs = _proofs(split, rank, takers)
    posted: dict[Action, int] = {}
    delivered: dict[Action, int] = {}
    for index, action in enumerate(actions):
        maker, taker = makers.get(action), takers.get(action)
        if maker is not None and rank_of[maker.stage] != rank:
            posted[action] = split.posted.get(action, index)
        if taker is not None and rank_of[taker.stage] != rank:
            found = proofs[taker]
            # PyTorch's runtime may itself wait for a send before that.
            if table.num_actions_sending is not None:
                found = min(found, index + table.num_actions_sending)
            delivered[action] = min(found, len(actions))
    return RankOrder(actions, posted, delivered)


def _split_table(table: ActionTable) -> ActionTable:
    """Replaces every backward by its two halves, if the schedule splits any."""
    if not table.splits_backward:
        return table
    # A schedule may mix whole and split backwards. A stage is compiled as two halves only, and a
    # whole backward runs one after the other.
    ranks, posted = [], {}
    for actions in table.ranks:
        found: list[Action] = []
        places = []
        for action in actions:
            places.append(len(found))
            found += _halves(action) if action.kind == BACKWARD else [action]
        for action, place in table.posted.items():
            if action in actions:
                posted[_halves(action)[0] if action.kind == BACKWARD else action] = places[place]
        ranks.append(tuple(found))
    return replace(table, ranks=tuple(ranks), posted=posted)


def _halves(action: Action) -> list[Action]:
    return [replace(action, kind=kind) for kind in (BACKWARD_INPUT, BACKWARD_WEIGHT)]


def _takers(
    table: ActionTable, forward: Collection[int], back: Collection[int]
) -> dict[Action, Action]:
    """Returns, for each action whose result is sent, the action that receives it."""
    found = {}
    for action in itertools.chain(*table.ranks):
        if action.kind == FORWARD and action.stage in forward:
            found[action] = replace(action, stage=action.stage + 1)
        elif action.kind in TRAVELS_BACK and action.stage in back:
            found[action] = replace(action, stage=action.stage - 1)
    return found


def _proofs(table: ActionTable, rank: int, takers: Mapping[Action, Action]) -> dict[Action, int]:
    """Returns, for each action, the number of this rank's first action that runs only after it.

    An action that takes a value has it when it begins, so the action of this number proves that the
    value has arrived. It is ``len(table.ranks[rank])``, the end of the step, if there is none.
    """
    own = {action: number for number, action in enumerate(table.ranks[rank])}
    following = {a: b for actions in table.ranks for a, b in itertools.pairwise(actions)}
    first: dict[Action, int] = {}
    for action in reversed(_ordered(table)):
        later = [one for one in (following.get(action), takers.get(action)) if one is not None]
        numbers = (own[one] if one in own else first[one] for one in later)
        first[action] = min(numbers, default=len(own))
    return first
