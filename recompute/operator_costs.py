"""What an operator costs: FLOPs, and seconds by a roofline of FLOPs and bytes moved."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.fx
from torch.fx.node import map_arg

from ..reuse.ir.leaf import is_view
from ..reuse.ir.types import TensorType
from ..reuse.torch_names import operator_schema


class CostModel(Protocol):
    """What computing and what saving a value costs, in seconds."""

    def redo_s(self, node: torch.fx.Node) -> float:
        """Seconds to compute a node's value from its operands."""

    def save_s(self, node: torch.fx.Node) -> float:
        """Seconds to write a value and read it back, where it would not have been written."""


_ATTENTION_NAMES = ("scaled_dot_product", "flash_attention", "efficient_attention")


def flops(node: torch.fx.Node) -> int:
    """Returns the floating-point operations of a matrix product, convolution or attention, or 0."""
    from torch.utils.flop_counter import flop_registry

    packet = getattr(node.target, "overloadpacket", None)
    formula = flop_registry.get(packet)
    if formula is None and is_attention(node) and "backward" not in str(node.target):
        known = (f for op, f in flop_registry.items() if str(op).endswith("flash_attention"))
        formula = next(known, None)
        args, kwargs = _values(node.args[:3]), {}
    elif formula is not None:
        args, kwargs = _values(node.args), _values(node.kwargs)
    if formula is None:
        return 0
    return int(formula(*args, **kwargs, out_val=_values(node)))


def is_attention(node: torch.fx.Node) -> bool:
    """Whether a node is a fused attention operator."""
    return any(part in str(node.target) for part in _ATTENTION_NAMES)


def is_heavy(node: torch.fx.Node) -> bool:
    """Whether an operator's work grows faster than its operands: products and attention."""
    return is_attention(node) or flops(node) > 0


def is_free(node: torch.fx.Node) -> bool:
    """Whether a node computes nothing: views, and picks of results."""
    return node.op != "call_function" or is_view(node) or operator_schema(node) is None


def value_bytes(node: torch.fx.Node) -> int:
    """Returns the bytes of a node's value (of all its results)."""
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else (value,)
    return sum(TensorType.of(v).num_bytes for v in values if isinstance(v, torch.Tensor))


@dataclass(frozen=True)
class Roofline:
    """Seconds by the slower of arithmetic and memory, for one device.

    Attributes:
        flops_per_s: arithmetic of matrix products.
        half_flops_per_s: the same in half precision, where that is faster.
        bytes_per_s: memory traffic.
        fused: whether elementwise operators are fused into what reads them, and then move no
            bytes of their own.
    """

    flops_per_s: float = 5e10
    half_flops_per_s: float = 0.0
    bytes_per_s: float = 1e10
    fused: bool = True

    def redo_s(self, node: torch.fx.Node) -> float:
        """See :class:`CostModel`."""
        if is_free(node):
            return 0.0
        written = value_bytes(node)
        read = sum(value_bytes(n) for n in node.all_input_nodes)
        traffic = (read + written) / self.bytes_per_s
        if is_heavy(node):
            return max(flops(node) / self._rate(node), traffic)
        if self.fused and is_elementwise(node):
            return written / self.bytes_per_s / 4
        return traffic

    def _rate(self, node: torch.fx.Node) -> float:
        value = node.meta["val"]
        first = value[0] if isinstance(value, (tuple, list)) else value
        is_half = first.dtype in (torch.float16, torch.bfloat16)
        return max(self.flops_per_s, self.half_flops_per_s if is_half else 0.0)

    def save_s(self, node: torch.fx.Node) -> float:
        """See :class:`CostModel`."""
        if self.fused and is_elementwise(node):
            return 2 * value_bytes(node) / self.bytes_per_s
        return 0.0


def is_elementwise(node: torch.fx.Node) -> bool:
    """Whether each element of the result depends on one element of each operand."""
    tags = getattr(node.target, "tags", ())
    return torch.Tag.pointwise in tags or str(node.target).startswith("aten.where")


class Measured:
    """Runs each operator on random operands, here, and takes the shortest time.

    Args:
        fallback: for operators that do not run on such operands, and for saving.
        num_runs: how often each runs.
    """

    def __init__(self, fallback: CostModel, num_runs: int = 3) -> None:
        self._fallback = fallback
        self._num_runs = num_runs
        self._known: dict[Any, float] = {}

    def redo_s(self, node: torch.fx.Node) -> float:
        """See :class:`CostModel`."""
        if is_free(node):
            return 0.0
        key = (node.target, str(_types(node.args)), str(_types(node.kwargs)))
        if key not in self._known:
            try:
                self._known[key] = _run(node, self._num_runs)
            except (RuntimeError, IndexError, TypeError, ValueError):
                self._known[key] = self._fallback.redo_s(node)
        return self._known[key]

    def save_s(self, node: torch.fx.Node) -> float:
        """See :class:`CostModel`."""
        return self._fallback.save_s(node)


def _run(node: torch.fx.Node, num_runs: int) -> float:
    assert callable(node.target)
    best = float("inf")
    with torch.no_grad(), torch.random.fork_rng():
        args, kwargs = _real(node.args), _real(node.kwargs)
        for _ in range(num_runs + 1):
            start = time.perf_counter()
            node.target(*args, **kwargs)
            best = min(best, time.perf_counter() - start)
    return best


def _values(arguments: Any) -> Any:
    """Replaces nodes by their example values."""
    return map_arg(arguments, lambda n: n.meta["val"])


def _types(arguments: Any) -> Any:
    return map_arg(arguments, lambda n: _type(n.meta.get("val")))


def _type(value: Any) -> Any:
    return TensorType.of(value) if isinstance(value, torch.Tensor) else type(value)


def _real(arguments: Any) -> Any:
    def tensor(node: torch.fx.Node) -> Any:
        value = node.meta["val"]
        if not isinstance(value, torch.Tensor):
            raise TypeError("not a tensor")
        type_ = TensorType.of(value)
        empty = torch.empty_strided(
            type_.shape, type_.stride, dtype=type_.dtype, device=type_.device
        )
        return empty.uniform_() if type_.is_differentiable else empty.zero_()

    return map_arg(arguments, tensor)
