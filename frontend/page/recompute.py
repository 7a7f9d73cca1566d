"""The section on recompute: what closures save and compute again, and what else could be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...recompute.summary import RecomputeRecord
from ..records.made import Frontier

_MOST_TENSORS = 40


def recompute_section(
    records: Sequence[RecomputeRecord], frontiers: Sequence[Frontier]
) -> dict[str, Any] | None:
    """Returns choices and frontiers; None if nothing is saved and nothing computed again."""
    if not any(r.saved_bytes or r.recomputed_flops for r in records):
        return None
    return {
        "choices": [_choice(record) for record in records],
        "frontiers": [
            {
                "closure": f.closure,
                "calls": f.num_calls,
                "points": [[p.saved_bytes, p.extra_s, p.extra_flops] for p in f.points],
            }
            for f in frontiers
        ],
    }


def _choice(record: RecomputeRecord) -> dict[str, Any]:
    return {
        "closure": record.closure,
        "choice": record.choice,
        "calls": record.num_calls,
        "saved_bytes": record.saved_bytes,
        "tensors": [[t.name, str(t.type)] for t in record.saved[:_MOST_TENSORS]],
        "num_tensors": len(record.saved),
        "recomputed": [list(row) for row in record.recomputed],
        "recomputed_flops": record.recomputed_flops,
    }
