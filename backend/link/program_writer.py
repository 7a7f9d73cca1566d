"""The generated function of one part of a layout; control flow as one launch in it.

Launches with a native form are words for the native loop, which one call runs for a series of
launches; each other launch is a line of Python on bound names. Tensors in the arena and tensors of
the model are bound before the first run; user inputs, results and foreign buffers are locals of the
function.

Control flow is one launch, which contains the launches of its bodies: a body is linked and its
memory planned on its own, once. The bodies' arena is one buffer of the launch, as large as the
largest body needs, since one body runs at a time; inputs and results are operands of the launch. So
the surrounding program stays a straight line of launches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch

from ...reuse.ir.control import Choose, Repeat, RepeatWhile
from ...reuse.ir.leaf import flat_types
from ...reuse.ir.program import Control, Leaf
from ...reuse.ir.size_tape import Size
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
from .layout import Layout, Part, Placed, PlacedLaunch, copied_out
from .link import FlatProgram
from .placement import Overlay, Tools, aligned, loaded_wide, planned
from .torch_generated import ARENA_SLOT, IF_IT_RUNS, GeneratedCode, check_layout, view_of

Ranges: TypeAlias = Literal["none", "offered", "shown"]
"""The ranges that a profiler sees: none; those of a second function, generated when a profiler
runs; or one for each call of a block and each launch."""


@dataclass(eq=False)
class CodeWriter:
    """Writes one part of a layout as a Python function ``program(inputs) -> outputs``."""

    layout: Layout
    offsets: Sequence[int]  # of each instance in the arena, in bytes (unused for other kinds)
    part: Part
    fixed: set[int]  # instances whose tensors are bound beforehand (the model's)
    num_returned: int  # of the outputs, from the first; the others stay in the arena
    extra_inputs: Sequence[int] = ()  # foreign instances and hosts that an earlier part allocated
    extra_outputs: Sequence[int] = ()  # foreign instances and hosts that a later part uses
    # The region of the arena that an instance's offset counts from, if not from the start.
    regions: Mapping[int, int] = field(default_factory=dict)
    # Hosts, which the first part allocates, and the arena instances placed in them.
    overlay: Overlay = field(default_factory=Overlay)
    ranges: Ranges = "none"

    def __post_init__(self) -> None:
        self._returned = self.part.outputs[: self.num_returned]
        self._block = ""
        self._code = GeneratedCode()
        self._names: dict[Placed, str] = {}
        self._constants: dict[int, str] = {}
        self._locals: dict[int, Placed] = {}
        self._local_names: dict[int, list[str]] = {}
        self._local_slots: dict[int, int] = {}
        self._handed_back: dict[Placed, str] = {}
        self._starts: dict[tuple[int, torch.dtype, int], str] = {}
        self._lines: list[str] = []
        self._native_start = 0
        self._num_native = 0
        self._freed: list[str] = []

    def write(self) -> GeneratedCode:
        """Returns the code."""
        self._lines = ["def program(inputs):"]
        if self.ranges == "offered":
            self._lines.append(f"  if {IF_IT_RUNS}: return profiled(inputs)")
        self._take_inputs()
        last_use = self._last_uses()
        for launch in self.part.launches:
            if self.ranges == "shown":
                self._shown(launch)
            else:
                self._add(launch)
            if launch.time in last_use:
                self._free(last_use[launch.time])
        self._flush()
        self._enter("")
        outputs = [self._handed_back.get(p) or self._name(p) for p in self._returned]
        outputs += [self._name(self._locals[i]) for i in self.extra_outputs]
        self._lines.append(f"  return [{', '.join(outputs)}]")
        self._code.source = "\n".join(self._lines) + "\n"
        return self._code

    def _add(self, launch: PlacedLaunch) -> None:
        if launch.launch.native is None:
            self._flush()
            self._launch(launch)
        else:
            self._add_native(launch.launch.native, launch)

    def _shown(self, launch: PlacedLaunch) -> None:
        """Writes one launch in a range of its own, inside that of its block."""
        self._enter(launch.block)
        # What bears its closure's name is all that the block launches.
        is_own = launch.of is None or launch.launch.name != launch.of.leaf.name
        if is_own:
            self._lines.append(f"  launched = begin({launch.launch.name!r})")
        self._add(launch)
        self._flush()
        if is_own:
            self._lines.append("  end(launched)")

    def _enter(self, block: str) -> None:
        """Writes the end of one block's range and the beginning of the next one's."""
        if block != self._block:
            if self._block:
                self._lines.append("  end(block)")
            if block:
                self._lines.append(f"  block = begin({block!r})")
            self._block = block

    def _take_inputs(self) -> None:
        names = []
        for index, placed in enumerate(self.part.inputs):
            kind = self.layout.instances[placed.instance].kind
            bound = placed.instance in self.fixed or kind in ("arena", "foreign")
            if not bound and placed.instance not in self._locals:
                names.append(f"i{index}")
                self._code.inputs.append(index)
                passed = self.layout.givens.get(placed.instance, placed)
                self._locals[placed.instance] = passed
                self._names[passed] = names[-1]
        for instance_index in self.extra_inputs:
            placed = self._handed_base(instance_index)
            names.append(self._names.setdefault(placed, f"f{instance_index}"))
            self._locals[instance_index] = placed
            self._local_names[instance_index] = [names[-1]]
        if names:
            self._lines.append(f"  {', '.join(names)}, = inputs")
        self._lines.append("  inputs.clear()")
        self._align_inputs([self.part.inputs[index] for index in self._code.inputs])
        for instance_index in self.extra_outputs:
            if instance_index in self.overlay.hosts:
                self._make_result(instance_index, self._handed_base(instance_index))

    def _align_inputs(self, given: Sequence[Placed]) -> None:
        """Adds copies of inputs that are not aligned for GPU kernels."""
        if self.layout.runs == "native":
            return
        wide = loaded_wide(self.part.launches)
        for instance in [placed.instance for placed in given if placed.instance in wide]:
            base = self._locals[instance]
            name = self._names[base]
            for placed in self._returned:  # a returned input must alias the user's own tensor
                if placed.instance == instance and placed not in self._handed_back:
                    self._handed_back[placed] = handed = f"h{len(self._handed_back)}"
                    self._lines.append(f"  {handed} = {self._view(name, base, placed)}")
            self._lines.append(f"  {name} = {self._constant(aligned)}({name})")

    def _handed_base(self, instance_index: int) -> Placed:
        if instance_index in self.overlay.hosts:
            return host_base(self.layout, instance_index)
        for part in self.layout.parts:
            for launch in part.launches:
                for view in launch.launch.results:
                    if isinstance(view, View) and launch.place(view).instance == instance_index:
                        return launch.place(view)
        raise AssertionError("a foreign buffer that no launch makes")

    def _last_uses(self) -> dict[int, list[int]]:
        """Returns foreign buffers by the time of their last use in this part."""
        kept = {p.instance for p in self._returned} | set(self.extra_outputs)
        foreign = {i for i, b in enumerate(self.layout.instances) if b.kind == "foreign"} - kept
        last: dict[int, int] = {}
        for launch in self.part.launches if foreign else ():
            if any(instance in foreign for instance, _ in launch.bases):
                used = {launch.bases[view.buffer][0] for view in launch.launch.views()}
                last.update((instance, launch.time) for instance in used & foreign)
        found: dict[int, list[int]] = {}
        for instance, time in last.items():
            found.setdefault(time, []).append(instance)
        return found

    def _free(self, instances: Sequence[int]) -> None:
        """Deletes every name of a foreign buffer: views keep its memory alive, too."""
        for instance in instances:
            self._freed += self._local_names.pop(instance, ())
        if not self._num_native:
            self._drop_freed()

    def _drop_freed(self) -> None:
        if self._freed:
            self._lines.append(f"  del {', '.join(self._freed)}")
            self._freed.clear()

    # ---- native launches -----------------------------------------------------------------

    def _add_native(self, op: NativeOp, placed: PlacedLaunch) -> None:
        self._num_native += op.num_operations
        words: list[int] = []
        for operand in op.operands:
            if isinstance(operand, View):
                words += self._native_address(operand, placed)
            else:
                words.append(operand)
        first = len(self._code.words)
        self._code.sizes += [(first + i, n) for i, n in enumerate(words) if type(n) is Size]
        self._code.words.extend(words)

    def _native_address(self, view: View, placed: PlacedLaunch) -> tuple[int, int]:
        """Returns a slot of the address table, and an offset in bytes."""
        index, base_bytes = placed.bases[view.buffer]
        offset_bytes = base_bytes + view.offset_bytes
        if index in self.overlay.guests:
            host, offset = self.overlay.guests[index]
            return self._local_slot(host, self._locals[host]), offset + offset_bytes
        if self.layout.instances[index].kind == "arena":
            return self._region_slot(index), self.offsets[index] + offset_bytes
        if index in self.fixed:
            slots = self._code.slots
            if index not in slots:
                slots[index] = self._new_slot()
            return slots[index], offset_bytes
        # Known only in a run: the function stores the address in the table, then calls the loop.
        base = self._base(placed.place(view))
        return self._local_slot(index, base), offset_bytes - base.offset_bytes

    def _region_slot(self, instance: int) -> int:
        device = self.layout.instances[instance].device
        if device is not None:
            if device not in self._code.arenas:
                self._code.arenas[device] = self._new_slot()
            return self._code.arenas[device]
        region = self.regions.get(instance)
        if region is None:
            return ARENA_SLOT
        if region not in self._code.regions:
            self._code.regions[region] = self._new_slot()
        return self._code.regions[region]

    def _local_slot(self, instance: int, base: Placed) -> int:
        slot = self._local_slots.get(instance)
        if slot is None:
            slot = self._local_slots[instance] = self._new_slot()
            name = self._names[base]
            self._lines.append(f"  addresses[{slot}] = {name}.data_ptr() or no_address({name})")
        return slot

    def _new_slot(self) -> int:
        self._code.num_slots += 1
        return self._code.num_slots - 1

    def _flush(self) -> None:
        """Adds the call that runs the native launches collected so far."""
        # As late as possible: each call of the loop from Python costs as much as a small launch.
        if self._num_native:
            start = self._native_start * self._code.words.itemsize
            call = f"run_native(words + {start}, {self._num_native}, table)"
            self._lines.append(f"  if failure := {call}: fail(failure)")
        self._native_start, self._num_native = len(self._code.words), 0
        self._drop_freed()

    # ---- launches from Python ------------------------------------------------------------

    def _launch(self, placed: PlacedLaunch) -> None:
        launch = placed.launch
        args = [self._operand(a, placed) for a in launch.args]
        args += [f"{k}={self._operand(v, placed)}" for k, v in launch.kwargs]
        call = f"{self._constant(launch.function)}({', '.join(args)})"
        if not launch.results:
            self._lines.append(f"  {call}")
            return
        targets = [self._new_local(v, placed) for v in launch.results]
        self._code.num_made_per_run += sum(t != "_" for t in targets)
        comma = "," if launch.returns == "tuple" else ""
        self._lines.append(f"  {', '.join(targets)}{comma} = {call}")
        for target, view in zip(targets, launch.results, strict=True):
            if target != "_":
                device = self.layout.instances[placed.place(view).instance].device
                self._check(target, view, launch.name, device)

    def _check(self, target: str, view: View, operator: str, device: torch.device | None) -> None:
        """Adds a check of a foreign result, which is copied if its layout is not the traced one."""
        check = self._constant(check_layout)
        dtype = self._constant(view.dtype)
        where = "" if device is None else f", device={self._constant(device)}"
        expected = f"{view.shape}, {view.stride}, {dtype}, {operator!r}{where}"
        fitted = f"{target} = as_predicted({target}, {expected})"
        self._lines += [
            "  try:",
            f"    {check}({target}, {view.shape}, {view.stride})",
            f"    if {target}.dtype is not {dtype}: {fitted}",
            "  except (AssertionError, TypeError):",
            f"    {fitted}",
        ]

    def _new_local(self, view: Any, placed: PlacedLaunch) -> str:
        if not isinstance(view, View):
            return "_"
        place = placed.place(view)
        instance = self.layout.instances[place.instance]
        if instance.kind != "foreign":
            return "_"
        name = (
            f"f{place.instance}" if place.instance not in self._locals else f"g{len(self._names)}"
        )
        self._locals.setdefault(place.instance, place)
        self._names[place] = name
        self._local_names.setdefault(place.instance, []).append(name)
        return name

    def _operand(self, value: Any, placed: PlacedLaunch) -> str:
        if isinstance(value, View):
            place = placed.place(value)
            # Only addresses count, so views with equal addresses are bound once.
            if placed.launch.operands == "addresses":
                return self._address(place)
            return self._name(place)
        if isinstance(value, (list, tuple)):
            inner = ", ".join(self._operand(v, placed) for v in value)
            return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' * bool(inner)})"
        is_plain = value is None or type(value) in (bool, int, str, Size)
        if is_plain or (type(value) is float and math.isfinite(value)):
            return repr(value)
        return self._constant(value)

    def _address(self, placed: Placed) -> str:
        """Returns the name of any tensor with the same address and dtype."""
        key = (placed.instance, placed.dtype, placed.offset_bytes)
        if key not in self._starts:
            start = placed
            kind = self.layout.instances[placed.instance].kind
            if kind != "arena" and placed.instance not in self.fixed:
                base = self._base(placed)
                if (base.dtype, base.offset_bytes) == (placed.dtype, placed.offset_bytes):
                    start = base
            self._starts[key] = self._name(start)
        return self._starts[key]

    def _constant(self, value: Any) -> str:
        name = self._constants.get(id(value))
        if name is None:
            name = self._constants[id(value)] = f"k{len(self._constants)}"
            self._code.constants[name] = value
        return name

    def _name(self, placed: Placed) -> str:
        name = self._names.get(placed)
        if name is None:
            name = self._names[placed] = self._new_name(placed)
        return name

    def _new_name(self, placed: Placed) -> str:
        name = f"v{len(self._names)}"
        assert placed.instance not in self.overlay.guests, "a guest has no address before a run"
        if self.layout.instances[placed.instance].kind == "arena":
            self._code.arena_views[name] = placed
            return name
        if placed.instance in self.fixed:
            self._code.model_views[name] = placed
            return name
        base = self._base(placed)
        if base == placed:
            return self._names[base]
        self._lines.append(f"  {name} = {self._view(self._names[base], base, placed)}")
        self._local_names.setdefault(placed.instance, []).append(name)
        return name

    def _view(self, name: str, base: Placed, placed: Placed) -> str:
        """Returns the expression for a view of a named tensor; the name if it is the same."""
        if base == placed:
            return name
        offset = (placed.offset_bytes - base.offset_bytes) // placed.dtype.itemsize
        view, dtype = self._constant(view_of), self._constant(placed.dtype)
        return f"{view}({name}, {placed.shape}, {placed.stride}, {offset}, {dtype})"

    def _base(self, placed: Placed) -> Placed:
        """Returns the local tensor that a view is made from; allocates it if it is a result."""
        if placed.instance not in self._locals:
            base = _result_base(self.layout, self.part, placed)
            self._make_result(placed.instance, base)
        return self._locals[placed.instance]

    def _make_result(self, instance: int, base: Placed) -> None:
        """Adds the allocation of a buffer that the user will own, from which views are made."""
        found = self.layout.instances[instance]
        assert found.kind == "result", found
        self._code.num_made_per_run += 1
        name, dtype = f"r{instance}", self._constant(base.dtype)
        call = f"new_tensor({base.shape}, {base.stride}, {dtype})"
        if found.device is not None:
            make, device = self._constant(torch.empty_strided), self._constant(found.device)
            call = f"{make}({base.shape}, {base.stride}, dtype={dtype}, device={device})"
        self._lines.append(f"  {name} = {call}")
        self._locals[instance] = base
        self._names[base] = name


def host_base(layout: Layout, instance: int) -> Placed:
    """Returns the whole buffer of a gradient whose memory a forward allocates."""
    part = layout.parts[-1]
    return _result_base(layout, part, next(p for p in part.outputs if p.instance == instance))


def _result_base(layout: Layout, part: Part, placed: Placed) -> Placed:
    """Returns the whole buffer of a result, as the output that covers all of it if there is one."""
    whole_bytes = layout.instances[placed.instance].num_bytes
    for output in part.outputs:
        num_bytes = math.prod(output.shape) * output.dtype.itemsize
        starts = output.instance == placed.instance and output.offset_bytes == 0
        if starts and num_bytes == whole_bytes:
            return output
    count = whole_bytes // placed.dtype.itemsize
    return Placed(placed.instance, placed.dtype, (count,), (1,), 0)


# ---- control flow --------------------------------------------------------------------------------


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
