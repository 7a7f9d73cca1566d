"""``parallelize``: a step over a mesh, all ranks as threads of one process."""

import math
import pathlib
import re
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from comparing import relative_error
from parallel_models import (
    LLAMA,
    MEGATRON,
    MIXTURE,
    VOCABULARY,
    far_off,
    is_refused_before_2_13,
    llama,
    mesh_of,
    mixture,
    named_tokens,
    numbered,
    tiny,
    tiny_gpt,
    tokens,
)
from rank_threads import one_of_many, run_in_threads
from saved import page_data
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

import lazyinline
from lazyinline.pipeline_parallel.mesh import torch_collectives
from lazyinline.pipeline_parallel.mesh.plan import MeshPlan
from lazyinline.reuse.ir.costs import Rates

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

SEQUENCE = {
    **MEGATRON,
    "embed": RowwiseParallel(output_layouts=Shard(1)),
    "layers.*.norm_?": SequenceParallel(),
    "layers.*.attention.out": RowwiseParallel(output_layouts=Shard(1)),
    "layers.*.down": RowwiseParallel(output_layouts=Shard(1)),
    "head": ColwiseParallel(),
}


BY_HEAD = {
    "blocks.*.attention.qkv": ColwiseParallel(),
    "blocks.*.attention.out": RowwiseParallel(),
    "blocks.*.up": ColwiseParallel(),
    "blocks.*.down": RowwiseParallel(),
}


