"""Removes constant attention masks that hide nothing, or exactly what ``is_causal`` hides.

In eager, a library looks at a mask's values and passes ``is_causal`` instead where it can. Fake
tensors have no values, so in a capture it builds the whole mask (tokens by tokens), for which no
attention kernel skips blocks. This pass evaluates a mask that depends on no input, once, and
compares its values with the triangle. Names do not matter, and any other mask stays.

A mask may be made in one closure and used in another. A block whose calls get different masks
becomes one closure per kind of mask; operators that computed a removed mask are removed, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import torch
import torch.fx
from torch.fx.node import map_aggregate, map_arg

from ..once import once
from ..torch_names import module_of, schema_of
from .leaf import ModalInterpreter, cut_leaf, memory_of, node_type
from .operators import is_draw, may_draw, mutated_args
from .program import Call, Closure, Composite, Leaf, Program, Value, leaf_nodes, outputs_of
from .torch_symbols import has_sizes
from .types import TensorType

ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
_MOST_BYTES = 2**30  # of a tensor that is computed on the way to a mask

Node = torch.fx.Node
Kind: TypeAlias = Literal["causal", "open", ""]
"""A mask equal to ``is_causal``, one that hides nothing, or any other."""


@dataclass(frozen=True, eq=False, slots=True)
class _Constant:
    """A value that depends on no input: a node, and the constants passed to its graph."""

    node: Node
    given: Mapping[object, _Constant]

    def numbers(self) -> torch.Tensor:
        """Computes the value, on the CPU."""
        found, left = {self.node}, [self.node]
        while left:
            new = set(left.pop().all_input_nodes) - found
            found |= new
            left += new
        entries = [n for n in found if n in self.given]
        rest = sorted(found.difference(entries))
        module = cut_leaf("constant", rest, entries, [self.node]).module
        cpu = torch.device("cpu")
        for node in module.graph.nodes:
            node.args, node.kwargs = map_aggregate(
                (node.args, node.kwargs), lambda x: cpu if isinstance(x, torch.device) else x
            )
        operands = [self.given[n].numbers() for n in entries]
        result: torch.Tensor = ModalInterpreter(module).run_flat(operands)[0]
        return result


def _constants(leaf: Leaf, given: _Given) -> dict[object, _Constant]:
    """Returns the nodes of a leaf that depend on constants only, for one call's operands."""
    entries: dict[object, _Constant] = {
        n: c for n, c in zip(leaf.entries, given, strict=True) if c is not None
    }
    changed = {memory_of(n) for node in leaf.nodes for n in mutated_args(node)}
    found = dict(entries)
    for node in leaf.nodes:
        known = found.keys() >= set(node.all_input_nodes) and memory_of(node) not in changed
        if known and _computes_alike(node):
            found[node] = _Constant(node, entries)
    return found


def _computes_alike(node: Node) -> bool:
    """Whether an operator gives the same values each time, and a small tensor."""
    schema, value = schema_of(node.target), node.meta.get("val")
    if schema is None or may_draw(node.target) or not isinstance(value, torch.Tensor):
        return False
    is_known = schema.name.startswith("aten::") and "empty" not in schema.name
    # Not nbytes: it refuses a size that was a symbol, even one that is known to be a number.
    return is_known and value.numel() * value.element_size() <= _MOST_BYTES


_Given: TypeAlias = Sequence[_Constant | None]
_Taken: TypeAlias = tuple[Closure, Sequence[int]]
"""The closure that replaces another, and the positions of the operands that it keeps."""


def has_masks(program: Program) -> bool:
    """Whether an attention of a program takes a mask."""
    return any(_is_masked(node) for _, node in leaf_nodes(program))


