"""Adapter: tensors with a dimension that consists of parts, each of which is sharded by itself.

DTensor has the placement ``_StridedShard`` for it, but its redistribution reads values, which a
trace does not have, and few rules take it. For a checkpoint, such a tensor lists its pieces for
PyTorch's planner.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
import torch.fx
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard
from torch.fx.node import map_aggregate as aggregate
from torch.utils._pytree import tree_map_only

from ...reuse import torch_pytree
from ...reuse.ir.types import TensorType, contiguous_stride
from .plan import NodeLayouts, Placements

SPLIT = Shard, _StridedShard  # neither is the other's class in all versions
_SIZES = frozenset({"size", "shape", "sizes", "input_sizes", "repeats"})


def distributed(
    local: torch.Tensor, mesh: DeviceMesh, layout: Placements, type_: TensorType | torch.Tensor
) -> DTensor:
    """Returns a DTensor of this rank's local tensor, with the shape and strides of ``type_``."""
    shape = torch.Size(type_.shape)
    stride = tuple(type_.stride() if isinstance(type_, torch.Tensor) else type_.stride)
    return DTensor.from_local(local, mesh, layout, run_check=False, shape=shape, stride=stride)


def without_data(value: Any) -> Any:
    """Returns a meta tensor of a DTensor's whole shape; other values unchanged."""
    if not isinstance(value, DTensor):
        return value
    return TensorType.of(value).empty("meta")


def with_layout_of(memory: DTensor, tensor: DTensor) -> DTensor | None:
    """Returns a tensor with the order of strides of ``memory``; None if shape or dtype differ."""
    if (memory.shape, memory.dtype) != (tensor.shape, tensor.dtype):
        return None
    whole, layout = without_data(memory), tuple(tensor.placements)
    return distributed(in_order_of(tensor.to_local(), whole), tensor.device_mesh, layout, whole)


