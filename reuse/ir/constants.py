"""Constants as inputs: closures that differ only in Python numbers become one closure.

A pass over a captured program, callees first. Leaves whose graphs differ only in numbers that are
added, subtracted, multiplied or divided by share one leaf, with those numbers as further inputs. A
closure that calls such a leaf takes the numbers as inputs itself, so two closures that differ only
in them become one as well. In the entry program each different number is an input bound to a 0-d
tensor.

A 0-d tensor replaces a number only where the bits stay the same: in sums, differences, products and
quotients of a tensor and a number, on the CPU (CUDA kernels read a number in higher precision than
a tensor). An operator rounds a Python number to the dtype it computes in, and so does
:class:`Number`: a ``1`` and a ``1.0`` of one dtype may share. In f16 and bf16 some kernels compute
with the number in f32 and others round it first, so there numbers stay in the closure, and blocks
with different ones are compiled once each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import replace as replace_fields
from typing import Any, Literal, TypeVar

import torch
import torch.fx

from ..torch_names import OPERATOR_TYPES, module_of
from .control import program_key, with_bodies
from .leaf import FullKey, leaf_key
from .program import Call, Closure, Composite, Leaf, ModelTensor, Program, Value, walk_closures
from .types import TensorType

aten = torch.ops.aten
_FORMS: Mapping[Any, Any] = {
    aten.rsub.Scalar: aten.rsub.Tensor,
    **{
        one: one
        for one in (
            *(aten.mul.Tensor, aten.add.Tensor, aten.sub.Tensor, aten.div.Tensor),
            *(aten.mul_.Tensor, aten.add_.Tensor, aten.sub_.Tensor, aten.div_.Tensor),
        )
    },
}
"""The operators, each with the overload that takes a tensor for the number."""
_REDUCED = (torch.float16, torch.bfloat16)
_EXACT_INTEGERS = 2**53  # integers up to here are exact in every step from int to float


@dataclass(frozen=True, slots=True)
class Number:
    """A Python number, as its exact text, and the dtype that an operator rounds it to."""

    text: str
    kind: type
    dtype: torch.dtype

    @classmethod
    def of(cls, value: float, dtype: torch.dtype) -> Number:
        """Returns a number for a dtype."""
        return cls(value.hex() if type(value) is float else str(value), type(value), dtype)

    @property
    def value(self) -> float:
        """The Python number."""
        return float.fromhex(self.text) if self.kind is float else int(self.text)

    @property
    def type(self) -> TensorType:
        """The type of the input that carries it."""
        return TensorType(self.dtype, (), (), torch.device("cpu"))

    def tensor(self) -> torch.Tensor:
        """Returns it as a tensor."""
        return torch.full((), self.value, dtype=self.dtype, device="cpu")


def number_of(node: torch.fx.Node) -> Number | None:
    """Returns the number of an operator that may be an input, its second argument, if it has one.

    The operator on an input gives the same dtype, as the number has the one that it computes in.
    """
    is_known = isinstance(node.target, OPERATOR_TYPES) and node.target in _FORMS
    if not is_known or len(node.args) != 2 or node.kwargs:
        return None
    operand, value = node.args
    given = operand.meta.get("val") if isinstance(operand, torch.fx.Node) else None
    if type(value) not in (int, float) or not isinstance(given, torch.Tensor):
        return None
    dtype = torch.result_type(given, value)  # type: ignore[arg-type]
    if dtype in _REDUCED or given.device.type != "cpu":
        return None
    number = Number.of(value, dtype)  # type: ignore[arg-type]
    return number if _fits(number) else None


def with_input(node: torch.fx.Node, entry: torch.fx.Node) -> None:
    """Puts an input in place of an operator's number."""
    node.target, node.args = _FORMS[node.target], (node.args[0], entry)


def _fits(number: Number) -> bool:
    """Whether rounding a number to its dtype is one well-defined step."""
    value, dtype = number.value, number.dtype
    if dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
        limits = torch.iinfo(dtype)
        return type(value) is int and limits.min <= value <= limits.max
    if not dtype.is_floating_point:
        return False
    if type(value) is float:  # some operators refuse what is beyond, others take it for infinity
        return not math.isfinite(value) or abs(value) <= torch.finfo(dtype).max
    return abs(value) <= _EXACT_INTEGERS


Item = TypeVar("Item")


