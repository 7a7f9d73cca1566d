"""One stage's forward and backward as programs; the backward whole, or in two halves.

All stages of a model share one :class:`Differentiator` and one :class:`Splitter`, so each different
closure is differentiated and split once, whatever the number of stages, layers and micro-batches.
The early half computes the gradients that are sent to the stage before, the late half those of
parameters: zero-bubble schedules send the gradient of a stage's input as soon as possible and
compute gradients of parameters when they would wait. A closure is split by which of its outputs are
needed early; nothing is computed twice except views. (Qi et al., "Zero Bubble Pipeline
Parallelism", 2023.)
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch.fx

from ..autodiff.derivative import Derivative, Differentiator, Request, active_values
from ..autodiff.flows import needed_calls
from ..autodiff.traces.torch_partition import ancestors, extract
from ..reuse.ir import program as ir
from ..reuse.ir.leaf import flat_types, node_type
from ..reuse.ir.operators import is_view, mutated_args
from ..reuse.ir.rewrite import grouped, packed, unpacked
from ..reuse.ir.types import StructType, TensorType, Type
from .cut import Stage

Positions = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Halves:
    """A closure split by its outputs.

    Attributes:
        early: takes the inputs ``early_inputs`` of the whole; returns its early outputs, then a
            struct of values for the late half. None if no output is early.
        late: takes that struct (if there is an early half), then the inputs ``late_inputs`` of the
            whole; returns the other outputs. None if every output is early.
    """

    early: ir.Closure | None
    late: ir.Closure | None
    early_inputs: Positions
    late_inputs: Positions
    early_outputs: Positions
    late_outputs: Positions


class Splitter:
    """Splits closures, each at most once per choice of early outputs."""

    def __init__(self) -> None:
        self._known: dict[tuple[ir.Closure, frozenset[int]], Halves] = {}

    def split(self, closure: ir.Closure, early: Iterable[int]) -> Halves:
        """Returns the halves of a closure.

        Args:
            closure: a leaf or a composite.
            early: positions of the outputs that are needed first.
        """
        key = (closure, frozenset(early))
        if key not in self._known:
            if isinstance(closure, ir.Leaf):
                self._known[key] = _split_leaf(closure, key[1])
            else:
                assert isinstance(closure, ir.Composite), "pack and unpack are copied, not split"
                self._known[key] = _BodySplit(self, closure, key[1]).halves()
        return self._known[key]


# ---- programs --------------------------------------------------------------------------------


class _BodySplit:
    """Splits one program body: each of its calls runs early, late, or in two halves itself."""

    def __init__(self, splitter: Splitter, closure: ir.Composite, early: frozenset[int]) -> None:
        self._splitter = splitter
        self._closure = closure
        self._program = closure.program
        outputs = self._program.outputs
        self._early_outputs = tuple(i for i in range(len(outputs)) if i in early)
        self._late_outputs = tuple(i for i in range(len(outputs)) if i not in early)
        self._needed = {outputs[i] for i in self._early_outputs}
        self._early_calls: list[ir.Call] = []
        self._late_calls: list[ir.Call] = []

    def halves(self) -> Halves:
        for call in reversed(self._program.calls):
            self._place(call)
        self._early_calls.reverse()
        self._late_calls.reverse()
        program = self._program
        late_results = [program.outputs[i] for i in self._late_outputs]
        # Without the unpacks that only the early half needs.
        late_calls = needed_calls(self._late_calls, late_results)
        wanted = [v for call in late_calls for v in call.args] + late_results
        made = {v for call in self._early_calls for v in call.results}
        made_late = {v for call in late_calls for v in call.results}
        carried = list(dict.fromkeys(v for v in wanted if v in made and v not in made_late))
        late_inputs = _positions(program.inputs, wanted)
        early = self._early_half(carried)
        early_inputs = _positions(program.inputs, self._needed) if early else ()
        late = self._late_half(late_calls, carried, late_inputs, has_early=early is not None)
        outputs = (self._early_outputs, self._late_outputs)
        return Halves(early, late, early_inputs, late_inputs, *outputs)

    def _place(self, call: ir.Call) -> None:
        needed = [i for i, v in enumerate(call.results) if v in self._needed]
        # An unpack costs nothing, so each half has its own.
        if isinstance(call.closure, ir.Unpack):
            self._late_calls.append(call)
            if needed:
                self._run_early(call)
        elif not needed:
            self._late_calls.append(call)
        elif len(needed) == len(call.results) or isinstance(call.closure, ir.Pack):
            self._run_early(call)
        else:
            self._split_call(call, needed)

    def _run_early(self, call: ir.Call) -> None:
        self._early_calls.append(call)
        self._needed.update(call.args)

    def _split_call(self, call: ir.Call, needed: Sequence[int]) -> None:
        halves = self._splitter.split(call.closure, needed)
        # Some results are early and some are late, so neither half is empty.
        assert halves.early is not None and halves.late is not None
        carried = ir.Value(halves.early.output_types[-1], "carried")
        args = tuple(call.args[i] for i in halves.early_inputs)
        results = (*(call.results[i] for i in halves.early_outputs), carried)
        self._run_early(ir.Call(halves.early, args, results, call.path))
        late_args = (carried, *(call.args[i] for i in halves.late_inputs))
        late_results = tuple(call.results[i] for i in halves.late_outputs)
        self._late_calls.append(ir.Call(halves.late, late_args, late_results, call.path))

    def _early_half(self, carried: Sequence[ir.Value]) -> ir.Composite | None:
        if not self._early_outputs:
            return None
        program, pack = self._program, packed(carried, "carried")
        body = ir.Program(
            tuple(v for v in program.inputs if v in self._needed),
            (*self._early_calls, pack),
            (*(program.outputs[i] for i in self._early_outputs), *pack.results),
        )
        return ir.Composite(f"{self._closure.name}.early", body)

    def _late_half(
        self,
        calls: Sequence[ir.Call],
        carried: Sequence[ir.Value],
        late_inputs: Positions,
        *,
        has_early: bool,
    ) -> ir.Composite | None:
        if not self._late_outputs:
            return None
        inputs = tuple(self._program.inputs[i] for i in late_inputs)
        outputs = tuple(self._program.outputs[i] for i in self._late_outputs)
        if has_early:
            entry = ir.Value(StructType(tuple(v.type for v in carried)), "carried")
            inputs, calls = (entry, *inputs), (unpacked(entry, carried), *calls)
        return ir.Composite(f"{self._closure.name}.late", ir.Program(inputs, tuple(calls), outputs))


def _positions(inputs: Sequence[ir.Value], wanted: Iterable[ir.Value]) -> Positions:
    among = set(wanted)
    return tuple(i for i, v in enumerate(inputs) if v in among)


# ---- leaves ----------------------------------------------------------------------------------


def _split_leaf(leaf: ir.Leaf, early: frozenset[int]) -> Halves:
    groups = list(grouped(ir.outputs_of(leaf.module), leaf.output_types))
    early_outputs = tuple(i for i in range(len(groups)) if i in early)
    late_outputs = tuple(i for i in range(len(groups)) if i not in early)
    early_results = [n for i in early_outputs for n in groups[i] if isinstance(n, torch.fx.Node)]
    late_results = [n for i in late_outputs for n in groups[i] if isinstance(n, torch.fx.Node)]
    # With in-place operators the order matters: all nodes that they depend on run early.
    changing = leaf.nodes if any(mutated_args(n) for n in leaf.nodes) else ()
    first = _with_picks(leaf, ancestors([*early_results, *changing]))
    # Views are computed again in the late half: to pass them on would keep the same memory.
    ends = first if changing else {n for n in first if not _is_free(n)}
    second = ancestors(late_results, ends)
    carried = [n for n in leaf.nodes if n in second and n in ends]
    carried_type = StructType(tuple(map(node_type, carried)))
    entries = list(grouped(leaf.entries, leaf.input_types))
    early_inputs = tuple(i for i, group in enumerate(entries) if not first.isdisjoint(group))
    late_inputs = tuple(i for i, group in enumerate(entries) if not second.isdisjoint(group))
    early_leaf = None
    if early_outputs:
        types = [leaf.output_types[i] for i in early_outputs]
        module = extract(
            leaf.module,
            [n for i in early_inputs for n in entries[i]],
            [*early_results, *carried],
            also=changing,
        )
        given = [leaf.input_types[i] for i in early_inputs]
        early_leaf = _half(leaf, "early", module, given, [*types, carried_type])
    late_leaf = None
    if late_outputs:
        module = extract(
            leaf.module, [*carried, *(n for i in late_inputs for n in entries[i])], late_results
        )
        struct = [carried_type] if early_outputs else []
        given = [*struct, *(leaf.input_types[i] for i in late_inputs)]
        late_leaf = _half(leaf, "late", module, given, [leaf.output_types[i] for i in late_outputs])
    return Halves(early_leaf, late_leaf, early_inputs, late_inputs, early_outputs, late_outputs)


def _half(
    leaf: ir.Leaf,
    suffix: str,
    module: torch.fx.GraphModule,
    inputs: Sequence[Type],
    outputs: Sequence[Type],
) -> ir.Leaf:
    return replace(
        leaf,
        name=f"{leaf.name}.{suffix}",
        module=module,
        input_types=tuple(inputs),
        output_types=tuple(outputs),
        input_names=(),
    )


def _with_picks(leaf: ir.Leaf, nodes: set[torch.fx.Node]) -> set[torch.fx.Node]:
    """Adds the getitem nodes of multi-output operators: only tensors can be passed on."""
    picks = {n for n in leaf.nodes if n.target is operator.getitem and n.args[0] in nodes}
    return nodes | picks


def _is_free(node: torch.fx.Node) -> bool:
    """Whether a node costs nothing to run in both halves: it is a view."""
    return is_view(node) and len(node.all_input_nodes) == 1


Chosen = Callable[[Stage, Request], Request]
"""Returns the request for a stage's backward with a choice of what is saved."""


