"""``torch.profiler`` shows each call of a block as a range, and the kernels in it by name."""

import json
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from comparing import assert_same_gradients, twin
from models import MarkedBlock, Stack
from torch import Tensor, nn

import lazyinline


def blocks() -> nn.Module:
    torch.manual_seed(0)
    return Stack(*(MarkedBlock(8) for _ in range(3)))


def module(model: nn.Module, backend: Any) -> Callable[[Tensor], Any]:
    compiled = lazyinline.compile(model, backend=backend)
    return lambda x: compiled(x).square().sum().backward()


def step(model: nn.Module, backend: Any) -> Callable[[Tensor], Any]:
    return lazyinline.compile_step(model, loss_fn=lambda y: y.square().sum(), backend=backend)


def children(events: Any) -> dict[str, list[str]]:
    """Returns what ran in each range of a block, in order."""
    return {e.name: [c.name for c in e.cpu_children] for e in events if "Block" in e.name}


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("compiled", [module, step])
@pytest.mark.sweep(keep=["module-inductor", "step-eager"])
def test_each_call_of_a_block_is_a_range_with_its_kernels(compiled: Any, backend: str) -> None:
    model, x = blocks(), torch.randn(4, 8)
    expected = twin(model)
    run = compiled(model, backend)
    run(x)  # compiles
    model.zero_grad()
    with torch.profiler.profile() as profile:
        run(x)
    expected(x).square().sum().backward()
    assert_same_gradients(model, expected)
    found = children(profile.events())
    for number in range(3):
        for way in ("forward", "backward"):
            (name,) = (n for n in found if f"layers.{number} MarkedBlock.{way}" in n)
            assert found[name], f"{name} shows no kernel"
    if backend == "eager":
        (name,) = (n for n in found if "layers.1 MarkedBlock.forward" in n)
        names = {c.removeprefix("aten::").partition(".")[0] for c in found[name]}
        assert names >= {"addmm", "tanh", "add"}


def test_a_chrome_trace_has_the_ranges(tmp_path: pathlib.Path) -> None:
    compiled = lazyinline.compile(blocks(), backend="eager")
    x = torch.randn(4, 8)
    with torch.no_grad():
        compiled(x)
        for _ in range(2):  # the second time the written program is at hand
            with torch.profiler.profile() as profile:
                profiled = compiled(x)
        assert torch.equal(profiled, compiled(x))
    profile.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    shown = [event["name"] for event in events if "Block" in event.get("name", "")]
    assert shown == [f"layers.{number} MarkedBlock" for number in range(3)]
    assert not any("is bound for the profiler" in event.get("name", "") for event in events)


def test_a_failing_launch_leaves_no_range_open() -> None:
    from lazyinline.backend.link.torch_generated import begin_range

    with torch.profiler.profile() as profile:
        opened = begin_range("left by an error")
        del opened
        torch.ones(2) + 1
    (left,) = (e for e in profile.events() if e.name == "left by an error")
    assert not left.cpu_children
