"""Leaf bodies: ATen graphs built, compared exactly and run; the reference interpreter of programs.

A node carries a :class:`Stamp` in ``meta["stamp"]``: the grad mode and autocast state that the
user's code ran it under, and the user's source line. The stamp replaces the mode-switching nodes
a trace would hold, so a graph can be cut anywhere without losing the mode.

The reference interpreter runs a program call by call on real tensors and optimizes nothing: tests
compare every other way of running a program with it.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import torch
import torch.fx

from ..freeze import Freezer
from ..torch_names import memory_id, module_of
from .operators import WRITES_STATISTICS, connected, is_view, mutated_args, returns_operand
from .program import Call, Closure, Composite, Leaf, Pack, Program, Value, outputs_of
from .torch_symbols import SizedInterpreter, Values
from .types import StructType, TensorType, Type, flatten_type

Autocast = tuple[str, bool, torch.dtype]


@dataclass(frozen=True, slots=True)
class Stamp:
    """The modes a node ran under, and where in the user's code it was called."""

    grad_enabled: bool = True
    autocast: tuple[Autocast, ...] = ()
    source: str = ""


DEFAULT_STAMP = Stamp()


def stamp_of(node: torch.fx.Node) -> Stamp:
    """Returns the stamp of a node."""
    stamp = node.meta.get("stamp", DEFAULT_STAMP)
    assert isinstance(stamp, Stamp)
    return stamp


def current_autocast(devices: Iterable[str]) -> tuple[Autocast, ...]:
    """Returns the active autocast regions, for the given device types."""
    return tuple(
        (device, True, torch.get_autocast_dtype(device))
        for device in devices
        if torch.is_autocast_enabled(device)
    )


@contextlib.contextmanager
def without_autocast() -> Iterator[None]:
    """Switches autocast off inside: a graph has its casts as nodes."""
    active = [d for d in ("cpu", "cuda") if torch.is_autocast_enabled(d)]
    if not active:
        yield
        return
    with contextlib.ExitStack() as stack:
        for device in active:
            stack.enter_context(torch.autocast(device, enabled=False))
        yield


def enter_modes(
    stack: contextlib.ExitStack, grad_enabled: bool, autocast: Sequence[Autocast]
) -> None:
    """Ends the modes in a stack, and begins those that an operator was captured in."""
    stack.close()
    if not grad_enabled:
        stack.enter_context(torch.no_grad())
    for device, enabled, dtype in autocast:
        region = torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=False)
        stack.enter_context(region)


Relayout = Callable[[Any, torch.fx.Node], Any]
"""Returns an operator's result in the layout that the trace of its node recorded."""


