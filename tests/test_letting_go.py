"""What lazyinline holds of the user's tensors, and for how long; what lies in gradients to come.

That autograd is kept to where activations lie in gradients is in ``test_compile.py``.
"""

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from comparing import assert_same, assert_same_gradients
from memory_events import memory_use
from models import Around, MarkedBlock, Net, batch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import lazyinline
from lazyinline.backend.link import placement
from lazyinline.recompute.planner import Budget


class Tied(nn.Module):
    """Parameters, buffers, a tied weight and a tensor that is neither."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(width, width), nn.Linear(width, width)
        self.last.weight = self.first.weight
        self.norm = nn.BatchNorm1d(width)
        self.shift = torch.ones(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Behind tanh, a bias before the norm has a gradient that is more than rounding.
        return self.last(self.norm(self.first(x).tanh()).relu() + self.shift.to(x.dtype))


def compiled_by(kind: str, model: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns a function that runs a forward and a backward; kind: ``step/eager``."""
    way, _, backend = kind.partition("/")
    if way == "step":
        return lazyinline.compile_step(model, loss_fn=torch.sum, backend=backend)
    compiled = model if way == "model" else lazyinline.compile(model, backend=backend)

    def run(x: torch.Tensor) -> torch.Tensor:
        for parameter in model.parameters():
            parameter.grad = None
        loss = compiled(x).sum()
        loss.backward()
        return loss.detach()

    return run


def assert_as_eager(run: Any, model: nn.Module, dtype: torch.dtype) -> None:
    """Loss and gradients of one more call equal those of a copy of the model run eagerly."""
    expected, x = copy.deepcopy(model), torch.randn(5, 4).to(dtype)
    torch.testing.assert_close(run(x), compiled_by("model", expected)(x))
    assert_same_gradients(model, expected)


@pytest.fixture
def swapping() -> Iterator[None]:
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(before)


@pytest.mark.usefixtures("swapping")
@pytest.mark.parametrize(
    "kind", ["compile/eager", "compile/inductor", "step/eager", "step/inductor"]
)
@pytest.mark.sweep(keep=["eager"])
def test_the_users_tensors_can_be_swapped_and_the_program_sees_it(kind: str) -> None:
    torch.manual_seed(0)
    model, held = Tied(), torch.randn(5, 4)
    run = compiled_by(kind, model)
    run(held)
    assert not any(map(weakref.getweakrefs, [*model.parameters(), *model.buffers(), held]))
    for _ in range(2):
        torch.utils.swap_tensors(model.first.weight, nn.Parameter(torch.randn(4, 4)))
        torch.utils.swap_tensors(model.norm.running_mean, torch.randn(4))
        assert_as_eager(run, model, torch.float32)
    model.load_state_dict(Tied().state_dict())
    for dtype in (torch.float32, torch.float64, torch.float32, torch.float32):
        assert_as_eager(run, model.to(dtype), dtype)


CONVERSIONS = {
    "to": lambda model, dtype: model.to(dtype),
    "assign": lambda model, dtype: model.load_state_dict(
        {name: tensor.to(dtype, copy=True) for name, tensor in model.state_dict().items()},
        assign=True,
    ),
}


def watched(model: nn.Module) -> list[StorageWeakRef]:
    """The memory of a model's parameters and buffers."""
    tensors = (*model.parameters(), *model.buffers())
    return [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]


@pytest.mark.parametrize("kind", ["compile/inductor", "step/inductor", "compile/eager"])
@pytest.mark.sweep(keep="compile/eager")
def test_weights_of_before_a_conversion_are_not_held(kind: str) -> None:
    model = Tied()
    run = compiled_by(kind, model)
    run(torch.randn(5, 4))
    before: list[StorageWeakRef] = []
    for way, dtype in (("to", torch.float64), ("assign", torch.float32), ("assign", torch.float32)):
        before += watched(model)
        CONVERSIONS[way](model, dtype)
        for mode in (True, False, True):
            model.train(mode)
            run(torch.randn(5, 4).to(dtype))
    gc.collect()  # once: in a process that ran many tests it takes seconds
    present = {memory.cdata for memory in watched(model)}
    assert [m for m in before if not m.expired() and m.cdata not in present] == []
    # On five rows a gradient behind the norm may cancel to the rounding of float32.
    assert_as_eager(run, model.double(), torch.float64)


