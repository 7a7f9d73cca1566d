"""compile_step: one planned program per step, gradients of the mean loss over micro-batches."""

import copy
from collections.abc import Callable

import pytest
import torch
from apart import in_threads
from comparing import relative_error
from decoders import DecoderBlock, llama
from torch import nn

import lazyinline
from lazyinline.frontend.training_step import compile_step

SIZES = {"hidden": 32, "num_heads": 2, "vocab": 61, "seq": 8}


def decoder(
    num_layers: int = 3, micro_batches: int = 1, rows: int = 2
) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A decoder and a batch of so many rows for each micro-batch."""
    model, args = llama(num_layers=num_layers, batch=rows * micro_batches, **SIZES)
    lazyinline.lazy_inline(DecoderBlock)
    return model, args


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("order", ["forward_first", "one_by_one"])
@pytest.mark.parametrize(("micro_batches", "rows"), [(1, 2), (2, 2), (4, 2), (4, 1)])
@pytest.mark.smoke
@pytest.mark.sweep(keep=["2-2-one_by_one-inductor", "4-2-one_by_one-eager"])
def test_loss_and_gradients_equal_eager_over_three_optimizer_steps(
    backend: str, order: str, micro_batches: int, rows: int
) -> None:
    model, args = decoder(micro_batches=micro_batches, rows=rows)
    expected = copy.deepcopy(model)
    step = compile_step(model, micro_batches=micro_batches, order=order, backend=backend)
    ours = torch.optim.SGD(model.parameters(), lr=0.1)
    theirs = torch.optim.SGD(expected.parameters(), lr=0.1)
    for _ in range(3):
        loss = step(*args)
        theirs.zero_grad()
        reference = expected(*args)
        reference.backward()
        assert relative_error(loss, reference.detach()) < 1e-5
        gradients = dict(expected.named_parameters())
        for name, parameter in model.named_parameters():
            assert relative_error(parameter.grad, gradients[name].grad) < 1e-5, name
        ours.step()
        theirs.step()


def test_running_the_backward_early_needs_fewer_bytes_and_gives_the_same_gradients() -> None:
    model, args = decoder(micro_batches=4)
    gradients, peaks = [], []
    for order in ("forward_first", "one_by_one"):
        step = compile_step(model, micro_batches=4, order=order, backend="eager")
        step(*args)
        gradients.append([p.grad.clone() for p in model.parameters()])
        peaks.append(step.stats.peak_bytes)
    assert peaks[1] < peaks[0]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_kernels_are_compiled_once_whatever_the_number_of_micro_batches() -> None:
    counts = []
    for micro_batches in (1, 2):
        sizes = {**SIZES, "batch": 2 * micro_batches}
        model, args = llama(num_layers=2, **sizes)
        lazyinline.lazy_inline(DecoderBlock)
        step = compile_step(model, micro_batches=micro_batches, backend="eager")
        step(*args)
        layouts = {(p.shape, p.stride()) for p in model.parameters()}
        counts.append(step.last_report.num_kernels - (micro_batches > 1) * len(layouts))
    # From the second micro-batch on there is one more closure per layout: the one that adds.
    assert counts[0] == counts[1]


def test_plan_is_close_to_its_lower_bound() -> None:
    model, args = decoder(6, micro_batches=4)
    step = compile_step(model, micro_batches=4, backend="eager")
    step(*args)
    assert step.stats.peak_bytes <= 1.01 * step.stats.lower_bound_bytes
    assert step.stats.lower_bound_bytes > step.stats.saved_bytes


@pytest.mark.sweep
def test_loss_of_an_earlier_step_does_not_change() -> None:
    model, args = decoder(2)
    step = compile_step(model, backend="eager")
    first = step(*args)
    value = first.item()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    assert step(*args).item() != value
    assert first.item() == value


class Counting(nn.Module):
    """Counts its calls in a buffer, which the forward changes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return (self.linear(x) * self.calls).pow(2).mean()