class ModalInterpreter(SizedInterpreter):
    """Runs a leaf body node by node under the modes in the nodes' stamps.

    Consecutive nodes with equal modes share one autocast context. A stamp can only switch grad mode
    off (``grad_enabled=False``), never on. ``relayout`` is called with each result and its node.
    """

    def __init__(self, module: torch.fx.GraphModule, relayout: Relayout | None = None) -> None:
        super().__init__(module, garbage_collect_values=True)
        self.extra_traceback = False  # our error messages name the user's line already
        self._relayout = relayout
        self._stack = contextlib.ExitStack()
        self._modes: tuple[bool, tuple[Autocast, ...]] = (True, ())

    @without_autocast()
    def run_flat(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """Runs on flat inputs; returns the flat outputs."""
        with self._stack:
            return tuple(super().run(*args))

    def run_node(self, n: torch.fx.Node) -> Any:
        """Switches modes where the stamp changes, then runs the node."""
        if n.op == "call_function":
            stamp = stamp_of(n)
            modes = stamp.grad_enabled, stamp.autocast
            if modes != self._modes:
                self._modes = modes
                enter_modes(self._stack, *modes)
        result = super().run_node(n)
        return result if self._relayout is None else self._relayout(result, n)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Calls an operator, or a replacement that checks its indices when traced, too."""
        return super().call_function(_CHECKED.get(target, target), args, kwargs)


def _one_hot(index: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    """Decomposes ``one_hot`` so that a class out of range stays an error."""
    zeros, places = index.new_zeros((*index.shape, num_classes)), index.unsqueeze(-1)
    return zeros.scatter(-1, places, torch.ones_like(places))


def _scattered(operator: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Scatters a number by the overload that scatters a tensor."""

    # TorchInductor makes a number scattered into a constant tensor a comparison with the index,
    # for which no index is out of range.
    def scatter(x: torch.Tensor, dim: int, index: torch.Tensor, value: Any) -> torch.Tensor:
        return operator(x, dim, index, x.new_full(index.shape, value))

    return scatter


_aten = torch.ops.aten
_OVERWRITES = (_aten.zero_.default, _aten.fill_.Scalar)
_CHECKED: Mapping[Any, Callable[..., Any]] = {
    _aten.one_hot.default: _one_hot,
    _aten.scatter.value: _scattered(_aten.scatter.src),
    _aten.scatter_.value: _scattered(_aten.scatter_.src),
}


def cut_leaf(
    name: str,
    nodes: Sequence[torch.fx.Node],
    inputs: Sequence[torch.fx.Node],
    outputs: Sequence[torch.fx.Node],
    cloned_inputs: frozenset[int] = frozenset(),
) -> Leaf:
    """Copies ``nodes`` out of a larger graph into a leaf of their own.

    ``inputs`` are nodes outside that become placeholders: at least those that are used. Of the
    inputs at ``cloned_inputs``, which the body changes in place, it works on a copy, whose final
    state is returned after ``outputs``: so the leaf is pure.
    """
    graph = torch.fx.Graph()
    mapping: dict[torch.fx.Node, torch.fx.Node] = {}
    for index, node in enumerate(inputs):
        mapping[node] = graph.placeholder(f"a{index}")
        mapping[node].meta["val"] = node.meta.get("val")
    changed = []
    for index in sorted(cloned_inputs):
        source = inputs[index]
        clone = graph.call_function(torch.ops.aten.clone.default, (mapping[source],))
        clone.meta.update(val=source.meta.get("val"))
        mapping[source] = clone
        changed.append(clone)
    for node in nodes:
        mapping[node] = graph.node_copy(node, lambda n: mapping[n])
    graph.output(tuple([mapping[n] for n in outputs] + changed))
    graph.eliminate_dead_code()
    returned = [*outputs, *(inputs[i] for i in sorted(cloned_inputs))]
    return Leaf(
        name,
        module_of(graph),
        tuple(node_type(n) for n in inputs),
        tuple(node_type(n) for n in returned),
        tuple(n.name for n in inputs),
    )


def node_type(node: torch.fx.Node) -> TensorType:
    """Returns the tensor type of a traced node."""
    return TensorType.of(node.meta["val"])


class FullKey:
    """A dictionary key of unhashable parts: the hash covers little, a comparison all of them."""

    __slots__ = ("_parts",)

    def __init__(self, parts: Any) -> None:
        self._parts = parts

    def __hash__(self) -> int:
        return hash((len(self._parts), self._parts[0]))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FullKey) and self._parts == other._parts


def leaf_key(leaf: Leaf, numbers: Mapping[torch.fx.Node, Any] | None = None) -> Any:
    """Returns a value that is equal for two leaves only if their graphs compute the same.

    Operators, constants (with their Python type), modes, input types and wiring all count; names
    and source lines do not. ``numbers`` has, by node, what replaces its second argument.
    """
    number: dict[torch.fx.Node, int] = {}
    rows: list[Any] = [leaf.input_types, leaf.output_types]
    for node in leaf.module.graph.nodes:
        number[node] = len(number)
        if node.op == "placeholder":
            continue
        stamp = stamp_of(node)
        args = list(node.args)
        if numbers and node in numbers:
            args[1] = numbers[node]
        operands = frozen_operands((tuple(args), node.kwargs), number)
        rows.append((node.op, node.target, operands, stamp.grad_enabled, stamp.autocast))
    return tuple(rows)


def frozen_operands(operands: Any, number: Mapping[torch.fx.Node, int]) -> Any:
    """Freezes the arguments of an operator: constants with their types, nodes by their number.

    The containers that ``torch.fx`` searches for nodes are handled here, since each operator has
    some, and :class:`Freezer` takes ten times as long for them.
    """
    if isinstance(operands, torch.fx.Node):
        return ("node", number[operands])
    parts: Iterable[Any]
    if isinstance(operands, (tuple, list)):
        parts = operands
    elif isinstance(operands, dict):
        parts = operands.items()
    elif isinstance(operands, slice):
        parts = (operands.start, operands.stop, operands.step)
    else:
        return Freezer().freeze(operands)
    return (type(operands), tuple(map(frozen_operands, parts, repeat(number))))


