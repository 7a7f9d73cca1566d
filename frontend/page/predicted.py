"""The section that puts what was predicted beside what was measured, and says what was not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, TypeAlias

from ..records.compile_record import CompileRecord

Unit: TypeAlias = Literal["s", "bytes", "share"]
Row: TypeAlias = tuple[str, Unit, float | None, float | None]
"""What, its unit, predicted, measured; None where it was not predicted, or not measured."""

HELD = (
    "Memory held is the arena, what the user receives, and what launches allocate themselves; "
    "parameters and inputs are not in it. Measured is the arena and what one step took from "
    "PyTorch's allocator, at most at once."
)


def predicted_section(rows: Sequence[Row], lead: str = HELD) -> dict[str, Any] | None:
    """Returns both figures of each row; None if neither is known of any.

    Args:
        rows: one without any figure is left out.
        lead: how they were found.
    """
    known = [list(row) for row in rows if row[2] is not None or row[3] is not None]
    return {"lead": lead, "rows": known} if known else None


def compile_rows(record: CompileRecord) -> Iterator[Row]:
    """Yields what a compile predicts; nothing of it was measured."""
    what = "memory held by a step" if record.train else "memory held by a run"
    yield what, "bytes", record.held_bytes, None
    if record.gpu is not None:
        name = record.gpu.target.name
        yield f"all memory on {name}, parameters too", "bytes", record.gpu.peak_bytes, None
        yield f"time on {name}, at least", "s", record.gpu.prediction.seconds, None
    yield from recompute_rows(record)


def recompute_rows(record: CompileRecord) -> Iterator[Row]:
    """Yields what computing again is predicted to take; no step without it was timed."""
    made = record.made
    frontiers = {f.closure: f for f in made.frontiers()} if made is not None else {}
    seconds, found = 0.0, False
    for choice in record.recompute:
        if choice.closure not in frontiers:
            continue
        for point in frontiers[choice.closure].points:
            if point.saved_bytes == choice.saved_bytes and choice.recomputed_flops:
                seconds, found = seconds + choice.num_calls * point.extra_s, True
    if found:
        yield "time of computing again, per micro-batch", "s", seconds, None
