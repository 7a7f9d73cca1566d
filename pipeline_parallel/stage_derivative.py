"""One stage's forward and backward as programs; the backward whole, or in two halves.

All stages of a model share one :class:`Differentiator` and one :class:`Splitter`, so each different
closure is differentiated and split once, whatever the number of stages, layers and micro-batches.
The early half computes the gradients that are sent to the stage before, the late half those of
parameters: zero-bubble schedules send the gradient of a stage's input as soon as possible, and
compute gradients of parameters when they would wait. Nothing is computed twice except views. (Qi et
al., "Zero Bubble Pipeline Parallelism", 2023.)
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch.fx
from torch import Tensor

from ..autodiff.derivative import Derivative, Differentiator, Request, active_values
from ..autodiff.flows import needed_calls
from ..autodiff.traces.torch_partition import ancestors, extract
from ..reuse.errors import PlanError
from ..reuse.ir import program as ir
from ..reuse.ir.leaf import flat_types, node_type
from ..reuse.ir.operators import is_draw, is_view, mutated_args
from ..reuse.ir.rewrite import grouped, packed, unpacked
from ..reuse.ir.types import StructType, TensorType
from ..reuse.once import once
from .actions import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD
from .cut import Stage

Positions = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Halves:
    """A closure split by its outputs."""

    # Takes the inputs ``early_inputs`` of the whole; returns its early outputs, then a struct of
    # values for the late half. None if no output is early.
    early: ir.Closure | None
    # Takes that struct, if there is an early half, then the inputs ``late_inputs`` of the whole;
    # returns its other outputs. None if every output is early.
    late: ir.Closure | None
    early_inputs: Positions
    late_inputs: Positions
    early_outputs: Positions
    late_outputs: Positions


class Splitter:
    """Splits closures, each once for each choice of early outputs."""

    @once
    def split(self, closure: ir.Closure, early: frozenset[int]) -> Halves:
        """Returns the halves of a leaf or a composite, given the positions of its early outputs."""
        if isinstance(closure, ir.Leaf):
            return _split_leaf(closure, early)
        assert isinstance(closure, ir.Composite), "pack and unpack are copied, not split"
        return _split_body(self, closure, early)


# ---- programs --------------------------------------------------------------------------------


def _split_body(splitter: Splitter, closure: ir.Composite, early: frozenset[int]) -> Halves:
    """Splits a composite: each of its calls runs early, late, or in two halves itself."""
    program = closure.program
    early_outputs, late_outputs = _sides(len(program.outputs), early)
    early_calls, late_calls, needed = _placed_calls(
        splitter, program, {program.outputs[i] for i in early_outputs}
    )
    late_results = [program.outputs[i] for i in late_outputs]
    # Without the unpacks that only the early half needs.
    late_calls = needed_calls(late_calls, late_results)
    wanted = [v for call in late_calls for v in call.args] + late_results
    made = {v for call in early_calls for v in call.results}
    made_late = {v for call in late_calls for v in call.results}
    carried = list(dict.fromkeys(v for v in wanted if v in made and v not in made_late))
    late_inputs = _positions(program.inputs, wanted)
    early_inputs = _positions(program.inputs, needed) if early_outputs else ()
    early_half = late_half = None
    if early_outputs:
        pack = packed(carried, "carried")
        inputs = tuple(program.inputs[i] for i in early_inputs)
        outputs = (*(program.outputs[i] for i in early_outputs), *pack.results)
        body = ir.Program(inputs, (*early_calls, pack), outputs)
        early_half = ir.Composite(f"{closure.name}.early", body)
    if late_outputs:
        inputs = tuple(program.inputs[i] for i in late_inputs)
        if early_outputs:
            entry = ir.Value(StructType(tuple(v.type for v in carried)), "carried")
            inputs, late_calls = (entry, *inputs), [unpacked(entry, carried), *late_calls]
        body = ir.Program(inputs, tuple(late_calls), tuple(late_results))
        late_half = ir.Composite(f"{closure.name}.late", body)
    return Halves(early_half, late_half, early_inputs, late_inputs, early_outputs, late_outputs)


def _placed_calls(
    splitter: Splitter, program: ir.Program, needed: set[ir.Value]
) -> tuple[list[ir.Call], list[ir.Call], set[ir.Value]]:
    """Returns the calls of both halves, and all values that the early one needs."""
    early, late = list[ir.Call](), list[ir.Call]()
    for call in reversed(program.calls):
        own = [i for i, v in enumerate(call.results) if v in needed]
        is_whole = len(own) == len(call.results) or isinstance(call.closure, (ir.Pack, ir.Unpack))
        # An unpack costs nothing, so each half has its own.
        if not own or isinstance(call.closure, ir.Unpack):
            late.append(call)
        elif not is_whole:
            first, second = _split_call(splitter.split(call.closure, frozenset(own)), call)
            early.append(first)
            late.append(second)
            needed.update(first.args)
        if own and is_whole:
            early.append(call)
            needed.update(call.args)
    return early[::-1], late[::-1], needed


def _split_call(halves: Halves, call: ir.Call) -> tuple[ir.Call, ir.Call]:
    # Some results are early and some are late, so neither half is empty.
    assert halves.early is not None and halves.late is not None
    carried = ir.Value(halves.early.output_types[-1], "carried")
    args = tuple(call.args[i] for i in halves.early_inputs)
    results = (*(call.results[i] for i in halves.early_outputs), carried)
    late_args = (carried, *(call.args[i] for i in halves.late_inputs))
    late_results = tuple(call.results[i] for i in halves.late_outputs)
    return (
        ir.Call(halves.early, args, results, call.path),
        ir.Call(halves.late, late_args, late_results, call.path),
    )


def _sides(number: int, early: frozenset[int]) -> tuple[Positions, Positions]:
    """Returns the positions of early outputs, and of the others."""
    positions = range(number)
    return tuple(i for i in positions if i in early), tuple(i for i in positions if i not in early)


def _positions(inputs: Sequence[ir.Value], wanted: Iterable[ir.Value]) -> Positions:
    among = set(wanted)
    return tuple(i for i, v in enumerate(inputs) if v in among)


# ---- leaves ----------------------------------------------------------------------------------


def _split_leaf(leaf: ir.Leaf, early: frozenset[int]) -> Halves:
    groups = list(grouped(ir.outputs_of(leaf.module), leaf.output_types))
    early_outputs, late_outputs = _sides(len(groups), early)
    early_results = [n for i in early_outputs for n in groups[i] if isinstance(n, torch.fx.Node)]
    late_results = [n for i in late_outputs for n in groups[i] if isinstance(n, torch.fx.Node)]
    # The order of in-place operators matters, so they run early, with all that they depend on.
    changing = leaf.nodes if any(mutated_args(n) for n in leaf.nodes) else ()
    first = ancestors([*early_results, *changing])
    # Only tensors can be carried: the getitems of operators with several results run with these.
    first |= {n for n in leaf.nodes if n.target is operator.getitem and n.args[0] in first}
    # The late half computes views again, which is free: to carry them would keep the same memory.
    ends = first if changing else {n for n in first if not is_view(n) or len(n.all_input_nodes) > 1}
    second = ancestors(late_results, ends)
    carried = [n for n in leaf.nodes if n in second and n in ends]
    carried_type = StructType(tuple(map(node_type, carried)))
    entries = list(grouped(leaf.entries, leaf.input_types))
    early_inputs = tuple(i for i, group in enumerate(entries) if not first.isdisjoint(group))
    late_inputs = tuple(i for i, group in enumerate(entries) if not second.isdisjoint(group))
    early_leaf = late_leaf = None
    if early_outputs:
        nodes = [n for i in early_inputs for n in entries[i]]
        module = extract(leaf.module, nodes, [*early_results, *carried], also=changing)
        given = tuple(leaf.input_types[i] for i in early_inputs)
        types = (*(leaf.output_types[i] for i in early_outputs), carried_type)
        early_leaf = replace(leaf, name=f"{leaf.name}.early", module=module, input_names=())
        early_leaf = replace(early_leaf, input_types=given, output_types=types)
    if late_outputs:
        nodes = [*carried, *(n for i in late_inputs for n in entries[i])]
        module = extract(leaf.module, nodes, late_results)
        struct = (carried_type,) if early_outputs else ()
        given = (*struct, *(leaf.input_types[i] for i in late_inputs))
        types = tuple(leaf.output_types[i] for i in late_outputs)
        late_leaf = replace(leaf, name=f"{leaf.name}.late", module=module, input_names=())
        late_leaf = replace(late_leaf, input_types=given, output_types=types)
    return Halves(early_leaf, late_leaf, early_inputs, late_inputs, early_outputs, late_outputs)


Chosen = Callable[[Stage, Request], Request]
"""Returns the request for a stage's backward with a choice of what is saved."""


