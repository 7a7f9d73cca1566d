"""What cannot be captured runs eagerly, between parts of the model that are compiled."""

import copy
import errno
import functools
import inspect
import logging
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from apart import in_threads
from comparing import assert_close, assert_equals_eager, run_once, seed_all
from models import Made
from printed import unfolded
from torch import Tensor, nn
from torch._inductor.exc import InductorError
from torch.utils.checkpoint import checkpoint

import lazyinline
from lazyinline import Budget, CaptureError, PlanError
from lazyinline.autodiff.traces import joint_trace
from lazyinline.backend.kernels import torch_inductor
from lazyinline.frontend.dispatch import model_dispatcher as parts
from lazyinline.reuse.torch_names import CALL_SLOT

WIDTH = 4
Run = Callable[[Any, Tensor], Any]


class Mlp(nn.Module):
    """Can be captured."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.up(x)) * 2)


def part(run: Run, **attributes: Any) -> Any:
    """Returns a module with a linear layer, whose forward a test writes."""
    return Made(run, **{"linear": nn.Linear(WIDTH, WIDTH), **attributes})


def around(between: Run) -> nn.Module:
    """Returns two parts that can be captured, with something between that cannot."""
    seed_all()
    run = lambda self, x: self.second(self.between(self.first(x)))  # noqa: E731
    return Made(run, first=Mlp(), second=Mlp(), between=part(between))


def by_a_mask(module: Any, x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    chosen = x[:, 0] > 0
    out[chosen] = module.linear(x[chosen])
    return out + x


def by_pythons_random_and_an_item(module: Any, x: Tensor) -> Tensor:
    return x * float(np.random.rand()) * x.detach().max().item()


def by_a_sparse_product(module: Any, x: Tensor) -> Tensor:
    return torch.sparse.mm(torch.eye(len(x)).to_sparse(), x)


def by_a_quantized_tensor(module: Any, x: Tensor) -> Tensor:
    return x + torch.quantize_per_tensor(x.detach(), 0.1, 0, torch.qint8).dequantize()


def by_an_operator_that_looks_at_its_window(module: Any, x: Tensor) -> Tensor:
    # Captured whole: it asks for values only where its derivative is traced.
    window = torch.hann_window(8)
    found = torch.stft(x.reshape(-1), 8, 2, window=window, return_complex=True)
    return x + torch.istft(found, 8, 2, window=window, length=x.numel()).reshape(x.shape)


WAYS = (
    *(by_a_mask, by_pythons_random_and_an_item, by_a_sparse_product, by_a_quantized_tensor),
    by_an_operator_that_looks_at_its_window,
)


def assert_trains_like_eager(model: nn.Module, *batches: Any, **options: Any) -> Any:
    """Takes a step of an optimizer for each batch, as eager does; returns the compiled module."""
    return assert_equals_eager(
        model, batches=batches, optimizer=lambda p: torch.optim.SGD(p, 0.001), **options
    ).compiled


def batches(count: int = 3, rows: int = 6) -> list[tuple[Tensor]]:
    seed_all()
    return [(torch.randn(rows, WIDTH),) for _ in range(count)]


def compiled_around(between: Run = by_a_mask, **options: Any) -> Any:
    return lazyinline.compile(around(between), backend="eager", **options)


def by_path(compiled: Any) -> dict[str, Any]:
    return {part.path: part for part in compiled.last_report.parts}


def is_compiled(compiled: Any, *paths: str) -> bool:
    return not any(by_path(compiled)[path].ran_eagerly for path in paths)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.sweep(keep=["by_a_mask-eager", "by_a_sparse_product-eager", "its_window-eager"])
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")  # deprecated in 2.14
def test_what_cannot_be_captured_is_eager_between_compiled_parts(way: Run, backend: str) -> None:
    compiled = assert_trains_like_eager(around(way), *batches(), backend=backend)
    report, found = compiled.last_report, by_path(compiled)
    assert [p for p in found if not found[p].ran_eagerly] == ["first", "second"]
    assert found["first"].num_programs == found["second"].num_programs == 1
    source, line = inspect.getsourcelines(way)
    lines = [f"test_fallback.py:{line + i} {way.__name__}" for i in range(len(source))]
    assert any(text in found["between"].ran_eagerly for text in lines)
    assert any(text in unfolded(report) for text in lines)
    assert "only parts are compiled" in str(report)
    assert "between (Made): runs eagerly" in str(report)


@pytest.mark.filterwarnings("ignore:.*please report it")
def test_a_bug_in_a_pass_is_told_and_the_model_is_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    def trace(*args: Any) -> Any:
        raise ZeroDivisionError("of a bug")

    monkeypatch.setattr(joint_trace, "traced", trace)
    compiled = assert_trains_like_eager(Mlp(), *batches(), backend="eager")
    said = "The pass autodiff failed (ZeroDivisionError: of a bug)"
    assert said in unfolded(compiled.last_report)
    monkeypatch.setenv("LAZYINLINE_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        lazyinline.compile(Mlp(), backend="eager")(*batches()[0])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"fallback": "error"}, "by_a_mask"),
        ({"recompute": Budget(fraction=1)}, r"by_a_mask.*recompute=Budget.* would not hold there"),
    ],
    ids=["asked for", "what was asked of a program would be left out"],
)
def test_what_cannot_be_captured_is_an_error_where(options: dict[str, Any], said: str) -> None:
    with pytest.raises(CaptureError, match=said):
        compiled_around(**options)(*batches()[0])


def test_an_unknown_fallback_is_refused() -> None:
    with pytest.raises(PlanError, match="fallback='python' is unknown"):
        compiled_around(fallback="python")


def test_the_report_is_about_the_newest_call_that_compiled_or_ran_eagerly() -> None:
    compiled = lazyinline.compile(Mlp(), backend="eager")
    (x,) = batches()[0]
    compiled(x)
    newest = compiled.last_report
    torch.vmap(compiled)(x[None])
    assert "torch.func" in compiled.last_report.ran_eagerly
    compiled(x)
    assert compiled.last_report is newest


def test_scripted_modules_run_eagerly() -> None:
    seed_all()
    scripted = torch.jit.trace(nn.Linear(WIDTH, WIDTH), torch.randn(2, WIDTH))
    model = nn.Sequential(Mlp(), scripted)  # a copy of which has parameters that are no leaves
    compiled = lazyinline.compile(model, backend="eager")
    for inputs in batches():
        gradients = []
        for run in (compiled, model):
            model.zero_grad()
            result = run_once(run, inputs, {}, 0)
            gradients.append([result[0], *(p.grad for p in model.parameters())])
        assert_close(*gradients)
    assert "torch.jit" in compiled.last_report.ran_eagerly
    assert is_compiled(compiled, "0")


def test_tensors_whose_memory_holds_other_numbers_run_what_they_are_in() -> None:
    seed_all()
    model = nn.Sequential(Mlp(), Mlp())
    weight = model[1].up.weight
    weight.data = torch._neg_view(weight.data.clone())
    compiled = assert_equals_eager(model, batches=batches()).compiled
    assert "lazily conjugated, negated or zero" in by_path(compiled)["1"].ran_eagerly
    assert is_compiled(compiled, "0")


def test_the_slots_of_modules_are_empty_outside_of_a_call_in_each_thread() -> None:
    model = around(by_a_mask)
    compiled = lazyinline.compile(model, backend="eager")

    def run(number: int) -> None:
        for (x,) in batches(4, rows=4 + number % 2):
            with torch.no_grad():
                assert_close(compiled(x), model(x))

    in_threads(run, 4)
    with pytest.raises(RuntimeError):
        compiled(torch.ones(3, WIDTH + 1))
    assert not any(vars(m).get(CALL_SLOT) for m in model.modules())
    copy.deepcopy(model)(*batches()[0])


class Experts(nn.Module):
    """A mixture of experts as people write it."""

    def __init__(self, count: int = 3) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, count)
        self.experts = nn.ModuleList(Mlp() for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2, -1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, which = torch.where(chosen == number)
            out.index_add_(0, rows, expert(x[rows]) * weights[rows, which, None])
        return out


def layer(module: Any, x: Tensor) -> Tensor:
    x = x + module.mlp(x)
    return x + module.experts(module.norm(x))


def num_lowered(compiled: Any) -> int:
    return len(compiled._lazyinline_calls._compiler.context.kernels)


@pytest.mark.sweep
def test_parts_whose_sizes_keep_changing_run_eagerly_before_long() -> None:
    seed_all()
    model = part(layer, mlp=Mlp(), experts=Experts(), norm=nn.LayerNorm(WIDTH))
    compiled = assert_trains_like_eager(nn.Sequential(model), *batches(12, rows=9))
    changing = [r for p, r in by_path(compiled).items() if ".experts.experts." in p]
    assert all(row.num_programs <= parts.MAX_SHAPES for row in changing)
    assert any("keep changing" in row.ran_eagerly for row in changing)
    lowered = num_lowered(compiled)
    for (x,) in batches(8, rows=11):
        compiled(x)
    assert num_lowered(compiled) <= lowered + 4


def packed(module: Any, x: Tensor, lengths: Tensor) -> Tensor:
    rnn = nn.utils.rnn
    sequence = rnn.pack_padded_sequence(module.mlp(x), lengths, batch_first=True)
    return rnn.pad_packed_sequence(module.rnn(sequence)[0], batch_first=True)[0]


@pytest.mark.sweep
def test_packed_sequences_run_between_compiled_parts() -> None:
    seed_all()
    steps = [(torch.randn(2, 3, WIDTH), torch.tensor(n)) for n in ([3, 2], [3, 1], [2, 2])]
    model = part(packed, mlp=Mlp(), rnn=nn.LSTM(WIDTH, WIDTH, batch_first=True))
    assert is_compiled(assert_trains_like_eager(model, *steps), "mlp")


def doubling(module: Any, x: Tensor) -> Tensor:
    x.mul_(2)
    return torch.sin(x) + module.linear(x)


def halved(module: Any, x: Tensor) -> Tensor:
    """Changes the halves of a tensor in place, one after the other; backward reads both."""
    x = torch.tanh(x)
    return torch.cat([module.part(x[:1]), module.part(x[1:])])


def test_what_eager_cannot_differentiate_runs_eagerly_and_so_does_what_only_eager_can() -> None:
    # Both halves share one version counter: eager says so in backward, but not under checkpoint.
    x = torch.randn(3, WIDTH)
    model = part(halved, part=part(doubling))
    compiled = lazyinline.compile(model, backend="eager")
    assert_close(compiled(x), model(x))
    line = doubling.__code__.co_firstlineno + 1
    assert f"test_fallback.py:{line} doubling" in compiled.last_report.ran_eagerly
    floored = part(lambda m, x: m.linear(x) // 2)
    compiled = lazyinline.compile(floored, backend="eager")
    assert_close(compiled(x), floored(x))
    assert "derivative for aten::floor_divide is not impl" in compiled.last_report.ran_eagerly
    around = part(lambda m, x: x + checkpoint(m.part, x, use_reentrant=False), part=model)
    assert_equals_eager(around, (x,))
    with pytest.raises(CaptureError, match="is changed in place after it was computed"):
        lazyinline.compile_step(around, loss_fn=torch.sum, backend="eager")(x)


class Straight(torch.autograd.Function):
    """Rounds, and lets five times the gradient through."""

    @staticmethod
    def forward(x: Tensor, digits: int = 0) -> Tensor:
        return x.round(decimals=digits)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        return None

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return 5 * gradient, None


kept = Straight.apply


def straight(module: Any, x: Tensor) -> Any:
    """Applies a function that an attribute, the class and a global hold."""
    y = module.mlp(x)
    first, second = module.rounded(y), Straight.apply(y, 1)
    named = {"digits": 1} if torch.__version__ >= "2.13" else {}  # before, eager refuses keywords
    return first, second, kept(y * 3), kept(y, **named)


def penalty(module: Any, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    (slope,) = torch.autograd.grad(module.mlp(x).sum(), x, create_graph=True)
    assert slope.sum() < 1e9
    return slope.square().sum(-1)


def changing(module: Any, x: Tensor) -> Tensor:
    """Changes in place what parts return, a view among it."""
    y = module.mlp(x)
    y[x.detach()[:, 0] > 0] += 1
    left, right = module.heads(y)
    if left.sum() > 1e9:
        return left
    return left.mul(2).add_(right)


def reading(module: Any, x: Tensor) -> Tensor:
    return module.linear(x).tanh() * (1 if module.is_forward else 1.0)


def rerun(module: Any, x: Tensor) -> Tensor:
    """Runs parts in checkpoints, which run them again in the backward: eagerly, both times."""
    y = checkpoint(module.mlp, x, use_reentrant=False)
    assert y.sum() < 1e9
    module.reads.is_forward = True
    y = checkpoint(module.reads, y, use_reentrant=False)
    module.reads.is_forward = False
    return module.heads(y)[0]


@pytest.mark.parametrize("run", [straight, penalty, changing, rerun], ids=lambda run: run.__name__)
def test_derivatives_flow_through_parts_and_what_runs_eagerly_around_them(run: Run) -> None:
    seed_all()
    heads = part(lambda m, x: m.linear(x * 2).tanh().chunk(2, 0))
    parts = {"mlp": Mlp(), "heads": heads, "reads": part(reading)}
    model = part(run, rounded=Straight.apply, **parts)
    compiled = assert_trains_like_eager(model, *batches())
    assert run is not changing or is_compiled(compiled, "heads")
    if run is rerun:
        assert is_compiled(compiled, "heads")
        eager = {one.path: one.ran_eagerly for one in compiled.last_report.parts}
        assert "torch.utils.checkpoint is around it" in eager["mlp"]


FAILURES: dict[str, Callable[[], Exception]] = {
    "SyntaxError: invalid syntax": lambda: InductorError(SyntaxError("invalid syntax"), None),
    "OSError: .*No space left": lambda: OSError(errno.ENOSPC, "No space left on device"),
    "AssertionError": AssertionError,
}


def fail_at_tanh(patch: pytest.MonkeyPatch, error: Callable[[], Exception]) -> None:
    compile_leaf = torch_inductor._compile

    def failing(module: torch.fx.GraphModule) -> Any:
        if any(node.target is torch.ops.aten.tanh.default for node in module.graph.nodes):
            raise error()
        return compile_leaf(module)

    patch.setattr(torch_inductor, "_compile", failing)


def write_no_tanh(patch: pytest.MonkeyPatch) -> None:
    safe = torch_inductor.guarded

    def wrong(source: str, num_threads: int) -> str:
        return safe(source, num_threads).replace("tanh(", "no_such_thing(")

    patch.setattr(torch_inductor, "guarded", wrong)


@pytest.mark.sweep(keep="no_such_thing")
@pytest.mark.parametrize("said", [*FAILURES, "no_such_thing"])
def test_a_closure_that_the_backend_fails_at_is_run_by_pytorch(
    said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if said in FAILURES:
        fail_at_tanh(monkeypatch, FAILURES[said])
    else:
        write_no_tanh(monkeypatch)
    model = nn.Sequential(Mlp(), Mlp(), nn.Tanh())
    x = torch.randn(3, WIDTH)
    expected = copy.deepcopy(model)
    with pytest.warns(UserWarning, match=f"(?s)PyTorch runs its operators.*{said}"):
        report = assert_equals_eager(model, (x,), calls=1, backend="inductor").told
    assert 0 < len(report.eager_kernels) < report.num_kernels
    assert "run operator by operator, @" in str(report)
    with pytest.warns(UserWarning, match="PyTorch runs its operators"):  # nor is it kept on disk
        lazyinline.compile(expected)(x)


class Branches(nn.Sequential):
    """Reads the value of a tensor, itself or in so many of its layers."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x + 1 if x.sum().item() > 0 else x


