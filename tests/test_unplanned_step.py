"""A training step whose memory is not planned: the same numbers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from decoders import DecoderBlock, llama
from torch import nn

import lazyinline
from lazyinline.frontend.passes import link

GPU = torch.device("cuda", 0)
SIZES = {"hidden": 32, "num_heads": 2, "vocab": 61, "seq": 8}


@pytest.fixture
def unplanned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves steps without a plan of memory."""
    why = link.Unplanned("not planned in this test")
    monkeypatch.setattr(link, "other_devices", lambda flats: why)


def decoder(num_layers: int = 2, batch: int = 4) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    model, args = llama(num_layers=num_layers, batch=batch, **SIZES)
    lazyinline.lazy_inline(DecoderBlock)
    return model, args


def assert_step_is_eager(
    step: Any, model: nn.Module, twin: nn.Module, args: tuple[torch.Tensor, ...]
) -> torch.Tensor:
    loss = step(*args)
    for parameter in twin.parameters():
        parameter.grad = None
    expected = twin(*args)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5)
    return loss


@pytest.mark.parametrize(
    ("backend", "order", "micro_batches"),
    [("eager", "forward_first", 1), ("eager", "one_by_one", 2), ("inductor", "one_by_one", 2)],
)
@pytest.mark.sweep(keep="eager-one")
def test_an_unplanned_step_trains_as_eager_does(
    unplanned: None, backend: str, order: str, micro_batches: int
) -> None:
    model, args = decoder()
    twin = copy.deepcopy(model)
    step = lazyinline.compile_step(model, micro_batches=micro_batches, order=order, backend=backend)
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.01) for m in (model, twin)]
    losses = []
    for _ in range(3):
        losses.append(assert_step_is_eager(step, model, twin, args))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert losses[0] > losses[1] > losses[2], "a loss is the user's own"
    assert step.last_report.unplanned == "not planned in this test"
    assert step.last_report.peak_bytes is None


def test_a_moved_parameter_is_read_where_it_is_now(unplanned: None) -> None:
    model, args = decoder()
    twin = copy.deepcopy(model)
    step = lazyinline.compile_step(model, backend="eager")
    assert_step_is_eager(step, model, twin, args)
    for m in (model, twin):
        for parameter in m.parameters():
            parameter.data = parameter.data * 0.5
    for _ in range(2):
        assert_step_is_eager(step, model, twin, args)


def test_what_users_do_to_their_gradients_reaches_no_later_step(unplanned: None) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.p, self.q = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.p + self.q).sum() + x.sum()  # one constant is the gradient of both

    model = Scaled()
    twin, args = copy.deepcopy(model), (torch.ones(3),)
    step = lazyinline.compile_step(model, backend="eager")
    for change in (torch.Tensor.zero_, lambda g: g.mul_(5), lambda g: g.set_(torch.ones(4))):
        assert_step_is_eager(step, model, twin, args)
        for parameter in model.parameters():
            change(parameter.grad)
    assert_step_is_eager(step, model, twin, args)


def test_buffers_that_the_forward_changes_are_changed(unplanned: None) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))
    twin, x = copy.deepcopy(model), torch.randn(5, 4)
    step = lazyinline.compile_step(model, loss_fn=lambda y: y.square().sum(), backend="eager")
    for _ in range(3):
        step(x)
        twin(x)
    torch.testing.assert_close(model[1].running_mean, twin[1].running_mean)
    assert model[1].num_batches_tracked == 3


@pytest.mark.sweep
def test_a_budget_counts_what_closures_give_each_other(unplanned: None) -> None:
    held = []
    for share in (1.0, 0.5):
        model, args = decoder(num_layers=4)
        twin = copy.deepcopy(model)
        recompute = None if share == 1 else lazyinline.Budget(saved_bytes=int(held[0] * 0.9))
        step = lazyinline.compile_step(model, recompute=recompute, backend="eager")
        assert_step_is_eager(step, model, twin, args)
        held.append(step.stats.outside_bytes)
    assert held[1] <= 0.9 * held[0]


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_step_on_a_gpu_trains_as_eager_does(backend: str) -> None:
    model, args = decoder()
    model, args = model.to(GPU), tuple(a.to(GPU) for a in args)
    twin = copy.deepcopy(model)
    step = lazyinline.compile_step(model, micro_batches=2, backend=backend)
    for _ in range(3):
        assert_step_is_eager(step, model, twin, args)
        with torch.no_grad():
            for parameter in (*model.parameters(), *twin.parameters()):
                parameter.sub_(0.1 * parameter.grad)
    assert step.stats.why_no_graph == ""
