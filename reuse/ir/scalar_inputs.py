"""Numbers as inputs: where an operator may take a 0-d tensor for a number, with the same bits.

An operator rounds a Python number to the dtype it computes in, and so does :class:`Number`. The
rules below are a whitelist: elementwise operators that compute one value from each element and the
number, and fills. Operators for which a number chooses the algorithm (``pow``), a layout, or a
scale inside a kernel are not in it, and neither is any device but the CPU: CUDA kernels read a
number in higher precision than a tensor.

Products in f16 and bf16 are computed with the number in f32 and rounded once, so the input is f32
and the casts are written out. Sums in f16 and bf16 differ from kernel to kernel and are left alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.fx
from torch.fx.node import map_arg

from ..torch_names import OPERATOR_TYPES
from .leaf import stamp_of
from .types import TensorType

aten = torch.ops.aten
_REDUCED = (torch.float16, torch.bfloat16)
_EXACT_INTEGERS = 2**53  # integers up to here are exact in every step from int to float


@dataclass(frozen=True, slots=True)
class Number:
    """A number as one operator sees it.

    Attributes:
        text: the Python number, exactly: ``float.hex`` or decimal digits.
        kind: ``float`` or ``int``, as it was written.
        dtype: what it is rounded to.
    """

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


@dataclass(frozen=True, slots=True)
class Slot:
    """A place in a graph where a number may become an input.

    Attributes:
        node: the operator.
        position: which of its arguments is the number.
        number: the number there now.
        build: adds the operator on an input instead; takes a graph, the arguments there and the
            input.
    """

    node: torch.fx.Node
    position: int
    number: Number
    build: Build


Build = Callable[[torch.fx.Graph, tuple[Any, ...], torch.fx.Node], torch.fx.Node]


def slot_of(node: torch.fx.Node) -> Slot | None:
    """Returns the place of a number in an operator that may be an input, if there is one."""
    result = node.meta.get("val")
    rule = _RULES.get(node.target) if isinstance(node.target, OPERATOR_TYPES) else None
    if rule is None or not isinstance(result, torch.Tensor) or result.device.type != "cpu":
        return None
    position = rule.position
    value = node.args[position] if position < len(node.args) else None
    if type(value) not in (int, float):
        return None
    operands = [n.meta.get("val") for n in node.all_input_nodes]
    if any(not isinstance(t, torch.Tensor) or t.device.type != "cpu" for t in operands):
        return None
    found = rule.choose(node, value, result, operands)  # type: ignore[arg-type]
    if found is None or not _fits(value, found[0].type.dtype):  # type: ignore[arg-type]
        return None
    slot = Slot(node, position, *found)
    return slot if _same_type(slot, TensorType.of(result)) else None


def replace(
    slot: Slot, graph: torch.fx.Graph, args: tuple[Any, ...], entry: torch.fx.Node
) -> torch.fx.Node:
    """Adds the operator of a slot to a graph, with ``entry`` in place of the number.

    Args:
        slot: the place.
        graph: grows at its end.
        args: the operator's arguments in that graph.
        entry: the input that carries the number.
    """
    first = len(graph.nodes)
    made = slot.build(graph, args, entry)
    for node in list(graph.nodes)[first:]:
        node.meta["stamp"] = stamp_of(slot.node)
        node.meta["val"] = _meta_result(node)
    made.meta.update(slot.node.meta)
    return made


@dataclass(frozen=True, slots=True)
class _Rule:
    position: int
    choose: Callable[
        [torch.fx.Node, float, torch.Tensor, list[torch.Tensor]], tuple[Number, Build] | None
    ]


def _elementwise(target: Any, reduced: Literal["wide", "refuse"]) -> _Rule:
    """An operator of a tensor and a number, which computes in their common dtype.

    Args:
        target: the form that takes a tensor for the number.
        reduced: ``"wide"`` if f16 and bf16 are computed in f32, ``"refuse"`` to leave them.
    """

    def choose(
        node: torch.fx.Node, value: float, result: torch.Tensor, operands: list[torch.Tensor]
    ) -> tuple[Number, Build] | None:
        if len(operands) != 1 or len(node.args) != 2 or node.kwargs:
            return None
        (operand,) = operands
        dtype = torch.result_type(operand, value)
        if dtype not in _REDUCED:
            return Number.of(value, dtype), _Plain(target)
        if reduced == "refuse" or operand.dtype != dtype or result.dtype != dtype:
            return None
        return Number.of(value, torch.float32), _Wide(target, dtype)

    return _Rule(1, choose)


@dataclass(frozen=True, slots=True)
class _Plain:
    """The same arguments, with the input in place of the number."""

    target: Any
    position: int = 1

    def __call__(
        self, graph: torch.fx.Graph, args: tuple[Any, ...], entry: torch.fx.Node
    ) -> torch.fx.Node:
        given = (*args[: self.position], entry, *args[self.position + 1 :])
        return graph.call_function(self.target, given)


@dataclass(frozen=True, slots=True)
class _Wide:
    """The same in f32, rounded to ``dtype`` once."""

    target: Any
    dtype: torch.dtype

    def __call__(
        self, graph: torch.fx.Graph, args: tuple[Any, ...], entry: torch.fx.Node
    ) -> torch.fx.Node:
        wide = graph.call_function(aten.to.dtype, (args[0], torch.float32))
        result = graph.call_function(self.target, (wide, entry))
        return graph.call_function(aten.to.dtype, (result, self.dtype))


def _chosen(target: Any, position: int) -> _Rule:
    """An operator that puts the number, rounded to the result's dtype, in some elements."""

    def choose(
        node: torch.fx.Node, value: float, result: torch.Tensor, operands: list[torch.Tensor]
    ) -> tuple[Number, Build] | None:
        kept = {t.dtype for t in operands if t.dtype != torch.bool}
        if kept != {result.dtype}:
            return None
        return Number.of(value, result.dtype), _Plain(target, position)

    return _Rule(position, choose)


