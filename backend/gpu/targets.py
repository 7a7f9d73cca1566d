"""GPUs that programs are compiled for, in one small table.

The numbers are those of the SXM boards. Throughputs are the dense ones: data sheets also print
those with structured sparsity, which are twice as high.

The least time that one needs is predicted by the roofline of :mod:`...reuse.ir.costs`: no program
reaches the peak rates, and a launch takes at least the time to start it. The expected time is
longer: each kind of kernel usually reaches only a share of the peak, and in the last wave of tiles
of a product multiprocessors are idle.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...reuse.errors import PlanError
from ...reuse.ir.costs import Cost, Rates, flops_of
from ..launches.kernel_list import KernelList, Launch, View
from .torch_cuda import TritonKernel

GIB = 2**30
CONTEXT_BYTES = int(0.6 * GIB)
"""About the memory of CUDA's context and of the kernel modules that PyTorch loads for a training
step: ``nvidia-smi`` shows it, PyTorch does not count it."""
MARGIN = 0.02
PCIE_4, PCIE_5 = 32e9, 64e9
"""Bytes per second to the host, one way, over 16 lanes: half of what the data sheets give as the
sum of both ways (64 GB/s of the A100, 128 GB/s of the H100 and the B200)."""
ALIGNMENT_BYTES = 256
"""Addresses of buffers on a GPU are multiples of this: wide loads and TMA need up to 128, and
PyTorch's own allocator aligns to no less."""


@dataclass(frozen=True)
class Target:
    """A GPU that programs are compiled for."""

    name: str  # the name that users pass
    board: str  # the board that the numbers are for
    capability: tuple[int, int]  # its compute capability, major and minor
    num_multiprocessors: int  # streaming multiprocessors
    memory_bytes: int  # its memory as PyTorch reports it, which is less than the board's name says
    rates: Rates  # peak rates of memory and of matrix products
    shared_memory_bytes: int  # the most that one block may request
    l2_bytes: int  # its second-level cache
    workspace_bytes: int  # cuBLAS's workspace in PyTorch, for each stream that runs products
    flash: float  # the share of the peak that this attention kernel usually reaches
    efficient: float  # the share that this one reaches
    # Where the numbers are from. Memory sizes are from PyTorch's out-of-memory messages; shares are
    # approximate, from published measurements.
    source: str

    @property
    def usable_bytes(self) -> int:
        """The bytes that a program may use: without CUDA's context and modules, and a margin.

        The margin is for memory that no plan knows: the blocks of 2 and 20 MiB that PyTorch's
        allocator rounds up to, the batches of a loader.
        """
        return int((self.memory_bytes - CONTEXT_BYTES) * (1 - MARGIN))

    @property
    def device(self) -> torch.device:
        """The device that its programs run on."""
        return torch.device("cuda", 0)


TARGETS = (
    Target(
        name="cuda:sm_80",
        board="NVIDIA A100 SXM 80GB",
        capability=(8, 0),
        num_multiprocessors=108,
        memory_bytes=int(79.15 * GIB),
        rates=Rates(
            19.5e12,
            2.039e12,
            half_flops_per_s=312e12,
            tf32_flops_per_s=156e12,
            host_bytes_per_s=PCIE_4,
        ),
        shared_memory_bytes=166912,
        l2_bytes=40 * 2**20,
        workspace_bytes=8519680,
        flash=0.55,
        efficient=0.3,
        source="NVIDIA A100 Tensor Core GPU data sheet, June 2021",
    ),
    Target(
        name="cuda:sm_90",
        board="NVIDIA H100 SXM",
        capability=(9, 0),
        num_multiprocessors=132,
        memory_bytes=int(79.11 * GIB),
        rates=Rates(
            66.9e12,
            3.35e12,
            half_flops_per_s=989.4e12,
            tf32_flops_per_s=494.7e12,
            host_bytes_per_s=PCIE_5,
        ),
        shared_memory_bytes=232448,
        l2_bytes=50 * 2**20,
        workspace_bytes=32 * 2**20,
        flash=0.37,
        efficient=0.16,
        source="NVIDIA H100 Tensor Core GPU Architecture white paper, table 2",
    ),
    Target(
        name="cuda:sm_100",
        board="NVIDIA B200 SXM",
        capability=(10, 0),
        num_multiprocessors=148,
        memory_bytes=int(178.35 * GIB),
        rates=Rates(
            75e12, 8e12, half_flops_per_s=2250e12, tf32_flops_per_s=1125e12, host_bytes_per_s=PCIE_5
        ),
        shared_memory_bytes=232448,
        l2_bytes=126 * 2**20,
        workspace_bytes=32 * 2**20,
        flash=0.16,
        efficient=0.07,
        source="NVIDIA DGX B200 data sheet, per GPU",
    ),
)


def target_like(capability: tuple[int, int]) -> Target | None:
    """Returns the target with a compute capability, or None."""
    return next((target for target in TARGETS if target.capability == capability), None)


def target_named(name: str) -> Target:
    """Returns a target by its name; raises PlanError if there is none."""
    for target in TARGETS:
        if target.name == name:
            return target
    names = ", ".join(target.name for target in TARGETS)
    raise PlanError(
        f"target={name!r} is unknown; there are {names}. Without a target a model is compiled for "
        "the device that its parameters are on."
    )


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
