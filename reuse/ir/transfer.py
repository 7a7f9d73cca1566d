"""How one tensor travels: as a contiguous run of elements, whatever its layout, and alone.

A transfer takes contiguous memory only. A dense tensor in another order of dimensions travels as
its memory stands; dimensions that repeat one element travel once. A tensor on a part of a larger
memory gets a storage that is that part alone.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack, to_dlpack

from .types import TensorType, contiguous_stride


class Wire:
    """The form in which values of one type travel.

    Args:
        type_: the type at both ends.

    Attributes:
        once: its shape, where dimensions that repeat one element have size 1.
        as_it_stands: whether the memory of a value travels without being copied first.
    """

    def __init__(self, type_: TensorType) -> None:
        self.type = type_
        pairs = zip(type_.shape, type_.stride, strict=True)
        self.once = tuple(1 if stride == 0 else size for size, stride in pairs)
        core = TensorType(type_.dtype, self.once, type_.stride, type_.device)
        self.as_it_stands = core.is_dense
        self._num_elements = 1
        for size in self.once:
            self._num_elements *= size

    @property
    def num_bytes(self) -> int:
        """Bytes that travel."""
        return self._num_elements * self.type.dtype.itemsize

    def buffer(self) -> Tensor:
        """Returns memory to receive into."""
        return torch.empty(self._num_elements, dtype=self.type.dtype, device=self.type.device)

    def pack(self, tensor: Tensor) -> Tensor:
        """Returns what travels; the tensor's own memory where that is contiguous."""
        for dim, size in enumerate(self.once):
            if size != tensor.shape[dim]:
                tensor = tensor.narrow(dim, 0, 1)
        if self.as_it_stands:
            return tensor.as_strided((self._num_elements,), (1,))
        return tensor.reshape(-1).contiguous()

    def unpack(self, buffer: Tensor) -> Tensor:
        """Returns the tensor that arrived, with the layout its type asks for."""
        type_ = self.type
        if self.as_it_stands:
            return buffer.as_strided(type_.shape, type_.stride)
        whole = buffer.as_strided(self.once, contiguous_stride(self.once))
        target = torch.empty_strided(
            self.once, type_.stride, dtype=type_.dtype, device=type_.device
        )
        target.copy_(whole)
        return target.as_strided(type_.shape, type_.stride)


def in_own_storage(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor on the same memory, the storage of which has this tensor's bytes only."""
    # ``torch.save``, ``deepcopy`` and sending to another process take the whole storage: of this
    # one, the tensor's bytes alone. It keeps the whole memory alive and cannot be resized.
    extent = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    num_bytes = extent * tensor.element_size() if tensor.numel() else 0
    start = tensor.storage_offset() * tensor.element_size()
    with torch.inference_mode(False), torch.no_grad():
        whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        whole.set_(tensor.untyped_storage())  # type: ignore[call-overload]
        # A capsule: the tensor itself would be asked for its device, which may be a user's own.
        part = from_dlpack(to_dlpack(whole[start : start + num_bytes])).view(tensor.dtype)
        return part.as_strided(tensor.shape, tensor.stride()).detach()
