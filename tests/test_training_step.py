"""compile_step: one planned program per step, gradients of the mean loss over micro-batches."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from apart import in_threads
from comparing import as_it_is, assert_equals_eager, relative_error
from decoders import DecoderBlock, llama
from models import Around, MarkedBlock, batch
from torch import Tensor, nn

import lazyinline
from lazyinline.frontend.passes import link
from lazyinline.frontend.training_step import compile_step

SIZES = {"hidden": 32, "num_heads": 2, "vocab": 61, "seq": 8}
lazyinline.lazy_inline(DecoderBlock)


def decoder(
    num_layers: int = 2, micro_batches: int = 1, rows: int = 2
) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A decoder and a batch of so many rows for each micro-batch."""
    return llama(num_layers=num_layers, batch=rows * micro_batches, **SIZES)


def assert_steps_are_eagers(model: nn.Module, *batches: Sequence[Tensor], **options: Any) -> Any:
    """Takes a step of SGD for each batch, as eager does; returns the compiled step."""
    sgd = functools.partial(torch.optim.SGD, lr=options.pop("lr", 0.1))
    options = {"door": "step", "loss_fn": as_it_is, "optimizer": sgd, **options}
    return assert_equals_eager(model, batches=batches, **options).compiled


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("order", ["forward_first", "one_by_one"])
@pytest.mark.parametrize(("micro_batches", "rows"), [(1, 2), (2, 2), (4, 2), (4, 1)])
@pytest.mark.smoke
@pytest.mark.sweep(keep=["2-2-one_by_one-inductor", "4-2-one_by_one-eager"])
def test_loss_and_gradients_equal_eager_over_three_optimizer_steps(
    backend: str, order: Any, micro_batches: int, rows: int
) -> None:
    if backend == "eager":
        model, args = decoder(micro_batches=micro_batches, rows=rows)
    else:
        blocks = nn.Sequential(MarkedBlock(norm=True), MarkedBlock(norm=True))
        model = Around(lambda layers, x: layers[0](x).square().mean(), blocks)
        args = (batch(rows * micro_batches),)
    options: dict[str, Any] = {"micro_batches": micro_batches, "order": order, "backend": backend}
    assert_steps_are_eagers(model, *[args] * 3, **options)


def test_running_the_backward_early_needs_fewer_bytes_and_gives_the_same_gradients() -> None:
    model, args = decoder(1, micro_batches=3)
    gradients, peaks = [], []
    for order in ("forward_first", "one_by_one"):
        step: Any = compile_step(model, micro_batches=3, order=order, backend="eager")
        step(*args)
        gradients.append([p.grad.clone() for p in model.parameters()])
        peaks.append(step.stats.peak_bytes)
        # The plan is close to its lower bound.
        assert peaks[-1] <= 1.01 * step.stats.lower_bound_bytes
        assert step.stats.lower_bound_bytes > step.stats.saved_bytes
    assert peaks[1] < peaks[0]
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("order", ["forward_first", "one_by_one"])
@pytest.mark.sweep(keep="eager-one_by_one")
def test_gradients_in_half_precision_may_be_added_up_in_float32(backend: Any, order: Any) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
    model = Around(lambda nets, x: nets[0](x).float().square().mean(), net).bfloat16()
    x = torch.randn(64, 16, dtype=torch.bfloat16)
    sums = [torch.zeros_like(p, dtype=torch.float32) for p in model.parameters()]
    for part in x.chunk(32):
        for total, one in zip(sums, gradients_of(model, part, 1 / 32), strict=True):
            total += one
    steps = {}
    for how in ("as_gradients", "float32"):
        copied = copy.deepcopy(model)
        step = compile_step(copied, micro_batches=32, order=order, backend=backend, sums=how)  # type: ignore[arg-type]
        step(x)
        found = [p.grad for p in copied.parameters()]
        assert all(g is not None and g.dtype is torch.bfloat16 for g in found)
        steps[how] = max(relative_error(g, t) for g, t in zip(found, sums, strict=True))  # type: ignore[arg-type]
    assert steps["float32"] < 2**-9 < steps["as_gradients"] / 2


