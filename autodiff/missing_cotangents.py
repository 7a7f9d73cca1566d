"""The derivative without some cotangents: an output that the loss does not use has none.

That differs from a cotangent of zeros: zero times an infinite derivative is nan. A backward is
linear in its cotangents, so an operator has undefined results if all of its cotangents are
undefined; if only some are, it takes zeros for them, as in autograd. The forward and what it saves
stay the same, because which outputs are used is known only afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.fx

from ..reuse.ir import program as ir
from ..reuse.ir.leaf import flat_types
from ..reuse.ir.operators import mutated_args
from ..reuse.ir.rewrite import FlatStructs, grouped, map_leaves
from ..reuse.ir.torch_symbols import as_literal
from ..reuse.ir.types import TensorType, contiguous_stride, reach
from ..reuse.once import once
from .derivative import Derivative
from .flows import used_inputs
from .traces.torch_partition import copy_graph

_ADD = torch.ops.aten.add.Tensor


_GIVEN, _COTANGENT, _UNDEFINED = "given", "cotangent", "undefined"
"""Whether a value is none, a cotangent, or an undefined cotangent."""


class _UnknownError(Exception):
    """Raised for a graph that may not be linear in its cotangents."""


@dataclass(frozen=True)
class _Found:
    """A closure without its undefined operands and results, and the kind of each result."""

    closure: ir.Closure | None
    results: tuple[str, ...]


class MissingCotangents:
    """Makes the derivatives of one forward for fewer cotangents; common closures are made once.

    All shapes of a program with symbolic sizes share one. It is given the derivative for a
    cotangent of every output, of composite closures.
    """

    def __init__(self, derivative: Derivative) -> None:
        self._full = derivative
        self._eager: dict[ir.Closure, ir.Closure] = {}
        self._taken: dict[frozenset[int], Derivative] = {}

    def take(self, derivative: Derivative) -> None:
        """Adds a derivative that was made before, such as one loaded from a file."""
        unused = {*self._full.cotangent_outputs} - {*derivative.cotangent_outputs}
        self._taken.setdefault(frozenset(unused), derivative)

    def without(self, unused: Iterable[int], kernels: ir.Kernels = "backend") -> Derivative | None:
        """Returns the derivative that takes no cotangents of some outputs, given by position.

        Its results do not include gradients that only those outputs have. It is None if an operator
        of the backward may not be linear. ``kernels="eager"`` gives the backward PyTorch's own
        kernels.
        """
        left = frozenset(unused)
        derivative = self._taken.get(left) or (self._without(left) if left else self._full)
        if derivative is None or kernels == "backend":
            return derivative
        backward = derivative.backward
        if backward not in self._eager:
            assert isinstance(backward, ir.Composite)
            program = map_leaves(backward.program, lambda leaf: replace(leaf, kernels="eager"))
            self._eager[backward] = ir.Composite(backward.name, program)
        return replace(derivative, backward=self._eager[backward])

    @once
    def reads(self, output: int) -> frozenset[int]:
        """Returns which inputs of the backward (structs as tensors) one output's gradients need."""
        others = [i for i in self._full.cotangent_outputs if i != output]
        alone = self.without(others) if others else self._full
        return _reads(alone or self._full)

    def _without(self, unused: frozenset[int]) -> Derivative | None:
        full, backward = self._full, self._full.backward
        assert isinstance(backward, ir.Composite)
        flags = [_GIVEN] * (len(backward.input_types) - len(full.cotangent_outputs))
        flags += [_UNDEFINED if i in unused else _COTANGENT for i in full.cotangent_outputs]
        try:
            found = self._of(backward, tuple(flags))
        except _UnknownError:
            return None
        if found.closure is None:
            return None
        gradients = zip(full.gradient_inputs, found.results, strict=True)
        return replace(
            full,
            backward=found.closure,
            cotangent_outputs=tuple(i for i in full.cotangent_outputs if i not in unused),
            gradient_inputs=tuple(i for i, flag in gradients if flag != _UNDEFINED),
        )

    @once
    def _of(self, closure: ir.Closure, flags: tuple[str, ...]) -> _Found:
        if _COTANGENT not in flags and _UNDEFINED not in flags:
            return _Found(closure, (_GIVEN,) * len(closure.output_types))
        if isinstance(closure, ir.Leaf):
            return _leaf(closure, flags)
        if isinstance(closure, ir.Composite):
            return self._composite(closure, flags)
        # Structs hold what the forward saved: one with a cotangent is not from our autodiff.
        raise _UnknownError

    def _composite(self, closure: ir.Composite, flags: tuple[str, ...]) -> _Found:
        program = closure.program
        kinds = dict(zip(program.inputs, flags, strict=True))
        same: dict[ir.Value, ir.Value] = {}
        calls = []
        for call in program.calls:
            given = tuple(kinds[v] for v in call.args)
            args = tuple(same.get(v, v) for v in call.args if kinds[v] != _UNDEFINED)
            # A sum with an undefined cotangent is the other one: adding zeros would cost a kernel.
            if _is_sum(call.closure) and given.count(_UNDEFINED) == 1:
                (total,) = call.results
                same[total], kinds[total] = args[0], _COTANGENT
                continue
            found = self._of(call.closure, given)
            kinds.update(zip(call.results, found.results, strict=True))
            if any(kind != _UNDEFINED for kind in found.results) or not call.results:
                assert found.closure is not None
                made = tuple(v for v in call.results if kinds[v] != _UNDEFINED)
                calls.append(ir.Call(found.closure, args, made, call.path))
        results = tuple(kinds[v] for v in program.outputs)
        outputs = tuple(same.get(v, v) for v in program.outputs if kinds[v] != _UNDEFINED)
        if _UNDEFINED not in flags:
            return _Found(closure, results)
        inputs = tuple(v for v in program.inputs if kinds[v] != _UNDEFINED)
        body = ir.Program(inputs, tuple(calls), outputs)
        return _Found(ir.Composite(closure.name, body) if outputs else None, results)


