"""Adapter: tensors split in parts, as ``torch.distributed.checkpoint`` saves and loads them.

It takes a DTensor for one piece of the whole. What is split in each of its parts is several, and it
asks a rank's own tensor for those, if that has the methods.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._pytree import tree_map_only


class _Pieces(torch.Tensor):
    """A rank's own tensor, which is several pieces of the whole.

    Attributes:
        split_dim: along which they lie in it, one after another.
        chunks: where they belong in the whole.
    """

    split_dim: int
    chunks: list[ChunkStorageMetadata]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return self.chunks

    def __create_write_items__(self, name: str, whole: DTensor) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.as_subclass(torch.Tensor))
        return [
            WriteItem(
                index=MetadataIndex(name, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, whole.size()),
            )
            for chunk in self.chunks
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        place = [chunk.offsets for chunk in self.chunks].index(cast("torch.Size", index.offset))
        size = self.chunks[place].sizes[self.split_dim]
        return self.as_subclass(torch.Tensor).narrow(self.split_dim, place * size, size)


def with_pieces(state: Any) -> Any:
    """Returns a state in the same memory, in which tensors split in parts say their pieces."""
    return tree_map_only(DTensor, _with_pieces, state)


def _with_pieces(tensor: DTensor) -> DTensor:
    axes = [i for i, p in enumerate(tensor.placements) if isinstance(p, _StridedShard)]
    if len(axes) != 1:  # no plan splits what is stored so over several dimensions of a mesh
        return tensor
    (axis,), mesh = axes, tensor.device_mesh
    lies: Any = tensor.placements[axis]
    num_parts = int(lies.split_factor)
    others = [Replicate() if i == axis else p for i, p in enumerate(tensor.placements)]
    sizes, start = map(list, compute_local_shape_and_global_offset(tensor.shape, mesh, others))
    part = tensor.shape[lies.dim] // num_parts
    sizes[lies.dim] = part // mesh.size(axis)
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    own = tensor.to_local().detach().as_subclass(_Pieces)
    own.split_dim, own.chunks = lies.dim, []
    for number in range(num_parts):
        start[lies.dim] = number * part + coordinate[axis] * sizes[lies.dim]
        own.chunks.append(ChunkStorageMetadata(torch.Size(start), torch.Size(sizes)))
    made: Any = tensor.detach()
    made._local_tensor = own  # as it is: a DTensor made of it would hold a view
    return cast("DTensor", made)
