"""Forward and Taylor mode of closures: against forward mode inside forward mode, in float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from forward_cases import (
    assert_series,
    captured,
    closure_of,
    compare,
    curves_for,
    derived,
    one_call,
    random_like,
    run_series,
)
from models import Attention, block
from programs import inline_calls, random_arguments, random_program
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lazyinline import PlanError, lazy_inline
from lazyinline.autodiff.forward_mode.jets import Series
from lazyinline.frontend.compiler import Compiler
from lazyinline.frontend.options import Options
from lazyinline.frontend.passes.programs import capture as capture_pass
from lazyinline.frontend.passes.state import Goal, Subject, run
from lazyinline.frontend.sizes.torch_input_sizes import InputSizes
from lazyinline.reuse.ir.leaf import interpret
from lazyinline.reuse.ir.program import (
    Closure,
    Composite,
    Leaf,
    ModelTensor,
    Program,
    walk_closures,
)
from lazyinline.reuse.ir.torch_symbols import Values, module_at, type_at
from lazyinline.reuse.ir.types import TensorType
from lazyinline.reuse.ir.verify import verify

KINDS = [Series(4, 1), Series(2, 2, collapsed=True), Series(3, 6), Series(2, 6, collapsed=True)]


def matrix(*shape: int, seed: int = 0) -> Tensor:
    return random_like(torch.empty(shape, dtype=torch.float64), seed=seed)


X, Y = matrix(3, 4), matrix(3, 4, seed=1)
POSITIVE = X.abs() + 0.5
CUBE = matrix(2, 3, 4, seed=2)

# Functions of x, as text.
UNARY = [
    *("torch.abs(x)", "torch.cos(x)", "torch.cosh(x)", "torch.erf(x)", "torch.exp(x)", "x.expm1()"),
    *("torch.sigmoid(x)", "torch.sin(x)", "torch.sinh(x)", "torch.tan(x / 3)", "torch.tanh(x)"),
    *("F.elu(x, 1.5)", "F.gelu(x)", "F.gelu(x, approximate='tanh')", "F.hardtanh(x)", "F.relu(x)"),
    *("F.leaky_relu(x)", "F.selu(x)", "F.silu(x)", "F.softplus(x, 2, 1)", "-x * x", "x**2"),
    *("x.pow(3)", "x / 3 + 2 / (x * x + 1)", "x.clamp(-0.5, 0.5) * x.clamp(min=0)"),
    *("torch.cat([x, x.sin(), Y], 1)", "x.chunk(2, 1)[1] * x.chunk(2, 1)[0]", "x.cumsum(1).sin()"),
    *("x.diagonal().exp()", "x[:1].expand(3, 4) * x", "x.flip(0) * x", "x.softmax(1)"),
    *("x.gather(1, torch.tensor([[0], [2], [1]])).square()", "x[torch.tensor([2, 0])] * 2"),
    *("x[:, :2] * x[:, 2:].sigmoid()", "F.group_norm(x, 2)", "F.log_softmax(x, 1)", "x.var(1)"),
    *("F.cross_entropy(x, torch.tensor([0, 2, 1]))", "F.mse_loss(x.sin(), Y)", "x.sum() * x"),
    *("x.logsumexp(1) + x.logsumexp(0, keepdim=True).sum()", "x.masked_fill(Y > 0, 2.0).exp()"),
    *("x.mean(1, keepdim=True) * x", "F.pad(x, (1, 0), value=3.0).square()", "x.tril().exp()"),
    *("x.reshape(2, 6).t().sin()", "x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)"),
    *("torch.zeros_like(Y).scatter(1, torch.tensor([[1]] * 3), x.sin())", "x[1] * x[:, 2:].sum()"),
    *("x.split([1, 3], 1)[1].tanh()", "torch.stack([x, Y, x * x], 1)"),
    *("x.unbind(1)[2] * x.unbind(1)[0]",),
    *("torch.where(Y > 0, x.sin(), Y) + torch.where(Y > 0, 1.0, x.square())",),
    # without a rule
    *("x.amax(1)", "torch.atan(x)", "x.cumprod(1)", "x.max(1, keepdim=True)[0] * x", "x.prod(1)"),
    *("torch.linalg.vector_norm(x, dim=1)", "x.sort(1)[0].sin()", "x.std(1)"),
]
OF_POSITIVE = [
    *("torch.log(x)", "torch.log1p(x)", "x**1.7", "x**-2", "torch.reciprocal(x)"),
    *("torch.rsqrt(x)", "torch.sqrt(x)", "2.0**x", "x.pow(x)"),
]
BINARY = [
    *("torch.add(x, y[0], alpha=3)", "torch.addcmul(x, x, y, value=2)", "torch.maximum(x, y)"),
    *("torch.baddbmm(CUBE[:, :, :3], CUBE * x, (CUBE * y).mT, alpha=2)", "x @ y.T", "x @ y[0]"),
    *("(CUBE * x) @ (CUBE * y).mT", "x / (y * y + 1)", "torch.dot(x[0], y[1])", "x * y[:, :1]"),
    *("torch.lerp(x, y, 0.3)", "F.linear(CUBE * x, y, y.sum(1))", "torch.outer(x[0], y[1])"),
    *("torch.rsub(x, y, alpha=2)", "x.sum(0) - y", "torch.einsum('ab,cb->ac', x, y)"),
]


def function_of(text: str) -> Callable[..., Any]:
    function: Callable[..., Any] = eval(f"lambda x, y=None: {text}", globals())
    return function


@pytest.mark.parametrize("series", KINDS, ids=str)
@pytest.mark.parametrize("text", [*UNARY, *OF_POSITIVE])
@pytest.mark.sweep(  # tangents of a product are parts of a larger memory
    keep=[f"[F.gelu(x)-{KINDS[1]}", f"rsqrt(x)-{KINDS[0]}", f"x.prod(1)-{KINDS[1]}"]
)
def test_the_series_of_an_operator(text: str, series: Series) -> None:
    assert_series(function_of(text), [POSITIVE if text in OF_POSITIVE else X], series)


@pytest.mark.parametrize("active", [(True, True), (True, False), (False, True)], ids=str)
@pytest.mark.parametrize("series", KINDS, ids=str)
@pytest.mark.parametrize("text", BINARY)
@pytest.mark.sweep(keep=[f"CUBE * y).mT-{KINDS[1]}-(True, True)"])
def test_series_of_an_operator_of_two(text: str, series: Series, active: tuple[bool, bool]) -> None:
    assert_series(function_of(text), [X, Y], series, active=active)


def layer_norm_by_hand(x: Tensor) -> Tensor:
    rest = x - x.mean(-1, keepdim=True)
    return rest * torch.rsqrt(rest.square().mean(-1, keepdim=True) + 1e-5) * Y[0] + Y[1]


@pytest.mark.parametrize("series", KINDS, ids=str)
@pytest.mark.sweep(keep=[str(KINDS[1])])
def test_series_of_layer_norm_are_right_where_pytorchs_forward_mode_is_not(series: Series) -> None:
    assert_series(
        lambda x: F.layer_norm(x, (4,), Y[0], Y[1]), [X], series, reference=layer_norm_by_hand
    )


def everything(x: Tensor, y: Tensor) -> Tensor:
    """Has an operator of each kind, so that each kind is met where the sweeps are left out."""
    h = F.gelu(x @ y.T).softmax(-1) * torch.tanh(x[:, :3])
    h = torch.where(h > 0, h.exp(), h / (y[:, :3].square() + 1)) - x.mean(1, keepdim=True)
    z = torch.atan(h).sigmoid()
    return torch.cat([h, z], 1).sum(0).rsqrt().log()


@pytest.mark.parametrize("entry", ["curves", "lines"])
@pytest.mark.parametrize("series", [Series(1, 2), *KINDS[1:]], ids=str)
@pytest.mark.sweep(keep=[f"{KINDS[1]}-curves"])
def test_the_series_of_a_function(series: Series, entry: Any) -> None:
    derivative = assert_series(everything, [X, Y], series, entry=entry)
    assert [f.operator for f in derivative.fallbacks] == ["aten.atan.default"]
    assert "everything" in derivative.fallbacks[0].source


def stops_a_value(x: Tensor) -> Tensor:
    return x.sin() * x.detach() + x.square()


def stops_a_region(x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = x.exp()
    return x.square() * scale


def changes_in_place(x: Tensor) -> Tensor:
    y = x * 2
    y[:, 0] = x[:, 1].detach().square()
    return y.add_(x).tanh_()


def rounds(x: Tensor) -> Tensor:
    return x * (x > 0).to(x.dtype) + x.round() * torch.ones_like(x)


def adds_into_a_view(x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    y.view(-1)[2:5] += x.reshape(-1)[:3].exp()
    return y * x


@pytest.mark.parametrize("function", [stops_a_value, changes_in_place, rounds, adds_into_a_view])
def test_what_stops_tangents_and_what_changes_in_place(function: Any) -> None:
    assert_series(function, [X], KINDS[1])


def test_no_grad_stops_tangents_as_it_stops_gradients() -> None:
    def reference(x: Tensor) -> Tensor:  # torch.func.jvp goes through no_grad, and not detach
        return x.square() * x.detach().exp()

    assert_series(stops_a_region, [X], KINDS[1], reference=reference)


def test_one_mask_is_drawn_for_a_value_and_its_series() -> None:
    series = Series(2, 2)
    program, values = captured(nn.Dropout(0.5), [torch.ones(64, 4).double()])
    derivative = derived(closure_of(program), (True,), series)
    rows = [matrix(2, 64, 4, seed=k) for k in (1, 2)]
    torch.manual_seed(3)
    (found,) = run_series(derivative, derivative.closure, values, [rows], series)
    torch.manual_seed(3)
    mask = F.dropout(values[0])
    for actual, wanted in zip(found, [mask, rows[0] * mask, rows[1] * mask], strict=True):
        torch.testing.assert_close(actual, wanted)


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 3


REFUSED: dict[str, Callable[[Tensor], Any]] = {
    "Twice at": lambda x: Twice.apply(x),  # a derivative of its own
    "rrelu.* at": lambda x: torch.rrelu(x, training=True),
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_no_series_follows_is_refused_with_its_line(said: str) -> None:
    with pytest.raises(PlanError, match=rf"{said} test_forward_mode.py:\d+"):
        assert_series(REFUSED[said], [X], Series(1, 1))


@lazy_inline
class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.norm, self.attention = nn.RMSNorm(width), Attention(width)
        self.mlp = nn.Sequential(nn.Linear(width, 8), nn.GELU(), nn.Linear(8, width))

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention(self.norm(x))
        y: Tensor = x + self.mlp(x)
        return y


@pytest.mark.parametrize("series", KINDS, ids=str)
@pytest.mark.sweep(keep=[str(KINDS[1])])
def test_the_series_of_marked_transformer_blocks(series: Series) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(2))).double()
    with sdpa_kernel(SDPBackend.MATH):  # the only one with forward mode in eager
        derivative = assert_series(None, [CUBE], series, model=model)
    assert not derivative.fallbacks
    assert isinstance(derivative.closure, Composite)


def leaves_of(closure: Composite) -> int:
    return sum(isinstance(c, Leaf) for c in walk_closures(closure.program))


def test_equal_blocks_have_one_derived_closure() -> None:
    counts, kind = [], block(lambda self, x: x + self.linear(x).tanh())
    for num in (2, 5):
        program, _ = captured(nn.Sequential(*(kind() for _ in range(num))).double(), [CUBE])
        active = tuple(not isinstance(source, ModelTensor) for source in program.sources)
        derivative = derived(closure_of(program), active, KINDS[1])
        assert isinstance(derivative.closure, Composite)
        counts.append(leaves_of(derivative.closure))
    assert counts[0] == counts[1]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("series", [Series(3, 1), Series(2, 2, collapsed=True)], ids=str)
@pytest.mark.sweep(keep=f"{Series(3, 1)}-1]")
def test_random_programs_have_the_same_series_late_and_early(series: Series, seed: int) -> None:
    program = random_program(seed, structs=False)
    active = tuple(bool((seed + i) % 3) for i in range(len(program.inputs)))
    values = random_arguments(program, seed)
    points = [v for v, flag in zip(values, active, strict=True) if flag]
    curves = iter(curves_for(points, series, "curves"))
    given = [next(curves) if flag else None for flag in active]
    found = []
    for one in (program, inline_calls(program)):
        closure = Composite("main", one)
        derivative = derived(closure, active, series)
        found.append(run_series(derivative, closure, values, given, series))
    for late, early in zip(*found, strict=True):
        for a, b in zip(late, early, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)

    def function(*moved: Tensor) -> tuple[Tensor, ...]:
        rest = iter(moved)
        args = [next(rest) if f else v for v, f in zip(values, active, strict=True)]
        return tuple(interpret(program, args))

    if points:
        rows = [row for row in given if row is not None]
        compare(found[0], function, points, rows, series)


def network(depth: int = 3, width: int = 6) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Linear(2, width), nn.Tanh()]
    for _ in range(depth - 1):
        layers += [nn.Linear(width, width), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(width, 1)).double()


def program_of(closure: Closure) -> Program:
    return closure.program if isinstance(closure, Composite) else one_call(closure)


def test_derivatives_of_a_network_along_a_line() -> None:
    torch.manual_seed(1)
    assert_series(None, [matrix(4, 2)], Series(5, 1), model=network(2), entry="lines")


@pytest.mark.parametrize("function", [torch.linalg.det, torch.linalg.inv], ids=["det", "inv"])
def test_forward_mode_of_pytorch_is_not_nested_where_that_is_wrong(function: Any) -> None:
    def of_square(x: Tensor) -> Any:
        return function(x @ x.T + torch.eye(3).double())

    assert_series(of_square, [X], Series(1, 2))
    if function is torch.linalg.inv:
        assert_series(of_square, [X], Series(2, 1))
        return
    with pytest.raises(PlanError, match=r"_linalg_det.* at test_forward_mode.py:\d+ .*of_square"):
        assert_series(of_square, [X], Series(2, 1))


def test_sizes_may_be_symbols() -> None:
    torch.manual_seed(0)
    model, x, series = network(2), matrix(7, 2), Series(2, 6, collapsed=True)
    sizes = partial(InputSizes, [x], [("n", "")])
    compiler = Compiler(Options(backend="eager", cache="off"))
    subject = Subject(model, (x,), {}, sizes=sizes)
    program = run((capture_pass,), compiler.started(subject, Goal(train=True))).captured.program
    assert program.inputs[0].type.is_symbolic  # type: ignore[union-attr]
    active = tuple(not isinstance(source, ModelTensor) for source in program.sources)
    derivative = derived(closure_of(program), active, series, "lines")
    body = program_of(derivative.closure)
    (call,) = verify(body).calls
    assert isinstance(call.closure, Leaf)
    numbers = Values({program.inputs[0].type.shape[0]: 7})  # type: ignore[union-attr]
    values = [s.tensor.detach() if isinstance(s, ModelTensor) else x for s in program.sources]
    curves = curves_for([x], series, "lines")
    results = module_at(call.closure.module, numbers)(*values, curves[0][0])
    types = [type_at(type_, numbers) for type_ in call.closure.output_types]
    assert [TensorType.of(t) for t in results] == types
    compare([list(results)], model, [x], curves, series)


def test_statistics_of_a_batch_move_and_running_ones_are_written() -> None:
    def reference(x: Tensor) -> Tensor:
        rest = x - x.mean(0)
        return rest * torch.rsqrt(rest.square().mean(0) + 1e-5)

    model = nn.BatchNorm1d(4, affine=False).double()
    derivative = assert_series(None, [X], KINDS[1], model=model, reference=reference)
    assert isinstance(derivative.closure, Composite)
    assert derivative.closure.program.writes
    assert [bool(orders) for orders in derivative.outputs] == [True, False, False, False]
