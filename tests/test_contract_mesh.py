"""Contract with DTensor and its collectives: what ``pipeline_parallel/mesh/torch_*.py`` rely on.

When a new torch breaks one of these, those files are the ones to look at.
"""

import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from contracts import contract
from parallel_models import mesh_of
from rank_threads import one_of_many, run_in_threads
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, placement_types

from lazyinline.autodiff.traces.torch_make_fx import new_fake_mode, traced
from lazyinline.pipeline_parallel.mesh.torch_collectives import (
    COLLECTIVES,
    WAIT,
    absent_ranks,
    axes_of,
    exchanges,
    with_own_collectives,
)
from lazyinline.pipeline_parallel.mesh.torch_sharding_rules import has_rule

pytestmark = [pytest.mark.smoke, pytest.mark.filterwarnings("ignore::FutureWarning")]
_ATEN = torch.ops.aten


def test_rules_are_found_where_they_are_looked_for() -> None:
    ruled = (_ATEN.mm.default, _ATEN.addmm.default, _ATEN.view.default, _ATEN.add.Tensor)
    assert all(map(has_rule, ruled))
    assert not has_rule(_ATEN.as_strided.default)


@contract(
    "torch.ops._c10d_functional",
    "torch.distributed.distributed_c10d._resolve_process_group",
    "torch.distributed.tensor._utils.compute_local_shape_and_global_offset",
    "torch.utils._pytree.tree_map_only",
)
@pytest.mark.parametrize("device", ["cpu", "cuda"])  # of which nothing is there
def test_a_trace_of_redistributions_holds_functional_collectives_alone(device: str) -> None:
    def move(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        (local,) = inputs
        parts = DTensor.from_local(local, mesh, [Partial()], run_check=False)
        rows = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
        targets = (
            *((parts, Replicate()), (parts, Shard(0))),
            *((rows, Replicate()), (rows, Shard(1))),
        )
        return [t.redistribute(mesh, [to]).to_local() for t, to in targets]

    with one_of_many(2):
        mesh = init_device_mesh(device, (2,), mesh_dim_names=("tensor",))
        axes = axes_of(mesh)
        own_move = placement_types.shard_dim_alltoall
        with new_fake_mode(), torch.no_grad(), exchanges():
            module = traced(move, [[torch.empty(4, 4, device=device)]], (), {})
        assert placement_types.shard_dim_alltoall is own_move
        own = with_own_collectives(module, axes)
    targets = [n.target for n in own.graph.nodes if n.op == "call_function"]
    assert [t for t in targets if t in COLLECTIVES] == [
        torch.ops.lazyinline.all_reduce.default,
        torch.ops.lazyinline.reduce_scatter.default,
        torch.ops.lazyinline.all_gather.default,
        torch.ops.lazyinline.all_to_all.default,
    ]
    assert not [t for t in targets if "functional" in str(t)]
    assert targets.count(WAIT) == 4


@pytest.mark.parametrize("name", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
def test_a_collective_gives_what_its_out_form_and_its_prediction_give(name: str) -> None:
    operator: Any = getattr(torch.ops.lazyinline, name)

    def run(rank: int) -> torch.Tensor:
        axes = axes_of(mesh_of(tensor=2))
        ((group, axis),) = axes.items()
        x = torch.arange(8.0).reshape(4, 2) + 10 * rank
        own: tuple[Any, ...] = {
            "all_reduce": ("sum",),
            "all_gather": (2,),
            "reduce_scatter": ("sum", 2),
            "all_to_all": (2,),
        }[name]
        made: torch.Tensor = WAIT(operator(x, *own, group, axis), x)
        out = WAIT(operator.out(x, *own, group, axis, out=torch.zeros_like(made)), x)
        predicted = operator(x.to("meta"), *own, group, axis)
        assert torch.equal(made, out)
        assert predicted.shape == made.shape
        return made

    first, second = run_in_threads(2, run)
    both = torch.arange(8.0).reshape(4, 2), torch.arange(8.0).reshape(4, 2) + 10
    expected = {
        "all_reduce": [sum(both)] * 2,
        "all_gather": [torch.cat(both)] * 2,
        "reduce_scatter": list(torch.chunk(both[0] + both[1], 2)),
        "all_to_all": [torch.cat(rows) for rows in zip(*(x.chunk(2) for x in both), strict=True)],
    }[name]
    assert torch.equal(first, expected[0])
    assert torch.equal(second, expected[1])


@contract("._to_copy")
def test_a_cast_leaves_a_part_of_a_sum_as_it_is() -> None:
    with one_of_many(2):
        part = DTensor.from_local(torch.ones(2), mesh_of(tensor=2), [Partial()])
        made = _ATEN._to_copy.default(part, dtype=torch.float64)
        assert tuple(made.placements) == (Partial(),)


@contract("torch.testing._internal.distributed.fake_pg")
def test_ranks_can_be_absent_and_collectives_over_them_move_nothing() -> None:
    before = sys.excepthook
    for _ in range(2):  # the group ends with it
        with absent_ranks({"data": 2, "tensor": 512}) as mesh:
            assert mesh.size() == 1024 and list(mesh.get_coordinate() or ()) == [0, 0]
            assert set(axes_of(mesh).values()) == {"data", "tensor"}
            x = torch.ones(2)
            dist.all_reduce(x, group=mesh.get_group("data"))
            assert torch.equal(x, torch.ones(2))
        assert not dist.is_initialized() and sys.excepthook is before


def test_groups_of_a_mesh_have_names() -> None:
    with one_of_many(4):
        axes = axes_of(mesh_of(data=2, tensor=2))
    assert list(axes.values()) == ["data", "tensor"]
    assert all(isinstance(name, str) for name in axes)
