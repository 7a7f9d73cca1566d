"""What a model returns besides tensors is what eager returns: the same class, the same object."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lazyinline

SHARED: dict[str, Any] = {"list": [1, 2]}


class Returns(nn.Module):
    def __init__(self, result: Callable[..., Any]) -> None:
        super().__init__()
        self.result = result
        self.table = {"a": 1}
        self.nested = {"a": [1]}

    def forward(self, x: Tensor, *more: Any) -> Any:
        return self.result(self, x * 2, *more)


def twice(module: nn.Module, x: Tensor) -> Any:
    both = [x]
    return both, both


SAME_OBJECT: dict[str, tuple[Callable[..., Any], Callable[[Any, nn.Module, Any], bool]]] = {
    "argument": (lambda m, x, given: (x, given), lambda r, m, given: r[1] is given),
    "in an argument": (lambda m, x, given: (x, given[0]), lambda r, m, given: r[1] is given[0]),
    "attribute": (lambda m, x, given: (x, m.table), lambda r, m, given: r[1] is m.table),
    "in one": (lambda m, x, given: [x, m.nested["a"]], lambda r, m, given: r[1] is m.nested["a"]),
    "global": (lambda m, x, given: (x, SHARED), lambda r, m, given: r[1] is SHARED),
    "in a global": (
        lambda m, x, given: {"x": x, "n": SHARED["list"]},
        lambda r, m, given: r["n"] is SHARED["list"],
    ),
    "twice": (lambda m, x, given: twice(m, x), lambda r, m, given: r[0] is r[1]),
}


@pytest.mark.parametrize("way", SAME_OBJECT)
@pytest.mark.filterwarnings("ignore:.*runs eagerly")
def test_a_returned_list_is_the_one_that_eager_returns(way: str) -> None:
    result, is_same = SAME_OBJECT[way]
    model = Returns(result)
    given = [[torch.ones(2)]]
    run = lazyinline.compile(model, backend="eager")
    for _ in range(2):
        assert is_same(run(torch.ones(3), given), model, given)


SAME_CLASS: dict[str, Callable[..., Any]] = {
    "shape": lambda m, x, *more: (x, x.shape),
    "shape alone": lambda m, x, *more: x.shape,
    "shape in a list": lambda m, x, *more: [x, {"size": x.size()}],
    "strides": lambda m, x, *more: (x, x.stride()),
    "new lists": lambda m, x, *more: [[x], [x], {"a": [x]}],
    "ordered": lambda m, x, *more: collections.OrderedDict(b=x, a=x.shape),
    "default": lambda m, x, *more: collections.defaultdict(list, a=[x]),
    "given shape": lambda m, x, size: (x, size.numel(), size),
}


def classes(value: Any) -> Any:
    if isinstance(value, dict):
        return type(value), {key: classes(held) for key, held in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value), [classes(held) for held in value]
    return type(value)


@pytest.mark.parametrize("way", SAME_CLASS)
def test_a_result_has_the_classes_that_eager_gives_it(way: str) -> None:
    model = Returns(SAME_CLASS[way])
    run = lazyinline.compile(model, backend="eager", fallback="error")
    for length in (3, 4, 5):  # the last two by one program, whose sizes are symbols
        x = torch.ones(length, 2)
        found, wanted = run(x, x.shape), model(x, x.shape)
        assert classes(found) == classes(wanted)
        torch.testing.assert_close(found, wanted)
