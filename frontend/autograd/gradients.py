"""Gradients of a compiled program as a program of their own.

Under ``create_graph=True`` the first backward returns gradients behind an autograd node. Only if
that node is differentiated are the gradients compiled as a program. If two losses in a row ask for
the same gradients (such as forces of a potential), the next forward computes them along with its
results, in one program. Any other gradient runs the forward again.

A compiled program is one node of PyTorch's graph, so the gradient of one result by another (a loss
by a hidden state that is returned too) would be missing. So each result gets a node of its own. Its
backward passes to earlier results the gradient that flows through it, if that is observed. As the
program's backward computes the gradients of all inputs anyway, the earlier result's node subtracts
what it was passed.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from ...backend.run.planned import unchanged
from ...reuse.torch_names import versions_of
from ..compiled import CompiledGradients, CompiledProgram, GradientRequest, Habit
from . import torch_engine as engine

Again = Callable[[Any], Sequence[torch.Tensor]]
"""Runs a forward again, operator by operator, given its autograd node."""


class ResultLinks:
    """Gives the results of a program autograd nodes of their own.

    ``order`` has those with a gradient, as they are computed; ``name`` names them for a warning.
    """

    def __init__(self, order: Sequence[int], name: Callable[[Iterable[int]], str]) -> None:
        self._order, self.name = order, name
        # A leaf that every ``backward()`` reaches, but not ``torch.autograd.grad`` by other inputs.
        self.end = torch.zeros((), device="cpu", requires_grad=True)
        self._has_warned = False

    def warn(self, text: str) -> None:
        """Warns once for each program."""
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(text, stacklevel=3)

    def over(
        self, results: Sequence[torch.Tensor], again: Again, views: Iterable[int] = ()
    ) -> Sequence[torch.Tensor]:
        """Returns the results with nodes of their own, if there are several."""
        order = [i for i in self._order if i not in views]
        if len(order) < 2:
            return results
        linked, call = list(results), _Call(self, again)
        for number, place in enumerate(order):
            earlier = [linked[i] for i in order[:number]]
            made = _Result.apply(call, order[: number + 1], self.end, results[place], *earlier)
            linked[place] = made
            call.results[place] = weakref.ref(made)
        return linked


class _Call:
    """The results of one run, and the gradients that a running backward passes between them."""

    def __init__(self, links: ResultLinks, again: Again) -> None:
        self.links, self._again = links, again
        self.results: dict[int, weakref.ref[torch.Tensor]] = {}
        self._backward = -1
        self._handed: dict[int, torch.Tensor] = {}
        self._skipped: set[int] = set()

    def own(self, place: int, cotangent: torch.Tensor) -> torch.Tensor | None:
        """Returns the cotangent of a result without what other results' nodes passed to it."""
        self._begin()
        if place in self._skipped:
            self.links.warn(
                f"If the gradient of {self.links.name([place])} was asked for together with those "
                "of inputs or parameters, it lacks what comes through other results of the "
                "compiled module. Ask for it alone, or by retain_grad()."
            )
        handed = self._handed.pop(place, None)
        if handed is None:
            return cotangent
        return None if cotangent is handed else cotangent - handed

    def through(
        self, place: int, cotangent: torch.Tensor, earlier: Sequence[int], node: Any
    ) -> dict[int, torch.Tensor]:
        """Returns the gradients of earlier results through this one, if they are observed."""
        self._begin()
        (end, _), (origin, _) = node.next_functions[:2]
        are_asked = not engine.will_run(end)
        is_for_results = are_asked and not any(engine.will_run(n) for n, _ in origin.next_functions)
        there = {i: tensor for i in earlier if (tensor := self.results[i]()) is not None}
        seen = [i for i, tensor in there.items() if is_for_results or engine.is_watched(tensor)]
        if are_asked:
            self._skipped.update(there.keys() - seen)
        if not seen:
            return {}
        if torch.is_grad_enabled() and not is_for_results:
            self.links.warn(
                f"What comes to {self.links.name(seen)} of a compiled module through gradients "
                "that were asked for with create_graph=True is not added to its own gradient."
            )
        found = self._derivatives(origin, place, seen, cotangent)
        handed = {i: one for i, one in zip(seen, found, strict=True) if one is not None}
        for i, one in handed.items():
            self._handed[i] = self._handed[i] + one if i in self._handed else one
        return handed

    def _derivatives(
        self,
        origin: Any,
        place: int,
        seen: Sequence[int],
        cotangent: torch.Tensor,
    ) -> list[torch.Tensor | None]:
        """Returns the gradients of a result by earlier ones, by running the forward again."""
        with torch.enable_grad(), engine.outside_of_batch([cotangent]):
            again = self._again(origin)
        known = [i for i in seen if again[i].requires_grad and again[place].requires_grad]
        if not known:
            return [None] * len(seen)
        found = torch.autograd.grad(
            again[place],
            [again[i] for i in known],
            cotangent,
            create_graph=torch.is_grad_enabled(),
            allow_unused=True,
        )
        return list(map(dict(zip(known, found, strict=True)).get, seen))

    def _begin(self) -> None:
        """Forgets what another backward passed on: it may have ended at a result."""
        if self._backward != (running := engine.current_backward()):
            self._backward = running
            self._handed, self._skipped = {}, set()


