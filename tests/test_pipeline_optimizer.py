"""pipeline(optimizer=): each rank updates in its program, with the bits of fused=True after it."""

import copy
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import test_pipeline
import torch
import torch.distributed.checkpoint as dcp
from comparing import relative_error
from ranks import two_replicas
from test_pipeline import MICRO_BATCHES, make, net_and_batch
from torch import Tensor, nn

from lazyinline import PipelineError
from lazyinline.frontend.passes import link

alone = test_pipeline.alone  # the fixture: one process that holds every stage
SIZES = {"width": 32, "layers": 2}
Step = Callable[[], Tensor | None]


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
    options |= {"num_stages": num_stages, "backend": "inductor"}
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
    wrong, pipe, apart = beside_fused(schedule, 2)
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
    pipe = make(model, args, optimizer=optimizer, backend="inductor")
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


def schedules(rank: int, folder: pathlib.Path) -> list[str]:
    """Embedding and head are tied, on two ranks but in DualPipeV."""
    wrong = []
    for schedule, num_stages in (("1F1B", 2), ("DualPipeV", 4)):
        found, pipe, _ = beside_fused(schedule, num_stages)
        held = {name for name, _ in pipe.named_parameters()}
        wrong += [f"{schedule}: {text}" for text in found]
        wrong += [] if "embedding.weight" in held or rank else [f"{schedule}: {held}"]
    return wrong


def replicas(rank: int, folder: pathlib.Path) -> list[str]:
    """Gradients are averaged first, so all updates wait for that."""
    return beside_fused("LoopedBFS", 2, mesh=two_replicas())[0]


def resume(rank: int, folder: pathlib.Path) -> list[str]:
    """Model and optimizer, saved by each rank in the middle, go on in other objects."""
    losses = []
    for number in range(2):
        model, args = net_and_batch(**SIZES)
        optimizer = adamw(model)
        pipe = make(model, args, "1F1B", optimizer=optimizer, backend="inductor")
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
    model, args = net_and_batch()
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
