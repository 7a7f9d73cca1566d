"""Memory that is taken away, shrunk or moved, and default devices: an error, or eager's numbers."""

import ast
import pathlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from apart import run_apart
from comparing import assert_close, assert_same_gradients, twin
from models import Around
from test_architecture import nodes_of, tree_of
from torch import Tensor, nn

import lazyinline
from lazyinline import lazy_inline
from lazyinline.reuse import process

WIDTH = 64
BACKENDS = pytest.mark.parametrize(
    "backend", ["eager", pytest.param("inductor", marks=pytest.mark.sweep)]
)


@lazy_inline
class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.full((WIDTH,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x)) * self.scale


def mean_square(layers: nn.Module, x: Tensor) -> Tensor:
    return layers[1](layers[0](x)).square().mean()


def made() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Around(mean_square, Block(), Block()), torch.randn(4, WIDTH)


@contextmanager
def without_memory(*tensors: Tensor) -> Iterator[None]:
    """Frees the memory of tensors; it comes back elsewhere, with what it held."""
    kept = [tensor.detach().clone() for tensor in tensors]
    for tensor in tensors:
        tensor.untyped_storage().resize_(0)
    others = [torch.full_like(tensor, float("nan")) for tensor in kept]
    try:
        yield
    finally:
        for tensor, values in zip(tensors, kept, strict=True):
            tensor.untyped_storage().resize_(values.untyped_storage().nbytes())
            tensor.data.copy_(values)  # autograd does not count this as a change
        del others


def eagerly(model: nn.Module, x: Tensor) -> tuple[nn.Module, Tensor]:
    """Returns a copy with gradients, and the loss."""
    expected = twin(model)
    expected.zero_grad()
    loss = expected(x)
    loss.backward()
    return expected, loss.detach()


def assert_right(
    model: nn.Module, compiled: Callable[..., Tensor], step: Callable[..., Tensor], x: Tensor
) -> None:
    expected, loss = eagerly(model, x)
    for run in (compiled, step):
        model.zero_grad()
        found = run(x)
        if found.requires_grad:
            found.backward()
        assert_close(found.detach(), loss)
        assert_same_gradients(model, expected)


def memory_taken_from(backend: str) -> None:
    model, x = made()
    compiled = lazyinline.compile(model, backend=backend)
    step = lazyinline.compile_step(model, backend=backend)
    assert_right(model, compiled, step, x)
    named = {**dict(model.named_parameters()), **dict(model.named_buffers()), "": x}
    for name in ("layers.1.linear.weight", "layers.0.scale", ""):
        for run in (compiled, step):
            with without_memory(named[name]), pytest.raises(RuntimeError, match="its storage") as e:
                run(x)
            assert name in str(e.value) or (backend, run) == ("eager", compiled)
        assert_right(model, compiled, step, x)
    with pytest.raises(RuntimeError, match="its storage"):
        loss = compiled(x)
        with without_memory(*model.parameters()):
            loss.backward()
    loss = compiled(x)
    with without_memory(*model.parameters()):
        pass
    model.zero_grad()
    loss.backward()  # on memory that came back elsewhere
    assert_same_gradients(model, eagerly(model, x)[0])
    gradients_not_shrunk(model, step, x)


@BACKENDS
def test_freed_memory_is_an_error_and_gradients_of_a_step_cannot_be_shrunk(backend: str) -> None:
    run_apart(memory_taken_from, backend)


def gradients_not_shrunk(model: nn.Module, step: Callable[..., Tensor], x: Tensor) -> None:
    step(x)
    gradient = next(model.parameters()).grad
    assert gradient is not None
    memory = gradient.untyped_storage()
    size = memory.nbytes()
    for num_bytes in (0, size // 2):
        with pytest.raises(RuntimeError, match="not resizable"):
            memory.resize_(num_bytes)
    beside = [torch.zeros(size // 8, dtype=torch.uint8) for _ in range(8)]
    step(x)
    assert not any(map(torch.any, beside))
    assert_same_gradients(model, eagerly(model, x)[0])


MAKING = {
    *("arange", "as_tensor", "empty", "empty_strided", "eye", "frombuffer", "full", "linspace"),
    *("logspace", "ones", "rand", "randint", "randn", "randperm", "scalar_tensor", "tensor"),
    "zeros",
}


def test_whatever_is_made_says_on_which_device() -> None:
    """A default device is the user's: tensors of ours must not follow it."""
    silent = []
    for path in map(pathlib.Path, process.own_files()):
        if path.suffix != ".py" or path.name in ("bench.py", "measure.py"):  # made to measure with
            continue
        silent += [f"{path.name}:{call.lineno}" for call in factory_calls(path)]
    assert not silent


def factory_calls(path: pathlib.Path) -> Iterator[ast.Call]:
    for node in nodes_of(tree_of(path)):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr=name)):
                if name in MAKING and "device" not in {keyword.arg for keyword in node.keywords}:
                    yield node