@dataclass(frozen=True)
class Shared:
    """The closure that replaces others which differ in numbers only."""

    closure: Closure  # the closure to call instead
    numbers: tuple[Number, ...] = ()  # further operands, after the original ones
    num_members: int = 1  # how many different closures it replaces


def share_constants(program: Program) -> tuple[Program, Mapping[Closure, Shared]]:
    """Makes one closure of those that are equal up to numbers.

    Returns the program (the same one if nothing could be shared), and for each of its closures the
    replacement.
    """
    found: dict[Closure, Shared] = {}
    # Callees first: callers are compared with their callees replaced.
    for closures in _by_height(program):
        leaves = {_on_shared(c, found): c for c in closures if isinstance(c, Leaf)}
        for open_leaves in _groups(map(_OpenLeaf, leaves), lambda leaf: leaf.key):
            shared = _share_leaves(open_leaves)
            found.update((leaves[leaf], one) for leaf, one in shared.items())
        composites = [c for c in closures if isinstance(c, Composite)]
        bodies = (_OpenBody(c, c.program, found) for c in composites)
        for open_bodies in _groups(bodies, lambda body: body.key):
            found.update(_share_bodies(open_bodies))
        found.update((c, Shared(c)) for c in closures if c not in found)
    return _share_in_program(program, found), found


def _by_height(program: Program) -> list[list[Closure]]:
    """Groups the closures by how deep they call others: leaves first."""
    height: dict[Closure, int] = {}
    for closure in walk_closures(program):
        inside: Iterable[Closure] = closure.bodies if isinstance(closure, Leaf) else ()
        if isinstance(closure, Composite):
            inside = (call.closure for call in closure.program.calls)
        height[closure] = max((height[one] + 1 for one in inside), default=0)
    levels: list[list[Closure]] = [[] for _ in range(max(height.values(), default=-1) + 1)]
    for closure, level in height.items():
        levels[level].append(closure)
    return levels


def _on_shared(leaf: Leaf, found: Mapping[Closure, Shared]) -> Leaf:
    """Returns control flow on the closures that its bodies became, if these take no numbers."""
    if not leaf.bodies:
        return leaf
    bodies: list[Any] = [b if found[b].numbers else found[b].closure for b in leaf.bodies]
    return with_bodies(leaf, bodies)


def _groups(items: Iterable[Item], key_of: Callable[[Item], Any]) -> list[list[Item]]:
    """Groups items by their keys, which need not be hashable."""
    groups: dict[FullKey, list[Item]] = {}
    for item in items:
        groups.setdefault(FullKey(key_of(item)), []).append(item)
    return list(groups.values())


@dataclass(frozen=True)
class _Columns:
    """Which numbers become inputs: one row per member of a group, one column per place."""

    # For each place the position of its input, or None to leave the number in.
    input_of: tuple[int | None, ...]
    first: tuple[int, ...]  # for each input the first place that has it

    def numbers(self, row: Sequence[Number]) -> tuple[Number, ...]:
        """Returns the numbers that one member passes."""
        return tuple(row[place] for place in self.first)


def _columns(rows: Sequence[Sequence[Number]], keep: Literal["equal", "none"]) -> _Columns:
    """Makes one input of the places that hold the same number in every member (a row each).

    ``keep="equal"`` leaves a number that is the same in all members in the graph; ``"none"`` makes
    every place an input.
    """
    inputs: dict[Hashable, int] = {}
    input_of: list[int | None] = []
    first: list[int] = []
    for place, column in enumerate(zip(*rows, strict=True)):
        if keep == "equal" and len(set(column)) == 1:
            input_of.append(None)
            continue
        if column not in inputs:
            inputs[column] = len(inputs)
            first.append(place)
        input_of.append(inputs[column])
    return _Columns(tuple(input_of), tuple(first))


# ---- leaves ----------------------------------------------------------------------------------


class _OpenLeaf:
    """A leaf and the places where its numbers may become inputs."""

    def __init__(self, leaf: Leaf) -> None:
        self.leaf = leaf
        found = {n: number_of(n) for n in leaf.nodes} if leaf.level == "composite" else {}
        self.numbers = {node: number for node, number in found.items() if number is not None}
        dtypes = {node: ("a number", one.dtype) for node, one in self.numbers.items()}
        self.key = leaf_key(leaf, dtypes)

    @property
    def row(self) -> list[Number]:
        """The number in each place."""
        return [*self.numbers.values()]


