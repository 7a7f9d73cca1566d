"""The order of a rank's actions, what it holds in it, and how long buffers must stay untouched.

PyTorch's runtime starts a receive some actions before the action that needs it, and waits for sends
when the step ends. Memory that was sent may be used again much sooner: as soon as this rank has
received something that was sent after the other rank had what it was waiting for. That follows from
the action tables of all ranks, by vector clocks; nothing waits for it. (Lamport, "Time, Clocks, and
the Ordering of Events in a Distributed System", 1978; Mattern, "Virtual Time", 1989.)

Without a plan, the tensors that travel and the gradients that one backward makes are counted beside
what micro-batches keep: PyTorch's runtime lets go of what it sent when the step ends (1F1B: when it
sends the next).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from .actions import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    Action,
    ActionTable,
)
from .plan import simulate


@dataclass(frozen=True)
class Boundaries:
    """Which stages send something to the next one, and which send a gradient back."""

    forward: frozenset[int]
    back: frozenset[int]

    def is_sent(self, action: Action) -> bool:
        """Whether an action makes something for another stage."""
        stages = self.forward if action.kind == FORWARD else self.back
        return action.kind != BACKWARD_WEIGHT and action.stage in stages


@dataclass(frozen=True)
class RankOrder:
    """The actions of one rank, step by step.

    Attributes:
        actions: in order; where any backward is split, every one is, into two that follow.
        posted: for an action that receives from another rank, the number of the first action that
            its receive may run beside.
        delivered: for an action that sends to another rank, the number of the first action by which
            that has certainly arrived; ``len(actions)`` if only the end of the step tells.
    """

    actions: tuple[Action, ...]
    posted: Mapping[Action, int]
    delivered: Mapping[Action, int]


def rank_order(table: ActionTable, rank: int, boundaries: Boundaries) -> RankOrder:
    """Returns the order of one rank.

    Args:
        table: what all ranks do.
        rank: which.
        boundaries: what travels at all; where nothing does, nobody waits either.
    """
    split = _split_table(table)
    actions = split.ranks[rank]
    posted: dict[Action, int] = {}
    delivered: dict[Action, int] = {}
    number = {action: i for i, action in enumerate(actions)}
    arrivals = _arrivals(split, rank, boundaries)
    for index, action in enumerate(actions):
        maker = _maker(action, split, boundaries)
        if maker is not None and split.rank_of[maker.stage] != rank:
            posted[action] = split.posted.get(action, index)
        taker = _taker(action, split, boundaries)
        if taker is not None and split.rank_of[taker.stage] != rank:
            found = arrivals.get(action, len(actions))
            # PyTorch's runtime may itself wait for a send sooner than any message tells.
            if table.num_actions_sending is not None:
                found = min(found, number[action] + table.num_actions_sending)
            delivered[action] = min(found, len(actions))
    return RankOrder(actions, posted, delivered)


def _split_table(table: ActionTable) -> ActionTable:
    """Replaces every backward by its two halves, if any backward is split."""
    if not table.splits_backward:
        return table
    # A schedule may mix whole and split backwards. The halves serve both, so a stage is compiled
    # for halves alone, and a whole backward is one after the other.
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


def _maker(action: Action, table: ActionTable, boundaries: Boundaries) -> Action | None:
    """Returns the action of the neighbouring stage whose result this one waits for."""
    if action.kind == BACKWARD_WEIGHT:
        return None  # it goes on from what the early half of its own stage left
    step = -1 if action.kind == FORWARD else 1
    return _neighbour(action, step, table, boundaries, sends=True)


def _taker(action: Action, table: ActionTable, boundaries: Boundaries) -> Action | None:
    """Returns the action of the neighbouring stage that waits for this one's result."""
    if not boundaries.is_sent(action):
        return None
    step = 1 if action.kind == FORWARD else -1
    return _neighbour(action, step, table, boundaries, sends=False)


def _neighbour(
    action: Action, step: int, table: ActionTable, boundaries: Boundaries, *, sends: bool
) -> Action | None:
    stage = action.stage + step
    if not 0 <= stage < table.num_stages:
        return None
    found = replace(action, stage=stage)
    return found if not sends or boundaries.is_sent(found) else None


def _arrivals(table: ActionTable, rank: int, boundaries: Boundaries) -> dict[Action, int]:
    """For each action of a rank whose result goes to another: when it knows that it arrived."""
    place = {a: (r, i) for r, actions in enumerate(table.ranks) for i, a in enumerate(actions)}
    clocks = _clocks(table, place, boundaries)[rank]
    found: dict[Action, int] = {}
    for index, action in enumerate(table.ranks[rank]):
        taker = _taker(action, table, boundaries)
        if taker is None or table.rank_of[taker.stage] == rank:
            continue
        other, position = place[taker]
        # Who takes a value has it when it begins, so the first action that can only run after that
        # one began is proof that the value arrived.
        known = np.flatnonzero(clocks[index + 1 :, other] >= position)
        if len(known):
            found[action] = index + 1 + int(known[0])
    return found


def _clocks(
    table: ActionTable, place: Mapping[Action, tuple[int, int]], boundaries: Boundaries
) -> list[np.ndarray]:
    """For each action, the last action of each rank that had certainly begun before it."""
    num_ranks = len(table.ranks)
    clocks = [np.full((len(actions), num_ranks), -1) for actions in table.ranks]
    for rank, index in _in_some_order(table):
        clock = clocks[rank][index]
        # Two things tell of other ranks: what this rank knew before, and what a message brings.
        if index:
            np.maximum(clock, clocks[rank][index - 1], out=clock)
        maker = _maker(table.ranks[rank][index], table, boundaries)
        if maker is not None:
            np.maximum(clock, clocks[place[maker][0]][place[maker][1]], out=clock)
        clock[rank] = index
    return clocks


def _in_some_order(table: ActionTable) -> Iterator[tuple[int, int]]:
    """Yields every action (rank, number) after all that it may wait for."""
    num_done: Counter[int] = Counter()
    for slot in simulate(table, lambda _: 0.0, lambda _: 0.0).slots:
        yield slot.rank, num_done[slot.rank]
        num_done[slot.rank] += 1
