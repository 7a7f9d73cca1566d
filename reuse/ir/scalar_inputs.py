"""Numbers as inputs: where an operator may take a 0-d tensor for a number, with the same bits.

The operators are sums, differences, products and quotients of a tensor and a number, on the CPU:
CUDA kernels read a number in higher precision than a tensor. An operator rounds a Python number to
the dtype it computes in, and so does :class:`Number`.

Products in f16 and bf16 are computed with the number in f32 and rounded once, so the input is f32
and the casts are written out. Sums in f16 and bf16 differ from kernel to kernel and are left alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch.fx.node import map_arg

from ..torch_names import OPERATOR_TYPES
from .leaf import stamp_of
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
"""The operators, each with the form that takes a tensor for the number."""
_REDUCED = (torch.float16, torch.bfloat16)
_EXACT_IN_REDUCED = (aten.mul.Tensor, aten.div.Tensor)
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
    """An operator whose number may become an input.

    Attributes:
        node: the operator; the number is its second argument.
        number: the number there now.
        rounded_to: the dtype to which a product in f32 is rounded; None if nothing is cast.
    """

    node: torch.fx.Node
    number: Number
    rounded_to: torch.dtype | None


def slot_of(node: torch.fx.Node) -> Slot | None:
    """Returns the place of a number in an operator that may be an input, if there is one."""
    is_known = isinstance(node.target, OPERATOR_TYPES) and node.target in _FORMS
    if not is_known or len(node.args) != 2 or node.kwargs:
        return None
    operand, value = node.args
    result = node.meta.get("val")
    given = operand.meta.get("val") if isinstance(operand, torch.fx.Node) else None
    if not all(isinstance(t, torch.Tensor) and t.device.type == "cpu" for t in (given, result)):
        return None
    if type(value) not in (int, float):
        return None
    dtype = torch.result_type(given, value)  # type: ignore[arg-type]
    rounded_to = dtype if dtype in _REDUCED else None
    if rounded_to and not (
        node.target in _EXACT_IN_REDUCED and given.dtype == result.dtype == dtype  # type: ignore[union-attr]
    ):
        return None
    number = Number.of(value, torch.float32 if rounded_to else dtype)  # type: ignore[arg-type]
    slot = Slot(node, number, rounded_to)
    return slot if _fits(number) and _gives(slot, TensorType.of(result)) else None  # type: ignore[arg-type]


def replace(
    slot: Slot, graph: torch.fx.Graph, operand: torch.fx.Node, entry: torch.fx.Node
) -> torch.fx.Node:
    """Adds the operator of a slot to a graph, with an input in place of the number.

    Args:
        slot: the place.
        graph: grows at its end.
        operand: the operator's tensor in that graph.
        entry: the input that carries the number.
    """

    def add(target: Any, *args: Any) -> torch.fx.Node:
        node = graph.call_function(target, args)
        node.meta["stamp"] = stamp_of(slot.node)
        node.meta["val"] = target(*map_arg(args, lambda n: _meta_tensor(n.meta["val"])))
        return node

    if slot.rounded_to is not None:
        operand = add(aten.to.dtype, operand, torch.float32)
    made = add(_FORMS[slot.node.target], operand, entry)
    if slot.rounded_to is not None:
        made = add(aten.to.dtype, made, slot.rounded_to)
    return made


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


def _gives(slot: Slot, expected: TensorType) -> bool:
    """Whether the operator on an input gives the same dtype, shape and strides."""
    graph = torch.fx.Graph()
    operand, entry = graph.placeholder("x"), graph.placeholder("number")
    operand.meta["val"] = slot.node.all_input_nodes[0].meta["val"]
    entry.meta["val"] = slot.number.tensor()
    found = TensorType.of(replace(slot, graph, operand, entry).meta["val"])
    layout = (found.dtype, found.shape, found.stride)
    return layout == (expected.dtype, expected.shape, expected.stride)


def _meta_tensor(like: torch.Tensor) -> torch.Tensor:
    """Returns a tensor without data, of the same dtype, shape and strides."""
    shape, stride = tuple(like.shape), tuple(like.stride())
    return torch.empty_strided(shape, stride, dtype=like.dtype, device="meta")
