"""Marks in a captured program the derivatives that its forward takes, and finds their calls.

``torch.autograd.grad`` in a forward names values: outputs, inputs, cotangents; a series along
lines names outputs, inputs, directions. :mod:`.inner_gradients` replaces each mark by calls that
compute it: those between the outputs and the inputs, differentiated.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch.fx

from ...reuse.errors import CaptureError
from ...reuse.ir.leaf import stamp_of
from ...reuse.ir.program import Call, Leaf, Program, Value, outputs_of, walk_closures
from ..flows import needed_calls
from ..forward_mode.series import Series
from ..traces.joint_cut import ancestors


@dataclass(frozen=True)
class DerivativeMark:
    """Marks derivatives that a forward takes: a leaf's one operator, which is never run.

    It takes outputs, inputs and a cotangent of each output, and gives the gradient of each input.
    With a series it takes outputs, inputs and the directions of each input, and gives the Taylor
    coefficients of each output, order by order.
    """

    num_outputs: int
    num_inputs: int
    series: Series | None = None

    @property
    def __name__(self) -> str:
        return "gradient" if self.series is None else "series"

    def __call__(self, *operands: Any) -> Any:
        """Raises AssertionError."""
        raise AssertionError(f"a {self.__name__} that a forward takes was not made")


@dataclass(frozen=True)
class DerivativeCall:
    """Names the derivatives that a marked call has to become.

    Attributes:
        outputs: the values that are differentiated.
        inputs: the values with respect to which they are.
        seeds: a cotangent of each output; for a series the directions of each input.
        series: which coefficients; None for gradients.
        results: the number of the derivative, and the value that it has to become.
        source: the user's line.
    """

    outputs: tuple[Value, ...]
    inputs: tuple[Value, ...]
    seeds: tuple[Value, ...]
    series: Series | None
    results: tuple[tuple[int, Value], ...]
    source: str


def takes_gradients(program: Program) -> bool:
    """Returns whether a forward takes a gradient, anywhere in it."""
    leaves = (c for c in walk_closures(program) if isinstance(c, Leaf))
    return any(_derivation(leaf) is not None for leaf in leaves)


def derivative_call(call: Call) -> DerivativeCall | None:
    """Returns what a call asks for, if its closure is the mark of a derivative."""
    node = _derivation(call.closure) if isinstance(call.closure, Leaf) else None
    if node is None:
        return None
    assert isinstance(call.closure, Leaf)
    target = node.target
    assert isinstance(target, DerivativeMark)
    env = dict(zip(call.closure.entries, call.args, strict=True))
    operands = tuple(env[n] for n in node.args)  # type: ignore[index]
    source = stamp_of(node).source
    picked = [int(n.args[1]) for n in _returned(call.closure)]  # type: ignore[arg-type]
    results = list(zip(picked, call.results, strict=True))
    first, second = target.num_outputs, target.num_outputs + target.num_inputs
    parts = operands[:first], operands[first:second], operands[second:]
    return DerivativeCall(*parts, target.series, tuple(results), source)


def _derivation(leaf: Leaf) -> torch.fx.Node | None:
    return next((n for n in leaf.nodes if isinstance(n.target, DerivativeMark)), None)


def _returned(leaf: Leaf) -> list[torch.fx.Node]:
    picks = outputs_of(leaf.module)
    assert all(n.target is operator.getitem for n in picks)
    return picks


def calls_between(
    calls: Sequence[Call], inputs: Collection[Value], outputs: Collection[Value]
) -> list[Call]:
    """Returns the calls that lead from some values to others, in their order."""
    active, reached = set(inputs), []
    for call in calls:
        if not active.isdisjoint(call.args):
            active.update(call.results)
            reached.append(call)
    return needed_calls(reached, outputs)


def refuse_hidden_paths(
    calls: Sequence[Call],
    inputs: Collection[Value],
    asked: DerivativeCall,
    may_depend: Collection[Value],
) -> None:
    """Raises CaptureError where an output may depend on an input in a way that no call shows.

    Args:
        calls: those before the gradient.
        inputs: of the program.
        asked: the gradient.
        may_depend: program inputs that may be functions of other inputs.
    """
    wanted = set(asked.inputs)
    between = calls_between(calls, wanted, asked.outputs)
    if any(result in wanted for call in between for result in call.results):
        raise CaptureError(
            f"The derivative at {asked.source} is by two tensors of which one is computed from the "
            "other, which cannot be followed. Ask for them one by one."
        )
    # Inputs of the program may depend on one another outside of it, where no call shows.
    needed = set(asked.outputs)
    needed.update(v for call in needed_calls(calls, asked.outputs) for v in call.args)
    beside = [v for v in may_depend if v in needed and v not in wanted]
    if beside and not wanted.isdisjoint(inputs):
        raise CaptureError(
            f"The derivative at {asked.source} is by a tensor that was passed in, together with "
            "others that may have been computed from it. Take x.view_as(x) first, and the "
            "derivative by that; or use lazyinline.func.grad."
        )
    for call in calls:
        for value in wanted.intersection(call.results):
            if any(_may_be_of(call, r, value) for r in call.results if r in needed):
                raise CaptureError(
                    f"The derivative at {asked.source} is by a tensor from inside "
                    f"{call.closure.name}, which also returns what it computes of it."
                )


def _may_be_of(call: Call, result: Value, value: Value) -> bool:
    """Returns whether one result of a call may be computed from another."""
    if result is value:
        return False
    if not isinstance(call.closure, Leaf):
        return True
    nodes = dict(zip(call.results, outputs_of(call.closure.module), strict=True))
    return nodes[value] in ancestors([nodes[result]])
