"""A found plan as text: operator by operator, what was chosen, what it moves, and what else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ...reuse.ir.costs import is_heavy
from .layouts import Axis, Step, text

if TYPE_CHECKING:
    from .choices import Item
    from .taken import Taken

_CERTAIN = 1e-3
_HEAD = ("operator", "operands -> results", "moved before", "next best")


def format_plan(taken: Taken, axes: Sequence[Axis]) -> str:
    """Returns the table of each role: products, and what moves or is not split.

    Layouts have one word for each axis: ``R`` is whole, ``S0`` split along dimension 0, ``S0/3``
    split in each third of it, ``P`` a part of a sum.
    """
    mesh = " x ".join(f"{axis.name} {axis.size}" for axis in axes)
    solution, folded = taken.solution, taken.choices.folded
    lines = [
        f"mesh {mesh}: {seconds_text(solution.seconds)} a step, "
        f"{bytes_text(solution.held_bytes)} held on a rank"
    ]
    if solution.bound_s < (1 - _CERTAIN) * solution.seconds:
        lines.append(f"no plan with equal layers takes less than {seconds_text(solution.bound_s)}")
    if taken.choices.unknown:
        lines.append(f"whole on each rank, for want of a rule: {', '.join(taken.choices.unknown)}")
    for number, role in enumerate(folded.roles):
        items = taken.choices.items_of(number).values()
        rows = [row for item in items if (row := _row(taken, item, axes))]
        if rows:
            lines += ["", f"@{role.name}, {role.count} calls", *_aligned([_HEAD, *rows])]
    return "\n".join(lines)


def _row(taken: Taken, item: Item, axes: Sequence[Axis]) -> tuple[str, ...] | None:
    assert item.node is not None
    into = [e for e in taken.choices.edges if e.target is item]
    steps = [step for edge in into for step in taken.moved(edge) if step.is_collective]
    # Elementwise operators that move nothing lie as their operands: pages of them say nothing.
    if not steps and not is_heavy(item.node):
        return None
    moves = " + ".join(step_text(step, axes) for step in steps)
    name = f"{item.node.name} {tuple(item.outputs[0].shape)}"
    return name, _layouts(taken, item), moves, _next_best(taken, item)


def _next_best(taken: Taken, item: Item) -> str:
    """Returns the option that costs least among the others, all else unchanged, and why it lost."""
    group = item.group
    chosen = taken.solution.options[group]
    others = [i for i in range(len(group)) if i != chosen]
    if not others:
        return "no other"
    more = [taken.more_s(group, i) for i in others]
    best = int(np.argmin(more))
    own = float(group.seconds[others[best]] - group.seconds[chosen])
    # A layout loses by what is computed in it, or by what has to be brought to it and from it.
    reason = "computing" if own > 0 else "moving"
    found = _layouts(taken, item, others[best])
    if not np.isfinite(more[best]):
        return f"{found}: cannot be reached"
    return f"{found}: {seconds_text(more[best])} more, by {reason}"


def _layouts(taken: Taken, item: Item, option: int | None = None) -> str:
    inputs, outputs = taken.ways(item, option)
    given = " ".join(text(one) for one in inputs if one is not None)
    return f"{given} -> {' '.join(map(text, outputs))}"


def step_text(step: Step, axes: Sequence[Axis]) -> str:
    """Returns a step in words."""
    return f"{step.kind} over {axes[step.axis].name} {bytes_text(step.num_bytes)}"


def seconds_text(seconds: float) -> str:
    """Returns seconds in a unit that suits them."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if abs(seconds) >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"


def bytes_text(num_bytes: float) -> str:
    """Returns bytes in a unit that suits them."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.3g} {unit}"
    return f"{num_bytes:.0f} B"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  " + "  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in rows
    ]
