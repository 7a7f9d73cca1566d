"""Python floats that vary: inputs where they only enter arithmetic, else a program per value."""

import _thread
import copy
import functools
import math
import operator
import pickle
import queue
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import lazyinline
from lazyinline import lazy_inline

VALUES = (0.5, -1.25, 0.1, 3e-40, 1e38, 1e300, 0.0, -0.0, math.inf, math.nan, 2.0, 1.0, 0.3, 0.7)
FEW = (0.5, 0.1, 0.7)


@lazy_inline
class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, scale: float) -> torch.Tensor:
        return self.linear(x) * scale + (1.0 - scale) * x


class Net(nn.Module):
    """Uses numbers as a function says."""

    def __init__(self, use: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Scaled() for _ in range(3))
        self.use = use

    def forward(self, x: torch.Tensor, scale: float = 1.0, more: Any = None) -> torch.Tensor:
        return self.use(self, x, scale, more)


class Small(nn.Module):
    """Uses a number on what one weight gives."""

    def __init__(self, use: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3))
        self.last: Any = None
        self.use = use

    def forward(self, x: torch.Tensor, scale: float) -> torch.Tensor:
        return self.use(x * self.weight, scale, self)


def same(found: Any, expected: Any) -> bool:
    """Whether two tensors have the same bits, but for which not-a-number they hold."""
    if found is None or expected is None:
        return found is expected
    if found.dtype != expected.dtype or found.shape != expected.shape:
        return False
    if found.is_complex():
        found, expected = torch.view_as_real(found), torch.view_as_real(expected)
    nan = expected.isnan()
    signs = torch.equal(found.signbit() & ~nan, expected.signbit() & ~nan)
    return signs and bool((torch.eq(found, expected) | (found.isnan() & nan)).all())


def trained(net: nn.Module, run: Any, args: Sequence[Any]) -> list[Any]:
    """Runs a model or a step; returns what it gives and the gradients."""
    net.zero_grad()
    result = run(*args)
    if not isinstance(run, lazyinline.TrainingStep) and result.requires_grad:
        (result.sum() if not result.is_complex() else result.real.sum()).backward()
    return [result.detach().clone(), *(p.grad for p in net.parameters())]


def entries_of(run: Any) -> list[Any]:
    """Returns the programs of a model or a step."""
    is_step = isinstance(run, lazyinline.TrainingStep)
    return list(run._entries if is_step else vars(run)["_lazyinline_calls"].entries)


def compiled(net: nn.Module, way: str, backend: str) -> Any:
    if way == "step":
        return lazyinline.compile_step(net, loss_fn=torch.sum, backend=backend)
    return lazyinline.compile(net, backend=backend)


def compare(net: nn.Module, way: str, backend: str, calls: list[tuple[Any, ...]]) -> int:
    """Runs calls, which have to give the bits of eager; returns how many programs there are.

    Inductor fuses, so there they have to give the bits of a program for that one call, and what
    eager gives up to rounding.
    """
    run = compiled(net, way, backend)
    for args in calls:
        found, expected = trained(net, run, args), trained(net, net, args)
        if way == "step":
            expected[0] = expected[0].sum()
        if backend == "inductor":
            torch.testing.assert_close(found, expected)
            expected = trained(net, compiled(net, way, backend), args)
        for a, b in zip(found, expected, strict=True):
            assert same(a, b), (args, a, b)
    return len(entries_of(run))


def through_blocks(net: Net, x: torch.Tensor, scale: float, more: Any) -> torch.Tensor:
    for block in net.blocks:
        x = block(x, scale * 0.5)
    return x / 4.0 - scale


def nested(net: Net, x: torch.Tensor, scale: float, more: Any) -> torch.Tensor:
    return net.blocks[0](x, 0.5) * more["weights"][1] + 2 * scale * more["weights"][1]


def checked(net: Net, x: torch.Tensor, scale: float, more: Any) -> torch.Tensor:
    if scale is None or not isinstance(scale, float):
        return x
    return scale * net.blocks[0](x, 0.5)


