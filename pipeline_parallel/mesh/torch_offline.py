"""Adapter: a mesh of ranks that are not there, by PyTorch's fake process group."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ...reuse.errors import PlanError


@contextmanager
def absent_ranks(axes: Mapping[str, int]) -> Iterator[DeviceMesh]:
    """Makes this process rank 0 of a mesh within it; the collectives of that move nothing.

    Args:
        axes: name and size of each dimension.

    Raises:
        PlanError: if this process is one of several already.
    """
    if dist.is_initialized():
        raise PlanError(
            "torch.distributed is initialized in this process, and a mesh of ranks that are not "
            "there needs it for itself. Do this in a process of its own."
        )
    # Importing it registers the backend. Its own store differs from version to version.
    import_module("torch.testing._internal.distributed.fake_pg")
    hook = sys.excepthook  # which init_process_group wraps
    num_ranks = math.prod(axes.values())
    dist.init_process_group("fake", rank=0, world_size=num_ranks, store=dist.HashStore())
    try:
        yield init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook
