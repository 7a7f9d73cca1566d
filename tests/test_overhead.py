"""What a layer more costs: Python per call, nodes per program, kernels per compile."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from comparing import num_calls
from decoders import DecoderBlock, llama
from torch import Tensor, nn

import lazyinline
from lazyinline import lazy_inline
from lazyinline.reuse import torch_pytree
from lazyinline.reuse.ir.program import Composite

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
