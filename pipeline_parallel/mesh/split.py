"""Splits a local graph at its collectives, so that they overlap with other work.

A collective starts as soon as its operand is computed, and is waited for where its result is first
read; other operators run in between. Each collective, each wait, and the operators between two of
them become a leaf.

To overlap with the calls before and after as well, a graph becomes up to three closures: *ahead*
starts collectives that need only parameters, *behind* waits for results that are only returned, and
*body* is the rest. A :class:`Schedule` moves them apart. Collectives of one kind and dtype are
merged, ahead and behind.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeAlias, get_args

import torch
import torch.fx

from ...autodiff.flows import in_closure, inlined, with_operands
from ...reuse.ir import program as ir
from ...reuse.ir.leaf import cut_leaf
from ...reuse.ir.rewrite import grouped, packed, unpacked
from ...reuse.ir.types import StructType, TensorType, Type
from ...reuse.torch_names import RESHAPES
from .torch_collectives import COLLECTIVES, WAIT, started
from .torch_sharding import CASTS, LocalGraph

_ATEN, _OWN = torch.ops.aten, torch.ops.lazyinline
_GATHER, _SCATTER = _OWN.all_gather.default, _OWN.reduce_scatter.default
_EXCHANGE = _OWN.all_to_all.default
_TRANSPOSES = (_ATEN.t.default, _ATEN.permute.default, _ATEN.transpose.int)
_TAKES_PART = frozenset({*RESHAPES, *_TRANSPOSES, _ATEN.slice.Tensor})
MOVES_ONLY = frozenset({*_TAKES_PART, _ATEN.cat.default})
"""Operators that only move data: they run eagerly, without generated kernels."""
_SAME_ELEMENTS = frozenset({*_TAKES_PART, _ATEN.clone.default})
Nodes: TypeAlias = "Collection[torch.fx.Node]"


Part: TypeAlias = Literal["ahead", "body", "behind"]
"""Collectives that need only parameters, with the operators before them; the rest; waits for
results that are only returned, with views and copies of these."""
PARTS: tuple[Part, ...] = get_args(Part)


def ordered(module: torch.fx.GraphModule, parameters: Nodes) -> dict[Part, list[torch.fx.Node]]:
    """Merges the collectives of a local graph, in place, and returns its operators in order.

    The ``parameters`` are inputs that exist before the step begins.
    """
    for wait in [n for n in module.graph.nodes if n.target is WAIT]:
        _cast_first(module.graph, wait)
    given, handed_out = _given(module.graph, parameters), _handed_out(module.graph)
    groups: dict[Any, list[torch.fx.Node]] = defaultdict(list)
    for wait in (n for n in module.graph.nodes if n.target is WAIT):
        start: Any = wait.args[0]
        if start.args[0] in given or wait in handed_out:
            is_ahead = start.args[0] in given
            groups[is_ahead, start.target, start.args[1:], wait.meta["val"].dtype].append(wait)
    for waits in groups.values():
        if len(waits) > 1:
            _merge(module.graph, waits)
    return _parts(module, parameters)


def _parts(module: torch.fx.GraphModule, parameters: Nodes) -> dict[Part, list[torch.fx.Node]]:
    graph, entries = module.graph, ir.input_nodes(module)
    given, handed_out = _given(graph, parameters), _handed_out(graph)
    draws = [n for n in graph.nodes if _draws(n)]
    after = dict(zip(draws[1:], draws, strict=False))
    everything = [n for n in graph.nodes if n.op not in ("placeholder", "output")]
    depths = _added(dict.fromkeys(entries, 0), everything, after)
    ahead = [n for n in everything if n.target in COLLECTIVES and n.args[0] in given]
    order = _added(dict.fromkeys(entries, 0), ahead, after)
    num_ahead = len(order)
    for depth in range(max(depths.values(), default=0) + 1):
        own = [n for n in depths if depths[n] == depth and n not in handed_out]
        _added(order, [n for n in own if n.target in COLLECTIVES], after)
        _added(order, [n for n in own if n.target is not WAIT], after)
    num_before = len(order)
    ends = itertools.pairwise((len(entries), num_ahead, num_before, None))
    made = list(_added(order, depths, after))
    return {part: made[first:end] for part, (first, end) in zip(PARTS, ends, strict=True)}


def _added(
    order: dict[torch.fx.Node, int],
    nodes: Iterable[torch.fx.Node],
    after: Mapping[torch.fx.Node, torch.fx.Node],
) -> dict[torch.fx.Node, int]:
    """Adds operators that are missing, each after its operands and after ``after[node]``.

    Returns the depth of each operator: how many collectives it needs, one after another.
    """
    for node in nodes:
        stack = [node]
        while stack:
            needed = [*stack[-1].all_input_nodes, *filter(None, [after.get(stack[-1])])]
            missing = [n for n in needed if n not in order]
            stack += reversed(missing)
            if missing:
                continue
            made = stack.pop()
            depth = max((order[n] for n in needed), default=0) + (made.target is WAIT)
            order[made] = depth
            # A program has no tuples as values, so getitems stay in the leaf of their tuple.
            items = (user for user in made.users if user.target is operator.getitem)
            order.update(dict.fromkeys(items, depth))
    return order


def _draws(node: torch.fx.Node) -> bool:
    """Whether an operator draws random numbers, which all ranks must do in the same order."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _given(graph: torch.fx.Graph, parameters: Nodes) -> Nodes:
    """Returns parameters, and nodes that are computed from them alone, without a collective."""
    given = set(parameters)
    for node in graph.nodes:
        operands = node.all_input_nodes
        if operands and node.target is not WAIT and not _draws(node) and given.issuperset(operands):
            given.add(node)
    return given


