"""``parallelize`` between real gloo processes."""

import pathlib
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from parallel_models import MEGATRON, far_off, mesh_of, tiny, tiny_gpt, tokens, tokens_for_heads
from torch import nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import lazyinline
from lazyinline.frontend import mesh_placement
from lazyinline.reuse.ir.operators import Rates

HERE = "test_parallel_processes"


def exchange_in_kernels(rank: int, folder: pathlib.Path) -> list[str]:
    return far_off(tokens_for_heads(1), mesh_of(tensor=2), None, partial(tokens, rows=1))


def draw_as_one_process(rank: int, folder: pathlib.Path) -> list[str]:
    """Dropout of what is whole, and of what is split by columns."""
    return far_off(tiny(dropout=0.4), mesh_of(tensor=2), MEGATRON, backend="eager")


def draw_for_own_rows(rank: int, folder: pathlib.Path) -> list[str]:
    return far_off(tiny(dropout=0.4), mesh_of(data=2), None, backend="eager")


def draw_by_a_plan_that_was_found(rank: int, folder: pathlib.Path) -> list[str]:
    # Slow ranks and fast links, so that even a tiny model is worth splitting.
    with mock.patch.object(mesh_placement, "CPU", Rates(2e6, 8e6)):
        return far_off(tiny(dropout=0.4), mesh_of(tensor=2), "auto", backend="eager")


def save_and_load_on_another_mesh(rank: int, folder: pathlib.Path) -> list[str]:
    wrong = []
    first, second = tiny(1), tiny(1)
    with torch.no_grad():
        for parameter in second.parameters():
            parameter.zero_()
    options: Any = {"backend": "eager"}
    lazyinline.parallelize(first, tokens(), mesh=mesh_of(tensor=2), plan=MEGATRON, **options)
    parallel = lazyinline.parallelize(second, tokens(), mesh=mesh_of(fsdp=2), **options)
    dcp.save(first.state_dict(), checkpoint_id=folder / "checkpoint")
    state = second.state_dict()
    dcp.load(state, checkpoint_id=folder / "checkpoint")
    second.load_state_dict(state)
    for (name, p), q in zip(tiny(1).named_parameters(), second.parameters(), strict=True):
        if not torch.equal(p, q.full_tensor()):  # type: ignore[operator]
            wrong.append(f"{name} is another after loading")
    loss, expected = parallel.step(*tokens()), tiny(1)(*tokens())
    return wrong if torch.isclose(loss, expected) else [*wrong, f"{loss}, not {expected}"]


JOINT = {"blocks.*.attention.qkv": ColwiseParallel(), "blocks.*.attention.out": RowwiseParallel()}


def trained(mesh: Any, plan: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, (ids, _) = tiny_gpt(1), tokens()
    step = lazyinline.parallelize(model, (ids, ids), mesh=mesh, plan=plan, backend="eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step.step(ids, ids)
    optimizer.step()
    return model, optimizer


def save_joint_projections(rank: int, folder: pathlib.Path) -> list[str]:
    """Saved split by head; loaded where they are split otherwise, and split by head again."""
    mesh, place = mesh_of(tensor=2), folder / "joint"
    saved = trained(mesh, JOINT)
    dcp.save(lazyinline.for_checkpoint(state_of(saved)), checkpoint_id=place)
    want, wrong = {n: t.clone() for n, t in flat(state_of(saved)).items()}, []
    for loaded in (trained(mesh_of(fsdp=2), None), saved):
        moments = (t for own in loaded[1].state.values() for t in own.values())
        with torch.no_grad():
            for tensor in (*loaded[0].parameters(), *moments):
                tensor.fill_(7.0)
        dcp.load(lazyinline.for_checkpoint(state_of(loaded)), checkpoint_id=place)
        have = flat(state_of(loaded))
        wrong += [f"{name} is another" for name in want if not torch.equal(want[name], have[name])]
    joint = saved[0].get_parameter("blocks.0.attention.qkv.weight").placements  # type: ignore[attr-defined]
    return wrong if "sf=3" in repr(joint) else [*wrong, repr(joint)]


def state_of(trained: tuple[nn.Module, torch.optim.Optimizer]) -> dict[str, Any]:
    model, optimizer = trained
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()["state"]}


def flat(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Whole tensors by their names in a state."""
    model = {name: tensor.full_tensor() for name, tensor in state["model"].items()}
    kept = {f"{n}.{k}": t for n, own in state["optimizer"].items() for k, t in own.items()}
    return model | {n: getattr(t, "full_tensor", lambda t=t: t)() for n, t in kept.items()}


def disagree(rank: int, folder: pathlib.Path) -> list[str]:
    """Other models, other batches, and other random numbers on each rank."""
    mesh, said = mesh_of(tensor=2), []
    options: Any = {"mesh": mesh, "plan": MEGATRON, "backend": "eager"}
    with pytest.raises(lazyinline.PipelineError) as error:
        lazyinline.parallelize(tiny(1 + rank), tokens(), **options)
    said.append(str(error.value))
    parallel = lazyinline.parallelize(tiny(1, dropout=0.5), tokens(), **options)
    with pytest.raises(lazyinline.PipelineError) as error:
        parallel.step(*tokens(rank))
    said.append(str(error.value))
    torch.manual_seed(rank)
    with pytest.raises(lazyinline.PipelineError) as error:
        parallel.step(*tokens())
    return [*said, str(error.value)]


@pytest.mark.smoke
@pytest.mark.parametrize(
    "task",
    [
        "exchange_in_kernels",
        "draw_as_one_process",
        "draw_for_own_rows",
        "draw_by_a_plan_that_was_found",
        "save_and_load_on_another_mesh",
        "save_joint_projections",
    ],
)
@pytest.mark.sweep(keep=["exchange", "one_process", "save"])
def test_two_processes_give_what_one_gives(
    task: str, two_ranks: list[dict[str, list[str]]]
) -> None:
    assert [said[task] for said in two_ranks] == [[], []]


@pytest.mark.parametrize("task", ["disagree"])
def test_ranks_that_differ_are_noticed(task: str, two_ranks: list[dict[str, list[str]]]) -> None:
    for said in two_ranks:
        model, batch, draws = said[task]
        assert "model (its captured program)" in model and "rank(s) [1]" in model
        assert "different batches" in batch and "tensor 0" in batch
        assert "different random numbers" in draws


def hugging_face(
    name: str, backend: Any, axes: dict[str, int], layers: int = 2, **options: Any
) -> list[str]:
    """Trains a small model of transformers, its feed-forward layers (and heads) split."""
    from hugging_face import VOCABULARY, example

    model, _ = example(name, layers=layers)
    model = model.train().double()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    plan: dict[str, Any] = {}
    if name == "llama" and "tensor" in axes:
        columns = ("self_attn.[qkv]_proj", "mlp.gate_proj", "mlp.up_proj")
        plan = {f"model.layers.*.{path}": ColwiseParallel() for path in columns}
        rows = ("self_attn.o_proj", "mlp.down_proj")
        plan |= {f"model.layers.*.{path}": RowwiseParallel() for path in rows}
    elif name == "gpt2":  # its layers are no Linear, and keep their weights the other way round
        for block in model.transformer.h:  # type: ignore[operator, union-attr]
            lazyinline.shard(block.mlp.c_fc, {"weight": Shard(1), "bias": Shard(0)})
            lazyinline.shard(block.mlp.c_proj, {"weight": Shard(0)})

    def batch(seed: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(1, VOCABULARY, (4, 8), generator=generator)
        return {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}

    return far_off(model, mesh_of(**axes), plan, batch, backend=backend, **options)
