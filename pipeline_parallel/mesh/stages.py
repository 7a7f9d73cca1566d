"""Stages of a pipeline over the other dimensions of a mesh: each becomes this rank's part of it.

What travels lies as the stage that makes it leaves it, and its gradient comes back lying so. Every
rank makes all stages, since what a stage receives is known once the one before is made; closures
that stages share are sharded once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch.distributed.tensor import Partial

from ...reuse.errors import PlanError
from ...reuse.ir.program import Composite, ModelTensor, Program
from ...reuse.ir.types import TensorType
from ..actions import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD
from ..cut import Stage
from ..stage_derivative import Halves, StageDerivative
from .plan import Placements
from .sharded import Flow, Layout, Sharder
from .torch_sharding import replicated

Parts = Mapping[str, Program]
"""The programs of a stage by what they do, decomposed."""


@dataclass(frozen=True)
class StageSharder:
    """Makes the local stages of a pipeline.

    Args:
        sharder: makes the local closures of all of them.
        layouts: of the model's tensors, by the names of their sources.
        batch: how each tensor of a micro-batch lies.
        replicas: dimensions along which gradients are summed once per step, after it.
    """

    sharder: Sharder
    layouts: Mapping[str, Layout]
    batch: Sequence[Placements]
    replicas: frozenset[int]

    def sharded(
        self, derived: Sequence[StageDerivative], parts: Sequence[Parts]
    ) -> list[StageDerivative]:
        """Returns all stages with local programs, in order."""
        found, arriving = [], list[Flow]()
        for one, programs in zip(derived, parts, strict=True):
            made, arriving = self._stage(one, programs, arriving)
            found.append(made)
        return found

    def _stage(
        self, one: StageDerivative, programs: Parts, received: Sequence[Flow]
    ) -> tuple[StageDerivative, list[Flow]]:
        """Returns a local stage, and what it sends."""
        stage, written = one.stage, one.stage.sourced_program.writes
        inputs = [*received, *self._own(stage)]
        wanted: list[Flow | None] = [None] * len(programs[FORWARD].outputs)
        for result in range(stage.num_sent, len(stage.program.outputs) - len(written)):
            whole = Layout(replicated(self.sharder.mesh))
            wanted[result] = self.sharder.flow(stage.program.outputs[result].type, whole)
        for output, position in written:
            wanted[output] = inputs[position]
        forward, outputs = self._part(programs[FORWARD], inputs, wanted)
        sent = outputs[: stage.num_sent]
        body = replace(forward, outputs=forward.outputs[: len(stage.program.outputs)])
        made = replace(one, stage=replace(stage, program=body))
        if one.derivative is None:
            return made, sent
        derivative = replace(one.derivative, forward=_named(forward, one.derivative.forward))
        operands = [outputs[-1], *(inputs[i] for i in derivative.kept_inputs)]
        operands += [outputs[i] for i in derivative.kept_outputs]
        operands += [_cotangent(outputs[i]) for i in derivative.cotangent_outputs]
        gradients = [
            self._gradient(inputs[i], travels=i < stage.num_received)
            for i in derivative.gradient_inputs
        ]
        if one.halves is not None:
            halves = self._halves(one.halves, programs, operands, gradients)
            return replace(made, derivative=derivative, halves=halves), sent
        backward, _ = self._part(programs[BACKWARD], operands, gradients)
        derivative = replace(derivative, backward=_named(backward, derivative.backward))
        return replace(made, derivative=derivative), sent

    def _own(self, stage: Stage) -> list[Flow]:
        """Returns this rank's parts of what a stage does not receive."""
        values = stage.program.inputs[stage.num_received :]
        return [
            self.sharder.flow(
                value.type,
                self.layouts[s.name] if isinstance(s, ModelTensor) else Layout(self.batch[s.index]),
            )
            for s, value in zip(stage.sources, values, strict=True)
        ]

    def _gradient(self, flow: Flow, *, travels: bool) -> Flow:
        """Returns the gradient of what lies so: lying alike, or as parts of a sum over replicas."""
        gradient = _cotangent(flow)
        if travels:
            return gradient
        held = enumerate(gradient.layouts[0].held)
        lies = tuple(Partial() if i in self.replicas else p for i, p in held)
        return replace(gradient, layouts=(Layout(lies),))

    def _halves(
        self,
        halves: Halves,
        programs: Parts,
        operands: Sequence[Flow],
        gradients: Sequence[Flow],
    ) -> Halves:
        early, late, carried = halves.early, halves.late, list[Flow]()
        if early is not None:
            own = [operands[i] for i in halves.early_inputs]
            wanted = [*(gradients[i] for i in halves.early_outputs), None]
            program, outputs = self._part(programs[BACKWARD_INPUT], own, wanted)
            carried, early = outputs[-1:], _named(program, early)
        if late is not None:
            own = [*carried, *(operands[i] for i in halves.late_inputs)]
            wanted = [gradients[i] for i in halves.late_outputs]
            program, _ = self._part(programs[BACKWARD_WEIGHT], own, wanted)
            late = _named(program, late)
        return replace(halves, early=early, late=late)

    def _part(
        self, program: Program, inputs: Sequence[Flow], wanted: Sequence[Flow | None]
    ) -> tuple[Program, list[Flow]]:
        targets = [None if flow is None else flow.layouts[0].held for flow in wanted]
        local, made = self.sharder.part(program, inputs, targets)
        for flow, target in zip(made, wanted, strict=True):
            if target is not None and flow.type != target.type:
                raise PlanError(
                    f"A stage makes a gradient of {flow.type} in another order of dimensions than "
                    f"what it belongs to ({target.type}), which is not sent or summed so."
                )
        return local, made


def _named(program: Program, closure: object) -> Composite:
    assert isinstance(closure, Composite)
    return Composite(closure.name, program, closure.input_names)


def _cotangent(flow: Flow) -> Flow:
    assert isinstance(flow.type, TensorType)
    return Flow(flow.type.cotangent(), (Layout(flow.layouts[0].held),))
