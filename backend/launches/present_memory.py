"""Refuses tensors whose memory was taken away: kernels get addresses, and 0 ends the process.

``tensor.untyped_storage().resize_(0)`` frees memory and leaves the tensor's sizes as they are;
sharding and offloading do so between steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

_address_of = torch.Tensor.data_ptr


def check_memory(tensors: Iterable[torch.Tensor], names: Sequence[str] = ()) -> None:
    """Checks that every tensor has all the memory that its sizes need.

    Args:
        tensors: what will be given by address.
        names: what the first of them are called.

    Raises:
        RuntimeError: names the first that has not.
    """
    for position, tensor in enumerate(tensors):
        held = tensor.untyped_storage().nbytes() if tensor.numel() and tensor.data_ptr() else 0
        if tensor.numel() and held < _needed_bytes(tensor):
            name = names[position] if position < len(names) else ""
            raise RuntimeError(_message(tensor, name))


def check_addresses(tensors: Sequence[torch.Tensor]) -> None:
    """Checks what PyTorch's own kernels are given, which need not check it either.

    Raises:
        RuntimeError: if the memory of one is gone.
    """
    if 0 in map(_address_of, tensors):
        check_memory(tensors)


def address_in(tensor: torch.Tensor) -> int:
    """Returns where a tensor's numbers are, 0 if it has none.

    Raises:
        RuntimeError: if it should have some.
    """
    return tensor.data_ptr() or no_address(tensor)


def no_address(tensor: torch.Tensor) -> int:
    """Returns 0 for a tensor without elements, whose address that is.

    Raises:
        RuntimeError: for any other.
    """
    check_memory((tensor,))
    return 0


def _needed_bytes(tensor: torch.Tensor) -> int:
    """Returns the bytes of memory up to the last element."""
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return int((tensor.storage_offset() + last + 1) * tensor.element_size())


def _message(tensor: torch.Tensor, name: str) -> str:
    what = f"The tensor {name!r}" if name else "A tensor that the compiled program is given"
    if tensor.is_meta:
        return f"{what}, of shape {tuple(tensor.shape)}, is on the meta device and has no numbers."
    held = tensor.untyped_storage().nbytes()
    return (
        f"{what}, of shape {tuple(tensor.shape)} and {tensor.dtype}, needs "
        f"{_needed_bytes(tensor)} bytes, and its storage holds {held}: somebody freed or shrank it "
        "(untyped_storage().resize_, as sharding and offloading do). Bring its memory back before "
        "the call; nothing needs to be compiled again."
    )
