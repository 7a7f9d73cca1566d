"""Code of PyTorch's, of a class or behind a cache that is replaced: the next call runs it."""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lazyinline

FACTOR = 2.0


class Net(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function, self.inner = function, nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.inner(x))


class Doubling:
    def __call__(self, x: Tensor) -> Tensor:
        return x * 2


def tripled(x: Tensor, *args: Any) -> Tensor:
    return torch.mul(x, 3)


Place = tuple[Any, str, Callable[[Tensor], Tensor]]
PLACES: dict[str, Place] = {
    "a function": (F, "gelu", lambda x: F.gelu(x)),
    "a function in torch": (torch, "sigmoid", lambda x: torch.sigmoid(x)),
    "a method of a tensor, in C": (Tensor, "relu", lambda x: x.relu()),
    "a method of a tensor, in Python": (Tensor, "norm", lambda x: x.norm()),
    "an operator of a tensor": (Tensor, "__mul__", lambda x: x * x),
}
REPLACED: dict[str, Any] = {
    "a partial": functools.partial(tripled),
    "an object": Doubling(),
    "a function": tripled,
    "another partial": functools.partial(torch.add, torch.ones(3)),
}


CASES = [
    (name, by)
    for name, (owner, _, _) in PLACES.items()
    for by in REPLACED
    if owner in (F, torch) or (owner is Tensor and by == "a function")  # others are no methods
]


@pytest.mark.parametrize(("name", "by"), CASES)
def test_what_takes_the_place_of_pytorchs_code_is_run_and_so_is_what_comes_back(
    name: str, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, attribute, function = PLACES[name]
    model = Net(function)
    compiled, x = lazyinline.compile(model, backend="eager"), torch.randn(2, 3)
    for replaced in (False, True, False, True):
        with monkeypatch.context() as patch:
            if replaced:
                patch.setattr(owner, attribute, REPLACED[by])
            assert torch.equal(compiled(x), model(x)), replaced


def test_a_method_of_pytorchs_layers_that_is_replaced_is_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = nn.Sequential(nn.Conv2d(1, 1, 1), nn.ReLU())
    compiled, x = lazyinline.compile(model, backend="eager"), torch.randn(1, 1, 3, 3)
    for replaced in (False, True, False):
        with monkeypatch.context() as patch:
            if replaced:
                patch.setattr(nn.Conv2d, "_conv_forward", lambda self, x, *_: x * 5)
            assert torch.equal(compiled(x), model(x)), replaced


class Shape(abc.ABC):  # noqa: B024
    pass


class Other:
    pass


OTHER = Other()


def test_a_class_that_is_registered_with_an_abstract_one_is_noticed() -> None:
    model = Net(lambda x: x * 2 if isinstance(OTHER, Shape) else x)
    compiled, x = lazyinline.compile(model, backend="eager"), torch.randn(2, 3)
    assert torch.equal(compiled(x), model(x))
    Shape.register(Other)
    assert torch.equal(compiled(x), model(x))
    assert not compiled.last_report.ran_eagerly


@functools.lru_cache
def cached_factor(power: int) -> float:
    return FACTOR**power


@functools.cache
def cached_alone() -> float:
    return FACTOR


class Cached(Net):
    @functools.lru_cache  # noqa: B019
    def factor(self) -> float:
        return FACTOR

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.factor()


CACHES: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "with an argument": (lambda: Net(lambda x: x * cached_factor(2)), cached_factor),
    "with none": (lambda: Net(lambda x: x * cached_alone()), cached_alone),
    "a method": (lambda: Cached(lambda x: x), Cached.factor),
}


@pytest.mark.parametrize("is_hit", [True, False])
@pytest.mark.parametrize("name", CACHES)
def test_what_a_cache_keeps_is_used_until_it_is_cleared(name: str, is_hit: bool) -> None:
    build, cache = CACHES[name]
    model, x = build(), torch.randn(2, 3)
    compiled = lazyinline.compile(model, backend="eager")
    cache.cache_clear()
    globals()["FACTOR"] = 2.0
    if is_hit:
        model(x)
    try:
        for factor, clears in ((2.0, False), (3.0, False), (3.0, True), (4.0, True), (4.0, False)):
            globals()["FACTOR"] = factor
            if clears:
                cache.cache_clear()
            found = compiled(x)
            assert torch.equal(found, model(x)), (factor, clears)
    finally:
        globals()["FACTOR"] = 2.0
        cache.cache_clear()


def test_a_function_that_is_registered_for_a_class_is_run() -> None:
    @functools.singledispatch
    def scale(value: Any, x: Tensor) -> Tensor:
        return x

    model = Net(lambda x: scale(OTHER, x))
    compiled, x = lazyinline.compile(model, backend="eager"), torch.randn(2, 3)
    assert torch.equal(compiled(x), model(x))
    scale.register(Other, lambda value, x: x * 7)
    assert torch.equal(compiled(x), model(x))
    scale.register(Other, lambda value, x: x * 8)
    assert torch.equal(compiled(x), model(x))
