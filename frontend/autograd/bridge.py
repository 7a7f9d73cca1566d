"""A compiled forward and its backwards as one node of PyTorch's autograd graph."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch

from ...autodiff.derivative import Derivative
from ...backend.run.planned import Graph, unchanged
from ...reuse.errors import PlanError
from ...reuse.ir.program import Program, UserInput
from ...reuse.torch_names import memory_id, version_of, versions_of
from ..compiled import CompiledProgram, GradientRequest
from ..tracing.torch_state import autograd_mode_around
from . import torch_engine as engine
from .gradients import FirstBackward, Gradients, ResultLinks, by_pytorch, drawing

_MAX_BACKWARDS = 8  # the most recently used are kept
_MAX_LATE = 8  # runs; two steps of training on forces: then the forward computes gradients


class Backward:
    """Runs one compiled backward of a program.

    It takes cotangents of some ``outputs``; ``places`` are the positions of its gradients among all
    gradients, those of the derivative ``full``.
    """

    def __init__(self, compiled: CompiledProgram, full: Derivative) -> None:
        derivative = compiled.derivative
        assert derivative is not None
        self.runtime = compiled.runtime
        self.outputs = derivative.cotangent_outputs
        self.types = compiled.with_numbers(derivative.backward.input_types[-len(self.outputs) :])
        self.places = [full.gradient_inputs.index(i) for i in derivative.gradient_inputs]
        self._copied: tuple[int, ...] | None = None

    def gradients(
        self,
        flight: Any,
        kept: Sequence[torch.Tensor],
        cotangents: Sequence[torch.Tensor],
        graph: Graph,
    ) -> list[torch.Tensor]:
        """Runs the backward; each gradient gets its own storage, as autograd adds in-place."""
        operands = [*kept, *cotangents]
        gradients = self.runtime.backward(flight, operands, graph)
        if self._copied is None:
            self._copied = _shared(operands, gradients)
        for index in self._copied:
            gradients[index] = gradients[index].clone()
        return gradients


def _shared(operands: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Returns the gradients that share memory with an operand or an earlier gradient."""
    # The same gradients share memory in every run, so this is done for the first run only.
    seen, shared = {memory_id(t) for t in operands}, []
    for index, gradient in enumerate(gradients):
        memory = memory_id(gradient)
        if memory in seen:
            shared.append(index)
        seen.add(memory)
    return tuple(shared)


class Backwards:
    """The backwards of a program, each made when a loss first needs it.

    The next forward prepares for the one that is ``expected``: the last that ran.
    """

    def __init__(self, compiled: CompiledProgram) -> None:
        assert compiled.derivative is not None
        self._compiled = compiled
        self._full = self.expected = Backward(compiled, compiled.derivative)
        self._made: dict[tuple[int, ...], Backward] = {}

    def of(self, unused: tuple[int, ...], *, may_be_late: bool = False) -> Backward:
        """Returns the backward for a loss that left these outputs unused.

        If none can be made (see ``MissingCotangents``), it is the one for all outputs, and the
        caller passes zeros for the unused ones. It ``may_be_late``, by PyTorch's kernels, if the
        next forward likely needs no backward.
        """
        made, is_late = self._full, self._compiled.has_late_backward and not unused
        if unused or (is_late and not (may_be_late and self._waits())):
            found = self._made.pop(unused, None)
            self._made[unused] = made = found or self._new(unused)
            if len(self._made) > _MAX_BACKWARDS:
                del self._made[next(iter(self._made))]
        if made is not self.expected:
            self.expected.runtime.rest()
            self.expected = made
        return made

    def for_forward(self) -> Backward:
        """Returns the one that a forward prepares for.

        A forward without the backend's kernels has them from here on if it ran often: the gradients
        that training on forces wants come from another program.
        """
        is_late = self._compiled.has_late_forward and self.expected is self._full
        return self.of(()) if is_late and not self._waits() else self.expected

    def is_other_forward(self, prepared: Backward, backward: Backward) -> bool:
        """Whether a forward that prepared for one backward saved other tensors than another takes.

        One with PyTorch's kernels lays them out in its own way.
        """
        return prepared is not backward and self._compiled.has_late_forward

    def _waits(self) -> bool:
        """Counts a run with PyTorch's kernels; False if there were enough."""
        facts = self._compiled.facts
        facts.num_late += 1
        return self.expected is self._full and facts.num_late <= _MAX_LATE

    def rest(self) -> None:
        """Frees the memory that is held while nothing runs."""
        self.expected.runtime.rest()

    def _new(self, unused: tuple[int, ...]) -> Backward:
        full = self._compiled.derivative
        assert full is not None
        make = self._compiled.without
        found = make(self._compiled, unused) if make is not None else None
        return Backward(found, full) if found is not None else self._full


