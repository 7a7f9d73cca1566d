"""What the events of a program leave open, found by running it: in which orders may launches run?

A program's generated code is run with streams that only note: which launches had ended for certain
when another began. From that follow the orders that a GPU could run them in, and the program is run
in the worst of them. Nothing here knows how the events were found, or how memory was planned.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import pytest

from lazyinline.backend.link import torch_generated
from lazyinline.backend.link.placement import Place
from lazyinline.backend.run.planned import PlannedProgram


def move_to(program: PlannedProgram, place: Place) -> None:
    """Runs a program somewhere else from now on: one for a GPU on CPU memory, kernel by kernel."""
    program.rest()
    program._tools = replace(program._tools, place=place)


Prefer = Literal["main", "second", "any"]
PREFERENCES: tuple[Prefer, ...] = ("main", "second", "any")


@dataclass
class Noting:
    """A stream that notes what ended before each launch on it."""

    known: set[int] = field(default_factory=set)

    def record_event(self) -> frozenset[int]:
        return frozenset(self.known)

    def wait_event(self, event: frozenset[int]) -> None:
        self.known |= event


class Trace:
    """The streams of one run, and for each launch what had ended before it."""

    def __init__(self) -> None:
        self.main, self.second = Noting(), Noting()
        self.present = self.main
        self.before: dict[int, set[int]] = {}

    def names(self, device: Any) -> dict[str, Any]:
        """What generated code calls."""
        return {"current_stream": lambda: self.main, "second": self.second, "beside": self.on}

    @contextmanager
    def on(self, stream: Noting) -> Iterator[None]:
        self.present = stream
        yield
        self.present = self.main

    def noted(self, number: int, function: Callable[..., Any]) -> Callable[..., Any]:
        def launch(*args: Any, **kwargs: Any) -> Any:
            self.before[number] = set(self.present.known)
            self.present.known.add(number)
            return function(*args, **kwargs)

        return launch


def rewritten(program: PlannedProgram) -> None:
    """Writes a program's code again, after its launches were changed."""
    program._codes = [writer(ranges="offered").write() for writer in program._writers]
    program._compiled = [compile(code.source, "<reordered>", "exec") for code in program._codes]
    program.rest()


def traced(
    program: PlannedProgram,
    run: Callable[[], Any],
    monkeypatch: pytest.MonkeyPatch,
    does: Literal["all", "allocations"] = "all",
    which: int = 0,
) -> tuple[list[set[int]], Any]:
    """Runs a program; returns what ended before each launch of a part, and what ``run`` gave.

    With ``does="allocations"`` launches do nothing unless others use what they allocate.
    """
    trace, part = Trace(), program.layout.parts[which]
    as_they_were = list(part.launches)
    for number, placed in enumerate(as_they_were):
        skips = does == "allocations" and not placed.launch.results
        function = _nothing if skips else placed.launch.function
        launch = replace(placed.launch, function=trace.noted(number, function))
        part.launches[number] = replace(placed, launch=launch)
    with monkeypatch.context() as patch:
        patch.setattr(torch_generated, "streams_on", trace.names)
        rewritten(program)
        result = run()
    part.launches[:] = as_they_were
    assert len(trace.before) == len(as_they_were)
    assert trace.main.known == set(trace.before), "something may run on when the program ends"
    return [trace.before[number] for number in range(len(as_they_were))], result


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def an_order(
    before: Sequence[set[int]],
    streams: Sequence[str],
    prefer: Prefer,
    rng: random.Random | None = None,
) -> list[int]:
    """Returns an order that the events allow: one stream's launches as early as can be."""
    rng = rng or random.Random(0)
    waiting, done, order = list(range(len(before))), set[int](), list[int]()
    while waiting:
        ready = [number for number in waiting if before[number] <= done]
        first = {stream: number for stream, number in reversed([(streams[n], n) for n in ready])}
        number = first.get(prefer, rng.choice(list(first.values())))
        waiting.remove(number)
        done.add(number)
        order.append(number)
    return order


def reordered(program: PlannedProgram, order: Sequence[int]) -> None:
    """Has a program of one part run its launches in this order from now on, on one stream."""
    (part,) = program.layout.parts
    launches = [part.launches[number] for number in order]
    part.launches[:] = [
        replace(placed, launch=replace(placed.launch, stream="main", waits_for=()))
        for placed in launches
    ]
    rewritten(program)


def assert_unordered_uses_share_nothing(
    program: PlannedProgram, before: Sequence[set[int]], what: str, which: int = 0
) -> None:
    """All pairs: two buffers share bytes only if all that uses one ended before all of the other.

    What the part returns is in use to its end.
    """
    layout = program.layout
    part = layout.parts[which]
    uses: dict[int, set[int]] = {}
    for number, placed in enumerate(part.launches):
        for view in placed.launch.views():
            uses.setdefault(placed.bases[view.buffer][0], set()).add(number)
    returned = {place.instance for place in part.outputs}
    arena = [i for i in uses if layout.instances[i].kind == "arena"]

    def ends_before(first: int, second: int) -> bool:
        return first not in returned and all(uses[first] <= before[n] for n in uses[second])

    for position, one in enumerate(arena):
        start, size = program.offsets[one], layout.instances[one].num_bytes
        for other in arena[:position]:
            other_start, other_size = program.offsets[other], layout.instances[other].num_bytes
            apart = start + size <= other_start or other_start + other_size <= start
            if not apart and size and other_size:
                ordered = ends_before(one, other) or ends_before(other, one)
                assert ordered, f"{what}: buffers {one} and {other} share bytes"