def arenas() -> int:
    """The arenas alive in this process."""
    from lazyinline.backend.run.leases import Lease

    return len({id(x.arena) for x in gc.get_objects() if type(x) is Lease})


def test_idle_arenas_are_given_back() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    compiled, x = lazyinline.compile(model, backend="inductor"), torch.randn(3, 4)
    compiled(x).sum().backward()
    before = arenas()
    for most in (40, 2):
        flights = [compiled(x) for _ in range(most)]
        assert arenas() >= before + most - 1
        flights.clear()
        assert arenas() <= before + 3
    for _ in range(2):
        flights = [compiled(x), compiled(x)]
        kept = arenas()
        for flight in flights:
            flight.sum().backward()
        flights.clear()
        assert arenas() == kept  # what a loop needs again is kept
    for _ in range(5):
        compiled(x).sum().backward()
    assert arenas() == before


def of_forces(model: nn.Module, compiled: Any) -> None:
    x = torch.randn(5, 4, requires_grad=True)
    (force,) = torch.autograd.grad(compiled(x).square().sum(), x, create_graph=True)
    force.square().sum().backward()


# How a model runs before it is let go.
RUNS: dict[str, Callable[[nn.Module, Any], None]] = {
    "trained": lambda model, compiled: compiled(torch.randn(5, 4)).sum().backward(),
    "differentiated twice": of_forces,
    "stepped": lambda model, compiled: compiled_by("step/eager", model)(torch.randn(5, 4)),
}


def test_a_model_that_is_let_go_leaves_none_of_its_graphs() -> None:
    known, num_known = [], []
    for _ in range(3):  # the first one fills caches
        for run in RUNS.values():
            model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
            run(model, lazyinline.compile(model, backend="eager"))
            known += [weakref.ref(part) for part in model.modules()]
            del model
        gc.collect()
        num_known.append(sum(type(held) is torch.fx.Graph for held in gc.get_objects()))
    assert num_known[1] == num_known[2]
    assert not any(part() for part in known)


def test_a_step_that_ran_can_be_copied_and_pickled() -> None:
    model, x = nn.Linear(3, 3), torch.randn(2, 3)
    step = lazyinline.compile_step(model, loss_fn=torch.sum, backend="eager")
    loss = step(x)
    for other in (copy.deepcopy(step), pickle.loads(pickle.dumps(step))):
        assert torch.equal(other(x), loss)
        assert other._model is not model
        assert torch.equal(other._model.weight.grad, model.weight.grad)
        other._model.weight.data.zero_()
        assert torch.equal(step(x), loss)
    both = copy.deepcopy({"model": model, "step": step})
    assert both["step"]._model is both["model"]


# What is done to a layer ``m`` between two steps.
MOVES = {
    "gradient dropped": "m.weight.grad = None",
    "gradient set": "m.weight.grad = torch.ones(4, 4)",
    "nothing": "pass",
    "data": "m.weight.data = torch.randn(4, 4)",
    "data transposed": "m.weight.data = m.weight.data.t()",
    "memory": "with torch.no_grad(): m.weight.set_(torch.randn(4, 4))",
    "memory resized": "m.weight.untyped_storage().resize_(2**20); nn.init.normal_(m.weight)",
    "parameter": "m.weight = nn.Parameter(torch.randn(4, 4))",
    "assigned": "m.load_state_dict(nn.Linear(4, 4).state_dict(), assign=True)",
    "frozen": "m.weight.requires_grad_(not m.weight.requires_grad); m.weight.grad = None",
}


