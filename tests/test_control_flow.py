"""Control flow: bodies are closures, and numbers are those of the same written in plain Python."""

import copy
import signal
from collections.abc import Callable
from typing import Any

import onnxruntime
import pytest
import torch
from comparing import relative_error
from models import Stack
from torch import Tensor, nn
from torch._higher_order_ops import scan, while_loop
from torch._higher_order_ops.map import map as torch_map

import lazyinline
from lazyinline import CaptureError, lazy_inline
from lazyinline.reuse.ir.parser import parse_program
from lazyinline.reuse.ir.printer import format_program

D = 8


class Operators:
    """PyTorch's operators."""

    cond, scan, map, while_loop = map(staticmethod, (torch.cond, scan, torch_map, while_loop))


class Plain:
    """The same in Python, which autograd follows as it runs: eager's would start Dynamo."""

    @staticmethod
    def cond(flag: Tensor, if_true: Any, if_false: Any, operands: Any) -> Any:
        return (if_true if flag else if_false)(*operands)

    @staticmethod
    def scan(step: Any, init: Any, xs: Any, reverse: bool = False) -> Any:
        rows: Any = [None] * len(xs)
        for i in reversed(range(len(xs))) if reverse else range(len(xs)):
            init, rows[i] = step(init, xs[i])
        if isinstance(rows[0], tuple):
            return init, tuple(map(torch.stack, zip(*rows, strict=True)))
        return init, torch.stack(rows)

    @staticmethod
    def map(step: Any, xs: Tensor, *given: Any) -> Tensor:
        return torch.stack([step(x, *given) for x in xs])

    @staticmethod
    def while_loop(test: Any, step: Any, carried: Any) -> Any:
        while test(*carried):
            carried = step(*carried)
        return carried


class Block(nn.Module):
    """What tests write a forward for: ``forward_of(flow, self, x)``."""

    flow: Any = Operators

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(D, D), nn.Linear(D, D)


def block_of(forward: Callable[..., Any]) -> type[Block]:
    """Returns a marked block class with a forward."""
    body = {"forward": lambda self, x: forward(self.flow, self, x)}
    return lazy_inline(type("Chosen", (Block,), body))


def stack(forward: Callable[..., Any], number: int = 2) -> tuple[nn.Module, nn.Module]:
    """Returns a model of such blocks, and its twin in plain Python."""
    torch.manual_seed(0)
    kind = block_of(forward)
    ours = Stack(*(kind() for _ in range(number)))
    theirs = copy.deepcopy(ours)
    for module in theirs.modules():
        module.flow = Plain  # type: ignore[assignment]
    return ours, theirs


def batch(sign: int = 1, rows: int = 6) -> Tensor:
    return sign * torch.rand(rows, 3, D, generator=torch.Generator().manual_seed(1))


def assert_near(have: Tensor | None, want: Tensor | None) -> None:
    """Compares gradients; of a body that did not run they are zeros, and in plain Python none."""
    if have is not None:
        want = torch.zeros_like(have) if want is None else want
        is_nothing = bool(want.eq(0).all() and have.abs().max() < 1e-6)
        assert is_nothing or relative_error(have, want) <= 2e-6
    assert (have is None) <= (want is None)


def chosen(flow: Any, m: Any, x: Tensor) -> Any:
    return x + flow.cond(
        x.mean() > 0, lambda x: torch.tanh(m.a(x)), lambda x: torch.sin(m.b(x)) * 2, (x,)
    )