class Bridge:
    """Runs a compiled program as a node of autograd; its runs share this object.

    The inputs at the positions ``written`` are overwritten after each run.
    """

    def __init__(self, compiled: CompiledProgram, written: frozenset[int]) -> None:
        assert compiled.derivative is not None
        self.program = compiled.captured.program
        self._compiled, self.facts = compiled, compiled.facts
        self.with_numbers = compiled.with_numbers
        self.backwards = Backwards(compiled)
        self.derivative = derivative = compiled.derivative
        self.aliases = engine.Aliases(self.facts.view_roots, derivative.cotangent_outputs)
        self.pick_wanted = picker(derivative.gradient_inputs)
        self.pick_kept = picker(derivative.kept_inputs)
        # The old value of a buffer that the forward overwrites is saved as a copy.
        self.cloned = [i for i, k in enumerate(derivative.kept_inputs) if k in written]
        sources = [self.program.sources[k] for k in derivative.kept_inputs]
        self.given = [i for i, source in enumerate(sources) if isinstance(source, UserInput)]
        watched = [i for i in compiled.watched_inputs if i not in written]
        self.pick_watched = picker(watched)
        self.num_kept = len(derivative.kept_inputs) + len(derivative.kept_outputs)
        outputs = range(len(compiled.captured.program.outputs))
        # Inputs that only a second run of the forward needs, or a derivative of the backward. Those
        # that the forward overwrites come last; of what results are computed from, a copy is held.
        needed = set(derivative.kept_inputs)
        rest = [i for i in range(len(self.program.inputs)) if i not in needed]
        self.others = [i for i in rest if i not in written] + [i for i in rest if i in written]
        self.pick_others = picker(self.others)
        self.num_unwritten = sum(i not in written for i in rest)
        read = self.facts.read_inputs if self.num_unwritten < len(rest) else ()
        self.overwritten = [i for i, k in enumerate(self.others) if k in written and k in read]
        # A program of gradients must draw the random numbers that the forward drew.
        self.draws = self.facts.draws
        self.constant_outputs = [i for i in outputs if i not in derivative.cotangent_outputs]

    def note(self, edges: Sequence[Any], used: tuple[int, ...]) -> bool:
        """Notes which gradients a backward computes, if it computes none of the model's tensors.

        Returns whether it computes none of those: the next forward may compute the gradients.
        """
        first = self.facts.first_trained
        if first is None:
            return False
        request = None
        if not engine.will_run(edges[first][0]):  # tested for one parameter in place of many
            places = tuple(self.derivative.gradient_inputs[i] for i in engine.needed_edges(edges))
            request = GradientRequest(used, (), places, is_differentiated=False)
        self.facts.habit.note(request)
        return request is not None

    @cached_property
    def saved(self) -> engine.SavedTensors:
        """Checks saved tensors before a backward reads them."""
        types = self.derivative.backward.input_types[1 : self.num_kept + 1]
        return engine.SavedTensors(self.with_numbers(types))  # type: ignore[arg-type]

    @cached_property
    def gradients(self) -> Gradients:
        """Compiles gradients as programs, for losses that differentiate them."""
        return Gradients(
            self._compiled, lambda made: Bridge(made, frozenset()).run_alone, self.run_alone
        )

    @cached_property
    def links(self) -> ResultLinks:
        """Gives each result an autograd node of its own."""
        outputs = set(self.derivative.cotangent_outputs)
        order = [i for i in self.facts.output_order if i in outputs]
        return ResultLinks(order, partial(_names, self.program))

    def run(self, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Runs the forward as part of PyTorch's autograd graph."""
        # Not under saved-tensor hooks: a checkpoint requires that a rerun saves as many tensors.
        if self.facts.habit.expected is not None and not autograd_mode_around():
            ahead = self.gradients.ahead()
            found = ahead.run(inputs) if ahead is not None else None
            if found is not None:
                return self.links.over(*found)
        outputs = self._outputs(inputs)
        return self.aliases.with_views(
            inputs, self.links.over(outputs, self._again, self.aliases.views)
        )

    def run_alone(self, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Runs the forward as one node, without nodes of results and without early gradients."""
        return self.aliases.with_views(inputs, self._outputs(inputs))

    def _outputs(self, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        step = Step(self, inputs, self.backwards.for_forward())
        return _CompiledFunction.apply(step, *self.pick_wanted(inputs))

    def _again(self, node: Any) -> Sequence[torch.Tensor]:
        """Runs the forward of an autograd node again, operator by operator."""
        with drawing(node.step.drawn_from):
            return self._compiled.interpret(node.step.inputs_again(node))

    def by_pytorch(
        self, node: Any, cotangents: Sequence[torch.Tensor | None]
    ) -> tuple[torch.Tensor | None, ...]:
        """Returns the gradients by running the forward again under PyTorch's autograd."""
        step, places = node.step, self.derivative.gradient_inputs
        with torch.enable_grad():  # views, because one input may depend on another
            inputs = [x.view_as(x) if x.requires_grad else x for x in step.inputs_again(node)]
        given = {i: c for i, c in enumerate(cotangents) if c is not None}
        found = by_pytorch(self._compiled.interpret, inputs, places, given, step.drawn_from)
        return (None, *map(found.get, places))


def picker(places: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """Returns a function that picks the items at some positions, in C if there are several."""
    if len(places) > 1:
        return operator.itemgetter(*places)
    return lambda items: tuple(items[i] for i in places)


@dataclass
class Step:
    """One forward in flight: its inputs and, after it ran, what its backward needs.

    ``prepared`` is the backward for which the forward laid out its arena.
    """

    bridge: Bridge
    inputs: Sequence[torch.Tensor]
    prepared: Backward
    flight: Any = None
    drawn_from: engine.GeneratorStates | None = None
    used: tuple[int, ...] = ()
    is_differentiated: bool = False
    others: Sequence[torch.Tensor] = ()
    _others_versions: Sequence[int | None] = ()
    _left: Sequence[torch.Tensor] = ()
    _versions: Sequence[int] = ()

    def hold_others(self) -> None:
        """Keeps the inputs that the backward does not need, with their versions."""
        held, over = self.bridge.pick_others(self.inputs), self.bridge.overwritten
        self.others = [t.clone() if i in over else t for i, t in enumerate(held)] if over else held
        unwritten = self.others[: self.bridge.num_unwritten]
        try:
            self._others_versions = versions_of(unwritten)
        except RuntimeError:  # inference tensors have no version counter
            counted = [None if t.is_inference() else version_of(t) for t in unwritten]
            self._others_versions = counted

    def inputs_again(self, ctx: Any) -> list[torch.Tensor]:
        """Returns all inputs, checked to be unchanged, for a backward to be differentiated."""
        places = self.bridge.derivative.kept_inputs
        found = dict(zip(places, ctx.saved_tensors[: len(places)], strict=True))
        for tensor, version in zip(self.others, self._others_versions, strict=False):
            if version is not None:
                unchanged(tensor, version)
        # Autograd would check the versions of those that the forward overwrites.
        num = self.bridge.num_unwritten
        others = [*self.others[:num], *(tensor.clone() for tensor in self.others[num:])]
        found.update(zip(self.bridge.others, others, strict=True))
        return [found[i] for i in range(len(found))]

    def taken(self, ctx: Any, unused: Sequence[int]) -> tuple[Sequence[torch.Tensor], Any, Graph]:
        """Returns the saved tensors, the flight, and whether to keep or free it."""
        facts, outputs = self.bridge.facts, self.bridge.derivative.cotangent_outputs
        if self.flight is None or (
            self.used and not facts.are_apart(self.used, set(outputs) - set(unused))
        ):
            raise RuntimeError(
                "Trying to backward through the graph a second time, but the saved tensors have "
                "already been freed. Specify retain_graph=True at the first backward."
            )
        kept: Sequence[torch.Tensor]
        if self.used:
            kept = list(map(unchanged, self._left, self._versions))
        else:
            saved = ctx.saved_tensors[: self.bridge.num_kept]
            kept = self.bridge.saved.as_saved(saved)
        flight = self.flight
        if engine.graph_is_kept():
            return kept, flight, "keep"
        # After a backward that frees the graph, another one may follow for outputs that share no
        # saved tensor with it, as in eager.
        used = (*self.used, *(i for i in outputs if i not in unused))
        rest = [i for i in unused if i not in self.used]
        if any(facts.are_apart(used, [i]) for i in rest):
            # Detached, because an output that references its own graph would never be freed.
            self.used, self._left = used, [tensor.detach() for tensor in kept]
            self._versions = list(map(version_of, kept))
            return kept, flight, "keep"
        self.flight, self._left, self.others = None, (), ()
        return kept, flight, "free"


class _CompiledFunction(torch.autograd.Function):
    """Runs the linked forward, and the linked backward when autograd calls it."""

    @staticmethod
    def forward(ctx: Any, step: Step, *wanted: torch.Tensor) -> tuple[torch.Tensor, ...]:
        bridge, inputs = step.bridge, step.inputs
        step.hold_others()
        step.inputs = ()
        aliases = bridge.aliases
        if bridge.draws:
            step.drawn_from = engine.GeneratorStates(x.device for x in inputs)
        outputs, step.flight = step.prepared.runtime.forward(inputs)
        if aliases.owned is None:
            saved = step.flight.foreign if step.flight is not None else ()
            aliases.learn_forward(inputs, outputs, saved, bridge.derivative.kept_outputs)
        for index in aliases.owned or ():
            outputs[index] = outputs[index].data  # not a view for autograd: it may change in-place
        for index in aliases.repeated:  # h and h.detach() may be one tensor in the program
            outputs[index] = outputs[index].detach()
        kept = bridge.pick_kept(inputs)
        # Autograd saves no tensor of inference mode, which backends that compute again may need.
        cloned = [*bridge.cloned, *(i for i in bridge.given if kept[i].is_inference())]
        if cloned:
            kept = tuple(t.clone() if i in cloned else t for i, t in enumerate(kept))
        ctx.save_for_backward(
            *kept,
            *[outputs[i] for i in bridge.derivative.kept_outputs],
            *[inputs[i] if kind == "input" else outputs[i] for kind, i in aliases.guards],
            *bridge.pick_watched(inputs),
        )
        ctx.step = step
        if bridge.constant_outputs:
            ctx.mark_non_differentiable(*[outputs[i] for i in bridge.constant_outputs])
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> tuple[Any, ...]:
        if all(cotangent is None for cotangent in cotangents):  # no gradient flows through here
            return (None,) * (1 + len(ctx.step.bridge.derivative.gradient_inputs))
        if engine.are_batched(cotangents):
            return ctx.step.bridge.by_pytorch(ctx, cotangents)  # type: ignore[no-any-return]
        if not torch.is_grad_enabled():
            may_be_late = ctx.step.is_differentiated
            if not may_be_late:
                used = (i for i, cotangent in enumerate(cotangents) if cotangent is not None)
                may_be_late = ctx.step.bridge.note(ctx.next_functions, tuple(used))
            return tuple(_CompiledFunction._gradients(ctx, cotangents, may_be_late=may_be_late))
        ctx.step.is_differentiated = True
        return _CompiledFunction._differentiable(ctx, cotangents)  # `create_graph=True`

    @staticmethod
    def _differentiable(ctx: Any, cotangents: Sequence[torch.Tensor | None]) -> tuple[Any, ...]:
        inputs = ctx.step.inputs_again(ctx)
        bridge, wanted = ctx.step.bridge, ctx.step.bridge.derivative.gradient_inputs
        outputs = bridge.derivative.cotangent_outputs
        asked = tuple(wanted[i] for i in engine.needed_edges(ctx.next_functions))
        first = FirstBackward(
            bridge.gradients,
            tuple(i for i in outputs if cotangents[i] is not None),
            asked,
            ctx.step.drawn_from,
        )
        given = [c for c in (cotangents[i] for i in outputs) if c is not None]
        if bridge.gradients.were_differentiated and len(given) == len(outputs):
            found = first.run(inputs, given)  # instead of a backward first and this later
            if found is not None and found.keys() >= set(asked):
                return (None, *map(found.get, wanted))
        with torch.no_grad():
            results = _CompiledFunction._gradients(ctx, cotangents, may_be_late=True)
        places = [i + 1 for i, k in enumerate(wanted) if k in asked and results[i + 1] is not None]
        marked = first.differentiable({wanted[i - 1]: results[i] for i in places}, inputs, given)
        for place, gradient in zip(places, marked, strict=True):
            results[place] = gradient
        return tuple(results)

    @staticmethod
    def _gradients(
        ctx: Any, cotangents: Sequence[torch.Tensor | None], *, may_be_late: bool
    ) -> list[Any]:
        step: Step = ctx.step
        bridge, derivative = step.bridge, step.bridge.derivative
        unused = tuple(i for i in derivative.cotangent_outputs if cotangents[i] is None)
        results: list[torch.Tensor | None] = [None] * (1 + len(derivative.gradient_inputs))
        # Autograd adds the cotangent of a view to that of its base. So zeros for the view change no
        # gradient, and no extra backward needs to be compiled.
        left = tuple(i for i in unused if i not in bridge.aliases.views)
        backward = bridge.backwards.of(left, may_be_late=may_be_late)
        if step.flight is not None and bridge.backwards.is_other_forward(step.prepared, backward):
            found = bridge.by_pytorch(ctx, cotangents)
            step.taken(ctx, left)
            return list(found)
        kept, flight, graph = step.taken(ctx, left)
        if backward is not step.prepared:
            # The forward's arena is laid out for another backward.
            flight = backward.runtime.taken_over(step.prepared.runtime, flight)
            graph = "free"
        seeds = [
            engine.cotangent_like(t, cotangents[i])
            for i, t in zip(backward.outputs, backward.types, strict=True)
        ]
        gradients = backward.gradients(flight, kept, seeds, graph)
        for place, gradient in zip(backward.places, gradients, strict=True):
            results[place + 1] = gradient
        if unused:
            absent = bridge.facts.absent_gradients(unused)
            for place, type_ in enumerate(derivative.backward.output_types):
                if place in absent:
                    results[place + 1] = None
                elif results[place + 1] is None:
                    results[place + 1] = engine.cotangent_like(bridge.with_numbers([type_])[0])
            if any(output in left for output in backward.outputs):
                _refuse_no_numbers(bridge.program, left, [g for g in results if g is not None])
        return results


def _refuse_no_numbers(
    program: Program, unused: Sequence[int], gradients: Sequence[torch.Tensor]
) -> None:
    """Raises PlanError for NaN in gradients that took zeros in place of missing cotangents."""
    if not any(bool(gradient.isnan().any()) for gradient in gradients):
        return
    names = _names(program, unused)
    raise PlanError(
        f"A gradient is not a number, and {names} of the model's result took part with "
        "a cotangent of zeros although no loss used it: its derivative may be infinite, and there "
        "is no backward without it for these sizes. Detach it in the model, or compile with "
        "dynamic=False."
    )


def _names(program: Program, outputs: Iterable[int]) -> str:
    """Returns the names of outputs in the model's result."""
    tree, wanted = program.output_tree, set(outputs)
    named = tree.named(list(range(len(tree.leaves))))
    kinds = ((name, *tree.leaves[place]) for name, place in named)
    return ", ".join(
        name or "the result" for name, kind, place in kinds if kind == "output" and place in wanted
    )