def twice(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens that are their own targets: all count, so a mean of means is the mean."""
    ids, _ = tokens(seed)
    return ids, ids


def pinned() -> nn.Module:
    """A model with pins of what styles do not know."""
    model = tiny(1, heads=0)
    for layer in model.layers:
        lazyinline.shard(layer.up, {"weight": Shard(0), "bias": Shard(0)})  # type: ignore[arg-type]
        lazyinline.shard(layer.gate, {"weight": Shard(0)}, output=Replicate())  # type: ignore[arg-type]
    return model


def one_joint_projection() -> Any:
    """A model whose layers have one weight for queries, keys and values, of two names."""
    model: Any = tiny_gpt()
    model.blocks[1].attention.qkv.weight = model.blocks[0].attention.qkv.weight
    return model


class Scored(nn.Module):
    """A loss of a few classes, of which some targets do not count; after a BatchNorm if asked."""

    def __init__(self, *, norm: bool = False, images: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 5)
        self.norm = nn.BatchNorm1d(5) if norm else nn.Identity()
        self.images = images

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        scores = self.norm(self.linear(x))
        if self.images:
            scores, targets = scores.reshape(2, 5, -1), targets.reshape(2, -1)
        return F.cross_entropy(scores, targets, ignore_index=1)


def scored(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(8, 6, dtype=torch.float64, generator=generator)
    return x, torch.randint(0, 5, (8,), generator=generator)


def by_name(seed: int) -> dict[str, torch.Tensor]:
    return dict(zip(("x", "targets"), scored(seed), strict=True))


class Case(NamedTuple):
    """A model, what lies where on which mesh, its batches, and how it is compiled."""

    axes: dict[str, int]
    plan: Any = None
    make: Callable[[], nn.Module] = tiny
    batch: Callable[[int], Any] = tokens
    options: Mapping[str, Any] = MappingProxyType({})

    @property
    def world(self) -> int:
        return math.prod(self.axes.values())


CASES = {  # meshes of one dimension: test_parallel_local.py
    "data x tensor": Case({"data": 2, "tensor": 2}, MEGATRON, partial(tiny, 1)),
    "data x fsdp": Case({"dp_replicate": 2, "dp_shard": 2}),
    "data x sequence and vocabulary": Case({"data": 2, "tensor": 2}, SEQUENCE, partial(tiny, 1)),
    "joint projection": Case({"tensor": 2}, BY_HEAD, one_joint_projection, twice),
    "joint projection, gathered": Case({"fsdp": 2, "tp": 2}, BY_HEAD, tiny_gpt, twice),
    "selective recompute": Case({"fsdp": 2}, options={"recompute": "selective"}),
    "tied, in micro-batches, full recompute": Case(
        *({"fsdp": 2}, None, partial(tiny, tied=True), twice),
        {"micro_batches": 2, "recompute": "full"},
    ),
    "pins": Case({"tp": 2}, None, pinned),
    "llama of transformers": Case({"data": 2, "tensor": 2}, LLAMA, llama, named_tokens),
    "mixture of experts": Case({"data": 2, "tensor": 2}, MIXTURE, mixture, twice),
    "classes": Case({"data": 2}, None, lambda: numbered(Scored()), by_name),
    "classes of images": Case({"data": 2}, None, lambda: numbered(Scored(images=True)), scored),
}


@pytest.mark.smoke
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.sweep(  # kernels: test_parallel_processes.py
    keep=["eager-joint projection]", "eager-tied", "eager-pins", "eager-classes"]
)
def test_five_steps_give_what_one_process_gives(name: str, backend: Any) -> None:
    case = CASES[name]

    def train(rank: int) -> list[str]:
        model, options = case.make(), {"backend": backend, **case.options}
        run = partial(far_off, model, mesh_of(**case.axes), case.plan, case.batch, **options)
        if case.plan is BY_HEAD and is_refused_before_2_13(run):
            return []
        wrong = run()
        if case.plan is BY_HEAD:
            joint = repr(model.get_parameter("blocks.0.attention.qkv.weight").placements[-1])  # type: ignore[attr-defined]
            wrong += [] if joint == "_StridedShard(dim=0, sf=3)" else [joint]
        return wrong

    assert run_in_threads(case.world, train) == [[]] * case.world


@pytest.mark.parametrize(
    ("axes", "memory", "model"),
    [
        ({"tensor": 2}, 190_000, tiny),
        ({"tensor": 2}, 155_000, tiny),
        ({"data": 2, "tensor": 2}, None, partial(tiny, key_heads=2)),
        ({"data": 2, "tensor": 2}, None, tiny_gpt),
    ],
    ids=["memory", "recompute", "fewer keys", "joint projection"],
)
@pytest.mark.sweep(keep="memory")
def test_a_plan_that_was_found_gives_what_one_process_gives_and_moves_what_it_says(
    axes: dict[str, int],
    memory: int | None,
    model: Callable[[], nn.Module],
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Slow ranks and fast links, so that even a tiny model is worth splitting.
    monkeypatch.setattr(lazyinline.frontend.mesh_placement, "CPU", Rates(2e6, 8e6))

    def batch(seed: int) -> Any:  # all targets count: a mean of means is the mean
        ids, _ = tokens(seed, rows=2 if model is tiny_gpt else 4)
        return ids, ids

    made, parallelize = list[Any](), lazyinline.parallelize

    def noted(*args: Any, **options: Any) -> Any:
        made.append(parallelize(*args, **options))
        return made[-1]

    monkeypatch.setattr(lazyinline, "parallelize", noted)

    def train(rank: int) -> list[str]:
        options: dict[str, Any] = {"backend": "eager", "memory_bytes_per_rank": memory}
        options["micro_batches"] = 1 if memory is None else 2
        own, mesh = model(), mesh_of(**axes)
        lazyinline.shard(own.head, {"weight": Shard(0)} if model is tiny else {})
        wrong = far_off(own, mesh, "auto", batch, **options)
        if model is tiny:
            wrong += [] if own.head.weight.placements == (Shard(0),) else ["the head is not pinned"]
        return wrong

    world = torch.Size(axes.values()).numel()
    assert run_in_threads(world, train) == [[]] * world
    said = {one.plan.layouts.moved_bytes for one in made}
    assert said == {one.plan.num_bytes for one in made}
    assert min(said) > 0
    assert "all_to_all" in {one.kind for one in made[0].plan.collectives}
    assert "next best" in str(made[0].plan)
    again = "selective" if memory == 155_000 else ""
    assert {one.plan.layouts.recompute for one in made} == {again}
    joint = made[0].plan.layouts.parameters.get("blocks.0.attention.qkv.weight")
    assert joint is None or repr(joint[-1]) == "_StridedShard(dim=0, sf=3)"
    made[0].save_html(tmp_path / "step.html")
    shown = page_data((tmp_path / "step.html").read_text(encoding="utf-8"))["mesh"]
    assert shown["mesh"] == " x ".join(f"{name} {size}" for name, size in axes.items())
    moved = sum(row["num_calls"] * row["num_bytes"] for row in shown["moved"])
    assert shown["moved_bytes"] == moved == made[0].plan.num_bytes > 0
    assert "embed" in str(shown["layouts"]) and shown["table"] in str(made[0].plan)


def test_a_plan_is_found_or_given() -> None:
    with one_of_many(2):
        mesh = mesh_of(tensor=2)
        with pytest.raises(lazyinline.PlanError, match="for plan='auto'"):
            lazyinline.parallelize(tiny(), tokens(), mesh=mesh, memory_bytes_per_rank=1)
        for module, options, said in (
            ("head", {"output": Shard(0)}, "head is marked with output"),
            ("layers.0.up", {}, "Equal layers have one plan"),
        ):
            model = tiny(heads=0)
            lazyinline.shard(model.get_submodule(module), {"weight": Shard(0)}, **options)
            with pytest.raises(lazyinline.PlanError, match=said):
                lazyinline.parallelize(model, tokens(), mesh=mesh, plan="auto")


def test_micro_batches_are_added_up_in_float32_on_each_rank_where_asked_for() -> None:
    """As many bytes are moved: gradients are reduced once, together, in their own type."""
    ids = torch.randint(VOCABULARY, (32, 8), generator=torch.Generator().manual_seed(1))
    alone = tiny(0).bfloat16()
    exact = [torch.zeros_like(p, dtype=torch.float32) for p in alone.parameters()]
    for part in ids.chunk(16):
        loss = alone(part, part) / 16
        for total, one in zip(exact, torch.autograd.grad(loss, [*alone.parameters()]), strict=True):
            total += one

    def train(rank: int, sums: Any) -> tuple[float, int]:
        model, options = tiny(0).bfloat16(), {"micro_batches": 16, "backend": "eager"}
        mesh = mesh_of(data=2)
        parallel = lazyinline.parallelize(model, (ids, ids), mesh=mesh, sums=sums, **options)
        parallel.step(ids, ids)
        found = [p.grad.full_tensor() for p in model.parameters()]  # type: ignore[union-attr]
        assert all(g.dtype is torch.bfloat16 for g in found)
        errors = list(map(relative_error, found, exact))
        assert max(errors) < 0.1
        moved = parallel.plan.collectives
        reduced = [one.num_bytes for one in moved if one.part == "gradients"]
        assert reduced == [sum(p.numel() * 2 for p in alone.parameters())]
        assert len(moved) == 1 + 2 * 16, "the others are the losses and their counts"
        return float(sum(errors)) / len(errors), parallel.plan.num_bytes

    (rounded, moved), _ = run_in_threads(2, partial(train, sums="as_gradients"))
    assert run_in_threads(2, partial(train, sums="float32"))[0] == (
        pytest.approx(0, abs=rounded / 1.25),
        moved,
    )
    with one_of_many(2), pytest.raises(lazyinline.PipelineError, match="sums='float32'"):
        lazyinline.parallelize(alone, (ids, ids), mesh=mesh_of(pipeline=2), sums="float32")


def test_statistics_over_rows_of_several_ranks_are_refused() -> None:
    with one_of_many(2):
        said = refused(Scored(norm=True).double(), scored(), mesh=mesh_of(data=2))
    assert "statistics of a BatchNorm in training" in said


def test_an_id_outside_of_a_split_vocabulary_is_an_error() -> None:
    def look_up(rank: int) -> None:
        plan = {"embed": RowwiseParallel()}
        parallel = lazyinline.parallelize(
            tiny(0), tokens(), mesh=mesh_of(tensor=2), plan=plan, backend="eager"
        )
        ids, targets = tokens()
        ids[0, 0] = VOCABULARY
        parallel.step(ids, targets)

    with pytest.raises(IndexError, match="out of range"):
        run_in_threads(2, look_up)


def refused(model: nn.Module, batch: Any = None, *, mesh: Any = None, plan: Any = None) -> str:
    """What ``parallelize`` says against it."""
    with pytest.raises(lazyinline.PlanError) as error:
        lazyinline.parallelize(
            model, batch or tokens(), mesh=mesh or mesh_of(tensor=4), plan=plan, backend="eager"
        )
    return str(error.value)


def test_what_cannot_be_split_is_refused_with_numbers() -> None:
    with one_of_many(4):
        odd = nn.ModuleDict({"linear": nn.Linear(6, 10)})
        said = refused(odd, plan={"linear": ColwiseParallel()})
        assert "Dimension 0 of linear.weight has 10 entries" in said and "4 ranks" in said
        assert "'layer.*.up' in the plan matches no module" in refused(
            tiny(), plan={"layer.*.up": ColwiseParallel()}
        )
        assert "which is RMSNorm" in refused(tiny(), plan={"norm": ColwiseParallel()})
        marked = lazyinline.shard(tiny(), {"wait": Shard(0)})
        assert "has no parameter 'wait'" in refused(marked)
        rows = refused(tiny(), tokens(rows=6), mesh=mesh_of(data=4))
        assert "(6, 8) cannot be split evenly over the 4 ranks" in rows
        assert "named ('x',)" in refused(tiny(), mesh=mesh_of(x=4))
        assert "no dimension of the mesh {'data': 4} is named" in refused(
            tiny(), mesh=mesh_of(data=4), plan=MEGATRON
        )
        assert "takes a DeviceMesh, not str" in refused(tiny(), mesh="tensor")
        assert "on meta, and the mesh is of cpu" in refused(tiny().to("meta"))
    with pytest.raises(lazyinline.PlanError, match="not initialized"):
        lazyinline.parallelize(tiny(), tokens(), mesh=None)


def test_ranks_with_different_plans_are_noticed_before_anything_is_moved() -> None:
    def differ(rank: int) -> str:
        plan = {"head": ColwiseParallel()} if rank else {}
        with pytest.raises(lazyinline.PipelineError) as error:
            lazyinline.parallelize(
                tiny(0), tokens(), mesh=mesh_of(tensor=2), plan=plan, backend="eager"
            )
        return str(error.value)

    for said in run_in_threads(2, differ):
        assert "Ranks have different plans" in said and "rank(s) [1]" in said


def test_a_step_notices_what_changed_since() -> None:
    def change(rank: int) -> list[str]:
        model, mesh, plan = tiny(0), mesh_of(tensor=2), {"head": ColwiseParallel()}
        parallel = lazyinline.parallelize(model, tokens(), mesh=mesh, plan=plan, backend="eager")
        said = []

        def noted(*batch: Any) -> None:
            with pytest.raises(lazyinline.PlanError) as error:
                parallel.step(*batch)
            said.append(str(error.value))

        with pytest.raises(lazyinline.PlanError, match="parallelized already"):
            lazyinline.parallelize(model, tokens(), mesh=mesh, plan=plan)
        noted(*tokens(rows=2))
        model.eval()
        noted(*tokens())
        model.train()
        model.norm.weight = nn.Parameter(model.norm.weight.detach())
        noted(*tokens())
        return said

    for said in run_in_threads(2, change):
        assert "no longer fits" in said[0] and "no longer fits" in said[1]
        assert "The parameter weight was replaced" in said[2]


def test_a_plan_says_in_words_what_lies_where() -> None:
    axes = (("data", 2), ("tensor", 4))
    parameters = {
        "layers.0.up": (Replicate(), Shard(0)),
        "layers.1.up": (Replicate(), Shard(0)),
        "norm": (Replicate(), Replicate()),
    }
    plan = MeshPlan(axes, parameters, ((Shard(0), Replicate()),))
    assert re.sub(r"\s+", " ", str(plan)) == (
        "mesh: data 2 x tensor 4 batch: dimension 0 split over data "
        "dimension 0 split over tensor: layers.*.up whole on each rank: norm"
    )


def test_what_is_under_way_when_a_collective_fails_is_held_until_it_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Work:
        def __init__(self, error: str) -> None:
            self.error = error

        def wait(self) -> None:
            if self.error:
                raise RuntimeError(self.error)

    works = [Work("the peer is gone"), Work("")]
    monkeypatch.setitem(torch_collectives._STARTS, "all_reduce", lambda *given: works.pop(0))
    with one_of_many(2):
        groups = torch_collectives.groups_of(mesh_of(tensor=2))
        failing, other = (torch.ones(4) for _ in range(2))
        operand = weakref.ref(other)
        with pytest.raises(lazyinline.PlanError, match="over 'tensor' is run outside of a step"):
            torch.ops.lazyinline.all_reduce(failing, "sum", "tensor")
        with torch_collectives.collectives_over(groups):
            started = torch.ops.lazyinline.all_reduce(failing, "sum", "tensor")
            torch.ops.lazyinline.all_reduce(other, "sum", "tensor")
        with pytest.raises(lazyinline.PlanError, match=r"16 bytes over 'tensor' \(ranks 0, 1\)"):
            torch.ops.lazyinline.wait(started)
        del other
        assert operand() is not None
        torch_collectives.settle()
        assert operand() is None
