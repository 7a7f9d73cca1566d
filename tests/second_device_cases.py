"""Placed models on two devices; run by test_place.py in a process that has a second one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from arena_proof import check_no_overlap
from decoders import DecoderBlock, llama
from second_device import second_device
from torch import nn

import lazyinline
from lazyinline.backend.run.planned import PlannedProgram

num_copies = second_device()
SECOND = torch.device("second", 0)
SIZES = {"hidden": 32, "num_heads": 2, "vocab": 61, "seq": 8, "batch": 4}
lazyinline.lazy_inline(DecoderBlock)

WAYS = {
    "embedding": ("embedding",),
    "two blocks": ("blocks.1", "blocks.2"),
    "inside blocks": ("blocks.0.ffn", "blocks.1.ffn"),
    "all": ("embedding", "blocks.0", "blocks.1", "blocks.2", "head"),
}


def placed(way: str) -> tuple[nn.Module, nn.Module, tuple[torch.Tensor, ...]]:
    """Returns a model with parts on the second device, one without, and arguments."""
    torch.manual_seed(0)
    model, args = llama(3, **SIZES)
    twin = copy.deepcopy(model)
    for path in WAYS[way]:
        lazyinline.place(model.get_submodule(path), "second")
    return model, twin, args


def gradients(model: nn.Module, args: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    model.zero_grad()
    loss = model(*args)
    loss.backward()
    return [loss.detach(), *(p.grad.cpu() for p in model.parameters())]


def assert_no_overlap(program: PlannedProgram) -> None:
    """Proves the plan of each device by itself."""
    instances = program.layout.instances
    for device in (None, *program.other_bytes):
        found = [i for i, b in enumerate(instances) if (b.kind, b.device) == ("arena", device)]
        check_no_overlap(
            *([getattr(instances[i], name) for i in found] for name in ("birth", "death")),
            [program.offsets[i] for i in found],
            [instances[i].num_bytes for i in found],
        )
        size = program.arena_bytes if device is None else program.other_bytes[device]
        ends = [program.offsets[i] + instances[i].num_bytes for i in found]
        assert max(ends, default=0) <= size


def test_tensors_of_two_devices_do_not_meet() -> None:
    with pytest.raises(RuntimeError):
        torch.mm(torch.ones(2, 2), torch.ones(2, 2, device=SECOND))


@pytest.mark.parametrize("way", ["embedding", "inside blocks", "all"])
def test_a_compiled_model_has_eagers_numbers_and_copies_what_it_says(way: str) -> None:
    model, twin, args = placed(way)
    for ours, theirs in zip(gradients(model, args), gradients(twin, args), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)  # eager on two, and on one
    compiled = lazyinline.compile(model, fallback="error")
    for _ in range(2):
        before = num_copies()
        found = gradients(compiled, args)
        made = num_copies() - before
        for ours, theirs in zip(found, gradients(twin, args), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    report = compiled.last_report
    assert report.unplanned == ""
    assert [record.device for record in report.devices] == ["second:0", "cpu"]
    assert WAYS[way][0] in report.devices[0].tensors[0]
    on_second = sum(p.device == SECOND for p in model.parameters())
    assert made - on_second >= report.num_copies > 0  # the test copies each gradient, too
    assert f"{report.num_copies} copies between devices" in str(report)
    with torch.no_grad():
        torch.testing.assert_close(compiled(*args), twin(*args))


@pytest.mark.parametrize(("way", "backend"), [("embedding", "inductor"), ("two blocks", "eager")])
def test_a_step_trains_as_eager_and_state_is_where_parameters_are(way: str, backend: str) -> None:
    model, twin, args = placed(way)
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.01) for m in (model, twin)]
    step = lazyinline.compile_step(model, micro_batches=2, backend=backend)
    for _ in range(3):
        loss = step(*args)
        optimizers[0].step()
        expected = gradients(twin, args)[0]
        optimizers[1].step()
        torch.testing.assert_close(loss.cpu(), expected)
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.detach().cpu(), theirs.detach(), rtol=1e-3, atol=1e-5)
    for parameter, state in optimizers[0].state.items():
        assert state["exp_avg"].device == parameter.device
    assert step.last_report.unplanned == ""
    assert_no_overlap(program_of(step))
    if way == "two blocks":
        shared = {d.path: d.shared for d in step.last_report.decisions}
        assert shared == {"blocks.0": False, "blocks.1": False, "blocks.2": True}
        assert "second" in str(lazyinline.capture(model, args))


def program_of(step: Any) -> PlannedProgram:
    runner = step.entries.first._compiled.runner
    assert isinstance(runner, PlannedProgram)
    return runner


@pytest.mark.parametrize("options", [{"recompute": "full"}, {"dynamic": True}], ids=str)
def test_options_of_compile_hold_for_two_devices(options: dict[str, Any]) -> None:
    model, twin, args = placed("two blocks")
    compiled = lazyinline.compile(model, fallback="error", **options)
    for length in (8, 6):
        cut = tuple(x[:, :length] for x in args)
        for ours, theirs in zip(gradients(compiled, cut), gradients(twin, cut), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_a_graph_is_kept_for_a_second_backward_and_two_forwards_are_in_flight() -> None:
    model, twin, args = placed("two blocks")
    compiled = lazyinline.compile(model, fallback="error")
    for one in (compiled, twin):
        one.zero_grad()
        first, second = one(*args), one(*(x.flip(0) for x in args))
        first.backward(retain_graph=True)
        second.backward()
        first.backward()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.cpu(), theirs.grad, rtol=1e-4, atol=1e-6)


def test_a_placed_part_may_be_moved_back() -> None:
    model, twin, args = placed("embedding")
    lazyinline.place(model.embedding, "cpu")
    assert not model.embedding._forward_hooks and not model.embedding._forward_pre_hooks
    compiled = lazyinline.compile(model, backend="eager", fallback="error")
    torch.testing.assert_close(compiled(*args), twin(*args))
    assert compiled.last_report.devices == ()


def test_autocast_of_a_device_that_is_not_known_runs_eagerly() -> None:
    model, _, args = placed("all")
    compiled = lazyinline.compile(model)
    with torch.autocast("second", dtype=torch.bfloat16):
        found, expected = compiled(*args), model(*args)
    assert torch.equal(found, expected)
    assert "Autocast of 'second'" in compiled.last_report.ran_eagerly