def test_buffer_is_carried_from_micro_batch_to_micro_batch() -> None:
    model = Counting()
    expected = copy.deepcopy(model)
    x = torch.randn(6, 4)
    step = compile_step(model, micro_batches=3, backend="eager")
    for _ in range(2):
        loss = step(x)
        expected.zero_grad()
        losses = []
        for part in x.tensor_split(3):
            losses.append(expected(part))
            (losses[-1] / 3).backward()
        assert relative_error(loss, torch.stack(losses).mean().detach()) < 1e-6
        assert torch.equal(model.calls, expected.calls)
        assert relative_error(model.linear.weight.grad, expected.linear.weight.grad) < 1e-6


def test_parameters_with_equal_gradients_have_gradients_of_their_own() -> None:
    class TwoBiases(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x + self.a + self.b).pow(2).mean()

    model = TwoBiases()
    compile_step(model, backend="eager")(torch.randn(3, 4))
    assert torch.equal(model.a.grad, model.b.grad)
    assert model.a.grad.data_ptr() != model.b.grad.data_ptr()


def test_loss_function_and_model_output_give_the_loss() -> None:
    linear = nn.Linear(4, 3)
    expected = copy.deepcopy(linear)
    x = torch.randn(8, 4)
    loss = compile_step(linear, loss_fn=lambda y: y.square().mean(), backend="eager")(x)
    reference = expected(x).square().mean()
    reference.backward()
    assert relative_error(loss, reference.detach()) < 1e-6
    assert relative_error(linear.weight.grad, expected.weight.grad) < 1e-6


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"micro_batches": 0}, "at least one"),
        ({"micro_batches": 3}, "cannot be split into 3"),
        ({"order": "backwards"}, "order='backwards'"),
        ({"recompute": "some"}, "recompute"),
        ({"backend": "none"}, "backend='none'"),
    ],
)
def test_bad_options_say_what_is_wrong(options: dict[str, object], text: str) -> None:
    model, args = decoder(1)
    with pytest.raises(lazyinline.PlanError, match=text):
        compile_step(model, **{"backend": "eager", **options})(*args)


def test_loss_that_is_no_scalar_is_refused() -> None:
    with pytest.raises(lazyinline.LazyInlineError, match="scalar"):
        compile_step(nn.Linear(4, 3), backend="eager")(torch.randn(2, 4))


@pytest.mark.sweep
def test_step_in_two_threads_at_once_is_refused_or_right() -> None:
    model, args = decoder(2)
    step = compile_step(model, backend="eager")
    expected = step(*args).item()

    def work(index: int) -> None:
        for _ in range(20):
            try:
                assert step(*args).item() == expected
            except lazyinline.PlanError as error:
                assert "another thread" in str(error)

    in_threads(work)


BATCHES: dict[str, Callable[[], torch.Tensor]] = {
    "plain": lambda: torch.randn(4, 6),
    "transposed": lambda: torch.randn(6, 4).t(),
    "every other column": lambda: torch.randn(4, 12)[:, ::2],
    "one row for all": lambda: torch.randn(1, 6).expand(4, 6),
    "a part of a larger one": lambda: torch.randn(9, 6)[3:7],
    "lazily negated": lambda: torch._neg_view(torch.randn(4, 6)),
}


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("kind", BATCHES)
@pytest.mark.sweep(keep=["transposed-2", "one row for all-1", "lazily negated-1"])
def test_a_batch_is_taken_however_it_lies_in_memory(kind: str, micro_batches: int) -> None:
    model = nn.Linear(6, 6)
    step = compile_step(model, loss_fn=torch.sum, backend="eager", micro_batches=micro_batches)
    for _ in range(3):
        batch = BATCHES[kind]()
        losses = [model(part).sum() for part in batch.tensor_split(micro_batches)]
        torch.testing.assert_close(step(batch), torch.stack(losses).mean().detach())
