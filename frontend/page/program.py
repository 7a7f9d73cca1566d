"""The section that shows a program: its calls as a strip, and what is in each closure.

Equal calls in a row are one box, also where a few of them take turns. Each different closure is
described once, whatever the number of its calls.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...backend.launches.kernel_list import KernelList
from ...reuse.ir.leaf import stamp_of
from ...reuse.ir.printer import node_type, operator_name
from ...reuse.ir.program import Call, Closure, Composite, Leaf, Pack, Program, Unpack
from ...reuse.ir.types import StructType
from ..records.made import Made

_LONGEST_PERIOD = 12
"""Most different calls that take turns in one group."""
_MOST_OPERATORS = 600
"""More operators of one closure than these are counted, and not listed."""
_MOST_PATHS = 4
"""Places named of a run of calls: the first ones, then the last."""


def program_section(made: Made) -> dict[str, Any]:
    """Returns the strips of a program, and its closures."""
    closures = _Closures(made.kernels or {})
    twins = _twins(made.captured, made.forward)
    lanes = [{"name": "forward", "items": closures.strip(made.forward, twins)}]
    if made.backward is not None:
        lanes.append({"name": "backward", "items": closures.strip(made.backward, {})})
    return {
        "lanes": lanes,
        "micro_batches": made.micro_batches,
        "nodes": made.captured.num_nodes(),
        "nodes_if_inlined": made.captured.num_nodes_if_inlined(),
        "closures": closures.described,
    }


def runs(keys: Sequence[Any]) -> Iterator[tuple[int, int, int]]:
    """Finds repetition: yields (start, length of what repeats, how often), covering all keys."""
    start = 0
    while start < len(keys):
        best = (1, 1)
        for period in range(1, min(_LONGEST_PERIOD, (len(keys) - start) // 2) + 1):
            times = 1
            pattern = keys[start : start + period]
            while keys[start + times * period : start + (times + 1) * period] == pattern:
                times += 1
            if times > 1 and times * period > best[0] * best[1]:
                best = (period, times)
        yield (start, *best)
        start += best[0] * best[1]


class _Closures:
    """Describes each different closure once; strips refer to them by number."""

    def __init__(self, kernels: Mapping[Leaf, KernelList]) -> None:
        self.described: list[dict[str, Any]] = []
        self._kernels = kernels
        self._numbers: dict[Closure, int] = {}

    def strip(self, program: Program, twins: Mapping[Closure, Closure]) -> list[dict[str, Any]]:
        """Returns the groups of a program's calls, in order."""
        calls = _shown(program)
        numbers = [self._number(call.closure, twins) for call in calls]
        for number, call in zip(numbers, calls, strict=True):
            self.described[number]["calls"] += 1
            self.described[number]["is_block"] |= bool(call.path)
        groups = []
        for start, period, times in runs(numbers):
            members = [
                {
                    "closure": numbers[start + offset],
                    "paths": _some([c.path for c in calls[start + offset :: period][:times]]),
                }
                for offset in range(period)
            ]
            groups.append({"times": times, "calls": members})
        return groups

    def _number(self, closure: Closure, twins: Mapping[Closure, Closure]) -> int:
        if closure not in self._numbers:
            twin = twins.get(closure)
            about = self._about(closure, twin)
            self._numbers[closure] = len(self.described)
            self.described.append(about)
            if isinstance(closure, Composite):
                inner = twin.program if isinstance(twin, Composite) else None
                below = _twins(inner, closure.program) if inner is not None else {}
                about["strip"] = self.strip(closure.program, below)
        return self._numbers[closure]

    def _about(self, closure: Closure, twin: Closure | None) -> dict[str, Any]:
        about: dict[str, Any] = {
            "name": closure.name,
            "nodes": closure.num_nodes,
            "calls": 0,
            "is_block": False,
            "inputs": len(closure.input_types),
            "saved_bytes": sum(
                t.num_bytes for t in closure.output_types if isinstance(t, StructType)
            ),
        }
        if isinstance(closure, Leaf):
            known = self._kernels.get(closure)
            about["kernels"] = _kernel_rows(known) if known is not None else None
            # Lines of the user are known of what was captured; what is differentiated has none.
            body = twin if isinstance(twin, Leaf) else closure
            about["operators"] = [_operator(node) for node in body.nodes[:_MOST_OPERATORS]]
            about["num_operators"] = body.num_nodes
        return about


def _shown(program: Program) -> list[Call]:
    return [c for c in program.calls if not isinstance(c.closure, (Pack, Unpack))]


def _twins(captured: Program, runs_as: Program) -> dict[Closure, Closure]:
    """Pairs what runs with what was captured, call by call; nothing if they are not alike."""
    a, b = _shown(runs_as), _shown(captured)
    if len(a) != len(b) or any(x.path != y.path for x, y in zip(a, b, strict=True)):
        return {}
    return {x.closure: y.closure for x, y in zip(a, b, strict=True)}


def _operator(node: Any) -> list[str]:
    return [operator_name(node), node_type(node), stamp_of(node).source or ""]


def _kernel_rows(kernels: KernelList) -> dict[str, Any]:
    private = [b.num_bytes for b in kernels.buffers if b.kind != "input"]
    names = Counter(launch.name for launch in kernels.launches)
    return {
        "launches": len(kernels.launches),
        "made_bytes": sum(private),
        "rows": [list(row) for row in names.items()],
    }


def _some(paths: Sequence[str]) -> list[str]:
    if len(paths) <= _MOST_PATHS:
        return list(paths)
    return [*paths[: _MOST_PATHS - 1], "\u2026", paths[-1]]