class _Result(torch.autograd.Function):
    """The identity on a result, with edges to the results that are computed before it."""

    @staticmethod
    def forward(
        ctx: Any,
        call: _Call,
        places: Sequence[int],
        end: torch.Tensor,
        result: torch.Tensor,
        *earlier: torch.Tensor,
    ) -> torch.Tensor:
        ctx.call, ctx.places = call, places
        ctx.set_materialize_grads(False)
        return engine.new_alias(result)

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor | None) -> Any:
        places = ctx.places
        if cotangent is None:  # most results have none, such as cached keys and values
            return (None,) * (len(places) + 3)
        *earlier, place = places
        own = ctx.call.own(place, cotangent)
        handed = ctx.call.through(place, own, earlier, ctx) if own is not None else {}
        return None, None, None, own, *map(handed.get, earlier)


# ---- Gradients as a program ----------------------------------------------------------------------


Run = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]


class Gradients:
    """Compiles the gradients of one program, for each request once."""

    def __init__(
        self,
        compiled: CompiledProgram,
        differentiably: Callable[[CompiledProgram], Run],
        again: Run,
    ) -> None:
        self._compiled = compiled
        self._differentiably = differentiably
        self.again = again
        self._made: dict[GradientRequest, tuple[CompiledGradients | None, Run | None]] = {}
        self._ahead: dict[GradientRequest, Ahead | None] = {}

    @property
    def interpret(self) -> Run:
        """Runs the program operator by operator."""
        return self._compiled.interpret

    @property
    def habit(self) -> Habit:
        """Predicts the gradients that the next loss asks for."""
        return self._compiled.facts.habit

    @property
    def were_differentiated(self) -> bool:
        """Whether gradients of an earlier call were differentiated: this call's likely will be."""
        return bool(self._made)

    def of(self, request: GradientRequest) -> tuple[CompiledGradients | None, Run | None]:
        """Returns the program of gradients, and a function that runs it differentiably.

        Each is None if it cannot be compiled.
        """
        assert self._compiled.gradients is not None
        # Requests differ by the cotangents that require grad, as others need no gradient.
        if request not in self._made:
            made = self._compiled.gradients(request)
            run = None
            if made is not None and made.compiled.derivative is not None:
                run = self._differentiably(made.compiled)
            self._made[request] = made, run
        return self._made[request]

    def ahead(self) -> Ahead | None:
        """Returns a runner of the forward along with the gradients that the next loss will want."""
        request = self.habit.expected
        if request is None:
            return None
        if request not in self._ahead:
            self._ahead[request] = self._made_ahead(request)
        if self._ahead[request] is None:
            self.habit.miss()
        return self._ahead[request]

    def _made_ahead(self, request: GradientRequest) -> Ahead | None:
        program, roots = self._compiled.captured.program, self._compiled.facts.view_roots
        # Results get separate nodes, so no two may share memory: one may be changed in-place.
        if any(isinstance(root, int) or roots.count(root) > 1 for root in roots):
            return None
        # Other gradients may need a second run of the forward.
        draws, others = self._compiled.facts.draws, len(program.outputs) - len(request.outputs)
        if program.writes or (not request.is_differentiated and (draws or others)):
            return None
        try:
            made, run = self.of(request)
        except Exception:  # the forward then runs without gradients, as before
            return None
        if made is None:
            return None
        if made.gradients.outputs != request.outputs or (run is None) == request.is_differentiated:
            return None
        if run is None:
            forward = made.compiled.runtime.forward
            run = torch.no_grad()(lambda inputs: forward(inputs)[0])
        derivative = self._compiled.derivative
        assert derivative is not None
        wanted = derivative.gradient_inputs
        return Ahead(self._compiled, request, made, wanted, run, self.again)


