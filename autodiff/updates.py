"""Parameters updated within a step: a call behind each gradient that is complete.

The calls stand at the end of the step's program, and link moves each to the place where its
gradient is complete. Parameters of one type and rule share the closure of their update. Small ones
of a group are updated together at the end: their gradients take little memory, and a launch costs
more than its work.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ..reuse.errors import PlanError
from ..reuse.ir.program import Call, Leaf, ModelTensor, Program, Value, tensor_type
from ..reuse.ir.torch_updates import STATE, update_leaf
from ..reuse.ir.types import TensorType
from .training_program import StepProgram, UpdateGroup, Updates

_SMALL_BYTES = 64 * 1024


class NotUpdatedError(PlanError):
    """Why a parameter cannot be updated in the program."""


def with_updates(step: StepProgram, groups: Sequence[UpdateGroup]) -> StepProgram:
    """Returns the step with an update of each parameter of the groups that gets a gradient.

    Gradients of other parameters stay results.

    Raises:
        NotUpdatedError: if a gradient is laid out in another way than its parameter.
    """
    return _Updater(step, groups).updated()


def step_of_sums(trained: Sequence[tuple[ModelTensor, TensorType]]) -> StepProgram:
    """Returns a step whose gradients are there already: its batch is their sums.

    Args:
        trained: parameters, and the types of their gradients.
    """
    sums = tuple(Value(type_, "sum") for _, type_ in trained)
    parameters = (Value(TensorType.of(source.tensor), source.name) for source, _ in trained)
    numbers = tuple(range(len(sums)))
    model = tuple(source for source, _ in trained)
    return StepProgram(Program((*sums, *parameters), (), sums), (numbers,), model, numbers, ())


class _Updater:
    def __init__(self, step: StepProgram, groups: Sequence[UpdateGroup]) -> None:
        self._step = step
        self._groups = tuple(groups)
        program = step.program
        first = sum(map(len, step.batch))
        self._end = first + len(step.model)
        self._parameters = program.inputs[first : self._end]
        end = len(program.outputs) - len(step.writes)
        num_losses = end - len(step.gradients)
        self._losses = program.outputs[:num_losses]
        self._gradients = program.outputs[num_losses:end]
        self._writes = program.outputs[end:]
        self._leaves: dict[Any, Leaf] = {}
        self._state: dict[tuple[int, str], Value] = {}
        self._calls: list[Call] = []

    def updated(self) -> StepProgram:
        """Returns the step."""
        group_of = {member: i for i, one in enumerate(self._groups) for member in one.members}
        pairs = list(zip(self._step.gradients, self._gradients, strict=True))
        mine = [(i, g) for i, g in pairs if id(self._step.model[i].tensor) in group_of]
        if not mine:
            return self._step
        device = tensor_type(self._parameters[mine[0][0]]).device
        types = [replace(one.settings, device=device) for one in self._groups]
        settings = [Value(type_, "settings") for type_ in types]
        together: dict[tuple[int, torch.dtype], list[tuple[int, Value]]] = defaultdict(list)
        for index, gradient in mine:
            group = group_of[id(self._step.model[index].tensor)]
            if tensor_type(gradient).num_bytes >= _SMALL_BYTES:
                self._update(self._groups[group], settings[group], [(index, gradient)])
            else:
                together[group, tensor_type(gradient).dtype].append((index, gradient))
        for (group, _), members in together.items():
            self._update(self._groups[group], settings[group], members)
        return self._finish(mine, [pair for pair in pairs if pair not in mine], settings)

    def _update(
        self, group: UpdateGroup, settings: Value, members: Sequence[tuple[int, Value]]
    ) -> None:
        rows = [[self._parameters[i] for i, _ in members], [self._laid_out(*m) for m in members]]
        names = STATE[group.operator] if group.has_state else ()
        rows += [[self._state_of(i, name) for i, _ in members] for name in names]
        rows += [[] for _ in STATE[group.operator][len(names) :]]
        leaf = self._leaf(group, rows, tensor_type(settings))
        results = tuple(Value(t) for t in leaf.output_types)
        args = (*(value for row in rows for value in row), settings)
        self._calls.append(Call(leaf, args, results))

    def _laid_out(self, index: int, gradient: Value) -> Value:
        found, own = tensor_type(gradient), tensor_type(self._parameters[index])
        if found != own or not own.is_dense:
            name = self._step.model[index].name
            raise NotUpdatedError(
                f"the gradient of {name} is laid out in another way than the parameter"
            )
        return gradient

    def _state_of(self, index: int, name: str) -> Value:
        own = tensor_type(self._parameters[index])
        type_ = TensorType(torch.float32, (), (), own.device) if name == "step" else own
        return self._state.setdefault((index, name), Value(type_, name))

    def _leaf(
        self, group: UpdateGroup, rows: Sequence[Sequence[Value]], settings: TensorType
    ) -> Leaf:
        types = tuple(tuple(tensor_type(value) for value in row) for row in rows)
        key = (group.operator, group.flags, types)
        if key not in self._leaves:
            self._leaves[key] = update_leaf(group.operator, types, settings, group.flags)
        return self._leaves[key]

    def _finish(
        self,
        mine: Sequence[tuple[int, Value]],
        others: Sequence[tuple[int, Value]],
        settings: Sequence[Value],
    ) -> StepProgram:
        step, program = self._step, self._step.program
        changed = [value for call in self._calls for value in call.results]
        given, seed = program.inputs[: self._end], program.inputs[self._end :]
        names = [f"{name} of {step.model[i].name}" for i, name in self._state]
        names += ["settings of the optimizer"] * len(settings)
        stand_in = torch.empty(0, device="meta")
        return replace(
            step,
            program=Program(
                (*given, *self._state.values(), *settings, *seed),
                (*program.calls, *self._calls),
                (*self._losses, *(g for _, g in others), *self._writes, *changed),
            ),
            model=(*step.model, *(ModelTensor(name, stand_in) for name in names)),
            gradients=tuple(i for i, _ in others),
            updates=Updates(tuple(self._state), tuple(i for i, _ in mine), len(changed)),
        )
