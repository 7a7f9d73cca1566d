"""Collectives: exchanges that move tensors, and what runs beside other work, waited for late."""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from comparing import relative_error
from models import Made
from parallel_models import MEGATRON, VOCABULARY, far_off, mesh_of, tiny, tokens, tokens_for_heads
from rank_threads import one_of_many, run_in_threads
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import lazyinline
from lazyinline.pipeline_parallel.mesh import sharded, torch_collectives
from lazyinline.pipeline_parallel.mesh.sharded import Sharder
from lazyinline.pipeline_parallel.mesh.torch_sharding import local_type
from lazyinline.pipeline_parallel.mesh.traffic import Collective, collectives_in
from lazyinline.reuse.ir.leaf import interpret
from lazyinline.reuse.ir.types import TensorType

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
RANKS = 8


def part_of(tensor: Tensor, layout: Sequence[Any], rank: int) -> Tensor:
    """A rank's part of a tensor on the mesh of 2 x 4."""
    for placement, size, place in zip(layout, (2, 4), divmod(rank, 4), strict=False):
        if isinstance(placement, (Shard, _StridedShard)):
            dim, num = placement.dim, getattr(placement, "split_factor", 1)
            parts = tensor.unflatten(dim, (num, -1)).tensor_split(size, dim + 1)
            tensor = parts[place].flatten(dim, dim + 1)
    return tensor


TOKENS, COLUMNS = (Shard(0), Shard(1)), (Shard(0), Shard(2))
PARTS = Replicate(), _StridedShard(1, split_factor=3)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (TOKENS, COLUMNS),
        (COLUMNS, TOKENS),
        ((Shard(1), Shard(2)), (Shard(0), Shard(2))),
        (PARTS, (Replicate(), Shard(2))),
        ((Replicate(), Shard(0)), PARTS),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "cuda"])  # of which nothing is there
@pytest.mark.sweep(keep=["before0", "before3", "cpu-before4"])
def test_tensors_are_moved_between_dimensions_by_one_exchange(
    before: Any, after: Any, device: str
) -> None:
    tensors = torch.arange(4.0 * 12 * 8).view(4, 12, 8), torch.arange(4.0 * 24 * 4).view(4, 24, 4)
    types = [replace(TensorType.of(t), device=torch.device(device)) for t in tensors]

    def move(rank: int) -> None:
        mesh = init_device_mesh(device, (2, 4), mesh_dim_names=("data", "tensor"))
        sharder = Sharder(mesh, torch_collectives.axes_of(mesh), lambda leaf: {})
        local = [local_type(one, mesh, before) for one in types]
        closure: Any = sharder._moved(types, local, [(before, after)] * 2).closure
        moved = [(one.kind, one.num_bytes) for one in collectives_in(closure.program)]
        assert moved == [("all_to_all", sum(one.num_bytes for one in local))]
        if device == "cpu":
            parts = [part_of(tensor, before, rank).contiguous() for tensor in tensors]
            with torch_collectives.collectives_over(torch_collectives.groups_of(mesh)):
                made = interpret(closure.program, parts)
            wanted = [part_of(tensor, after, rank) for tensor in tensors]
            assert all(map(torch.equal, made, wanted))

    if device == "cpu":
        run_in_threads(RANKS, move)
        return
    with one_of_many(RANKS):
        move(0)


MESHES: dict[str, dict[str, int]] = {
    "data": {"data": 2},
    "fsdp": {"fsdp": 2},
    "tensor": {"tensor": 2},
    "fsdp x tensor": {"fsdp": 2, "tensor": 2},
    "tokens for heads": {"tensor": 2},
}


class Late:
    """A collective that reads and writes nothing until it is waited for."""

    def __init__(self, run: Callable[[], Any]) -> None:
        self.wait = run


def spoil(tensor: torch.Tensor) -> None:
    tensor.fill_(torch.nan if tensor.is_floating_point() else -1)


def late_sum(real: Any) -> Any:
    def start(out: torch.Tensor, op: Any, group: Any, _: bool) -> Late:
        held = out.clone()
        spoil(out)  # whoever reads it before the wait, reads this
        return Late(lambda: real(out.copy_(held), op, group))

    return start


def late_exchange(real: Any) -> Any:
    def start(out: torch.Tensor, x: torch.Tensor, *, async_op: bool, **options: Any) -> Late:
        spoil(out)
        return Late(lambda: real(out, x, **options))

    return start


@pytest.fixture
def buckets_of_a_block(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sharded, "BUCKET_BYTES", 1)
    yield


@pytest.mark.parametrize("name", MESHES)
@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.sweep(keep="eager-data")
def test_memory_in_use_by_a_collective_is_left_alone_until_it_is_waited_for(
    name: str, backend: Any, monkeypatch: pytest.MonkeyPatch, buckets_of_a_block: None
) -> None:
    axes = MESHES[name]
    late = late_sum(torch_collectives.dist.all_reduce)

    class Dist:
        all_reduce = staticmethod(late)

        def __getattr__(self, name: str) -> Any:
            return getattr(torch.distributed, name)

    monkeypatch.setattr(torch_collectives, "dist", Dist())
    for one in ("_gather", "_scatter", "_exchange"):
        monkeypatch.setattr(torch_collectives, one, late_exchange(getattr(torch_collectives, one)))

    def train(rank: int) -> list[str]:
        if name == "tokens for heads":
            row = partial(tokens, rows=1)
            return far_off(tokens_for_heads(), mesh_of(**axes), None, row, backend=backend)
        plan = MEGATRON if "tensor" in axes else None
        return far_off(tiny(1), mesh_of(**axes), plan, backend=backend)

    world = torch.Size(axes.values()).numel()
    assert run_in_threads(world, train) == [[]] * world


