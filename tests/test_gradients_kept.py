"""No gradient gets lost without a word: it is eager's, or the call is refused."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from comparing import assert_equals_eager
from models import Around, Made, block
from torch import Tensor, nn

import lazyinline
from lazyinline import CaptureError, PlanError


class Scaled(nn.Module):
    """A layer, and a parameter that a weight is computed from outside of the forward."""

    def __init__(self, place: Callable[[Any], None]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.randn(4, 4))
        self.weight_of: Callable[[Any], Any] = lambda self: self.weight
        place(self)

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) @ self.weight_of(self)).square().mean()


def in_the_layer(model: Any) -> None:
    """The layer's own weight is no parameter any more."""
    weight = model.linear.weight.detach()
    del model.linear.weight
    model.linear.weight, model.weight = model.scale * weight, torch.eye(4)


def in_an_attribute(model: Any) -> None:
    model.weight = model.scale * 2


def in_a_buffer(model: Any) -> None:
    model.register_buffer("weight", model.scale * 2)


def in_a_list(model: Any) -> None:
    model.weights, model.weight_of = [model.scale * 2], lambda self: self.weights[0]


def in_a_closure(model: Any) -> None:
    weight = model.scale * 2
    model.weight_of = lambda self: weight


def of_another(model: Any) -> None:
    """Computed by a hypernetwork that is none of the model's modules."""
    model.weight = nn.Linear(2, 16)(torch.ones(2)).view(4, 4)


def in_a_hook(model: Any) -> None:
    """As weight norm once was: a hook before the forward sets the weight."""
    model.linear, model.weight = torch.nn.utils.spectral_norm(nn.Linear(4, 4)), torch.eye(4)


CLOSE = 1e-6  # float32, by kernels of PyTorch

PLACES = [in_the_layer, in_an_attribute, in_a_buffer, in_a_list, in_a_closure]
PLACES += [of_another, in_a_hook]


@pytest.mark.parametrize("place", PLACES[:-1])
def test_a_step_refuses_a_weight_that_is_computed_outside(place: Any) -> None:
    step = lazyinline.compile_step(Scaled(place), backend="eager")
    with pytest.raises((PlanError, CaptureError), match=r"weight|outside"):
        step(torch.randn(3, 4))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.sweep(keep=["layer", "buffer", "closure", "another", "hook"])
def test_compile_gives_its_gradient_to_what_a_weight_is_computed_from(place: Any) -> None:
    model, expected = Scaled(place), Scaled(place)
    assert_equals_eager(model, (torch.randn(3, 4),), calls=1, reference=expected)


def test_a_step_computes_the_weight_that_a_hook_sets() -> None:
    model, expected = Scaled(in_a_hook), Scaled(in_a_hook)
    expected.load_state_dict(model.state_dict())
    data = [(torch.randn(3, 4),) for _ in range(3)]
    assert_equals_eager(model, batches=data, door="step", reference=expected)


def test_a_step_refuses_a_weight_that_is_computed_from_some_step_on() -> None:
    model = Scaled(in_an_attribute)
    model.weight = torch.randn(4, 4).requires_grad_()
    step = lazyinline.compile_step(model, backend="eager")
    step(torch.randn(3, 4))
    assert model.weight.grad is not None
    model.weight = model.scale * 2
    with pytest.raises(PlanError, match="computed outside"):
        step(torch.randn(3, 4))


def test_a_step_refuses_a_complex_loss_and_micro_batches_without_rows() -> None:
    weight = nn.Parameter(torch.randn(4, dtype=torch.complex64))
    model = Made(lambda self, x: (x * self.weight).sum(), weight=weight)
    with pytest.raises(RuntimeError, match="complex64"):
        model(torch.randn(4)).backward()
    with pytest.raises(CaptureError, match=r"real, not torch\.complex64"):
        lazyinline.compile_step(model, backend="eager")(torch.randn(4))
    step = lazyinline.compile_step(network(), loss_fn=torch.sum, micro_batches=2, backend="eager")
    with pytest.raises(PlanError, match="cannot be split"):
        step(torch.randn(0, 4))


