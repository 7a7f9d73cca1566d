"""One link for many shapes: a program linked once, with other numbers in it for each shape.

A first further shape is linked with numbers that remember how they were computed
(:mod:`...reuse.ir.size_tape`). Where all that was compared on the way has the same outcome for
another shape, and each buffer has the room it needs, that shape gets the same program: nothing is
recorded, laid out, planned or written again. Any other is linked as the first one was.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from ...backend.kernels.lower import (
    has_sizes,
    kernel_at,
    kernel_list,
    launches_at,
    numbered,
    symbolic_launches,
)
from ...backend.launches.kernel_list import (
    BufferInfo,
    KernelList,
    Launch,
    NativeOp,
    SymbolicList,
    View,
)
from ...backend.run.planned import PlannedProgram, Runtime
from ...recompute.planner import Budget
from ...reuse.ir.program import Leaf
from ...reuse.ir.size_tape import PLAIN, Numbers, SizeTape
from ...reuse.ir.torch_symbols import SizeTrace, SymbolTrace, Values
from ...reuse.ir.types import TensorType, strides_that_matter
from .context import Context, leaves_of
from .link import devices_of, noted, plan_at, runs_of, why_unplanned
from .numbers import Signature, check_layouts, results_at, with_numbers
from .state import Compilation, State

_CPU = torch.device("cpu")
_MAX_PATTERNS = 8
"""Programs that are linked for many shapes; where none of them fits, a shape gets its own."""
_HEADROOM = 8
"""A size that varies is planned with this part of the largest on top."""


class ManyShapes:
    """Programs that were linked once for many shapes of what was compiled with symbols."""

    def __init__(self) -> None:
        self._patterns: tuple[_Pattern, ...] = ()
        self._num_tried = 0
        self._room = Values()

    def at(self, state: State, values: Values) -> State | None:
        """Returns the state that a link for one shape ends in, or None if it must be linked."""
        # A budget bounds what is held at each shape, so each is planned as tightly as can be.
        if isinstance(state.context.options.recompute, Budget):
            return None
        found = self.known(state, values)
        if found is None and self._num_tried < _MAX_PATTERNS:
            self._num_tried += 1
            try:
                made = _Pattern.of(state, self._room_for(state, values), values)
            except Exception:  # whatever it is, a link for this shape alone says so, or is right
                made = None
            self._patterns = (*self._patterns, made)[-_MAX_PATTERNS:] if made else self._patterns
            found = self.known(state, values)
        return found

    def known(self, state: State, values: Values) -> State | None:
        """Returns the same by a program that is there, for which nothing is compiled."""
        for pattern in reversed(self._patterns):
            numbers = pattern.at(values)
            if numbers is not None:
                state = replace(state, values=values)
                if pattern.backward is not None and state.derivative is not None:
                    signature = pattern.backward.at(values)
                    derivative = replace(state.derivative, backward=signature)
                    state = replace(state, derivative=derivative)
                return noted(state, pattern.runs.at(numbers))
        return None

    def _room_for(self, state: Compilation, values: Values) -> Values:
        """Returns sizes to plan for: the largest so far, and some more of those that vary."""
        sizes = state.captured.sizes
        known, is_first = self._room or sizes.example, not self._room
        for part in (_HEADROOM, 0):
            room = Values()
            for symbol, number in values.items():
                most = max(number, known[symbol])
                grows = part and (number > known[symbol] or (is_first and number != most))
                room[symbol] = most + most // part if grows else most
            if sizes.are_right(Values(room)):
                self._room = room
                return Values(room)
        return Values(values)


@dataclass(frozen=True)
class _Pattern:
    """A program that was linked for sizes that remember how they were computed.

    Attributes:
        numbers: computes what was computed, for other sizes.
        runs: what was linked, for sizes that there is room for.
        rooms: bytes of buffers, and the most there is room for.
        backward: what a backward takes and returns, if there is one that is called.
    """

    numbers: Callable[[Values], Numbers | None]
    runs: PlannedProgram | Runtime
    rooms: Sequence[tuple[int, int]]
    backward: Signature | None

    @classmethod
    def of(cls, state: Compilation, room: Values, values: Values) -> _Pattern | None:
        """Links a program with room for some sizes; None where that cannot be, or goes wrong.

        Args:
            state: lowered, of symbolic sizes.
            room: the sizes that memory is planned for.
            values: sizes of a call, at which it is compared with what has plain numbers.
        """
        if why_unplanned(state) or any(leaf.bodies for leaf in leaves_of(state.linked)):
            return None
        if state.context.options.target is not None or devices_of(state.linked) != [_CPU]:
            return None  # kernels of a GPU were never run with other numbers
        context, sizes, tape = state.context, state.captured.sizes, SizeTape(room)
        trace: SizeTrace | None = None  # whose environment takes Dynamo to be imported
        leaves, lists = {}, {}
        for leaf in leaves_of(state.linked):
            made, launches = leaf, None
            known = context.recorded.get(leaf)
            if isinstance(known, SymbolicList):
                made, launches = numbered(leaf, known, tape.values)
                check_layouts(launches)
            elif known is None and has_sizes(leaf):
                trace = trace or SizeTrace(tape.values)
                made, launches = launches_at(leaf, context.kernels[leaf], tape.values, trace)
                check_layouts(launches)
            leaves[leaf], lists[made] = made, launches or context.launches_of_leaf(leaf)
        if (trace is not None and not trace.holds()) or not sizes.are_right(tape.values):
            return None
        results_at(state.captured.program, tape.values)
        program = plan_at(with_numbers(state, tape.values, leaves), lists)
        numbers = tape.function()
        # What forgot how it was computed would be the same at other sizes.
        other = next((v for v in (values, sizes.example) if v != room), None)
        if other is None or not _are_equal(context, leaves, lists, numbers(other), other):
            return None
        backward, derivative = None, state.derivative
        if derivative is not None and state.goal.kind != "step":
            # Nobody asks for the first input, which is what was saved.
            backward = Signature(derivative.backward, num_open=1)
        return cls(numbers, runs_of(state, program), program.rooms, backward)

    def at(self, values: Values) -> Numbers | None:
        """Returns the numbers for a shape; None if it is not right for it, or has not the room."""
        numbers = self.numbers(values)
        if numbers is None or any(numbers.of(size) > room for size, room in self.rooms):
            return None
        return numbers


def _are_equal(
    context: Context,
    leaves: Mapping[Leaf, Leaf],
    lists: Mapping[Leaf, KernelList],
    numbers: Numbers | None,
    values: Values,
) -> bool:
    """Whether launches with the numbers of a shape are those that are recorded for it."""
    return numbers is not None and all(
        _described(lists[made], numbers) == _described(_recorded_at(context, leaf, values))
        for leaf, made in leaves.items()
        if made is not leaf
    )


def _recorded_at(context: Context, leaf: Leaf, values: Values) -> KernelList:
    """Returns the launches of a leaf of symbolic sizes, for plain numbers."""
    known = context.recorded.get(leaf)
    if isinstance(known, SymbolicList):
        return numbered(leaf, known, values)[1]
    return kernel_list(*kernel_at(leaf, context.kernels[leaf], values))


def launches_for_all(
    state: Compilation, examples: Values
) -> tuple[dict[Leaf, KernelList], list[Any]] | None:
    """Returns launches with symbols in them, and under which conditions they are right.

    None where that cannot be, or is not what is recorded for the sizes of a call.
    """
    context, trace = state.context, SymbolTrace(examples)
    if why_unplanned(state) or any(leaf.bodies for leaf in leaves_of(state.linked)):
        return None
    new = [x for x in leaves_of(state.linked) if x not in context.recorded and has_sizes(x)]
    called = state.captured.sizes.example
    try:
        found = {x: symbolic_launches(x, context.kernels[x], trace) for x in new}
        for leaf, launches in found.items():
            expected = _recorded_at(context, leaf, called)
            if _described(numbered(leaf, launches, called)[1]) != _described(expected):
                return None
    except Exception:  # whatever it is, kernels are recorded for each shape alone
        return None
    return {**context.recorded, **found}, trace.conditions()


def _described(value: Any, numbers: Numbers = PLAIN) -> Any:
    """Returns launches as nested lists that are equal where they do the same."""
    if isinstance(value, View):  # a dimension of one needs no stride
        shape, stride = (tuple(map(numbers.of, sizes)) for sizes in (value.shape, value.stride))
        offset_bytes = numbers.of(value.offset_bytes)
        return value.buffer, value.dtype, shape, strides_that_matter(shape, stride), offset_bytes
    if isinstance(value, (tuple, list)):
        return [_described(one, numbers) for one in value]
    if isinstance(value, (KernelList, Launch, NativeOp, BufferInfo, TensorType)):
        return [_described(getattr(value, field.name), numbers) for field in fields(value)]
    return numbers.of(value)
