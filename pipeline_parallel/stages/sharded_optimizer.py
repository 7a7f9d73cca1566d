"""Replicas that share the optimizer's work: each holds a part of its rank's parameters.

Gradients are reduced to the replica that holds them (reduce-scatter), its optimizer changes its
part, and the parts are gathered again (all-gather), as in ZeRO's first stage. The part is a run of
elements of all parameters of one dtype side by side, so the optimizer must work element by element.
The sums of gradients stay whole on every replica, because all micro-batches are summed before they
are reduced. (Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter
Models", 2020.)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...reuse.torch_names import version_of
from .gradient_sums import GradientSums


class Shards:
    """One replica's part of its rank's parameters.

    Args:
        sums: the gradients; their memory also carries parameters while these are gathered.
        group: the replicas.
        num_replicas: how many.
        index: which this one is.
    """

    def __init__(self, sums: GradientSums, group: Any, num_replicas: int, index: int) -> None:
        self._sums = sums
        self._group = group
        self._num_replicas = num_replicas
        self._index = index
        self.parameters = [nn.Parameter(torch.empty_like(self._own(flat))) for flat in sums.flat]
        self._versions: list[int] = []

    @torch.no_grad()
    def take(self, parameters: Mapping[str, Tensor]) -> None:
        """Copies this replica's part out of the model's parameters."""
        for name, buffer in self._sums.buffers.items():
            buffer.copy_(parameters[name])
        for own, flat in zip(self.parameters, self._sums.flat, strict=True):
            own.copy_(self._own(flat))
        self._remember()

    def reduce(self) -> None:
        """Gives each part the mean of its gradients over the replicas."""
        for own, flat in zip(self.parameters, self._sums.flat, strict=True):
            if own.grad is None:
                own.grad = torch.empty_like(own)
            parts = list(flat.chunk(self._num_replicas))
            dist.reduce_scatter(own.grad, parts, group=self._group)
            own.grad.div_(self._num_replicas)

    @property
    def is_ahead(self) -> bool:
        """Whether an optimizer has changed the part since the model's parameters were gathered."""
        return [version_of(own) for own in self.parameters] != self._versions

    @torch.no_grad()
    def gather(self, parameters: Mapping[str, Tensor]) -> None:
        """Copies the parts of all replicas into the model's parameters; every replica calls it."""
        for own, flat in zip(self.parameters, self._sums.flat, strict=True):
            parts = list(flat.chunk(self._num_replicas))
            dist.all_gather(parts, own.detach(), group=self._group)
        for name, buffer in self._sums.buffers.items():
            parameters[name].copy_(buffer)
        self._remember()

    def _own(self, flat: Tensor) -> Tensor:
        return flat.chunk(self._num_replicas)[self._index]

    def _remember(self) -> None:
        self._versions = [version_of(own) for own in self.parameters]