@dataclass(frozen=True, eq=False)
class StageDerivative:
    """A stage and its backward."""

    stage: Stage  # the stage
    derivative: Derivative | None  # its derivative; None if no gradient flows through it
    request: Request  # the request that the derivative is of, which says what is saved
    halves: Halves | None  # the halves of the backward; None unless it is split
    # The positions of received values whose gradients it sends back.
    gradients_sent: tuple[int, ...]
    # The positions of sent values (or results) whose gradients come back.
    gradients_received: tuple[int, ...]

    @property
    def forward(self) -> ir.Program:
        """The program of a forward."""
        if self.derivative is None:
            return self.stage.program
        return _body(self.derivative.forward)

    @property
    def parts(self) -> dict[str, ir.Program]:
        """Its programs by kind of action, in the order in which a micro-batch needs them."""
        if self.derivative is None:
            return {FORWARD: self.forward}
        backward: dict[str, ir.Closure | None] = {BACKWARD: self.derivative.backward}
        if self.halves is not None:
            backward = {BACKWARD_INPUT: self.halves.early, BACKWARD_WEIGHT: self.halves.late}
        own = {kind: _body(half) for kind, half in backward.items() if half is not None}
        return {FORWARD: self.forward, **own}

    @property
    def backward(self) -> list[ir.Program]:
        """The programs of a backward: the whole, or those halves that there are."""
        return list(self.parts.values())[1:]

    @property
    def cotangent_types(self) -> tuple[TensorType, ...]:
        """Types of the gradients that come back, in order."""
        outputs = flat_types(v.type for v in self.stage.program.outputs)
        return tuple(outputs[i].cotangent() for i in self.gradients_received)

    @property
    def gradient_types(self) -> tuple[TensorType, ...]:
        """Types of the gradients that it sends back, in order."""
        return tuple(self.stage.received_types[i].cotangent() for i in self.gradients_sent)

    @property
    def trained(self) -> tuple[ir.ModelTensor, ...]:
        """The parameters that get a gradient here."""
        if self.derivative is None:
            return ()
        first = self.stage.num_received
        sources = [
            self.stage.sources[i - first] for i in self.derivative.gradient_inputs if i >= first
        ]
        assert all(isinstance(s, ir.ModelTensor) for s in sources)
        return tuple(sources)  # type: ignore[arg-type]

    @property
    def trained_types(self) -> list[tuple[ir.ModelTensor, TensorType]]:
        """Those parameters, each with the type of its gradient."""
        types = dict(zip(self.stage.model_tensors, self.stage.model_types, strict=True))
        return [(source, types[source].cotangent()) for source in self.trained]

    @property
    def saved_bytes(self) -> int:
        """The bytes that a micro-batch saves for its backward, without kept inputs and outputs."""
        return 0 if self.derivative is None else self.derivative.saved_type.num_bytes


