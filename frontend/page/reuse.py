"""The section that shows which blocks share: keys, calls, and why some were kept apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..capture.regions import SharingDecision
from ..records.reuse_table import reuse_rows

_MOST_PATHS = 4


def reuse_section(
    decisions: Sequence[SharingDecision], nothing_shared: str
) -> dict[str, Any] | None:
    """Returns the rows of both tables; None if the model has no block."""
    if not decisions and not nothing_shared:
        return None
    return {
        "keys": [
            {"key": row.key, "calls": row.num_calls, "note": row.note}
            for row in reuse_rows(decisions)
        ],
        "instances": _instances(decisions),
        "nothing_shared": nothing_shared,
    }


def state_of(decision: SharingDecision) -> str:
    """Says in a word what became of an instance."""
    if decision.shared:
        return "shared"
    if decision.shares:
        return "shared"
    return "kept apart" if decision.reason else "traced"


def _instances(decisions: Sequence[SharingDecision]) -> list[dict[str, Any]]:
    """Groups instances of which the same is to be said."""
    groups: dict[tuple[str, ...], list[SharingDecision]] = {}
    for d in decisions:
        why = d.shares or d.reason
        groups.setdefault((d.class_name, state_of(d), d.compared_with, why), []).append(d)
    return [
        {
            "block": name,
            "state": state,
            "with": other,
            "why": why,
            "count": len(group),
            "paths": _some([d.path for d in group]),
        }
        for (name, state, other, why), group in groups.items()
    ]


def _some(paths: Sequence[str]) -> list[str]:
    if len(paths) <= _MOST_PATHS:
        return list(paths)
    return [*paths[: _MOST_PATHS - 1], "\u2026", paths[-1]]