@pytest.mark.parametrize("use", [through_blocks, nested, checked], ids=lambda use: use.__name__)
@pytest.mark.parametrize("way", ["compile", "step"])
@pytest.mark.sweep(keep="compile-through_blocks")
def test_a_float_that_varies_becomes_an_input(way: str, use: Any) -> None:
    torch.manual_seed(0)
    net, x = Net(use), torch.randn(4, 3)
    calls = [(x, value, {"weights": [1.0, 2 * value]}) for value in VALUES]
    assert compare(net, way, "eager", calls) == 2


@pytest.mark.parametrize("way", ["compile", "step"])
@pytest.mark.sweep(keep="compile")
def test_generated_code_gives_the_same_bits_with_the_float_as_an_input(way: str) -> None:
    torch.manual_seed(0)
    net, x = Net(nested), torch.randn(4, 3)
    calls = [(x, value, {"weights": [1.0, 2 * value]}) for value in (0.5, 0.1, -1.7, 1e38)]
    assert compare(net, way, "inductor", calls) == 2


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, by: Any) -> torch.Tensor:
        ctx.by = by
        return x * (by.scale if isinstance(by, SimpleNamespace) else by)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        by = ctx.by
        return gradient * (by.scale if isinstance(by, SimpleNamespace) else by), None


def catching(x: torch.Tensor, s: float, net: Small) -> torch.Tensor:
    y = x * s
    try:
        if s > 0.6:
            y = y + 1
    except Exception:
        pass
    return y


def catching_an_operator(x: torch.Tensor, s: float, net: Small) -> torch.Tensor:
    try:
        large = bool((torch.full((), s, device="meta") * 0).is_meta) and math.floor(s + 0.4) > 0
    except Exception:
        large = False
    return x + 1 if large else x


def catching_json(x: torch.Tensor, s: float, net: Small) -> torch.Tensor:
    import json

    try:
        text = json.dumps([s])
    except TypeError:
        text = "[0.5]"
    return x * float(text[1:-1])


def in_place(x: torch.Tensor, s: float, net: Small) -> torch.Tensor:
    y = z = x + 0
    y *= s
    return z + 1


def unused_but_told(x: torch.Tensor, s: float, net: Small) -> torch.Tensor:
    return x + 1 if type(s) is float and s > 0.6 else x


def told_by_map(x: torch.Tensor, s: float, net: Small) -> torch.Tensor:
    return x * next(map({float: operator.pos}.get(type(s), math.sqrt), [s]))


def kept(x: torch.Tensor, s: float, net: Small) -> torch.Tensor:
    net.last = s
    return x * net.last


def told_by_a_thread(x: torch.Tensor, s: float, net: Small) -> torch.Tensor:
    with ThreadPoolExecutor(1) as pool:
        large = pool.submit(lambda: bool(torch.ones(()) * s > 0.6)).result()
    return x + 1 if large else x * s


@functools.lru_cache
def cached(s: float) -> float:
    return s * 2.0


def two_kinds(x: torch.Tensor, s: float, net: Small) -> torch.Tensor:
    array = np.array([s, 0.1, 0.2])
    return x * float(array.sum())


def is_large(s: Any) -> bool:
    """What code does that tells a float from what stands for it."""
    return type(s) is float and s > 0.6


def told_by_a_thread_from_the_class(x: torch.Tensor, s: float, net: Small) -> torch.Tensor:
    with ThreadPoolExecutor(1) as pool:
        return x * s + pool.submit(is_large, s).result()


POOL = ThreadPoolExecutor(1)
QUESTIONS: Any = queue.SimpleQueue()
ANSWERS: Any = queue.SimpleQueue()


def answer() -> None:
    while True:
        ANSWERS.put(is_large(QUESTIONS.get()))


def told_by_a_queue(x: torch.Tensor, s: float, net: Small) -> torch.Tensor:
    if not any(t.name == "answers" for t in threading.enumerate()):
        threading.Thread(target=answer, name="answers", daemon=True).start()
    QUESTIONS.put(s)
    return x * s + ANSWERS.get()


