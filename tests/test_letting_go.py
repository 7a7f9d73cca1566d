"""What lazyinline holds of the user's tensors, and for how long."""

import copy
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import lazyinline


class Net(nn.Module):
    """Parameters, buffers, a tied weight and a tensor that is neither."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(width, width), nn.Linear(width, width)
        self.last.weight = self.first.weight
        self.norm = nn.BatchNorm1d(width)
        self.shift = torch.ones(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x)).relu() + self.shift.to(x.dtype))


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


@pytest.fixture(params=["compile/eager", "compile/inductor", "step/eager", "step/inductor"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


def assert_as_eager(kind: str, run: Any, model: nn.Module, dtype: torch.dtype) -> None:
    """Loss and gradients of one more call equal those of a copy of the model that is run itself."""
    expected, x = copy.deepcopy(model), torch.randn(5, 4).to(dtype)
    torch.testing.assert_close(run(x), compiled_by("model", expected)(x))
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.fixture
def swapping() -> Iterator[None]:
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(before)


@pytest.mark.usefixtures("swapping")
def test_the_users_tensors_can_be_swapped_and_the_program_sees_what_they_are_then(
    kind: str,
) -> None:
    model, held = Net(), torch.randn(5, 4)
    run = compiled_by(kind, model)
    run(held)
    assert not any(map(weakref.getweakrefs, [*model.parameters(), *model.buffers(), held]))
    for _ in range(2):
        torch.utils.swap_tensors(model.first.weight, nn.Parameter(torch.randn(4, 4)))
        torch.utils.swap_tensors(model.norm.running_mean, torch.randn(4))
        assert_as_eager(kind, run, model, torch.float32)
    model.load_state_dict(Net().state_dict())
    assert_as_eager(kind, run, model, torch.float32)
    model.to(torch.float64)
    assert_as_eager(kind, run, model, torch.float64)
    model.to(torch.float32)
    assert_as_eager(kind, run, model, torch.float32)
    assert_as_eager(kind, run, model, torch.float32)


@pytest.mark.usefixtures("swapping")
def test_the_users_tensors_can_be_swapped_after_a_capture_that_failed() -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight if x.sum() > 0 else x

    model = Branching()
    with pytest.raises(lazyinline.CaptureError):
        lazyinline.capture(model, (torch.ones(3),))
    model.to(torch.float64)
    assert model.weight.dtype == torch.float64


@pytest.mark.usefixtures("swapping")
def test_a_hook_on_a_gradient_is_called_after_a_swap() -> None:
    model = nn.Linear(3, 3)
    run = compiled_by("compile/eager", model)
    run(torch.ones(2, 3))
    model.to(torch.float64)
    seen: list[torch.Tensor] = []
    model.weight.register_hook(seen.append)
    run(torch.ones(2, 3, dtype=torch.float64))
    assert len(seen) == 1
    assert torch.equal(seen[0], model.weight.grad)
