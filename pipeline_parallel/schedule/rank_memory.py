"""What a rank holds beside what its micro-batches keep for their backward, before it is planned.

These are the tensors that travel, and the gradients that one backward makes. A bound from above: a
planned arena holds what was sent only until it has arrived, and adds each gradient to its sum at
once. Without a plan, PyTorch's runtime lets go of what it sent when the step ends (schedules with
one stage per rank: GPipe likewise, 1F1B when the next one is sent).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from .actions import FORWARD, TRAVELS_BACK, Action, ActionTable


@dataclass(frozen=True)
class StageMemory:
    """Bytes of one stage.

    Attributes:
        received, sent: what travels forward, per micro-batch.
        gradients_received, gradients_sent: what travels back, per micro-batch.
        gradients: of parameters, as one backward returns them.
    """

    received: int
    sent: int
    gradients_received: int
    gradients_sent: int
    gradients: int


def bytes_beside(table: ActionTable, rank: int, stages: Mapping[int, StageMemory]) -> int:
    """Returns the most bytes that a step of a rank holds at once in such tensors.

    Args:
        table: what each rank does.
        rank: which.
        stages: bytes of each of its stages; actions of others count nothing.
    """
    flights: Counter[int] = Counter()
    sent: list[int] = []
    sent_back: list[int] = []
    peak = 0
    for action in table.ranks[rank]:
        if action.stage not in stages:
            continue
        own = stages[action.stage]
        flights[action.stage] += action.kind == FORWARD
        held = sum(n * stages[s].received for s, n in flights.items())
        if action.kind == FORWARD:
            new, arrived, queue = own.sent, 0, sent
        else:
            travels = action.kind in TRAVELS_BACK
            new = own.gradients_sent if travels else 0
            arrived = own.gradients_received if travels else 0
            queue = sent_back
            flights[action.stage] -= 1
        returned = 0 if action.kind == FORWARD else own.gradients
        peak = max(peak, held + sum(sent) + sum(sent_back) + new + arrived + returned)
        if table.schedule == "1F1B":
            queue.clear()
        if _crosses(table, action):
            queue.append(new)
    return peak


def _crosses(table: ActionTable, action: Action) -> bool:
    """Whether what an action makes goes to another rank; a neighbour on this one takes it over."""
    neighbor = action.stage + (1 if action.kind == FORWARD else -1)
    if not 0 <= neighbor < table.num_stages:
        return False
    return table.rank_of[neighbor] != table.rank_of[action.stage]