@dataclass(frozen=True, slots=True)
class _Fill:
    """A contiguous tensor of one number."""

    shape: tuple[int, ...]

    def __call__(
        self, graph: torch.fx.Graph, args: tuple[Any, ...], entry: torch.fx.Node
    ) -> torch.fx.Node:
        spread = graph.call_function(aten.expand.default, (entry, list(self.shape)))
        layout: dict[str, Any] = {"memory_format": torch.contiguous_format}
        return graph.call_function(aten.clone.default, (spread,), layout)


def _filling(
    node: torch.fx.Node, value: float, result: torch.Tensor, operands: list[torch.Tensor]
) -> tuple[Number, Build] | None:
    if result.requires_grad or not result.is_contiguous():
        return None
    return Number.of(value, result.dtype), _Fill(tuple(result.shape))


_RULES: Mapping[Any, _Rule] = {
    aten.mul.Tensor: _elementwise(aten.mul.Tensor, "wide"),
    aten.add.Tensor: _elementwise(aten.add.Tensor, "refuse"),
    aten.sub.Tensor: _elementwise(aten.sub.Tensor, "refuse"),
    aten.div.Tensor: _elementwise(aten.div.Tensor, "wide"),
    aten.rsub.Scalar: _elementwise(aten.rsub.Tensor, "refuse"),
    aten.mul_.Tensor: _elementwise(aten.mul_.Tensor, "refuse"),
    aten.add_.Tensor: _elementwise(aten.add_.Tensor, "refuse"),
    aten.sub_.Tensor: _elementwise(aten.sub_.Tensor, "refuse"),
    aten.div_.Tensor: _elementwise(aten.div_.Tensor, "refuse"),
    aten.lt.Scalar: _elementwise(aten.lt.Tensor, "refuse"),
    aten.le.Scalar: _elementwise(aten.le.Tensor, "refuse"),
    aten.gt.Scalar: _elementwise(aten.gt.Tensor, "refuse"),
    aten.ge.Scalar: _elementwise(aten.ge.Tensor, "refuse"),
    aten.eq.Scalar: _elementwise(aten.eq.Tensor, "refuse"),
    aten.ne.Scalar: _elementwise(aten.ne.Tensor, "refuse"),
    aten.where.ScalarOther: _chosen(aten.where.self, 2),
    aten.where.ScalarSelf: _chosen(aten.where.self, 1),
    aten.masked_fill.Scalar: _chosen(aten.masked_fill.Tensor, 2),
    aten.full.default: _Rule(1, _filling),
    aten.full_like.default: _Rule(1, _filling),
    aten.new_full.default: _Rule(2, _filling),
}


def _fits(value: float, dtype: torch.dtype) -> bool:
    """Whether rounding a number to a dtype is one well-defined step."""
    if dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
        limits = torch.iinfo(dtype)
        return type(value) is int and limits.min <= value <= limits.max
    if not dtype.is_floating_point:
        return False
    if type(value) is float:  # some operators refuse what is beyond, others take it for infinity
        return not math.isfinite(value) or abs(value) <= torch.finfo(dtype).max
    return abs(value) <= _EXACT_INTEGERS


def _same_type(slot: Slot, expected: TensorType) -> bool:
    """Whether the replacement gives the same dtype, shape and strides."""
    graph = torch.fx.Graph()
    entries = {}
    for operand in slot.node.all_input_nodes:
        entries[operand] = graph.placeholder(operand.name)
        entries[operand].meta["val"] = operand.meta["val"]
    args: Any = map_arg(slot.node.args, entries.__getitem__)
    entry = graph.placeholder("number")
    entry.meta["val"] = slot.number.tensor()
    made = slot.build(graph, args, entry)
    for node in graph.nodes:
        if node.op != "placeholder":
            node.meta["val"] = _meta_result(node)
    found = TensorType.of(made.meta["val"])
    layout = (found.dtype, found.shape, found.stride)
    return layout == (expected.dtype, expected.shape, expected.stride)


def _meta_result(node: torch.fx.Node) -> torch.Tensor:
    """Runs an operator on tensors without data."""
    given: Any = map_arg((node.args, dict(node.kwargs)), lambda n: meta_tensor(n.meta["val"]))
    args, kwargs = given
    result: torch.Tensor = node.target(*args, **kwargs)  # type: ignore[operator]
    return result


def meta_tensor(like: torch.Tensor) -> torch.Tensor:
    """Returns a tensor without data, of the same dtype, shape and strides."""
    shape, stride = tuple(like.shape), tuple(like.stride())
    return torch.empty_strided(shape, stride, dtype=like.dtype, device="meta")
