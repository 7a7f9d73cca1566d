"""Which calls of a body run beside others on a second stream: once per body, predicted only.

Experts of a layer, two towers, attention and an MLP in parallel: calls that neither need nor feed
one another. One that leaves multiprocessors idle gains from running beside the other. It is moved
whole, with every launch of its closure. What runs beside it is on one stream meanwhile: what its
own launches would gain from a second one is lost, and counted.
"""

from __future__ import annotations

from bisect import bisect
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, TypeAlias

from ...reuse.ir.program import Call, Closure, Composite, Leaf, Pack, Program, Unpack, Value
from ..gpu.beside import Work, gained_s, take, total, works, worth_moving
from ..gpu.streams import changes_inputs, may_move_whole
from ..gpu.targets import Target
from ..launches.kernel_list import KernelList, Stream
from .link import is_sum

Side: TypeAlias = Literal["own", "main", "second"]
"""Where a call is: on the main stream, with launches on the second as found for its closure; wholly
on the main stream, since another call runs beside it; or wholly on the second."""

_LEAST_GAIN = 0.1  # of the time of a moved call: less is within the error of the prediction
_REACH = 16  # calls before and after a moved one that it may run beside: its buffers live meanwhile


@dataclass(frozen=True, slots=True)
class Placing:
    """Where a call of a body is.

    Attributes:
        side: which streams it uses.
        starts: whether a second stream may fork before it.
        sums: where the sums are that link puts after it, if it is on the second stream.
    """

    side: Side = "own"
    starts: bool = False
    sums: Stream = "second"


OWN = Placing()


@dataclass(frozen=True)
class _Cost:
    """What a call of a closure takes.

    Attributes:
        work: of all its launches.
        own_gain_s: what is gained by those of them that are on a second stream.
        may_move: whether all of it can be on the second stream.
        may_change: whether it may write to what it is given.
    """

    work: Work = field(default_factory=Work)
    own_gain_s: float = 0.0
    may_move: bool = True
    may_change: bool = False


class BesideCalls:
    """Finds for bodies which of their calls run beside others, each body once.

    Args:
        kernel_lists: of all leaves, on one stream.
        target: the GPU.
    """

    def __init__(self, kernel_lists: Mapping[Leaf, KernelList], target: Target) -> None:
        self._lists = kernel_lists
        self._target = target
        self._costs: dict[Closure, _Cost] = {}
        self._bodies: dict[Program, _Body] = {}

    def placings(self, body: Program) -> Sequence[Placing]:
        """Returns where each call of a body is."""
        return self._body(body).placings

    def gained_s(self, body: Program) -> float:
        """Returns what a body gains from a second stream, in its closures and between its calls."""
        return self._body(body).cost.own_gain_s

    def _body(self, body: Program) -> _Body:
        if body not in self._bodies:
            self._bodies[body] = _Body(body, [self._cost(call.closure) for call in body.calls])
        return self._bodies[body]

    def _cost(self, closure: Closure) -> _Cost:
        if closure not in self._costs:
            self._costs[closure] = self._found_cost(closure)
        return self._costs[closure]

    def _found_cost(self, closure: Closure) -> _Cost:
        if isinstance(closure, (Pack, Unpack)):
            return _Cost()
        if isinstance(closure, Composite):
            return self._body(closure.program).cost
        kernels = self._lists.get(closure)
        if kernels is None:
            return _Cost(may_move=False, may_change=True)
        return _Cost(
            total(works(kernels, self._target)),
            worth_moving(kernels, self._target).gained_s,
            not kernels.launches or may_move_whole(kernels),
            changes_inputs(kernels),
        )


@dataclass(frozen=True)
class _Move:
    """What it takes to move a call, and sums that follow it.

    Attributes:
        calls: those.
        beside: what they run beside.
        window: all from the first of these calls to the last that are not on the second stream.
        work: of the moved calls.
        gained_s: by that.
    """

    calls: Sequence[int]
    beside: Sequence[int]
    window: set[int]
    work: Work
    gained_s: float


