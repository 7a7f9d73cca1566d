"""The schedule as a picture: one row per rank, one box per action, time to the right."""

from __future__ import annotations

import html

from .actions import ACTION_TEXT, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD
from .simulation import Slot, Timeline

_COLORS = {
    FORWARD: "#4c78a8",
    BACKWARD: "#e4572e",
    BACKWARD_INPUT: "#f2a541",
    BACKWARD_WEIGHT: "#59a14f",
}
_WIDTH, _ROW, _LEFT, _TOP = 1400, 34, 70, 10


def page(text: str, timeline: Timeline) -> str:
    """Returns a self-contained HTML page.

    Args:
        text: the plan in words.
        timeline: the step to draw.
    """
    height = _TOP + _ROW * timeline.num_ranks + 30
    width = _LEFT + _WIDTH + 10
    rows = "".join(
        f'<text x="4" y="{_TOP + _ROW * r + 21}">rank {r}</text>' for r in range(timeline.num_ranks)
    )
    boxes = "".join(_box(slot, _WIDTH / (timeline.step_s or 1.0)) for slot in timeline.slots)
    end = f'<text x="{_LEFT}" y="{height - 8}">0</text>'
    end += (
        f'<text x="{_LEFT + _WIDTH}" y="{height - 8}" text-anchor="end">'
        f"{timeline.step_s * 1e3:.2f} ms predicted</text>"
    )
    kinds = dict.fromkeys(slot.action.kind for slot in timeline.slots)
    legend = " ".join(
        f'<span style="background:{_COLORS[k]}">&nbsp;&nbsp;</span> {ACTION_TEXT[k]}' for k in kinds
    )
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>Pipeline schedule</title>'
        "<style>body{font:14px system-ui,sans-serif;margin:2em}pre{font-size:12px}"
        "svg text{font:11px system-ui,sans-serif}</style>"
        f"<h1>Pipeline schedule</h1><p>{legend}</p>"
        f'<svg viewBox="0 0 {width} {height}" width="100%" role="img" '
        f'aria-label="time by rank">{rows}{boxes}{end}</svg>'
        f"<pre>{html.escape(text)}</pre></html>\n"
    )


def _box(slot: Slot, scale: float) -> str:
    x = _LEFT + slot.start_s * scale
    width = max((slot.end_s - slot.start_s) * scale, 0.5)
    y = _TOP + _ROW * slot.rank
    label = f"{slot.action.stage}.{slot.action.micro_batch}" if width > 22 else ""
    note = (
        f"{ACTION_TEXT[slot.action.kind]} of stage {slot.action.stage}, "
        f"micro-batch {slot.action.micro_batch}"
    )
    return (
        f'<g><title>{note}</title><rect x="{x:.1f}" y="{y}" width="{width:.1f}" '
        f'height="{_ROW - 6}" fill="{_COLORS[slot.action.kind]}" stroke="#fff" '
        f'stroke-width="0.5"/><text x="{x + width / 2:.1f}" y="{y + 18}" fill="#fff" '
        f'text-anchor="middle">{label}</text></g>'
    )
