"""Results that others are computed from: whoever asks for their gradients gets eager's."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lazyinline

Use = Callable[[nn.Module, Any, Tensor], list[Any]]


class Deep(nn.Module):
    """Returns a loss and every hidden state, of which the last also stands as the result."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.3)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> dict[str, Any]:
        hidden = [x]
        for layer in self.layers:
            hidden.append(layer(hidden[-1]))
        return {"loss": hidden[-1].square().sum(), "last": hidden[-1], "hidden": hidden[1:]}


def alone(model: nn.Module, out: Any, x: Tensor) -> list[Any]:
    """Asks for the gradients of two hidden states, of a loss that also takes one itself."""
    loss = out["loss"] + out["hidden"][1].exp().sum()
    return [*torch.autograd.grad(loss, out["hidden"][:2], retain_graph=True), loss.backward()]


def one_of_last(model: nn.Module, out: Any, x: Tensor) -> list[Any]:
    """Asks through the last hidden state, which is returned twice."""
    found = torch.autograd.grad(out["last"].sum(), out["hidden"][0], retain_graph=True)
    again = torch.autograd.grad(out["hidden"][2].sum(), out["hidden"][0], retain_graph=True)
    return [*found, *again, out["loss"].backward()]


def for_an_input(model: nn.Module, out: Any, x: Tensor) -> list[Any]:
    """Asks for the gradient of an input, then for all."""
    found = torch.autograd.grad(out["loss"], x, retain_graph=True)
    return [*found, (out["loss"] + out["hidden"][0].sum()).backward()]


def differentiated(model: nn.Module, out: Any, x: Tensor) -> list[Any]:
    """Penalizes the gradient of a hidden state."""
    (found,) = torch.autograd.grad(out["loss"], out["hidden"][0], create_graph=True)
    return [found, found.square().sum().backward()]


def hooked(model: nn.Module, out: Any, x: Tensor) -> list[Any]:
    """Looks at the gradients of two hidden states, and changes one."""
    seen: list[Tensor] = []
    out["hidden"][0].register_hook(seen.append)
    out["hidden"][1].register_hook(lambda gradient: gradient * 2)
    (out["loss"] + out["hidden"][1].sum()).backward()
    return seen


def in_a_batch(model: nn.Module, out: Any, x: Tensor) -> list[Any]:
    """Asks for several gradients of a hidden state at once."""
    rows = torch.eye(12).reshape(12, 3, 4)
    (found,) = torch.autograd.grad(
        out["hidden"][1], out["hidden"][0], rows, is_grads_batched=True, retain_graph=True
    )
    return [found]


def changed(model: nn.Module, out: Any, x: Tensor) -> list[Any]:
    """Changes results in place before a loss."""
    out["loss"].mul_(3)
    return [out["loss"].sin().backward()]


def retained(model: nn.Module, out: Any, x: Tensor) -> list[Any]:
    """Keeps the gradients of all results, over two backwards."""
    results = [out["loss"], *out["hidden"][:2]]
    for one in results:
        one.retain_grad()
    out["loss"].backward(retain_graph=True)
    out["hidden"][1].sum().backward()
    return [one.grad for one in results]


def retained_with_a_graph(model: nn.Module, out: Any, x: Tensor) -> list[Any]:
    """Keeps gradients of a backward that could be differentiated, which both sides warn of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for one in out["hidden"][:2]:
            one.retain_grad()
        (out["loss"] + out["hidden"][1].exp().sum()).backward(create_graph=True)
    return [one.grad for one in out["hidden"][:2]]


USES = [
    retained_with_a_graph,
    alone,
    one_of_last,
    for_an_input,
    differentiated,
    hooked,
    in_a_batch,
    changed,
    retained,
]


@pytest.mark.parametrize("use", USES)
def test_gradients_of_results_are_eagers(use: Use) -> None:
    torch.manual_seed(0)
    model, found = Deep(), []
    expected = copy.deepcopy(model)
    compiled = lazyinline.compile(model, backend="eager", dynamic=True)
    for run, own in ((compiled, model), (expected, expected)):
        for number in (3, 3):
            torch.manual_seed(number)
            own.zero_grad()
            x = torch.randn(3, 4, requires_grad=True)
            found.append([*use(own, run(x), x), x.grad, *(p.grad for p in own.parameters())])
    torch.testing.assert_close(found[:2], found[2:])


def test_a_gradient_of_a_result_that_may_lack_a_part_is_warned_of_once() -> None:
    model = lazyinline.compile(Deep(), backend="eager")
    x = torch.randn(3, 4, requires_grad=True)
    for expected in (1, 0):
        out = model(x)
        hidden = out["hidden"][0]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.autograd.grad(out["loss"] + hidden.sum(), [hidden, x])
        assert ["hidden" in str(one.message) for one in caught] == [True] * expected
