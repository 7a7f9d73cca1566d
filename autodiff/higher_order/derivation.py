"""What stands in a captured program for a derivative that its forward takes, until it is made.

``torch.autograd.grad`` in a forward names values: outputs, inputs, cotangents; a series along
lines names outputs, inputs, directions. :mod:`.derive` puts the calls in their place that compute
them.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch.fx

from ...reuse.ir.leaf import stamp_of
from ...reuse.ir.program import Call, Leaf, Program, Value, outputs_of, walk_closures
from ..forward_mode.series import Series


@dataclass(frozen=True)
class Derivation:
    """The one operator of a leaf: takes outputs, inputs, and a cotangent for each output.

    It gives the gradient of each input, and is never run.
    """

    num_outputs: int
    num_inputs: int
    __name__ = "gradient"

    def __call__(self, *operands: Any) -> Any:
        """Raises AssertionError."""
        raise AssertionError("a gradient that a forward takes was not made")


@dataclass(frozen=True)
class Expansion:
    """The one operator of a leaf: takes outputs, inputs, and directions for each input.

    It gives the Taylor coefficients of each output, order by order, and is never run.
    """

    num_outputs: int
    num_inputs: int
    series: Series
    __name__ = "series"

    def __call__(self, *operands: Any) -> Any:
        """Raises AssertionError."""
        raise AssertionError("a series that a forward takes was not made")


Asking = Derivation | Expansion
"""What stands for a derivative, until it is made."""


@dataclass(frozen=True)
class Asked:
    """What a call of such a leaf asks for.

    Attributes:
        outputs: the values that gradients come from.
        inputs: the values whose gradients are asked for.
        seeds: a cotangent for each output.
        results: which input the gradient is of, and the value that it has to become.
        source: the user's line.
    """

    outputs: tuple[Value, ...]
    inputs: tuple[Value, ...]
    seeds: tuple[Value, ...]
    results: tuple[tuple[int, Value], ...]
    source: str


@dataclass(frozen=True)
class AskedSeries:
    """What a call of such a leaf asks for.

    Attributes:
        outputs: the values whose series are asked for.
        inputs: the values that move along lines.
        directions: of each input, one row per direction.
        series: which coefficients.
        results: output, order, and the value that the coefficient has to become.
        source: the user's line.
    """

    outputs: tuple[Value, ...]
    inputs: tuple[Value, ...]
    directions: tuple[Value, ...]
    series: Series
    results: tuple[tuple[Value, int, Value], ...]
    source: str


def takes_gradients(program: Program) -> bool:
    """Whether a forward takes a gradient, anywhere in it."""
    leaves = (c for c in walk_closures(program) if isinstance(c, Leaf))
    return any(_derivation(leaf) is not None for leaf in leaves)


def asked_by(call: Call) -> Asked | AskedSeries | None:
    """Returns what a call asks for, if its closure stands for a derivative."""
    node = _derivation(call.closure) if isinstance(call.closure, Leaf) else None
    if node is None:
        return None
    assert isinstance(call.closure, Leaf)
    target = node.target
    assert isinstance(target, Asking)
    env = dict(zip(call.closure.entries, call.args, strict=True))
    operands = tuple(env[n] for n in node.args)  # type: ignore[index]
    source = stamp_of(node).source
    picked = [int(n.args[1]) for n in _returned(call.closure)]  # type: ignore[arg-type]
    results = list(zip(picked, call.results, strict=True))
    first, second = target.num_outputs, target.num_outputs + target.num_inputs
    outputs, inputs, more = operands[:first], operands[first:second], operands[second:]
    if isinstance(target, Derivation):
        return Asked(outputs, inputs, more, tuple(results), source)
    orders = target.series.orders
    of = tuple((outputs[i // len(orders)], orders[i % len(orders)], v) for i, v in results)
    return AskedSeries(outputs, inputs, more, target.series, of, source)


def _derivation(leaf: Leaf) -> torch.fx.Node | None:
    return next((n for n in leaf.nodes if isinstance(n.target, Asking)), None)


def _returned(leaf: Leaf) -> list[torch.fx.Node]:
    picks = outputs_of(leaf.module)
    assert all(n.target is operator.getitem for n in picks)
    return picks