@functools.cache
def step_in_buckets(axis: str, bucket_bytes: int = 1, micro_batches: int = 1) -> Any:
    """Returns a step on two ranks, in buckets of a block each unless they are larger."""
    plan = MEGATRON if axis == "tensor" else None
    options: dict[str, Any] = {"plan": plan, "backend": "eager", "micro_batches": micro_batches}
    with mock.patch.object(sharded, "BUCKET_BYTES", bucket_bytes), one_of_many(2):
        return lazyinline.parallelize(tiny(2), tokens(), mesh=mesh_of(**{axis: 2}), **options)


def collectives(*kind: Any) -> list[Collective]:
    return list(step_in_buckets(*kind).plan.collectives)


def test_a_plan_of_memory_keeps_operand_and_result_until_the_wait() -> None:
    layout = step_in_buckets("fsdp")._runner.layout
    begun, (part,) = dict[int, Any](), layout.parts
    for one in part.launches:
        if one.launch.function in torch_collectives.INTO:
            begun[one.place(dict(one.launch.kwargs)["out"]).instance] = one
        elif one.launch.function is torch_collectives.WAIT:
            result = one.place(one.launch.args[0]).instance
            start = begun.pop(result)
            used = {result, start.place(start.launch.args[0]).instance}
            # Summed in place of its copy, an operand may go.
            used = {result} if "all_reduce" in start.launch.name else used
            for life in (layout.instances[i] for i in used):
                early = life.kind == "arena" and life.death <= one.time
                assert not early, f"{start.launch.name} at {start.time}"
    assert not begun


@pytest.mark.smoke
def test_a_block_gathers_once_while_the_one_before_computes() -> None:
    found = collectives("fsdp")
    gathers = [c for c in found if c.part == "Layer.forward"]
    assert [c.kind for c in gathers] == ["all_gather"] * 2
    assert all(c.num_beside > 9 for c in gathers[1:])  # the first follows an embedding
    reduced = [c for c in found if c.part == "gradients"]
    assert [c.kind for c in reduced] == ["reduce_scatter"] * 4  # head, layers, embedding
    assert all(c.num_beside > 9 for c in reduced[:2])


def test_gradients_are_summed_in_buckets_beside_the_backward() -> None:
    found = [c for c in collectives("data", 1, 2) if c.part == "gradients"]
    assert [c.kind for c in found] == ["all_reduce"] * 4
    assert [c.num_beside for c in found] == sorted((c.num_beside for c in found), reverse=True)
    assert all(c.num_beside > 9 for c in found[:2])
    scattered = [c for c in collectives("fsdp") if c.part == "gradients"]
    assert [c.num_bytes for c in scattered] == [c.num_bytes for c in found]


def test_a_backward_sums_gradients_of_operands_beside_those_of_weights() -> None:
    found = [c for c in collectives("tensor", sharded.BUCKET_BYTES) if c.part == "Layer.backward"]
    assert len(found) == 4 and all(c.num_beside > 3 for c in found)


def test_a_step_runs_after_one_that_failed_while_collectives_were_under_way() -> None:
    def fail_once(rank: int) -> float:
        parallel = lazyinline.parallelize(tiny(1), tokens(), mesh=mesh_of(fsdp=2), backend="eager")
        ids, targets = tokens()
        ids[::2, 0] = VOCABULARY  # a row of each rank's
        parallel.step(*tokens())
        with pytest.raises(IndexError, match="out of range"):
            parallel.step(ids, targets)
        return relative_error(parallel.step(*tokens()), tiny(1)(*tokens()).detach())

    assert max(run_in_threads(2, fail_once)) < 1e-12


def rounded(self: Any, *batch: torch.Tensor) -> Any:
    """Has products in bfloat16."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return self.model(*batch)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.sweep(keep="eager")
def test_weights_are_gathered_in_the_type_that_is_computed_in_and_gradients_scattered(
    backend: Any,
) -> None:
    def train(rank: int) -> Any:
        alone, model = (Made(rounded, model=tiny().float()) for _ in range(2))
        parallel = lazyinline.parallelize(
            model, tokens(), mesh=mesh_of(fsdp=2), plan=None, backend=backend
        )
        loss, expected = parallel.step(*tokens()), alone(*tokens())
        expected.backward()
        wrong = [loss] if relative_error(loss, expected.detach()) > 0.01 else []
        pairs = zip(model.parameters(), alone.parameters(), strict=True)
        wrong += [q for p, q in pairs if relative_error(p.grad.full_tensor(), q.grad) > 0.05]
        return wrong, parallel.plan.collectives

    (wrong, found), _ = run_in_threads(2, train)
    assert wrong == []
    sizes = sorted(c.num_bytes for c in found if c.part == "Layer.forward")
    # Norms are computed in float32: two vectors of 16.
    parameters = sum(p.numel() for p in tiny(1).layers.parameters())
    assert sizes == [128, 128, 2 * (parameters - 32), 2 * (parameters - 32)]
    assert not any(c.kind == "all_reduce" for c in found if c.num_bytes > 8)
