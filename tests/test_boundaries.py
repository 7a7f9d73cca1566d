"""boundaries="fused": the end of a block and the start of the next are one closure.

The cuts themselves are file tests, ``filetests/rotate.txt``.
"""

from functools import partial
from typing import Any

import pytest
import torch
from comparing import assert_equals_eager, seed_all, sgd
from decoders import gpt, llama
from models import BatchNormBlock, Block, Net, batch
from torch import Tensor, nn

import lazyinline

SIZES = {"hidden": 32, "num_heads": 2, "vocab": 61, "seq": 8, "batch": 2}
DECODERS = {"llama": llama, "gpt": gpt}


def stack(num_blocks: int = 4, **options: Any) -> Net:
    """Blocks in a row; their input has a gradient, as what is between them."""
    seed_all()
    return Net(lambda: Block(norm=True, **options), num_blocks)


def inputs(rows: int = 3) -> Any:
    return (batch(rows).requires_grad_(),)


as_eager = partial(assert_equals_eager, boundaries="fused")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {"micro_batches": 2}),
        ("gpt", {"recompute": lazyinline.Budget(260_000)}),
    ],
    ids=["micro-batches", "budget"],
)
def test_a_step_gives_eagers_losses_and_gradients(name: str, options: dict[str, Any]) -> None:
    model, args = DECODERS[name](num_layers=3, **SIZES)
    found = as_eager(model, args, door="step", optimizer=sgd, **options)
    assert found.told.fused_boundaries[0].startswith("2 of ")


def test_a_module_gives_eagers_gradients_for_each_size() -> None:
    found = as_eager(stack(), batches=[inputs(), inputs(5)], dynamic=True)
    assert found.told.fused_boundaries == ["3 of Block"]


def test_dropout_draws_the_numbers_of_eager() -> None:
    assert as_eager(stack(dropout=0.5), inputs()).told.fused_boundaries == ["3 of Block"]


def test_a_gradient_is_differentiated_again() -> None:
    def penalty(run: Any, x: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad(run(x).square().mean(), x, create_graph=True)
        return gradient.square().sum()

    as_eager(stack().eval(), inputs(), calls=1, use=penalty)


@pytest.mark.parametrize("model", [Net(BatchNormBlock, 4), stack(2)], ids=["buffers", "2"])
def test_blocks_that_cannot_be_cut_stay_whole_and_the_report_says_so(model: nn.Module) -> None:
    """They change buffers, or are too few."""
    assert "boundaries fused: none" in str(as_eager(model, inputs(5), calls=1).told)


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