def gradients_of(model: nn.Module, x: Tensor, scale: float) -> Sequence[Tensor]:
    return torch.autograd.grad(model(x) * scale, list(model.parameters()))


@pytest.mark.skipif(not hasattr(nn, "LinearCrossEntropyOptions"), reason="needs PyTorch 2.14")
def test_a_loss_in_pieces_has_no_memory_for_all_logits() -> None:
    tokens, words = 64, 2048
    options = nn.LinearCrossEntropyOptions(batch_chunk_size=16)

    def in_pieces(layers: Any, ids: Tensor) -> Tensor:
        hidden, weight = layers[0](ids), layers[1].weight
        return nn.functional.linear_cross_entropy(hidden, weight, ids, options=options)

    model = Around(in_pieces, nn.Embedding(words, 4), nn.Linear(4, words, bias=False))
    ids = torch.randint(words, (tokens,))
    step = assert_steps_are_eagers(model, *[(ids,)] * 2)
    assert step.stats.peak_bytes < tokens * words * 4 / 2


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"micro_batches": 0}, "at least one"),
        ({"sums": "float64"}, "unknown; there are"),
        ({"micro_batches": 3}, "cannot be split into 3"),
        ({"order": "backwards"}, "order='backwards'"),
    ],
)
def test_bad_options_say_what_is_wrong(options: dict[str, object], text: str) -> None:
    model, args = decoder(1)
    with pytest.raises(lazyinline.PlanError, match=text):
        compile_step(model, **{"backend": "eager", **options})(*args)


@pytest.mark.sweep
def test_step_in_two_threads_at_once_is_refused_or_right() -> None:
    model, args = decoder(1)
    step = compile_step(model, backend="eager")
    expected = step(*args).item()

    def work(index: int) -> None:
        for _ in range(20):
            try:
                assert step(*args).item() == expected
            except lazyinline.PlanError as error:
                assert "another thread" in str(error)

    in_threads(work)


BATCHES: dict[str, Callable[[], Tensor]] = {
    "plain": lambda: torch.randn(4, 6),
    "transposed": lambda: torch.randn(6, 4).t(),
    "every other column": lambda: torch.randn(4, 12)[:, ::2],
    "one row for all": lambda: torch.randn(1, 6).expand(4, 6),
    "a part of a larger one": lambda: torch.randn(9, 6)[3:7],
}


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("kind", BATCHES)
@pytest.mark.sweep(keep=["transposed-2", "one row for all-1"])
def test_a_batch_is_taken_however_it_lies_in_memory(kind: str, micro_batches: int) -> None:
    batches = [(BATCHES[kind](),) for _ in range(3)]
    options: dict[str, Any] = {"loss_fn": torch.sum, "micro_batches": micro_batches, "lr": 0}
    assert_steps_are_eagers(nn.Linear(6, 6), *batches, **options)


@pytest.fixture
def unplanned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves steps without a plan of memory."""
    why = link.Unplanned("not planned in this test")
    monkeypatch.setattr(link, "other_devices", lambda flats: why)


@pytest.mark.parametrize(
    ("backend", "order", "micro_batches"),
    [("eager", "forward_first", 1), ("eager", "one_by_one", 2), ("inductor", "one_by_one", 2)],
)
@pytest.mark.sweep(keep="eager-one")
def test_an_unplanned_step_trains_as_eager_does(
    unplanned: None, backend: str, order: Any, micro_batches: int
) -> None:
    model, args = decoder(1, micro_batches=2)
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


def test_buffers_that_the_forward_changes_are_changed(unplanned: None) -> None:
    model = nn.Sequential(nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6), nn.Tanh())
    options: dict[str, Any] = {"loss_fn": lambda y: y.square().sum(), "lr": 0.01}
    assert_steps_are_eagers(model, *[(torch.randn(5, 4),)] * 3, **options)
    assert model[1].num_batches_tracked == 3


def test_a_result_that_nobody_asks_a_kernel_for_is_none() -> None:
    # The fake kernel of a batch norm's backward makes a gradient for the data, too.
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2))
    options: dict[str, Any] = {"loss_fn": lambda y: y.square().sum(), "backend": "eager"}
    assert_steps_are_eagers(model, *[(torch.randn(5, 4),)] * 3, **options)
