"""``parallelize`` between real gloo processes, over meshes with pipeline stages too."""

import pathlib
import re
import signal
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from memory_events import memory_use
from parallel_models import (
    FEED_FORWARD,
    MEGATRON,
    far_off,
    is_refused_before_2_13,
    mesh_of,
    tiny,
    tiny_gpt,
    tokens,
    tokens_for_heads,
)
from rank_threads import one_of_many
from ranks import run_ranks, said_by_survivors
from test_parallel import SEQUENCE
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import lazyinline
from lazyinline.frontend import mesh_placement
from lazyinline.frontend.passes import mesh
from lazyinline.pipeline_parallel.mesh import torch_collectives
from lazyinline.reuse.ir.costs import Rates

HERE = "test_parallel_processes"
EAGER: dict[str, Any] = {"backend": "eager", "micro_batches": 2}
INTERLEAVED: dict[str, Any] = {"schedule": "Interleaved1F1B", "num_stages": 4}
HALVES: dict[str, Any] = {"schedule": "ZBVZeroBubble", "num_stages": 4, "micro_batches": 4}


def exchange_in_kernels(rank: int, folder: pathlib.Path) -> list[str]:
    return far_off(tokens_for_heads(1), mesh_of(tensor=2), None, partial(tokens, rows=1))


def draw_as_one_process(rank: int, folder: pathlib.Path) -> list[str]:
    """Dropout of what is whole, and of what is split by columns."""
    return far_off(tiny(1, dropout=0.4), mesh_of(tensor=2), MEGATRON, backend="eager")


def draw_for_own_rows(rank: int, folder: pathlib.Path) -> list[str]:
    return far_off(tiny(1, dropout=0.4), mesh_of(data=2), None, backend="eager")


def draw_by_a_plan_that_was_found(rank: int, folder: pathlib.Path) -> list[str]:
    # Slow ranks and fast links, so that even a tiny model is worth splitting.
    with mock.patch.object(mesh_placement, "CPU", Rates(2e6, 8e6)):
        return far_off(tiny(1, dropout=0.4), mesh_of(tensor=2), "auto", backend="eager")


def save_and_load_on_another_mesh(rank: int, folder: pathlib.Path) -> list[str]:
    wrong = []
    first, second = tiny(0), tiny(0)
    with torch.no_grad():
        for parameter in second.parameters():
            parameter.zero_()
    options: Any = {"backend": "eager"}
    by_rows = {"head": ColwiseParallel()}
    lazyinline.parallelize(first, tokens(), mesh=mesh_of(tensor=2), plan=by_rows, **options)
    parallel = lazyinline.parallelize(second, tokens(), mesh=mesh_of(fsdp=2), **options)
    dcp.save(first.state_dict(), checkpoint_id=folder / "checkpoint")
    state = second.state_dict()
    dcp.load(state, checkpoint_id=folder / "checkpoint")
    second.load_state_dict(state)
    for (name, p), q in zip(tiny(0).named_parameters(), second.parameters(), strict=True):
        if not torch.equal(p, q.full_tensor()):  # type: ignore[operator]
            wrong.append(f"{name} is another after loading")
    loss, expected = parallel.step(*tokens()), tiny(0)(*tokens())
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
    if is_refused_before_2_13(lambda: trained(mesh, JOINT)):
        return []
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
    mesh, said, model = mesh_of(tensor=2), [], tiny(0)
    options: Any = {"mesh": mesh, "plan": {"head": ColwiseParallel()}, "backend": "eager"}
    with pytest.raises(lazyinline.PipelineError) as error:
        lazyinline.parallelize(tiny(rank), tokens(), **options)
    said.append(str(error.value))
    model.norm = nn.Dropout(0.5)
    parallel = lazyinline.parallelize(model, tokens(), **options)
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


# ---- stages over a mesh ----------------------------------------------------------------------


def batch(seed: int = 0) -> Any:
    """Tokens that all count: the mean of the micro-batches' means is the mean."""
    ids, _ = tokens(seed, rows=8)
    return ids, ids


def pipelined(model: Any, plan: Any = None, *, axes: Any = None, **options: Any) -> Any:
    mesh = mesh_of(**(axes or {"pipeline": 2, "tensor": 2}))
    return lazyinline.parallelize(model, batch(), mesh=mesh, plan=plan, **{**EAGER, **options})


