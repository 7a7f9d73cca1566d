"""How long a GPU will need at least, by the roofline: each launch moves its operands, and computes.

A launch takes the longer of the two times, that of its products at the peak rate of their dtype and
that of its bytes at the memory's peak bandwidth, and never less than it takes to start. No program
reaches the peaks, so this is a lower bound, predicted and not measured.

Source: Williams, Waterman, Patterson: Roofline, CACM 52(4), 2009.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ...reuse.torch_names import matmul_precision
from ..launches.kernel_list import KernelList, Launch, View
from .targets import Target
from .torch_triton import LoadedKernel
from .triton_kernel import TritonKernel

_LEAST_S = 2e-6  # from one launch in a CUDA graph to the next
_PRODUCTS: Mapping[Any, Any] = {
    torch.mm: torch.ops.aten.mm,
    torch.addmm: torch.ops.aten.addmm,
    torch.bmm: torch.ops.aten.bmm,
    torch.baddbmm: torch.ops.aten.baddbmm,
}


@dataclass(frozen=True)
class Prediction:
    """What the launches of a program will take, at least.

    Attributes:
        seconds: of all launches, one after the other.
        product_s: of those that compute longer than they move bytes.
        flops: operations in products, convolutions and attention.
        moved_bytes: that launches read and write.
        num_launches: of the program.
        num_triton: those that are Inductor's kernels; the rest are PyTorch's.
    """

    seconds: float = 0.0
    product_s: float = 0.0
    flops: int = 0
    moved_bytes: int = 0
    num_launches: int = 0
    num_triton: int = 0

    def plus(self, other: Prediction, times: int = 1) -> Prediction:
        """Returns it with another one, so many times."""
        return Prediction(
            self.seconds + times * other.seconds,
            self.product_s + times * other.product_s,
            self.flops + times * other.flops,
            self.moved_bytes + times * other.moved_bytes,
            self.num_launches + times * other.num_launches,
            self.num_triton + times * other.num_triton,
        )


def is_product(launch: Launch) -> bool:
    """Whether cuBLAS computes it."""
    operator = _PRODUCTS.get(launch.function, launch.function)
    return getattr(operator, "overloadpacket", operator) in _PRODUCTS.values()


def predict(lists: Iterable[tuple[KernelList, int]], target: Target) -> Prediction:
    """Predicts a program: each closure once, times its calls.

    Args:
        lists: the launches of each closure, and how often the program calls it.
        target: the GPU.
    """
    total = Prediction()
    for kernels, num_calls in lists:
        once = Prediction()
        for launch in kernels.launches:
            once = once.plus(_of_launch(launch, target))
        total = total.plus(once, num_calls)
    return total


def launch_seconds(launch: Launch, target: Target) -> float:
    """Returns how long one launch takes at least."""
    return _of_launch(launch, target).seconds


def _of_launch(launch: Launch, target: Target) -> Prediction:
    views = list(launch.views())
    moved = sum(math.prod(v.shape) * v.dtype.itemsize for v in views)
    flops = _flops_of(launch)
    dtype = next((v.dtype for v in views if v.dtype.is_floating_point), torch.float32)
    product_s = flops / _rate(dtype, target)
    moved_s = moved / target.bandwidth_bytes_per_s
    seconds = max(product_s, moved_s, _LEAST_S)
    return Prediction(
        seconds,
        product_s if product_s == seconds else 0.0,
        flops,
        moved,
        1,
        int(isinstance(launch.function, (TritonKernel, LoadedKernel))),
    )


def _rate(dtype: torch.dtype, target: Target) -> float:
    if dtype in (torch.float16, torch.bfloat16):
        return target.half_flops_per_s
    may_be_less_exact = dtype is torch.float32 and matmul_precision()[0] == "tf32"
    return target.tf32_flops_per_s if may_be_less_exact else target.single_flops_per_s


def _flops_of(launch: Launch) -> int:
    from torch.utils.flop_counter import flop_registry  # it imports Triton

    function = launch.function
    operator = _PRODUCTS.get(function, function)
    formula = flop_registry.get(getattr(operator, "overloadpacket", operator))
    if formula is None:
        return 0
    kwargs = dict(launch.kwargs)
    results = kwargs.pop("out", None) or launch.results
    return _counted(formula, launch.args, kwargs, results)


def _counted(formula: Callable[..., Any], args: Any, kwargs: Any, results: Any) -> int:
    named = {name: _as_meta(value) for name, value in kwargs.items()}
    return int(formula(*map(_as_meta, args), **named, out_val=_as_meta(results)))


def _as_meta(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(map(_as_meta, value))
    if not isinstance(value, View):
        return value
    return torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device="meta")
