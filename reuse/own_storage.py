"""Tensors on a part of a larger memory, whose storage is that part alone."""

from __future__ import annotations

import torch


def in_own_storage(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor on the same memory, the storage of which has this tensor's bytes only.

    What goes by the storage (``torch.save``, ``deepcopy``, sending it to another process) then
    takes these alone. It keeps the whole memory alive and cannot be resized.
    """
    extent = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    num_bytes = extent * tensor.element_size() if tensor.numel() else 0
    start = tensor.storage_offset() * tensor.element_size()
    with torch.inference_mode(False), torch.no_grad():
        whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        whole.set_(tensor.untyped_storage())  # type: ignore[call-overload]
        part = torch.from_dlpack(whole[start : start + num_bytes]).view(tensor.dtype)
        return part.as_strided(tensor.shape, tensor.stride()).detach()
