"""Pipelines between real gloo processes."""

import copy
import pathlib
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from comparing import relative_error
from memory_events import memory_use
from ranks import LIMIT_S, run_ranks, said_by_survivors, two_replicas
from test_pipeline import Net, chain_and_batch, make, net_and_batch, train, unlike_planned
from test_pipeline_optimizer import hook_of_one_rank, norm, replicas, resume, scaler, schedules

from lazyinline import PipelineError
from lazyinline.pipeline_parallel.actions import SCHEDULES

HERE = "test_pipeline_processes"
UPDATES = (schedules, replicas, resume, norm, scaler, hook_of_one_rank)


def train_with_schedules(rank: int, folder: pathlib.Path) -> list[str]:
    wrong = []
    for schedule, num_stages in (("1F1B", 2), ("DualPipeV", 4)):
        model, args = net_and_batch()
        pipe = make(model, args, schedule, num_stages=num_stages)
        wrong += [f"{schedule}: {text}" for text in train(pipe, model, args)]
        held = {name for name, _ in pipe.named_parameters()}
        both_ends = schedule == "DualPipeV" or "embedding.weight" in held
        if not both_ends or len(held) == len(list(model.parameters())):
            wrong.append(f"{schedule}: rank {rank} holds {sorted(held)}")
    return wrong


def train_without_a_plan(rank: int, folder: pathlib.Path) -> list[str]:
    """What ranks send lies where closures put it, in the layouts that wires ask for."""
    wrong = unlike_planned(*net_and_batch(), "InterleavedZeroBubble", num_stages=4)
    return wrong + unlike_planned(*chain_and_batch(), "1F1B")


@pytest.mark.smoke
@pytest.mark.parametrize(
    "task",
    [
        "train_with_schedules",
        "train_without_a_plan",
        "save_and_go_on_with_other_stages",
        "share_the_optimizer",
    ],
)
@pytest.mark.sweep(keep=["train_with", "save", "share"])
def test_two_processes_give_what_one_gives(
    task: str, two_ranks: list[dict[str, list[str]]]
) -> None:
    assert [said[task] for said in two_ranks] == [[], []]


@pytest.mark.parametrize("task", [task.__name__ for task in UPDATES])
def test_two_processes_update_as_one_does(task: str, two_ranks: list[dict[str, Any]]) -> None:
    assert [said[task] for said in two_ranks] == [[], []]


def train_in_planned_memory(rank: int, folder: pathlib.Path) -> dict[str, list[str]]:
    """Every schedule between real processes, in arenas; what a step holds is what was planned."""
    found = {}
    for schedule in (folder / "planned").read_text().split():
        model, args = net_and_batch(width=32)
        num_stages = 2 if schedule in ("GPipe", "1F1B") else 4
        pipe = make(model, args, schedule, num_stages=num_stages, backend="inductor")
        found[schedule] = train(pipe, model, args, steps=2)
        measured = memory_use(partial(pipe.step, *args)).peak_bytes + pipe.arena_bytes
        if abs(pipe.step_peak_bytes / measured - 1) > 0.02:
            found[schedule].append(f"planned {pipe.step_peak_bytes}, measured {measured}")
    return found


@pytest.mark.parametrize("planned", SCHEDULES)
@pytest.mark.parametrize("task", ["train_in_planned_memory"])
@pytest.mark.sweep(keep="Interleaved1F1B")
def test_two_processes_hold_what_their_plans_say(
    planned: str, task: str, two_ranks: list[dict[str, Any]]
) -> None:
    assert [said[task][planned] for said in two_ranks] == [[], []]


def kernels_of_a_start(rank: int, folder: pathlib.Path) -> list[int]:
    """How many results this process took from the cache, and how many it made."""
    model, args = net_and_batch(width=24)
    pipe = make(model, args, "1F1B", backend="inductor")
    assert not train(pipe, model, args, steps=1)
    use = pipe.last_report.cache
    return [use.num_loaded, use.num_made]