def train_until_ended(
    rank: int, folder: pathlib.Path, dropout: float = 0.3, **options: Any
) -> None:
    step_until_ended(pipelined(tiny(dropout=dropout), MEGATRON, **options), folder / f"ready{rank}")


def step_until_ended(pipeline: Any, ready: pathlib.Path) -> None:
    torch.manual_seed(0)
    pipeline.step(*batch())
    ready.touch()
    while True:
        pipeline.step(*batch())


def train_two(rank: int, folder: pathlib.Path) -> None:
    mesh, model = mesh_of(pipeline=2, tensor=1), tiny(dropout=0.3)
    wrong = far_off(model, mesh, MEGATRON, batch, num_parts=2, **EAGER)
    pipeline = pipelined(tiny(2, width=64), MEGATRON, axes={"pipeline": 2, "tensor": 1})
    torch.save([*wrong, *_held(pipeline)], folder / f"wrong{rank}")
    step_until_ended(pipeline, folder / f"ready{rank}")


@pytest.mark.smoke
def test_two_stages_give_what_one_process_gives_until_one_is_killed(tmp_path: pathlib.Path) -> None:
    [output] = said_by_survivors(tmp_path, f"{HERE}.train_two", limit_s=60)
    assert_stopped(output, 0)
    assert [torch.load(tmp_path / f"wrong{rank}") for rank in range(2)] == [[], []]


def assert_stopped(output: str, rank: int) -> None:
    """Compares the last line of a rank with all that it may be doing when others end."""
    last = output.strip().splitlines()[-1]
    assert re.search(rf"(Pipeline|Plan)Error: Rank {rank} stopped (in|where) ", last), output[
        -3000:
    ]
    transfer = r"stage \d: (\d[FB]\d|(receive|send) [FB]\d (from|to) stage \d, rank \d)"
    collective = r"in (an all-reduce of [\d,]+ bytes over 'tensor'|the broadcast from rank \d)"
    said = rf"({transfer}|{collective}|where ranks compare what they have) \(ranks [\d, ]+\)"
    assert re.search(said, last), last


def train_four_until_killed(rank: int, folder: pathlib.Path) -> None:
    train_until_ended(rank, folder)


def train_two_until_stopped(rank: int, folder: pathlib.Path) -> None:
    # Draws are compared in the group of all ranks, whose time-out is a minute.
    options: dict[str, Any] = {"axes": {"pipeline": 2, "tensor": 1}, "timeout_s": 20.0}
    train_until_ended(rank, folder, dropout=0.0, **options)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("work", "world", "ended_by"),
    [
        ("train_four_until_killed", 4, signal.SIGKILL),
        ("train_two_until_stopped", 2, signal.SIGSTOP),
    ],
)
def test_a_rank_that_ends_or_hangs_ends_the_others_with_errors_that_name_ranks(
    work: str, world: int, ended_by: signal.Signals, tmp_path: pathlib.Path
) -> None:
    given: dict[str, Any] = {"limit_s": 50, "world": world, "ended_by": ended_by}
    for rank, output in enumerate(said_by_survivors(tmp_path, f"{HERE}.{work}", **given)):
        assert_stopped(output, rank)


MESHES: dict[str, tuple[dict[str, int], Any, dict[str, Any], dict[str, Any]]] = {
    "1F1B": ({"pipeline": 2, "tensor": 2}, MEGATRON, {}, {}),
    "tied": ({"tensor": 2, "pp": 2}, MEGATRON, {"tied": True}, {"recompute": "full"}),
    "halves": ({"pp": 2, "tp": 2}, SEQUENCE, {"dropout": 0.3}, HALVES),
    "rows": ({"data": 2, "pp": 2}, None, {"tied": True}, {"schedule": "GPipe"}),
    "gathered": ({"pp": 2, "fsdp": 2}, None, {"dropout": 0.3}, {"backend": "inductor"}),
    "interleaved": ({"pp": 2, "tp": 2}, MEGATRON, {}, INTERLEAVED),
}


