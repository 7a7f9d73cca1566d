"""Which calls lead from some values to others, and whether all of them are seen."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ...reuse.errors import CaptureError
from ...reuse.ir.program import Call, Leaf, Value, outputs_of
from .derivation import Asked, AskedSeries


def calls_between(
    calls: Sequence[Call], inputs: Collection[Value], outputs: Collection[Value]
) -> list[Call]:
    """Returns the calls that lead from some values to others, in their order."""
    active, reached = set(inputs), []
    for call in calls:
        if not active.isdisjoint(call.args):
            active.update(call.results)
            reached.append(call)
    needed, between = set(outputs), []
    for call in reversed(reached):
        if not needed.isdisjoint(call.results):
            needed.update(call.args)
            between.append(call)
    return between[::-1]


def refuse_hidden_paths(
    calls: Sequence[Call],
    inputs: Collection[Value],
    asked: Asked | AskedSeries,
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
    needed = set(asked.outputs)
    for call in reversed(calls):
        if not needed.isdisjoint(call.results):
            needed.update(call.args)
    beside = [v for v in may_depend if v in needed and v not in wanted]
    if beside and not wanted.isdisjoint(inputs):
        raise CaptureError(
            f"The derivative at {asked.source} is by a tensor that was passed in, beside others "
            "that may have been computed from it. Take x.view_as(x) first, and the derivative by "
            "that; or use lazyinline.func.grad."
        )
    for call in calls:
        for value in wanted.intersection(call.results):
            if any(_may_be_of(call, r, value) for r in call.results if r in needed):
                raise CaptureError(
                    f"The derivative at {asked.source} is by a tensor from inside "
                    f"{call.closure.name}, which also returns what it computes of it."
                )


def _may_be_of(call: Call, result: Value, value: Value) -> bool:
    """Whether one result of a call may be computed from another."""
    if result is value:
        return False
    if not isinstance(call.closure, Leaf):
        return True
    nodes = dict(zip(call.results, outputs_of(call.closure.module), strict=True))
    seen, pending = {nodes[result]}, [nodes[result]]
    while pending:
        new = [n for n in pending.pop().all_input_nodes if n not in seen]
        seen.update(new)
        pending += new
    return nodes[value] in seen