def _body(closure: object) -> ir.Program:
    assert isinstance(closure, ir.Composite)
    return closure.program


def differentiate_stages(
    stages: Sequence[Stage],
    differentiator: Differentiator,
    *,
    halves: bool,
    chosen: Chosen = lambda stage, request: request,
) -> list[StageDerivative]:
    """Returns the backward of each stage, from the last one's result 0 (the loss) to the first.

    ``chosen`` decides what a stage saves and what it recomputes; ``halves`` splits each backward.
    """
    active = _active_received(stages, differentiator)
    splitter = Splitter()
    found: list[StageDerivative] = []
    arriving: tuple[int, ...] = (0,)  # result 0 of the last stage is the loss
    # From the last stage to the first: a stage's cotangents are what the next stage sends back.
    for stage, flags in zip(reversed(stages), reversed(active), strict=True):
        wanted = tuple(i for i, flag in enumerate(flags) if flag)
        request = Request(ir.Composite(f"stage{stage.index}", stage.program), wanted, arriving)
        derivative = differentiator.of(request)
        sent: tuple[int, ...] = ()
        split = None
        if derivative is not None:
            sent = tuple(i for i in derivative.gradient_inputs if i < stage.num_received)
            if stage.paths:  # a stage without blocks has nothing to choose
                request = chosen(stage, request)
                derivative = differentiator.of(request)
                assert derivative is not None
            if halves:
                split = splitter.split(derivative.backward, frozenset(range(len(sent))))
        found.append(StageDerivative(stage, derivative, request, split, sent, arriving))
        arriving = sent
    return found[::-1]