class Masks:
    """Removes masks from attentions, and counts them, once per different closure."""

    def __init__(self) -> None:
        self.num_removed: Counter[str] = Counter()
        self._made: dict[Any, _Taken] = {}
        self._kinds: dict[Any, Kind] = {}

    def program(self, program: Program) -> Program:
        """Returns the program without such masks; the same program if it has none."""
        return self._walked(program, [None] * len(program.inputs))[0]

    def _walked(self, program: Program, given: _Given) -> tuple[Program, _Given]:
        known = dict(zip(program.inputs, given, strict=True))
        calls = []
        for call in program.calls:
            (closure, kept), results = self._new(call.closure, *(known[v] for v in call.args))
            known.update(zip(call.results, results, strict=True))
            same = closure is call.closure
            calls.append(call if same else _on(call, closure, kept, range(len(results))))
        outputs = [known[value] for value in program.outputs]
        if all(new is old for new, old in zip(calls, program.calls, strict=True)):
            return program, outputs
        return replace(program, calls=self._without_unused(program, calls)), outputs

    @once  # most calls have an equal one
    def _new(self, closure: Closure, *given: _Constant | None) -> tuple[_Taken, _Given]:
        if isinstance(closure, Leaf) and not closure.bodies and not has_sizes(closure.module):
            constants = _constants(closure, given)
            results = [constants.get(n) for n in outputs_of(closure.module)]
            return self._leaf(closure, constants), results
        everything = range(len(given))
        if not isinstance(closure, Composite):
            return (closure, everything), [None] * len(closure.output_types)
        program, outputs = self._walked(closure.program, given)
        key = (closure, *(call.closure for call in program.calls))
        if program is closure.program:
            self._made[key] = closure, everything
        elif key not in self._made:
            uses = _uses(program.calls, program.outputs)
            kept = [i for i in everything if uses[program.inputs[i]]]
            program = replace(program, inputs=_picked(program.inputs, kept))
            names = _picked(closure.input_names, kept)
            self._made[key] = Composite(closure.name, program, names), kept
        return self._made[key], outputs

    def _leaf(self, leaf: Leaf, constants: Mapping[object, _Constant]) -> _Taken:
        kinds: dict[Node, Kind] = {}
        for node in filter(_is_masked, leaf.nodes):
            mask = constants.get(node.args[3])
            if mask is not None and (node, mask) not in self._kinds:
                self._kinds[node, mask] = _kind_of(mask.numbers(), node)
            if mask is not None and (kind := self._kinds[node, mask]):
                kinds[node] = kind
        if not kinds:
            return leaf, range(len(leaf.input_types))
        key = (leaf, *kinds.items())
        if key not in self._made:
            self.num_removed[leaf.name] += len(kinds)
            self._made[key] = _rewritten(leaf, range(len(leaf.output_types)), kinds)
        return self._made[key]

    def _without_unused(self, before: Program, calls: Sequence[Call]) -> tuple[Call, ...]:
        """Removes results of leaves that no call uses any more, with their operators."""
        used, uses = _uses(before.calls, before.outputs), _uses(calls, before.outputs)
        left: list[Call] = []
        for call in reversed(calls):
            results = [i for i, v in enumerate(call.results) if uses[v] or not used[v]]
            leaf = call.closure
            if len(results) < len(call.results) and isinstance(leaf, Leaf) and not leaf.bodies:
                key = (leaf, *results)
                if key not in self._made:
                    self._made[key] = _rewritten(leaf, results, {})
                uses.subtract(call.args)
                call = _on(call, *self._made[key], results)
                uses.update(call.args)
                if not results and not any(map(is_draw, leaf.nodes)):
                    continue
            left.append(call)
        return tuple(reversed(left))


def _uses(calls: Iterable[Call], outputs: Iterable[Value]) -> Counter[Value]:
    return Counter([*outputs, *(value for call in calls for value in call.args)])


def _picked(items: Sequence[Any], positions: Iterable[int]) -> tuple[Any, ...]:
    return tuple(items[i] for i in positions) if items else ()


def _on(call: Call, closure: Closure, kept: Sequence[int], results: Sequence[int]) -> Call:
    """Returns a call of another closure, with some of the operands and results."""
    args, values = _picked(call.args, kept), _picked(call.results, results)
    return replace(call, closure=closure, args=args, results=values)


# ---- one attention: its operands are query, key, value, mask, dropout and "is causal" ------------


def _is_masked(node: Node) -> bool:
    masked = node.target is ATTENTION and len(node.args) > 3 and isinstance(node.args[3], Node)
    return masked and node.args[5:6] != (True,)


def _kind_of(mask: torch.Tensor, attention: Node) -> Kind:
    """Returns the kind of a mask by its values."""
    shown = mask if mask.dtype is torch.bool else mask == 0
    if shown is not mask and not (shown | (mask == -torch.inf)).all():
        return ""
    query, key = (n.meta["val"].shape[-2] for n in attention.args[:2])  # type: ignore[union-attr]
    kind: Kind = "open" if shown.all() else "causal"
    if kind == "causal":
        triangle = torch.ones(query, key, dtype=torch.bool, device="cpu").tril()
        if query != key or not (shown == triangle).all():
            return ""
    return kind if _keeps_layout(attention, kind) else ""


def _without_mask(
    graph: torch.fx.Graph, attention: Node, kind: Kind, copies: Mapping[Node, Node]
) -> Node:
    """Adds an attention to a graph, with ``is_causal`` in place of its mask."""
    query, key, value, _, *options = attention.args
    given = (query, key, value, None, options[0] if options else 0.0, kind == "causal")
    made = graph.call_function(ATTENTION, *map_arg((given, attention.kwargs), copies.__getitem__))  # type: ignore[misc]
    made.meta.update(attention.meta)
    return made


def _keeps_layout(attention: Node, kind: Kind) -> bool:
    """Whether the result keeps its layout, which later operators were traced with."""
    graph = torch.fx.Graph()
    operands = attention.args[:3]
    copies = {n: graph.placeholder("x") for n in attention.all_input_nodes if n in operands}
    graph.output((_without_mask(graph, attention, kind, copies),))
    with torch.no_grad():
        results = ModalInterpreter(module_of(graph)).run_flat([n.meta["val"] for n in copies])
    return TensorType.of(results[0]) == node_type(attention)


def _rewritten(leaf: Leaf, results: Sequence[int], kinds: Mapping[Node, Kind]) -> _Taken:
    """Returns a leaf with some of its results, and without the masks of some attentions."""
    graph, copies = torch.fx.Graph(), dict[Node, Node]()
    for node in (*leaf.entries, *leaf.nodes):
        if node in kinds:
            copies[node] = _without_mask(graph, node, kinds[node], copies)
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[n] for n in _picked(outputs_of(leaf.module), results)))
    graph.eliminate_dead_code()
    kept = [i for i, n in enumerate(leaf.entries) if copies[n].users or not n.users]
    for node in {*leaf.entries}.difference(_picked(leaf.entries, kept)):
        graph.erase_node(copies[node])
    inputs, names = _picked(leaf.input_types, kept), _picked(leaf.input_names, kept)
    made = replace(leaf, module=module_of(graph), input_types=inputs, input_names=names)
    return replace(made, output_types=_picked(leaf.output_types, results)), kept
