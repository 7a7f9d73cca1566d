"""Tensors whose memory is not their numbers, or that are more than numbers, at each door."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from apart import run_apart
from comparing import assert_close, assert_equals_eager, twin
from models import Around, Made, block
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import lazyinline
from lazyinline import CaptureError, CompiledModule, PipelineError, PlanError
from lazyinline.frontend.pipeline import Batch

LAZY: dict[str, Callable[[Tensor], Tensor]] = {
    "negated": torch._neg_view,
    "imaginary part of a conjugate": lambda x: torch.complex(x, -x).conj().imag,
    "transposed and negated": lambda x: torch._neg_view(x.t().contiguous().t()),
    "efficient zeros": lambda x: torch._efficientzerotensor(x.shape),
}


class Named(Tensor):
    """Results are of this class, too."""


class Doubling(Tensor):
    """Holds a tensor, not its numbers; each operator doubles."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = tree_map(lambda x: x.inner if isinstance(x, cls) else x, (args, kwargs or {}))
        result = func(*plain[0], **plain[1])
        return tree_map(lambda x: cls(x * 2) if isinstance(x, Tensor) else x, result)


WATCHING: dict[str, Callable[[Tensor], Tensor]] = {
    "a function of its own": lambda x: x.as_subclass(Named),
    "operators of its own": Doubling,
}


def of(run: Callable[..., Any], **held: Any) -> nn.Module:
    """A function as a model, with what a test lets it hold."""
    return block(run, mark=False)(**held).float()


def net() -> nn.Module:
    return of(lambda self, x: torch.tanh(self.linear(x)) * x)


def make(backend: str) -> tuple[CompiledModule, nn.Module]:
    torch.manual_seed(0)
    model = net()
    return lazyinline.compile(model, backend=backend), twin(model)


def assert_same_kind(found: Tensor, wanted: Tensor) -> None:
    """Compares classes, and the numbers behind them."""
    assert type(found) is type(wanted)
    inner = [x.inner if isinstance(x, Doubling) else x.as_subclass(Tensor) for x in (found, wanted)]
    torch.testing.assert_close(inner[0].detach(), inner[1].detach())


def assert_same_runs(
    compiled: nn.Module,
    expected: nn.Module,
    x: Tensor,
    cotangent: Tensor | None = None,
    hook: Callable[[Tensor], Tensor] | None = None,
) -> None:
    """Output and every gradient, that of the input too, in training and in inference."""
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), expected(x))
    seen = []
    for run in (compiled, expected):
        run.zero_grad()
        start = torch.ones_like(x, requires_grad=True)
        out = run(x if cotangent is None else start * x)
        if hook is not None:
            out.register_hook(hook)
        out.backward(torch.ones_like(out) if cotangent is None else cotangent)
        grads = [start.grad, *(p.grad for p in run.parameters())]
        seen.append([out.detach(), *(g for g in grads if g is not None)])
    assert_close(*([*map(torch.clone, one)] for one in seen))


@pytest.mark.parametrize("kind", LAZY)
def test_inputs_whose_memory_holds_other_numbers_run_the_model_itself(kind: str) -> None:
    compiled, expected = make("eager")
    plain = torch.randn(3, 4)
    for x in (plain, LAZY[kind](plain), plain):
        assert_same_runs(compiled, expected, x)
        assert bool(compiled.last_report.ran_eagerly) == (x is not plain)


def test_results_of_lazy_zeros_are_laid_out_as_in_eager() -> None:
    model = of(lambda self, x: x + x.t().contiguous().t().mul_(2))
    compiled, zeros = lazyinline.compile(model, backend="eager"), torch._efficientzerotensor((3, 4))
    assert compiled(zeros).stride() == model(zeros).stride() == (1, 3)
    assert "lazily conjugated, negated or zero" in compiled.last_report.ran_eagerly


@pytest.mark.parametrize("kind", LAZY)
@pytest.mark.sweep(keep=["eager-imag", "eager-eff"])
def test_cotangents_whose_memory_holds_other_numbers(kind: str, backend: str) -> None:
    compiled, expected = make(backend)
    x, cotangent = torch.randn(3, 4), LAZY[kind](torch.randn(3, 4))
    assert_same_runs(compiled, expected, x, cotangent)
    assert_same_runs(compiled, expected, x, hook=LAZY[kind])  # the same from a hook


