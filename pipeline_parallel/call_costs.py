"""Costs of calls, forward and backward, and what else each call may save.

Their programs are counted as all others (:mod:`..reuse.ir.costs`). Only ratios matter for
balancing stages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..autodiff.derivative import Differentiator, Request
from ..reuse.ir.costs import Cost, ProgramCosts
from ..reuse.ir.program import Call, Composite, ModelTensor, Program, Value

TradeOffs = Callable[[Request], Sequence[tuple[int, float]]]
"""Returns bytes that one call may save and seconds that it then computes again, fewest first."""


@dataclass(frozen=True)
class CallCost:
    """Of one call.

    Attributes:
        forward_s, backward_s: predicted seconds.
        flops: of both.
        kept_bytes: what the call is handed and its backward needs, per micro-batch in flight.
        variants: what else it may save per micro-batch, and the seconds computed again for it;
            fewest bytes first.
    """

    forward_s: float = 0.0
    backward_s: float = 0.0
    flops: int = 0
    kept_bytes: int = 0
    variants: tuple[tuple[int, float], ...] = ((0, 0.0),)


class CallCosts:
    """Predicts what calls cost with their derivatives.

    Args:
        differentiator: whose derivatives the calls will run with.
        costs: of programs, on the device.
        trade_offs: what calls may compute again; without it they save what they save.
    """

    def __init__(
        self,
        differentiator: Differentiator,
        costs: ProgramCosts,
        trade_offs: TradeOffs | None = None,
    ) -> None:
        self._differentiator = differentiator
        self._trade_offs = trade_offs
        self._costs = costs

    def program(self, program: Program) -> Cost:
        """Returns the cost of a program."""
        return self._costs.program(program)

    def calls(self, program: Program) -> list[CallCost]:
        """Returns the cost of each call of a captured program, forward and backward."""
        active: set[Value] = set()
        for value, source in zip(program.inputs, program.sources, strict=True):
            if isinstance(source, ModelTensor) and source.tensor.requires_grad:
                active.add(value)
        return self._body(program, active)

    def units(self, program: Program, opened: set[tuple[int, ...]]) -> list[CallCost]:
        """Returns the cost of each unit (see ``coloring.units_of``)."""
        costs: list[CallCost] = []
        whole = self.calls(program)

        def visit(body: Program, prefix: tuple[int, ...], known: list[CallCost]) -> None:
            for index, (call, cost) in enumerate(zip(body.calls, known, strict=True)):
                path = (*prefix, index)
                if path in opened and isinstance(call.closure, Composite):
                    inner = call.closure.program
                    visit(inner, path, self._body(inner, set(inner.inputs)))
                else:
                    costs.append(cost)

        visit(program, (), whole)
        return costs

    def _body(self, program: Program, active: set[Value]) -> list[CallCost]:
        """Costs of a body's calls; ``active`` are values with a gradient, and grows."""
        costs = []
        made: set[Value] = set()
        for call in program.calls:
            wanted = [i for i, v in enumerate(call.args) if v in active]
            flags = [v in active for v in call.args]
            results = self._differentiator.active_outputs(call.closure, flags) if wanted else ()
            active.update(v for v, flag in zip(call.results, results, strict=False) if flag)
            seeded = [i for i, flag in enumerate(results) if flag]
            request = Request(call.closure, tuple(wanted), tuple(seeded))
            costs.append(self._call(call, request, made))
            made.update(call.results)
        return costs

    def _call(self, call: Call, request: Request, made: set[Value]) -> CallCost:
        derivative = self._differentiator.of(request)
        if derivative is None:
            alone = self._costs.closure(call.closure)
            return CallCost(alone.seconds, 0.0, alone.flops)
        forward = self._costs.closure(derivative.forward)
        backward = self._costs.closure(derivative.backward)
        # Parameters are there in any case; what another call made is kept alive for this one.
        kept = {call.args[i] for i in derivative.kept_inputs} & made
        variants: Sequence[tuple[int, float]] = [(derivative.saved_type.num_bytes, 0.0)]
        if self._trade_offs is not None:
            variants = self._trade_offs(request)
        return CallCost(
            forward.seconds,
            backward.seconds,
            forward.flops + backward.flops,
            sum(v.type.num_bytes for v in kept),
            tuple(variants),
        )
