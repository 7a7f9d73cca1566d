"""A step of a schedule in time: the action table that the ranks run, with a duration per action.

It predicts step time and bubble for predicted or for measured durations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ...reuse.errors import PipelineError
from .actions import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    TRAVELS_BACK,
    Action,
    ActionTable,
)

Durations = Callable[[Action], float]
"""Seconds that an action takes."""


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
        """The part of all ranks' time in which they wait."""
        busy = sum(slot.end_s - slot.start_s for slot in self.slots)
        whole = self.step_s * self.num_ranks
        return 1.0 - busy / whole if whole else 0.0


def simulate(
    table: ActionTable, duration_s: Durations, transfer_s: Callable[[Action], float]
) -> Timeline:
    """Runs an action table on a model of the ranks.

    Args:
        table: what each rank does, in order.
        duration_s: how long an action takes.
        transfer_s: how long what an action makes travels to the next rank.

    Raises:
        PipelineError: if actions wait for each other in a circle.
    """
    waiting = [list(reversed(actions)) for actions in table.ranks]
    done: dict[Action, float] = {}
    clock = [0.0] * len(table.ranks)
    slots: list[Slot] = []
    while any(waiting):
        moved = False
        for rank, actions in enumerate(waiting):
            while actions:
                ready = _ready_s(actions[-1], table, done, transfer_s)
                if ready is None:
                    break
                action = actions.pop()
                start = max(clock[rank], ready)
                clock[rank] = done[action] = start + duration_s(action)
                slots.append(Slot(action, rank, start, clock[rank]))
                moved = True
        if not moved:
            stuck = [str(actions[-1]) for actions in waiting if actions]
            raise PipelineError(
                f"The schedule cannot go on: {', '.join(stuck)} wait for each other."
            )
    return Timeline(tuple(slots), len(table.ranks))


def _ready_s(
    action: Action,
    table: ActionTable,
    done: dict[Action, float],
    transfer_s: Callable[[Action], float],
) -> float | None:
    """When what an action needs is there; None if that is not known yet."""
    times = [0.0]
    for options in _needs(action, table.num_stages):
        made = next((o for o in options if o in done), None)
        if made is None:
            return None
        travels = table.rank_of[made.stage] != table.rank_of[action.stage]
        times.append(done[made] + (transfer_s(made) if travels else 0.0))
    return max(times)


def _needs(action: Action, num_stages: int) -> list[list[Action]]:
    """What must be done before an action: one of each list."""
    stage, number = action.stage, action.micro_batch
    if action.kind == FORWARD:
        return [[Action(FORWARD, stage - 1, number)]] if stage else []
    if action.kind == BACKWARD_WEIGHT:
        return [[Action(BACKWARD_INPUT, stage, number)]]
    own = [Action(FORWARD, stage, number)]
    if stage == num_stages - 1:
        return [own]
    return [own, [Action(kind, stage + 1, number) for kind in TRAVELS_BACK]]