def train_four(rank: int, folder: pathlib.Path) -> list[str]:
    wrong = []
    for name, (axes, plan, kind, options) in MESHES.items():
        mesh, chosen = mesh_of(**axes), {**EAGER, **options}
        chosen["num_parts"] = chosen["micro_batches"]
        wrong += [f"{name}: {t}" for t in far_off(tiny(4, **kind), mesh, plan, batch, **chosen)]
    # Slow ranks and fast links, so that even a tiny model is worth splitting.
    with mock.patch.object(mesh_placement, "CPU", Rates(2e6, 8e6)):
        found = {**EAGER, "memory_bytes_per_rank": 260_000}
        for axes in ({"pipeline": 2, "tensor": 2}, {"pipeline": 2, "data": 2}):
            wrong += far_off(tiny(4), mesh_of(**axes), "auto", batch, **found)
    held = []
    for options in (INTERLEAVED, HALVES):
        held += _held(pipelined(tiny(4, width=64), MEGATRON, **options))
    return [*wrong, *held, *_moved(), *_saved(folder), *_clipped()]


@pytest.mark.slow
@pytest.mark.sweep
def test_four_ranks_give_what_one_process_gives_and_move_what_is_predicted(
    tmp_path: pathlib.Path,
) -> None:
    assert run_ranks(tmp_path, f"{HERE}.train_four", world=4) == [[]] * 4


def _moved() -> list[str]:
    """Compares the bytes of each collective with what the plan says of the rank's stages."""
    pipeline = pipelined(tiny(4), SEQUENCE, **HALVES)
    moved: list[tuple[str, int]] = []

    def counted(name: str, start: Callable[..., Any]) -> Callable[..., Any]:
        def run(x: torch.Tensor, *args: Any) -> Any:
            num_bytes = max(t.numel() * t.element_size() for t in (x, args[-1]))
            moved.append((name, num_bytes))
            return start(x, *args)

        return run

    starts = torch_collectives._STARTS
    with mock.patch.dict(starts, {n: counted(n, start) for n, start in starts.items()}):
        pipeline.step(*batch())
    stages = [pipeline.plan.traffic[stage] for stage in pipeline.counts]
    said = sorted((one.kind, one.num_bytes) for stage in stages for one in stage)
    return [] if said == sorted(moved) and said else [f"{sorted(moved)} moved, not {said}"]


def _held(pipeline: Any) -> list[str]:
    """Compares what the plan says that this rank holds with what a step really takes.

    Of plans that sum alone: gloo gathers and scatters through memory of its own.
    """
    said = pipeline.plan.memory
    own = [p.to_local() for _, p in pipeline.named_parameters()]
    held = sum(t.numel() * t.element_size() for t in own)
    # Gradients are summed in memory that is there before the first step, too.
    measured = memory_use(lambda: pipeline.step(*batch())).peak_bytes + 2 * held
    wrong = [] if said.parameters == said.gradients == held else [f"{said}, not {held} of each"]
    is_near = abs(said.num_bytes - measured) <= 0.02 * measured
    return wrong if is_near else [*wrong, f"{measured} bytes, not {said.num_bytes}"]


