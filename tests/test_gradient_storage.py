"""The gradients of a step: each has a storage of its own bytes on the memory of the arena."""

import copy
import gc
import io
import itertools
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lazyinline
from lazyinline.reuse.ir.types import in_own_storage

STRIDED = {
    "whole": ((3, 4), (4, 1)),
    "transposed": ((3, 4), (1, 3)),
    "with gaps": ((3, 4), (8, 2)),
    "expanded": ((3, 4), (0, 1)),
    "empty": ((0, 4), (4, 1)),
    "one number": ((), ()),
}


DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.complex128)


@pytest.mark.sweep
def test_a_tensor_in_its_own_storage_is_the_same_memory_and_no_more() -> None:
    kept = []
    for dtype, (shape, stride) in itertools.product((*DTYPES, torch.bool), STRIDED.values()):
        memory = torch.zeros(64, dtype=dtype)
        part = memory.as_strided(shape, stride, 5)
        with torch.inference_mode():
            own = in_own_storage(part)
        assert (own.shape, own.stride(), own.dtype) == (part.shape, part.stride(), dtype)
        last = sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
        extent = 1 + last if own.numel() else 0
        assert own.untyped_storage().nbytes() == extent * dtype.itemsize
        assert own.data_ptr() == part.data_ptr()
        assert not own.is_inference() and own._base is None
        memory.fill_(1)
        assert bool(own.all())
        own.zero_()
        assert not bool(part.any())
        kept.append(own)
    del memory, part
    gc.collect()  # once: in a process that ran many tests it takes seconds
    assert not any(bool(own.any()) for own in kept)


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


@pytest.mark.sweep
def test_a_gradient_outlives_its_step() -> None:
    model, x = Net(torch.float32), torch.randn(2, 8)
    expected = copy.deepcopy(model)
    lazyinline.compile_step(model, backend="eager")(x)
    expected(x).backward()
    gc.collect()
    others = [torch.randn(1000) for _ in range(50)]
    assert_near(model, expected)
    del others
