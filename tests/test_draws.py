"""Every random operator draws what eager draws from one seed, and leaves the generator alike."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lazyinline

F = nn.functional

INTO: dict[str, Callable[[Tensor], Any]] = {
    "normal_": lambda t: t.normal_(),
    "uniform_": lambda t: t.uniform_(),
    "bernoulli_": lambda t: t.bernoulli_(0.3),
    "bernoulli_ of a tensor": lambda t: t.bernoulli_(t.detach().abs().clamp(0, 1)),
    "exponential_": lambda t: t.exponential_(),
    "geometric_": lambda t: t.geometric_(0.3),
    "log_normal_": lambda t: t.log_normal_(),
    "cauchy_": lambda t: t.cauchy_(),
    "random_": lambda t: t.random_(),
    "random_ to": lambda t: t.random_(9),
    "random_ from": lambda t: t.random_(3, 9),
}
NEW: dict[str, Callable[[Tensor], Any]] = {
    "rand": lambda t: torch.rand(t.shape),
    "randn": lambda t: torch.randn(t.shape),
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "randint_like": lambda t: torch.randint_like(t, 3, 9),
    "randint": lambda t: torch.randint(0, 9, t.shape),
    "randperm": lambda t: torch.randperm(t.shape[0]),
    "multinomial": lambda t: torch.multinomial(t.abs() + 0.1, 2),
    "multinomial with replacement": lambda t: torch.multinomial(t.abs() + 0.1, 5, True),
    "bernoulli": lambda t: torch.bernoulli(t.abs().clamp(0, 1)),
    "bernoulli of a number": lambda t: torch.bernoulli(t, 0.3),
    "poisson": lambda t: torch.poisson(t.abs()),
    "binomial": lambda t: torch.binomial(t.abs().round() + 3, t.abs().clamp(0, 1)),
    "gamma": lambda t: torch._standard_gamma(t.abs() + 0.1),
    "dirichlet": lambda t: torch._sample_dirichlet(t.abs() + 0.1),
    "normal of deviations": lambda t: torch.normal(0.0, t.abs()),
    "normal of means": lambda t: torch.normal(t, 1.0),
    "normal of both": lambda t: torch.normal(t, t.abs()),
    "normal of a shape": lambda t: torch.normal(0.0, 1.0, t.shape),
    "rrelu": lambda t: F.rrelu(t, training=True),
    "rrelu in place": lambda t: F.rrelu_(t * 1, training=True),
    "dropout": lambda t: F.dropout(t, 0.3),
    "dropout in place": lambda t: F.dropout(t * 1, 0.3, inplace=True),
    "dropout1d": lambda t: F.dropout1d(t, 0.3),
    "dropout2d": lambda t: F.dropout2d(t[None, None], 0.3),
    "alpha_dropout": lambda t: F.alpha_dropout(t, 0.3, True),
    "feature_alpha_dropout": lambda t: F.feature_alpha_dropout(t, 0.3, True),
    "native_dropout": lambda t: torch.native_dropout(t, 0.3, True)[0],
    "gumbel_softmax": lambda t: F.gumbel_softmax(t),
    "attention": lambda t: F.scaled_dot_product_attention(t[None], t[None], t[None], dropout_p=0.3),
}
LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "plain": lambda: torch.randn(17, 16),
    "transposed": lambda: torch.randn(16, 17).t(),
    "with gaps": lambda: torch.randn(17, 32)[:, ::2],
    "repeated": lambda: torch.randn(17, 1).expand(17, 16),
    "few": lambda: torch.randn(5, 4),
    "few with gaps": lambda: torch.randn(5, 8)[:, ::2],
    "double, transposed": lambda: torch.randn(16, 17, dtype=torch.float64).t(),
    "bfloat16, with gaps": lambda: torch.randn(17, 32).bfloat16()[:, ::2],
}
PLACES: dict[str, Callable[[Tensor, Callable[[Tensor], Any]], Any]] = {
    "input": lambda x, draw: draw(x),
    "transposed inside": lambda x, draw: draw((x + 1).t()),
    "view inside": lambda x, draw: draw((torch.cat([x, x], -1) + 0)[:, ::2]),
}


class Drawing(nn.Module):
    """Draws one number after another at a place."""

    def __init__(self, place: str, *draws: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.draws, self.place = draws, place

    def forward(self, x: Tensor) -> Any:
        return [PLACES[self.place](x, draw) for draw in self.draws], torch.rand(2)


def assert_draws_as_eager(model: Drawing, layout: str) -> None:
    found = []
    for run in (lazyinline.compile(model, backend="eager"), model):
        torch.manual_seed(3)
        inputs = [LAYOUTS[layout]() for _ in range(2)]
        results: list[Any] = []
        for seed, x in enumerate(inputs):
            torch.manual_seed(seed)
            try:
                with torch.no_grad():
                    drawn, last = run(x)
                results += [*drawn, last]
            except (RuntimeError, NotImplementedError) as error:
                results.append(type(error))
            results += [x, torch.get_rng_state()]
        found.append(results)
    for index, (one, other) in enumerate(zip(*found, strict=True)):
        is_same = one is other or (one.dtype == other.dtype and torch.equal(one, other))
        assert is_same, f"result {index}"


# Without normal_: where it draws in an order of its own, all of a model runs eagerly.
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.sweep(keep=["[plain-input", "[with gaps-input", "[few with gaps-view"])
def test_random_operators_in_a_row_draw_as_eager_from_one_seed(layout: str, place: str) -> None:
    draws = [*NEW.values(), *(INTO[name] for name in INTO if name != "normal_")]
    assert_draws_as_eager(Drawing(place, *draws), layout)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", [*INTO, *NEW])
@pytest.mark.sweep(keep=["[normal_-plain", "[normal_-with gaps", "[normal_-few-i", "[rand-plain-i"])
def test_a_random_operator_draws_as_eager_from_one_seed(name: str, layout: str, place: str) -> None:
    assert_draws_as_eager(Drawing(place, {**INTO, **NEW}[name]), layout)
