"""What a model returns is the very tensor that eager returns, or shares its memory as there."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lazyinline


class Returning(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(4))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        self.count.add_(1)
        hidden = self.linear(x)
        bias = self.linear.bias
        return (
            hidden,
            hidden,
            hidden.detach(),
            hidden[0],
            self.count,
            x,
            x[0],
            bias,
            bias.detach(),
        )


def _relations(model: Returning, x: Tensor, results: tuple[Tensor, ...]) -> list[object]:
    known = [x, model.count, model.linear.bias, *results]
    return [
        (
            [other is result for other in known],
            [other.untyped_storage()._cdata == result.untyped_storage()._cdata for other in known],
            result.requires_grad,
            result.storage_offset(),
        )
        for result in results
    ]


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.sweep(keep=["eager-True", "inductor-False"])
def test_results_are_the_tensors_that_eager_returns(backend: str, train: bool) -> None:
    model = Returning()
    compiled, x = lazyinline.compile(model, backend=backend), torch.randn(3, 4)
    with torch.set_grad_enabled(train):
        wanted = model(x)
        for _ in range(2):
            found = compiled(x)
            assert _relations(model, x, found) == _relations(model, x, wanted)
            assert any(result is x for result in found)
            assert any(result is model.count for result in found)


class Reversed(torch.autograd.Function):
    """Passes numbers through, and gradients with another sign."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -gradient


# Two results that share memory, made of one tensor of shape (3, 4).
SHARING: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "itself and flat": lambda h: (h, h.view(-1)),
    "flat and itself": lambda h: (h.view(-1), h),
    "detached": lambda h: (h, h.detach()),
    "detached first": lambda h: (h.detach(), h),
    "columns": lambda h: (h[:, 1:3], h),
    "transposed": lambda h: (h.t(), h),
    "expanded": lambda h: (h, h[:1].expand(3, 4)),
    "halves": lambda h: (h[:, :2], h[:, 2:]),
    "saved for the backward": lambda h: (h.exp().view(-1), h.exp()),
    "one saved for the backward": lambda h: (lambda e: (e.view(-1), e))(h.exp()),
    "chunks": lambda h: (h, h.chunk(2, dim=1)[1]),
    "equal, and apart": lambda h: (h.exp(), h.exp()),
}
ROWS = {"rows": lambda h: (h[1], h[1:, 2:])}


class Sharing(nn.Module):
    """Returns what shares memory."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.name = name

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return (SHARING | ROWS)[self.name](self.linear(x))


def played(
    model: nn.Module, run: Callable[..., Any], changed: int, used: Sequence[int]
) -> list[Tensor] | str:
    """Returns results and gradients after one of two results was changed in place, or the error."""
    found = []
    x = torch.linspace(-1, 1, 12).view(3, 4)
    for _ in range(2):
        results = run(x)
        try:
            results[changed].mul_(2.0)
            sum((results[i] ** 2 * (i + 1)).sum() for i in used).backward()
        except RuntimeError as error:
            return str(error).split(":")[0]
        found += [r.detach().clone() for r in results]
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return found


# A compiled model is one node of autograd's graph: what its backward saved must not be changed,
# whichever results the loss uses.
SAVED = ("saved for the backward", "equal, and apart")
USED = [(name, (0, 1)) for name in SHARING]
USED += [(name, used) for name in SHARING if name not in SAVED for used in ((0,), (1,))]


@pytest.mark.sweep(
    keep=[
        *(f"eager-{i % 2}-{name}-(0, 1)" for i, name in enumerate(SHARING)),
        *("eager-0-columns", "eager-1-chunks", "eager-1-itself and flat-(0, 1)"),
    ]
)
@pytest.mark.parametrize(("name", "used"), USED, ids=str)
@pytest.mark.parametrize("changed", [0, 1])
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_results_that_share_memory_may_be_changed_in_place(
    backend: str, name: str, changed: int, used: Sequence[int]
) -> None:
    torch.manual_seed(0)
    model = Sharing(name)
    other = copy.deepcopy(model)
    expected = played(model, model, changed, used)
    found = played(other, lazyinline.compile(other, backend=backend), changed, used)
    if isinstance(expected, str) or isinstance(found, str):
        assert found == expected or isinstance(expected, str)
        return
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_parts_of_one_tensor_that_is_not_returned_are_refused_when_changed(backend: str) -> None:
    run = lazyinline.compile(Sharing("rows"), backend=backend)
    for _ in range(2):
        results = run(torch.ones(3, 4))
        with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
            results[0].mul_(2.0)


@pytest.mark.parametrize("name", SHARING)
@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.sweep(keep=["eager", "inductor-columns"])
def test_without_gradients_results_share_memory_as_in_eager(backend: str, name: str) -> None:
    model = Sharing(name)
    compiled, x = lazyinline.compile(model, backend=backend), torch.randn(3, 4)
    left: list[int] = []
    with torch.no_grad():
        for run in (model, compiled, compiled):
            first, second = run(x)
            first.zero_()
            left.append(int(second.count_nonzero()))
    assert left[1:] == [left[0], left[0]]


def test_a_function_of_the_users_that_returns_a_view_has_its_own_gradient() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = self.linear(x)
            return h, Reversed.apply(h)

    torch.manual_seed(0)
    model = Model()
    first, second = lazyinline.compile(model, backend="eager")(torch.ones(3, 4))
    (first * 2 + second * 3).sum().backward()
    assert model.linear.bias.grad is not None
    torch.testing.assert_close(model.linear.bias.grad, torch.full((4,), -3.0))


class Deep(nn.Module):
    """Returns what it computes on the way, as a model with hidden states does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.3)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        hidden = [x]
        for layer in self.layers:
            hidden.append(layer(hidden[-1]))
        return (hidden[-1].square().sum(), *hidden[1:])


@pytest.mark.parametrize(("create_graph", "dynamic"), [(False, True), (True, False)])
def test_a_result_that_retains_its_gradient_gets_what_comes_through_other_results(
    create_graph: bool, dynamic: bool
) -> None:
    torch.manual_seed(0)
    model, x = Deep(), torch.randn(3, 4)
    expected = copy.deepcopy(model)
    compiled = lazyinline.compile(model, backend="eager", dynamic=dynamic)
    for weight in (0.0, 1.0):  # of a loss that also takes one of them itself
        found = []
        for one in (compiled, expected):
            torch.manual_seed(1)
            one.zero_grad()
            loss, *hidden = one(x)
            for h in hidden[:2]:
                h.retain_grad()
            whole = loss + weight * hidden[1].exp().sum() if weight else loss
            whole.backward(create_graph=create_graph)
            found.append([*(h.grad for h in hidden[:2]), *(p.grad for p in one.parameters())])
        torch.testing.assert_close(*found)