def told_by_a_bare_thread(x: torch.Tensor, s: float, net: Small) -> torch.Tensor:
    lock, found = _thread.allocate_lock(), []
    lock.acquire()
    _thread.start_new_thread(lambda: (found.append(is_large(s)), lock.release()), ())
    lock.acquire()
    return x * s + found[0]


LARGER = functools.partial(operator.lt, 0.6)
KIND_OF = type


def told_by_size(x: torch.Tensor, s: float, net: Small) -> torch.Tensor:
    ask = LARGER if sys.getsizeof(s) == sys.getsizeof(0.5) else callable
    return x * s + ask(s)


HOSTILE: dict[str, Callable[..., Any]] = {
    "comparison": lambda x, s, net: x * s if s > 0.4 else x + s,
    "equality": lambda x, s, net: x if s == 1.0 else x * s,
    "truth": lambda x, s, net: x * (s or 1.0),
    "membership": lambda x, s, net: x + s if s in (0.1, 0.5) else x,
    "dictionary": lambda x, s, net: x * {0.5: 2.0}.get(s, 1.0),
    "cache": lambda x, s, net: x * cached(s),
    "minimum": lambda x, s, net: x * min(s, 0.4),
    "negative": lambda x, s, net: x * -s,
    "rounded": lambda x, s, net: x * round(s, 0),
    "shape": lambda x, s, net: x[: int(s * 4)].sum() + x,
    "math": lambda x, s, net: x * math.sqrt(s),
    "text": lambda x, s, net: x * float(f"{s:.1f}"),
    "hex": lambda x, s, net: x * float.fromhex(s.hex()),
    "pickled": lambda x, s, net: x * pickle.loads(pickle.dumps(s)),
    "sum of numbers": lambda x, s, net: x * sum([0.1, s, 1e-17, 0.2]),
    "reciprocal": lambda x, s, net: x * (1.0 / s),
    "power": lambda x, s, net: x.abs() ** s,
    "power of a number": lambda x, s, net: x * s**2,
    "numpy root": lambda x, s, net: x * float(np.sqrt(s)),
    "numpy product": lambda x, s, net: x * float(np.float32(1.1) * s),
    "numpy scalar": lambda x, s, net: x * (np.float32(1.1) * s),
    "numpy array": two_kinds,
    "tensor": lambda x, s, net: x * torch.tensor(s),
    "full": lambda x, s, net: x * torch.full((3,), s),
    "where": lambda x, s, net: torch.where(x > 0, x, s),
    "threshold": lambda x, s, net: x * (x > s),
    "clamp": lambda x, s, net: x.clamp(min=s),
    "alpha": lambda x, s, net: torch.add(x, x, alpha=s),
    "slope": lambda x, s, net: functional.leaky_relu(x, s),
    "layer norm": lambda x, s, net: functional.layer_norm(x, (3,), eps=s),
    "custom function": lambda x, s, net: Double.apply(x, s),
    "object in a custom function": lambda x, s, net: Double.apply(x, SimpleNamespace(scale=s)),
    "type": lambda x, s, net: x * (2.0 if type(s) is float and s > 0.4 else s),
    "type alone": unused_but_told,
    "type in a table": told_by_map,
    "value of a literal times it": lambda x, s, net: x * (torch.tensor(2.0) * s).item(),
    "literal times it compared": lambda x, s, net: x + 1 if torch.tensor(1.0) * s > 0.6 else x * s,
    "literal times it equal": lambda x, s, net: (
        x + torch.equal(torch.tensor(1.0) * s, torch.tensor(0.7)) + x * s
    ),
    "shape of a literal times it": lambda x, s, net: (
        x * s + torch.nonzero(torch.tensor([1.0]) * s > 0.6).shape[0]
    ),
    "literals chosen by it": lambda x, s, net: (
        x * s + torch.tensor([1.0])[torch.tensor([1.0]) - s < 0.4].shape[0]
    ),
    "class in a literal": lambda x, s, net: x * s + torch.tensor({float: 1.0}.get(type(s), 2.0)),
    "class in a table of functions": lambda x, s, net: (
        x * s + {float: LARGER}.get(type(s), callable)(s)
    ),
    "class by another name": lambda x, s, net: x * s + {float: LARGER}.get(KIND_OF(s), callable)(s),
    "class by a default": lambda x, s, net, kind=type: (
        x * s + {float: LARGER}.get(kind(s), callable)(s)
    ),
    "class derived from another": lambda x, s, net: (
        x * s + [callable, LARGER][issubclass(type(s), float)](s)
    ),
    "size of the object": told_by_size,
    "value told by a thread": told_by_a_thread,
    "class told by a thread": told_by_a_thread_from_the_class,
    "class told by a thread that runs": lambda x, s, net: x * s + POOL.submit(is_large, s).result(),
    "class told through a queue": told_by_a_queue,
    "class told by a bare thread": told_by_a_bare_thread,
    "identity": lambda x, s, net: x + 1 if s is FEW[2] else x * s,
    "error caught": catching,
    "error of an operator caught": catching_an_operator,
    "error of a library caught": catching_json,
    "in place": in_place,
    "kept by the model": kept,
}


