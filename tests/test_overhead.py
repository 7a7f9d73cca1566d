"""What a layer more costs, and what operators and programs cost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from comparing import num_calls
from decoders import DecoderBlock, llama
from models import Around
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

import lazyinline
from lazyinline import lazy_inline
from lazyinline.backend.gpu.targets import target_named
from lazyinline.reuse import torch_pytree
from lazyinline.reuse.ir.costs import CPU, Cost, OperatorCosts, ProgramCosts, Rates
from lazyinline.reuse.ir.program import Composite, Program

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
def test_a_forward_adds_few_calls_to_its_kernels_and_few_per_layer(
    train: bool, backend: str
) -> None:
    with torch.set_grad_enabled(train):
        added = {}
        for layers in (4, LAYERS):
            whole, kernels = ready(layers, backend)
            assert torch.equal(kernels(), whole().detach()), "the kernels did not run"
            added[layers] = num_calls(whole) - num_calls(kernels)
    assert 0 < added[LAYERS] <= BASE_CALLS + CALLS_PER_BLOCK * LAYERS, added
    assert added[LAYERS] - added[4] <= CALLS_PER_BLOCK * (LAYERS - 4), added


def programs(layers: int) -> list[Any]:
    """The captured program and its derivatives."""
    model, args = llama(layers, **SIZES)
    compiled = lazyinline.compile(model, backend="eager")
    compiled(*args)
    made = entry_of(compiled, args)._compiled
    derivative = made.derivative
    assert isinstance(derivative.forward, Composite)
    assert isinstance(derivative.backward, Composite)
    return [made.captured.program, derivative.forward.program, derivative.backward.program]


def test_programs_grow_by_one_call_per_layer_and_direction() -> None:
    for small, large in zip(programs(2), programs(8), strict=True):
        assert large.num_nodes() - small.num_nodes() == 8 - 2
        assert len(large.calls) - len(small.calls) == 8 - 2
        assert str(large).count("= call @") - str(small).count("= call @") == 8 - 2
        assert len(large.closures) == len(small.closures)
        if large.sources:  # what early inlining would hold instead
            assert large.num_nodes_if_inlined() > 20 * 8


# ---- FLOPs by PyTorch's table, seconds by a row of rates ---------------------------------------


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
def test_flops_are_those_that_pytorch_counts(
    function: Callable[..., Tensor], shapes: list[tuple[int, ...]]
) -> None:
    counter = FlopCounterMode(display=False)
    with counter:
        function(*(torch.randn(shape) for shape in shapes))
    assert cost_of(function, *shapes).flops == counter.get_total_flops()


def test_attention_of_a_cpu_multiplies_as_that_of_a_gpu() -> None:
    """PyTorch's table has that of a GPU alone: two products forward, five backward."""

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v)

    q, kv = (2, 4, 128, 16), (2, 4, 96, 16)
    product = 2 * 2 * 4 * 128 * 96 * 16
    assert cost_of(attention, q, kv, kv).flops == 2 * product
    compiled = lazyinline.compile(of(attention), backend="eager")
    compiled(*(torch.randn(shape, requires_grad=True) for shape in (q, kv, kv))).sum().backward()
    made: Any = compiled.last_report.made
    assert ProgramCosts(OperatorCosts()).program(made.backward).flops == 5 * product


def test_heads_that_share_keys_multiply_each() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    shapes = (2, 4, 32, 16), (2, 2, 32, 16), (2, 2, 32, 16)
    assert cost_of(attention, *shapes).flops == 2 * 2 * 2 * 4 * 32 * 32 * 16


@pytest.mark.parametrize(("num_queries", "num_keys"), [(128, 128), (96, 128), (128, 96), (1, 8)])
def test_causal_attention_computes_the_pairs_that_it_looks_at(
    num_queries: int, num_keys: int
) -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    shapes = (2, 4, num_queries, 16), (2, 4, num_keys, 16), (2, 4, num_keys, 16)
    pairs = int(torch.ones(num_queries, num_keys).tril().sum())
    assert cost_of(attention, *shapes).flops == 2 * 2 * 2 * 4 * pairs * 16


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


def test_a_closure_is_counted_once_and_each_call_counts() -> None:
    lazyinline.lazy_inline(DecoderBlock)
    counted: list[Any] = []

    class Counted(OperatorCosts):
        def of(self, node: Any) -> Cost:
            counted.append(node)
            return super().of(node)

    def cost(num_layers: int) -> Cost:
        model, args = llama(num_layers, hidden=16, num_heads=2, vocab=32, seq=8)
        counted.clear()
        return ProgramCosts(Counted()).program(lazyinline.capture(model, args))

    two, num_nodes = cost(2), len(counted)
    four = cost(4)
    assert len(counted) == num_nodes
    six = cost(6)
    assert six.flops - four.flops == four.flops - two.flops > 0
    assert six.seconds - four.seconds == pytest.approx(four.seconds - two.seconds)
