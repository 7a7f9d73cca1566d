"""Pipelines between real gloo processes; ``optimizer=``, with the bits of fused=True after it."""

import copy
import pathlib
from functools import partial
from typing import Any

import pytest
import test_pipeline
import torch
import torch.distributed.checkpoint as dcp
from comparing import relative_error
from memory_events import memory_use
from ranks import run_ranks, two_replicas
from test_pipeline import (
    MICRO_BATCHES,
    Net,
    chain_and_batch,
    make,
    net_and_batch,
    train,
    unlike_planned,
)
from torch import nn

from lazyinline import PipelineError
from lazyinline.frontend.passes import link
from lazyinline.pipeline_parallel.actions import SCHEDULES

HERE = "test_pipeline_processes"
UPDATES = ("in_1f1b", "in_dual_pipe", "replicas", "resume", "norm", "scaler", "hook_of_one_rank")


def train_both_ends(rank: int, folder: pathlib.Path) -> list[str]:
    """Of a V, the first rank has the first stage and the last; of 1F1B, `in_1f1b` does this."""
    model, args = net_and_batch()
    pipe = make(model, args, "DualPipeV", num_stages=4)
    held = {name for name, _ in pipe.named_parameters()}
    wrong = train(pipe, model, args)
    return wrong if len(held) < len(list(model.parameters())) else [*wrong, str(held)]


def train_without_a_plan(rank: int, folder: pathlib.Path) -> list[str]:
    """What ranks send lies where closures put it, in the layouts that wires ask for."""
    wrong = unlike_planned(*net_and_batch(), "InterleavedZeroBubble", num_stages=4)
    return wrong + unlike_planned(*chain_and_batch(), "1F1B")


@pytest.mark.smoke
@pytest.mark.parametrize(
    "task",
    [
        "train_both_ends",
        "train_without_a_plan",
        "save_and_go_on_with_other_stages",
        "share_the_optimizer",
    ],
)
@pytest.mark.sweep(keep=["both_ends", "save", "share"])
def test_two_processes_give_what_one_gives(
    task: str, two_ranks: list[dict[str, list[str]]]
) -> None:
    assert [said[task] for said in two_ranks] == [[], []]


@pytest.mark.parametrize("task", UPDATES)
@pytest.mark.sweep(keep=["1f1b", "resume", "scaler"])
def test_two_processes_update_as_one_does(task: str, two_ranks: list[dict[str, Any]]) -> None:
    assert [said[task] for said in two_ranks] == [[], []]


def train_in_planned_memory(rank: int, folder: pathlib.Path) -> dict[str, list[str]]:
    """Every schedule between real processes, in arenas; what a step holds is what was planned."""
    found = {}
    for schedule in (folder / "planned").read_text().split():
        model, args = net_and_batch(width=32)
        num_stages = 2 if schedule in ("GPipe", "1F1B") else 4
        pipe = make(model, args, schedule, num_stages=num_stages)
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
    deeper, args = net_and_batch(layers=2 + rank)
    other, _ = net_and_batch(layers=2)
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


