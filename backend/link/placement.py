"""Where the buffers of a layout lie: in an arena, some in the memory of gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..arena.arena import ALIGNMENT, ArenaPlan, plan
from ..arena.live_ranges import Buffers
from ..gpu.place import HERE, Place
from ..launches import torch_native
from ..launches.torch_native import first_fit
from .gradient_memory import (
    Overlay,
    buffers_with_gradients,
    gradients_of,
    movable,
    overlay_of,
    plan_overlaid,
)
from .layout import Layout, buffers_of

# A plan within half a percent of the lower bound is good enough to stop looking.
_ENOUGH = 1.005
_PLAN_EFFORT_S = 0.3


@dataclass(frozen=True)
class Tools:
    """What makes a planned program, so that a cache can stand before it.

    Attributes:
        plan: places buffers, or remembers where they were placed when the same was asked.
        native: builds the native loop, or remembers it.
        alignment: what every offset is a multiple of, in bytes.
        place: where programs run.
    """

    plan: Callable[[Buffers, Sequence[int], Callable[[], ArenaPlan]], ArenaPlan] = (
        lambda _, asked, make: make()
    )
    native: Callable[[], torch_native.NativeLibrary] = torch_native.native_library
    alignment: int = ALIGNMENT
    place: Place = HERE


TOOLS = Tools()

Placement = tuple[list[int], ArenaPlan, int, Overlay]
"""Offsets by instance, the plan, the bytes of its arena, and what lies outside of that."""


def planned(layout: Layout, tools: Tools) -> Placement:
    """Places every arena instance."""
    placed = [i for i, b in enumerate(layout.instances) if b.kind == "arena"]
    buffers = buffers_of([layout.instances[i] for i in placed])
    arena = place(buffers, tools)
    return _by_instance(layout, placed, arena), arena, arena.peak_bytes, Overlay()


def planned_overlaid(layout: Layout, tools: Tools) -> Placement | None:
    """Places every arena instance, in a gradient's memory if it fits there; None if none does."""
    placed = [i for i, b in enumerate(layout.instances) if b.kind == "arena"]
    gradients = gradients_of(layout)
    if not placed or not gradients:
        return None
    both = [[layout.instances[i] for i in part] for part in (placed, gradients)]
    buffers, can_move = buffers_with_gradients(*both), movable(layout, placed)
    found = tools.plan(
        buffers,
        [len(gradients), *map(int, can_move)],
        lambda: plan_overlaid(
            buffers, can_move, first_fit, effort_s=_PLAN_EFFORT_S, enough=_ENOUGH
        ),
    )
    arena_bytes, overlay = overlay_of(found, placed, gradients, layout)
    if not overlay.guests:
        return None
    return _by_instance(layout, placed, found), found, arena_bytes, overlay


def _by_instance(layout: Layout, placed: Sequence[int], arena: ArenaPlan) -> list[int]:
    offsets = [0] * len(layout.instances)
    for index, offset in zip(placed, arena.offsets.tolist(), strict=False):
        offsets[index] = offset
    return offsets


def place(buffers: Buffers, tools: Tools) -> ArenaPlan:
    """Places buffers in an arena as well as a program's are placed."""
    return tools.plan(
        buffers,
        (tools.alignment,),
        lambda: plan(
            buffers,
            alignment=tools.alignment,
            effort_s=_PLAN_EFFORT_S,
            enough=_ENOUGH,
            fit=first_fit,
        ),
    )
