"""Link: the deferred inline. A program of calls becomes one flat list of kernel launches.

Composite closures are expanded here and nowhere earlier. All calls of a leaf share its kernels, and
only slot numbers are made per call. A flat program says after which launch each slot is free; the
memory plan turns that into addresses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ...reuse.errors import VerifyError
from ...reuse.ir.leaf import flat_types
from ...reuse.ir.program import Call, Composite, Leaf, Pack, Program, Unpack, Value
from ...reuse.ir.rewrite import grouped
from ...reuse.ir.torch_updates import is_update, results_in_place
from ...reuse.ir.types import TensorType, flatten_type

Slots = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel launch: the leaf, its slots, and the slots whose last use it is."""

    leaf: Leaf
    operands: Slots
    results: Slots
    frees: Slots
    path: str

    @property
    def block(self) -> str:
        """The call's module path and closure, for messages."""
        return f"{self.path} {self.leaf.name}".lstrip()


@dataclass(frozen=True)
class FlatProgram:
    """Launches in execution order over numbered slots; each slot is written once."""

    inputs: Slots
    launches: tuple[Launch, ...]
    outputs: Slots
    slot_types: tuple[TensorType, ...]

    def __str__(self) -> str:
        lines = [f"inputs {_slots(self.inputs)}"]
        for launch in self.launches:
            note = f"  // {launch.path}" if launch.path else ""
            frees = f"  free {_slots(launch.frees)}" if launch.frees else ""
            call = f"{launch.leaf.name}({_slots(launch.operands)})"
            lines.append(f"{_slots(launch.results)} = {call}{frees}{note}")
        return "\n".join([*lines, f"return {_slots(self.outputs)}"])


def _slots(slots: Slots) -> str:
    return ", ".join(f"s{s}" for s in slots)


def link(program: Program) -> FlatProgram:
    """Lays a program's calls out in execution order."""
    expansion = _Expansion()
    # A struct value is one slot per tensor here, so packing costs nothing at run time.
    env = {value: expansion.new_slots(value) for value in program.inputs}
    inputs = tuple(slot for value in program.inputs for slot in env[value])
    expansion.body(program, env, "")
    outputs = tuple(slot for value in program.outputs for slot in env[value])
    launches = _with_frees(_updated_at_once(_summed_at_once(expansion.launches)), inputs, outputs)
    return FlatProgram(inputs, launches, outputs, tuple(expansion.types))


def copied_between_devices(flat: FlatProgram) -> tuple[int, int]:
    """Returns how often a run copies between devices, and how many bytes in all."""
    sizes = []
    for launch in flat.launches:
        taken = {flat.slot_types[s].device for s in launch.operands}
        made = [flat.slot_types[s] for s in launch.results]
        if taken:
            sizes += [type_.num_bytes for type_ in made if taken != {type_.device}]
    return len(sizes), sum(sizes)


def check_flat(flat: FlatProgram) -> None:
    """Raises VerifyError unless slots are written once, then read, and freed after that."""
    live = set(flat.inputs)
    written = set(flat.inputs)
    updated: set[int] = set()
    for number, launch in enumerate(flat.launches):
        where = f"launch {number} of @{launch.leaf.name}"
        if not live.issuperset(launch.operands):
            raise VerifyError(f"{where} reads a slot that is not written or already freed")
        if not updated.isdisjoint(launch.operands):
            raise VerifyError(f"{where} reads a slot whose memory an update has taken over")
        updated.update(launch.operands[i] for i in results_in_place(launch.leaf))
        if not written.isdisjoint(launch.results):
            raise VerifyError(f"{where} writes a slot that was written before")
        for slots, types in (
            (launch.operands, launch.leaf.input_types),
            (launch.results, launch.leaf.output_types),
        ):
            if [flat.slot_types[s] for s in slots] != flat_types(types):
                raise VerifyError(f"{where} takes or gives slots of other types than it says")
        written.update(launch.results)
        live.update(launch.results)
        live.difference_update(launch.frees)
    if not live.issuperset(flat.outputs):
        raise VerifyError("an output is a slot that is not written or already freed")


