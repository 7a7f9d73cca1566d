"""Programs, and the stages of a pipeline rank, without a plan of memory: closures allocate."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from ...reuse.ir.leaf import called_without_autocast
from ...reuse.ir.program import Leaf
from ..launches.kernel_list import KernelList
from ..launches.torch_native import check_addresses, check_memory
from ..link.link import FlatProgram
from ..link.torch_generated import Runner
from ..link.unit_layout import PartSpec, Source
from .planned import PlannedProgram


def closures_run(flat: FlatProgram, kernel_lists: Mapping[Leaf, KernelList]) -> Runner:
    """Returns what runs a flat program of closures that allocate what they return."""
    program = PlannedProgram([flat], kernel_lists, [], [len(flat.outputs)], results="allocated")
    return program.lease([]).runners[0]


class UnplannedRank:
    """The parts of a rank's units, run as :class:`.rank_program.RankProgram` runs them.

    Args:
        units: the parts of each unit, in the order in which a flight runs them.
        kernel_lists: each leaf as one launch.
        handed: (unit, way, unit): what the one sends that way, the other takes on this rank.
        tensors_of: for each unit, the numbers of its model tensors and sums among all.
    """

    def __init__(
        self,
        units: Mapping[int, Sequence[PartSpec]],
        kernel_lists: Mapping[Leaf, KernelList],
        handed: Sequence[tuple[int, str, int]],
        tensors_of: Mapping[int, Sequence[int]],
    ) -> None:
        self._parts = {(unit, spec.name): spec for unit, specs in units.items() for spec in specs}
        self._runners = {k: closures_run(s.flat, kernel_lists) for k, s in self._parts.items()}
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

    @called_without_autocast
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
        outputs = self._runners[unit, part](inputs)
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
