"""Lists what a derivative saves and what its backward computes again, closure by closure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch.fx

from ..autodiff.derivative import Cut, Derivative, Differentiator, PerCall, Request, Whole
from ..autodiff.traces.torch_make_fx import SizesAt
from ..autodiff.traces.torch_partition import ancestors
from ..reuse.ir.costs import flops, is_free, is_heavy
from ..reuse.ir.leaf import flat_types
from ..reuse.ir.program import Closure, Composite, Leaf, outputs_of
from ..reuse.ir.types import TensorType
from ..reuse.torch_names import RESHAPES


@dataclass(frozen=True)
class SavedTensor:
    """One tensor that a call keeps for its backward."""

    name: str
    type: TensorType

    def __str__(self) -> str:
        return f"{self.name} {self.type}"


@dataclass(frozen=True)
class RecomputeRecord:
    """One closure under one choice.

    Attributes:
        closure: its name.
        choice: ``"as the backend saves"``, ``"cut"``, ``"called again"``.
        num_calls: calls with this choice.
        saved: the tensors that one call saves (what is handed over is not among them).
        saved_bytes: their bytes.
        recomputed: operators that the backward runs again, with how often.
        recomputed_flops: FLOPs of the matrix products and attentions among them.
        offloaded_bytes: those of the saved bytes that wait on the host.
    """

    closure: str
    choice: str
    num_calls: int
    saved: tuple[SavedTensor, ...]
    saved_bytes: int
    recomputed: tuple[tuple[str, int], ...]
    recomputed_flops: int
    offloaded_bytes: int = 0

    def __str__(self) -> str:
        saved = ", ".join(map(str, self.saved)) or "nothing"
        again = ", ".join(f"{n} {op}" for op, n in self.recomputed) or "nothing"
        on_host = f", {self.offloaded_bytes} of them on the host" if self.offloaded_bytes else ""
        return (
            f"@{self.closure}, {self.num_calls} calls, {self.choice}\n"
            f"  saved per call       {self.saved_bytes:>12} bytes{on_host}: {saved}\n"
            f"  recomputed per call  {self.recomputed_flops:>12} FLOPs: {again}"
        )


def summarize(
    differentiator: Differentiator, request: Request, sizes: SizesAt
) -> list[RecomputeRecord]:
    """Returns a record for each closure and choice below a program, in order of first call."""
    counts: Counter[Request] = Counter()
    _count(differentiator, request, 1, counts)
    records = []
    for asked, num_calls in counts.items():
        derivative = differentiator.of(asked)
        if derivative is not None:
            records.append(_record(asked, derivative, num_calls, sizes))
    return records


def _count(make: Differentiator, request: Request, times: int, counts: Counter[Request]) -> None:
    """Counts the calls of leaves, and of programs that are called again whole."""
    if isinstance(request.closure, Leaf) or isinstance(request.choice, Whole):
        counts[request] += times
        return
    # Equal calls are counted and not walked: the cost is per different request.
    below = Counter(site for site in make.sites(request) if site is not None)
    for asked, number in below.items():
        _count(make, asked, times * number, counts)


def _record(
    request: Request, derivative: Derivative, num_calls: int, sizes: SizesAt
) -> RecomputeRecord:
    choice = "as the backend saves"
    if request.choice is not None:
        choice = "cut" if isinstance(request.choice, (Cut, PerCall)) else "called again"
    again = list(_computed_again(derivative, sizes))
    work = [n for n in again if not (is_free(n) or n.target in RESHAPES)]
    names = Counter(str(n.target).removeprefix("aten.").split(".")[0] for n in work)
    return RecomputeRecord(
        request.closure.name,
        choice,
        num_calls,
        tuple(_saved(request, derivative, sizes)),
        sizes.num_bytes(derivative.saved_type),
        tuple(names.most_common()),
        sum(flops(n) for n in again if is_heavy(n)),
        sum(sizes.num_bytes(derivative.saved_type.fields[i]) for i in derivative.offloaded),
    )


def _saved(request: Request, derivative: Derivative, sizes: SizesAt) -> Iterator[SavedTensor]:
    types = flat_types([sizes.type(derivative.saved_type)])
    if not isinstance(derivative.forward, Leaf):
        name = "row" if isinstance(request.closure, Leaf) else "draw"
        yield from (SavedTensor(f"{name}{i}", t) for i, t in enumerate(types))
        return
    outputs = outputs_of(derivative.forward.module)
    for node, type_ in zip(outputs[len(outputs) - len(types) :], types, strict=True):
        yield SavedTensor(node.name, type_)


def _computed_again(derivative: Derivative, sizes: SizesAt) -> Iterator[torch.fx.Node]:
    """Yields the operators of the backward that the forward's results already needed."""
    if isinstance(derivative.backward, Composite):
        first = derivative.backward.program.calls[0]
        yield from _operators(first.closure, sizes)
        return
    assert isinstance(derivative.backward, Leaf)
    assert isinstance(derivative.forward, Leaf)
    count = len(derivative.forward.output_types) - 1
    results = outputs_of(derivative.forward.module)[:count]
    reached = ancestors(n for n in results if isinstance(n, torch.fx.Node))
    # Forward and backward are cuts of one joint graph, and nodes kept their names.
    known = {n.name: n.target for n in reached}
    for node in sizes.leaf(derivative.backward).nodes:
        if known.get(node.name) == node.target:
            yield node


def _operators(closure: Closure, sizes: SizesAt) -> Iterator[torch.fx.Node]:
    if isinstance(closure, Leaf):
        yield from sizes.leaf(closure).nodes
    elif isinstance(closure, Composite):
        for call in closure.program.calls:
            yield from _operators(call.closure, sizes)