# What a number decides it decides without a derivative too; these have one that uses it.
DERIVED = ("custom function", "object in a custom function", "in place", "power", "where")


@pytest.mark.parametrize("what", HOSTILE)
@pytest.mark.sweep(keep=["comparison", "type alone"])
def test_a_float_that_does_anything_else_gets_a_program_per_value(what: str) -> None:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        net, calls = Small(HOSTILE[what]), [(torch.randn(4, 3), value) for value in FEW]
        net.requires_grad_(what in DERIVED)
        assert compare(net, "compile", "eager", calls) in (0, len(FEW))  # 0: it runs itself
    assert net.last is None or type(net.last) is float


@pytest.mark.parametrize(
    "dtype", [*(torch.float16, torch.bfloat16, torch.float64), torch.int64, torch.bool]
)
@pytest.mark.parametrize("scalar", ["vector", "0-d"])
@torch.no_grad()
@pytest.mark.sweep(keep="vector-dtype4")
def test_a_number_enters_each_dtype_with_the_bits_of_eager(dtype: torch.dtype, scalar: str) -> None:
    uses: list[Callable[..., Any]] = [
        lambda x, s, net: (s * net.other, net.other * (s * 0.3), net.other / s, s / net.other),
        lambda x, s, net: (net.other + s, s - net.other, net.other - (1 - s)),
    ]
    torch.manual_seed(0)
    other = (torch.randn(3) * 5 if scalar == "vector" else torch.tensor(3.7)).to(dtype)
    for use in uses[:1] if dtype == torch.bool else uses:  # masks cannot be subtracted
        net = Small(use)
        net.register_buffer("other", other)
        run, x = lazyinline.compile(net, backend="eager"), torch.randn(4, 3)
        is_open = dtype not in (torch.float16, torch.bfloat16) or use is uses[0]
        for value in VALUES if is_open else FEW:
            for a, b in zip(run(x, value), net(x, value), strict=True):
                assert same(a, b), (value, a, b)
        assert len(entries_of(run)) == (2 if is_open else len(FEW))


@pytest.mark.sweep
def test_complex_tensors_and_autocast_give_the_bits_of_eager() -> None:
    net = Small(lambda x, s, net: torch.complex(x, x) * s)
    calls = [(torch.randn(4, 3), value) for value in FEW]
    compare(net, "compile", "eager", calls)
    with torch.autocast("cpu", torch.bfloat16):
        compare(Small(lambda x, s, net: (x @ x.T) * s), "compile", "eager", calls)


def test_errors_of_python_arithmetic_are_those_of_eager() -> None:
    net, x = Small(lambda x, s, net: x / s + x * (2.0 / (1.0 - s))), torch.randn(4, 3)
    run = lazyinline.compile(net, backend="eager")
    run(x, 0.5)
    run(x, 0.3)
    with pytest.raises(Exception, match="division by zero"):
        run(x, 1.0)