def _handed_out(graph: torch.fx.Graph) -> Nodes:
    """Returns the waits whose results are only returned, with views and copies of these results."""
    found: set[torch.fx.Node] = set()
    for node in reversed(graph.nodes):
        keeps = node.target is WAIT or node.target in _SAME_ELEMENTS
        if keeps and all(user.op == "output" or user in found for user in node.users):
            found.add(node)
    for node in graph.nodes:
        if node.target is not WAIT and found.isdisjoint(node.all_input_nodes):
            found.discard(node)
    return found


# ---- fewer bytes -------------------------------------------------------------------------------


def _cast_first(graph: torch.fx.Graph, wait: torch.fx.Node) -> None:
    """Casts before a gather if all readers cast to one smaller dtype, as autocast does."""
    start: Any = wait.args[0]
    casts = list(wait.users)
    ways = {(n.target, n.args[1:], *n.kwargs.items()) for n in casts if n.target in CASTS}
    if start.target is not _GATHER or len(ways) != 1 or any(n.target not in CASTS for n in casts):
        return
    cast = casts[0]
    if cast.meta["val"].dtype.itemsize >= wait.meta["val"].dtype.itemsize:
        return
    with graph.inserting_before(cast):
        x = _add(graph, cast.target, start.args[0], *cast.args[1:], **cast.kwargs)
        rest = start.args[1:]
        made = started(graph, _GATHER, (x, *rest), _GATHER(x.meta["val"], *rest))
    for node in casts:
        node.replace_all_uses_with(made)
        graph.erase_node(node)
    graph.erase_node(wait)
    graph.erase_node(start)


# ---- several collectives as one ----------------------------------------------------------------


def _merge(graph: torch.fx.Graph, waits: Sequence[torch.fx.Node]) -> None:
    """Replaces several collectives of one kind by one on their flattened operands."""
    starts: list[Any] = [wait.args[0] for wait in waits]
    target, (_, *rest) = starts[0].target, starts[0].args
    # A row holds a part of each tensor, all for one rank. A scatter reads rows, a gather writes
    # them, and an all-to-all does both.
    parts = rest[-2] if target in (_SCATTER, _EXCHANGE) else 1
    ranks = rest[-2] if target in (_GATHER, _EXCHANGE) else 1
    with graph.inserting_before(graph.output_node()):
        rows = [_viewed(graph, start.args[0], [parts, -1]) for start in starts]
        flat = _add(graph, _ATEN.cat.default, rows, 1)
        whole = started(graph, target, (flat, *rest), target(flat.meta["val"], *rest))
        begin = 0
        for start, wait in zip(starts, waits, strict=True):
            shape = wait.meta["val"].shape
            end = begin + math.prod(shape) // ranks
            part = _add(graph, _ATEN.slice.Tensor, whole, 1, begin, end)
            part, begin = _viewed(graph, part, list(shape)), end
            wait.replace_all_uses_with(part)
            graph.erase_node(wait)
            graph.erase_node(start)


def _viewed(graph: torch.fx.Graph, node: torch.fx.Node, shape: list[int]) -> torch.fx.Node:
    """Adds a view to a graph, of a contiguous copy if the tensor is not contiguous."""
    if not node.meta["val"].is_contiguous():
        node = _add(graph, _ATEN.clone.default, node, memory_format=torch.contiguous_format)
    return _add(graph, _ATEN.view.default, node, shape)


def _add(graph: torch.fx.Graph, target: Any, *args: Any, **kwargs: Any) -> torch.fx.Node:
    given = torch.fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
    example = target(*given[0], **given[1])
    node = graph.call_function(target, args, kwargs)
    node.meta["val"] = example
    return node