def far_off(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    errors = {name: relative_error(tensor, expected[name]) for name, tensor in found.items()}
    return [f"{name}: {error:.1e}" for name, error in errors.items() if error > 1e-5]


def share_the_optimizer(rank: int, folder: pathlib.Path) -> list[str]:
    """Two replicas, each with half of the batch and about half of the optimizer's state."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    mesh = two_replicas()
    model, args = net_and_batch(layers=2 * mesh.size(1))
    reference = copy.deepcopy(model)
    half = tuple(a.chunk(2)[mesh.get_local_rank("data")] for a in args)
    pipe = make(model, half, "Interleaved1F1B", num_stages=2 * mesh.size(1), mesh=mesh)
    own, kind = [parameter for _, parameter in pipe.named_parameters()], torch.optim.AdamW
    ours = ZeroRedundancyOptimizer(own, kind, process_group=mesh.get_group("data"), lr=1e-2)
    theirs = kind(reference.parameters(), lr=1e-2)
    wrong = []
    for step in range(3):
        theirs.zero_grad()
        reference(*args).backward()
        pipe.step(*half)
        both = [{n: p.grad for n, p in m.named_parameters()} for m in (pipe, reference)]
        wrong += [] if step else far_off(*both)  # AdamW's update is that of any multiple
        theirs.step()
        ours.step()
    held = sum(t.numel() for s in ours.optim.state.values() for t in s.values() if t.dim())
    whole = 2 * sum(parameter.numel() for parameter in own)
    wrong += [] if held <= 0.6 * whole else [f"{held} numbers of state, of {whole}"]
    return wrong + far_off(pipe.state_dict(), reference.state_dict())


@pytest.mark.slow
@pytest.mark.sweep
def test_two_replicas_of_two_ranks(tmp_path: pathlib.Path) -> None:
    assert run_ranks(tmp_path, f"{HERE}.share_the_optimizer", world=4) == [[]] * 4


alone = test_pipeline.alone  # the fixture: one process that holds every stage
SIZES = {"width": 32, "layers": 2}


def adamw(model: nn.Module, **more: Any) -> torch.optim.Optimizer:
    """Matrices decay and vectors do not: two groups."""
    groups: list[dict[str, Any]] = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() <= 1], "lr": 1e-3},
    ]
    return torch.optim.AdamW(groups, lr=1e-2, **more)


def differences(
    model: nn.Module, expected: nn.Module, ours: torch.optim.Optimizer, theirs: Any
) -> list[str]:
    """Names what is not equal to the bit: parameters, and state that this rank has."""
    wrong = []
    pairs = zip(model.named_parameters(), expected.parameters(), strict=True)
    for (name, p), q in pairs:
        wrong += [] if torch.equal(p, q) else [name]
        for key, value in ours.state.get(p, {}).items():
            wrong += [] if torch.equal(value, theirs.state[q][key]) else [f"{key} of {name}"]
    return wrong


def beside_fused(schedule: str, num_stages: int, **options: Any) -> tuple[list[str], Any, Any]:
    """Trains a pipeline that updates, beside one that fused=True follows; says what differs."""
    model, args = net_and_batch(**SIZES)
    expected = copy.deepcopy(model)
    ours, theirs = adamw(model), adamw(expected, fused=True)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.8) for o in (ours, theirs)]
    options = {"num_stages": num_stages, "backend": "inductor", **options}
    pipe = make(model, args, schedule, optimizer=ours, **options)
    apart = make(expected, args, schedule, **options)
    wrong = []
    for _ in range(5):
        want, loss = apart.step(*args), pipe.step(*args)
        theirs.step()
        if (want is None) != (loss is None) or (want is not None and not torch.equal(want, loss)):
            wrong.append(f"loss {loss} and not {want}")
        for one in schedules:
            one.step()
    wrong += differences(model, expected, ours, theirs)
    wrong += [f"{n} keeps a gradient" for n, p in model.named_parameters() if p.grad is not None]
    wrong += filter(None, [pipe.last_report.update_after])
    wrong += [] if theirs.state else ["nothing was updated"]
    return wrong, pipe, apart


@pytest.mark.parametrize(
    "schedule", ["Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble"]
)
@pytest.mark.sweep(keep="LoopedBFS")
def test_five_steps_have_the_bits_of_fused(alone: None, schedule: str) -> None:
    wrong, pipe, apart = beside_fused(schedule, 2, backend="eager")
    assert not wrong
    sums = sum(4 * p.numel() for _, p in pipe.named_parameters())
    # Their sums lie in the arena, each from its first addition on.
    assert apart.step_peak_bytes < pipe.step_peak_bytes <= apart.step_peak_bytes + sums + 4096
    if schedule == "LoopedBFS":  # all forwards come first, and sums lie where activations lay
        assert pipe.step_peak_bytes < apart.step_peak_bytes + sums / 2


def test_what_cannot_be_in_the_program_is_done_after_the_step_and_named(
    alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    why = link.Unplanned("not planned in this test")
    monkeypatch.setattr(link, "other_devices", lambda devices: why)
    model, args = net_and_batch(**SIZES)
    expected = copy.deepcopy(model)
    pipe = make(model, args, optimizer=adamw(model))
    apart, theirs = make(expected, args), adamw(expected)
    for _ in range(2):
        assert torch.equal(pipe.step(*args), apart.step(*args))
        theirs.step()
    assert all(map(torch.equal, model.parameters(), expected.parameters()))
    assert "memory is not planned" in pipe.last_report.update_after


def test_an_optimizer_that_changed_is_an_error_while_it_differs(alone: None) -> None:
    model, args = net_and_batch(**SIZES)
    optimizer = torch.optim.AdamW(model.blocks.parameters())
    pipe = make(model, args, optimizer=optimizer, backend="eager")
    pipe.step(*args)
    given = {name for name, p in model.named_parameters() if p.grad is not None}
    assert given == {n for n, _ in model.named_parameters() if not n.startswith("blocks")}
    first, second = (block.up.weight for block in model.blocks)
    kept = first.data

    def assert_told() -> None:
        with pytest.raises(PipelineError, match="optimizer no longer fits"):
            pipe.step(*args)

    hook = optimizer.register_step_post_hook(lambda *_: None)
    assert_told()
    hook.remove()
    first.data = second.data
    assert_told()
    first.data = kept
    pipe.step(*args)
    optimizer.add_param_group({"params": [model.embedding.weight]})
    assert_told()


#
# test_pipeline_processes.py runs these, beside its own: the processes are started once.


def in_1f1b(rank: int, folder: pathlib.Path) -> list[str]:
    """Embedding and head are tied, on two ranks."""
    wrong, pipe, _ = beside_fused("1F1B", 2, backend="eager")
    held = {name for name, _ in pipe.named_parameters()}
    is_part = "embedding.weight" in held and len(held) < len(list(Net(**SIZES).parameters()))
    return wrong if is_part else [*wrong, str(held)]


def in_dual_pipe(rank: int, folder: pathlib.Path) -> list[str]:
    """Embedding and head are tied, on one rank."""
    return beside_fused("DualPipeV", 4)[0]


def replicas(rank: int, folder: pathlib.Path) -> list[str]:
    """Gradients are averaged first, so all updates wait for that."""
    return beside_fused("LoopedBFS", 2, mesh=two_replicas())[0]


def resume(rank: int, folder: pathlib.Path) -> list[str]:
    """Model and optimizer, saved by each rank in the middle, go on in other objects."""
    losses = []
    for number in range(2):
        model, args = net_and_batch(**SIZES)
        optimizer = adamw(model)
        pipe = make(model, args, "1F1B", optimizer=optimizer)
        if number:
            dcp.load(pipe.state_dict(), checkpoint_id=folder / "model")
            optimizer.load_state_dict(torch.load(folder / f"optimizer{rank}"))
        else:
            pipe.step(*args)
            dcp.save(pipe.state_dict(), checkpoint_id=folder / "model")
            torch.save(optimizer.state_dict(), folder / f"optimizer{rank}")
            torch.distributed.barrier()
        losses.append([pipe.step(*args) for _ in range(3)])
    first, second = (torch.tensor([x or 0.0 for x in found]) for found in losses)
    return [] if torch.equal(first, second) else [f"{second} and not {first}"]


def norm(rank: int, folder: pathlib.Path) -> list[str]:
    """The norm is that of both ranks, and counts the tied weight once."""
    return beside_one_process("1F1B", {"max_norm": 0.1}, 1e-5)


def scaler(rank: int, folder: pathlib.Path) -> list[str]:
    """Scaled so far, some gradients are infinite, of one rank before those of the other."""
    return beside_one_process("1F1B", {"scaler": 2.0**126}, 1e-4, steps=8)


def beside_one_process(
    schedule: str, options: dict[str, Any], tolerance: float, steps: int = 3
) -> list[str]:
    model, args = net_and_batch(layers=2)
    reference = copy.deepcopy(model)
    ours, theirs = adamw(model), adamw(reference)
    scalers = [torch.amp.GradScaler("cpu", options.get("scaler", 1.0)) for _ in range(2)]
    options |= {"scaler": scalers[0]} if "scaler" in options else {}
    pipe = make(model, args, schedule, optimizer=ours, **options)
    for _ in range(steps):
        pipe.step(*args)
        theirs.zero_grad()
        for part in zip(*(a.chunk(MICRO_BATCHES) for a in args), strict=True):
            scalers[1].scale(reference(*part) / MICRO_BATCHES).backward()
        scalers[1].unscale_(theirs)
        if "max_norm" in options:
            nn.utils.clip_grad_norm_(reference.parameters(), options["max_norm"])
        scalers[1].step(theirs)
        scalers[1].update()
    expected = dict(reference.named_parameters())
    errors = {n: relative_error(p, expected[n]) for n, p in pipe.named_parameters()}
    wrong = [f"{name}: {error:.1e}" for name, error in errors.items() if error > tolerance]
    if "scaler" in options and scalers[0].get_scale() != scalers[1].get_scale():
        wrong.append(f"scale {scalers[0].get_scale()} and not {scalers[1].get_scale()}")
    return wrong


def hook_of_one_rank(rank: int, folder: pathlib.Path) -> list[str]:
    """Then the other rank does as this one: what they share would be rounded in two ways."""
    model, args = net_and_batch(**SIZES)
    if rank:
        model.embedding.weight.register_hook(lambda gradient: None)
    pipe = make(model, args, "1F1B", optimizer=adamw(model), backend="inductor")
    pipe.step(*args)
    return [] if "has hooks" in pipe.last_report.update_after else ["no reason"]