@dataclass(frozen=True)
class FirstBackward:
    """A backward that ran under ``create_graph=True``."""

    gradients: Gradients
    outputs: tuple[int, ...]  # that had a cotangent
    asked: tuple[int, ...]  # inputs whose gradients were wanted
    drawn_from: engine.GeneratorStates | None  # before the forward, if it drew numbers

    def run(
        self, inputs: Sequence[torch.Tensor], cotangents: Sequence[torch.Tensor]
    ) -> Mapping[int, torch.Tensor] | None:
        """Returns the gradient of each input that has one, differentiably.

        Runs the program of gradients, compiled if need be. Returns None if the gradients depend on
        nothing that requires grad.
        """
        moving = tuple(o for o, c in zip(self.outputs, cotangents, strict=True) if c.requires_grad)
        request = GradientRequest(self.outputs, moving, self.asked)
        made, run = self.gradients.of(request)
        if made is None:
            given, run = dict(zip(self.outputs, cotangents, strict=True)), self.gradients.interpret
            with torch.enable_grad():
                return by_pytorch(run, inputs, self.asked, given, self.drawn_from)
        if run is None:
            return None
        self.gradients.habit.note(None if moving else request)
        program = made.gradients
        seeded = zip(self.outputs, cotangents, strict=True)
        used = [cotangent for output, cotangent in seeded if output in program.outputs]
        with torch.enable_grad(), drawing(self.drawn_from):
            laid = list(map(engine.cotangent_like, made.cotangent_types, used))
            *_, results = program.taken_apart(run([*inputs, *laid]))
        return dict(zip(program.inputs, results, strict=True))

    def differentiable(
        self,
        results: Mapping[int, torch.Tensor],
        inputs: Sequence[torch.Tensor],
        cotangents: Sequence[torch.Tensor],
    ) -> tuple[torch.Tensor, ...]:
        """Returns gradients that were computed already, behind a node with their derivatives."""
        return _Gradients.apply(self, results, len(inputs), *inputs, *cotangents)

    def differentiated(
        self,
        inputs: Sequence[torch.Tensor],
        cotangents: Sequence[torch.Tensor],
        seeds: Mapping[int, torch.Tensor | None],
    ) -> list[torch.Tensor | None]:
        """Returns gradients of the gradients, for each input and each cotangent."""
        with torch.enable_grad():
            # Views, because a cotangent may depend on an input, and these derivatives must be
            # partial ones.
            operands = [x.view_as(x) if x.requires_grad else x for x in (*inputs, *cotangents)]
        gradients = self.run(operands[: len(inputs)], operands[len(inputs) :]) or {}
        flowing = [
            (gradients[index], seed)
            for index, seed in seeds.items()
            if seed is not None and index in gradients and gradients[index].requires_grad
        ]
        sources = [x for x in operands if x.requires_grad]
        if not flowing or not sources:
            return [None] * len(operands)
        found = iter(
            torch.autograd.grad(
                [result for result, _ in flowing],
                sources,
                [seed for _, seed in flowing],
                create_graph=torch.is_grad_enabled(),
                allow_unused=True,
            )
        )
        return [next(found) if x.requires_grad else None for x in operands]


