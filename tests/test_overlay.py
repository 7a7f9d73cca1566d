"""Activations in the memory of gradients to come: right numbers, and nothing left behind there.

That autograd is kept to is in ``test_compile.py``.
"""

import copy
from collections.abc import Iterator

import pytest
import torch
from decoders import DecoderBlock, llama
from memory_events import memory_use

import lazyinline
from lazyinline.backend.link import placement
from lazyinline.backend.run.planned import PlannedProgram
from lazyinline.recompute.planner import Budget

Grads = list[torch.Tensor]


class Subject:
    """A compiled decoder whose gradients are hosts, and the model itself beside it."""

    def __init__(self) -> None:
        lazyinline.lazy_inline(DecoderBlock)
        self.model, self.args = llama(num_layers=3, hidden=32, num_heads=2, vocab=61, seq=8)
        self.eager = copy.deepcopy(self.model)
        self.compiled = lazyinline.compile(self.model)
        self.grads_of(0)

    @property
    def planned(self) -> PlannedProgram:
        (entry,) = self.compiled.__dict__["_lazyinline_calls"].entries
        program: PlannedProgram = entry._compiled.runtime.program
        return program

    def batch(self, seed: int) -> tuple[torch.Tensor, ...]:
        generator = torch.Generator().manual_seed(seed)
        return tuple(torch.randint(0, 61, x.shape, generator=generator) for x in self.args)

    @staticmethod
    def clear(*models: torch.nn.Module) -> None:
        for model in models:
            model.zero_grad(set_to_none=True)

    def loss(self, seed: int) -> torch.Tensor:
        return self.compiled(*self.batch(seed))

    def grads_of(self, seed: int) -> Grads:
        """One step from no gradients."""
        self.clear(self.model)
        self.loss(seed).backward()
        return received(self.model)

    def expected(self, *seeds: int) -> Grads:
        """Eager gradients, summed over batches."""
        self.clear(self.eager)
        for seed in seeds:
            self.eager(*self.batch(seed)).backward()
        return received(self.eager)


def received(model: torch.nn.Module) -> Grads:
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.fixture(scope="module")
def shared() -> Iterator[Subject]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(placement, "_MIN_HOST_BYTES", 1024)
        yield Subject()


@pytest.fixture
def subject(shared: Subject) -> Subject:
    shared.clear(shared.model, shared.eager)
    return shared


def assert_close(ours: Grads, theirs: Grads, factor: float = 1.0) -> None:
    assert len(ours) == len(theirs) > 20
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, factor * b, rtol=2e-4, atol=2e-6)


def test_reported_peak_is_what_the_profiler_measures(subject: Subject) -> None:
    subject.grads_of(0)
    subject.clear(subject.model)
    use, report = memory_use(lambda: subject.loss(0).backward()), subject.compiled.last_report
    assert report.peak_bytes is not None and report.arena_bytes is not None
    assert abs((report.arena_bytes + use.peak_bytes) / report.peak_bytes - 1) <= 0.02


def test_what_was_received_stays_as_it_was_and_is_nobody_elses(subject: Subject) -> None:
    first = subject.grads_of(1)
    before = [g.clone() for g in first]
    second = subject.grads_of(2)
    held = subject.loss(3)  # activations of a forward in flight
    for gradient in second:
        gradient.fill_(float("nan"))
    held.backward()
    assert all(map(torch.equal, first, before))
    assert_close(first, subject.expected(1))
    memories = [g.untyped_storage().data_ptr() for g in (*first, *second)]
    assert len(set(memories)) == len(memories)
    extra = sum(g.untyped_storage().nbytes() - g.nbytes for g in first)
    assert extra <= 0.01 * sum(g.nbytes for g in first)


def test_writing_to_received_gradients_does_not_reach_a_forward_in_flight(subject: Subject) -> None:
    loss = subject.loss(1)
    for gradient in subject.grads_of(2):
        gradient.fill_(float("nan"))
    subject.clear(subject.model)
    loss.backward()
    assert_close(received(subject.model), subject.expected(1))


def test_gradients_are_taken_without_a_copy(subject: Subject) -> None:
    """AccumulateGrad copies what somebody else still holds."""
    subject.grads_of(0)
    subject.clear(subject.model)
    use = memory_use(lambda: subject.loss(0).backward())
    assert not {"aten::clone", "aten::new_empty_strided"} & set(use.allocations), use.allocations


def test_an_exception_in_a_backward_leaves_nothing_behind(subject: Subject) -> None:
    def fail(gradient: torch.Tensor) -> torch.Tensor:
        raise ValueError("in the middle")

    handle = next(subject.model.parameters()).register_hook(fail)
    loss = subject.loss(1)
    with pytest.raises(ValueError, match="in the middle"):
        loss.backward()
    handle.remove()
    del loss
    subject.loss(2)  # a forward whose graph is dropped
    got = subject.grads_of(3)
    assert_close(got, subject.expected(3))


def test_a_budget_does_not_count_on_the_memory_of_gradients() -> None:
    """A forward in flight holds no gradients then, only what the budget bounds."""
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
    x = torch.randn(64, 256)
    for recompute in (None, Budget(fraction=1.0)):
        compiled = lazyinline.compile(model, recompute=recompute)
        compiled(x).sum().backward()
        report = compiled.last_report
        assert report.peak_bytes is not None and report.arena_bytes is not None
        assert (report.peak_bytes == report.arena_bytes) == (recompute is not None)
