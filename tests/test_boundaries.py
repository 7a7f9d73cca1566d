"""boundaries="fused": the end of a block and the start of the next are one closure.

The cuts themselves are file tests, ``filetests/rotate.txt``.
"""

import copy
from typing import Any

import pytest
import torch
from comparing import assert_close, assert_same_gradients, seed_all
from decoders import gpt, llama
from models import BatchNormBlock, Block
from torch import Tensor, nn

import lazyinline

SIZES = {"hidden": 32, "num_heads": 2, "vocab": 61, "seq": 8, "batch": 2}
DECODERS = {"llama": llama, "gpt": gpt}


class Stack(nn.Module):
    """Blocks in a row, between two layers; returns a mean square."""

    def __init__(self, *blocks: nn.Module, width: int = 4) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(width, width), nn.Linear(width, width)
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x).square().mean()


def stack(*, layers: int = 4, dropout: float = 0.0) -> Stack:
    seed_all()
    return Stack(*(Block(norm=True, dropout=dropout) for _ in range(layers)))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {}),
        ("gpt", {"micro_batches": 2}),
        ("gpt", {"recompute": lazyinline.Budget(260_000)}),
    ],
    ids=["one batch", "micro-batches", "budget"],
)
def test_a_step_gives_eagers_losses_and_gradients(name: str, options: dict[str, Any]) -> None:
    model, args = DECODERS[name](num_layers=4, **SIZES)
    expected = copy.deepcopy(model)
    step = lazyinline.compile_step(model, boundaries="fused", backend="eager", **options)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, expected)]
    for _ in range(3):
        loss = step(*args)
        optimizers[1].zero_grad()
        wanted = expected(*args)
        wanted.backward()
        assert_close(loss, wanted.detach())
        assert_same_gradients(model, expected)
        for optimizer in optimizers:
            optimizer.step()
    assert step.last_report.fused_boundaries[0].startswith("3 of ")


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_module_gives_eagers_gradients_for_each_size(dynamic: bool) -> None:
    model = stack()
    expected = copy.deepcopy(model)
    compiled = lazyinline.compile(model, boundaries="fused", backend="eager", dynamic=dynamic)
    for rows in (3, 5):
        x = torch.randn(rows, 4)
        model.zero_grad()
        expected.zero_grad()
        compiled(x).backward()
        expected(x).backward()
        assert_same_gradients(model, expected)
    assert lazyinline.last_report(compiled).fused_boundaries == ["3 of Block"]


def test_dropout_draws_the_numbers_of_eager() -> None:
    model = stack(dropout=0.5)
    expected, x = copy.deepcopy(model), torch.randn(3, 4)
    compiled = lazyinline.compile(model, boundaries="fused", backend="eager")
    for _ in range(2):
        seed_all(1)
        loss = compiled(x)
        loss.backward()
        seed_all(1)
        wanted = expected(x)
        wanted.backward()
        assert_close(loss.detach(), wanted.detach())
        assert_same_gradients(model, expected)
    assert lazyinline.last_report(compiled).fused_boundaries == ["3 of Block"]


def test_a_gradient_is_differentiated_again() -> None:
    model = stack().eval()
    expected = copy.deepcopy(model)
    compiled = lazyinline.compile(model, boundaries="fused", backend="eager")
    for run, own in ((compiled, model), (expected, expected)):
        x = torch.linspace(-1, 1, 12).reshape(3, 4).requires_grad_()
        (gradient,) = torch.autograd.grad(run(x), x, create_graph=True)
        gradient.square().sum().backward()
        assert own.first.weight.grad is not None
    assert_same_gradients(model, expected)


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.sweep
def test_a_block_has_the_launches_of_early_inlining(name: str) -> None:
    def launches(layers: int, **options: Any) -> int:
        model, args = DECODERS[name](num_layers=layers, **SIZES)
        compiled = lazyinline.compile(model.eval(), **options)
        with torch.no_grad():
            compiled(*args)
        return lazyinline.last_report(compiled).num_launches

    def of_a_block(**options: Any) -> int:
        return launches(4, **options) - launches(3, **options)

    assert of_a_block(boundaries="fused") == of_a_block(reuse="off") < of_a_block()


def test_blocks_that_cannot_be_cut_stay_whole_and_the_report_says_so() -> None:
    seed_all()
    changes_buffers = Stack(*(BatchNormBlock() for _ in range(4)))
    for model in (changes_buffers, stack(layers=2)):
        expected, x = copy.deepcopy(model), torch.randn(5, 4)
        compiled = lazyinline.compile(model, boundaries="fused", backend="eager")
        compiled(x).backward()
        expected(x).backward()
        assert_same_gradients(model, expected)
        assert_close(dict(model.named_buffers()), dict(expected.named_buffers()))
        assert "boundaries fused: none" in str(lazyinline.last_report(compiled))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"boundaries": "open"}, "boundaries='open' is unknown"),
        ({"boundaries": "fused", "recompute": "full"}, "leave boundaries as they are"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: Any, message: str) -> None:
    with pytest.raises(lazyinline.PlanError, match=message):
        lazyinline.compile_step(stack(), **options)