@pytest.mark.sweep
def test_ranks_share_kernels_and_a_second_run_builds_none(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first rank leaves the kernels of the blocks for the other."""
    task, cold = f"{HERE}.kernels_of_a_start", tmp_path / "cold"
    cold.mkdir()
    first, second = run_ranks(cold, task)
    assert first[1] > 0
    assert second[0] > 0, "rank 1 built again what rank 0 had built"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    warm = run_ranks(tmp_path, task, cache=cold / "cache")
    assert all(made == 0 and loaded > 0 for loaded, made in warm), warm
    assert not list(tmp_path.rglob("*.cpp")), "the second run compiled something"


def save_and_go_on_with_other_stages(rank: int, folder: pathlib.Path) -> list[str]:
    """Two ranks train and save; they go on with four stages, from what both saved."""
    model, args = net_and_batch()
    pipe = make(model, args, "1F1B")
    wrong = train(pipe, model, args, steps=1)
    dcp.save(pipe.state_dict(), checkpoint_id=folder / "checkpoint")
    trained = pipe.state_dict()
    torch.manual_seed(1)
    other = Net()
    resumed = make(other, args, "Interleaved1F1B", num_stages=4)
    dcp.load(resumed.state_dict(), checkpoint_id=folder / "checkpoint")
    for name, tensor in resumed.state_dict().items():
        if name in trained and not torch.equal(trained[name], tensor):
            wrong.append(f"{name} was not loaded")
    whole = other.state_dict()
    dcp.load(whole, checkpoint_id=folder / "checkpoint")
    return wrong + train(resumed, other, args, steps=1)


def disagree(rank: int, folder: pathlib.Path) -> list[str]:
    """Makes a pipeline of another program on each rank, then one of other weights."""
    deeper, args = net_and_batch(layers=4 + rank)
    other, _ = net_and_batch()
    with torch.no_grad():
        other.embedding.weight[0, 0] += rank
    messages = []
    for model in (deeper, other):
        with pytest.raises(PipelineError) as refused:
            make(model, args, "1F1B")
        messages.append(str(refused.value))
    return messages


@pytest.mark.parametrize("task", ["disagree"])
def test_ranks_that_differ_are_noticed_at_the_start(
    task: str, two_ranks: list[dict[str, list[str]]]
) -> None:
    for messages in (said[task] for said in two_ranks):
        assert "model (its captured program)" in messages[0] and "rank(s) [1]" in messages[0]
        assert "embedding.weight" in messages[1]


def train_until_killed(rank: int, folder: pathlib.Path) -> None:
    model, args = net_and_batch()
    pipe = make(model, args, "1F1B", timeout_s=30.0)
    pipe.step(*args)
    (folder / f"ready{rank}").touch()
    while True:
        pipe.step(*args)


@pytest.mark.sweep
def test_a_killed_rank_ends_the_other_with_an_error_that_says_where(tmp_path: pathlib.Path) -> None:
    # It ends rather than wait for the dead one.
    [output] = said_by_survivors(tmp_path, f"{HERE}.train_until_killed", limit_s=LIMIT_S)
    last = output.strip().splitlines()[-1]
    assert "PipelineError: Rank 0 stopped" in last, output[-3000:]
    in_schedule = "stage 0: " in last and "stage 1" in last
    assert in_schedule or "the gradient of embedding.weight" in last.replace("model.", ""), last


def replicated() -> tuple[Any, Any, Any, Any, Any]:
    """One replica of two, its mesh, its half of the batch, eager's model, and the whole batch."""
    mesh = two_replicas()
    model, args = net_and_batch()
    reference = copy.deepcopy(model)
    half = tuple(a.chunk(2)[mesh.get_local_rank("data")] for a in args)
    pipe = make(model, half, "Interleaved1F1B", num_stages=2 * mesh.size(1), mesh=mesh)
    return pipe, mesh, half, reference, args


def far_off(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    errors = {name: relative_error(tensor, expected[name]) for name, tensor in found.items()}
    return [f"{name}: {error:.1e}" for name, error in errors.items() if error > 1e-5]


def share_the_optimizer(rank: int, folder: pathlib.Path) -> list[str]:
    """Two replicas, each with half of the batch and about half of the optimizer's state."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    pipe, mesh, half, reference, args = replicated()
    own, kind = [parameter for _, parameter in pipe.named_parameters()], torch.optim.AdamW
    ours = ZeroRedundancyOptimizer(own, kind, process_group=mesh.get_group("data"), lr=1e-2)
    theirs = kind(reference.parameters(), lr=1e-2)
    for _ in range(3):
        theirs.zero_grad()
        reference(*args).backward()
        theirs.step()
        pipe.step(*half)
        ours.step()
    held = sum(t.numel() for s in ours.optim.state.values() for t in s.values() if t.dim())
    whole = 2 * sum(parameter.numel() for parameter in own)
    wrong = [] if held <= 0.6 * whole else [f"{held} numbers of state, of {whole}"]
    return wrong + far_off(pipe.state_dict(), reference.state_dict())


@pytest.mark.slow
@pytest.mark.sweep
def test_two_replicas_of_two_ranks(tmp_path: pathlib.Path) -> None:
    assert run_ranks(tmp_path, f"{HERE}.share_the_optimizer", world=4) == [[]] * 4