def stepping(advance: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Any]:
    """Returns a step of a scan that carries on, and keeps, what is made of its state and a row."""

    def step(h: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        h = advance(h, row)
        return h, h.clone()

    return step


def start(x: Tensor) -> Tensor:
    return torch.zeros(x.shape[1:])


def scanned(flow: Any, m: Any, x: Tensor) -> Any:
    h, rows = flow.scan(stepping(lambda h, row: torch.tanh(m.a(row) + m.b(h))), start(x), x)
    return x + rows * h


def scanned_backwards(flow: Any, m: Any, x: Tensor) -> Any:
    def step(h: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.sin(m.a(row) * h)
        return h, h * 2

    return x - flow.scan(step, x[0] + 1, x, reverse=True)[1]


def mapped(flow: Any, m: Any, x: Tensor) -> Any:
    return x + flow.map(lambda row, s: torch.tanh(m.a(row)) * s, x, x.mean())


def looped(flow: Any, m: Any, x: Tensor) -> Any:
    def test(i: Tensor, x: Tensor) -> Tensor:
        return i < 4

    def step(i: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return i + 1, torch.tanh(m.a(x))

    return x + flow.while_loop(test, step, (torch.zeros((), dtype=torch.int64), x))[1]


def never_looped(flow: Any, m: Any, x: Tensor) -> Any:
    return x + flow.while_loop(lambda x: x.sum() > 1e9, lambda x: (m.a(x),), (x,))[0]


def swapped(flow: Any, m: Any, x: Tensor) -> Any:
    """Two carried values change places, and a row is an operand as it came."""

    def step(carried: Any, row: Tensor) -> Any:
        a, b = carried
        return (b.clone(), a * 0.5 + m.a(row)), (row.clone(), b.clone())

    (a, b), (rows, others) = flow.scan(step, (x[0] * 2, x[1] * 3), x)
    return x + a - b + rows * others


def chosen_in_a_scan(flow: Any, m: Any, x: Tensor) -> Any:
    def advance(h: Tensor, row: Tensor) -> Any:
        large = row.sum() > 10
        return flow.cond(large, lambda h: torch.tanh(m.a(h)), lambda h: h - m.b(h), (h + row,))

    return x + flow.scan(stepping(advance), start(x), x)[1]


def scanned_in_a_choice(flow: Any, m: Any, x: Tensor) -> Any:
    return flow.cond(x.mean() > 0, lambda x: scanned(flow, m, x), lambda x: m.b(x), (x,))


def chained(flow: Any, m: Any, x: Tensor) -> Any:
    """The second scan takes what the first one gives: pytorch#153679."""
    h, rows = flow.scan(stepping(lambda h, row: torch.tanh(m.a(row) + h)), start(x), x)
    return flow.scan(stepping(lambda h, row: torch.tanh(m.b(row) * h)), h, rows)[1]


def with_literals(flow: Any, m: Any, x: Tensor) -> Any:
    def step(h: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(h * torch.tensor(0.5) + m.a(row))
        return h, h * torch.tensor([1.0, 2.0, 3.0]).unsqueeze(1)

    return flow.scan(step, start(x), x)[1]


def saved_with_gaps(flow: Any, m: Any, x: Tensor) -> Any:
    """A step whose backward needs every other column, which cannot be a row of a dense stack."""

    def advance(h: Tensor, row: Tensor) -> Tensor:
        y = m.a(row)[:, ::2] * torch.sin(m.b(h)[:, 1::2])
        return torch.cat((y, y * y), 1)

    return x + flow.scan(stepping(advance), x[0] + 1, x)[1]


TRAINED: dict[str, Callable[..., Any]] = {
    f.__name__: f
    for f in (
        *(chosen, scanned, scanned_backwards, mapped, swapped, chosen_in_a_scan),
        *(scanned_in_a_choice, chained, with_literals, saved_with_gaps),
    )
}
INFERRED = {**TRAINED, "looped": looped, "never_looped": never_looped}


@pytest.mark.parametrize("name", INFERRED)
@pytest.mark.sweep(
    keep=["-looped", *(f"eager-{name}]" for name in ("chosen", "mapped", "never_looped"))]
)
def test_an_inference_is_eagers(name: str, backend: str) -> None:
    ours, theirs = stack(INFERRED[name])
    compiled = lazyinline.compile(ours, backend=backend, fallback="error")
    with torch.no_grad():
        for x in (batch(), batch(-1)):
            assert relative_error(compiled(x), theirs(x)) <= 1e-6
    assert not compiled.last_report.ran_eagerly


@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.sweep(keep=["eager", "inductor-saved"])
def test_every_gradient_is_eagers(name: str, backend: str) -> None:
    ours, theirs = stack(TRAINED[name])
    compiled = lazyinline.compile(ours, backend=backend, fallback="error")
    for x in (batch(), batch(-1)):
        found = []
        for run, model in ((compiled, ours), (theirs, theirs)):
            model.zero_grad()
            start = x.clone().requires_grad_()
            out = run(start)
            (out.square().mean() + out.sum()).backward()
            found.append([out, start.grad, *(p.grad for p in model.parameters())])
        for have, want in zip(*found, strict=True):
            assert_near(have, want)
    assert not compiled.last_report.ran_eagerly


@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.sweep(keep="[chosen]")
def test_a_training_step_is_eagers(name: str) -> None:
    ours, theirs = stack(TRAINED[name])
    options: Any = {"loss_fn": lambda out: out.square().mean(), "micro_batches": 2}
    step = lazyinline.compile_step(ours, backend="eager", **options)
    for x in (batch(rows=12), batch(-1, rows=12)):
        theirs.zero_grad()
        losses = [theirs(part).square().mean() for part in x.chunk(2)]
        (sum(losses) / 2).backward()  # type: ignore[union-attr]
        assert relative_error(step(x), sum(losses) / 2) <= 1e-6  # type: ignore[arg-type]
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert_near(p.grad, q.grad)
    assert not step.last_report.unplanned


@pytest.mark.parametrize("name", ["chosen", "scanned", "mapped", "looped"])
def test_equal_blocks_have_one_closure_for_a_body(name: str) -> None:
    ours, _ = stack(INFERRED[name], 8)
    with torch.no_grad():
        program = lazyinline.capture(ours, (batch(),))
    text = format_program(program)
    bodies = {"chosen": 2, "looped": 2}.get(name, 1)
    assert sum(line.startswith("composite closure") for line in text.split("\n")) == 1 + bodies
    assert format_program(parse_program(text)) == text


def test_the_memory_of_a_choice_is_that_of_its_larger_branch() -> None:
    def both(flow: Any, m: Any, x: Tensor) -> Any:
        return flow.cond(x.mean() > 0, lambda x: wide(m, x, 40), lambda x: wide(m, x, 60), (x,))

    def wide(m: Any, x: Tensor, times: int) -> Tensor:
        many = x.repeat(times, 1, 1) @ m.a.weight
        return (many @ m.b.weight).view(times, *x.shape).sum(0)

    def alone(flow: Any, m: Any, x: Tensor) -> Any:
        return wide(m, x, 60)

    peaks = []
    for forward in (both, alone):
        ours, theirs = stack(forward, 1)
        compiled = lazyinline.compile(ours, fallback="error")
        with torch.no_grad():
            for x in (batch(), batch(-1)):
                assert relative_error(compiled(x), theirs(x)) <= 1e-6
        peaks.append(compiled.last_report.peak_bytes)
    assert peaks[0] <= 1.01 * peaks[1] + 256


def test_one_body_is_compiled_whatever_the_number_of_steps() -> None:
    counts = []
    for rows in (4, 64):
        ours, theirs = stack(scanned, 1)
        compiled = lazyinline.compile(ours, backend="eager", fallback="error")
        x = batch(rows=rows)
        assert relative_error(compiled(x), theirs(x)) <= 1e-6
        counts.append(compiled.last_report.num_nodes)
    assert counts[0] == counts[1]


@pytest.mark.parametrize("name", INFERRED)
@pytest.mark.sweep(keep=["[scanned_backwards", "[looped", "[chosen_in_a_scan"])
def test_onnx_has_it_too(name: str, tmp_path: Any) -> None:
    ours, theirs = stack(INFERRED[name])
    path = str(tmp_path / "model.onnx")
    lazyinline.export_onnx(ours.eval(), (batch(),), path)
    session = onnxruntime.InferenceSession(path)
    with torch.no_grad():
        for x in (batch(), batch(-1)):
            (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
            assert relative_error(torch.from_numpy(found), theirs(x)) <= 1e-5


def test_a_training_of_a_while_loop_names_scan() -> None:
    ours, _ = stack(looped, 1)
    with pytest.raises(CaptureError, match="Use scan"):
        lazyinline.compile_step(ours, loss_fn=torch.sum)(batch())


def endless(flow: Any, m: Any, x: Tensor) -> Any:
    return flow.while_loop(lambda x: x.sum() < 1e9, lambda x: (x * 1,), (x,))[0]


def test_a_loop_without_end_can_be_interrupted() -> None:
    class AlarmError(Exception):
        pass

    def ring(*_: Any) -> None:
        raise AlarmError

    ours, theirs = stack(endless, 1)
    compiled = lazyinline.compile(ours, fallback="error")
    with torch.no_grad():
        compiled(1e9 + batch())
        before = signal.signal(signal.SIGALRM, ring)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        try:
            with pytest.raises(AlarmError):
                compiled(batch())
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        x = 1e9 + batch()
        assert torch.equal(compiled(x), theirs(x))


def leaks(flow: Any, m: Any, x: Tensor) -> Any:
    kept = []

    def keep(x: Tensor) -> Tensor:
        kept.append(x * 2)
        return x + 1

    return flow.cond(x.mean() > 0, keep, lambda x: x, (x,)) + kept[0]


def leaks_a_row(flow: Any, m: Any, x: Tensor) -> Any:
    kept = []

    def step(h: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        kept.append(row)
        return h + m.a(row), h * 1

    return flow.scan(step, x[0] * 1, x)[0] + kept[0]


def leaks_at_the_end(flow: Any, m: Any, x: Tensor) -> Any:
    kept = [x]
    flow.cond(x.mean() > 0, lambda x: kept.append(x * 2) or x * 1, lambda x: x * 3, (x,))
    return kept[-1]


def changes(flow: Any, m: Any, x: Tensor) -> Any:
    y = x * 2
    return flow.cond(x.mean() > 0, lambda x: y.mul_(2) + x, lambda x: x * 1, (x,)) + y


def choosing(if_true: Any, if_false: Any) -> Any:
    return lambda flow, m, x: flow.cond(x.mean() > 0, if_true, if_false, (x,))


@pytest.mark.parametrize(
    ("forward", "why"),
    [
        (choosing(lambda x: x + torch.rand_like(x), lambda x: x * 2), "draws random numbers"),
        *((leak, "Return it from the body") for leak in (leaks, leaks_a_row, leaks_at_the_end)),
        (changes, "in place"),
        (choosing(lambda x: x * 2, lambda x: x.double()), r"returns \(f32.* or \(f64"),
    ],
)
def test_what_no_body_can_do_is_refused_with_its_line(forward: Any, why: str) -> None:
    ours, _ = stack(forward, 1)
    compiled = lazyinline.compile(ours, backend="eager", fallback="error")
    with pytest.raises(CaptureError, match=f"(?s){why}") as error, torch.no_grad():
        compiled(batch())
    assert "test_control_flow.py" in str(error.value)