def stride_like(stride: Sequence[int], shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the strides of a dense tensor of a shape, in the order of other strides."""
    order = sorted(range(len(shape)), key=lambda d: (-stride[d], d))
    packed = contiguous_stride(tuple(shape[d] for d in order))
    return tuple(packed[order.index(d)] for d in range(len(shape)))


def in_order_of(local: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """Returns a rank's shard as a dense tensor, in the order of strides of the whole tensor."""
    return laid_out(local, stride_like(whole.stride(), tuple(local.shape)))


def laid_out(tensor: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    """Returns a tensor with the given strides."""
    if tuple(tensor.stride()) == tuple(stride):
        return tensor
    made = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device)
    return torch.ops.aten.copy.default(made, tensor)


def moved(tensor: DTensor, layout: Placements) -> DTensor:
    """Redistributes a tensor."""
    mesh, present = tensor.device_mesh, tuple(tensor.placements)
    parts = {*_parts(present, mesh.shape), *_parts(layout, mesh.shape)}
    if not parts:
        return tensor.redistribute(mesh, layout)
    (dim, num), *others = parts
    if not others and all(num % _ranks_of(one, mesh.shape, dim) == 0 for one in (present, layout)):
        return _moved(tensor, layout, dim, num)
    # From some parts to others the tensor is gathered in between.
    whole = tuple(Replicate() if isinstance(p, SPLIT) else p for p in present)
    return moved(moved(tensor, whole), layout)


def _moved(tensor: DTensor, layout: Placements, dim: int, num: int) -> DTensor:
    """Redistributes a tensor whose parts become a dimension of their own meanwhile."""
    mesh, present, whole = tensor.device_mesh, tuple(tensor.placements), without_data(tensor)
    own = num // _ranks_of(present, mesh.shape, dim)
    local = tensor.to_local().unflatten(dim, (own, -1))
    shape = whole.unflatten(dim, (num, -1))
    made = distributed(local, mesh, _unflattened(present, dim), shape)
    made = made.redistribute(mesh, _unflattened(layout, dim))
    return distributed(made.to_local().flatten(dim, dim + 1), mesh, layout, whole)


def _parts(layout: Placements, sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yields dimensions of which each part is sharded, and the number of those parts."""
    for axis, p in enumerate(layout):
        if isinstance(p, _StridedShard):
            yield p.dim, int(p.split_factor) * _ranks_of(layout[:axis], sizes, p.dim)


def _ranks_of(layout: Placements, sizes: Sequence[int], dim: int) -> int:
    pairs = zip(layout, sizes, strict=False)
    return math.prod(size for p, size in pairs if p == Shard(dim))


def _unflattened(layout: Placements, dim: int) -> Placements:
    return tuple(
        Shard(p.dim + (p.dim > dim or isinstance(p, _StridedShard))) if isinstance(p, SPLIT) else p
        for p in layout
    )


def joined_in_parts(args: Any, asked: Placements | None) -> DTensor | None:
    """Concatenates local tensors along the sharded dimension; None unless so planned."""
    tensors, *others = args
    plain = tuple(Shard(p.dim) if isinstance(p, _StridedShard) else p for p in asked or ())
    if asked is None or plain == asked or any(tuple(t.placements) != plain for t in tensors):
        return None
    made = torch.cat([t.to_local() for t in tensors], *others)
    whole = torch.cat([without_data(t) for t in tensors], *others)
    return distributed(made, tensors[0].device_mesh, asked, whole)


def reshaped_in_parts(tensor: DTensor, shape: Sequence[int], asked: Placements) -> DTensor:
    """Reshapes the local tensor, so that the whole has a shape and the planned placements."""
    mesh, whole = tensor.device_mesh, without_data(tensor).reshape(shape)
    own = list(whole.shape)
    for p, size in zip(asked, mesh.shape, strict=True):
        if isinstance(p, SPLIT):
            own[p.dim] //= size
    return distributed(tensor.to_local().reshape(own), mesh, asked, whole)


def of_own_parts(node: torch.fx.Node, args: Any, kwargs: Any, layouts: NodeLayouts) -> Any:
    """Runs an operator on local tensors, as planned; None if no operand is sharded in parts.

    The plan is of our rules, which say that each rank can run the operator on its shards. Operators
    that take sizes are left out, and those with an operand that is not planned.
    """
    target: Any = node.target
    flat = [t for t in torch_pytree.flatten((args, kwargs))[0] if isinstance(t, DTensor)]
    placements = (p for t in flat for p in t.placements)
    if not any(isinstance(p, _StridedShard) for p in placements) or None in layouts.inputs:
        return None
    if any(argument.name in _SIZES for argument in target._schema.arguments):
        return None
    own, whole = (
        target(*aggregate(args, take), **aggregate(kwargs, take)) for take in (_local, without_data)
    )
    mesh = flat[0].device_mesh
    if isinstance(own, torch.Tensor):
        return distributed(own, mesh, cast("Placements", layouts.outputs[0]), whole)
    rest = iter(cast("tuple[Placements, ...]", layouts.outputs))
    return tuple(
        distributed(t, mesh, next(rest), w) if isinstance(t, torch.Tensor) else t
        for t, w in zip(own, whole, strict=True)
    )


def _local(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


# ---- In checkpoints ------------------------------------------------------------------------------


class _Pieces(torch.Tensor):
    """A rank's local tensor that consists of several pieces of the whole.

    They follow one another along ``split_dim``; ``chunks`` are their places in the whole.
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
    """Returns a state on the same memory, in which tensors in parts list their pieces."""
    return tree_map_only(DTensor, _with_pieces, state)


def _with_pieces(tensor: DTensor) -> DTensor:
    axes = [i for i, p in enumerate(tensor.placements) if isinstance(p, _StridedShard)]
    if len(axes) != 1:  # no plan shards the parts of what is stored over several axes
        return tensor
    (axis,), mesh = axes, tensor.device_mesh
    strided: Any = tensor.placements[axis]
    num_parts = int(strided.split_factor)
    others = [Replicate() if i == axis else p for i, p in enumerate(tensor.placements)]
    sizes, start = map(list, compute_local_shape_and_global_offset(tensor.shape, mesh, others))
    part = tensor.shape[strided.dim] // num_parts
    sizes[strided.dim] = part // mesh.size(axis)
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    own = tensor.to_local().detach().as_subclass(_Pieces)
    own.split_dim, own.chunks = strided.dim, []
    for number in range(num_parts):
        start[strided.dim] = number * part + coordinate[axis] * sizes[strided.dim]
        own.chunks.append(ChunkStorageMetadata(torch.Size(start), torch.Size(sizes)))
    made: Any = tensor.detach()
    made._local_tensor = own  # DTensor.from_local would hold a view of it
    return cast("DTensor", made)
