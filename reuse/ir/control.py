"""Control flow: leaves whose one operator chooses between closures, or repeats one.

A body is a closure like any other: differentiated, lowered and planned once, however often it runs.
Only the interpreter, and PyTorch where it runs a program, call the operator itself; a planned
program runs the bodies' launches in the native loop.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.fx

from ..torch_names import module_of
from .leaf import DEFAULT_STAMP, Stamp, flat_types, interpret
from .program import Call, Composite, Control, Leaf, Program, Run, Value
from .types import TensorType, Type


@dataclass(frozen=True, eq=False)
class _Operator(Control):
    """A control-flow operator; equal to one of its class with equal settings and bodies."""

    @property
    def __name__(self) -> str:
        return self.word

    def __call__(self, *operands: torch.Tensor) -> tuple[Any, ...]:
        """Runs the operator, its bodies by the interpreter."""
        programs = [body.program for body in self.bodies]
        return tuple(self.run([partial(interpret, program) for program in programs], operands))

    def _key(self) -> Any:
        keys = tuple(program_key(body.program, lambda c: id(c.closure)) for body in self.bodies)
        return type(self), tuple(self.numbers.items()), keys

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Operator) and other._key() == self._key()

    def __hash__(self) -> int:
        return hash((type(self), *self.numbers.values()))


@dataclass(frozen=True, eq=False)
class Choose(_Operator):
    """Runs the first of two bodies if the first operand is true, else the second.

    The bodies take the other operands and return results of the same types.
    """

    word = "choose"

    def run(self, bodies: Sequence[Run], operands: Sequence[Any]) -> Sequence[Any]:
        """Runs one of the bodies."""
        flag, *others = operands
        return bodies[0 if flag else 1](others)


@dataclass(frozen=True, eq=False)
class Repeat(_Operator):
    """Runs a body a number of times, as ``scan`` and ``map`` do.

    Operands are the initial carried values, then scanned tensors with a row for each step, then
    operands that are the same in each step. The body takes the carried values, the rows of its step
    and the operands that stay the same; it returns the next carried values, then rows of results.
    Results are the last carried values, then the rows, stacked.
    """

    word = "repeat"

    num_steps: int = 1  # at least one
    num_carried: int = 0  # leading operands that are carried
    num_scanned: int = 0  # operands after them with a row for each step
    is_reversed: int = 0  # 1 if the steps go from the last row to the first, else 0

    def split(self, operands: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """Splits a list like the operands: carried, scanned, and the same in each step."""
        first, second = self.num_carried, self.num_carried + self.num_scanned
        return list(operands[:first]), list(operands[first:second]), list(operands[second:])

    def run(self, bodies: Sequence[Run], operands: Sequence[Any]) -> Sequence[Any]:
        """Runs the body for each step."""
        carried, scanned, same = self.split(operands)
        rows: list[Any] = [None] * self.num_steps
        steps = range(self.num_steps)
        for step in reversed(steps) if self.is_reversed else steps:
            results = bodies[0]([*carried, *(slab[step] for slab in scanned), *same])
            carried, rows[step] = list(results[: len(carried)]), results[len(carried) :]
        return [*carried, *map(torch.stack, zip(*rows, strict=True))]


@dataclass(frozen=True, eq=False)
class RepeatWhile(_Operator):
    """Runs the second body as long as the first returns true, as ``while_loop`` does.

    Both bodies take all operands; the second returns the next carried values.
    """

    word = "repeat_while"
    num_carried: int = 0  # leading operands that are carried

    def run(self, bodies: Sequence[Run], operands: Sequence[Any]) -> Sequence[Any]:
        """Runs the bodies in turn."""
        # Copies: no result may alias an operand, even if the body never runs.
        carried: Sequence[Any] = [x.clone() for x in operands[: self.num_carried]]
        same, (test, body) = operands[self.num_carried :], bodies
        while test([*carried, *same])[0]:
            carried = body([*carried, *same])
        return carried


OPERATORS = {kind.word: kind for kind in (Choose, Repeat, RepeatWhile)}
"""The operators by their printed names."""


def stacked_type(row: TensorType, num_steps: int) -> TensorType:
    """Returns the type of the stacked rows of all steps; a row has no gaps."""
    return replace(row, shape=(num_steps, *row.shape), stride=(math.prod(row.shape), *row.stride))


def control_leaf(
    name: str,
    control: Control,
    inputs: Sequence[TensorType],
    outputs: Sequence[TensorType],
    input_names: Sequence[str] = (),
    stamp: Stamp = DEFAULT_STAMP,
) -> Leaf:
    """Builds the leaf of one control-flow operator."""
    graph = torch.fx.Graph()
    entries = [graph.placeholder(f"a{i}") for i in range(len(inputs))]
    node = graph.call_function(control, tuple(entries))  # type: ignore[arg-type]
    picked = [graph.call_function(operator.getitem, (node, i)) for i in range(len(outputs))]
    graph.output(tuple(picked))
    for one, type_ in zip((*entries, *picked), (*inputs, *outputs), strict=True):
        one.meta["val"] = type_.empty("meta")
    node.meta.update(val=tuple(one.meta["val"] for one in picked), stamp=stamp)
    names = tuple(input_names)
    return Leaf(name, module_of(graph), tuple(inputs), tuple(outputs), names, kernels="eager")


def checked(
    control: Control, inputs: Sequence[Type], outputs: Sequence[Type]
) -> tuple[list[TensorType], list[TensorType]]:
    """Returns flat types that fit an operator's bodies; ValueError with what does not fit."""
    if not all(isinstance(t, TensorType) for t in (*inputs, *outputs)):
        raise ValueError("an operand or a result is a struct")
    given, made = list(inputs), [list(outputs)] * len(control.bodies)
    if isinstance(control, Choose):
        given = given[1:]
    elif isinstance(control, Repeat):
        carried, scanned, same = control.split(given)
        given = [*carried, *map(row_of, scanned), *same]
        rows = [row_of(type_) for type_ in outputs[control.num_carried :]]
        made = [[*outputs[: control.num_carried], *rows]]
    elif isinstance(control, RepeatWhile):
        flag = TensorType(torch.bool, (), (), inputs[0].device)  # type: ignore[union-attr]
        made = [[flag], list(outputs)]
    if len(made) != len(control.bodies):
        raise ValueError(f"it has {len(control.bodies)} bodies, not {len(made)}")
    for body, results in zip(control.bodies, made, strict=True):
        if not isinstance(body, Composite):
            raise ValueError("a body is a composite closure")
        if list(body.input_types) != given or list(body.output_types) != results:
            raise ValueError(f"@{body.name} takes or gives other types")
    return flat_types(inputs), flat_types(outputs)


