"""One link for many shapes: a program linked once, with other sizes filled in for each shape.

The second shape is linked with numbers that record how they were computed
(:mod:`...reuse.ir.size_tape`). A later shape reuses that program if every comparison made during
the link has the same outcome for it, and its buffers fit: no launch is recorded and no memory is
planned again. A shape that fits none of these programs gets another one, or a link of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from ...backend.kernels import lower
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
from .numbers import check_layouts, results_at, with_numbers
from .state import Compilation, State

_CPU = torch.device("cpu")
_MAX_PATTERNS = 8
"""The most programs linked for many shapes; a shape that fits none of them is linked alone."""
_HEADROOM = 8  # buffers of a size that varies are planned for the largest size so far plus 1/8


class ManyShapes:
    """Programs of one symbolic compile, each linked once for many shapes."""

    def __init__(self) -> None:
        self._patterns: tuple[_Pattern, ...] = ()
        self._num_tried = 0
        self._room = Values()

    def at(self, state: State, values: Values) -> State | None:
        """Returns the linked state of one shape, or None if the shape needs a link of its own."""
        # A memory budget applies at each shape, so each is planned without headroom.
        if isinstance(state.context.options.recompute, Budget):
            return None
        found = self.known(state, values)
        if found is None and self._num_tried < _MAX_PATTERNS:
            self._num_tried += 1
            try:
                made = _Pattern.of(state, self._room_for(state, values), values)
            except Exception:  # the caller links this shape alone, which works or raises again
                made = None
            self._patterns = (*self._patterns, made)[-_MAX_PATTERNS:] if made else self._patterns
            found = self.known(state, values)
        return found

    def known(self, state: State, values: Values) -> State | None:
        """Like ``at``, but only reuses programs that are linked already."""
        for pattern in reversed(self._patterns):
            numbers = pattern.at(values)
            if numbers is not None:
                return noted(state, pattern.runs.at(numbers), values=values)
        return None

    def _room_for(self, state: Compilation, values: Values) -> Values:
        """Returns the sizes to plan for: the largest so far, with headroom for those that vary."""
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
    """A program linked with sizes that recorded how they were computed.

    ``numbers`` recomputes all sizes for another shape; it gives None if a comparison differs there.
    """

    numbers: Callable[[Values], Numbers | None]
    runs: PlannedProgram | Runtime
    rooms: Sequence[tuple[int, int]]  # of each buffer its bytes, a recorded size, and those planned

    @classmethod
    def of(cls, state: Compilation, room: Values, values: Values) -> _Pattern | None:
        """Links a program with recorded sizes; None if that is not possible, or its check fails.

        Memory is planned for the sizes ``room``. For ``values``, the sizes of a call, the launches
        must equal those recorded directly.
        """
        if why_unplanned(state) or any(leaf.bodies for leaf in leaves_of(state.linked)):
            return None
        if state.context.options.target is not None or devices_of(state.linked) != [_CPU]:
            return None  # GPU kernels were never tested with other sizes filled in
        context, sizes, tape = state.context, state.captured.sizes, SizeTape(room)
        trace: SizeTrace | None = None  # made on demand: its shape environment imports Dynamo
        leaves, lists = {}, {}
        for leaf in leaves_of(state.linked):
            made, launches = leaf, None
            known = context.recorded.get(leaf)
            if isinstance(known, SymbolicList):
                made, launches = lower.numbered(leaf, known, tape.values)
                check_layouts(launches)
            elif known is None and lower.has_sizes(leaf):
                trace = trace or SizeTrace(tape.values)
                made, launches = lower.launches_at(leaf, context.kernels[leaf], tape.values, trace)
                check_layouts(launches)
            leaves[leaf], lists[made] = made, launches or context.launches_of_leaf(leaf)
        if (trace is not None and not trace.holds()) or not sizes.are_right(tape.values):
            return None
        results_at(state.captured.program, tape.values)
        program = plan_at(with_numbers(state, tape.values, leaves), lists)
        numbers = tape.function()
        # A size whose computation was not recorded would be wrong here: the check finds it.
        other = next((v for v in (values, sizes.example) if v != room), None)
        if other is None or not _are_equal(context, leaves, lists, numbers(other), other):
            return None
        return cls(numbers, runs_of(state, program), program.rooms)

    def at(self, values: Values) -> Numbers | None:
        """Returns the sizes for a shape; None if a comparison differs or a buffer is too small."""
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
    """Whether launches with a shape's sizes filled in equal those recorded directly for it."""
    return numbers is not None and all(
        _described(lists[made], numbers) == _described(_recorded_at(context, leaf, values))
        for leaf, made in leaves.items()
        if made is not leaf
    )


def _recorded_at(context: Context, leaf: Leaf, values: Values) -> KernelList:
    """Returns the kernel list of a symbolic leaf, recorded for plain numbers."""
    known = context.recorded.get(leaf)
    if isinstance(known, SymbolicList):
        return lower.numbered(leaf, known, values)[1]
    return lower.kernel_list(*lower.kernel_at(leaf, context.kernels[leaf], values))


def launches_for_all(
    state: Compilation, examples: Values
) -> tuple[dict[Leaf, KernelList], list[Any]] | None:
    """Returns kernel lists with symbolic sizes, and the conditions under which they are valid.

    None if that is not possible, or if they differ from those recorded for the sizes of a call.
    """
    context, trace = state.context, SymbolTrace(examples)
    if why_unplanned(state) or any(leaf.bodies for leaf in leaves_of(state.linked)):
        return None
    new = [x for x in leaves_of(state.linked) if x not in context.recorded and lower.has_sizes(x)]
    called = state.captured.sizes.example
    try:
        found = {x: lower.symbolic_launches(x, context.kernels[x], trace) for x in new}
        for leaf, launches in found.items():
            expected = _recorded_at(context, leaf, called)
            if _described(lower.numbered(leaf, launches, called)[1]) != _described(expected):
                return None
    except Exception:  # kernels are then recorded for each shape alone
        return None
    return {**context.recorded, **found}, trace.conditions()


def _described(value: Any, numbers: Numbers = PLAIN) -> Any:
    """Returns launches as nested lists, which are equal if the launches do the same."""
    if isinstance(value, View):  # the stride of a dimension of size 1 does not matter
        shape, stride = (tuple(map(numbers.of, sizes)) for sizes in (value.shape, value.stride))
        offset_bytes = numbers.of(value.offset_bytes)
        return value.buffer, value.dtype, shape, strides_that_matter(shape, stride), offset_bytes
    if isinstance(value, (tuple, list)):
        return [_described(one, numbers) for one in value]
    if isinstance(value, (KernelList, Launch, NativeOp, BufferInfo, TensorType)):
        return [_described(getattr(value, field.name), numbers) for field in fields(value)]
    return numbers.of(value)
