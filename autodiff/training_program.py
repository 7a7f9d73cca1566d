"""Forward and backward as one program: once, or called for each micro-batch of a step.

The micro-batch is a composite closure, so the step holds three calls per micro-batch whatever the
number of layers: forward, backward, and the sum of the gradients so far. The loss is the mean of
the micro-batches' losses.

The gradients of a program are a program, too, and can be differentiated like any other. Each
different closure is differentiated once, into halves whose operators are differentiable again; they
are decomposed, and split with recompute, only after the last derivative. So gradients of any order
are such programs.

Parameters are updated by calls at the end of the step's program, and link moves each to where its
gradient is complete. Parameters of equal type and update rule share the closure of their update.
Small parameters of a group are updated together at the end: their gradients take little memory, and
a launch costs more than its work.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from types import BuiltinFunctionType
from typing import Any, Literal, TypeAlias

import torch

from ..reuse.errors import PlanError
from ..reuse.ir import program as ir
from ..reuse.ir.rewrite import FlatStructs
from ..reuse.ir.torch_updates import STATE, update_leaf
from ..reuse.ir.types import TensorType
from ..reuse.torch_names import OPERATOR_TYPES
from .derivative import Derivative, Differentiator, Recipe, Request
from .flows import Draws, inlined, needed_calls
from .traces.torch_interpreters import DIFFERENTIABLE

Order: TypeAlias = Literal["forward_first", "one_by_one"]
Sums: TypeAlias = Literal["as_gradients", "float32"]


@dataclass(frozen=True)
class UpdateGroup:
    """How parameters of one group of an optimizer are updated."""

    operator: Any  # an operator of :mod:`torch_updates`
    flags: tuple[Any, ...]  # its flags, the last arguments
    settings: TensorType  # the type of the tensor of its settings (learning rate and others)
    members: frozenset[int]  # ``id`` of the parameters
    has_state: bool = True  # whether a parameter has state (SGD without momentum has none)


@dataclass(frozen=True)
class Updates:
    """The parameters and state that one step updates."""

    # (index into the step's ``model``, name) of each tensor of optimizer state, in the order of the
    # program's inputs; the settings of the groups follow.
    state: tuple[tuple[int, str], ...] = ()
    parameters: tuple[int, ...] = ()  # which of ``model`` are updated
    num_results: int = 0  # how many of the program's last outputs are updated tensors


@dataclass(frozen=True, eq=False)
class StepProgram:
    """A training step as one program, and where its inputs come from."""

    # Inputs are ``batch`` of each micro-batch, then ``model``, then the seed (the cotangent of one
    # micro-batch's loss); outputs are the loss of each micro-batch, the gradients, then the new
    # values of changed buffers.
    program: ir.Program
    # For each micro-batch, for each of its inputs, which user input it is.
    batch: tuple[tuple[int, ...], ...]
    model: tuple[ir.ModelTensor, ...]  # the tensors of the model, in order
    gradients: tuple[int, ...]  # which of ``model`` each gradient belongs to
    writes: tuple[int, ...]  # which of ``model`` each new value of a buffer belongs to
    # The optimizer's updates, whose tensors are last in ``model`` and in the outputs.
    updates: Updates = Updates()


def step_program(
    program: ir.Program,
    derivative: Derivative,
    differentiator: Differentiator,  # makes the closures that add gradients
    *,
    micro_batches: int,
    # "forward_first" runs all forwards, then all backwards from the last to the first; "one_by_one"
    # runs each backward right after its forward and needs less memory.
    order: Order,
    sums: Sums = "as_gradients",  # the precision in which gradients of micro-batches are summed
) -> StepProgram:
    """Builds the step of a captured micro-batch, whose output 0 is its loss."""
    exact = sums == "float32" and micro_batches > 1
    composer = _Composer(program, derivative, differentiator, exact_sums=exact)
    return composer.compose(micro_batches, order)


class _Composer:
    """Builds the program of a step, micro-batch by micro-batch."""

    def __init__(
        self,
        program: ir.Program,
        derivative: Derivative,
        differentiator: Differentiator,
        *,
        exact_sums: bool,
    ) -> None:
        self._program = program
        self._types: list[Any] = list(derivative.backward.output_types)
        halves = (torch.bfloat16, torch.float16) if exact_sums else ()
        self._sum_types = [
            replace(t, dtype=torch.float32) if t.dtype in halves else t for t in self._types
        ]
        self._derivative = derivative
        self._make = differentiator
        sources = program.sources
        self._user = [i for i, s in enumerate(sources) if isinstance(s, ir.UserInput)]
        self._model = [i for i, s in enumerate(sources) if isinstance(s, ir.ModelTensor)]
        self._state = {i: _copy(program.inputs[i]) for i in self._model}
        self._model_values = tuple(self._state.values())
        self._seed = ir.Value(program.outputs[0].type, "seed")
        self._calls: list[ir.Call] = []
        self._totals: tuple[ir.Value, ...] = ()

    def compose(self, micro_batches: int, order: Order) -> StepProgram:
        inputs = [
            {i: _copy(self._program.inputs[i]) for i in self._user} for _ in range(micro_batches)
        ]
        losses, flights = [], []
        for index, batch in enumerate(inputs):
            flight = self._forward(batch, index)
            losses.append(flight[1][0])
            flights.append(flight)
            if order == "one_by_one":
                self._backward(*flights.pop(), index)
        for index in reversed(range(len(flights))):
            self._backward(*flights[index], index)
        return self._finish(inputs, losses)

    def _forward(
        self, batch: dict[int, ir.Value], index: int
    ) -> tuple[list[ir.Value], tuple[ir.Value, ...]]:
        args = [
            batch[i] if i in batch else self._state[i] for i in range(len(self._program.inputs))
        ]
        forward = self._derivative.forward
        results = tuple(ir.Value(t) for t in forward.output_types)
        self._calls.append(ir.Call(forward, tuple(args), results, f"micro_batch_{index}"))
        for output, target in self._program.writes:
            self._state[target] = results[output]
        return args, results

    def _backward(self, args: Sequence[ir.Value], results: Sequence[ir.Value], index: int) -> None:
        d = self._derivative
        operands = [results[-1], *(args[i] for i in d.kept_inputs)]
        operands += [results[i] for i in d.kept_outputs]
        operands += [self._seed]
        gradients = tuple(ir.Value(t) for t in d.backward.output_types)
        self._calls.append(ir.Call(d.backward, tuple(operands), gradients, f"micro_batch_{index}"))
        # The first micro-batch's gradients are the first sums: they are not added to zeros.
        if self._totals:
            totals = tuple(map(ir.Value, self._sum_types))
            self._calls.append(ir.Call(self._accumulate, (*self._totals, *gradients), totals))
        else:
            totals = self._cast(gradients, self._sum_types)
        self._totals = totals

    @functools.cached_property
    def _accumulate(self) -> ir.Composite:
        """Adds the gradients of one micro-batch to the sums so far."""
        return _for_each("accumulate", map(self._make.adder, self._sum_types, self._types))

    def _cast(self, values: tuple[ir.Value, ...], types: Sequence[Any]) -> tuple[ir.Value, ...]:
        """Casts values to types, if they have others."""
        made = {v: ir.Value(t) for v, t in zip(values, types, strict=True) if v.type != t}
        if made:
            copiers = [self._make.copier(v.type, new.type) for v, new in made.items()]  # type: ignore[arg-type]
            self._calls.append(
                ir.Call(_for_each("cast", copiers), tuple(made), tuple(made.values()))
            )
        return tuple(made.get(v, v) for v in values)

    def _finish(
        self, inputs: Sequence[dict[int, ir.Value]], losses: Sequence[ir.Value]
    ) -> StepProgram:
        program = self._program
        changed = [target for _, target in program.writes]
        batch_values = [v for batch in inputs for v in batch.values()]
        gradients = self._cast(self._totals, self._types)
        step = ir.Program(
            (*batch_values, *self._model_values, self._seed),
            tuple(self._calls),
            (*losses, *gradients, *(self._state[t] for t in changed)),
        )
        place = {i: position for position, i in enumerate(self._model)}
        users = tuple(program.sources[i].index for i in self._user)  # type: ignore[union-attr]
        return StepProgram(
            step,
            tuple(users for _ in inputs),
            tuple(program.sources[i] for i in self._model),  # type: ignore[misc]
            tuple(place[i] for i in self._derivative.gradient_inputs),
            tuple(place[i] for i in changed),
        )


def _for_each(name: str, leaves: Iterable[ir.Leaf]) -> ir.Composite:
    """Returns a closure that calls each leaf on its own operands."""
    calls = [
        ir.Call(x, tuple(map(ir.Value, x.input_types)), (ir.Value(x.output_types[0]),))
        for x in leaves
    ]
    inputs = tuple(v for column in zip(*(c.args for c in calls), strict=True) for v in column)
    return ir.Composite(name, ir.Program(inputs, tuple(calls), tuple(c.results[0] for c in calls)))


def _copy(value: ir.Value) -> ir.Value:
    return ir.Value(value.type, value.hint)


def training_program(
    program: ir.Program, derivative: Derivative, seeds: Sequence[ir.Source]
) -> ir.Program:
    """Returns a program that runs a forward, then its backward.

    Its inputs are the forward's, then a cotangent from each of ``seeds``; its outputs are the
    forward's, then the gradients of ``derivative.gradient_inputs``.
    """
    assert isinstance(derivative.forward, ir.Composite)
    forward = derivative.forward.program
    *results, _ = forward.outputs
    entries = derivative.backward.input_types[-len(seeds) :] if seeds else ()
    cotangents = tuple(ir.Value(type_, "seed") for type_ in entries)
    calls, gradients = backward_calls(derivative, forward, cotangents)
    return ir.Program(
        (*forward.inputs, *cotangents),
        (*forward.calls, *calls),
        (*results, *gradients),
        (*program.sources, *seeds),
        program.writes,
        program.output_tree,
    )


def backward_calls(
    derivative: Derivative, program: ir.Program, cotangents: Sequence[ir.Value]
) -> tuple[list[ir.Call], list[ir.Value]]:
    """Returns the calls of a backward, inlined after its forward ``program``, and the gradients."""
    assert isinstance(derivative.forward, ir.Composite)
    assert isinstance(derivative.backward, ir.Composite)
    backward, saved = derivative.backward.program, derivative.forward.program.outputs[-1]
    operands = (
        saved,
        *(program.inputs[i] for i in derivative.kept_inputs),
        *(program.outputs[i] for i in derivative.kept_outputs),
        *cotangents,
    )
    return inlined(backward, operands)


@dataclass(frozen=True)
class GradientProgram:
    """A program that returns the results of another program and gradients of them."""

    # Takes the other's inputs, then a cotangent for each of ``outputs``; it does not return results
    # that are written to buffers.
    program: ir.Program
    outputs: tuple[int, ...]  # the outputs of the other program that are differentiated
    inputs: tuple[int, ...]  # the inputs of the other program whose gradients are the last results

    def taken_apart(
        self, results: Sequence[torch.Tensor]
    ) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        """Splits results into those of the other program and the gradients."""
        num = len(results) - len(self.inputs)
        return results[:num], results[num:]


class GradientPrograms:
    """Makes programs of gradients; derivatives of closures are cached for further ones."""

    def __init__(self) -> None:
        recipe = Recipe(DIFFERENTIABLE, gradients="differentiated")
        self._differentiator = Differentiator(lambda leaf: recipe)
        self._flat = FlatStructs()

    def of(
        self,
        program: ir.Program,
        inputs: Sequence[int],
        outputs: Sequence[int],
        sources: Sequence[ir.Source],
    ) -> GradientProgram | None:
        """Returns the program with gradients of its results; None if none flows.

        ``sources`` are those of the program's inputs, then of a cotangent for each output.
        """
        # Only entry programs have sources, not those of closures.
        closure = ir.Composite("main", replace(program, sources=()))
        request = Request(closure, tuple(inputs), tuple(outputs))
        derivative = self._differentiator.of(request)
        if derivative is None:
            return None
        seeded = derivative.cotangent_outputs
        own, seeds = sources[: len(program.inputs)], sources[len(program.inputs) :]
        used = [seed for output, seed in zip(outputs, seeds, strict=True) if output in seeded]
        both = training_program(replace(program, sources=tuple(own)), derivative, used)
        # Random operators stay even if unused: else later ones would draw other numbers.
        draws = Draws()
        drawing = [call for call in both.calls if draws.of_closure(call.closure)]
        drawn = [value for call in drawing for value in call.results]
        # New values of buffers are the forward's: this may be a second run, for gradients only.
        written = {output for output, _ in program.writes}
        results = tuple(v for i, v in enumerate(both.outputs) if i not in written)
        calls = tuple(needed_calls(both.calls, (*results, *drawn)))
        flat = self._flat.program(ir.Program(both.inputs, calls, results, both.sources))
        return GradientProgram(flat, seeded, derivative.gradient_inputs)


def own_derivative(program: ir.Program) -> str:
    """Names a ``torch.autograd.Function`` in a program; "" if there is none.

    A second derivative would be that of its operators, and not of its own backward.
    """
    targets = (node.target for _, node in ir.leaf_nodes(program))
    known = (*OPERATOR_TYPES, BuiltinFunctionType, ir.Control)
    own = (t for t in targets if not isinstance(t, known))
    return next((str(getattr(target, "__name__", target)) for target in own), "")


# ---- updates -------------------------------------------------------------------------------------


_SMALL_BYTES = 64 * 1024


class NotUpdatedError(PlanError):
    """A parameter cannot be updated in the program; the message says why."""


def with_updates(step: StepProgram, groups: Sequence[UpdateGroup]) -> StepProgram:
    """Returns the step with an update of each parameter of the groups that gets a gradient.

    Gradients of other parameters stay results. Raises NotUpdatedError if a gradient has another
    layout than its parameter.
    """
    return _Updater(step, groups).updated()


def step_of_sums(trained: Sequence[tuple[ir.ModelTensor, TensorType]]) -> StepProgram:
    """Returns a step whose batch is the summed gradients of parameters, each of the given type."""
    sums = tuple(ir.Value(type_, "sum") for _, type_ in trained)
    parameters = (ir.Value(TensorType.of(source.tensor), source.name) for source, _ in trained)
    numbers = tuple(range(len(sums)))
    model = tuple(source for source, _ in trained)
    return StepProgram(ir.Program((*sums, *parameters), (), sums), (numbers,), model, numbers, ())


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
        self._leaves: dict[Any, ir.Leaf] = {}
        self._state: dict[tuple[int, str], ir.Value] = {}
        self._calls: list[ir.Call] = []

    def updated(self) -> StepProgram:
        """Returns the step."""
        group_of = {member: i for i, one in enumerate(self._groups) for member in one.members}
        pairs = list(zip(self._step.gradients, self._gradients, strict=True))
        mine = [(i, g) for i, g in pairs if id(self._step.model[i].tensor) in group_of]
        if not mine:
            return self._step
        device = ir.tensor_type(self._parameters[mine[0][0]]).device
        types = [replace(one.settings, device=device) for one in self._groups]
        settings = [ir.Value(type_, "settings") for type_ in types]
        together: dict[tuple[int, torch.dtype], list[tuple[int, ir.Value]]] = defaultdict(list)
        for index, gradient in mine:
            group = group_of[id(self._step.model[index].tensor)]
            if ir.tensor_type(gradient).num_bytes >= _SMALL_BYTES:
                self._update(self._groups[group], settings[group], [(index, gradient)])
            else:
                together[group, ir.tensor_type(gradient).dtype].append((index, gradient))
        for (group, _), members in together.items():
            self._update(self._groups[group], settings[group], members)
        return self._finish(mine, [pair for pair in pairs if pair not in mine], settings)

    def _update(
        self, group: UpdateGroup, settings: ir.Value, members: Sequence[tuple[int, ir.Value]]
    ) -> None:
        rows = [[self._parameters[i] for i, _ in members], [self._laid_out(*m) for m in members]]
        names = STATE[group.operator] if group.has_state else ()
        rows += [[self._state_of(i, name) for i, _ in members] for name in names]
        rows += [[] for _ in STATE[group.operator][len(names) :]]
        leaf = self._leaf(group, rows, ir.tensor_type(settings))
        results = tuple(ir.Value(t) for t in leaf.output_types)
        args = (*(value for row in rows for value in row), settings)
        self._calls.append(ir.Call(leaf, args, results))

    def _laid_out(self, index: int, gradient: ir.Value) -> ir.Value:
        found, own = ir.tensor_type(gradient), ir.tensor_type(self._parameters[index])
        if found != own or not own.is_dense:
            name = self._step.model[index].name
            raise NotUpdatedError(
                f"the gradient of {name} is laid out in another way than the parameter"
            )
        return gradient

    def _state_of(self, index: int, name: str) -> ir.Value:
        own = ir.tensor_type(self._parameters[index])
        type_ = TensorType(torch.float32, (), (), own.device) if name == "step" else own
        return self._state.setdefault((index, name), ir.Value(type_, name))

    def _leaf(
        self, group: UpdateGroup, rows: Sequence[Sequence[ir.Value]], settings: TensorType
    ) -> ir.Leaf:
        types = tuple(tuple(ir.tensor_type(value) for value in row) for row in rows)
        key = (group.operator, group.flags, types)
        if key not in self._leaves:
            self._leaves[key] = update_leaf(group.operator, types, settings, group.flags)
        return self._leaves[key]

    def _finish(
        self,
        mine: Sequence[tuple[int, ir.Value]],
        others: Sequence[tuple[int, ir.Value]],
        settings: Sequence[ir.Value],
    ) -> StepProgram:
        step, program = self._step, self._step.program
        changed = [value for call in self._calls for value in call.results]
        given, seed = program.inputs[: self._end], program.inputs[self._end :]
        names = [f"{name} of {step.model[i].name}" for i, name in self._state]
        names += ["settings of the optimizer"] * len(settings)
        stand_in = torch.empty(0, device="meta")
        return replace(
            step,
            program=ir.Program(
                (*given, *self._state.values(), *settings, *seed),
                (*program.calls, *self._calls),
                (*self._losses, *(g for _, g in others), *self._writes, *changed),
            ),
            model=(*step.model, *(ir.ModelTensor(name, stand_in) for name in names)),
            gradients=tuple(i for i, _ in others),
            updates=Updates(tuple(self._state), tuple(i for i, _ in mine), len(changed)),
        )
