"""The gradients of micro-batches, summed."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...reuse.ir.transfer import in_own_storage
from ...reuse.ir.types import TensorType


class GradientSums:
    """Sums the gradients of micro-batches, one buffer per parameter.

    Two stages of one rank that use the same parameter share its buffer. The buffers of one dtype
    lie side by side in one tensor, so that replicas sum them in one go.
    """

    def __init__(self) -> None:
        self.buffers: dict[str, Tensor] = {}
        self.flat: list[Tensor] = []
        self._types: dict[str, TensorType] = {}
        self._started: set[str] = set()

    def add_parameter(self, name: str, type_: TensorType) -> None:
        """Makes room for the gradient of a parameter, once."""
        self._types.setdefault(name, type_)

    def allocate(self) -> None:
        """Makes the buffers, those of one kind side by side."""
        kinds: dict[tuple[torch.dtype, torch.device], list[str]] = {}
        for name, type_ in self._types.items():
            kinds.setdefault((type_.dtype, type_.device), []).append(name)
        for (dtype, device), names in kinds.items():
            sizes = [math.prod(self._types[n].shape) for n in names]
            flat = torch.zeros(sum(sizes), dtype=dtype, device=device)
            self.flat.append(flat)
            for name, part in zip(names, flat.split(sizes), strict=True):
                type_ = self._types[name]
                buffer = part.as_strided(type_.shape, type_.stride)
                self.buffers[name] = in_own_storage(buffer)

    def start(self) -> None:
        """Begins a new sum."""
        self._started.clear()

    def add(self, name: str, gradient: Tensor) -> None:
        """Adds one gradient."""
        if name in self._started:
            self.buffers[name].add_(gradient)
        else:
            self.buffers[name].copy_(gradient)
            self._started.add(name)

    def zero(self) -> None:
        """Makes all buffers zero, for launches that add to them."""
        for flat in self.flat:
            flat.zero_()
        self._started.update(self.buffers)

    def finish(self) -> None:
        """Makes buffers that got nothing in this step zero."""
        for name, buffer in self.buffers.items():
            if name not in self._started:
                buffer.zero_()

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(b.numel() * b.element_size() for b in self.buffers.values())