# ---- leaves of a split graph ---------------------------------------------------------------------


_VIEW = torch.ops.aten.view.default


def split_at_collectives(
    leaf: ir.Leaf, made: LocalGraph, parameters: Collection[int]
) -> tuple[ir.Closure, tuple[Part, ...]]:
    """Returns the local graph of a leaf as a closure, and the part that each of its calls is.

    The ``parameters`` are inputs that exist before the step begins.
    """
    module = made.module
    _without_idle_nodes(module.graph)
    module.graph.eliminate_dead_code()
    if any(n.target in COLLECTIVES for n in module.graph.nodes):
        return _Split(leaf, module).closure(made.input_types, parameters)
    module.recompile()
    types = tuple(TensorType.of(n.meta["val"]) for n in ir.outputs_of(module))
    own = replace(leaf, module=module, input_types=made.input_types, output_types=types)
    return replace(own, input_names=()), ()


def _without_idle_nodes(graph: torch.fx.Graph) -> None:
    """Removes views that change nothing, which DTensor adds, and unused nodes without data."""
    for node in reversed(graph.nodes):
        if node.op == "call_function" and not node.users and _is_without_data(node):
            graph.erase_node(node)
        elif node.target is _VIEW:
            before, made = node.args[0].meta["val"], node.meta["val"]
            if before.shape == made.shape and before.stride() == made.stride():
                node.replace_all_uses_with(node.args[0])
                graph.erase_node(node)


def _is_without_data(node: torch.fx.Node) -> bool:
    made = node.meta.get("val")
    values = made if isinstance(made, (tuple, list)) else [made]
    on_meta = "meta" in {t.device.type for t in values if isinstance(t, torch.Tensor)}
    return on_meta or node.target is operator.getitem


class _Split:
    """Builds the program of a local graph with collectives."""

    def __init__(self, leaf: ir.Leaf, module: torch.fx.GraphModule) -> None:
        self._leaf, self._module = leaf, module
        self._calls: list[ir.Call] = []
        self._env: dict[torch.fx.Node, ir.Value] = {}

    def closure(
        self, types: Sequence[TensorType], parameters: Collection[int]
    ) -> tuple[ir.Composite, tuple[Part, ...]]:
        """Returns a program of up to three calls, and the parts that they are."""
        entries, inputs = ir.input_nodes(self._module), tuple(map(ir.Value, types))
        order = ordered(self._module, {entries[i] for i in parameters})
        self._env.update(zip(entries, inputs, strict=True))
        found = {part: self._calls_of(nodes) for part, nodes in order.items()}
        parts = {part: calls for part, calls in found.items() if calls}
        outputs = tuple(self._env[n] for n in ir.outputs_of(self._module))
        later, made = set(outputs), list[ir.Call]()
        for calls in reversed(parts.values()):
            made.append(in_closure(self._leaf.name, calls, later))
            later.update(made[-1].args)
        program = ir.Program(inputs, tuple(reversed(made)), outputs)
        return ir.Composite(self._leaf.name, program), tuple(parts)

    def _calls_of(self, nodes: Sequence[torch.fx.Node]) -> list[ir.Call]:
        part: list[torch.fx.Node] = []
        self._calls = []
        for node in nodes:
            # A collective is alone in its leaf, because a backend reorders operators.
            if node.target in COLLECTIVES or node.target is WAIT:
                self._add(part)
                self._add([node])
                part = []
            else:
                part.append(node)
        self._add(part)
        return self._calls

    def _add(self, nodes: Sequence[torch.fx.Node]) -> None:
        """Adds a call of a leaf that consists of some nodes."""
        own, results = set(nodes), ir.outputs_of(self._module)
        made = [n for n in nodes if n in results or any(user not in own for user in n.users)]
        made = [n for n in made if isinstance(n.meta["val"], torch.Tensor)]
        if not made:  # no other node reads their results
            return
        read = list(
            dict.fromkeys(n for node in nodes for n in node.all_input_nodes if n not in own)
        )
        is_collective = nodes[0].target in COLLECTIVES or nodes[0].target is WAIT
        is_moved = all(n.target in MOVES_ONLY for n in nodes)
        name = nodes[0].name if is_collective else self._leaf.name
        kernels = "eager" if is_collective or is_moved else self._leaf.kernels
        cut = cut_leaf(name, nodes, read, made)
        leaf = replace(cut, input_names=(), level="aten", kernels=kernels)
        values = tuple(ir.Value(t) for t in leaf.output_types)
        self._calls.append(ir.Call(leaf, tuple(self._env[n] for n in read), values))
        self._env.update(zip(made, values, strict=True))


