"""Control flow as one launch, which contains the launches of its bodies.

A body is linked and its memory planned on its own, once. The bodies' arena is one buffer of the
launch, as large as the largest body needs, since one body runs at a time; inputs and results are
operands of the launch. So the surrounding program stays a straight line of launches.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from ...reuse.ir.control import Choose, Repeat, RepeatWhile
from ...reuse.ir.leaf import flat_types
from ...reuse.ir.program import Control, Leaf
from ..launches.kernel_list import (
    CHOOSE,
    REPEAT,
    REPEAT_WHILE,
    BufferInfo,
    KernelList,
    Launch,
    NativeOp,
    View,
    copied,
)
from .layout import Layout, Part, copied_out
from .link import FlatProgram
from .placement import Tools, planned
from .program_writer import CodeWriter
from .torch_generated import ARENA_SLOT


@dataclass(frozen=True)
class _Linked:
    """A linked body: words of the native loop, and the slots of its operands and results."""

    num_bytes: int
    words: list[int] | None  # None if a launch in it has no native form
    num_operations: int
    num_slots: int
    # Of its operands, then of the buffers for its results; -1 for an unused operand.
    slots: list[int]


def record_control(
    leaf: Leaf,
    function: Callable[..., Sequence[torch.Tensor]],
    bodies: Sequence[FlatProgram],
    lists: Mapping[Leaf, KernelList],
    tools: Tools,
) -> KernelList:
    """Returns the launch of a control-flow operator whose bodies are linked.

    ``function`` runs it from Python, used if a launch of a body has no native form.
    """
    control = leaf.control
    assert control is not None
    types, returned = flat_types(leaf.input_types), flat_types(leaf.output_types)
    linked = [_linked(body, lists, tools) for body in bodies]
    # The flag that says whether a loop goes on is after the bodies' arena.
    num_bytes = max(1, *(body.num_bytes for body in linked)) + isinstance(control, RepeatWhile)
    sizes = [*(t.num_bytes for t in (*types, *returned)), num_bytes]
    views = [View(i, t.dtype, t.shape, t.stride, 0) for i, t in enumerate((*types, *returned))]
    scratch = View(len(views), torch.uint8, (num_bytes,), (1,), 0)
    operands, outputs = views[: len(types)], views[len(types) :]
    launch = Launch(
        leaf.name,
        _Run(control, function, len(operands)),
        (*operands, *outputs, scratch),
        (),
        native=_native(control, linked, operands, outputs, scratch),
    )
    buffers = [
        BufferInfo(
            "input" if i < len(types) else "private", size, 0, 0, (*types, *returned)[0].device
        )
        for i, size in enumerate(sizes)
    ]
    return KernelList(
        leaf.name, len(types), tuple(buffers), (launch,), tuple(outputs), tuple(returned)
    )


@dataclass(frozen=True)
class _Run:
    """Runs an operator from Python, and copies its results into the output buffers."""

    control: Control
    function: Callable[..., Sequence[torch.Tensor]]
    num_operands: int

    def __call__(self, *tensors: torch.Tensor) -> None:
        operands, outputs = tensors[: self.num_operands], tensors[self.num_operands : -1]
        waits = not isinstance(self.control, Repeat) and operands[0].is_cuda
        if waits and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(f"Python asks for a number of the GPU to {self.control.word}")
        with torch.no_grad():
            for output, result in zip(outputs, self.function(*operands), strict=True):
                output.copy_(result)


def _linked(flat: FlatProgram, lists: Mapping[Leaf, KernelList], tools: Tools) -> _Linked:
    """Links a body, which at its end copies its results into the output buffers."""
    layout = Layout()
    inputs = [layout.given(flat.slot_types[s]) for s in flat.inputs]
    targets = [layout.given(flat.slot_types[s]) for s in flat.outputs]
    part = layout.add(flat, inputs, lists)
    given = {placed.instance for placed in (*inputs, *targets)}
    # An operand that is returned unchanged is copied: another result may overwrite it.
    made = [
        copied_out(layout, part, p, "arena") if p.instance in given else p for p in part.outputs
    ]
    for target, output in zip(targets, made, strict=True):
        part.launches.append(layout.apply("copy_", target, output))
    offsets, _, num_bytes, _, _ = planned(layout, tools)
    operations = [one.launch.native for one in part.launches]
    if None in operations:
        return _Linked(num_bytes, None, 0, 0, [])
    code = CodeWriter(layout, offsets, Part(inputs, part.launches, []), given, 0).write()
    slots = [code.slots.get(placed.instance, -1) for placed in (*inputs, *targets)]
    number = sum(one.num_operations for one in operations if one is not None)
    return _Linked(num_bytes, list(code.words), number, code.num_slots, slots)


def _native(
    control: Control,
    linked: Sequence[_Linked],
    operands: Sequence[View],
    outputs: Sequence[View],
    scratch: View,
) -> NativeOp | None:
    """Returns the launch as words, which include those of the bodies."""
    if any(body.words is None for body in linked):
        return None
    if isinstance(control, Choose):
        bodies = [_body(one, [*operands[1:], *outputs], scratch) for one in linked]
        return NativeOp((CHOOSE, operands[0], *bodies[0], *bodies[1]))
    if isinstance(control, Repeat):
        count = control.num_carried
        carried, scanned, same = control.split(operands)
        # A step reads the carried values in the output buffers, where the last step put them.
        given = [*outputs[:count], *scanned, *same, *outputs]
        rows = {*range(count, count + len(scanned)), *range(len(operands) + count, len(given))}
        body = _body(linked[0], given, scratch, rows)
        head = (*_begun(carried, outputs), REPEAT, control.num_steps, control.is_reversed)
        return NativeOp((*head, *body), 1 + len(carried))
    assert isinstance(control, RepeatWhile)
    count = control.num_carried
    given = [*outputs, *operands[count:]]
    flag = View(scratch.buffer, torch.bool, (), (), scratch.shape[0] - 1)
    test, body = (
        _body(one, [*given, *last], scratch)
        for one, last in zip(linked, ([flag], outputs), strict=True)
    )
    begin = _begun(operands[:count], outputs)
    return NativeOp((*begin, REPEAT_WHILE, flag, *test, *body), 1 + count)


def _begun(carried: Sequence[View], outputs: Sequence[View]) -> list[int | View]:
    """Returns the words that copy the initial carried values into the output buffers."""
    pairs = zip(carried, outputs, strict=False)
    return [word for first, output in pairs for word in copied(output, first)]


def _body(
    linked: _Linked, given: Sequence[View], scratch: View, rows: Collection[int] = ()
) -> tuple[int | View, ...]:
    """Returns the words of a body, and where each of its slots points.

    ``given`` are its operands, then the buffers for its results; ``rows`` are the positions in it
    of the tensors with a row for each step.
    """
    bindings: list[int | View] = []
    number = 0
    for i, (slot, view) in enumerate(zip(linked.slots, given, strict=True)):
        if slot >= 0:
            stride = view.stride[0] * view.dtype.itemsize if i in rows else 0
            bindings += [slot, stride, view]
            number += 1
    assert linked.words is not None
    head = (linked.num_slots, linked.num_operations, len(linked.words))
    return (*head, *linked.words, 1 + number, ARENA_SLOT, 0, scratch, *bindings)