@pytest.mark.sweep(keep="eager")
def test_a_cotangent_with_a_function_of_its_own_is_as_in_eager(backend: str) -> None:
    compiled, expected = make(backend)
    assert_same_runs(compiled, expected, torch.randn(3, 4), torch.randn(3, 4).as_subclass(Named))
    with pytest.raises(PlanError, match="Doubling as a cotangent"):
        compiled(torch.ones(3, 4)).backward(Doubling(torch.ones(3, 4)))
    assert_same_runs(compiled, expected, torch.randn(3, 4), torch.randn(3, 4))


@pytest.mark.parametrize("kind", WATCHING)
def test_inputs_whose_class_sees_operators_run_the_model_itself(kind: str) -> None:
    compiled, expected = make("eager")
    plain = torch.randn(3, 4)
    for x in (plain, WATCHING[kind](plain)):
        for grad in (False, True):
            with torch.set_grad_enabled(grad):
                found = compiled(x)
                assert_same_kind(found, expected(x))
    assert type(found).__name__ in compiled.last_report.ran_eagerly
    torch.testing.assert_close(compiled(plain), expected(plain))


@pytest.mark.parametrize("kind", WATCHING)
@pytest.mark.parametrize("is_parameter", [True, False], ids=["parameter", "buffer"])
def test_state_whose_class_sees_operators_runs_the_model_itself_whenever_it_comes(
    kind: str, is_parameter: bool
) -> None:
    model, x = of(lambda self, x: x * self.scale), torch.randn(3, 4)
    model.register_buffer("scale", torch.ones(4))
    compiled = lazyinline.compile(model, backend="eager")
    step = lazyinline.compile_step(nn.Sequential(nn.Linear(4, 4), model), loss_fn=torch.sum)
    torch.testing.assert_close(compiled(x), model(x))
    scale = WATCHING[kind](torch.full((4,), 3.0))
    if is_parameter:
        del model.scale
        scale = nn.Parameter(scale)
    model.scale = scale
    assert_same_kind(compiled(x), model(x))
    assert "scale is a " in compiled.last_report.ran_eagerly
    with pytest.raises(PlanError, match=r"scale is a .*intercepts operators"):
        step(x)


@pytest.mark.sweep(keep="eager")
def test_an_input_that_is_changed_or_returned_stays_the_callers(backend: str) -> None:
    model = of(lambda self, x: x.add_(1) * 2)
    compiled = lazyinline.compile(model, backend=backend)
    returned = lazyinline.compile(of(lambda self, x: (x, x * 2)), backend=backend)
    memory = torch.randn(3, 4)
    for make_input in (lambda m: m, torch._neg_view, lambda m: torch.complex(m, m).conj().imag):
        ours, theirs = make_input(memory.clone()), make_input(memory.clone())
        assert torch.equal(compiled(ours), model(theirs))
        assert torch.equal(ours, theirs)
        assert returned(ours)[0] is ours


def test_what_an_attribute_or_a_global_holds_is_refused_if_its_memory_holds_other_numbers() -> None:
    for make_table in (*LAZY.values(), *WATCHING.values()):
        table = [make_table(torch.randn(3, 4))]
        model = of(lambda self, x: (self.linear(x) * self.table[0]).sum(), table=table)
        for run in (lazyinline.compile(model, fallback="error"), lazyinline.compile_step(model)):
            with pytest.raises((PlanError, CaptureError), match=r"memory|Named"):
                run(torch.ones(3, 4))


@pytest.mark.parametrize("kind", LAZY)
@pytest.mark.sweep(keep="efficient")
def test_batches_of_steps_lie_in_memory_and_those_of_pipelines_in_any(kind: str) -> None:
    plain = torch.randn(4, 4)
    lazy = LAZY[kind](plain)
    step = lazyinline.compile_step(net(), backend="eager", loss_fn=torch.sum)
    step(plain)
    with pytest.raises(PlanError, match=r"lazily .*: hand in what clone\(\) returns"):
        step(lazy)
    parts = [part for (part,) in Batch(((plain,), {}), 2).split((lazy,), {})]
    assert torch.equal(torch.cat(parts), lazy) and not any(p.is_neg() for p in parts)


@pytest.mark.parametrize("kind", WATCHING)
def test_batches_whose_class_sees_operators_are_refused_by_steps_and_pipelines(kind: str) -> None:
    plain = torch.randn(4, 4)
    step = lazyinline.compile_step(net(), backend="eager", loss_fn=torch.sum)
    step(plain)
    with pytest.raises(PlanError, match="class intercepts operators"):
        step(WATCHING[kind](plain))
    with pytest.raises(PipelineError, match="class intercepts operators"):
        Batch(((plain,), {}), 2).split((WATCHING[kind](plain),), {})


