"""One compiled program of a module: when it applies, its inputs, and the result it builds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...reuse.ir.program import UserInput
from ..autograd.bridge import Bridge, picker
from ..capture.assemble import OutputTree
from ..compiled import CompiledProgram
from ..effects.effects import refuse_traced
from ..guards.guard import SMALL_ARENA
from ..sizes.shapes import CompileResult
from ..tracing.torch_tracing import is_traced


class ModuleEntry:
    """One compiled program: when it applies, how its inputs are found, how its result is built."""

    def __init__(self, made: CompileResult, leaves: Sequence[Any]) -> None:
        compiled = made.compiled
        assert isinstance(compiled, CompiledProgram)
        program = compiled.captured.program
        self._compiled = compiled
        self.guard, self.can_be_linked_again = made.guard, made.is_linked
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        order, own = [], len(leaves)  # after these come the model's tensors
        self._switched: list[int] = []  # inputs whose requires_grad the forward switches on
        for source in program.sources:
            if isinstance(source, UserInput):
                order.append(places[source.index])
                self._switched += order[-1:] if source.is_switched else []
            else:
                order.append(own)
                own += 1
        self._pick_inputs = picker(order)
        self._writes = program.writes
        written = frozenset(target for _, target in program.writes)
        self._bridge = Bridge(compiled, written) if compiled.derivative is not None else None
        self._result = _Result(program.output_tree, compiled)
        self._repeated: list[int] | None = None  # the same in every run, so the first run tells

    @property
    def is_tied_to_inputs(self) -> bool:
        """Whether the program changes or returns what the caller passed, and not only reads it."""
        program = self._compiled.captured.program
        touched = {target for _, target in program.writes} | self._result.inputs
        return bool(self._switched) or any(
            isinstance(program.sources[i], UserInput) for i in touched
        )

    @property
    def is_small(self) -> bool:
        """See :class:`..guards.guard.Entry`. One with a backward may have many runs in flight."""
        arena_bytes = self._compiled.runtime.program.arena_bytes
        return self._bridge is None and arena_bytes <= SMALL_ARENA

    def rest(self) -> None:
        """See :class:`..guards.guard.Entry`."""
        self._compiled.runtime.rest()
        if self._bridge is not None:
            self._bridge.backwards.rest()

    def run(self, leaves: Sequence[Any], containers: Sequence[Any] = ()) -> Any:
        """Runs the program on flat inputs, and brings the containers they came from up to date."""
        # As the forward does to the caller's own tensor, before anything is computed from it.
        for place in self._switched:
            leaves[place].requires_grad_(True)
        inputs = self._pick_inputs([*leaves, *self.guard.tensors])
        if self._bridge is None:
            with torch.no_grad():  # the model's own autograd says that no gradient flows
                outputs: Sequence[Any] = self._forward(inputs)
        else:
            outputs = self._bridge.run(inputs)
        if any(map(is_traced, outputs)):
            refuse_traced(outputs)
        if self._writes:
            with torch.no_grad():
                for output, target in self._writes:
                    inputs[target].copy_(outputs[output])
        return self._result.build(outputs, inputs, containers if self._result.updates else ())

    def _forward(self, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Runs the program; ``h`` and ``h.detach()``, one tensor in it, are two for the user."""
        outputs = self._compiled.runtime.forward(inputs)[0]
        if self._repeated is None:
            known = [*map(id, inputs), *map(id, outputs)]
            first = len(inputs)
            self._repeated = [i for i, o in enumerate(outputs) if known.index(id(o)) != first + i]
        for index in self._repeated:
            outputs[index] = outputs[index].detach()
        return outputs


class _Result:
    """Rebuilds the model's nested result from flat outputs."""

    def __init__(self, tree: OutputTree, compiled: CompiledProgram) -> None:
        program = compiled.captured.program
        self._tree = tree
        self.updates = tree.updates
        positions = {value: i for i, value in enumerate(program.inputs)}
        changed = {program.outputs[output]: target for output, target in program.writes}
        self._leaves: list[tuple[str, Any]] = []
        for kind, value in tree.leaves:
            passed = positions.get(program.outputs[value]) if kind == "output" else None
            if kind == "output":  # what the forward changed and returns is the user's own tensor
                passed = changed.get(program.outputs[value], passed)
            self._leaves.append((kind, value) if passed is None else ("input", passed))

    @property
    def inputs(self) -> set[int]:
        """Positions of inputs that are returned as they are."""
        return {value for kind, value in self._leaves if kind == "input"}

    def build(
        self, outputs: Sequence[Any], inputs: Sequence[Any], given: Sequence[Any] = ()
    ) -> Any:
        leaves = [
            outputs[value] if kind == "output" else inputs[value] if kind == "input" else value
            for kind, value in self._leaves
        ]
        return self._tree.built(leaves, given)