def row_of(type_: Any) -> TensorType:
    """Returns the type of one row of a tensor of stacked rows."""
    return replace(type_, shape=type_.shape[1:], stride=type_.stride[1:])


def with_bodies(leaf: Leaf, bodies: Sequence[Composite]) -> Leaf:
    """Returns a leaf of control flow with other bodies."""
    control = leaf.control
    assert isinstance(control, _Operator)
    if tuple(bodies) == control.bodies:
        return leaf
    # A copy: other programs may hold the leaf and its graph.
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(leaf.module.graph, {}))
    changed = next(node for node in graph.nodes if isinstance(node.target, Control))
    changed.target = replace(control, bodies=tuple(bodies))
    return replace(leaf, module=module_of(graph))


def program_key(program: Program, of_call: Callable[[Call], Any]) -> Any:
    """Returns a value equal for programs of the same calls; ``of_call`` gives the key of one."""
    number: dict[Value, int] = {}

    def numbered(values: Sequence[Value]) -> tuple[int, ...]:
        return tuple(number.setdefault(value, len(number)) for value in values)

    def rows() -> Iterator[Any]:
        yield tuple(v.type for v in program.inputs), numbered(program.inputs)
        for call in program.calls:
            yield of_call(call), numbered(call.args), numbered(call.results)
        yield numbered(program.outputs)

    return tuple(rows())