@pytest.mark.parametrize("move", MOVES)
def test_a_step_uses_the_memory_that_parameters_have_now(move: str) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(2, 4)
    step = lazyinline.compile_step(model, loss_fn=lambda out: out.sum(), backend="eager")
    for calls in (1, 3, 1, 20, 2):
        for _ in range(calls):
            loss = step(x)
        found = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        reference = copy.deepcopy(model)
        reference.zero_grad()
        expected = reference(x).sum()
        expected.backward()
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-6, atol=1e-6)
        wanted = [parameter.grad for parameter in reference.parameters()]
        assert_same(found, wanted, "gradients", 1e-6)
        exec(MOVES[move], {"torch": torch, "nn": nn, "m": model[0]})


def resize(gradient: torch.Tensor) -> None:
    for num_bytes in (0, 8, 2**20):
        with pytest.raises(RuntimeError, match="not resizable"):
            gradient.untyped_storage().resize_(num_bytes)
    with pytest.raises(RuntimeError, match="not resizable"):
        gradient.resize_(100)
    gradient.resize_(2)


USES: dict[str, Callable[[torch.Tensor], object]] = {
    "other memory": lambda g: setattr(g, "data", g.data * 0.5),
    "set to zeros": lambda g: g.set_(torch.zeros(4, 4)),  # type: ignore[call-overload]
    "turned over": lambda g: g.t_(),
    "shared with processes": lambda g: g.share_memory_(),
    "resized": resize,
    "wants a gradient": lambda g: g.requires_grad_(),
}


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("use", USES)
@pytest.mark.sweep(keep=["memory-eager", "over-eager", "resized-eager", "zeros-inductor"])
def test_what_users_do_to_gradients_does_not_reach_the_next_step(use: str, backend: str) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), torch.randn(2, 4)
    expected = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    step = lazyinline.compile_step(model, loss_fn=torch.sum, backend=backend)
    for calls in (1, 2, 20):
        for _ in range(calls):
            step(x)
        for parameter, gradient in zip(model.parameters(), expected, strict=True):
            assert parameter.grad is not None
            assert not parameter.grad.requires_grad
            torch.testing.assert_close(parameter.grad, gradient)
        held = model[0].weight.grad
        assert held is not None
        USES[use](held)


def test_gradients_are_the_same_tensors_from_step_to_step() -> None:
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    step = lazyinline.compile_step(model, loss_fn=torch.sum, backend="eager")
    step(x)
    held = [p.grad for p in model.parameters()]
    model.zero_grad()
    step(x)
    assert all(p.grad is g for p, g in zip(model.parameters(), held, strict=True))


Grads = list[torch.Tensor]
wide = partial(MarkedBlock, 16, norm=True)


class Subject:
    """A compiled model whose gradients are hosts, and the model itself beside it."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = Around(lambda layers, x: layers[0](x).square().mean(), Net(wide, 3, width=16))
        self.batches = [batch(32, 16, seed=seed) for seed in range(4)]
        self.eager = copy.deepcopy(self.model)
        self.compiled = lazyinline.compile(self.model)
        self.grads_of(0)

    @staticmethod
    def clear(*models: torch.nn.Module) -> None:
        for model in models:
            model.zero_grad(set_to_none=True)

    def loss(self, seed: int) -> torch.Tensor:
        return self.compiled(self.batches[seed])

    def grads_of(self, seed: int) -> Grads:
        """One step from no gradients."""
        self.clear(self.model)
        self.loss(seed).backward()
        return received(self.model)

    def expected(self, seed: int) -> Grads:
        self.clear(self.eager)
        self.eager(self.batches[seed]).backward()
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


def assert_close(ours: Grads, theirs: Grads) -> None:
    assert len(ours) == len(theirs) == 20
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-6)


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
    subject.clear(subject.model)
    held.backward()
    assert all(map(torch.equal, first, before))
    assert_close(first, subject.expected(1))
    assert_close(received(subject.model), subject.expected(3))
    memories = [g.untyped_storage().data_ptr() for g in (*first, *second)]
    assert len(set(memories)) == len(memories)
    extra = sum(g.untyped_storage().nbytes() - g.nbytes for g in first)
    assert extra <= 0.01 * sum(g.nbytes for g in first)


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
