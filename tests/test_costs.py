"""Costs of operators and programs: FLOPs by PyTorch's table, seconds by a row of rates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from decoders import DecoderBlock, llama
from models import Around
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

import lazyinline
from lazyinline.backend.gpu.targets import target_named
from lazyinline.reuse.ir.costs import CPU, Cost, OperatorCosts, ProgramCosts, Rates
from lazyinline.reuse.ir.program import Program


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