@dataclass(frozen=True, eq=False)
class StageDerivative:
    """A stage and its backward.

    Attributes:
        stage: the stage.
        derivative: None if no gradient flows through it.
        request: for the derivative, with the choice of what is saved.
        halves: the backward split; None unless asked for.
        gradients_sent: positions, among what it received, of the values whose gradients it sends
            back.
        gradients_received: positions, among what it sent (or its results), of the values whose
            gradients come back.
    """

    stage: Stage
    derivative: Derivative | None
    request: Request
    halves: Halves | None
    gradients_sent: tuple[int, ...]
    gradients_received: tuple[int, ...]

    @property
    def forward(self) -> ir.Program:
        """The program of a forward step."""
        if self.derivative is None:
            return self.stage.program
        return _body(self.derivative.forward)

    @property
    def backward(self) -> tuple[ir.Program | None, ...]:
        """The programs of backward steps: the whole backward, or its early and its late half."""
        if self.derivative is None:
            return ()
        if self.halves is None:
            return (_body(self.derivative.backward),)
        return tuple(None if h is None else _body(h) for h in (self.halves.early, self.halves.late))

    @property
    def cotangent_types(self) -> tuple[TensorType, ...]:
        """Types of the gradients that come back, in order."""
        outputs = flat_types(v.type for v in self.stage.program.outputs)
        return tuple(outputs[i].cotangent() for i in self.gradients_received)

    @property
    def gradient_types(self) -> tuple[TensorType, ...]:
        """Types of the gradients it sends back, in order."""
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
        """Those parameters with the types of their gradients."""
        types = dict(zip(self.stage.model_tensors, self.stage.model_types, strict=True))
        return [(source, types[source].cotangent()) for source in self.trained]

    @property
    def saved_bytes(self) -> int:
        """Bytes that one micro-batch saves for its backward, without handed-over values."""
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

    Args:
        stages: all stages of a program, in order.
        differentiator: makes leaf derivatives.
        halves: whether to split each backward.
        chosen: decides what a stage saves and what it recomputes.
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
                split = splitter.split(derivative.backward, range(len(sent)))
        found.append(StageDerivative(stage, derivative, request, split, sent, arriving))
        arriving = sent
    return found[::-1]


def _active_received(stages: Sequence[Stage], differentiator: Differentiator) -> list[list[bool]]:
    """Says for each input of each stage whether a parameter's gradient flows through it."""
    flags: list[list[bool]] = []
    received: list[bool] = []
    for stage in stages:
        own = [isinstance(s, ir.ModelTensor) and s.tensor.requires_grad for s in stage.sources]
        flags.append([*received, *own])
        values = active_values(differentiator, stage.program, flags[-1])
        received = [v in values for v in stage.program.outputs[: stage.num_sent]]
    return flags