@pytest.mark.sweep(keep="eager")
def test_a_loss_that_is_negated_only_in_name(backend: str) -> None:
    imaginary = lambda self, x: (self.weight * x).square().sum().conj().imag  # noqa: E731
    weight, x = nn.Parameter(torch.randn(4, dtype=torch.complex64)), torch.randn(4)
    model = Made(imaginary, weight=weight)
    want = model(x)
    assert want.is_neg()
    loss = lazyinline.compile_step(twin(model), backend=backend)(x)
    assert torch.allclose(loss, want.detach())
    for door in ("step", "compile"):
        assert_equals_eager(twin(model), (x,), calls=1, backend=backend, door=door)  # type: ignore[arg-type]


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


@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta")
@pytest.mark.parametrize("kind", ["sparse", "compressed rows", "mkldnn"])
def test_an_input_without_memory_is_named_by_doors_that_take_whole_models(kind: str) -> None:
    model, x = Around(lambda layers, x: x + x), KINDS[kind]()
    for door in (lazyinline.capture, partial(lazyinline.export_onnx, path="never.onnx")):
        with pytest.raises(CaptureError, match=r"An input is .* has no memory that a kernel"):
            door(model, (x,))


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


# What is compressed has one layout more for each way to do so, and others are of one kind, too.
FURTHER = ("compressed", "quantized by", "meta and", "nested and")
USUAL = [kind for kind in KINDS if not kind.startswith(FURTHER)]


def calls(way: str, kinds: Iterable[str]) -> Iterator[tuple[str, Callable[[], None]]]:
    """Each kind as the first input of a model, and as a later one."""
    doubling, training = Around(lambda _, x: x + x), nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    later = [opened(m, way) for m in (doubling, training) if way != "step" or m is training]
    for _, run in later:
        run(dense())
    for kind in kinds:
        made = KINDS[kind]
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


def held(way: str, how: str, kinds: Iterable[str]) -> Iterator[tuple[str, Callable[[], None]]]:
    for kind in kinds:
        if kind not in ("batched", "not initialized"):
            yield kind, partial(called_holding, KINDS[kind], way, how)


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


def run_calls_and_holding(which: str) -> None:
    torch.manual_seed(0)
    kinds = USUAL if which == "usual" else list(KINDS)
    holding = [*itertools.product(WAYS[:1], HOW), *itertools.product(WAYS[1:], HOW[:1])]
    holding += [("step", "put there later")]
    for way, how in (*((way, "input") for way in WAYS), *holding):
        with torch.set_grad_enabled(way != "no_grad"):
            cases = calls(way, kinds) if how == "input" else held(way, how, kinds)
            for name, case in cases:
                print(way, how, name, flush=True)  # the last one is where the process ended
                case()


@pytest.mark.parametrize("which", ["usual", pytest.param("all", marks=pytest.mark.sweep)])
def test_an_input_or_a_models_tensor_without_memory_runs_eagerly_or_is_refused(which: str) -> None:
    run_apart(run_calls_and_holding, which)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_a_pipelines_batch_without_memory_is_refused(kind: str) -> None:
    batch = Batch(((dense(),), {}), 2)
    with pytest.raises(lazyinline.PipelineError):
        batch.split((KINDS[kind](),), {})


def encoder(**options: Any) -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    layers = nn.TransformerEncoder(layer, 1, **options)
    return of(lambda self, x, hidden: self.layers(x, None, hidden).sum(1), layers=layers).eval()


PADDED = (torch.randn(2, 3, 8), torch.tensor([[False, False, True], [False, True, True]]))


@pytest.mark.parametrize(
    ("is_frozen", "options"),
    [(True, {}), (False, {}), (True, {"enable_nested_tensor": False})],
    ids=["nested", "trained", "not nested"],
)
def test_padding_that_an_encoder_in_eval_takes_out_comes_back_as_zeros(
    is_frozen: bool, options: dict[str, Any]
) -> None:
    model = encoder(**options).requires_grad_(not is_frozen)
    report = assert_equals_eager(model, PADDED, calls=3).told
    assert ("a nested tensor" in report.ran_eagerly) is (is_frozen and not options)