def in_part(linear: nn.Module, x: Tensor) -> Any:
    with torch.enable_grad():
        inner = linear(x)
    return inner.detach() * 2, inner


def at_the_end(linear: nn.Module, x: Tensor) -> Any:
    with torch.set_grad_enabled(True):
        return linear(x).sum()


def of_the_input(linear: nn.Module, x: Tensor) -> Any:
    with torch.enable_grad():
        moved = x.detach().requires_grad_()
        energy = linear(moved).sum()
        (force,) = torch.autograd.grad(energy, moved)
    return force, x, linear.weight


@pytest.mark.parametrize(
    ("run", "mode"),
    [
        *((run, torch.no_grad) for run in (in_part, at_the_end, of_the_input)),
        *((run, torch.enable_grad) for run in (in_part, at_the_end, of_the_input)),
        *((run, torch.inference_mode) for run in (in_part, at_the_end)),  # eager refuses the third
    ],
)
@pytest.mark.sweep(keep=["in_part", "at_the_end-no", "of_the_input-no"])
def test_grad_mode_switched_inside_gives_results_the_history_that_eager_gives(
    run: Callable[..., Any], mode: Callable[[], Any]
) -> None:
    def use(called: Any, x: Tensor) -> Any:
        with mode():
            return called(x)

    model = block(lambda self, x: run(self.linear, x), mark=False)().float()
    options: Any = {"fallback": "error"} if run is of_the_input else {}
    options |= {"batches": [(torch.randn(3, 4),) for _ in range(2)], "tolerance": CLOSE}
    assert_equals_eager(model, use=use, **options)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def test_derivatives_by_vectorized_rows_are_eagers() -> None:
    def rows(run: Any, x: Tensor) -> tuple[Any, Any]:
        of = torch.autograd.functional
        jacobian = of.jacobian(run, x, vectorize=True)
        return jacobian, of.hessian(lambda x: run(x).sum(), x, vectorize=True)

    assert_equals_eager(network(), [torch.randn(3, 4)], calls=1, use=rows, tolerance=CLOSE)


def differentiated_on(run: Any, x: Tensor, rows: Tensor) -> Any:
    (found,) = torch.autograd.grad(run(x), x, rows, is_grads_batched=True, create_graph=True)
    return torch.autograd.grad(found.square().sum(), (x, *run.parameters()), allow_unused=True)


def drawing(run: Any, x: Tensor, rows: Tensor) -> Any:
    return torch.autograd.grad(run(x), (x, *run.parameters()), rows, is_grads_batched=True)


@pytest.mark.parametrize("use", [differentiated_on, drawing], ids=lambda use: use.__name__)
def test_a_batch_of_gradients_is_that_of_eager(use: Callable[..., Any]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout()) if use is drawing else network()
    args = torch.randn(3, 4, requires_grad=True), torch.randn(2, 3, 4)
    assert_equals_eager(model, args, calls=1, use=use, tolerance=CLOSE)


