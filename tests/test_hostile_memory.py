"""Memory that is taken away, shrunk or moved, and default devices: an error, or eager's numbers."""

import ast
import pathlib
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from apart import run_apart
from comparing import assert_close, assert_same_gradients, twin
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


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def made() -> tuple[Net, Tensor]:
    torch.manual_seed(0)
    return Net(), torch.randn(4, WIDTH)


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


def assert_right(
    model: nn.Module, compiled: Callable[..., Tensor], step: Callable[..., Tensor], x: Tensor
) -> None:
    expected = twin(model)
    expected.zero_grad()
    loss = expected(x)
    loss.backward()
    model.zero_grad()
    found = compiled(x)
    found.backward()
    assert_close(found, loss)
    assert_same_gradients(model, expected)
    model.zero_grad()
    assert_close(step(x), loss.detach())
    assert_same_gradients(model, expected)


def memory_taken_from(backend: str) -> None:
    model, x = made()
    compiled = lazyinline.compile(model, backend=backend)
    step = lazyinline.compile_step(model, backend=backend)
    assert_right(model, compiled, step, x)
    named = {**dict(model.named_parameters()), **dict(model.named_buffers()), "": x}
    for name in ("blocks.1.linear.weight", "blocks.0.scale", ""):
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
    expected = twin(model)
    expected.zero_grad()
    expected(x).backward()
    assert_same_gradients(model, expected)
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
    expected = twin(model)
    expected.zero_grad()
    expected(x).backward()
    step(x)
    assert not any(map(torch.any, beside))
    assert_same_gradients(model, expected)


class Made(nn.Module):
    """Its forward makes a tensor on the default device."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Net()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.inner(x) * 2.5, torch.ones(3)


def other_default_device(backend: str) -> None:
    model, x = made()
    compiled = lazyinline.compile(model, backend=backend)
    step = lazyinline.compile_step(model, backend=backend, micro_batches=2)
    with torch.device("meta"):
        assert_right(model, compiled, step, x)
    torch.set_default_device("meta")
    assert_right(model, compiled, step, x)
    torch.set_default_device(None)
    model = Made()  # type: ignore[assignment]
    compiled = lazyinline.compile(model, backend=backend)
    for device in ("meta", "cpu", "meta"):
        with torch.device(device):
            for found, want in zip(compiled(x), model(x), strict=True):
                assert found.device == want.device
                if not found.is_meta:
                    assert_close(found, want)


@pytest.mark.sweep
@BACKENDS
def test_another_default_device_changes_nothing_but_what_the_forward_makes(backend: str) -> None:
    run_apart(other_default_device, backend)


MAKING = re.compile(
    r"torch\.(arange|as_tensor|empty|empty_strided|eye|frombuffer|full|linspace|logspace|ones|rand|randint"
    r"|randn|randperm|scalar_tensor|tensor|zeros)"
)


def test_whatever_is_made_says_on_which_device() -> None:
    """A default device is the user's: tensors of ours must not follow it."""
    silent = []
    for path in process.own_files():
        if path.suffix != ".py" or path.name in ("bench.py", "measure.py"):  # made to measure with
            continue
        silent += [f"{path.name}:{call.lineno}" for call in factory_calls(path)]
    assert not silent


def factory_calls(path: pathlib.Path) -> Iterator[ast.Call]:
    for node in ast.walk(ast.parse(path.read_text())):
        makes = isinstance(node, ast.Call) and MAKING.fullmatch(ast.unparse(node.func))
        if makes and "device" not in {keyword.arg for keyword in node.keywords}:
            yield node