# ---- calls moved apart -------------------------------------------------------------------------


def opened(program: ir.Program) -> tuple[ir.Call, list[ir.Call], Sequence[ir.Value]]:
    """Returns the last call of a block, the calls from there on inlined, and all results.

    It is a backward. Later calls, which sum and cast gradients, move in between the calls of its
    body, as early as their operands allow.
    """
    opening = [isinstance(c.closure, ir.Composite) and bool(c.path) for c in program.calls]
    first = max((i for i, opens in enumerate(opening) if opens), default=0)
    env: dict[ir.Value, ir.Value] = {}
    made_at: dict[ir.Value, int] = {}
    later: dict[int, list[ir.Call]] = defaultdict(list)
    inner: list[ir.Call] = []
    for call in program.calls[first:]:
        calls, results = [call], list(call.results)
        if isinstance(call.closure, ir.Composite):
            args = [env.get(v, v) for v in call.args]
            calls, results = inlined(call.closure.program, args, "")
        env.update(zip(call.results, results, strict=True))
        if not inner:
            inner = calls
            made_at = {v: i for i, one in enumerate(inner) for v in one.results}
            continue
        for one in calls:
            one = with_operands(one, env)
            at = max((made_at.get(v, -1) for v in one.args), default=-1)
            made_at.update(dict.fromkeys(one.results, at))
            later[at].append(one)
    calls = [*later[-1], *(one for i, call in enumerate(inner) for one in (call, *later[i]))]
    return program.calls[first], calls, [env.get(v, v) for v in program.outputs]


def with_structs(program: ir.Program, given: Sequence[Type], made: Sequence[Type]) -> ir.Program:
    """Packs inputs and results of a program of tensors into structs, where the types say so."""
    before, after = list[ir.Call](), list[ir.Call]()
    inputs, outputs = list[ir.Value](), list[ir.Value]()
    for type_, own in zip(given, grouped(program.inputs, given), strict=True):
        inputs.append(ir.Value(type_) if isinstance(type_, StructType) else own[0])
        if isinstance(type_, StructType):
            before.append(unpacked(inputs[-1], own))
    for type_, own in zip(made, grouped(program.outputs, made), strict=True):
        after += [packed(own, "")] if isinstance(type_, StructType) else []
        outputs.append(after[-1].results[0] if isinstance(type_, StructType) else own[0])
    calls = (*before, *program.calls, *after)
    return replace(program, inputs=tuple(inputs), calls=calls, outputs=tuple(outputs))


class Schedule:
    """Orders calls: collectives start early, and waits come late.

    A gather starts one computation early, which hides it; earlier, more parameters would be held at
    once. A wait that keeps an operand in memory comes after the next computation, any other where
    its result is read.
    """

    def __init__(self, inputs: Iterable[ir.Value]) -> None:
        self.calls: list[ir.Call] = []
        self._inputs = frozenset(inputs)
        self._last = 0
        self._behind: list[ir.Call] = []

    def add(self, call: ir.Call, part: Part = "body") -> None:
        """Adds a call."""
        if part == "behind":
            self._behind.append(call)
        elif part == "ahead" and self._inputs.issuperset(call.args):
            self.calls.insert(self._last, call)
        else:
            self._wait_for([b for b in self._behind if not set(b.results).isdisjoint(call.args)])
            computes = _computes(call.closure)
            self._last = len(self.calls) if computes else self._last
            self.calls.append(call)
            self._wait_for([b for b in self._behind if computes and _holds(b.closure)])

    def finished(self) -> tuple[ir.Call, ...]:
        """Returns all calls."""
        self._wait_for(self._behind)
        return tuple(self.calls)

    def _wait_for(self, calls: Sequence[ir.Call]) -> None:
        self.calls += calls
        self._behind = [b for b in self._behind if b not in calls]


def _computes(closure: ir.Closure) -> bool:
    if isinstance(closure, ir.Composite):
        return any(_computes(call.closure) for call in closure.program.calls)
    idle = {*MOVES_ONLY, *COLLECTIVES, WAIT}
    return isinstance(closure, ir.Leaf) and not all(n.target in idle for n in closure.nodes)


def _holds(closure: ir.Closure) -> bool:
    """Whether a wait in a closure keeps an operand in memory."""
    if isinstance(closure, ir.Composite):
        return any(_holds(call.closure) for call in closure.program.calls)
    return isinstance(closure, ir.Leaf) and any(
        n.target is WAIT and len(n.args) > 1 for n in closure.nodes
    )