def branches(num_compiled: int, num_eager: int) -> nn.Module:
    layers = (nn.Linear(WIDTH, WIDTH) for _ in range(num_eager))
    return Branches(*(Mlp() for _ in range(num_compiled)), *layers)


def told(run: Callable[..., Any], num_calls: int, inputs: Iterable[Tensor] = ()) -> list[str]:
    inputs = inputs or (torch.randn(2, WIDTH),)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(num_calls):
            run(*inputs)
    assert all(warning.filename == __file__ for warning in seen)
    return [str(w.message) for w in seen if "runs eagerly" in str(w.message)]


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("layers, share", [((0, 3), ""), ((1, 3), "with 2 of its 5 layers")])
@pytest.mark.sweep(keep=["[layers0--True", "layers-False"])
def test_a_model_of_which_most_runs_eagerly_says_so_once(
    layers: tuple[int, int], share: str, in_place: bool
) -> None:
    model = lazyinline.compile(branches(*layers), backend="eager", in_place=in_place)
    assert told(model, 1) == [], "it may be compiled at the next call"
    (said,) = told(model, 4)
    reason = lazyinline.last_report(model).ran_eagerly
    assert "test_fallback.py" in reason and reason in said
    assert share in said and "fallback='error' makes that an error" in said
    with torch.no_grad():
        assert told(model, 3) == [], "once for each model that was compiled"


