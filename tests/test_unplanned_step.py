"""A training step whose memory is not planned: the same numbers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from decoders import DecoderBlock, llama
from test_training_step import assert_steps_are_eagers
from torch import Tensor, nn

import lazyinline
from lazyinline.frontend.passes import link

GPU = torch.device("cuda", 0)
SIZES = {"hidden": 32, "num_heads": 2, "vocab": 61, "seq": 8}
lazyinline.lazy_inline(DecoderBlock)


@pytest.fixture
def unplanned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves steps without a plan of memory."""
    why = link.Unplanned("not planned in this test")
    monkeypatch.setattr(link, "other_devices", lambda flats: why)


def decoder(num_layers: int = 2, batch: int = 4) -> tuple[nn.Module, tuple[Tensor, ...]]:
    return llama(num_layers=num_layers, batch=batch, **SIZES)


@pytest.mark.parametrize(
    ("backend", "order", "micro_batches"),
    [("eager", "forward_first", 1), ("eager", "one_by_one", 2), ("inductor", "one_by_one", 2)],
)
@pytest.mark.sweep(keep="eager-one")
def test_an_unplanned_step_trains_as_eager_does(
    unplanned: None, backend: str, order: Any, micro_batches: int
) -> None:
    model, args = decoder()
    reference = copy.deepcopy(model)

    def moved(step: Any) -> None:  # parameters are read where they are now
        for parameter in (*model.parameters(), *reference.parameters()):
            parameter.data = parameter.data * 0.5

    options: dict[str, Any] = {"order": order, "backend": backend, "micro_batches": micro_batches}
    options |= {"reference": reference, "note": moved}
    step = assert_steps_are_eagers(model, *[args] * 4, **options)
    first = step(*args)
    value = first.item()
    moved(step)
    assert first.item() == value != step(*args).item(), "a loss is the user's own"
    assert step.last_report.unplanned == "not planned in this test"
    assert step.last_report.peak_bytes is None


class Sums(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return (self.a + self.b).sum() + x.sum()  # one constant is the gradient of both


def test_what_users_do_to_their_gradients_reaches_no_later_step(unplanned: None) -> None:
    model, args = Sums(), (torch.ones(3, 4),)
    changes: Any = (Tensor.zero_, lambda g: g.mul_(5), lambda g: g.set_(torch.ones(4)), Tensor.abs)
    turns = iter(changes)

    def change(step: Any) -> None:
        one = next(turns)
        for parameter in model.parameters():
            one(parameter.grad)

    assert_steps_are_eagers(model, *[args] * len(changes), lr=0, note=change)


def test_buffers_that_the_forward_changes_are_changed(unplanned: None) -> None:
    model = nn.Sequential(nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6), nn.Tanh())
    options: dict[str, Any] = {"loss_fn": lambda y: y.square().sum(), "lr": 0.01}
    assert_steps_are_eagers(model, *[(torch.randn(5, 4),)] * 3, **options)
    assert model[1].num_batches_tracked == 3


@pytest.mark.sweep
def test_a_budget_counts_what_closures_give_each_other(unplanned: None) -> None:
    held = []
    for share in (1.0, 0.5):
        model, args = decoder(num_layers=4)
        recompute = None if share == 1 else lazyinline.Budget(saved_bytes=int(held[0] * 0.9))
        step = assert_steps_are_eagers(model, args, recompute=recompute)
        held.append(step.stats.outside_bytes)
    assert held[1] <= 0.9 * held[0]


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_step_on_a_gpu_trains_as_eager_does(backend: str) -> None:
    model, args = decoder()
    model, args = copy.deepcopy(model).to(GPU), tuple(a.to(GPU) for a in args)
    step = assert_steps_are_eagers(model, *[args] * 3, micro_batches=2, backend=backend)
    assert step.stats.why_no_graph == ""
