"""Leaf bodies: building ATen graphs, comparing them exactly, and running them, programs too.

A node carries a :class:`Stamp` in ``meta["stamp"]``: the grad mode and autocast state that the
user's code ran it under, and the user's source line. The stamp replaces the mode-switching nodes
a trace would hold, so a graph can be cut anywhere without losing the mode.

The reference interpreter runs a program call by call on real tensors, nothing clever: tests compare
every other way of running a program with it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import torch
import torch.fx

from ..freeze import Freezer
from ..torch_names import memory_id, module_of
from .operators import WRITES_STATISTICS, mutated_args
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
    """Runs as if the caller had no autocast: a graph names all its own casts."""
    active = [d for d in ("cpu", "cuda") if torch.is_autocast_enabled(d)]
    if not active:
        yield
        return
    with contextlib.ExitStack() as stack:
        for device in active:
            stack.enter_context(torch.autocast(device, enabled=False))
        yield


def called_without_autocast(function: Callable[..., Any]) -> Callable[..., Any]:
    """Lets a function that each step calls run so; without autocast it costs no context."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not (torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")):
            return function(*args, **kwargs)
        with without_autocast():
            return function(*args, **kwargs)

    return wrapper


LaidOut = Callable[[Any, torch.fx.Node], Any]
"""Gives the result of an operator the layout that its node has seen."""


def as_it_is(result: Any, node: torch.fx.Node) -> Any:
    """Leaves a result laid out as it is."""
    return result


class ModalInterpreter(SizedInterpreter):
    """Runs a leaf body node by node under the modes in the nodes' stamps.

    Autocast is entered anew for each run of nodes with one state, and grad mode can only be
    switched off (``grad_enabled=False`` in a stamp), never on.

    Args:
        module: the body.
        laid_out: gives the result of an operator the layout that the node has seen.
    """

    def __init__(self, module: torch.fx.GraphModule, laid_out: LaidOut = as_it_is) -> None:
        super().__init__(module, garbage_collect_values=True)
        self.extra_traceback = False  # it would go into messages of ours, which name the line
        self._laid_out = laid_out
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
            if (stamp.grad_enabled, stamp.autocast) != self._modes:
                self._switch(stamp)
        return self._laid_out(super().run_node(n), n)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Calls an operator, or the replacement of one whose checks a trace would lose."""
        return super().call_function(_CHECKED.get(target, target), args, kwargs)

    def _switch(self, stamp: Stamp) -> None:
        self._stack.close()
        self._modes = (stamp.grad_enabled, stamp.autocast)
        if not stamp.grad_enabled:
            self._stack.enter_context(torch.no_grad())
        for device, enabled, dtype in stamp.autocast:
            region = torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=False)
            self._stack.enter_context(region)


def _one_hot(index: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    """Takes it apart so that a class out of range remains an error."""
    zeros, places = index.new_zeros((*index.shape, num_classes)), index.unsqueeze(-1)
    return zeros.scatter(-1, places, torch.ones_like(places))


def _scattered(operator: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Writes a number by an operator that writes a tensor."""

    # A number in a constant tensor becomes a comparison with the index, which no index fails.
    def scatter(x: torch.Tensor, dim: int, index: torch.Tensor, value: Any) -> torch.Tensor:
        return operator(x, dim, index, x.new_full(index.shape, value))

    return scatter


_aten = torch.ops.aten
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

    Args:
        name: hint for the closure's printed name.
        nodes: the operators, in order.
        inputs: the nodes outside that become placeholders; may be fewer than are used only if
            nothing else is used.
        outputs: nodes inside (or inputs) that are returned.
        cloned_inputs: positions of inputs that the body changes in place. The body works on a
            copy, and the copy's final state is returned after ``outputs``, so the leaf is pure.
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
    """A dictionary's key of parts that need not be hashable: hashed by little, compared in full."""

    __slots__ = ("_parts",)

    def __init__(self, parts: Any) -> None:
        self._parts = parts

    def __hash__(self) -> int:
        return hash((len(self._parts), self._parts[0]))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FullKey) and self._parts == other._parts


def leaf_key(leaf: Leaf, numbers: Mapping[torch.fx.Node, Any] | None = None) -> Any:
    """Returns a value that is equal for two leaves only if their graphs compute the same.

    Operators, constants (with their Python type), modes, input types and wiring all count;
    names and source lines do not.

    Args:
        leaf: the leaf.
        numbers: for some operators, what counts instead of their second argument, a number.
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
    """Freezes what an operator is given: constants with their types, nodes by their number.

    What ``torch.fx`` looks into for nodes is taken apart here, as there is one for each operator:
    to freeze it like an object of a user's takes ten times as long.

    Args:
        operands: as a node holds them.
        number: of each node that may be among them.
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


def is_active(leaf: Leaf, active_inputs: Sequence[bool]) -> tuple[bool, ...]:
    """Says which flat outputs can carry a gradient back to one of the active flat inputs."""
    # It may say yes where autograd says no, never the other way: then a gradient would be lost.
    return tuple(map(carries_gradient(leaf, active_inputs), outputs_of(leaf.module)))


def carries_gradient(leaf: Leaf, active_inputs: Sequence[bool]) -> Callable[[object], bool]:
    """Returns what says of a node whether it can; see :func:`is_active`."""
    active: set[Any] = set()  # nodes, and memory that something active was written to
    placeholders = leaf.entries
    active.update(n for n, flag in zip(placeholders, active_inputs, strict=True) if flag)

    def carries(node: object) -> bool:
        return isinstance(node, torch.fx.Node) and (node in active or memory_of(node) in active)

    for node in leaf.nodes:
        if any(map(carries, mutated_args(node))):
            active.add(node)  # it returns what it changed; no_grad leaves the earlier history
        if any(map(carries, node.all_input_nodes)) and _passes_gradient(node):
            active.add(node)
            if node.target not in WRITES_STATISTICS:
                active.update(map(memory_of, mutated_args(node)))
    return carries


def memory_of(node: torch.fx.Node) -> Any:
    """Returns what a node's value shares with its views; the node itself if it has no memory."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return node
    try:
        return memory_id(value)
    except NotImplementedError:  # a tensor inside torch.func, before torch 2.13
        return node


def _passes_gradient(node: torch.fx.Node) -> bool:
    if not stamp_of(node).grad_enabled or node.target is torch.ops.aten.detach.default:
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
    """Runs a program operator by operator.

    Args:
        program: what is run.
        args: tensors for tensor inputs, nested tuples for struct inputs.
        values: the number of each symbol, where sizes are symbols.
    """
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
    """Returns values of types, of flat tensors."""
    rest = iter(tensors)
    return [_unflatten(type_, rest) for type_ in types]


def _unflatten(type_: Type, tensors: Any) -> Any:
    if isinstance(type_, StructType):
        return tuple(_unflatten(field, tensors) for field in type_.fields)
    return next(tensors)