def is_active(
    leaf: Leaf, active_inputs: Sequence[bool], *, but_zeros: bool = False
) -> tuple[bool, ...]:
    """Says which flat outputs can carry a gradient back to one of the active flat inputs.

    ``but_zeros`` leaves out what ``zero_`` and ``fill_`` make zero, though autograd has it.
    """
    # It may say yes where autograd says no, never the other way: then a gradient would be lost.
    carries = carries_gradient(leaf, active_inputs, but_zeros=but_zeros)
    return tuple(map(carries, outputs_of(leaf.module)))


def carries_gradient(
    leaf: Leaf, active_inputs: Sequence[bool], *, but_zeros: bool = False
) -> Callable[[object], bool]:
    """Returns a predicate of nodes: whether one carries a gradient; see :func:`is_active`."""
    active: set[Any] = set()  # nodes, and histories that something active was written to
    placeholders = leaf.entries
    active.update(n for n, flag in zip(placeholders, active_inputs, strict=True) if flag)
    # What is detached has a history of its own, though it shares the memory.
    detached: dict[torch.fx.Node, torch.fx.Node] = {}

    def history(node: torch.fx.Node) -> Any:
        return detached[node] if node in detached else memory_of(node)

    def carries(node: object) -> bool:
        return isinstance(node, torch.fx.Node) and (node in active or history(node) in active)

    for node in leaf.nodes:
        if returns_operand(node.target) or node.target is operator.getitem:
            source = node.all_input_nodes[0]
            if source in detached:
                detached[node] = detached[source]
            elif is_view(node) and _cuts_history(node):
                detached[node] = node
        if but_zeros and node.target in _OVERWRITES:
            operand = node.all_input_nodes[0]
            if not is_view(operand) and operand.target is not operator.getitem:
                active -= {operand, history(operand)}
        if any(map(carries, mutated_args(node))):
            active.add(node)  # it returns the operand that it changed, whose history no_grad keeps
        if _passes_gradient(node) and any(map(carries, connected(node))):
            active.add(node)
            if node.target not in WRITES_STATISTICS:
                active.update(map(history, mutated_args(node)))
    return carries


def memory_of(node: torch.fx.Node) -> Any:
    """Returns a key of a node's storage, equal for its views; the node if it has no storage."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return node
    try:
        return memory_id(value)
    except NotImplementedError:  # a tensor inside torch.func, before torch 2.13
        return node


def _cuts_history(node: torch.fx.Node) -> bool:
    return not stamp_of(node).grad_enabled or node.target is torch.ops.aten.detach.default


def _passes_gradient(node: torch.fx.Node) -> bool:
    if _cuts_history(node):
        return False
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return value.dtype.is_floating_point or value.dtype.is_complex
    return True


def flat_types(types: Iterable[Type]) -> list[TensorType]:
    """Flattens a sequence of types."""
    return [inner for type_ in types for inner in flatten_type(type_)]


# ---- programs run call by call -------------------------------------------------------------------


def interpret(
    program: Program, args: Sequence[Any], values: Values | None = None
) -> tuple[Any, ...]:
    """Runs a program operator by operator; ``values`` are those of symbols, structs are tuples."""
    env: dict[Value, Any] = dict(zip(program.inputs, args, strict=True))
    for call in program.calls:
        results = _apply(call, [env[v] for v in call.args], values)
        env.update(zip(call.results, results, strict=True))
    return tuple(env[v] for v in program.outputs)


def _apply(call: Call, args: list[Any], values: Values | None) -> Sequence[Any]:
    closure: Closure = call.closure
    if isinstance(closure, Composite):
        return interpret(closure.program, args, values)
    if isinstance(closure, Leaf):
        interpreter = ModalInterpreter(closure.module)
        interpreter.values = values
        flat = [tensor for arg in args for tensor in flatten_value(arg)]
        return as_values(closure.output_types, interpreter.run_flat(flat))
    return (tuple(args),) if isinstance(closure, Pack) else args[0]


def flatten_value(value: Any) -> list[Any]:
    """Flattens nested tuples of tensors."""
    if isinstance(value, tuple):
        return [inner for item in value for inner in flatten_value(item)]
    return [value]


def as_values(types: Iterable[Type], tensors: Iterable[Any]) -> list[Any]:
    """Groups flat tensors into values of some types: a tuple for a struct."""
    rest = iter(tensors)
    return [_unflatten(type_, rest) for type_ in types]


def _unflatten(type_: Type, tensors: Any) -> Any:
    if isinstance(type_, StructType):
        return tuple(_unflatten(field, tensors) for field in type_.fields)
    return next(tensors)