def by_pytorch(
    run: Run,
    inputs: Sequence[torch.Tensor],
    asked: Iterable[int],
    cotangents: Mapping[int, torch.Tensor],
    drawn_from: engine.GeneratorStates | None,
) -> dict[int, torch.Tensor]:
    """Runs a forward under PyTorch's autograd; returns the gradients of inputs that have one."""
    wanted = [i for i in asked if inputs[i].requires_grad]
    with torch.enable_grad(), engine.outside_of_batch([*cotangents.values()]), drawing(drawn_from):
        results = run(inputs)
    flowing = {output: c for output, c in cotangents.items() if results[output].requires_grad}
    if not flowing or not wanted:
        return {}
    found = torch.autograd.grad(
        [results[output] for output in flowing],
        [inputs[i] for i in wanted],
        [*flowing.values()],
        create_graph=torch.is_grad_enabled(),
        allow_unused=True,
    )
    return {i: one for i, one in zip(wanted, found, strict=True) if one is not None}


def drawing(drawn_from: engine.GeneratorStates | None) -> AbstractContextManager[None]:
    """Makes code inside draw the random numbers that a forward drew, if it drew any."""
    return nullcontext() if drawn_from is None else drawn_from.again()


class _Gradients(torch.autograd.Function):
    """The identity on gradients, with a backward that computes their derivatives."""

    @staticmethod
    def forward(
        ctx: Any,
        first: FirstBackward,
        results: Mapping[int, torch.Tensor],
        num_inputs: int,
        *operands: torch.Tensor,
    ) -> Any:
        ctx.first, ctx.num_inputs, ctx.wanted = first, num_inputs, tuple(results)
        ctx.save_for_backward(*operands)
        ctx.set_materialize_grads(False)
        return tuple(results.values())

    @staticmethod
    def backward(ctx: Any, *seeds: torch.Tensor | None) -> Any:
        operands = ctx.saved_tensors
        inputs, cotangents = operands[: ctx.num_inputs], operands[ctx.num_inputs :]
        wanted = dict(zip(ctx.wanted, seeds, strict=True))
        return (None, None, None, *ctx.first.differentiated(inputs, cotangents, wanted))


# ---- gradients along with the forward, before a loss asks ----------------------------------------


class Ahead:
    """Runs a forward together with gradients of its results, for cotangents of ones.

    ``run`` runs the program of both, ``made``, and ``again`` the forward alone, for other gradients
    of the inputs ``wanted``. The habit of ``forward`` notes whether the gradients were used.
    """

    def __init__(
        self,
        forward: CompiledProgram,
        request: GradientRequest,
        made: CompiledGradients,
        wanted: Sequence[int],
        run: Run,
        again: Run,
    ) -> None:
        self.habit, self.request, self.wanted = forward.facts.habit, request, wanted
        self._forward, self._program = forward, made.gradients
        self._run, self._again = run, again
        self._ones = [engine.cotangent_like(type_).fill_(1) for type_ in made.cotangent_types]
        self._draws = made.compiled.facts.draws

    def run(self, inputs: Sequence[torch.Tensor]) -> tuple[Sequence[torch.Tensor], Again] | None:
        """Returns the results, whose backward has the gradients, and what runs the forward again.

        None if the gradients cannot be computed ahead for these inputs.
        """
        drawn_from = engine.GeneratorStates(x.device for x in inputs) if self._draws else None
        flight = _Flight(self, inputs, [], drawn_from)
        try:
            flight.versions = versions_of(inputs)
        except RuntimeError:  # inference tensors have no version counter
            return None
        self.habit.begin()
        found, gradients = self._program.taken_apart(self._run([*inputs, *self._ones]))
        results, outputs = list(found), self.request.outputs
        own = [results[output] for output in outputs]
        wanted = [inputs[i] for i in self.wanted]
        for output, copied in zip(
            outputs, _Ahead.apply(flight, *own, *gradients, *wanted), strict=True
        ):
            results[output] = copied

        def again(node: Any) -> Sequence[torch.Tensor]:
            with drawing(drawn_from):
                return self._forward.interpret(self._operands(flight))

        return results, again

    def gradients(
        self, known: Sequence[torch.Tensor], cotangents: Sequence[torch.Tensor]
    ) -> dict[int, torch.Tensor] | None:
        """Returns the gradients for these cotangents; None unless the known ones give them."""
        first, rest = cotangents[0], cotangents[1:]
        if first.dim() == 0 and not rest:  # gradients are linear in a scalar cotangent
            found = [gradient * first for gradient in known]
        elif all(_is_one(cotangent) for cotangent in cotangents):
            found = [gradient.clone() for gradient in known]
        else:
            return None
        return dict(zip(self._program.inputs, found, strict=True))

    def by_second_run(
        self, flight: _Flight, cotangents: Sequence[torch.Tensor | None]
    ) -> Sequence[torch.Tensor | None]:
        """Returns the gradients of all inputs that require grad, by running the forward again."""
        given = zip(self.request.outputs, cotangents, strict=True)
        seeds = {output: seed for output, seed in given if seed is not None}
        operands = self._operands(flight)
        found = by_pytorch(self._again, operands, self.wanted, seeds, flight.drawn_from)
        return [found.get(i) for i in self.wanted]

    def _operands(self, flight: _Flight) -> list[torch.Tensor]:
        """Returns views of the forward's inputs, checked to be unchanged, to differentiate by."""
        operands = list(map(unchanged, flight.inputs, flight.versions))
        with torch.enable_grad():
            operands = [x.view_as(x) if x.requires_grad else x for x in operands]
        for index in self.wanted:
            if not operands[index].requires_grad:  # frozen since the forward
                operands[index] = operands[index].detach().requires_grad_()
        return operands


