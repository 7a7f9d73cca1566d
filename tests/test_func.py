"""Derivatives inside a forward, and `lazyinline.func`: equal PyTorch's, to any order."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from comparing import assert_equals_eager
from models import Made, block, linear
from torch import Tensor, nn
from torch.func import functional_call

import lazyinline
from lazyinline import CompiledModule, PlanError, func
from lazyinline.frontend.func.rows import Jacobian

WIDTH = 8


def tensor(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def network(num_layers: int = 1, results: int = 1) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(2, WIDTH), nn.Tanh()]
    for _ in range(num_layers - 1):
        layers += [nn.Linear(WIDTH, WIDTH), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, results)).double()


def of_forward(forward: Callable[..., Any], net: nn.Module) -> nn.Module:
    """Returns a model whose forward is a function of itself and its input."""
    return block(forward, mark=False)(net=net, linear=None)


@contextlib.contextmanager
def by_pytorch() -> Iterator[None]:
    """Has derivatives of `lazyinline.func` run eagerly; they are not compiled."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("transforms", "rows", "coordinates"):
            patch.setattr(f"lazyinline.frontend.func.{name}.compiled", lambda module: module)
        yield


def used(run: Any, *inputs: Tensor) -> Any:
    with contextlib.nullcontext() if isinstance(run, CompiledModule) else by_pytorch():
        return run(*inputs)


def assert_trains_like_eager(
    model: nn.Module, *inputs: Tensor, backend: str = "eager", steps: int = 3
) -> Any:
    """Compares losses, every gradient and buffer over some steps; returns the compiled model."""
    sgd = partial(torch.optim.SGD, lr=0.05)
    options: Any = {"calls": steps, "backend": backend, "optimizer": sgd, "fallback": "error"}
    return assert_equals_eager(model, inputs, use=used, **options).compiled


