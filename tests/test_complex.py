"""Complex models: what is conjugated or negated only in name is what PyTorch says it is."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from comparing import Door, assert_equals_eager, assert_same_gradients, relative_error, twin
from models import Made, block
from torch import Tensor, nn

import lazyinline
from lazyinline import lazy_inline


def weight(*shape: int, dtype: torch.dtype = torch.complex64) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape, dtype=dtype))


@lazy_inline
class Rotary(nn.Module):
    """A rotary embedding in complex numbers, as Llama 4 has it."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        angles = torch.outer(torch.arange(3.0), torch.tensor([1.0, 0.1, 0.01, 0.001]))
        turn = torch.polar(torch.ones_like(angles), angles)
        pairs = torch.view_as_complex(self.project(x).unflatten(-1, (4, 2)))
        return x + torch.view_as_real(pairs * turn).flatten(-2)


# Each has a weight ``w`` of the shape that is named, and gives a loss.
Forward = Callable[[nn.Parameter, Tensor], Tensor]


def conjugated(w: Tensor, x: Tensor) -> Tensor:
    """Conjugates, adjoints, and imaginary parts of them."""
    z = torch.complex(x, x.flip(0)) @ w.conj()
    y = (w.mH @ z.mH).mH * w[0].conj()
    expanded = w[0].conj().expand(3, 4).conj()[:, :3]
    parts = (y.conj() * z).imag.sum() + z.conj().imag.square().sum()
    return parts + torch.vdot(w[0], z[0]).abs() + (expanded * y[:, 1:]).real.sum()


def written_through_a_conjugate(w: Tensor, x: Tensor) -> Tensor:
    """Changes a value through views that are other numbers than their memory."""
    z = w * x
    z.conj().imag.mul_(3)
    z.conj()[0].add_(2j)
    copied = z.clone()
    copied.imag.neg_()
    return (z * copied.conj()).imag.sum() + z.abs().sum()


def spectrum(w: Tensor, x: Tensor) -> Tensor:
    """Correlation by Fourier transforms."""
    found = torch.fft.rfft(x) * torch.fft.rfft(w.real).conj()
    mixed = torch.einsum("bi,ci->bc", found, found.conj())
    return torch.fft.irfft(found, n=4).square().sum() + mixed.imag.abs().sum()


def scaled(w: Tensor, x: Tensor) -> Tensor:
    """Numbers of Python, whose conjugates a derivative asks for."""
    z = w * (1 + 2j) / (0.5 - 1j) - x * 1j
    return (z**2).imag.square().sum() + (2j * z).abs().sum()


def weighted(forward: Forward, *shape: int) -> nn.Module:
    return Made(lambda self, x: forward(self.w, x), w=weight(*shape))


def rotated() -> nn.Module:
    layers = nn.Sequential(Rotary(), Rotary())
    return Made(lambda self, x: self.layers(x).square().mean(), layers=layers)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "rotary": (rotated, (3, 8)),
    "conjugated": (lambda: weighted(conjugated, 4, 4), (3, 4)),
    "written through a conjugate": (lambda: weighted(written_through_a_conjugate, 3, 4), (3, 4)),
    "spectrum": (lambda: weighted(spectrum, 4), (3, 4)),
    "scaled": (lambda: weighted(scaled, 3, 4), (3, 4)),
}


@pytest.mark.parametrize("door", ["compile", "step"])
@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.sweep(keep=["eager-compile", "rotary-eager-step"])
def test_complex_models_train_as_in_eager(name: str, backend: str, door: Door) -> None:
    build, shape = MODELS[name]
    torch.manual_seed(0)
    batches = [(torch.randn(shape) + call,) for call in range(2)]
    assert_equals_eager(build(), batches=batches, door=door, backend=backend)


@pytest.mark.parametrize("train", [True, False])
def test_strides_of_a_conjugate_run_eagerly(train: bool) -> None:
    model = weighted(lambda w, x: (w * x).conj().as_strided((3, 2), (4, 2), 1).abs().sum(), 4)
    with torch.set_grad_enabled(train):
        told = assert_equals_eager(model, (torch.randn(3, 4, dtype=torch.complex64),)).told
    assert "as_strided of a conjugated" in str(told)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "windows": lambda z: z.unfold(1, 2, 1).conj(),
    "one column for all": lambda z: z[:, :1].expand(3, 4).conj(),
    "every other column": lambda z: z[:, ::2].conj(),
    "adjoint": lambda z: z.mH,
    "imaginary part of one row for all": lambda z: z[:1].expand(3, 4).conj().imag,
    "a view of what a solver lays out by a mark": lambda z: torch.linalg.solve_triangular(
        (z[:, :3] + 4 * torch.eye(3)).mH, z, upper=True
    ).view(-1),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.sweep(keep=["one column", "adjoint"])
def test_conjugates_of_any_layout_leave_a_block(name: str) -> None:
    def between(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.first(x)
        return (y * self.second(x * 2).conj()).abs().sum() + (y * 2j).imag.sum(), y

    torch.manual_seed(0)
    kind = block(lambda self, x: LAYOUTS[name](x * self.w))
    first, second = (kind(w=weight(4), linear=None) for _ in range(2))
    model = Made(between, first=first, second=second)
    x = torch.randn(3, 4, dtype=torch.complex64)
    expected, stepped = twin(model), twin(model)
    loss, out = lazyinline.compile(model, backend="eager")(x)
    want, want_out = expected(x)
    loss.backward()
    want.backward()
    # A solver that gets a conjugate written out solves the same numbers in another order.
    same = relative_error(out, want_out) <= 1e-6 if "solver" in name else torch.equal(out, want_out)
    assert same and out.stride() == want_out.stride()
    assert_same_gradients(model, expected, 1e-5)
    step = lazyinline.compile_step(stepped, backend="eager", loss_fn=lambda pair: pair[0])
    assert relative_error(step(x), want.detach()) <= 1e-5
    assert_same_gradients(stepped, expected, 1e-5)
