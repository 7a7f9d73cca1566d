"""Operators that repeat in a leaf become calls on one closure: equal layers that nobody marked.

A derivative has many times the operators of what it is of, and one more order many times those. So
where a forward takes derivatives it pays to look even for two operators, a linear map and its
activation, that stand several times one behind the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.fx

from ...reuse.ir.leaf import FullKey, cut_leaf, leaf_key, node_type, stamp_of
from ...reuse.ir.operators import mutated_args
from ...reuse.ir.program import Call, Closure, Composite, Leaf, Program, Value, outputs_of
from ...reuse.ir.types import TensorType

_MAX_NODES = 4000  # the search takes the square of their number

_aten = torch.ops.aten
_PRODUCTS = frozenset(
    [
        _aten.linear.default,
        _aten.matmul.default,
        _aten.mm.default,
        _aten.addmm.default,
        _aten.bmm.default,
        _aten.convolution.default,
    ]
)


class Repeats:
    """Takes leaves apart where operators repeat, each leaf once."""

    def __init__(self) -> None:
        self._bodies: dict[Leaf, list[_Part] | None] = {}
        self._closures: dict[Closure, Closure] = {}
        self._leaves: dict[FullKey, Leaf] = {}

    def program(self, program: Program) -> Program:
        """Returns the program with calls in the place of what repeats; the same if nothing does."""
        calls = [new for call in program.calls for new in self._called(call)]
        if len(calls) == len(program.calls) and all(map(_is_same, calls, program.calls)):
            return program
        return replace(program, calls=tuple(calls))

    def _called(self, call: Call) -> list[Call]:
        if isinstance(call.closure, Composite):
            return [replace(call, closure=self._composite(call.closure))]
        parts = self._parts(call.closure) if isinstance(call.closure, Leaf) else None
        if parts is None:
            return [call]
        assert isinstance(call.closure, Leaf)
        env = dict(zip(call.closure.entries, call.args, strict=True))
        env.update(zip(outputs_of(call.closure.module), call.results, strict=True))
        calls = []
        for part in parts:
            args = tuple(env[n] for n in part.inputs)
            for node in part.outputs:
                env.setdefault(node, Value(node_type(node), node.name))
            results = tuple(env[n] for n in part.outputs)
            calls.append(Call(part.leaf, args, results, call.path, call.recompute))
        return calls

    def _composite(self, closure: Composite) -> Closure:
        if closure not in self._closures:
            program = self.program(closure.program)
            is_same = program is closure.program
            self._closures[closure] = closure if is_same else replace(closure, program=program)
        return self._closures[closure]

    def _parts(self, leaf: Leaf) -> list[_Part] | None:
        if leaf not in self._bodies:
            runs = list(_runs(leaf.nodes)) if _may_be_cut(leaf) else []
            cut = [_Part.cut(leaf, nodes) for nodes in runs]
            parts = [replace(p, leaf=self._shared(p.leaf)) for p in cut]
            self._bodies[leaf] = parts if len(parts) > 1 else None
        return self._bodies[leaf]

    def _shared(self, leaf: Leaf) -> Leaf:
        return self._leaves.setdefault(FullKey(leaf_key(leaf)), leaf)


def _is_same(new: Call, old: Call) -> bool:
    return new.closure is old.closure


@dataclass(frozen=True)
class _Part:
    """Holds some operators of a leaf as a leaf, and the nodes at its boundary."""

    leaf: Leaf
    inputs: tuple[torch.fx.Node, ...]
    outputs: tuple[torch.fx.Node, ...]

    @classmethod
    def cut(cls, leaf: Leaf, nodes: Sequence[torch.fx.Node]) -> _Part:
        inside = set(nodes)
        inputs = tuple(dict.fromkeys(n for node in nodes for n in _outside(node, inside)))
        outputs = tuple(n for n in nodes if any(user not in inside for user in n.users))
        made = cut_leaf(leaf.name, nodes, inputs, outputs)
        return cls(replace(made, kernels=leaf.kernels, level=leaf.level), inputs, outputs)


def _outside(node: torch.fx.Node, inside: set[torch.fx.Node]) -> Iterator[torch.fx.Node]:
    return (n for n in node.all_input_nodes if n not in inside)


def _may_be_cut(leaf: Leaf) -> bool:
    """Returns whether a leaf is one of plain operators, whose results are different tensors."""
    nodes, results = leaf.nodes, outputs_of(leaf.module)
    types = (*leaf.input_types, *leaf.output_types)
    return (
        len(nodes) <= _MAX_NODES
        and all(n.op == "call_function" and not mutated_args(n) for n in nodes)
        and len(set(results)) == len(results)
        and set(results) <= set(nodes)
        and all(isinstance(t, TensorType) and not t.is_symbolic for t in types)
        and all(isinstance(n.meta.get("val"), torch.Tensor) for n in nodes)
    )


def _runs(nodes: Sequence[torch.fx.Node]) -> Iterator[Sequence[torch.fx.Node]]:
    """Yields the operators in runs: what repeats, each time it does, and what is between."""
    found = _longest(nodes)
    if not found:
        if nodes:
            yield nodes
        return
    first, last = found[0].start, found[-1].stop
    yield from _runs(nodes[:first])
    yield from (nodes[r.start : r.stop] for r in found)
    yield from _runs(nodes[last:])


def _longest(nodes: Sequence[torch.fx.Node]) -> list[range]:
    """Returns where operators repeat one behind the other, where that saves most.

    Among equally good ones the first that ends with a product: what it hands on lies in memory as
    the product wrote it.
    """
    labels = [_label(node) for node in nodes]
    best: tuple[int, bool] = (0, False)
    chosen: list[range] = []
    # From two on: a single operator is no closure worth a call.
    for period in range(2, len(nodes) // 2 + 1):
        for begin, end in _equal_runs(labels, period):
            for start in range(begin, min(begin + period, end - 2 * period + 1)):
                count = (end - start) // period
                ends_well = nodes[start + period - 1].target in _PRODUCTS
                score = ((count - 1) * period, ends_well)
                if score <= best:
                    continue
                places = [range(start + k * period, start + (k + 1) * period) for k in range(count)]
                equal = _really_equal(nodes, places)
                score = ((len(equal) - 1) * period, ends_well)
                if len(equal) > 1 and score > best:
                    best, chosen = score, equal
    return chosen


def _equal_runs(labels: Sequence[Any], period: int) -> Iterator[tuple[int, int]]:
    """Yields from where till where each label is that of one period earlier, or later."""
    begin = None
    for index in range(len(labels) - period + 1):
        same = index < len(labels) - period and labels[index] == labels[index + period]
        if same and begin is None:
            begin = index
        elif not same and begin is not None:
            if index - begin >= period:
                yield begin, index + period
            begin = None


def _label(node: torch.fx.Node) -> Any:
    """Returns what is equal for two operators that may do the same."""
    shapes = tuple(_shape(n) for n in (node, *node.all_input_nodes))
    stamp = stamp_of(node)
    return node.target, shapes, stamp.grad_enabled, stamp.autocast


def _shape(node: torch.fx.Node) -> Any:
    value = node.meta.get("val")
    return None if value is None else (tuple(value.shape), value.dtype)


def _really_equal(nodes: Sequence[torch.fx.Node], places: Iterable[range]) -> list[range]:
    """Returns the longest row of places whose operators are wired the same and do the same."""
    best: list[range] = []
    row: list[range] = []
    before = None
    for place in places:
        part = nodes[place.start : place.stop]
        # Without a product the operators fuse into their neighbours; a call would tear that apart.
        key = _key(part) if any(n.target in _PRODUCTS for n in part) else None
        row = [*row, place] if key is not None and key == before else [place]
        before = key
        best = max(best, row, key=len)
    return best


def _key(nodes: Sequence[torch.fx.Node]) -> FullKey:
    inside = set(nodes)
    inputs = tuple(dict.fromkeys(n for node in nodes for n in _outside(node, inside)))
    outputs = tuple(n for n in nodes if any(user not in inside for user in n.users))
    return FullKey(leaf_key(cut_leaf("", nodes, inputs, outputs)))