class _Expansion:
    """Expands calls, numbering slots as it goes."""

    def __init__(self) -> None:
        self.types: list[TensorType] = []
        self.launches: list[Launch] = []

    def new_slots(self, value: Value) -> Slots:
        first = len(self.types)
        self.types.extend(flatten_type(value.type))
        return tuple(range(first, len(self.types)))

    def body(self, program: Program, env: dict[Value, Slots], path: str) -> None:
        for call in program.calls:
            self._call(call, env, path)

    def _call(self, call: Call, env: dict[Value, Slots], path: str) -> None:
        closure, operands = call.closure, tuple(s for v in call.args for s in env[v])
        if isinstance(closure, (Pack, Unpack)):
            parts = grouped(operands, [value.type for value in call.results])
            env.update(zip(call.results, map(tuple, parts), strict=True))
        elif isinstance(closure, Composite):
            inner = dict(zip(closure.program.inputs, (env[v] for v in call.args), strict=True))
            self.body(closure.program, inner, _join(path, call.path))
            results = (inner[v] for v in closure.program.outputs)
            env.update(zip(call.results, results, strict=True))
        else:
            env.update((value, self.new_slots(value)) for value in call.results)
            results_ = tuple(s for v in call.results for s in env[v])
            self.launches.append(Launch(closure, operands, results_, (), _join(path, call.path)))


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path and name else path or name


def _summed_at_once(launches: Sequence[Launch]) -> Sequence[Launch]:
    """Moves each sum of two values without other uses to right after the later of them."""
    sums = {leaf for leaf in dict.fromkeys(one.leaf for one in launches) if leaf.is_sum}
    if not sums:
        return launches
    # A step adds the gradients of a whole micro-batch to the earlier sums after its backward:
    # without this, all gradients and all sums would be live at once.
    uses = Counter(slot for launch in launches for slot in launch.operands)
    made_at: dict[int, int] = {}
    moved: dict[int, list[Launch]] = {}
    stay: list[tuple[int, Launch]] = []
    for index, launch in enumerate(launches):
        at = index
        if launch.leaf in sums and all(uses[slot] == 1 for slot in launch.operands):
            at = max(made_at.get(slot, -1) for slot in launch.operands)
        if at in (-1, index):
            at = index
            stay.append((index, launch))
        else:
            moved.setdefault(at, []).append(launch)
        made_at.update(dict.fromkeys(launch.results, at))
    return [one for index, launch in stay for one in (launch, *moved.get(index, ()))]


def _updated_at_once(launches: Sequence[Launch]) -> Sequence[Launch]:
    """Moves each update to right after the last other launch that makes or reads its operands."""
    updates = {leaf for leaf in dict.fromkeys(one.leaf for one in launches) if is_update(leaf)}
    if not updates:
        return launches
    # Updates are at the end of a program; moved up, they free their gradients early.
    last: dict[int, int] = {}  # the last launch, updates left out, that makes or reads a slot
    moved: dict[int, list[Launch]] = {}
    stay = [one for one in launches if one.leaf not in updates]
    for index, launch in enumerate(stay):
        last.update(dict.fromkeys((*launch.operands, *launch.results), index))
    for launch in launches:
        if launch.leaf in updates:
            at = max(last.get(slot, -1) for slot in launch.operands)
            moved.setdefault(at, []).append(launch)
    found = [one for i, launch in enumerate(stay) for one in (launch, *moved.get(i, ()))]
    return [*moved.get(-1, ()), *found]  # first those whose operands are all inputs


def _with_frees(launches: Sequence[Launch], inputs: Slots, outputs: Slots) -> tuple[Launch, ...]:
    """Adds to each launch the slots whose last use it is."""
    seen = set(outputs)
    reversed_launches = []
    for launch in reversed(launches):
        frees = tuple(
            s for s in dict.fromkeys((*launch.operands, *launch.results)) if s not in seen
        )
        seen.update(frees)
        reversed_launches.append(
            Launch(launch.leaf, launch.operands, launch.results, frees, launch.path)
        )
    return tuple(reversed(reversed_launches))