def _active_received(stages: Sequence[Stage], differentiator: Differentiator) -> list[list[bool]]:
    """Returns, for each input of each stage, whether a parameter's gradient flows through it."""
    flags: list[list[bool]] = []
    received: list[bool] = []
    for stage in stages:
        own = [isinstance(s, ir.ModelTensor) and s.tensor.requires_grad for s in stage.sources]
        flags.append([*received, *own])
        values = active_values(differentiator, stage.program, flags[-1])
        received = [v in values for v in stage.program.outputs[: stage.num_sent]]
    return flags


# ---- random numbers --------------------------------------------------------------------------
#
# Stages get the same random numbers as in one process. A generator only goes forward, so at the
# start of a step each rank draws and discards all numbers of all stages and micro-batches, and
# keeps the generator's state before each forward of a stage.

# The number of its random numbers depends only on the sizes of its operand.
_DROPOUT = torch.ops.aten.native_dropout.default


class StageDraws:
    """The random draws of the forwards of stages, in order, by this rank's local programs."""

    def __init__(self, forwards: Iterable[ir.Program] = ()) -> None:
        self._drawing = [list(_drawing_nodes(program)) for program in forwards]
        self._states: dict[tuple[int, int], Tensor] = {}

    def __bool__(self) -> bool:
        return any(self._drawing)

    @contextmanager
    def step(self, num_micro_batches: int) -> Iterator[None]:
        """Keeps the generator's state before each forward; leaves it as after a step."""
        for micro_batch in range(num_micro_batches if self else 0):
            for stage, nodes in enumerate(self._drawing):
                self._states[stage, micro_batch] = torch.get_rng_state()
                for node in nodes:
                    x = TensorType.of(node.args[0].meta["val"]).empty()
                    _DROPOUT(x, *node.args[1:])
        after = torch.get_rng_state() if self else None
        try:
            yield
        finally:
            if after is not None:
                torch.set_rng_state(after)

    def begin(self, stage: int, micro_batch: int) -> None:
        """Sets the generator to its state before this forward in a single process."""
        if self:
            torch.set_rng_state(self._states[stage, micro_batch])


def check_draws(
    forwards: Iterable[ir.Program], backwards: Iterable[ir.Program], device: str
) -> None:
    """Raises PlanError if stages draw random numbers that :class:`StageDraws` cannot repeat."""
    late = [node for program in backwards for node in _drawing_nodes(program)]
    for node in (*late, *(n for program in forwards for n in _drawing_nodes(program))):
        if late or device != "cpu" or node.target is not _DROPOUT:
            raise PlanError(
                f"The model draws random numbers by {node.target}, and stages over a mesh draw for "
                "dropout alone, on a CPU and in a forward, as one process does. Switch that off, "
                "or use a mesh without a pipeline."
            )


def _drawing_nodes(program: ir.Program) -> Iterator[Any]:
    for call in program.calls:
        if isinstance(call.closure, ir.Composite):
            yield from _drawing_nodes(call.closure.program)
        elif isinstance(call.closure, ir.Leaf):
            yield from filter(is_draw, call.closure.nodes)
