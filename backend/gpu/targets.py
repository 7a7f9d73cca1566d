"""GPUs that programs are compiled for, in one small table.

The numbers are those of the SXM boards. Throughputs are the dense ones: data sheets also print
those with structured sparsity, which are twice as high.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...reuse.errors import PlanError
from ...reuse.ir.costs import Rates

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
