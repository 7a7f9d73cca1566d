"""Predicts the least time that a GPU needs, by the roofline of :mod:`...reuse.ir.costs`.

No program reaches the peak rates of a GPU, so this is a lower bound, predicted and not measured. A
launch never takes less than it takes to start.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...reuse.ir.costs import Cost, flops_of
from ..launches.kernel_list import KernelList, Launch, View
from .targets import Target
from .torch_triton import LoadedKernel, TritonKernel

_LEAST_S = 2e-6  # from one launch in a CUDA graph to the next
_PRODUCTS: Mapping[Any, Any] = {
    torch.mm: torch.ops.aten.mm,
    torch.addmm: torch.ops.aten.addmm,
    torch.bmm: torch.ops.aten.bmm,
    torch.baddbmm: torch.ops.aten.baddbmm,
}


@dataclass(frozen=True)
class Prediction:
    """The least that the launches of a program will take.

    Attributes:
        cost: of all launches, one after the other.
        product_s: of those that compute longer than they move bytes.
        num_launches: of the program.
        num_triton: those that are Inductor's kernels; the rest are PyTorch's.
    """

    cost: Cost
    product_s: float
    num_launches: int
    num_triton: int


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
    total, product_s, num_launches, num_triton = Cost(), 0.0, 0, 0
    for kernels, num_calls in lists:
        for launch in kernels.launches:
            cost = launch_cost(launch, target)
            if len({kernels.buffers[view.buffer].device for view in launch.views()}) > 1:
                copied_s = cost.moved_bytes / 2 / target.rates.host_bytes_per_s
                cost = replace(cost, seconds=max(cost.seconds, copied_s))
            cost = cost.times(num_calls)
            total += cost
            # Above both the time to move bytes and the time to start, a launch computes.
            moved_s = target.rates.seconds(0, cost.moved_bytes)
            product_s += cost.seconds if cost.seconds > max(moved_s, num_calls * _LEAST_S) else 0.0
            num_launches += num_calls
            num_triton += num_calls * isinstance(launch.function, (TritonKernel, LoadedKernel))
    return Prediction(total, product_s, num_launches, num_triton)


def launch_cost(launch: Launch, target: Target) -> Cost:
    """Returns what one launch costs at least."""
    views = list(launch.views())
    moved = sum(math.prod(v.shape) * v.dtype.itemsize for v in views)
    kwargs = dict(launch.kwargs)
    results = kwargs.pop("out", None) or launch.results
    named = {name: _as_meta(value) for name, value in kwargs.items()}
    # Inductor launches ``torch.mm``; FLOPs are known of operators.
    operator = _PRODUCTS.get(launch.function, launch.function)
    flops = flops_of(operator, _as_meta(launch.args), named, _as_meta(results))
    dtype = next((v.dtype for v in views if v.dtype.is_floating_point), torch.float32)
    return Cost(flops, moved, max(target.rates.seconds(flops, moved, dtype), _LEAST_S))


def _as_meta(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(map(_as_meta, value))
    if not isinstance(value, View):
        return value
    return torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device="meta")
