"""Programs whose memory is not planned: closures are called, and PyTorch allocates.

One program is an :class:`Executable`, a step that owns its results an :class:`UnplannedStep`, and
the parts of a pipeline rank's stages an :class:`UnplannedRank`.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ...reuse.ir.leaf import without_autocast
from ...reuse.ir.program import Leaf
from ..arena.arena import ArenaPlan
from ..arena.live_ranges import Buffers, lower_bound
from ..kernels.lower import Kernel
from ..launches.present_memory import check_addresses, check_memory
from ..link.link import FlatProgram, Launch, Slots
from ..link.program_writer import Ranges
from ..link.torch_generated import Runner, begin_range, end_range, profiler_runs
from ..link.unit_layout import PartSpec, Source
from .planned import Lease, PlannedProgram

_NO_PLAN = ArenaPlan(np.zeros(0, np.int64), 0, 0, "none")


class Executable:
    """A flat program as one Python function with no frame and no lookup per block.

    The function is generated once: each launch is one line on local variables, and a value's
    variable is dropped after its last use, so memory goes back at once.

    Args:
        flat: the launches.
        kernels: a kernel for each leaf in it.
    """

    def __init__(self, flat: FlatProgram, kernels: Mapping[Leaf, Kernel]) -> None:
        self._flat = flat
        self._kernels = kernels
        self._function = self._written("none")

    def run(self, inputs: list[Any]) -> list[Any]:
        """Runs on flat inputs; empties the list, so that inputs are freed when used up."""
        return self._shown(inputs) if profiler_runs() else self._function(inputs)

    @functools.cached_property
    def _shown(self) -> Runner:
        """The function with a range around each launch, which is a call of a block here."""
        return self._written("shown")

    @property
    def num_launches(self) -> int:
        """Kernel launches in one run."""
        return len(self._flat.launches)

    def _written(self, ranges: Ranges) -> Runner:
        flat = self._flat
        scope: dict[str, Any] = {"begin": begin_range, "end": end_range}
        leaves = dict.fromkeys(launch.leaf for launch in flat.launches)
        names = {leaf: f"k{number}" for number, leaf in enumerate(leaves)}
        scope.update((name, self._kernels[leaf].function) for leaf, name in names.items())
        lines = ["def program(inputs):"]
        if flat.inputs:
            lines.append(f"  {_slots(flat.inputs)}, = inputs")
        lines.append("  inputs.clear()")
        for launch in flat.launches:
            line = _line(launch, names[launch.leaf], self._kernels[launch.leaf])
            shown = [f"  block = begin({launch.block!r})", line, "  end(block)"]
            lines += [line] if ranges == "none" else shown
        lines.append(f"  return [{_slots(flat.outputs)}]")
        exec(compile("\n".join(lines), "<lazyinline program>", "exec"), scope)
        program: Runner = scope.pop("program")
        return program


def _line(launch: Launch, name: str, kernel: Kernel) -> str:
    operands = ", ".join([*map(str, kernel.sizes), *(f"s{s}" for s in launch.operands)])
    call = f"{name}([{operands}])" if kernel.convention == "boxed" else f"{name}({operands})"
    targets = f"{_slots(launch.results)}, = " if launch.results else ""
    return f"  {targets}{call}" + (f"; del {_slots(launch.frees)}" if launch.frees else "")


def _slots(slots: Slots) -> str:
    return ", ".join(f"s{s}" for s in slots)


class UnplannedStep:
    """A training step over memory that PyTorch allocates.

    It is run as a :class:`PlannedProgram` is, and what it returns lies at one place from run to
    run.

    Args:
        flat: the program.
        kernels: a kernel for each leaf in it.

    Attributes:
        why_no_graph: why runs on a GPU are no CUDA graph.
    """

    native = None
    is_native = False
    plan = _NO_PLAN

    def __init__(self, flat: FlatProgram, kernels: Mapping[Leaf, Kernel]) -> None:
        self._flat = flat
        self._run = Executable(flat, kernels).run
        is_on_gpu = any(type_.device.type == "cuda" for type_ in flat.slot_types)
        self.why_no_graph = "memory is not planned" if is_on_gpu else ""

    @property
    def num_launches(self) -> int:
        """Calls of closures in one run."""
        return len(self._flat.launches)

    @property
    def num_made_per_run(self) -> int:
        """Tensors that one run makes."""
        return sum(len(launch.results) for launch in self._flat.launches)

    @property
    def outside_bytes(self) -> int:
        """Most bytes at one time in what closures give each other; scratch inside is left out."""
        return live_bytes(self._flat)

    def foreign_launches(self) -> list[str]:
        """Returns the names of the closures: each allocates its own results."""
        return [launch.leaf.name for launch in self._flat.launches]

    def lease(self, tensors: list[torch.Tensor]) -> Lease:
        """Returns what runs the program on these tensors, as long as they stay where they are."""
        bound = [tensor.detach() for tensor in tensors]
        addresses = [tensor.data_ptr() for tensor in tensors]
        kept: list[torch.Tensor] = []

        def run(_: list[Any]) -> list[torch.Tensor]:
            check_addresses(bound)
            made = self._run(list(bound))
            if not kept:
                # Copies: users write to some, and one may be an input, or a kernel's constant.
                kept.extend(result.clone() for result in made)
            else:
                for result, new in zip(kept, made, strict=True):
                    result.copy_(new)
            return kept

        return Lease(torch.empty(0, device="cpu"), (run,), bound, addresses, None)

    def rest(self) -> None:
        """Does nothing: nothing is held between leases."""


def live_bytes(flat: FlatProgram) -> int:
    """Returns the most bytes at one time in slots that launches write."""
    birth: dict[int, int] = {}
    death: dict[int, int] = dict.fromkeys(flat.outputs, len(flat.launches))
    for time, launch in enumerate(flat.launches):
        birth.update(dict.fromkeys(launch.results, time))
        death.update({slot: time + 1 for slot in launch.frees})
    slots = list(birth)
    if not slots:
        return 0
    ends = [death.get(slot, birth[slot] + 1) for slot in slots]
    sizes = [flat.slot_types[slot].num_bytes for slot in slots]
    columns = (np.array(column, np.int64) for column in ([*birth.values()], ends, sizes))
    return lower_bound(Buffers(*columns))


class UnplannedRank:
    """The parts of a rank's units, run as :class:`.rank_program.RankProgram` runs them.

    Args:
        units: the parts of each unit, in the order in which a flight runs them.
        kernels: a kernel for each leaf in them.
        handed: (unit, way, unit): what the one sends that way, the other takes on this rank.
        tensors_of: for each unit, the numbers of its model tensors and sums among all.
    """

    def __init__(
        self,
        units: Mapping[int, Sequence[PartSpec]],
        kernels: Mapping[Leaf, Kernel],
        handed: Sequence[tuple[int, str, int]],
        tensors_of: Mapping[int, Sequence[int]],
    ) -> None:
        self._parts = {(unit, spec.name): spec for unit, specs in units.items() for spec in specs}
        self._executables = {k: Executable(spec.flat, kernels) for k, spec in self._parts.items()}
        self._operands = {
            (unit, name): [self._origin(unit, spec, source) for source in spec.sources]
            for (unit, name), spec in self._parts.items()
        }
        # The last part that takes a value, of each unit: parts come in the order of a flight.
        self._last = {
            (unit, source): name
            for (unit, name), sources in self._operands.items()
            for source in sources
        }
        self._takers = {(source, way): target for source, way, target in handed}
        self._tensors_of = tensors_of
        self._tensors: Sequence[torch.Tensor] = ()
        self.forget()

    def _origin(self, unit: int, spec: PartSpec, source: Source) -> Source:
        """Returns where a value comes from in the first place, if an earlier part took it in."""
        while source.kind == "input":
            spec = self._parts[unit, source.part]
            source = spec.sources[source.index]
        return replace(source, part=source.part or spec.way) if source.kind == "inbox" else source

    def begin(self, tensors: Sequence[torch.Tensor], names: Sequence[str] = ()) -> None:
        """Takes the model's present tensors and the sums.

        Raises:
            RuntimeError: if the memory of one is gone; says its name.
        """
        check_memory(tensors, names)
        self._tensors = [t.detach() for t in tensors]

    def forget(self) -> None:
        """Drops all flights."""
        self._values: dict[tuple[int, int], dict[Source, torch.Tensor]] = defaultdict(dict)
        self._inboxes: dict[tuple[int, str, int], list[torch.Tensor]] = {}
        self._outboxes: dict[tuple[int, str, int], list[torch.Tensor]] = {}

    @without_autocast
    def run(
        self, unit: int, part: str, flight: int, given: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Runs a part for a flight; returns what the caller gets."""
        if (unit, part) not in self._parts:
            return []
        spec, tensors = self._parts[unit, part], self._tensors_of[unit]
        buffers = self._inboxes.pop((unit, spec.way, flight), ())
        for index, (wire, buffer) in enumerate(zip(spec.inboxes, buffers, strict=False)):
            self._keep(unit, flight, Source("inbox", index, spec.way), wire.unpack(buffer))
        # The caller changes these after the part; a backward reads them as this part did.
        for index in spec.written:
            state, source = self._tensors[tensors[index]], Source("model", index)
            if self._last.get((unit, source), part) != part:
                self._keep(unit, flight, source, state.clone())
        inputs = self._inputs(unit, part, flight, given)
        check_addresses(inputs)
        outputs = self._executables[unit, part].run(inputs)
        for index, output in enumerate(outputs):
            self._keep(unit, flight, Source("output", index, part), output)
        self._send(unit, spec, flight, outputs)
        for index, number in spec.sums.items():
            self._tensors[tensors[number]].add_(outputs[index])
        return [outputs[index] for index in spec.returned]

    def _inputs(
        self, unit: int, part: str, flight: int, given: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Returns what a part takes; drops what no later part takes."""
        values, own, inputs = self._values[unit, flight], self._tensors_of[unit], []
        operands = self._operands[unit, part]
        for source in operands:
            if source in values:
                inputs.append(values[source])
            else:
                present = source.kind == "model"
                inputs.append(self._tensors[own[source.index]] if present else given[source.index])
        for source in operands:
            if self._last[unit, source] == part:
                values.pop(source, None)
        return inputs

    def _keep(self, unit: int, flight: int, source: Source, value: torch.Tensor) -> None:
        """Keeps a value if a part of the unit takes it."""
        if (unit, source) in self._last:
            self._values[unit, flight][source] = value

    def _send(
        self, unit: int, spec: PartSpec, flight: int, outputs: Sequence[torch.Tensor]
    ) -> None:
        taker = self._takers.get((unit, spec.way))
        if taker is None:
            sent = [wire.pack(outputs[index]) for index, wire in spec.outboxes]
            self._outboxes[unit, spec.way, flight] = sent
            return
        for place, (index, _) in enumerate(spec.outboxes):
            self._keep(taker, flight, Source("inbox", place, spec.way), outputs[index])

    def inbox(self, unit: int, way: str, flight: int) -> list[torch.Tensor]:
        """Returns memory to receive values from another rank into."""
        specs = (spec for (one, _), spec in self._parts.items() if (one, spec.way) == (unit, way))
        buffers = [wire.buffer() for spec in specs for wire in spec.inboxes]
        self._inboxes[unit, way, flight] = buffers
        return buffers

    def outbox(self, unit: int, way: str, flight: int) -> list[torch.Tensor]:
        """Returns values for another rank, as contiguous runs of elements."""
        return self._outboxes.pop((unit, way, flight), [])


StepRunner = PlannedProgram | UnplannedStep
"""Runs a training step."""
