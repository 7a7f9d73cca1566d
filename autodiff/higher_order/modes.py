"""In which mode a derivative is computed: the one that costs least, as counted.

A forward that asks for a derivative may give several ways to it. Each is made as it would run, what
it does is counted, and the cheapest stays. Making one costs compile time, reverse mode three times
as much with each order. So nothing is made to be thrown away where passes tell: how often the
linear maps of what is differentiated run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from ...reuse.errors import CaptureError
from ...reuse.ir.costs import Cost

Mode = Literal["taylor", "forward", "reverse"]

_CLEAR = 1.6
"""With so many times the passes of another way one is not made to be counted."""

_HIGHEST_COUNTED = 3
"""Above this order no way is made to be thrown away."""


@dataclass(frozen=True)
class Way:
    """One way to compute a derivative.

    Attributes:
        mode: its name.
        passes: how often the linear maps of what is differentiated run in it, about.
    """

    mode: Mode
    passes: int


@dataclass(frozen=True)
class Candidate:
    """One way, and what it costs.

    Attributes:
        way: that is weighed.
        cost: of it; None where it cannot be made.
        counted: whether the program was made and counted; else the cost is that of the way taken,
            by the ratio of their passes.
        why_not: what keeps it from being made.
    """

    way: Way
    cost: Cost | None
    counted: Literal["made", "by passes"] = "made"
    why_not: str = ""

    def __str__(self) -> str:
        if self.cost is None:
            return f"{self.way.mode} cannot be made ({self.why_not})"
        about = "" if self.counted == "made" else "about "
        flops, moved = _short(self.cost.flops), _short(self.cost.moved_bytes)
        return f"{self.way.mode} {about}{flops}FLOP, {moved}B"


@dataclass(frozen=True)
class ModeChoice:
    """Which way a derivative is computed.

    Attributes:
        what: is computed, in words.
        source: the user's line.
        mode: that is taken.
        candidates: the ways that there are, that one first.
        why: it is.
    """

    what: str
    source: str
    mode: Mode
    candidates: tuple[Candidate, ...]
    why: str

    def __str__(self) -> str:
        ways = "; ".join(map(str, self.candidates))
        return f"{self.what} at {self.source}: {self.mode} mode, {self.why} ({ways})"


@dataclass(frozen=True)
class Trial:
    """A way that was made.

    Attributes:
        cost: of it.
        needs_nesting: whether an operator had no rule and is computed in a way that passes do not
            tell of.
    """

    cost: Cost
    needs_nesting: bool = False


def weighed(
    what: str, source: str, order: int, ways: Sequence[Way], make: Callable[[int], Trial]
) -> tuple[int, ModeChoice]:
    """Returns which way is taken, and the choice in words and numbers.

    Args:
        what: is computed.
        source: the user's line.
        order: of the derivative.
        ways: of them the first is taken where two cost the same.
        make: makes one of them, by its number, and counts it.

    Raises:
        CaptureError: if no way can be made.
    """
    passes = [way.passes for way in ways]
    fewest = passes.index(min(passes))
    is_clear = all(n == fewest or p >= _CLEAR * passes[fewest] for n, p in enumerate(passes))
    preferred = fewest if is_clear else 0
    found: dict[int, Trial | Exception] = {}
    for number in sorted(range(len(ways)), key=lambda n: n != preferred):
        try:
            found[number] = trial = make(number)
        except Exception as error:  # what PyTorch cannot trace of it, too
            found[number] = error
            continue
        if order > _HIGHEST_COUNTED or (is_clear and not trial.needs_nesting):
            break
    made = {n: trial for n, trial in found.items() if isinstance(trial, Trial)}
    if not made:
        first = next(iter(found.values()))
        assert isinstance(first, Exception)
        raise first if isinstance(first, CaptureError) else CaptureError(str(first)) from first
    taken = min(sorted(made), key=lambda n: made[n].cost.seconds)
    per_pass = 1 / ways[taken].passes

    def candidate(number: int) -> Candidate:
        way, trial = ways[number], found.get(number)
        if isinstance(trial, Exception):
            return Candidate(way, None, why_not=str(trial))
        if trial is None:
            about = made[taken].cost.times(way.passes * per_pass)
            return Candidate(way, about, "by passes")
        return Candidate(way, trial.cost)

    order_shown = sorted(range(len(ways)), key=lambda n: n != taken)
    if len(found) > len(made):
        why = "the only one that can be made"
    elif len(made) > 1:
        why = "the cheaper as counted"
    elif is_clear:
        why = f"{passes[taken]} passes against {max(passes)}"
    else:
        why = f"the quicker to compile, at order {order}"
    candidates = tuple(map(candidate, order_shown))
    return taken, ModeChoice(what, source, ways[taken].mode, candidates, why)


def _short(number: int) -> str:
    value, unit = float(number), ""
    for larger in ("k", "M", "G", "T", "P"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{value:.3g} {unit}"
