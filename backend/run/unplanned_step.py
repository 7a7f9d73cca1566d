"""A training step whose memory is not planned: a function per closure, on a GPU as one graph.

It is run as a :class:`PlannedProgram` is, and what it returns lies at one place from run to run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ...reuse.ir.program import Leaf
from ..arena.arena import ArenaPlan
from ..arena.live_ranges import Buffers, lower_bound
from ..kernels.lower import Kernel
from ..launches.present_memory import check_addresses
from ..link.link import FlatProgram
from . import cuda_graph
from .executable import Executable
from .planned import Lease, PlannedProgram, Runner

_NO_PLAN = ArenaPlan(np.zeros(0, np.int64), 0, 0, "none")


class UnplannedStep:
    """A flat program over memory that PyTorch allocates.

    Args:
        flat: the program.
        kernels: a kernel for each leaf in it.
        capture: makes a graph of a run; tried for each lease.

    Attributes:
        why_no_graph: why runs are no CUDA graph; empty while they are, or nothing ran.
    """

    native = None
    is_native = False
    plan = _NO_PLAN

    def __init__(
        self,
        flat: FlatProgram,
        kernels: Mapping[Leaf, Kernel],
        capture: cuda_graph.Capture = cuda_graph.capture,
    ) -> None:
        self._flat = flat
        self._run = Executable(flat, kernels).run
        self._capture = capture
        self.why_no_graph = ""

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
        """Most bytes at one time in what closures give each other."""
        return live_bytes(self._flat)

    @property
    def held_bytes(self) -> int:
        """Most bytes that a run holds, but for the scratch inside a closure."""
        return self.outside_bytes

    def foreign_launches(self) -> list[str]:
        """Names of the closures: each allocates its own results."""
        return [launch.leaf.name for launch in self._flat.launches]

    def lease(self, tensors: list[torch.Tensor]) -> Lease:
        """Returns what runs the program on these tensors, as long as they stay where they are."""
        bound = [tensor.detach() for tensor in tensors]
        addresses = [tensor.data_ptr() for tensor in tensors]
        return Lease(torch.empty(0, device="cpu"), (self._runner(bound),), bound, addresses, None)

    def rest(self) -> None:
        """Nothing is held between leases."""

    def _runner(self, bound: Sequence[torch.Tensor]) -> Runner:
        def run() -> list[torch.Tensor]:
            check_addresses(bound)
            return self._run(list(bound))

        if not _is_on_gpu(self._flat):
            return _Plain(run)
        try:
            device = cuda_graph.device_of(self._flat)
            replay, results = self._capture(lambda: _copies(run()), device)
        except RuntimeError as error:
            self.why_no_graph = str(error)
            return _Plain(run)
        self.why_no_graph = ""

        def again(_: list[Any]) -> list[torch.Tensor]:
            replay()
            return results

        return again


class _Plain:
    """Runs closures one by one, and keeps the results at one place."""

    def __init__(self, run: cuda_graph.Run) -> None:
        self._run = run
        self._results: list[torch.Tensor] = []

    def __call__(self, _: list[Any]) -> list[torch.Tensor]:
        made = self._run()
        if not self._results:
            self._results = _copies(made)
        else:
            for result, new in zip(self._results, made, strict=True):
                result.copy_(new)
        return self._results


def _copies(results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies results: users write to some, and one may be an input, or a kernel's constant."""
    return [result.clone() for result in results]


def _is_on_gpu(flat: FlatProgram) -> bool:
    return any(type_.device.type == "cuda" for type_ in flat.slot_types)


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


StepRunner = PlannedProgram | UnplannedStep
"""What runs a training step."""
