"""Predicts the least time that a GPU needs, by the roofline of :mod:`...reuse.ir.costs`.

No program reaches the peak rates of a GPU, so this is a lower bound, predicted and not measured. A
launch takes at least the time to start it. The expected time is longer: each kind of kernel usually
reaches only a share of the peak, and in a product's last wave of tiles multiprocessors are idle.
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
from .torch_triton import TritonKernel

_LEAST_S = 2e-6  # from one launch in a CUDA graph to the next
MEMORY_SHARE = 0.85  # of the peak bandwidth, reached by kernels that mostly move bytes
PRODUCT_SHARE = 0.75  # of the peak rate, reached by a product in full waves of tiles
_PRODUCTS: Mapping[Any, Any] = {
    torch.mm: torch.ops.aten.mm,
    torch.addmm: torch.ops.aten.addmm,
    torch.bmm: torch.ops.aten.bmm,
    torch.baddbmm: torch.ops.aten.baddbmm,
}


@dataclass(frozen=True)
class Prediction:
    """The least that the launches of a program will take."""

    cost: Cost  # of all launches, one after the other
    expected_s: float  # the expected seconds of all, by the shares of the peak that kernels reach
    num_launches: int  # of the program
    num_triton: int  # those that are Inductor's kernels; the rest are PyTorch's


def is_product(launch: Launch) -> bool:
    """Whether cuBLAS runs a launch."""
    operator = _PRODUCTS.get(launch.function, launch.function)
    return getattr(operator, "overloadpacket", operator) in _PRODUCTS.values()


def predict(lists: Iterable[tuple[KernelList, int]], target: Target) -> Prediction:
    """Predicts a program from the launches of each different closure and how often it is called."""
    total, expected_s, num_launches, num_triton = Cost(), 0.0, 0, 0
    for kernels, num_calls in lists:
        for launch in kernels.launches:
            one = launch_cost(launch, target)
            expected = expected_seconds(launch, one, target)
            if len({kernels.buffers[view.buffer].device for view in launch.views()}) > 1:
                copied_s = one.moved_bytes / 2 / target.rates.host_bytes_per_s
                one = replace(one, seconds=max(one.seconds, copied_s))
            total += one.times(num_calls)
            expected_s += max(one.seconds, expected) * num_calls
            num_launches += num_calls
            num_triton += num_calls * isinstance(launch.function, TritonKernel)
    return Prediction(total, expected_s, num_launches, num_triton)


def launch_cost(launch: Launch, target: Target) -> Cost:
    """Returns the least cost of one launch."""
    views = list(launch.views())
    moved = sum(math.prod(v.shape) * v.dtype.itemsize for v in views)
    kwargs = dict(launch.kwargs)
    results = kwargs.pop("out", None) or launch.results
    named = {name: _as_meta(value) for name, value in kwargs.items()}
    # Inductor launches ``torch.mm``; FLOPs are known of operators.
    operator = _PRODUCTS.get(launch.function, launch.function)
    flops = flops_of(operator, _as_meta(launch.args), named, _as_meta(results))
    return Cost(flops, moved, max(target.rates.seconds(flops, moved, _dtype_of(launch)), _LEAST_S))


def expected_seconds(launch: Launch, cost: Cost, target: Target) -> float:
    """Returns the expected seconds of a launch without host memory, given its least cost."""
    computed_s = target.rates.seconds(cost.flops, 0, _dtype_of(launch))
    moved_s = target.rates.seconds(0, cost.moved_bytes)
    return max(computed_s / _share_of_peak(launch, target), moved_s / MEMORY_SHARE, _LEAST_S)


def _share_of_peak(launch: Launch, target: Target) -> float:
    """Returns the share of the peak rate of products that a kernel usually reaches."""
    for kernel in ("flash", "efficient"):
        if f"{kernel}_attention" in launch.name:
            return float(getattr(target, kernel))
    if not is_product(launch):
        return 1.0
    num_waves = _num_tiles(launch) / target.num_multiprocessors
    # With few tiles a product is also split along its sum, which uses about half of the GPU.
    return PRODUCT_SHARE * max(num_waves / max(math.ceil(num_waves), 1), 0.5)


def _dtype_of(launch: Launch) -> torch.dtype:
    """Returns the precision that a launch computes in."""
    dtypes = (view.dtype for view in launch.views())
    return next((dtype for dtype in dtypes if dtype.is_floating_point), torch.float32)


def _as_meta(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(map(_as_meta, value))
    if not isinstance(value, View):
        return value
    return torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device="meta")


_TILE = 128  # rows and columns of a result that one multiprocessor computes


def _num_tiles(product: Launch) -> int:
    """Returns how many multiprocessors a product would keep busy."""
    result = dict(product.kwargs).get("out")
    shape = result.shape if result is not None else ()
    tiles = [-(-size // _TILE) for size in shape[-2:]]
    return math.prod(shape[:-2]) * math.prod(tiles)