def _saved(folder: pathlib.Path) -> list[str]:
    """Saves the parts of all ranks, and loads them on another mesh without a pipeline."""
    first, second = tiny(4), tiny(4)
    with torch.no_grad():
        for parameter in second.parameters():
            parameter.zero_()
    own = first.layers[3 * (dist.get_rank() // 2)]  # of this rank's stage
    held, pipeline = own.up.weight, pipelined(first, MEGATRON)
    wrong = ["a whole parameter stays"] if held.untyped_storage().nbytes() > 8 else []  # type: ignore[operator]
    dcp.save(pipeline.state_dict(), checkpoint_id=folder / "checkpoint")
    lazyinline.parallelize(second, batch(), mesh=mesh_of(fsdp=4), backend="eager")
    state = second.state_dict()
    dcp.load(state, checkpoint_id=folder / "checkpoint")
    pairs = zip(tiny(4).named_parameters(), second.parameters(), strict=True)
    return wrong + [f"{n} is another" for (n, p), q in pairs if not torch.equal(p, q.full_tensor())]  # type: ignore[operator]


def _clipped() -> list[str]:
    """Clips the gradients of all stages by the norm that they have in one process."""
    model, alone = tiny(4, tied=True), tiny(4, tied=True)
    pipeline = pipelined(model, MEGATRON)
    pipeline.step(*batch())
    alone(*batch()).backward()
    expected = torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
    norm = pipeline.clip_grad_norm_(0.1)
    wrong = [] if torch.allclose(norm.double(), expected) else [f"norm {norm}, not {expected}"]
    same = dict(alone.named_parameters())
    for name, parameter in pipeline.named_parameters():
        if not torch.allclose(parameter.grad.full_tensor(), same[name].grad):
            wrong.append(f"the clipped gradient of {name} is another")
    return wrong


def with_large_head(size: int = 4096, **kind: Any) -> Any:
    model = tiny(8, width=64, **kind).float()
    model.head = torch.nn.Linear(64, size, bias=False)
    return model


def test_stages_are_cut_by_what_a_rank_computes_and_moves_or_by_whole_calls() -> None:
    def plan_of(model: nn.Module) -> Any:
        with one_of_many(8):
            return pipelined(model, FEED_FORWARD, axes={"pipeline": 2, "tensor": 4}).plan

    # Sums over tensor make layers long, so that the head is worth two of them.
    model = with_large_head(2048, heads=0)
    found = plan_of(model)
    assert [stage.num_blocks for stage in found.stages] == [5, 3]
    assert "1F1B: 2 stages on 2 rank(s), 2 micro-batches" in str(found)
    moved = "stage 1, FeedForward.forward: 1 all_reduce over tensor, 8,192 bytes (each of 6 calls)"
    assert moved in str(found)
    assert "dimension 1 split over tensor: layers.*.down.weight" in str(found)
    # Of the other stage nothing is replaced.
    assert hasattr(model.embed.weight, "placements")
    assert not hasattr(model.head.weight, "placements")
    # Where a piece alone is no stage, calls count as in one process, in which they are shorter.
    alone = mock.Mock(side_effect=lazyinline.PlanError("a piece is not sent so"))
    with mock.patch.object(mesh, "_pieces", alone):
        found = plan_of(with_large_head(2048, heads=0))
    assert [stage.num_blocks for stage in found.stages] == [6, 2] and alone.called


@pytest.mark.parametrize(
    ("memory_bytes", "blocks", "again"),
    [(8_000_000, [7, 1], ""), (6_000_000, [6, 2], ""), (5_000_000, [6, 2], "selective")],
)
@pytest.mark.sweep(keep="6000000")
def test_layouts_stages_and_recompute_are_chosen_so_that_each_rank_fits(
    memory_bytes: int, blocks: list[int], again: str
) -> None:
    with one_of_many(4):
        options: dict[str, Any] = {"memory_bytes_per_rank": memory_bytes}
        found = pipelined(with_large_head(), "auto", **options).plan
    # The first rank holds two micro-batches, so a layer goes to the second before any is redone.
    assert [stage.num_blocks for stage in found.stages] == blocks
    assert found.layouts.recompute == again
    for stage in found.stages:
        own, trained = stage.parameter_bytes, stage.gradient_bytes
        assert own + 3 * trained + stage.in_flight * stage.saved_bytes <= memory_bytes


class Noisy(torch.nn.RMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + torch.randn_like(x)


def test_what_a_pipeline_over_a_mesh_does_not_do_is_refused() -> None:
    with one_of_many(4):
        refused: list[tuple[str, dict[str, Any]]] = [
            ("For the 2 ranks of a pipeline: No", {"plan": "auto", "memory_bytes_per_rank": 1}),
            ("are for plan='auto'", {"memory_bytes_per_rank": 1}),
            ("only the dimension 'pipeline'", {"axes": {"pipeline": 4}}),
            ("named \\('pp', 'pipeline'\\)", {"axes": {"pp": 2, "pipeline": 2}}),
        ]
        for said, options in refused:
            with pytest.raises(lazyinline.PlanError, match=said):
                pipelined(tiny(heads=0), **options)
        noisy = tiny(heads=0)
        noisy.norm = Noisy(16).double()
        with pytest.raises(lazyinline.PlanError, match="draws random numbers"):
            pipelined(noisy)
        with pytest.raises(lazyinline.PipelineError, match="split='half' is unknown"):
            pipelined(tiny(), split="half")