def _share_leaves(members: Sequence[_OpenLeaf]) -> dict[Leaf, Shared]:
    first = members[0]
    columns = _columns([m.row for m in members], "equal")
    leaf = _leaf_with_inputs(first, columns) if columns.first else first.leaf
    return {m.leaf: Shared(leaf, columns.numbers(m.row), len(members)) for m in members}


def _leaf_with_inputs(member: _OpenLeaf, columns: _Columns) -> Leaf:
    """Returns a leaf that takes the numbers of some places as inputs."""
    old, numbers = member.leaf, columns.numbers(member.row)
    position = dict(zip(member.numbers, columns.input_of, strict=True))
    graph = torch.fx.Graph()
    new = {n: graph.node_copy(n) for n in old.entries}
    entries = [graph.placeholder(f"number{index}") for index in range(len(numbers))]
    for entry, number in zip(entries, numbers, strict=True):
        entry.meta["val"] = number.tensor()
    for node in old.module.graph.nodes:
        if node.op == "placeholder":
            continue
        new[node] = graph.node_copy(node, new.__getitem__)
        if (at := position.get(node)) is not None:
            with_input(new[node], entries[at])
    names = (*old.input_names, *(e.name for e in entries)) if old.input_names else ()
    module = module_of(graph)
    return Leaf(
        old.name, module, (*old.input_types, *(n.type for n in numbers)), old.output_types, names
    )


# ---- programs --------------------------------------------------------------------------------


class _OpenBody:
    """A program whose callees take numbers, and the numbers they would get."""

    def __init__(
        self, closure: Closure | None, program: Program, found: Mapping[Closure, Shared]
    ) -> None:
        self.closure = closure
        self.program = program
        self._found = found
        self.numbers = [n for call in program.calls for n in found[call.closure].numbers]

    @property
    def key(self) -> Any:
        """Equal for two programs that are equal up to their numbers."""

        def of_call(call: Call) -> Any:
            shared = self._found[call.closure]
            dtypes = tuple(n.dtype for n in shared.numbers)
            return id(shared.closure), dtypes, call.path, call.recompute

        return program_key(self.program, of_call)

    def calls(self, columns: _Columns, entries: Sequence[Value]) -> list[Call]:
        """Returns the calls on the shared closures, with inputs for their numbers."""
        inputs = iter(columns.input_of)
        calls = []
        for call in self.program.calls:
            shared = self._found[call.closure]
            further = [entries[next(inputs)] for _ in shared.numbers]  # type: ignore[index]
            same = shared.closure is call.closure
            args = (*call.args, *further)
            calls.append(call if same else replace_fields(call, closure=shared.closure, args=args))
        return calls


def _share_bodies(members: Sequence[_OpenBody]) -> dict[Closure, Shared]:
    first = members[0]
    columns = _columns([m.numbers for m in members], keep="none")
    entries = [Value(n.type, "number") for n in columns.numbers(first.numbers)]
    calls = first.calls(columns, entries)
    old = first.program
    closure: Any = first.closure
    if any(a is not b for a, b in zip(calls, old.calls, strict=True)):
        body = Program((*old.inputs, *entries), tuple(calls), old.outputs)
        names = (*closure.input_names, *(e.hint for e in entries)) if closure.input_names else ()
        closure = Composite(closure.name, body, names)
    shared: dict[Closure, Shared] = {}
    for member in members:
        assert member.closure is not None
        shared[member.closure] = Shared(closure, columns.numbers(member.numbers), len(members))
    return shared


def _share_in_program(program: Program, found: Mapping[Closure, Shared]) -> Program:
    """Rewrites the calls of a whole program; its numbers become inputs bound to tensors."""
    body = _OpenBody(None, program, found)
    columns = _columns([body.numbers], keep="none")
    numbers = columns.numbers(body.numbers)
    entries = [Value(n.type, f"number_{n.value!r}") for n in numbers]
    calls = body.calls(columns, entries)
    if all(a is b for a, b in zip(calls, program.calls, strict=True)):
        return program
    sources = tuple(ModelTensor(repr(n.value), n.tensor(), "constant") for n in numbers)
    return replace_fields(
        program,
        inputs=(*program.inputs, *entries),
        calls=tuple(calls),
        sources=(*program.sources, *sources),
    )