def slope(y: Tensor, x: Tensor) -> Tensor:
    (found,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return found


def penalty(self: Any, x: Tensor) -> Tensor:
    mixed = (0.3 * x + 0.7 * x.flip(0)).requires_grad_()
    distance = slope(self.net(mixed), mixed).norm(dim=-1) - 1
    return self.net(x).mean() + 10 * distance.square().mean()


def detached(self: Any, x: Tensor) -> Tensor:
    x, other = x.view_as(x).requires_grad_(), (x * 2).requires_grad_()
    u = self.net(x)
    g, nothing = torch.autograd.grad(u.sum(), (x, other), retain_graph=True, allow_unused=True)
    assert nothing is None and not g.requires_grad
    return (u * g.sum(-1, keepdim=True)).sum()


def of_an_intermediate(self: Any, x: Tensor) -> Tensor:
    h = self.net[:2](x)
    g = slope(self.net[2:](h).sum() + h.sum(), h)
    return (g.square() * h).sum()


def grad_of_grad(self: Any, x: Tensor) -> Tensor:
    inner = func.grad(lambda y: self.net(y).sin().sum())
    return func.grad(lambda y: inner(y).square().sum())(x).square().sum()


def fed_back(self: Any, x: Tensor) -> Tensor:
    """A direction depends on what moves: series cannot take the place of the plain calls."""
    u = self.net(x)
    shift = func.derivative(lambda y: self.net(y) * u, x, "x")
    return (shift + u).square().sum()


def curved(self: Any, x: Tensor) -> Tensor:
    x = x.view_as(x).requires_grad_()
    found = self.net(x)
    return found.square().mean() + slope(found, x).square().sum()


def inner_loss(self: Any, parameters: Any, x: Tensor) -> Tensor:
    return functional_call(self.net, parameters, (x,)).square().mean()


def maml(self: Any, x: Tensor) -> Tensor:
    """Two inner steps as torch.func writes them."""
    parameters = dict(self.net.named_parameters())
    for _ in range(2):
        slopes = torch.func.grad(partial(inner_loss, self))(parameters, x)
        parameters = {name: p - 0.1 * slopes[name] for name, p in parameters.items()}
    return inner_loss(self, parameters, x.flip(0))


def their_grad_of_grad(self: Any, x: Tensor) -> Tensor:
    def inner(y: Tensor, scale: Tensor) -> Tensor:
        first, second = torch.func.grad(lambda a, b: (self.net(a) * b).sum(), (0, 1))(y, scale)
        return (first.square() * second).sum() + (y * x).sum()  # x is a constant here

    slopes, value = torch.func.grad_and_value(inner)(x, scale=x.sum(-1, keepdim=True))
    return slopes.square().sum() * value


def their_aux(self: Any, x: Tensor) -> Tensor:
    def inner(y: Tensor) -> tuple[Tensor, Any]:
        h = self.net(y)
        return h.sum(), {"h": h.detach()}

    with torch.no_grad():
        fixed, held = torch.func.grad(inner, has_aux=True)(x)
    slopes, (value, more) = torch.func.grad_and_value(inner, has_aux=True)(x)
    assert not fixed.requires_grad and not held["h"].requires_grad
    return (slopes * fixed).sum() * value + more["h"].sum()


def with_layers(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(2, WIDTH), nn.Tanh(), make(), nn.Linear(WIDTH, 1)
    return nn.Sequential(*layers).double()


FORWARDS: dict[str, tuple[Callable[..., Tensor], Callable[[], nn.Module]]] = {
    **{
        forward.__name__: (forward, network)
        for forward in (*(detached, grad_of_grad, fed_back, maml, their_grad_of_grad, their_aux),)
    },
    "of_an_intermediate": (of_an_intermediate, lambda: network(2)),
    "dropout": (curved, lambda: with_layers(lambda: nn.Dropout(0.4))),
    "batch norm": (curved, lambda: with_layers(lambda: nn.BatchNorm1d(WIDTH))),
}


@pytest.mark.parametrize("name", FORWARDS)
def test_a_forward_that_differentiates_trains_like_eager(name: str) -> None:
    forward, make = FORWARDS[name]
    assert_trains_like_eager(of_forward(forward, make()), tensor(5, 2))


def test_a_forward_that_differentiates_has_generated_kernels() -> None:
    assert_trains_like_eager(of_forward(penalty, network()), tensor(5, 2), backend="inductor")


def residual_network(num_layers: int) -> nn.Module:
    torch.manual_seed(0)
    kind = block(lambda self, x: x + self.linear(x).tanh())
    layers = [kind(linear=nn.Linear(WIDTH, WIDTH)) for _ in range(num_layers)]
    return nn.Sequential(nn.Linear(2, WIDTH), *layers, nn.Linear(WIDTH, 1)).double()


def test_each_different_block_is_differentiated_once_at_each_order() -> None:
    closures = []
    for num_layers in (2, 3):
        model = of_forward(curved, residual_network(num_layers))
        compiled = assert_trains_like_eager(model, tensor(5, 2), steps=1)
        closures.append(compiled.last_report.num_closures)
    assert closures[0] == closures[1]


def test_a_step_of_micro_batches_differentiates_inside() -> None:
    model = of_forward(curved, network(results=2))
    assert_equals_eager(model, [tensor(6, 2)], calls=1, door="step", micro_batches=2)


def test_a_path_that_no_call_shows_is_never_left_out() -> None:
    """What two arguments have in common before the call is not in the program: eager knows."""

    def forward(self: Any, x: Tensor, y: Tensor) -> Tensor:
        (g,) = torch.autograd.grad((self.net(x).sum() * y.sum()), x, create_graph=True)
        return g.square().sum()

    model = of_forward(forward, network())
    compiled = lazyinline.compile(model, backend="eager")
    x = tensor(5, 2).requires_grad_()
    torch.testing.assert_close(compiled(x, x * x), model(x, x * x))

    both = block(lambda self, x: (h := self.linear(x), h.exp()))

    def through(self: Any, x: Tensor) -> Tensor:
        total = x.new_zeros(())
        for layer in self.net:
            h, e = layer(x)
            total = total + slope(h * e, h).square().sum()
        return total

    model = of_forward(through, nn.ModuleList([both(linear=linear(2)) for _ in range(2)]))
    assert_equals_eager(model, [tensor(5, 2)], calls=1)


def test_blocks_that_differentiate_share_a_closure() -> None:
    def descended(self: Any, x: Tensor) -> Tensor:
        given = x.view_as(x)
        return x - 0.1 * slope(self.linear(given).exp(), given)

    def forward(self: Any, x: Tensor) -> Tensor:
        return self.net(x.requires_grad_()).square().sum()

    energy = block(descended)
    model = of_forward(forward, nn.Sequential(*(energy(linear=linear(2)) for _ in range(3))))
    compiled = assert_trains_like_eager(model, tensor(5, 2))
    assert compiled.last_report.num_block_calls == 3


UNARY: list[Callable[[Tensor], Tensor]] = [
    torch.sin,
    torch.tanh,
    lambda x: x * x,
    lambda x: x.flip(0) + 1,
    lambda x: x - x.mean(),
    lambda x: torch.softmax(x, -1),
    lambda x: x.t() @ x if x.shape[0] != x.shape[1] else x @ x.t(),
    torch.sigmoid,
    lambda x: x.cumsum(0) / 3,
]


def random_function(seed: int) -> Callable[[Tensor], Tensor]:
    """Returns a function that takes gradients of what it has computed, in between."""

    def function(x: Tensor) -> Tensor:
        draw = random.Random(seed)
        values = [x]
        for _ in range(draw.randint(4, 8)):
            kind = draw.random()
            value = draw.choice(values)
            if kind < 0.6:
                values.append(draw.choice(UNARY)(value))
            elif kind < 0.8:
                other = draw.choice([v for v in values if v.shape == value.shape])
                values.append(value * other if draw.random() < 0.5 else value + other)
            else:
                start = draw.choice(values).view_as(x) if draw.random() < 0.2 else x.view_as(x)
                inner = draw.choice(UNARY)(draw.choice(UNARY)(start))
                goal = (inner.sum() * value.sum()).sin() + inner.square().sum()
                (g,) = torch.autograd.grad(goal, start, create_graph=True)
                values.append(g)
        return sum((v.square().mean() for v in values), x.new_zeros(()))

    return function


@pytest.mark.parametrize("seed", range(120))
@pytest.mark.sweep(keep="[3]")
def test_random_forwards_that_differentiate_equal_eager(seed: int) -> None:
    function = random_function(seed)
    model = of_forward(lambda self, x: function(self.net(x)), linear(3, bias=False))
    x = tensor(3, 3, seed=seed + 1)
    try:
        copy.deepcopy(model)(x).backward()
    except RuntimeError:
        return  # asks for a gradient that eager does not have
    assert_equals_eager(model, [x], calls=1, tolerance=1e-7)


def cubic(x: Tensor) -> Tensor:
    return (x.sin() * x.roll(1) ** 3).sum()


def eager_backend(module: nn.Module) -> nn.Module:
    return lazyinline.compile(module, backend="eager", in_place=True)


def test_gradients_with_respect_to_several_arguments() -> None:
    def function(x: Tensor, pair: dict[str, Tensor], scale: float = 2.0) -> tuple[Tensor, Tensor]:
        return scale * (x * pair["a"]).sum() + pair["b"].exp().sum(), x.sin()

    args = tensor(3), {"a": tensor(3, seed=1), "b": tensor(3, seed=2)}
    found = eager_backend(func.grad(function, argnums=(0, 1), has_aux=True))(*args, scale=3.0)
    wanted = torch.func.grad(function, argnums=(0, 1), has_aux=True)(*args, scale=3.0)
    torch.testing.assert_close(found, wanted)


@pytest.mark.smoke
def test_vjp_jvp_and_hvp_are_as_in_pytorch() -> None:
    net, x, v = network(results=2), tensor(5, 2), tensor(5, 2, seed=1)

    def forward(self: Any, x: Tensor, v: Tensor) -> Any:
        value, back = func.vjp(self.net, x)
        product = func.hvp(lambda x: self.net(x).sin().sum(), x, v)
        return value, back(v), func.jvp(self.net, (x,), (v,)), product

    _, back = torch.func.vjp(net, x)
    wanted = (
        net(x),
        back(v),
        torch.func.jvp(net, (x,), (v,)),
        torch.autograd.functional.hvp(lambda x: net(x).sin().sum(), x, v),
    )
    model = of_forward(forward, net)
    compiled = lazyinline.compile(model, backend="eager", fallback="error")
    torch.testing.assert_close(compiled(x, v), wanted)
    torch.testing.assert_close(model(x, v), wanted)


@pytest.mark.smoke
@pytest.mark.usefixtures("eager_derivatives")
def test_a_hessian_computes_the_rows_it_is_asked_for_once() -> None:
    x, v = tensor(6), tensor(6, seed=1)
    hessian = func.hessian(cubic)(x)
    wanted = torch.func.hessian(cubic)(x)
    torch.testing.assert_close(hessian[2], wanted[2])
    torch.testing.assert_close(hessian[2, 3], wanted[2, 3])
    torch.testing.assert_close(hessian @ v, wanted @ v)
    assert set(hessian._rows) == {2}
    torch.testing.assert_close(hessian[1:3, ::2], wanted[1:3, ::2])
    torch.testing.assert_close(hessian.diagonal(), wanted.diagonal())
    torch.testing.assert_close(hessian.dense(), wanted)
    before = hessian._rows[2]
    assert torch.equal(hessian[2], before) and hessian._rows[2] is before
    in_reverse = func.hessian(cubic, mode="reverse")(x)
    torch.testing.assert_close(in_reverse.dense(), wanted)


@pytest.mark.usefixtures("eager_derivatives")
def test_a_hessian_of_what_forward_mode_cannot_follow() -> None:
    x = tensor(3, 3) + 3 * torch.eye(3)

    def function(x: Tensor) -> Tensor:
        return torch.linalg.det(x).square()

    wanted = torch.func.hessian(function)(x)
    hessian = func.hessian(function)(x)
    torch.testing.assert_close(hessian[1], wanted[1])
    torch.testing.assert_close(hessian.dense(), wanted)
    torch.testing.assert_close(hessian.diagonal(), wanted.reshape(9, 9).diagonal().reshape(3, 3))


def matrix_calls(matrix: Tensor, *, is_symmetric: bool) -> tuple[Jacobian, list[str]]:
    """Returns a Jacobian that is a matrix, and a list that its products are noted in."""
    calls: list[str] = []

    def noted(name: str, function: Any) -> Any:
        def product(given: Tensor) -> Tensor:
            calls.append(f"{name} {tuple(given.shape)}")
            return function(given)

        return product

    row = None if is_symmetric else noted("row", lambda v: v @ matrix)
    columns = noted("columns", lambda v: v @ matrix.t())
    like = matrix.new_empty(matrix.shape[1])
    return Jacobian((row, columns), (len(matrix),), like=like), calls


def test_many_rows_of_a_hessian_are_computed_at_once_in_equal_groups() -> None:
    whole = tensor(70, 70)
    whole = whole + whole.t()
    hessian, calls = matrix_calls(whole, is_symmetric=True)
    assert torch.equal(hessian[5], whole[5])
    assert torch.equal(hessian[7:9], whole[7:9])  # two of 35 are not worth a group
    assert torch.equal(hessian.dense(), whole)
    assert calls == ["columns (1, 70)"] * 3 + ["columns (35, 70)"] * 2
    assert torch.equal(hessian.dense(), whole) and len(calls) == 5
    other, calls = matrix_calls(whole, is_symmetric=True)
    assert torch.equal(other.diagonal(), whole.diagonal()) and not other._rows
    assert calls == ["columns (35, 70)"] * 2


def test_a_jacobian_is_computed_by_columns_where_that_costs_less() -> None:
    tall = tensor(9, 4)
    jacobian, calls = matrix_calls(tall, is_symmetric=False)
    assert torch.equal(jacobian[2], tall[2])
    assert torch.equal(jacobian.dense(), tall)
    assert calls == ["row (9,)", "columns (4, 4)"]
    wide, calls = matrix_calls(tall.t(), is_symmetric=False)
    assert torch.equal(wide[:2], tall.t()[:2]) and calls == ["row (4,)"] * 2


@pytest.mark.usefixtures("eager_derivatives")
def test_a_jacobian_of_any_shape() -> None:
    weight, x, v = tensor(4, 6), tensor(6, seed=1), tensor(6, seed=2)

    def function(x: Tensor) -> Tensor:
        return torch.tanh(weight @ x).reshape(2, 2)

    jacobian, wanted = func.jacobian(function)(x), torch.func.jacrev(function)(x)
    assert jacobian.shape == wanted.shape
    torch.testing.assert_close(jacobian[1], wanted[1])
    torch.testing.assert_close(jacobian[-1, :, 2:4], wanted[-1, :, 2:4])
    torch.testing.assert_close(jacobian @ v, wanted @ v)
    torch.testing.assert_close(
        tensor(2, 2) @ jacobian, torch.einsum("ab,abi", tensor(2, 2), wanted)
    )
    torch.testing.assert_close(jacobian.dense(), wanted)
    with pytest.raises(PlanError, match="square"):
        jacobian.diagonal()
    with pytest.raises(PlanError, match=r"shape \(6,\), not \(2,\)"):
        jacobian @ tensor(2)


@pytest.mark.smoke
def test_a_laplacian_of_several_results_or_of_one_number_for_each_point() -> None:
    """What `test_modes` has for one result, and coordinates by other names."""
    net, points = network(results=2), tensor(7, 2)
    hessians = torch.vmap(torch.func.hessian(net))(points)
    wanted = hessians.diagonal(dim1=-2, dim2=-1).sum(-1)
    torch.testing.assert_close(eager_backend(func.laplacian(net))(points), wanted)
    named = func.derivative(net, points, "xt", coordinates="xt")
    torch.testing.assert_close(named, hessians[..., 0, 1])
    one = eager_backend(func.laplacian(lambda x: x.square().sum(-1)))
    torch.testing.assert_close(one(points), torch.full((7,), 4.0, dtype=torch.float64))


@pytest.mark.usefixtures("eager_derivatives")
def test_mistakes_are_told_with_what_to_do() -> None:
    x = tensor(3, 2)
    with pytest.raises(PlanError, match=r"scalar, not \(3, 2\)"):
        func.grad(torch.sin)(x)
    with pytest.raises(PlanError, match="argument 2 of 1"):
        func.grad(cubic, argnums=2)(x)
    with pytest.raises(PlanError, match="named x, y"):
        func.derivative(torch.sin, x, "xt")
    with pytest.raises(PlanError, match="numbers for each of them"):
        func.laplacian(lambda x: x.sum())(x)
    with pytest.raises(PlanError, match="a tangent for each primal"):
        func.jvp(torch.sin, (x,), (x[0],))


def test_the_report_names_what_has_no_rule_in_taylor_mode() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return func.laplacian(lambda y: torch.special.i0(self.net(y)))(x).square().mean()

    compiled = assert_trains_like_eager(of_forward(forward, network()), tensor(4, 2))
    (named,) = compiled.last_report.nested_forward
    assert "i0" in named and "test_func.py" in named
    assert "no Taylor rule, forward mode nested" in str(compiled.last_report)


def determinants(points: Tensor) -> Tensor:
    size = points.shape[-1]
    eye = torch.eye(size, dtype=points.dtype)
    return torch.linalg.det(points.unsqueeze(-1) * points.unsqueeze(-2) + eye)


def test_a_laplacian_of_what_forward_mode_is_wrong_for_runs_eagerly_and_names_it() -> None:
    x = tensor(4, 3)
    laplacian = func.laplacian(determinants, mode="taylor")
    # det(I + x x^T) is 1 + |x|^2
    torch.testing.assert_close(laplacian(x), torch.full((4,), 6.0, dtype=x.dtype))
    why = str(lazyinline.last_report(laplacian).ran_eagerly)  # type: ignore[union-attr]
    assert "_linalg_det" in why and "test_func.py" in why and "determinants" in why


def test_what_does_not_move_has_zero_series() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return func.laplacian(lambda y: y + 0 * self.net(x))(x).sum() + self.net(x).sum()

    assert_trains_like_eager(of_forward(forward, network()), tensor(4, 2), steps=1)


def test_a_model_that_draws_between_runs_eagerly() -> None:
    """Also where it cannot be captured for another reason, and its parts could be compiled."""

    def forward(self: Any, x: Tensor) -> Tensor:
        return func.laplacian(self.net, mode="taylor")(x).sum()

    def branching(self: Any, x: Tensor) -> Tensor:
        x = x.view_as(x).requires_grad_()
        (g,) = torch.autograd.grad(self.net(x).sum(), x, create_graph=True)
        return g.square().sum() if g.sum() < 1e9 else g.sum()

    net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Dropout(0.5), nn.Linear(4, 1)).double()
    for of, reason in ((forward, "draws random numbers"), (branching, "value of a tensor")):
        net.zero_grad()
        told = assert_equals_eager(of_forward(of, net), (tensor(4, 2),), calls=1).told
        assert reason in told.ran_eagerly


class Parts(nn.Module):
    """A Jacobian and a Hessian by parts, each asked for in another way."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.4), nn.Tanh(), nn.Linear(4, 3))
        self.net.double()

    def energy(self, x: Tensor) -> Tensor:
        result: Tensor = self.net(x).pow(3).sum()
        return result

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        unit = torch.eye(4, dtype=x.dtype)
        jacobian, hessian = func.jacobian(self.net)(x), func.hessian(self.energy)(x)
        of_jacobian = (jacobian[0], jacobian @ unit[1], unit[2, :3] @ jacobian, jacobian.dense())
        return (*of_jacobian, *(hessian[1], hessian @ unit[2], hessian.diagonal(), hessian.dense()))


@pytest.mark.parametrize("is_captured", [False, True])
@pytest.mark.usefixtures("eager_derivatives")
@pytest.mark.sweep(keep="True")
def test_all_parts_of_a_jacobian_are_of_the_draws_of_one_run(*, is_captured: bool) -> None:
    model, x = Parts(), tensor(4)
    torch.manual_seed(0)
    found = (lazyinline.compile(model, backend="eager") if is_captured else model)(x)
    after = torch.rand(3)

    torch.manual_seed(0)
    inputs = x.clone().requires_grad_()
    result = model.net(inputs)
    jacobian = torch.stack([torch.autograd.grad(y, inputs, retain_graph=True)[0] for y in result])
    (slope,) = torch.autograd.grad(model.energy(inputs), inputs, create_graph=True)
    hessian = torch.stack([torch.autograd.grad(s, inputs, retain_graph=True)[0] for s in slope])
    assert torch.equal(after, torch.rand(3))
    of_jacobian = (jacobian[0], jacobian[:, 1], jacobian[2], jacobian)
    wanted = (*of_jacobian, hessian[1], hessian[2], hessian.diagonal(), hessian)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("wants_grad", [False, True])
def test_gradients_by_torch_func_ask_for_gradients_where_pytorchs_do(wants_grad: bool) -> None:
    def forward(self: Any, x: Tensor) -> tuple[Tensor, ...]:
        slopes, value = torch.func.grad_and_value(lambda y: (y.sin() * y).sum())(x)
        return slopes, value, torch.func.grad(lambda y: (self.weight * y).sum())(x)

    model = Made(forward, weight=nn.Parameter(tensor(2)))
    args = (tensor(4, 2).requires_grad_(wants_grad),)
    assert_equals_eager(model, args, calls=1, fallback="error")


@pytest.mark.parametrize(
    ("function", "why"),
    [(lambda y: y.sin(), "scalar Tensor"), (lambda y: y.sum().item(), "return a Tensor")],
)
def test_what_torch_func_refuses_is_its_error(function: Any, why: str) -> None:
    model = of_forward(lambda self, x: torch.func.grad(function)(x), network())
    with pytest.raises(RuntimeError, match=why):
        lazyinline.compile(model, backend="eager")(tensor(4, 2))


def test_a_map_of_gradients_runs_eagerly() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return torch.func.vmap(torch.func.grad(lambda row: self.net(row).sum()))(x)

    told = assert_equals_eager(of_forward(forward, network()), [tensor(4, 2)], calls=1).told
    assert "torch.func" in told.ran_eagerly
