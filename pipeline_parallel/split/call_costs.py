"""What calls cost: predicted seconds, FLOPs and bytes, once per different closure.

The prediction is a roofline: operators that multiply matrices run at the device's arithmetic rate,
everything else at its memory rate. Only ratios matter for balancing stages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ...autodiff.derivative import Differentiator, Request
from ...autodiff.traces.torch_fake_inputs import fake_tensor, new_fake_mode
from ...reuse.ir.leaf import ModalInterpreter, flat_types, is_view
from ...reuse.ir.program import Call, Closure, Composite, Leaf, ModelTensor, Program, Value


@dataclass(frozen=True)
class DeviceRates:
    """What a device sustains.

    Attributes:
        flops_per_s: of matrix products.
        bytes_per_s: of memory traffic.
        transfer_bytes_per_s: between two ranks.
        transfer_latency_s: of one transfer.
    """

    flops_per_s: float
    bytes_per_s: float
    transfer_bytes_per_s: float
    transfer_latency_s: float


CPU_RATES = DeviceRates(4e10, 8e9, 2e9, 1e-4)
CUDA_RATES = DeviceRates(3e14, 2e12, 5e10, 1e-5)


TradeOffs = Callable[[Request], Sequence[tuple[int, float]]]
"""What one call may save, and the seconds that it then computes again; fewest bytes first."""


@dataclass(frozen=True)
class Cost:
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


class CostModel:
    """Predicts; looks at each closure once.

    Args:
        differentiator: whose derivatives the calls will run with.
        rates: of the device.
        trade_offs: what calls may compute again; without it they save what they save.
    """

    def __init__(
        self,
        differentiator: Differentiator,
        rates: DeviceRates,
        trade_offs: TradeOffs | None = None,
    ) -> None:
        self._differentiator = differentiator
        self._trade_offs = trade_offs
        self._rates = rates
        self._closures: dict[Closure, tuple[float, int]] = {}

    def program(self, program: Program) -> tuple[float, int]:
        """Returns predicted seconds and FLOPs of a program."""
        costs = [self._closure(call.closure) for call in program.calls]
        return sum(s for s, _ in costs), sum(f for _, f in costs)

    def calls(self, program: Program) -> list[Cost]:
        """Returns the cost of each call of a captured program, forward and backward."""
        active: set[Value] = set()
        for value, source in zip(program.inputs, program.sources, strict=True):
            if isinstance(source, ModelTensor) and source.tensor.requires_grad:
                active.add(value)
        return self._body(program, active)

    def units(self, program: Program, opened: set[tuple[int, ...]]) -> list[Cost]:
        """Returns the cost of each unit (see ``coloring.units_of``)."""
        costs: list[Cost] = []
        whole = self.calls(program)

        def visit(body: Program, prefix: tuple[int, ...], known: list[Cost]) -> None:
            for index, (call, cost) in enumerate(zip(body.calls, known, strict=True)):
                path = (*prefix, index)
                if path in opened and isinstance(call.closure, Composite):
                    inner = call.closure.program
                    visit(inner, path, self._body(inner, set(inner.inputs)))
                else:
                    costs.append(cost)

        visit(program, (), whole)
        return costs

    def _body(self, program: Program, active: set[Value]) -> list[Cost]:
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

    def _call(self, call: Call, request: Request, made: set[Value]) -> Cost:
        derivative = self._differentiator.of(request)
        if derivative is None:
            seconds, flops = self._closure(call.closure)
            return Cost(seconds, 0.0, flops)
        forward_s, forward_flops = self._closure(derivative.forward)
        backward_s, backward_flops = self._closure(derivative.backward)
        kept = {call.args[i] for i in derivative.kept_inputs} & made
        variants: Sequence[tuple[int, float]] = [(derivative.saved_type.num_bytes, 0.0)]
        if self._trade_offs is not None:
            variants = self._trade_offs(request)
        return Cost(
            forward_s,
            backward_s,
            forward_flops + backward_flops,
            sum(v.type.num_bytes for v in kept),
            tuple(variants),
        )

    def _closure(self, closure: Closure) -> tuple[float, int]:
        if closure not in self._closures:
            self._closures[closure] = self._measure(closure)
        return self._closures[closure]

    def _measure(self, closure: Closure) -> tuple[float, int]:
        if isinstance(closure, Composite):
            return self.program(closure.program)
        if not isinstance(closure, Leaf):
            return 0.0, 0
        flops, moved = leaf_flops(closure), leaf_bytes(closure)
        return flops / self._rates.flops_per_s + moved / self._rates.bytes_per_s, flops


def leaf_flops(leaf: Leaf) -> int:
    """Returns the FLOPs of a leaf, counted by PyTorch on fake tensors."""
    mode = new_fake_mode()
    from torch.utils.flop_counter import FlopCounterMode  # it imports Triton

    inputs = [fake_tensor(mode, t) for t in flat_types(leaf.input_types)]
    counter = FlopCounterMode(display=False)
    with mode, torch.no_grad(), counter:
        ModalInterpreter(leaf.module).run_flat(inputs)
    return int(counter.get_total_flops())


def leaf_bytes(leaf: Leaf) -> int:
    """Returns the bytes that a leaf's operators read and write; views move nothing."""
    total = 0
    for node in leaf.nodes:
        if not is_view(node):
            total += sum(map(_num_bytes, (node, *node.all_input_nodes)))
    return total


def _num_bytes(node: torch.fx.Node) -> int:
    value = node.meta.get("val")
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0
