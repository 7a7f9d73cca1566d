"""What a step allocates, told by PyTorch's profiler: how often, in which operator, and the peak;
and the FLOPs of the products that go through PyTorch's dispatcher.

The profiler's trace holds an event for each block that PyTorch's allocator hands out or takes
back, with address and bytes, and one for each operator with begin and duration.
"""

from __future__ import annotations

import json
import math
import pathlib
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

OUTSIDE = "outside any operator"
FORWARD = "the forward"
"""Name of a ``torch.profiler.record_function`` around the forward of a step."""


@dataclass(frozen=True)
class MemoryUse:
    """Memory that one step took from PyTorch's allocator and what it held at most at once.

    Attributes:
        peak_bytes: largest sum of blocks allocated in the step and not freed yet. What was
            allocated before, such as an arena, is not in it.
        allocations: outermost operator -> how often it, or what it called, allocated.
        product_flops: of matrix products and fused attention that PyTorch ran.
        saved_bytes: live at the end of what was recorded as :data:`FORWARD`.
    """

    peak_bytes: int
    allocations: Mapping[str, int]
    product_flops: int = 0
    saved_bytes: int = 0

    @property
    def num_allocations(self) -> int:
        """Blocks of at least one byte."""
        return sum(self.allocations.values())


def memory_use(step: Callable[[], object]) -> MemoryUse:
    """Runs a step under the profiler; what it returns is kept until its memory has been counted."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(
        activities=activities, profile_memory=True, record_shapes=True
    ) as profile:
        result = step()
    del result
    with tempfile.TemporaryDirectory() as directory:
        trace = pathlib.Path(directory) / "trace.json"
        profile.export_chrome_trace(str(trace))
        return _memory_use(json.loads(trace.read_text())["traceEvents"])


def _memory_use(events: Iterable[Mapping[str, Any]]) -> MemoryUse:
    events = list(events)
    operators = sorted(
        (e["ts"], e["ts"] + e["dur"], e["name"]) for e in events if e.get("cat") == "cpu_op"
    )
    outermost = _outermost(operators)
    marks = (e for e in events if e.get("name") == FORWARD and "dur" in e)
    forward_end = max((e["ts"] + e["dur"] for e in marks), default=-math.inf)
    live: dict[int, int] = {}
    peak_bytes, live_bytes, saved_bytes = 0, 0, 0
    allocations: Counter[str] = Counter()
    for event in sorted((e for e in events if e.get("name") == "[memory]"), key=lambda e: e["ts"]):
        address, num_bytes = event["args"]["Addr"], event["args"]["Bytes"]
        if num_bytes > 0:
            allocations[_operator_at(outermost, event["ts"])] += 1
            live[address] = num_bytes
            live_bytes += num_bytes
            peak_bytes = max(peak_bytes, live_bytes)
        else:
            live_bytes -= live.pop(address, 0)
        if event["ts"] <= forward_end:
            saved_bytes = live_bytes
    product_flops = sum(map(_event_flops, events))
    return MemoryUse(peak_bytes, dict(allocations), product_flops, saved_bytes)


def _event_flops(event: Mapping[str, Any]) -> int:
    name, shapes = str(event.get("name")), event.get("args", {}).get("Input Dims")
    if event.get("cat") != "cpu_op" or not shapes:
        return 0
    return product_flops(name.removeprefix("aten::"), shapes)


def product_flops(name: str, shapes: Sequence[Any]) -> int:
    """FLOPs of an operator on operands of such shapes; 0 but for products and fused attention."""
    if name in ("mm", "bmm"):
        return 2 * math.prod(shapes[0]) * shapes[1][-1]
    if name in ("addmm", "baddbmm"):
        return 2 * math.prod(shapes[1]) * shapes[2][-1]
    if "attention_for_cpu" in name:  # two products forward; five backward, one of them again
        backward = name.endswith("_backward")
        query, key = shapes[1:3] if backward else shapes[:2]
        return (10 if backward else 4) * math.prod(query) * key[-2]
    return 0


def _outermost(operators: Sequence[tuple[float, float, str]]) -> list[tuple[float, float, str]]:
    """Keeps the operators that no other one called."""
    kept: list[tuple[float, float, str]] = []
    for begin, end, name in operators:
        if not kept or begin >= kept[-1][1]:
            kept.append((begin, end, name))
        elif end > kept[-1][1]:  # begun at the same tick as what it contains
            kept[-1] = (begin, end, name)
    return kept


def _operator_at(outermost: Sequence[tuple[float, float, str]], time: float) -> str:
    for begin, end, name in outermost:
        if begin <= time <= end:
            return name
    return OUTSIDE