class Net(nn.Module):
    """Layers of several sizes; two parameters have the very same gradient, one has gaps."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 32, dtype=dtype), nn.Linear(32, 4, dtype=dtype)
        self.left, self.right = (nn.Parameter(torch.randn(4, dtype=dtype)) for _ in range(2))
        self.gappy = nn.Parameter(torch.randn(4, 8, dtype=dtype)[:, ::2])
        self.turned = nn.Parameter(torch.randn(4, 4, dtype=dtype).t())
        self.none = nn.Parameter(torch.randn(0, 4, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        x = self.last(torch.tanh(self.first(x))) @ self.gappy @ self.turned
        x = x + (self.left + self.right) + self.none.sum()
        return (x * x.conj()).real.float().mean()


def assert_near(model: nn.Module, expected: nn.Module) -> None:
    """All gradients are there, and are as close as their dtype allows."""
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        near = {"rtol": 0.05, "atol": 0.02} if ours.dtype is torch.bfloat16 else {}
        torch.testing.assert_close(ours.grad, theirs.grad, **near)


def saved_bytes(tensor: Tensor) -> int:
    file = io.BytesIO()
    torch.save(tensor, file)
    return len(file.getvalue())


CASES = [
    (torch.float32, "eager", "hooked"),
    (torch.bfloat16, "eager", ""),
    (torch.complex64, "eager", ""),
    (torch.float32, "inductor", ""),
]


@pytest.mark.parametrize(("dtype", "backend", "hooked"), CASES, ids=str)
@pytest.mark.sweep(keep="eager")
def test_gradients_are_saved_and_copied_without_the_arena(
    dtype: torch.dtype, backend: str, hooked: str
) -> None:
    model, x = Net(dtype), torch.randn(2, 8, dtype=dtype)
    expected, step = copy.deepcopy(model), lazyinline.compile_step(model, backend=backend)
    if hooked:
        model.left.register_hook(lambda g: None)
    fused = dtype == torch.float32
    optimizers = [
        torch.optim.Adam(m.parameters(), lr=0.01, fused=fused, foreach=not fused)
        for m in (model, expected)
    ]
    for _ in range(3):
        step(x)
        expected.zero_grad()
        expected(x).backward()
        assert_near(model, expected)
        for parameter in model.parameters():
            gradient: Any = parameter.grad
            own = gradient.untyped_storage().nbytes()
            assert own <= 2 * gradient.nbytes
            assert saved_bytes(gradient) - saved_bytes(torch.zeros(())) < own + 300
            for copied in (copy.deepcopy(gradient), pickle.loads(pickle.dumps(gradient))):
                assert copied.untyped_storage().nbytes() <= own
                assert torch.equal(copied, gradient)
                assert copied.data_ptr() != gradient.data_ptr() or not own
        places = [p.grad.data_ptr() for p in model.parameters() if p.grad is not None and p.numel()]
        assert len(set(places)) == len(places)
        for optimizer in optimizers:
            optimizer.step()
        expected.load_state_dict(model.state_dict())  # rounding must not add up


Use = Callable[[nn.Module, Any, Tensor], list[Any]]


def run_deep(layers: Any, x: Tensor) -> dict[str, Any]:
    """Returns a loss and every hidden state, of which the last also stands as the result."""
    hidden = [x]
    for layer in layers:
        hidden.append(layer(hidden[-1]))
    return {"loss": hidden[-1].square().sum(), "last": hidden[-1], "hidden": hidden[1:]}


def deep() -> nn.Module:
    parts = (nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.3)) for _ in range(3))
    return Around(run_deep, *parts)


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
    *(retained_with_a_graph, alone, one_of_last, for_an_input, differentiated, hooked),
    *(in_a_batch, changed, retained),
]


def used(run: Any, use: Use, x: Tensor) -> list[Any]:
    found = [one if one is None else one.detach() for one in use(run, run(x), x)]
    return [*found, x.grad]


def test_gradients_of_results_are_eagers() -> None:
    """A compiled model learns from use to use."""
    torch.manual_seed(0)
    x = torch.randn(3, 4, requires_grad=True)
    batches = [(use, x) for use in USES for _ in range(2)]
    # With an optimizer, gradients begin anew at each use.
    options: Any = {"optimizer": lambda p: torch.optim.SGD(p, lr=0.0), "dynamic": True}
    assert_equals_eager(deep(), batches=batches, use=used, tolerance=CLOSE, **options)


def test_a_gradient_of_a_result_that_may_lack_a_part_is_warned_of_once() -> None:
    model = lazyinline.compile(deep(), backend="eager")
    x = torch.randn(3, 4, requires_grad=True)
    for expected in (1, 0):
        out = model(x)
        hidden = out["hidden"][0]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.autograd.grad(out["loss"] + hidden.sum(), [hidden, x])
        assert ["hidden" in str(one.message) for one in caught] == [True] * expected
