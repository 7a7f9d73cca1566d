"""What a layer more costs, and what operators and programs cost."""

from __future__ import annotations

import functools
import json
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from comparing import assert_same_gradients, num_calls, twin
from decoders import DecoderBlock, llama
from models import Around, MarkedBlock, Stack
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

import lazyinline
from lazyinline import lazy_inline
from lazyinline.backend.gpu.targets import target_named
from lazyinline.reuse import torch_pytree
from lazyinline.reuse.ir.costs import CPU, Cost, OperatorCosts, ProgramCosts, Rates
from lazyinline.reuse.ir.program import Program

lazy_inline(DecoderBlock)

SIZES: dict[str, Any] = {"hidden": 32, "num_heads": 2, "vocab": 61, "seq": 8}
LAYERS = 8
BASE_CALLS, CALLS_PER_BLOCK = 300, 30


def entry_of(compiled: nn.Module, args: tuple[Tensor, ...]) -> Any:
    """Returns the program that a call with these arguments runs."""
    leaves, tree = torch_pytree.flatten((args, {}))
    (entry,) = (
        e for e in vars(compiled)["_lazyinline_calls"].entries if e.guard.accepts(leaves, tree)
    )
    return entry


def ready(layers: int, backend: str) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Returns a call of a compiled decoder, and the kernels alone that it runs."""
    model, args = llama(layers, **SIZES)
    compiled = lazyinline.compile(model, backend=backend)
    compiled(*args)
    assert compiled.last_report.num_block_calls == layers
    entry = entry_of(compiled, args)
    tensors = iter(entry.guard.tensors)
    sources = entry._compiled.captured.program.sources
    inputs = [args[s.index] if hasattr(s, "index") else next(tensors) for s in sources]
    runtime = entry._compiled.runtime

    def kernels() -> Any:
        with torch.no_grad():
            return runtime.forward(list(inputs))[0][0]

    return lambda: compiled(*args), kernels


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("train", [True, False], ids=["training", "inference"])
@pytest.mark.smoke
@pytest.mark.sweep(keep="training-eager")
def test_a_forward_adds_few_calls_to_its_kernels_and_per_layer(train: bool, backend: str) -> None:
    with torch.set_grad_enabled(train):
        added = {}
        for layers in (4, LAYERS):
            whole, kernels = ready(layers, backend)
            assert torch.equal(kernels(), whole().detach()), "the kernels did not run"
            added[layers] = num_calls(whole) - num_calls(kernels)
    assert 0 < added[LAYERS] <= BASE_CALLS + CALLS_PER_BLOCK * LAYERS, added
    assert added[LAYERS] - added[4] <= CALLS_PER_BLOCK * (LAYERS - 4), added


def of(function: Callable[..., Tensor]) -> nn.Module:
    return Around(lambda _, *args: function(*args))


def program_of(function: Callable[..., Tensor], *shapes: tuple[int, ...]) -> Program:
    return lazyinline.capture(of(function), tuple(torch.randn(shape) for shape in shapes))


def cost_of(function: Callable[..., Tensor], *shapes: tuple[int, ...]) -> Cost:
    return ProgramCosts(OperatorCosts()).program(program_of(function, *shapes))


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (torch.mm, [(3, 4), (4, 5)]),
        (torch.bmm, [(2, 3, 4), (2, 4, 5)]),
        (functional.linear, [(2, 3, 4), (6, 4), (6,)]),
        (functional.conv2d, [(2, 3, 8, 8), (4, 3, 3, 3)]),
        (torch.add, [(3, 4), (3, 4)]),
    ],
)
def test_flops_are_those_that_pytorch_counts(function: Any, shapes: Any) -> None:
    counter = FlopCounterMode(display=False)
    with counter:
        function(*(torch.randn(shape) for shape in shapes))
    assert cost_of(function, *shapes).flops == counter.get_total_flops()


@pytest.mark.parametrize(
    ("num_queries", "num_keys", "key_heads", "options"),
    [
        (128, 96, 4, {}),
        (32, 32, 2, {"enable_gqa": True}),
        *((n, m, 4, {"is_causal": True}) for n, m in ((128, 128), (96, 128), (128, 96), (1, 8))),
    ],
)
def test_attention_of_a_cpu_multiplies_as_that_of_a_gpu(
    num_queries: int, num_keys: int, key_heads: int, options: dict[str, bool]
) -> None:
    """PyTorch's table has that of a GPU alone: two products forward, five backward.

    Of the pairs that causal attention looks at; heads that share keys multiply each.
    """
    attention = functools.partial(functional.scaled_dot_product_attention, **options)
    shapes = (2, 4, num_queries, 16), *[(2, key_heads, num_keys, 16)] * 2
    pairs = torch.ones(num_queries, num_keys)
    product = 2 * 2 * 4 * int((pairs.tril() if "is_causal" in options else pairs).sum()) * 16
    assert cost_of(attention, *shapes).flops == 2 * product
    if not options:
        compiled = lazyinline.compile(of(attention), backend="eager")
        compiled(*(torch.randn(shape, requires_grad=True) for shape in shapes)).sum().backward()
        made: Any = compiled.last_report.made
        assert ProgramCosts(OperatorCosts()).program(made.backward).flops == 5 * product


def test_an_operator_takes_the_longer_of_two_times() -> None:
    rates = Rates(flops_per_s=10.0, bytes_per_s=2.0, half_flops_per_s=40.0)
    assert rates.seconds(100, 8) == 10.0
    assert rates.seconds(100, 80) == 40.0
    assert rates.seconds(100, 0, torch.bfloat16) == 2.5
    assert CPU.seconds(100, 0, torch.bfloat16) == CPU.seconds(100, 0)


def test_tf32_counts_where_the_user_allows_it() -> None:
    rates = target_named("cuda:sm_90").rates
    exact_s = rates.seconds(10**12, 0)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        assert rates.seconds(10**12, 0) == pytest.approx(exact_s * 66.9 / 494.7)
        assert rates.seconds(10**12, 0, torch.float64) == exact_s
        assert CPU.seconds(10**12, 0) == 10**12 / CPU.flops_per_s
    finally:
        torch.set_float32_matmul_precision(before)


def blocks() -> nn.Module:
    torch.manual_seed(0)
    return Stack(*(MarkedBlock(8) for _ in range(3)))


def loss_of(y: Tensor) -> Tensor:
    return y.square().sum()


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("door", ["module", "step"])
@pytest.mark.sweep(keep=["module-inductor", "step-eager"])
def test_each_call_of_a_block_is_a_range_with_its_kernels(door: str, backend: Any) -> None:
    model, x = blocks(), torch.randn(4, 8)
    expected = twin(model)
    if door == "module":
        compiled = lazyinline.compile(model, backend=backend)
        run: Any = lambda x: loss_of(compiled(x)).backward()  # noqa: E731
    else:
        run = lazyinline.compile_step(model, loss_fn=loss_of, backend=backend)
    run(x)  # compiles
    for _ in range(2):  # the second time the written program is at hand
        model.zero_grad()
        with torch.profiler.profile() as profile:
            run(x)
    loss_of(expected(x)).backward()
    assert_same_gradients(model, expected)
    assert not any("is bound for the profiler" in e.name for e in profile.events())
    # What ran in each range of a block, in order.
    ranges = [e for e in profile.events() if "Block" in e.name]
    found = {e.name: [c.name for c in e.cpu_children] for e in ranges}
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