def _reads(derivative: Derivative) -> frozenset[int]:
    assert isinstance(derivative.backward, ir.Composite)
    flat = FlatStructs().program(derivative.backward.program)
    num_saved, num_kept = len(flat_types([derivative.saved_type])), len(derivative.kept_inputs)
    num_read = num_saved + num_kept + len(derivative.kept_outputs)
    # Inputs outlive the backward anyway; only values of the forward are freed.
    inputs_of_forward = range(num_saved, num_saved + num_kept)
    return frozenset(i for i in used_inputs(flat) if i < num_read and i not in inputs_of_forward)


def _control(leaf: ir.Leaf, flags: tuple[str, ...]) -> _Found:
    """Keeps control flow if all its cotangents are defined; without any, results are undefined."""
    if _COTANGENT in flags and _UNDEFINED in flags:
        raise _UnknownError  # it would need other bodies
    kind = _COTANGENT if _COTANGENT in flags else _UNDEFINED
    return _Found(leaf if kind == _COTANGENT else None, (kind,) * len(leaf.output_types))


def _is_sum(closure: ir.Closure) -> bool:
    """Returns whether a closure adds two operands of one type."""
    alike = len({*closure.input_types, *closure.output_types}) == 1
    return isinstance(closure, ir.Leaf) and alike and closure.is_sum


