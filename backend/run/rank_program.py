"""What a rank runs, over one planned arena.

A run binds the code of its part to the places of its regions, once per different set of places.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import CodeType
from typing import Any

import torch

from ...reuse.ir.leaf import without_autocast
from ..launches.present_memory import check_memory
from ..launches.torch_native import NativeLibrary
from ..link.generated_code import bind_arena, bind_device, bind_model, bind_native
from ..link.part_layout import Box, view_of_box
from .rank_plan import RankPlan

Runner = Callable[[list[Any]], list[Any]]


class RankProgram:
    """What a rank runs.

    Args:
        plan: where everything lies.
        tensors_of: for each unit, the numbers of its model tensors and sums among all.
        native: the native loop.
    """

    def __init__(
        self,
        plan: RankPlan,
        tensors_of: Mapping[int, Sequence[int]],
        native: Callable[[], NativeLibrary],
    ) -> None:
        self.plan = plan
        self._tensors_of = tensors_of
        self._native = native
        self._compiled: dict[tuple[int, int], CodeType] = {}
        self._bound: dict[tuple[int, ...], Runner] = {}  # by unit, part and places of regions
        self._runners: dict[tuple[int, int, int], Runner] = {}  # by unit, part and flight
        self._tensors: Sequence[torch.Tensor] = ()
        self._addresses: list[int] = []
        self._arena: torch.Tensor | None = None
        self._foreign: dict[tuple[int, int], dict[int, torch.Tensor]] = {}

    @property
    def num_launches(self) -> int:
        """Kernel launches of all runs together."""
        return self.plan.num_launches

    @property
    def arena_bytes(self) -> int:
        """Bytes of the arena, if there is one already."""
        return 0 if self._arena is None else self._arena.numel()

    def begin(self, tensors: Sequence[torch.Tensor], names: Sequence[str] = ()) -> None:
        """Binds the model's present tensors and the sums, where that is not done yet.

        Raises:
            RuntimeError: if the memory of one is gone; says its name.
        """
        addresses = [t.data_ptr() for t in tensors]
        if addresses != self._addresses:
            check_memory(tensors, names)
            # Detached: `parameter.data = ...` changes the memory of the tensor, not what is bound.
            self._tensors, self._addresses = [t.detach() for t in tensors], addresses
            self._bound.clear()
            self._runners.clear()
        if self._arena is None:
            self._arena = torch.empty(
                max(self.plan.arena.peak_bytes, 64), dtype=torch.uint8, device="cpu"
            )
        self._foreign.clear()

    @without_autocast
    def run(
        self, unit: int, part: str, flight: int, given: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Runs a part for a flight; returns what the caller gets, which later runs overwrite."""
        number = self.plan.part_number(unit, part)
        if number is None:
            return []
        layout = self.plan.units[unit]
        foreign = self._foreign.setdefault((unit, flight), {})
        between = layout.hand_overs[number]
        inputs = [given[i] for i in between.given]
        inputs += [foreign[i] for i in between.taken]
        found = self._runner(unit, number, flight)(inputs)
        num_returned = len(layout.specs[number].returned)
        foreign.update(zip(between.left, found[num_returned:], strict=True))
        for instance in between.done:
            del foreign[instance]
        return found[:num_returned]

    def inbox(self, unit: int, way: str, flight: int) -> list[torch.Tensor]:
        """Returns where values from another rank go, as contiguous runs of elements."""
        return self._views(unit, self.plan.units[unit].inboxes.get(way, ()), flight)

    def outbox(self, unit: int, way: str, flight: int) -> list[torch.Tensor]:
        """Returns values for another rank, as contiguous runs of elements."""
        return self._views(unit, self.plan.units[unit].outboxes.get(way, ()), flight)

    def _views(self, unit: int, boxes: Sequence[Box], flight: int) -> list[torch.Tensor]:
        assert self._arena is not None
        starts = [self.plan.start_of((unit, box.region, flight)) for box in boxes]
        return [view_of_box(b, self._arena, s) for b, s in zip(boxes, starts, strict=True)]

    def _runner(self, unit: int, number: int, flight: int) -> Runner:
        known = self._runners.get((unit, number, flight))
        if known is not None:
            return known
        layout = self.plan.units[unit]
        starts = {r: self.plan.start_of((unit, r, flight)) for r in layout.used_regions[number]}
        places = (unit, number, *starts.values())
        if places not in self._bound:
            self._bound[places] = self._bind(unit, number, starts)
        return self._runners.setdefault((unit, number, flight), self._bound[places])

    def _bind(self, unit: int, number: int, starts: Mapping[int, int]) -> Runner:
        layout = self.plan.units[unit]
        code, arena = layout.codes[number], self._arena
        assert arena is not None
        own = self._tensors_of[unit]
        tensors = {instance: self._tensors[own[i]] for instance, i in layout.fixed.items()}
        scope: dict[str, Any] = {**code.constants, **bind_device(arena.device)}
        scope.update(bind_arena(code.arena_views, arena, layout.offsets_from(number, starts)))
        scope.update(bind_model(code.model_views, tensors))
        if code.words:
            scope.update(bind_native(code, arena, tensors, self._native, starts))
        if (unit, number) not in self._compiled:
            self._compiled[unit, number] = compile(code.source, "<lazyinline program>", "exec")
        exec(self._compiled[unit, number], scope)
        runner: Runner = scope.pop("program")
        return runner