class _Body:
    """The calls of one body: which depend on which, and which are worth the second stream."""

    def __init__(self, body: Program, costs: Sequence[_Cost]) -> None:
        self._costs = costs
        self._spare = [cost.work for cost in costs]
        self._flow = _Flow(body, costs)
        self._second: set[int] = set()
        self._without_sums: set[int] = set()
        self._starts: set[int] = set()
        self._main: set[int] = set()
        self._gained_s = 0.0
        for number in sorted(range(len(costs)), key=lambda n: -costs[n].work.seconds):
            self._consider(number)

    @cached_property
    def placings(self) -> Sequence[Placing]:
        """Where each call is."""
        return [self._placing(number) for number in range(len(self._costs))]

    @cached_property
    def cost(self) -> _Cost:
        """What a call of this body takes."""
        return _Cost(
            total(cost.work for cost in self._costs),
            sum(cost.own_gain_s for cost in self._costs) + self._gained_s,
            all(cost.may_move for cost in self._costs),
            any(cost.may_change for cost in self._costs),
        )

    def _placing(self, number: int) -> Placing:
        starts = number in self._starts
        if number in self._second:
            is_alone = number in self._without_sums
            return Placing("second", starts, sums="main" if is_alone else "second")
        return Placing("main", starts) if number in self._main else OWN

    def _consider(self, number: int) -> None:
        """Moves a call if that gains enough: with the sums that follow it, or without them."""
        with_sums = self._flow.with_sums(number)
        found = [self._move(number, group) for group in (with_sums, with_sums[:1])]
        best = max((move for move in found if move), key=lambda m: m.gained_s, default=None)
        if best is None or best.gained_s <= _LEAST_GAIN * best.work.seconds:
            return
        self._gained_s += best.gained_s
        self._second.update(best.calls)
        if len(best.calls) < len(with_sums):
            self._without_sums.add(number)
        self._main |= best.window
        self._starts.add(min(best.window))
        take(self._spare, best.beside, best.work.seconds)

    def _move(self, number: int, group: Sequence[int]) -> _Move | None:
        """Returns what it takes and gains to move a call, with sums that follow it."""
        costs = [self._costs[n] for n in group]
        work = total(cost.work for cost in costs)
        as_it_was = all(self._spare[n] == self._costs[n].work for n in group)
        if not (work.seconds and as_it_was and all(cost.may_move for cost in costs)):
            return None
        beside = self._beside(number, group, work.seconds)
        if not beside:
            return None
        window = {*range(min(number, *beside), max(*group, *beside) + 1)} - self._second
        lost_s = sum(self._costs[n].own_gain_s for n in window - self._main)
        gain_s = gained_s(work, (self._spare[n] for n in beside)) - lost_s
        return _Move(group, beside, window, work, gain_s)

    def _beside(self, number: int, group: Sequence[int], seconds: float) -> list[int]:
        """The calls nearest to one that it can run beside, for as long as it takes."""
        after, before = self._flow.free_between(group)
        near = range(max(after + 1, number - _REACH), min(before, number + _REACH + 1))
        found = list[int]()
        for other in sorted(near, key=lambda n: abs(n - number)):
            if other in group or other in self._second or not self._spare[other].seconds:
                continue
            found.append(other)
            seconds -= self._spare[other].seconds
            if seconds <= 0:
                break
        return found


class _Flow:
    """Who makes and who reads what among the calls of a body.

    A call that launches nothing is looked through: what it gives is part of what it is given.
    """

    def __init__(self, body: Program, costs: Sequence[_Cost]) -> None:
        self._calls = body.calls
        self._barriers = [number for number, cost in enumerate(costs) if cost.may_change]
        self._makers: dict[Value, frozenset[int]] = {}
        self._readers: dict[int, list[int]] = {}
        for number, call in enumerate(body.calls):
            needed = self._needed(call)
            if not costs[number].work.seconds:
                self._makers.update(dict.fromkeys(call.results, needed))
                continue
            self._makers.update(dict.fromkeys(call.results, frozenset((number,))))
            for maker in needed:
                self._readers.setdefault(maker, []).append(number)
        self._sums = self._sums_by_what_they_follow(body)

    def _needed(self, call: Call) -> frozenset[int]:
        return frozenset().union(*(self._makers.get(value, ()) for value in call.args))

    def with_sums(self, number: int) -> Sequence[int]:
        """Returns a call and the sums that link puts after it; nothing for such a sum."""
        follows = any(number in sums for sums in self._sums.values())
        return () if follows else (number, *self._sums.get(number, ()))

    def free_between(self, group: Sequence[int]) -> tuple[int, int]:
        """Returns the last call before some that they need, and the first after that needs them."""
        needed = (maker for n in group for maker in self._needed(self._calls[n]))
        after = max((n for n in needed if n not in group), default=-1)
        reading = (n for member in group for n in self._readers.get(member, ()))
        before = min((n for n in reading if n not in group), default=len(self._calls))
        at = bisect(self._barriers, group[0])
        after = max(after, *self._barriers[at - 1 : at], -1)
        return after, min(before, *self._barriers[at : at + 1], len(self._calls))

    def _sums_by_what_they_follow(self, body: Program) -> dict[int, list[int]]:
        """As link has them: a sum of two values that nobody else reads follows the later's call."""
        uses = Counter(value for call in body.calls for value in call.args)
        uses.update(body.outputs)
        found: dict[int, list[int]] = {}
        made_at: dict[Value, int] = {}
        for number, call in enumerate(body.calls):
            made_at.update(dict.fromkeys(call.results, number))
            if _is_sum(call) and all(uses[value] == 1 for value in call.args):
                at = max(made_at.get(value, -1) for value in call.args)
                if at >= 0:
                    found.setdefault(at, []).append(number)
                    made_at.update(dict.fromkeys(call.results, at))
        return found


def _is_sum(call: Call) -> bool:
    return isinstance(call.closure, Leaf) and is_sum(call.closure)
