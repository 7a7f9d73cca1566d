"""What is done to tensors between calls shows, and what moved is bound anew."""

import copy
import threading
from collections.abc import Callable

import pytest
import torch
from comparing import assert_same
from torch import nn

import lazyinline

# What is done to a layer ``m`` between two steps.
MOVES = {
    "gradient dropped": "m.weight.grad = None",
    "gradient set": "m.weight.grad = torch.ones(4, 4)",
    "gradients swapped": "m.weight.grad, m.bias.grad = torch.zeros(4, 4), torch.zeros(4)",
    "nothing": "pass",
    "data": "m.weight.data = torch.randn(4, 4)",
    "data transposed": "m.weight.data = m.weight.data.t()",
    "data of a view": "m.weight.data = torch.randn(6, 4)[2:]",
    "memory": "with torch.no_grad(): m.weight.set_(torch.randn(4, 4))",
    "memory resized": "m.weight.untyped_storage().resize_(2**20); nn.init.normal_(m.weight)",
    "parameter": "m.weight = nn.Parameter(torch.randn(4, 4))",
    "loaded": "m.load_state_dict(nn.Linear(4, 4).state_dict())",
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


def test_a_parameter_that_comes_back_after_others_is_the_one_used() -> None:
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    compiled = lazyinline.compile(model, backend="eager")
    parameters = [nn.Parameter(torch.randn(4, 4)) for _ in range(5)]
    for index in (0, 1, 2, 3, 2, 3, 2, 0, 4, 0):  # not each exchange is learnt
        model.weight = parameters[index]
        assert torch.equal(compiled(x), model(x))


def test_what_a_thread_changed_is_used_by_its_next_call_while_others_call_too() -> None:
    model, x, stop = nn.Linear(4, 4), torch.randn(2, 4), threading.Event()
    compiled = lazyinline.compile(model, backend="eager")
    compiled(x)

    def work() -> None:
        while not stop.is_set():
            compiled(x)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for step in range(300):
            if step % 2:
                model.weight = nn.Parameter(torch.randn(4, 4))
            else:
                model.weight.data = torch.randn(4, 4)
            assert torch.equal(compiled(x), model(x))
    finally:
        stop.set()
        for thread in threads:
            thread.join()


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
@pytest.mark.sweep(keep=["eager", "zeros-inductor"])
def test_what_users_do_to_their_gradients_does_not_reach_the_next_step(
    use: str, backend: str
) -> None:
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
