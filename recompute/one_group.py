"""The exact spread of variants over the calls of one closure, by trying every choice of three.

A model of one kind of layer has a single group of calls. Three variants leave two counts free, and
given the one the best other is known, so all spreads are tried in one array operation: a
millisecond, where an integer solver takes fifty to a hundred.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from .group import Group

NUM_VARIANTS = 3


def fits(groups: Sequence[Group]) -> bool:
    """Whether this is the question that :func:`spread_of_one` answers."""
    if len(groups) != 1:
        return False
    (group,) = groups
    return group.max_variants == NUM_VARIANTS and len(group.compiled) <= NUM_VARIANTS


def spread_of_one(group: Group, max_bytes: int, tie: float) -> tuple[int, ...] | None:
    """Says how many calls take which variant: the least work within the bytes.

    Args:
        group: the calls; bytes grow and work falls from variant to variant.
        max_bytes: of all calls together.
        tie: what each variant that is used costs, against the dearest variant's work.

    Returns:
        Counts by variant, or None if the bytes do not suffice.
    """
    num_calls = group.num_calls
    num_bytes, work = np.array(group.num_bytes), np.array(group.extra_s)
    chosen = _choices(group)
    a, b, c = chosen.T[:, :, None]
    of_c = np.arange(num_calls + 1)[None, :]
    rest = num_calls - of_c
    room = max_bytes - of_c * num_bytes[c] - rest * num_bytes[a]
    step = num_bytes[b] - num_bytes[a]
    of_b = np.where(step > 0, np.minimum(rest, room // np.maximum(step, 1)), 0)
    of_a = rest - of_b
    counts = np.stack([of_a, of_b, of_c + 0 * of_b])
    cost = of_a * work[a] + of_b * work[b] + of_c * work[c]
    cost = cost / (work.max() or 1.0) + tie * (counts > 0).sum(axis=0)
    cost = np.where(room >= 0, cost, np.inf)
    row, column = np.unravel_index(np.argmin(cost), cost.shape)
    if not np.isfinite(cost[row, column]):
        return None
    found = np.zeros(len(num_bytes), int)
    np.add.at(found, chosen[row], counts[:, row, column])
    return tuple(found.tolist())


def _choices(group: Group) -> np.ndarray:
    """Returns each choice of three variants with those that are compiled, in order of bytes.

    Where there are fewer, the last one stands for the missing ones too.
    """
    others = [i for i in range(len(group.num_bytes)) if i not in group.compiled]
    free = min(NUM_VARIANTS - len(group.compiled), len(others))
    found = []
    for more in itertools.combinations(others, free):
        places = sorted({*group.compiled, *more})
        found.append(places + places[-1:] * (NUM_VARIANTS - len(places)))
    return np.array(found)