def _leaf(leaf: ir.Leaf, flags: tuple[str, ...]) -> _Found:
    if leaf.bodies:
        return _control(leaf, flags)
    module = copy_graph(leaf.module)
    graph = module.graph
    kinds: dict[torch.fx.Node, str] = {}
    entries = grouped(ir.input_nodes(module), leaf.input_types)
    for group, flag in zip(entries, flags, strict=True):
        kinds.update(dict.fromkeys(group, flag))
    for node in list(graph.nodes):
        if node.op in ("placeholder", "output"):
            continue
        kinds[node] = _kind(node, kinds)
    returned = ir.outputs_of(module)
    results = tuple(
        next((kinds[n] for n in group if isinstance(n, torch.fx.Node)), _GIVEN)
        for group in grouped(returned, leaf.output_types)
    )
    if _UNDEFINED not in flags:
        return _Found(leaf, results)
    if all(kind == _UNDEFINED for kind in results):
        return _Found(None, results)
    graph.output_node().args = (tuple(n for n in returned if kinds.get(n) != _UNDEFINED),)
    graph.eliminate_dead_code()
    for node in reversed(list(graph.nodes)):
        if kinds.get(node) == _UNDEFINED:
            graph.erase_node(node)
    module.recompile()
    inputs, outputs = (
        tuple(t for t, kind in zip(types, kinds_, strict=True) if kind != _UNDEFINED)
        for types, kinds_ in ((leaf.input_types, flags), (leaf.output_types, results))
    )
    made = replace(leaf, module=module, input_types=inputs, output_types=outputs, input_names=())
    return _Found(made, results)


def _kind(node: torch.fx.Node, kinds: dict[torch.fx.Node, str]) -> str:
    """Returns the kind of an operator's result; replaces undefined operands by zeros if mixed."""
    operands = [n for n in node.all_input_nodes if kinds[n] != _GIVEN]
    if not operands:
        return _GIVEN
    # An in-place write shows in aliases, too, whose kinds would be wrong.
    if mutated_args(node):
        raise _UnknownError
    undefined = [n for n in operands if kinds[n] == _UNDEFINED]
    if len(undefined) == len(operands):
        return _UNDEFINED
    # Some operands only: autograd, too, passes zeros for those, as the operator needs tensors.
    if undefined and not _becomes_other(node, undefined[0]):
        for operand in undefined:
            node.replace_input_with(operand, _zeros(operand, node, kinds))
    return _COTANGENT


def _becomes_other(node: torch.fx.Node, undefined: torch.fx.Node) -> bool:
    """Replaces a sum by its other operand, if that has the same layout; returns whether it did."""
    if node.target is not _ADD or node.kwargs or len(node.all_input_nodes) != 2:
        return False
    (other,) = [n for n in node.all_input_nodes if n is not undefined]
    if _type_of(other) != _type_of(node):
        return False
    node.replace_all_uses_with(other)
    return True


def _type_of(node: torch.fx.Node) -> TensorType:
    val = node.meta.get("val")
    if not isinstance(val, torch.Tensor):
        raise _UnknownError
    return TensorType.of(val)


def _zeros(
    operand: torch.fx.Node, user: torch.fx.Node, kinds: dict[torch.fx.Node, str]
) -> torch.fx.Node:
    """Adds zeros in an operand's layout before the node that uses them."""
    type_, val = _type_of(operand), operand.meta["val"]
    options: dict[str, Any] = {"dtype": type_.dtype, "device": type_.device, "pin_memory": False}
    is_contiguous = type_.stride == contiguous_stride(type_.shape)
    num_elements = 0 if 0 in type_.shape else reach(val.shape, val.stride())
    shape = val.shape if is_contiguous else [num_elements]
    graph = user.graph
    with graph.inserting_before(user):
        sizes = tuple(map(as_literal, shape))
        node = graph.call_function(torch.ops.aten.full.default, (sizes, 0), options)
        node.meta = dict(operand.meta)
        kinds[node] = _GIVEN
        if is_contiguous:
            return node
        node.meta["val"] = val.new_empty(shape)
        layout = [tuple(map(as_literal, numbers)) for numbers in (val.shape, val.stride())]
        view = graph.call_function(torch.ops.aten.as_strided.default, (node, *layout))
        view.meta = dict(operand.meta)
        kinds[view] = _GIVEN
    return view