def _is_one(cotangent: torch.Tensor) -> bool:
    """Whether a cotangent is known to be all ones; not tested on a GPU, which would synchronize."""
    is_plain = cotangent.device.type == "cpu" and not cotangent.requires_grad
    return is_plain and bool((cotangent == 1).all())


@dataclass
class _Flight:
    """One forward that ran with gradients, until its backward is done."""

    ahead: Ahead
    inputs: Sequence[torch.Tensor]
    versions: Sequence[int]
    drawn_from: engine.GeneratorStates | None
    is_used: bool = False


class _Ahead(torch.autograd.Function):
    """Copies results, with a backward that returns the gradients computed along with them."""

    @staticmethod
    def forward(ctx: Any, flight: _Flight, *tensors: torch.Tensor) -> Any:
        num, num_wanted = len(flight.ahead.request.outputs), len(flight.ahead.wanted)
        ctx.flight, ctx.num_made = flight, len(tensors) - num_wanted
        ctx.save_for_backward(*tensors[num : ctx.num_made])
        ctx.set_materialize_grads(False)
        return tuple(result.clone() for result in tensors[:num])

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> Any:
        flight, known = ctx.flight, ctx.saved_tensors
        ahead, wanted = flight.ahead, flight.ahead.wanted
        none, nowhere = [None] * ctx.num_made, [None] * len(wanted)
        is_kept, is_differentiated = engine.graph_is_kept(), ahead.request.is_differentiated
        given = [c for c in cotangents if c is not None]
        edges = zip(wanted, ctx.next_functions[ctx.num_made :], strict=True)
        others = (node for index, (node, _) in edges if index not in ahead.request.inputs)
        may_serve = len(given) == len(cotangents) and not engine.are_batched(given)
        may_serve = may_serve and (is_differentiated or not torch.is_grad_enabled())
        if may_serve and not any(map(engine.will_run, others)):
            found = ahead.gradients(known, given)
            if found is not None:
                flight.is_used = True
                ahead.habit.hit()
                flight.inputs = flight.inputs if is_kept else ()
                return None, *none, *map(found.get, wanted)
        if not flight.is_used:
            ahead.habit.miss()
        if is_differentiated and not torch.is_grad_enabled():
            return None, *cotangents, *none[len(cotangents) :], *nowhere
        return None, *none, *ahead.by_second_run(flight, cotangents)
