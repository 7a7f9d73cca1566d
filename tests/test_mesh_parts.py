"""Tensors with a dimension split part by part, over one dimension of a mesh or over two."""

import itertools
import math

import pytest
import torch
import torch.fx
from parallel_models import mesh_of
from rank_threads import run_in_threads
from torch.distributed.tensor import DTensor, Replicate, Shard

from lazyinline.pipeline_parallel.mesh.choices import _fits
from lazyinline.pipeline_parallel.mesh.layouts import Axis, Layout
from lazyinline.pipeline_parallel.mesh.plan import Placements
from lazyinline.pipeline_parallel.mesh.torch_parts import (
    _StridedShard,
    distributed,
    moved,
    reshaped_in_parts,
)
from lazyinline.pipeline_parallel.mesh.torch_sharding_rules import Rules, placements

AXES = [Axis(name, 2) for name in ("data", "tensor")]
RESHAPES = [
    ((24, 24), (2, 12, 24), ((24, 3),)),
    ((2, 12, 24), (24, 24), ((24, 3), (24, 6))),
    ((4, 24), (4, 3, 8), ((24, 3),)),
    ((24, 4), (3, 4, 2, 4), ((24, 3), (24, 12))),
]


def pairs_planned(
    before: tuple[int, ...], after: tuple[int, ...], factors: tuple[tuple[int, int], ...]
) -> list[tuple[Placements, Placements]]:
    """Returns how a reshape's operand and result may lie, where one of them is in parts."""
    graph = torch.fx.Graph()
    given = graph.placeholder("x")
    given.meta["val"] = torch.empty(before, device="meta")
    node = graph.call_function(torch.ops.aten.reshape.default, (given, after))
    node.meta["val"] = torch.empty(after, device="meta")
    ways = Rules(2, factors).ways(node)
    found = []
    for pick in itertools.product(ways, ways):
        ends: list[tuple[Layout, ...]] = [
            tuple(way.inputs[0] or pytest.fail("a tensor") for way in pick),
            tuple(way.outputs[0] for way in pick),
        ]
        values = given.meta["val"], node.meta["val"]
        if any(one.is_partial for end in ends for one in end):
            continue
        if all(_fits(t, e, AXES, at_rest=False) for t, e in zip(values, ends, strict=True)):
            lies, asked = (placements(end, (2, 2)) for end in ends)
            if any(isinstance(p, _StridedShard) for p in (*lies, *asked)):
                found.append((lies, asked))
    return found


@pytest.mark.parametrize(("before", "after", "factors"), RESHAPES)
def test_a_planned_reshape_in_parts_is_a_reshape_of_each_ranks_part(
    before: tuple[int, ...], after: tuple[int, ...], factors: tuple[tuple[int, int], ...]
) -> None:
    pairs = pairs_planned(before, after, factors)
    assert pairs
    x = torch.arange(float(math.prod(before))).reshape(before)

    def wrong(rank: int) -> list[str]:
        mesh, whole = mesh_of(data=2, tensor=2), (Replicate(), Replicate())
        given: DTensor = distributed(x, mesh, whole, x)
        found = []
        for lies, asked in pairs:
            made = moved(reshaped_in_parts(moved(given, lies), after, asked), whole).to_local()
            found += [] if torch.equal(made, x.reshape(after)) else [f"{lies} to {asked}"]
        return found

    assert run_in_threads(4, wrong) == [[]] * 4


def test_a_dimension_split_in_parts_is_told_from_one_split_as_a_whole() -> None:
    # Moves count the ranks of plain splits by this comparison.
    assert _StridedShard(0, split_factor=3) != Shard(0)
    assert Shard(0) != _StridedShard(0, split_factor=3)
