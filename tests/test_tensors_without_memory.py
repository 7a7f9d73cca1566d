"""Tensors with no strided memory of their own: eager's result or a sentence, and never a crash."""

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from apart import run_apart
from models import Around
from torch import Tensor, nn

import lazyinline
from lazyinline.frontend.pipeline import Batch


def dense() -> Tensor:
    return torch.randn(4, 8)


def nested(**options: Any) -> Tensor:
    return torch.nested.nested_tensor([torch.randn(2, 8), torch.randn(3, 8)], **options)


def escaped() -> Tensor:
    """A tensor of ``vmap``'s, outside of it."""
    seen: list[Tensor] = []
    torch.vmap(lambda x: seen.append(x) or x)(dense())  # type: ignore[func-returns-value]
    return seen[0]


KINDS: dict[str, Callable[[], Tensor]] = {
    "sparse": lambda: dense().to_sparse(),
    "compressed rows": lambda: dense().to_sparse_csr(),
    "compressed columns": lambda: dense().to_sparse_csc(),
    "compressed blocks of rows": lambda: dense().to_sparse_bsr((2, 2)),
    "compressed blocks of columns": lambda: dense().to_sparse_bsc((2, 2)),
    "mkldnn": lambda: dense().to_mkldnn(),
    "quantized": lambda: torch.quantize_per_tensor(dense(), 0.1, 0, torch.qint8),
    "quantized by channel": lambda: torch.quantize_per_channel(
        dense(), torch.ones(4), torch.zeros(4), 0, torch.qint8
    ),
    "nested": nested,
    "nested and jagged": lambda: nested(layout=torch.jagged),
    "meta": lambda: dense().to("meta"),
    "meta and empty": lambda: torch.empty(0, 8, device="meta"),
    "functional": lambda: torch._to_functional_tensor(dense()),
    "not initialized": nn.UninitializedParameter,
    "batched": escaped,
}


WAYS = ("compile", "step", "no_grad")
HOW = ("used", "unused", "in a list", "put there later")


class Holding(nn.Module):
    """Has a tensor of its own, which it uses or not."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.how = how

    def hold(self, tensor: Tensor) -> "Holding":
        if self.how == "in a list":
            self.held = [tensor]
        elif isinstance(tensor, nn.Parameter):
            self.held = tensor
        else:
            self.register_buffer("held", tensor)
        return self

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x)
        if self.how == "unused":
            return y
        held = self.held[0] if self.how == "in a list" else self.held
        return y, held + held


def summed(model: nn.Module) -> nn.Module:
    """Returns a model whose result is a loss."""

    def forward(layers: Any, x: Tensor) -> Tensor:
        y = layers[0](x)
        y = y[0] if isinstance(y, tuple) else y
        return (y if y.layout is torch.strided and not y.is_nested else y.to_dense()).sum()  # type: ignore[no-any-return]

    return Around(forward, model)


def outcome(run: Callable[..., Any], *args: Any) -> Any:
    try:
        return run(*args)
    except Exception as error:  # eager's own
        return error


def plain(result: Any) -> list[Any]:
    """Returns what can be compared of a result: kinds, and numbers where there are some."""
    if isinstance(result, (tuple, list)):
        return [plain(one) for one in result]
    if isinstance(result, Exception):
        return ["an error"]
    facts: list[Any] = [type(result), result.layout, result.is_nested, result.dtype, result.device]
    if result.is_nested:
        return [*facts, *(one.tolist() for one in result.unbind())]
    if result.is_meta:
        return [*facts, result.shape]
    if torch._is_functional_tensor(result):
        result = torch._from_functional_tensor(result)
    result = result.dequantize() if result.is_quantized else result
    return [*facts, result.to_dense().tolist()]


def opened(model: nn.Module, way: str) -> tuple[nn.Module, Any]:
    """Returns a model as it is called by eager, and compiled."""
    if way == "step":
        model = summed(model)
        return model, lazyinline.compile_step(model, backend="eager")
    return model, lazyinline.compile(model, backend="eager")


def calls(way: str) -> Iterator[tuple[str, Callable[[], None]]]:
    """Each kind as the first input of a model, and as a later one."""
    doubling, training = Around(lambda _, x: x + x), nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    later = [opened(m, way) for m in (doubling, training) if way != "step" or m is training]
    for _, run in later:
        run(dense())
    for kind, made in KINDS.items():
        first = opened(training if way == "step" else doubling, way)
        for place, (model, run) in (("first", first), *(("later", pair) for pair in later)):
            yield f"{kind} {place}", partial(called, model, run, made, way)


def called(model: nn.Module, run: Any, made: Callable[[], Tensor], way: str) -> None:
    x = made()
    expected, found = outcome(model, x), outcome(run, x)
    if way == "step":
        assert isinstance(found, lazyinline.PlanError), repr(found)
        assert run(dense()).shape == ()
        return
    assert plain(found) == plain(expected), (found, expected)
    assert "an input is a" in run.last_report.ran_eagerly
    assert run(dense()).shape == (4, 8), "what ran eagerly left all usable"
    assert not run.last_report.ran_eagerly


def held(way: str, how: str) -> Iterator[tuple[str, Callable[[], None]]]:
    for kind, made in KINDS.items():
        if kind not in ("batched", "not initialized"):
            yield kind, partial(called_holding, made, way, how)


def called_holding(made: Callable[[], Tensor], way: str, how: str) -> None:
    x, tensor, model = dense(), made(), Holding("used" if how == "put there later" else how)
    whole, run = opened(model, way)
    if how == "put there later":
        model.hold(dense())
        run(x)
        model.held = tensor
    else:
        model.hold(tensor)
    expected, found = outcome(whole, x), outcome(run, x)
    if isinstance(found, Exception) and not isinstance(expected, Exception):
        said = (lazyinline.CaptureError, lazyinline.PlanError)
        is_meta = tensor.is_meta and "meta device" in str(found)
        assert (way == "step" and isinstance(found, said)) or is_meta, str(found)[:300]
    else:
        assert plain(found) == plain(expected), (found, expected)


def run_calls_and_holding() -> None:
    torch.manual_seed(0)
    holding = [*itertools.product(WAYS[:1], HOW), *itertools.product(WAYS[1:], HOW[:1])]
    holding += [("step", "put there later")]
    for way, how in (*((way, "input") for way in WAYS), *holding):
        with torch.set_grad_enabled(way != "no_grad"):
            for name, case in calls(way) if how == "input" else held(way, how):
                print(way, how, name, flush=True)  # the last one is where the process ended
                case()


def test_an_input_or_a_models_tensor_without_memory_runs_eagerly_or_is_refused() -> None:
    run_apart(run_calls_and_holding)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_a_pipelines_batch_without_memory_is_refused(kind: str) -> None:
    batch = Batch(((dense(),), {}), 2)
    with pytest.raises(lazyinline.PipelineError):
        batch.split((KINDS[kind](),), {})