@functools.cache
def warn_once(text: str) -> None:
    logging.getLogger("some_library").warning(text)


@functools.lru_cache(maxsize=8)
def warn_at_times(text: str) -> None:
    logging.getLogger("some_library").warning(text)


class Warns(nn.Linear):
    """Warns by a function, and computes its loss."""

    def __init__(self, warn: Callable[[str], None], *, prints: bool = False) -> None:
        super().__init__(8, 8)
        self.warn, self.prints = warn, prints

    def forward(self, x: Tensor) -> Tensor:
        self.warn("a default is used")
        if self.prints:
            print("not a program")
        return super().forward(x).relu().exp().sin().mean()


@pytest.mark.parametrize(
    ("model", "eagerly"),
    [
        (Warns(warn_once), [False] * 3),
        (Warns(lambda text: warn_once(text)), [False] * 3),
        (Warns(warn_at_times), [True, False, False]),
        (Warns(warn_once, prints=True), [True] * 3),
    ],
    ids=["kept", "within", "forgotten", "printing"],
)
@pytest.mark.sweep(keep=["kept", "forgotten", "printing"])
def test_what_is_said_once_is_said_by_the_first_call_which_is_compiled(
    model: nn.Module,
    eagerly: list[bool],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # From handlers of the root the forward would reach pytest's queue of tests, which may change.
    logger, found = logging.getLogger("some_library"), []
    monkeypatch.setattr(logger, "handlers", [caplog.handler])
    monkeypatch.setattr(logger, "propagate", False)
    compiled = lazyinline.compile(model, backend="eager")
    for function in (warn_once, warn_at_times):
        function.cache_clear()
    for rows in (3, 4, 5):
        x = torch.ones(rows, 8)
        torch.testing.assert_close(compiled(x), model(x))
        found.append(bool(compiled.last_report.ran_eagerly))
        assert caplog.messages.count("a default is used") == 1
    assert found == eagerly
    if not any(eagerly):
        assert (compiled.last_report.num_compiles, compiled.last_report.num_links) == (2, 1)
        warn_once.cache_clear()
        lazyinline.compile_step(model, backend="eager")(x)
        assert caplog.messages.count("a default is used") == 2


def test_a_model_with_an_effect_or_a_backward_hook_says_that_it_runs_eagerly() -> None:
    class Printing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            print("rows", len(x))
            return super().forward(x)

    (said,) = told(lazyinline.compile(Printing(WIDTH, WIDTH), backend="eager"), 4)
    assert "prints or logs something at test_fallback.py" in said
    hooked = nn.Linear(WIDTH, WIDTH)
    hooked.register_full_backward_hook(lambda *_: None)
    model = lazyinline.compile(hooked, backend="eager", fallback="error")
    (said,) = told(lambda x: model(x).sum().backward(), 4)
    assert "has a backward hook" in said and "makes" not in said


def tagging(module: Any, x: Tensor, state: Any = None) -> Any:
    """A recurrent network after others, with its hidden state in and out."""
    return module.rnn(module.first(x), state)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (nn.LSTM, {"num_layers": 2, "batch_first": True, "dropout": 0.5}),
        (nn.LSTM, {"proj_size": 2, "bidirectional": True}),
        (nn.GRU, {"bidirectional": True, "bias": False}),
        (nn.RNN, {"nonlinearity": "relu"}),
    ],
    ids=str,
)
@pytest.mark.sweep(keep=["proj_size"])
def test_a_recurrent_network_trains_like_eager(kind: Any, options: dict[str, Any]) -> None:
    seed_all()
    model = part(tagging, first=Mlp(), rnn=kind(WIDTH, WIDTH, **options))
    x = torch.randn(2, 2, WIDTH)
    state = torch.utils._pytree.tree_map(Tensor.detach, model(x)[1])
    compiled = assert_trains_like_eager(model, (x,), (x, state), (x, state))
    assert is_compiled(compiled, "first")
    assert "loops over its steps" in by_path(compiled)["rnn"].ran_eagerly