@pytest.mark.sweep
def test_a_forward_in_flight_keeps_its_number() -> None:
    net, x = Net(through_blocks), torch.randn(4, 3)
    compiled = lazyinline.compile(net, backend="inductor")
    losses = [compiled(x, value).sum() for value in (0.5, 0.1, 0.3)]
    (found,) = torch.autograd.grad(losses[1], [net.blocks[0].linear.weight])
    (expected,) = torch.autograd.grad(net(x, 0.1).sum(), [net.blocks[0].linear.weight])
    torch.testing.assert_close(found, expected)


class Averaging(nn.Module):
    """Blocks that are given two numbers, and keep an average by one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(AveragingBlock() for _ in range(3))

    def forward(self, x: torch.Tensor, scale: float, share: float = 0.25) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, scale, share)
        return functional.gelu(x) / scale


@lazy_inline
class AveragingBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: torch.Tensor, scale: float, share: float) -> torch.Tensor:
        h = torch.tanh(self.linear(x) * scale) + x * (1.0 - share)
        with torch.no_grad():
            self.mean.copy_(self.mean * share + h.mean(0) * (1 - share))
        return h - scale * h * share


def like_eager(
    run: Any, net: nn.Module, ref: nn.Module, calls: Sequence[Any], parts: int = 1
) -> None:
    """Compares results, gradients and buffers of calls with eager, and after steps in between."""
    optimizers = [torch.optim.SGD(m.parameters(), lr=1e-3) for m in (net, ref)]
    for x, *numbers in calls:
        ref.zero_grad()
        net.zero_grad()
        found = run(x, *numbers)
        losses = []
        for part in x.chunk(parts):
            result = ref(part, *numbers)
            (result.sum() / parts).backward()
            losses.append(result.detach())
        expected = losses[0]
        if isinstance(run, lazyinline.TrainingStep):
            expected = torch.stack([loss.sum() for loss in losses]).mean()
        else:
            found.sum().backward()
        pairs = [(found.detach(), expected), *zip(net.buffers(), ref.buffers(), strict=True)]
        pairs += [(p.grad, q.grad) for p, q in zip(net.parameters(), ref.parameters(), strict=True)]
        for a, b in pairs:
            if parts == 1:
                assert same(a, b), (numbers, a, b)
            else:
                torch.testing.assert_close(a, b)
        for optimizer in optimizers:
            optimizer.step()


def as_it_runs(net: nn.Module, way: str, **options: Any) -> Any:
    if way == "step":
        return lazyinline.compile_step(net, loss_fn=torch.sum, backend="eager", **options)
    return lazyinline.compile(net, backend="eager", **options)


@pytest.mark.parametrize(
    ("way", "options"),
    [
        ("compile", {"recompute": "selective"}),
        ("compile", {"reuse": "off"}),
        ("step", {"recompute": "full"}),
        ("step", {"reuse": "auto"}),
    ],
    ids=str,
)
@pytest.mark.sweep(keep="step-{'recompute'")
def test_numbers_are_inputs_with_every_option(way: str, options: Any) -> None:
    torch.manual_seed(0)
    net, x = Averaging(), torch.randn(4, 3)
    ref, run = copy.deepcopy(net), as_it_runs(net, way, **options)
    calls = [(x, a, b) for a, b in zip((0.5, 0.1, 1.0, -0.7), (0.25, 0.5, 0.0, 1.0), strict=True)]
    like_eager(run, net, ref, calls)
    assert len(entries_of(run)) == 2


@pytest.mark.parametrize("order", ["forward_first", "one_by_one"])
@pytest.mark.sweep
def test_all_micro_batches_get_the_number(order: str) -> None:
    torch.manual_seed(0)
    net, x = Averaging(), torch.randn(4, 3)
    ref, run = copy.deepcopy(net), as_it_runs(net, "step", micro_batches=2, order=order)
    like_eager(run, net, ref, [(x, value) for value in (0.5, 0.1, 1.0, -0.7)], parts=2)
    assert len(entries_of(run)) == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.sweep(keep="dtype0")
def test_gradients_of_each_dtype_have_the_bits_of_eager(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    net, x = Small(lambda x, s, net: torch.tanh(x * s) * (0.3 * s) / s).to(dtype), torch.randn(4, 3)
    run = as_it_runs(net, "compile")
    for value in VALUES:
        given = (x.to(dtype), value)
        found = trained(net, run, given)
        assert all(map(same, found, trained(net, net, given))), value
    assert len(entries_of(run)) == 2


@pytest.mark.parametrize("dynamic", [None, True, False])
@pytest.mark.sweep
def test_numbers_and_sizes_that_both_vary_give_the_bits_of_eager(dynamic: bool | None) -> None:
    torch.manual_seed(0)
    net = Averaging()
    ref, run = copy.deepcopy(net), as_it_runs(net, "compile", dynamic=dynamic)
    xs = [torch.randn(size, 3) for size in ((4, 5) if dynamic is False else (4, 5, 7))]
    values = (0.5, 0.1, -0.7)
    like_eager(run, net, ref, [(x, value) for value in values for x in xs])


@pytest.mark.sweep
def test_a_number_of_two_values_keeps_sizes_that_vary_symbolic() -> None:
    torch.manual_seed(0)
    net = Small(lambda x, s, net: torch.tanh(x) * s)
    net.weight = nn.Parameter(torch.randn(3))
    run = as_it_runs(net, "compile")
    for value in (0.5, 0.1):
        for size in (4, 5, 7, 9, 11):
            x = torch.randn(size, 3)
            assert same(run(x, value).detach(), net(x, value).detach())
    assert run.last_report.num_compiles == 4  # for each, one for its size and one for all
    assert run.last_report.num_links == 6


@pytest.mark.sweep
def test_one_number_may_decide_while_another_is_an_input() -> None:
    torch.manual_seed(0)
    net = Net(lambda net, x, s, more: net.blocks[int(more > 0.5)](x, s))
    calls = [(torch.randn(4, 3), value, more) for value in FEW for more in (0.25, 0.75)]
    assert compare(net, "compile", "eager", calls) == 4  # the first, and when only one had varied


@pytest.mark.sweep
def test_only_floats_are_taken_for_floats() -> None:
    class Derived(float):
        pass

    torch.manual_seed(0)
    net, x = Small(lambda x, s, net: x * s + (1 - s)), torch.randn(4, 3)
    run = as_it_runs(net, "compile")
    kinds: tuple[Callable[[float], Any], ...] = (float, int, bool, Derived, np.float64, np.float32)
    for value in (2.0, 0.5, 0.0):
        for kind in kinds:
            given = (x, kind(value))
            assert all(map(same, trained(net, run, given), trained(net, net, given))), given


@pytest.mark.sweep
def test_an_equal_computation_is_one_input_and_blocks_that_get_it_share() -> None:
    net, x = Net(through_blocks), torch.randn(4, 3)
    run = as_it_runs(net, "compile")
    for value in FEW:
        run(x, value)
    entry = entries_of(run)[0]
    assert len(entry._numbers) == 3  # the number, its half, and one less that
    # The first is given what wants no gradient, the second what does.
    assert [d.shared for d in run.last_report.decisions] == [False, False, True]


def test_a_program_without_floats_computes_no_numbers() -> None:
    net, x = Net(lambda net, x, s, more: net.blocks[0](x, 0.5)), torch.randn(4, 3)
    run = as_it_runs(net, "compile")
    run(x)
    (entry,) = entries_of(run)
    calls: list[Any] = []

    def count(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            calls.append(frame.f_code.co_filename)

    sys.setprofile(count)
    try:
        run(x)
    finally:
        sys.setprofile(None)
    assert not entry._numbers
    own = ("float_inputs", "varying_floats", "open_numbers", "python_path")
    assert not [name for name in calls if any(part in name for part in own)]
