"""What is done to tensors between calls shows, and what moved is bound anew."""

import copy
import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn

import lazyinline


def replace_data(linear: nn.Linear) -> None:
    linear.weight.data = torch.randn(4, 4)


def transpose_data(linear: nn.Linear) -> None:
    linear.weight.data = linear.weight.data.t()


def replace_by_view(linear: nn.Linear) -> None:
    linear.weight.data = torch.randn(6, 4)[2:]


def set_memory(linear: nn.Linear) -> None:
    with torch.no_grad():
        linear.weight.set_(torch.randn(4, 4))


def resize_memory(linear: nn.Linear) -> None:
    linear.weight.untyped_storage().resize_(2**20)
    with torch.no_grad():
        linear.weight.normal_()


def replace_parameter(linear: nn.Linear) -> None:
    linear.weight = nn.Parameter(torch.randn(4, 4))


def load(linear: nn.Linear) -> None:
    linear.load_state_dict(nn.Linear(4, 4).state_dict())


def assign(linear: nn.Linear) -> None:
    linear.load_state_dict(nn.Linear(4, 4).state_dict(), assign=True)


def freeze(linear: nn.Linear) -> None:
    linear.weight.requires_grad_(not linear.weight.requires_grad)
    linear.weight.grad = None


def drop_gradient(linear: nn.Linear) -> None:
    linear.weight.grad = None


def set_gradient(linear: nn.Linear) -> None:
    linear.weight.grad = torch.ones(4, 4)


def swap_gradients(linear: nn.Linear) -> None:
    linear.weight.grad, linear.bias.grad = torch.zeros(4, 4), torch.zeros(4)


def leave_all(linear: nn.Linear) -> None:
    pass


MOVES = [
    drop_gradient,
    set_gradient,
    swap_gradients,
    leave_all,
    replace_data,
    transpose_data,
    replace_by_view,
    set_memory,
    resize_memory,
    replace_parameter,
    load,
    assign,
    freeze,
]


@pytest.mark.parametrize("move", MOVES)
def test_a_step_uses_the_memory_that_parameters_have_now(
    move: Callable[[nn.Linear], None],
) -> None:
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
        for gradient, parameter in zip(found, reference.parameters(), strict=True):
            assert (gradient is None) == (parameter.grad is None)
            if gradient is not None:
                torch.testing.assert_close(gradient, parameter.grad, rtol=1e-6, atol=1e-6)
        move(model[0])


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


def other_memory(gradient: torch.Tensor) -> None:
    gradient.data = gradient.data * 0.5


def set_zeros(gradient: torch.Tensor) -> None:
    gradient.set_(torch.zeros(4, 4))  # type: ignore[call-overload]


def turn_over(gradient: torch.Tensor) -> None:
    gradient.t_()


def other_process(gradient: torch.Tensor) -> None:
    gradient.share_memory_()


def resize(gradient: torch.Tensor) -> None:
    for num_bytes in (0, 8, 2**20):
        with pytest.raises(RuntimeError, match="not resizable"):
            gradient.untyped_storage().resize_(num_bytes)
    with pytest.raises(RuntimeError, match="not resizable"):
        gradient.resize_(100)
    gradient.resize_(2)


def want_gradient(gradient: torch.Tensor) -> None:
    gradient.requires_grad_()


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize(
    "change", [other_memory, set_zeros, turn_over, other_process, resize, want_gradient]
)
@pytest.mark.sweep(keep=["eager", "set_zeros-inductor"])
def test_what_users_do_to_their_gradients_does_not_reach_the_next_step(
    change: Callable[[torch.Tensor], None], backend: str
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
        change(held)


def test_gradients_are_the_same_tensors_from_step_to_step() -> None:
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    step = lazyinline.compile_step(model, loss_fn=torch.sum, backend="eager")
    step(x)
    held = [p.grad for p in model.parameters()]
    model.zero_grad()
    step(x)
    assert all(p.grad is g for p, g in zip(model.parameters(), held, strict=True))
