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
from models import Made, MarkedBlock
from parallel_models import (
    MEGATRON,
    VOCABULARY,
    Layer,
    far_off,
    mesh_of,
    numbered,
    tiny,
    tokens,
    tokens_for_heads,
)
from rank_threads import one_of_many, run_in_threads
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import lazyinline
from lazyinline.pipeline_parallel.mesh import sharded, torch_collectives
from lazyinline.pipeline_parallel.mesh.sharded import Sharder
from lazyinline.pipeline_parallel.mesh.torch_sharding import local_type
from lazyinline.pipeline_parallel.mesh.traffic import collectives_in
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
        return far_off(tiny(), mesh_of(**axes), plan, backend=backend)

    world = torch.Size(axes.values()).numel()
    assert run_in_threads(world, train) == [[]] * world


@functools.cache
def step_in_buckets(axis: str, micro_batches: int = 1) -> Any:
    """Returns a step on two ranks, in buckets of a block each."""
    options: dict[str, Any] = {"backend": "eager", "micro_batches": micro_batches}
    with mock.patch.object(sharded, "BUCKET_BYTES", 1), one_of_many(2):
        return lazyinline.parallelize(
            tiny(2, heads=0), tokens(), mesh=mesh_of(**{axis: 2}), **options
        )


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
    found = step_in_buckets("fsdp").plan.collectives
    gathers = [c for c in found if c.part == "FeedForward.forward"]
    assert [c.kind for c in gathers] == ["all_gather"] * 2
    assert all(c.num_beside > 9 for c in gathers[1:])  # the first follows an embedding
    reduced = [c for c in found if c.part == "gradients"]
    assert [c.kind for c in reduced] == ["reduce_scatter"] * 4  # head, layers, embedding
    assert all(c.num_beside > 9 for c in reduced[:2])


def test_gradients_are_summed_in_buckets_beside_the_backward() -> None:
    step = step_in_buckets("data", micro_batches=2)
    found = [c for c in step.plan.collectives if c.part == "gradients"]
    assert [c.kind for c in found] == ["all_reduce"] * 4
    assert [c.num_beside for c in found] == sorted((c.num_beside for c in found), reverse=True)
    assert all(c.num_beside > 9 for c in found[:2])
    every = step_in_buckets("fsdp").plan.collectives
    scattered = [c for c in every if c.part == "gradients"]
    assert [c.num_bytes for c in scattered] == [c.num_bytes for c in found]


def test_megatrons_plan_sums_twice_per_layer_beside_other_work_and_moves_what_it_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sums, moved = torch_collectives.dist.all_reduce, list[int]()

    def counted(tensor: Tensor, *args: Any) -> Any:
        moved.append(tensor.numel() * tensor.element_size())
        return sums(tensor, *args)

    with one_of_many(2):
        mesh, plan = mesh_of(tensor=2), MEGATRON
        step = lazyinline.parallelize(tiny(3), tokens(), mesh=mesh, plan=plan, backend="eager")
        step.step(*tokens())  # compares batches with the others
        monkeypatch.setattr(torch_collectives.dist, "all_reduce", counted)
        step.step(*tokens())
    found, text = step.plan.collectives, str(step.plan)
    for part in ("forward", "backward"):
        assert f"Layer.{part}: 2 all_reduce over tensor, 8,192 bytes (each of 3 calls)" in text
    assert {one.kind for one in found} == {"all_reduce"}
    assert sum(moved) == step.plan.num_bytes
    assert len(moved) == len(found) == 12
    # Gradients of operands are summed beside those of weights.
    backward = [one for one in found if one.part == "Layer.backward"]
    assert len(backward) == 6 and all(one.num_beside > 3 for one in backward)


def rounded(self: Any, *batch: torch.Tensor) -> Any:
    """Has products in bfloat16."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return self.model(*batch)


def of_blocks(make: Callable[[], nn.Module]) -> nn.Module:
    """A model of two blocks whose norms have two vectors of 16."""
    model = tiny(0)
    model.layers = nn.ModuleList(make() for _ in range(2))
    return Made(rounded, model=numbered(model).float())


BLOCKS = {"block": lambda: MarkedBlock(16, norm=True), "decoder": lambda: Layer(16, 4, 4, 0.0)}


@pytest.mark.parametrize("make", BLOCKS.values(), ids=BLOCKS)
@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.sweep(keep="eager-block")
def test_weights_are_gathered_in_the_type_that_is_computed_in_and_gradients_scattered(
    make: Callable[[], nn.Module], backend: Any
) -> None:
    """And a step runs after one that failed while collectives were under way."""

    def train(rank: int) -> Any:
        alone, model = of_blocks(make), of_blocks(make)
        parallel = lazyinline.parallelize(
            model, tokens(), mesh=mesh_of(fsdp=2), plan=None, backend=backend
        )
        loss, expected = parallel.step(*tokens()), alone(*tokens())
        expected.backward()
        wrong = [loss] if relative_error(loss, expected.detach()) > 0.01 else []
        pairs = zip(model.parameters(), alone.parameters(), strict=True)
        wrong += [q for p, q in pairs if relative_error(p.grad.full_tensor(), q.grad) > 0.05]
        ids, targets = tokens()
        ids[::2, 0] = VOCABULARY  # a row of each rank's
        with pytest.raises(IndexError, match="out of range"):
            parallel.step(ids, targets)
        wrong += [] if torch.equal(parallel.step(*tokens()), loss) else ["the loss is another"]
        return wrong, parallel.plan.collectives

    (wrong, found), _ = run_in_threads(2, train)
    assert wrong == []
    block = type(make()).__name__
    sizes = sorted(c.num_bytes for c in found if c.part == f"{block}.forward")
    # Norms are computed in float32.
    parameters = sum(p.numel() for p in make().parameters())
    assert sizes == [128, 128, 2 * (parameters - 32), 2 * (parameters - 32)]
    assert not any(c.kind == "all_reduce" for c in found if c.num_bytes > 8)
