"""The sections on compile time: seconds per pass on one scale, and compile time over depth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..records.compile_record import CompileRecord


def passes_section(sides: Mapping[str, CompileRecord]) -> dict[str, Any] | None:
    """Returns seconds and nodes of each pass, for each way of compiling."""
    names = list(dict.fromkeys(p.name for record in sides.values() for p in record.passes))
    if not names:
        return None
    return {
        "passes": names,
        "sides": [
            {
                "name": name,
                "cpu_s": record.cpu_s,
                "wall_s": record.wall_s,
                "operators": record.num_operators,
                "launches": record.num_launches,
                "rows": [_row(record, one) for one in names],
            }
            for name, record in sides.items()
        ],
    }


def _row(record: CompileRecord, name: str) -> dict[str, Any]:
    """One pass; where it ran several times, all of it."""
    found = [p for p in record.passes if p.name == name]
    return {
        "cpu_s": sum(p.cpu_s for p in found),
        "wall_s": sum(p.wall_s for p in found),
        "nodes": found[-1].num_nodes if found else None,
    }


def depth_section(
    rows: Sequence[tuple[int, Mapping[str, CompileRecord]]],
) -> dict[str, Any] | None:
    """Returns what compiling costs for each number of layers; None of fewer than two."""
    if len(rows) < 2:
        return None
    return {
        "layers": [layers for layers, _ in rows],
        "sides": [
            {
                "name": name,
                "cpu_s": [records[name].cpu_s for _, records in rows],
                "wall_s": [records[name].wall_s for _, records in rows],
                "nodes": [records[name].num_nodes for _, records in rows],
                "operators": [records[name].num_operators for _, records in rows],
            }
            for name in rows[0][1]
        ],
    }
